"""Qwen3 (arXiv:2505.09388): Llama with a norm over each query and key head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from astrai_runtime.model import _gguf, _hf
from astrai_runtime.model._keys import Keys
from astrai_runtime.model._rope_spec import rope_of_config
from astrai_runtime.model.base import Architecture, DecoderSpec, TensorSource


class Qwen3(Architecture):
    hf_classes = ("Qwen3ForCausalLM",)
    gguf_names = ("qwen3",)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        keys, n = Keys(config), _hf.sizes(config, head_dim=128)
        biased = keys.flag("attention_bias", False)
        rope = rope_of_config(config, n.head_dim, n.context)
        layer = n.layer(rope, qkv_bias=biased, o_bias=biased, qk_norm=True)
        return n.decoder("qwen3", [replace(layer, window=window) for window in _hf.qwen_windows(config, n.n_layers)])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        keys = _gguf.keys_of(metadata, "qwen3")
        n = _gguf.sizes(keys, tensors)
        layer = n.layer(_gguf.rope(keys, tensors, n.head_dim, n.context), qk_norm=True, **_gguf.biases(tensors))
        return n.decoder("qwen3", [layer] * n.n_layers)

    @classmethod
    def hf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _hf.tensor_names(spec)

    @classmethod
    def gguf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _gguf.tensor_names(spec)


PART = Qwen3
