"""Gemma 3, text only (arXiv:2503.19786): five sliding layers to a full one, two rotary bases, norms around each block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from astrai_runtime.model import _gguf, _hf
from astrai_runtime.model._keys import Keys
from astrai_runtime.model._rope_spec import rope_of_parameters
from astrai_runtime.model._sizes import Sizes
from astrai_runtime.model.base import Architecture, DecoderSpec, LayerSpec, RopeSpec, TensorSource

PATTERN = 6  # every sixth layer sees the whole context
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
HF_NAMES = {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


class Gemma3(Architecture):
    hf_classes = ("Gemma3ForCausalLM",)
    gguf_names = ("gemma3",)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        keys, n = Keys(config), _hf.sizes(config, activation_key="hidden_activation", head_dim=256, tied_head=True)
        keys.refuse("final_logit_softcapping", "soft caps are not supported; Gemma 3 has none")
        keys.refuse("attn_logit_softcapping", "soft caps are not supported; Gemma 3 has none")
        keys.refuse("use_bidirectional_attention", "only causal attention is supported")
        pattern = keys.count("sliding_window_pattern", keys.count("_sliding_window_pattern", PATTERN))
        window = keys.count("sliding_window", 4096)
        sliding = [(i + 1) % pattern != 0 for i in range(n.n_layers)]
        full, local = _ropes(keys, n.head_dim, n.context)
        scalar = keys.number("query_pre_attn_scalar", 256.0)
        layer = _layer(n, full, scalar, biased=keys.flag("attention_bias", False))
        layers = _alternate(layer, local, _hf.windows(config, n.n_layers, window, sliding))
        return n.decoder("gemma3", layers, norm_offset=1.0, embedding_scale=n.hidden_size**0.5)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        keys = _gguf.keys_of(metadata, "gemma3")
        n = _gguf.sizes(keys, tensors, "gelu_tanh")
        keys.refuse("final_logit_softcapping", "soft caps are not supported; Gemma 3 has none")
        keys.refuse("attn_logit_softcapping", "soft caps are not supported; Gemma 3 has none")
        full = _gguf.rope(keys, tensors, n.head_dim, n.context, GLOBAL_THETA)
        local = RopeSpec(keys.number("rope.freq_base_swa", LOCAL_THETA), full.dim)
        # The format has no key for query_pre_attn_scalar: it is the head size but in the 27B, the one with 62 layers.
        scalar = n.hidden_size / n.n_heads if n.n_layers == 62 else n.head_dim
        pattern, window = keys.get("attention.sliding_window_pattern"), keys.count("attention.sliding_window")
        if isinstance(pattern, list | tuple):
            slides = [bool(one) for one in pattern]
        else:
            every = keys.count("attention.sliding_window_pattern", PATTERN)
            slides = [(i + 1) % every != 0 for i in range(n.n_layers)]
        if len(slides) != n.n_layers:
            raise keys.wrong("attention.sliding_window_pattern", pattern, f"one value for each of {n.n_layers} layers")
        windows = [window if slide else None for slide in slides]
        # The converter has added the norms' offset of 1 already.
        return n.decoder("gemma3", _alternate(_layer(n, full, scalar), local, windows), embedding_scale=n.hidden_size**0.5)

    @classmethod
    def hf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _hf.tensor_names(spec, HF_NAMES)

    @classmethod
    def gguf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _gguf.tensor_names(spec)


def _ropes(keys: Keys, head_dim: int, context: int) -> tuple[RopeSpec, RopeSpec]:
    """(full layers, sliding layers): nested `rope_parameters`, or the older flat keys that they replaced."""
    nested = keys.get("rope_parameters") or {}
    if nested and not set(nested) <= {"full_attention", "sliding_attention"}:
        raise keys.wrong("rope_parameters", nested, "'full_attention' and 'sliding_attention'")
    full = {
        "rope_theta": keys.number("rope_theta", GLOBAL_THETA),
        **(nested.get("full_attention") or {}),
        **(keys.get("rope_scaling") or {}),
    }
    local = {"rope_theta": keys.number("rope_local_base_freq", LOCAL_THETA), **(nested.get("sliding_attention") or {})}
    return rope_of_parameters(full, head_dim, context), rope_of_parameters(local, head_dim, context)


def _layer(n: Sizes, rope: RopeSpec, query_scalar: float, *, biased: bool = False) -> LayerSpec:
    return n.layer(rope, scale=query_scalar**-0.5, qkv_bias=biased, o_bias=biased, qk_norm=True, post_norms=True)


def _alternate(layer: LayerSpec, local: RopeSpec, windows: list[int | None]) -> tuple[LayerSpec, ...]:
    return tuple(layer if window is None else replace(layer, window=window, rope=local) for window in windows)


PART = Gemma3
