"""The packed matrices of a decoder by name: what is packed, cached, mapped and counted. Imports no torch.

embed [V, C]    head [V, C] (absent when tied)
layers.{i}.qkv [(H + 2 K) D, C]    .o [C, H D]    .gate_up [2 F', C]    .down [C, F]      F' is F in whole tiles
"""

from __future__ import annotations

from collections.abc import Iterator

from astrai_runtime.kernels.base import TILE, Format, MatrixShape, padded
from astrai_runtime.model.base import DecoderSpec, LayerSpec

OFFSETS = True  # int4 groups have an offset besides their scale


def matrices(spec: DecoderSpec, weights: Format) -> dict[str, MatrixShape]:
    """Every matrix in its place and format. With int4 layers the embedding and the head are int8."""
    C = spec.hidden_size
    outer: Format = "int8" if weights == "int4" else weights
    found = {"embed": MatrixShape(outer, spec.vocab_size, C)}
    for index, layer in enumerate(spec.layers):
        for name, (rows, cols) in _sizes(layer, C).items():
            found[f"layers.{index}.{name}"] = MatrixShape(weights, rows, cols, OFFSETS and weights == "int4")
    if not spec.tied_head:
        found["head"] = MatrixShape(outer, spec.vocab_size, C)
    return found


def packed_bytes(spec: DecoderSpec, weights: Format) -> int:
    """All of a decoder in memory: its matrices, and norms and biases in float32. A tied head is the embedding."""
    return sum(shape.n_bytes for shape in matrices(spec, weights).values()) + 4 * sum(_vectors(spec))


def _sizes(layer: LayerSpec, C: int) -> dict[str, tuple[int, int]]:
    q, kv, F = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim, layer.intermediate_size
    return {"qkv": (q + 2 * kv, C), "o": (C, q), "gate_up": (2 * padded(F, TILE), C), "down": (C, F)}


def _vectors(spec: DecoderSpec) -> Iterator[int]:
    """Lengths of everything that is no matrix; a bias has as many numbers as its matrix has padded rows."""
    yield spec.hidden_size  # the final norm
    for layer in spec.layers:
        yield spec.hidden_size * (4 if layer.post_norms else 2)
        yield 2 * layer.head_dim if layer.qk_norm else 0
        sizes = {name: padded(rows, TILE) for name, (rows, _) in _sizes(layer, spec.hidden_size).items()}
        yield sizes["qkv"] if layer.qkv_bias else 0
        yield sizes["o"] if layer.o_bias else 0
        yield sizes["gate_up"] + sizes["down"] if layer.mlp_bias else 0
