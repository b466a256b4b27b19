"""An architecture is data: a DecoderSpec says what a decoder computes, an Architecture reads it from a model's files.

The torch interpreter in `_torch.py` runs any spec and is the reference; native programs run the same spec.

Canonical tensor names (shapes as [out, in], like torch's linear):
    embed.weight [V, C]    final_norm.weight [C]    head.weight [V, C] (absent when tied)
    layers.{i}.attn_norm.weight [C]            layers.{i}.mlp_norm.weight [C]
    layers.{i}.q.weight [H*D, C]  .k.weight [K*D, C]  .v.weight [K*D, C]  .o.weight [C, H*D]   and .bias where declared
    layers.{i}.q_norm.weight [D]  .k_norm.weight [D]                           (qk_norm)
    layers.{i}.gate.weight [F, C]  .up.weight [F, C]  .down.weight [C, F]      and .bias where declared
    layers.{i}.post_attn_norm.weight [C]  .post_mlp_norm.weight [C]            (post_norms)
    rope_factors.weight [dim / 2]                                              (rope kind "factors")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from astrai_runtime.attention.base import AttentionShape


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the first `dim` of a head's features, rotating halves (GPT-NeoX order).

    Sources: RoFormer, arXiv:2104.09864; linear scaling; llama3 scaling (Llama 3.1 release); YaRN, arXiv:2309.00071.
    `parameters` are the scaling's own numbers under the names of config.json (factor, low_freq_factor, ...), defaults
    filled in; `attention_factor` multiplies cosine and sine. Kind "factors": each frequency is divided by its number in
    the tensor `rope_factors.weight` (how GGUF files carry llama3 scaling).
    """

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    parameters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: pre-norm attention and a gated MLP, each with a residual connection."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeSpec
    scale: float  # of the attention scores; usually head_dim ** -0.5
    window: int | None = None  # sliding window in tokens, None: full attention
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma: a norm after attention and after the MLP, before the residual is added


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder-only transformer."""

    architecture: str  # name of the file in model/
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    context: int  # positions that the model was trained for
    tied_head: bool
    norm_offset: float = 0.0  # RMSNorm multiplies by (offset + weight)
    embedding_scale: float = 1.0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every canonical tensor that this decoder needs, with its shape."""
        C = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, C)}
        for i, layer in enumerate(self.layers):
            q, kv, F = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim, layer.intermediate_size
            sizes = {"q": (q, C), "k": (kv, C), "v": (kv, C), "o": (C, q), "gate": (F, C), "up": (F, C), "down": (C, F)}
            biased = (
                ({"q", "k", "v"} if layer.qkv_bias else set())
                | ({"o"} if layer.o_bias else set())
                | ({"gate", "up", "down"} if layer.mlp_bias else set())
            )
            at = f"layers.{i}."
            shapes[f"{at}attn_norm.weight"] = shapes[f"{at}mlp_norm.weight"] = (C,)
            for name, size in sizes.items():
                shapes[f"{at}{name}.weight"] = size
                if name in biased:
                    shapes[f"{at}{name}.bias"] = size[:1]
            if layer.qk_norm:
                shapes[f"{at}q_norm.weight"] = shapes[f"{at}k_norm.weight"] = (layer.head_dim,)
            if layer.post_norms:
                shapes[f"{at}post_attn_norm.weight"] = shapes[f"{at}post_mlp_norm.weight"] = (C,)
            if layer.rope.kind == "factors":
                shapes["rope_factors.weight"] = (layer.rope.dim // 2,)
        shapes["final_norm.weight"] = (C,)
        if not self.tied_head:
            shapes["head.weight"] = (self.vocab_size, C)
        return shapes

    def n_parameters(self) -> int:
        """Weights in all, a tied head counted once."""
        total = 0
        for shape in self.tensor_shapes().values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total

    def attention_shape(self, dtype: str, page_size: int | None) -> AttentionShape:
        """What an attention backend must be able to serve for this model."""
        first = self.layers[0]
        windows = tuple(dict.fromkeys(layer.window for layer in self.layers))
        rotated = first.rope.dim if first.rope.dim != first.head_dim else None
        return AttentionShape(first.n_heads, first.n_kv_heads, first.head_dim, dtype, windows, page_size, rotated=rotated)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a canonical tensor comes from in a checkpoint, and what has to be undone on the way.

    `unpermute_heads`: GGUF's llama converter interleaves each head's rotary halves; n > 0 restores n heads' halves.
    """

    name: str
    unpermute_heads: int = 0


class Architecture(ABC):
    """Reads one family of models: from config.json or GGUF metadata to a spec and a table of tensor names.

    Imports no torch: the plan uses it on headers alone.
    """

    hf_classes: ClassVar[tuple[str, ...]]  # `architectures` in config.json
    gguf_names: ClassVar[tuple[str, ...]]  # `general.architecture` in GGUF

    @classmethod
    @abstractmethod
    def from_hf(cls, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        """The spec that config.json describes; `tensors` are the files' names and shapes (ties, biases).

        Raises:
            WeightsError: a value is missing, contradictory or unsupported; the message names key and value.
        """

    @classmethod
    @abstractmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> DecoderSpec:
        """The spec that GGUF metadata describes. Raises as `from_hf`."""

    @classmethod
    @abstractmethod
    def hf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        """Canonical name -> tensor of a Hugging Face checkpoint, for every name in `spec.tensor_shapes()`."""

    @classmethod
    @abstractmethod
    def gguf_tensors(cls, spec: DecoderSpec) -> dict[str, TensorSource]:
        """Canonical name -> tensor of a GGUF file, for every name in `spec.tensor_shapes()`."""
