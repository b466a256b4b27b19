"""Llama and Mistral (arXiv:2302.13971, arXiv:2310.06825): RMSNorm, rotary halves, SwiGLU, grouped key/value heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astrai_runtime.model import _gguf, _hf
from astrai_runtime.model._keys import Keys
from astrai_runtime.model._rope_spec import rope_of_config
from astrai_runtime.model.base import Architecture, DecoderSpec, TensorSource


class Llama(Architecture):
    hf_classes = ("LlamaForCausalLM", "MistralForCausalLM")
    gguf_names = ("llama",)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        keys, n = Keys(config), _hf.sizes(config)
        mistral = "MistralForCausalLM" in (config.get("architectures") or ())
        biased = not mistral and keys.flag("attention_bias", False)
        # Mistral's window is 4096 unless the key says otherwise, and a null switches it off; Llama has none.
        sliding = mistral and (keys.get("sliding_window") is not None or not keys.has("sliding_window"))
        layer = n.layer(
            rope_of_config(config, n.head_dim, n.context),
            window=keys.count("sliding_window", 4096) if sliding else None,
            qkv_bias=biased,
            o_bias=biased,
            mlp_bias=not mistral and keys.flag("mlp_bias", False),
        )
        return n.decoder("llama", [layer] * n.n_layers)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        keys = _gguf.keys_of(metadata, "llama")
        n = _gguf.sizes(keys, tensors)
        layer = n.layer(
            _gguf.rope(keys, tensors, n.head_dim, n.context),
            window=keys.count("attention.sliding_window") if keys.get("attention.sliding_window") else None,
            **_gguf.biases(tensors),
        )
        return n.decoder("llama", [layer] * n.n_layers)

    @classmethod
    def hf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _hf.tensor_names(spec)

    @classmethod
    def gguf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _gguf.tensor_names(spec, interleaved=True)


PART = Llama
