"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from astrai_runtime.model import _gguf, _hf
from astrai_runtime.model._rope_spec import rope_of_config
from astrai_runtime.model.base import Architecture, DecoderSpec, TensorSource


class Qwen2(Architecture):
    hf_classes = ("Qwen2ForCausalLM",)
    gguf_names = ("qwen2",)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        n = _hf.sizes(config)
        layer = n.layer(rope_of_config(config, n.head_dim, n.context), qkv_bias=True)
        return n.decoder("qwen2", [replace(layer, window=window) for window in _hf.qwen_windows(config, n.n_layers)])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        keys = _gguf.keys_of(metadata, "qwen2")
        n = _gguf.sizes(keys, tensors)
        layer = n.layer(_gguf.rope(keys, tensors, n.head_dim, n.context), qkv_bias=True)
        return n.decoder("qwen2", [layer] * n.n_layers)

    @classmethod
    def hf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _hf.tensor_names(spec)

    @classmethod
    def gguf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        return _gguf.tensor_names(spec)


PART = Qwen2
