"""The packed matrices and vectors of a decoder by name: what is packed, cached and counted. Imports no torch.

embed [V, C]    head [V, C] (absent when tied)
layers.{i}.qkv [(H + 2 K) D, C]    .o [C, H D]    .gate_up [2 F', C]    .down [C, F]      F' is F in whole tiles
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from astrai_runtime.kernels.base import TILE, Format, MatrixShape, padded
from astrai_runtime.model.base import DecoderSpec, LayerSpec, TensorSource
from astrai_runtime.weights.base import TensorInfo

# Which tensors lie in each matrix of a layer, one below the other.
PARTS: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_NUMBERED = re.compile(r"(?:IQ|TQ|Q|MXFP|NVFP)(\d)")  # ggml's quantisations, by their bits

Stored = Mapping[str, str]  # canonical tensor -> the type that its file stores it in; float32 where nothing is said
PLAIN: Stored = MappingProxyType({})


def stored_types(table: Mapping[str, TensorSource], tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """How each canonical tensor is stored."""
    return {name: tensors[source.name].dtype for name, source in table.items() if source.name in tensors}


def matrices(spec: DecoderSpec, weights: Format, stored: Stored = PLAIN) -> dict[str, MatrixShape]:
    """Every matrix in its place and format. With int4 layers the embedding and the head are int8."""
    C = spec.hidden_size
    outer: Format = "int8" if weights == "int4" else weights
    found = {"embed": MatrixShape(outer, spec.vocab_size, C)}
    for index, layer in enumerate(spec.layers):
        for name, (rows, cols) in _sizes(layer, C).items():
            types = {stored.get(f"layers.{index}.{each}.weight", "F32") for each in PARTS[name]}
            format_, offsets = layer_format(weights, types)
            found[f"layers.{index}.{name}"] = MatrixShape(format_, rows, cols, offsets)
    if not spec.tied_head:
        found["head"] = MatrixShape(outer, spec.vocab_size, C)
    return found


def layer_format(weights: Format, stored: set[str]) -> tuple[Format, bool]:
    """The format of a matrix whose tensors are stored in these types, and whether its groups have offsets.

    int4 takes plain numbers and what has four bits or fewer already. A tensor that its file keeps in five to eight bits
    beside others of four was kept so because it needs them (docs/quality.md): its matrix is int8. Q4_0 blocks have no
    offsets and fit exactly without; for all else an offset halves the error.
    """
    if weights != "int4":
        return weights, False
    if any(4 < _bits(name) <= 8 for name in stored):
        return "int8", False
    return "int4", stored != {"Q4_0"}


def _bits(stored: str) -> int:
    """Bits of a quantised weight; 32 for every plain type."""
    found = _NUMBERED.match(stored.upper())
    return int(found[1]) if found else 32


def packed_bytes(spec: DecoderSpec, weights: Format, stored: Stored = PLAIN) -> int:
    """All of a decoder in memory: its matrices, and norms and biases in float32. A tied head is the embedding."""
    return sum(shape.n_bytes for shape in matrices(spec, weights, stored).values()) + 4 * sum(vectors(spec).values())


def _sizes(layer: LayerSpec, C: int) -> dict[str, tuple[int, int]]:
    q, kv, F = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim, layer.intermediate_size
    return {"qkv": (q + 2 * kv, C), "o": (C, q), "gate_up": (2 * padded(F, TILE), C), "down": (C, F)}


def vectors(spec: DecoderSpec) -> dict[str, int]:
    """Everything that is no matrix, by name, with its length; a bias has as many numbers as its matrix has padded rows."""
    C = spec.hidden_size
    found = {"final_norm": C}
    for index, layer in enumerate(spec.layers):
        at = f"layers.{index}."
        norms = {"attn_norm": C, "mlp_norm": C}
        if layer.post_norms:
            norms |= {"post_attn_norm": C, "post_mlp_norm": C}
        if layer.qk_norm:
            norms |= {"q_norm": layer.head_dim, "k_norm": layer.head_dim}
        biased = {"qkv": layer.qkv_bias, "o": layer.o_bias, "gate_up": layer.mlp_bias, "down": layer.mlp_bias}
        sizes = {name: padded(rows, TILE) for name, (rows, _) in _sizes(layer, C).items()}
        biases = {f"{name}_bias": size for name, size in sizes.items() if biased[name]}
        found |= {at + name: size for name, size in (norms | biases).items()}
        if layer.rope.kind == "factors":
            found["rope_factors"] = layer.rope.dim // 2
    return found
