"""From a checkpoint to packed weights in one block of memory, slice by slice: no tensor is ever whole in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from astrai_runtime.kernels.base import SOURCE_TYPES, TILE, Format, MatrixShape, padded
from astrai_runtime.kernels.cpu import ALIGNMENT, Library, Matrix, Pool
from astrai_runtime.model._matrices import PARTS, Stored, matrices, stored_types, vectors
from astrai_runtime.model.base import DecoderSpec, TensorSource
from astrai_runtime.weights.base import Checkpoint

Progress = Callable[[str, int, int], None]  # (tensor, bytes read, bytes in all)
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All weights of a decoder, ready for a native program.

    Args:
        matrices: by the names of `_matrices.matrices`; "head" is the embedding's own object where the two are tied.
        vectors: float32, by the names of `_matrices.vectors`; norms with their offset added, biases joined and padded.
        memory: what all of them are views of.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Floats]
    memory: Bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in one block of memory; the same in a file."""

    matrices: Mapping[str, MatrixShape]
    vectors: Mapping[str, int]
    tied_head: bool

    @classmethod
    def of(cls, spec: DecoderSpec, weights: Format, stored: Stored) -> Layout:
        return cls(matrices(spec, weights, stored), vectors(spec), spec.tied_head)

    def sections(self) -> Iterator[tuple[str, int, int]]:
        """(name, first byte, bytes) of each array, each aligned as the kernels want it."""
        at = 0
        for name, n_bytes in self._sizes():
            yield name, at, n_bytes
            at = padded(at + n_bytes, ALIGNMENT)

    @property
    def n_bytes(self) -> int:
        _, at, n_bytes = list(self.sections())[-1]
        return padded(at + n_bytes, ALIGNMENT)

    def over(self, memory: Bytes) -> PackedModel:
        """The arrays in that block of `n_bytes`."""
        found = {name: memory[at : at + n_bytes] for name, at, n_bytes in self.sections()}
        packed = {}
        for name, shape in self.matrices.items():
            scales, offsets = (found.get(f"{name}:{kind}") for kind in ("scales", "offsets"))
            packed[name] = Matrix(
                shape,
                found[f"{name}:data"],
                None if scales is None else scales.view(np.uint16),
                None if offsets is None else offsets.view(np.uint16),
            )
        if self.tied_head:
            packed["head"] = packed["embed"]
        return PackedModel(packed, {name: found[name].view(np.float32) for name in self.vectors}, memory)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for name, shape in self.matrices.items():
            yield f"{name}:data", shape.data_bytes
            if shape.scale_bytes:
                yield f"{name}:scales", shape.scale_bytes
            if shape.offsets:
                yield f"{name}:offsets", shape.scale_bytes
        for name, length in self.vectors.items():
            yield name, 4 * length


def pack_model(
    library: Library,
    pool: Pool,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    table: Mapping[str, TensorSource],
    weights: Format,
    progress: Progress,
) -> PackedModel:
    """Packs every tensor, after `check_tensors`. `progress` is called after each slice.

    Raises:
        WeightsError: a tensor's data is damaged.
        KernelError: there is not enough memory.
    """
    layout = Layout.of(spec, weights, stored_types(table, checkpoint.tensors))
    packed = layout.over(library.allocate(layout.n_bytes))
    packing = _Packing(library, pool, checkpoint, spec, table, progress)
    packing.outer(packed, "embed")
    for index in range(spec.n_layers):
        packing.layer(packed, index)
    packing.norm(packed, "final_norm")
    if "rope_factors" in packed.vectors:
        packed.vectors["rope_factors"][:] = packing.vector("rope_factors.weight")
    if not spec.tied_head:
        packing.outer(packed, "head")
    return packed


class _Packing:
    """One pass over a checkpoint."""

    def __init__(
        self,
        library: Library,
        pool: Pool,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        table: Mapping[str, TensorSource],
        progress: Progress,
    ) -> None:
        self._library, self._pool, self._checkpoint = library, pool, checkpoint
        self._spec, self._table, self._progress = spec, table, progress
        self._done = 0
        self._total = sum(checkpoint.tensors[table[name].name].n_bytes for name in spec.tensor_shapes())

    def outer(self, packed: PackedModel, name: str) -> None:
        self.rows(packed.matrices[name], f"{name}.weight", 0)

    def layer(self, packed: PackedModel, index: int) -> None:
        at = f"layers.{index}."
        for name, parts in PARTS.items():
            bias = packed.vectors.get(f"{at}{name}_bias")
            row = 0
            for part in parts:
                n_rows = self.rows(packed.matrices[at + name], f"{at}{part}.weight", row)
                if bias is not None:
                    bias[row : row + n_rows] = self.vector(f"{at}{part}.bias")
                row = padded(row + n_rows, TILE)
        for name in packed.vectors:
            if name.startswith(at) and name.endswith("norm"):
                self.norm(packed, name)

    def norm(self, packed: PackedModel, name: str) -> None:
        packed.vectors[name][:] = self.vector(f"{name}.weight") + np.float32(self._spec.norm_offset)

    def vector(self, name: str) -> Floats:
        source = self._table[name]
        assert not source.unpermute_heads or name.endswith(".bias")
        values = np.concatenate([each.rows.copy().view(np.float32) for each in self._checkpoint.slices(source.name, ())])
        self._advance(source.name, self._checkpoint.tensors[source.name].n_bytes)
        if source.unpermute_heads:
            return _unpermute(values.reshape(-1, 1), len(values.ravel()) // source.unpermute_heads).ravel()
        return values.ravel()

    def rows(self, matrix: Matrix, name: str, first: int) -> int:
        """Packs one tensor below row `first`; returns its number of rows."""
        source = self._table[name]
        n_rows: int = self._checkpoint.tensors[source.name].shape[0]
        head = n_rows // source.unpermute_heads if source.unpermute_heads else 0
        for each in self._checkpoint.slices(source.name, SOURCE_TYPES, head or TILE):
            rows = _unpermute(each.rows, head) if head else each.rows
            self._library.pack(self._pool, matrix, each.dtype, rows, first + each.start)
            read = self._checkpoint.tensors[source.name].n_bytes * len(rows) // n_rows
            self._advance(source.name, read)
        return n_rows

    def _advance(self, name: str, n_bytes: int) -> None:
        self._done += n_bytes
        self._progress(name, self._done, self._total)


def _unpermute(rows: npt.NDArray[Any], head: int) -> npt.NDArray[Any]:
    """Rows of each head of `head` from (pair, half) order, as GGUF's llama converter leaves them, to (half, pair) order."""
    return rows.reshape(-1, head // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
