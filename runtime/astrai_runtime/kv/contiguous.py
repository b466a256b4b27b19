"""One fixed run of slots for each sequence: slot = row * context + position. Nothing is allocated while serving."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np

from astrai_runtime.batch import Batch, KVView
from astrai_runtime.kv._table import SlotTable
from astrai_runtime.kv.base import KVConfig, KVMode, KVShape, KVStats
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class ContiguousConfig(KVConfig):
    kind: Literal["contiguous"]


class ContiguousKV(KVMode):
    """Every admitted sequence holds a whole context. The simplest layout, and the reference for the others."""

    Config = ContiguousConfig

    @staticmethod
    def pool_tokens(config: KVConfig, max_batch_size: int, context: int, affordable: int) -> int:
        return max_batch_size * context

    def __init__(self, config: KVConfig, shape: KVShape) -> None:
        super().__init__(config, shape)
        assert shape.n_tokens == shape.max_batch_size * shape.context, "a contiguous pool holds one context a sequence"
        self._table = SlotTable(shape.max_batch_size, shape.context)
        every_slot = np.arange(shape.n_tokens, dtype=np.int32).reshape(shape.max_batch_size, shape.context)
        self._table.slots[:] = every_slot
        self._lengths: dict[int, int] = {}  # row -> positions that `extend` has promised

    def refuses(self, n_tokens: int) -> str | None:
        if n_tokens > self.shape.context:
            return f"it needs {n_tokens} tokens, and one sequence holds at most {self.shape.context}"
        return None

    def reserve(self, sequence: Sequence) -> bool:
        assert sequence.row is None, f"sequence {sequence.id} is admitted already"
        row = self._table.take_row()
        if row is None:
            return False
        sequence.row, sequence.n_computed, sequence.n_cached = row, 0, 0
        self._lengths[row] = 0
        return True

    def extend(self, sequence: Sequence, length: int) -> bool:
        assert sequence.row is not None, f"sequence {sequence.id} is not admitted"
        assert length <= self.shape.context, f"{length} tokens pass the context of {self.shape.context}"
        self._lengths[sequence.row] = max(self._lengths[sequence.row], length)
        return True

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence.row is None:
            return
        del self._lengths[sequence.row]
        self._table.give_row(sequence.row)
        sequence.row, sequence.n_computed = None, 0

    def reuse(self, sequence: Sequence) -> None:
        """Does nothing: no slot is ever shared."""

    def next_page(self, sequence: Sequence, length: int) -> None:
        return None

    def record(self, sequence: Sequence) -> None:
        """Does nothing: no slot is ever shared."""

    def forget(self) -> None:
        """Does nothing: no slot outlives its owner."""

    def reset(self) -> None:
        self._table.reset()
        self._lengths.clear()
        every_slot = np.arange(self.shape.n_tokens, dtype=np.int32).reshape(self._table.slots.shape)
        for row, slots in enumerate(every_slot):
            self._table.write(row, 0, slots)

    def stats(self) -> KVStats:
        held = len(self._lengths) * self.shape.context
        return KVStats(free=self.shape.n_tokens - held, held=held, cached=0, total=self.shape.n_tokens)

    def check_integrity(self, admitted: Iterable[Sequence]) -> None:
        rows = [sequence.row for sequence in admitted]
        assert len(set(rows)) == len(rows), f"a row is owned twice: {rows}"
        assert set(rows) == set(self._lengths), f"rows {sorted(self._lengths)} are held, but {rows} are admitted"
        everyone = set(range(self.shape.max_batch_size))
        assert self._table.free_rows == everyone - set(self._lengths), f"free rows are {sorted(self._table.free_rows)}"
        expected = np.arange(self.shape.n_tokens, dtype=np.int32).reshape(self._table.slots.shape)
        assert np.array_equal(self._table.slots, expected), "the slot table was written to"

    def attach(self, k_buffer: Tensor, v_buffer: Tensor) -> None:
        self._table.attach(self.shape, k_buffer, v_buffer)

    def place(self, batch: Batch) -> KVView:
        for chunk in batch.chunks:
            row = chunk.sequence.row
            assert row is not None, f"sequence {chunk.sequence.id} is not admitted"
            assert chunk.end <= self._lengths[row], f"sequence {chunk.sequence.id} has no slots up to {chunk.end}"
        return self._table.view(batch)


PART = ContiguousKV
