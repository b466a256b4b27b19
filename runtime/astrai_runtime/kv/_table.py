"""The index table: which token slot holds each position of each admitted sequence, and a step's view of it.

B sequences in the step, T tokens in the step, L layers, N token slots, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from astrai_runtime.batch import Batch, KVView

if TYPE_CHECKING:
    from torch import Tensor

    from astrai_runtime.kv.base import KVShape

Int32s = npt.NDArray[np.int32]


class SlotTable:
    """Rows for admitted sequences and the slot of each of their positions; int32 on the host, mirrored on a GPU.

    Entries past what a row's owner has written are stale: nothing reads them.
    """

    def __init__(self, n_rows: int, context: int) -> None:
        self.slots: Int32s = np.zeros((n_rows, context), dtype=np.int32)
        self._free = list(range(n_rows - 1, -1, -1))
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._tensor: Tensor | None = None
        self._dirty: list[tuple[int, int, int]] = []  # (row, from, to) that the GPU's mirror lacks

    @property
    def free_rows(self) -> frozenset[int]:
        return frozenset(self._free)

    def take_row(self) -> int | None:
        """A row for one more sequence, None when all are taken."""
        return self._free.pop() if self._free else None

    def give_row(self, row: int) -> None:
        """Takes a row back. Its entries go stale."""
        self._free.append(row)

    def reset(self) -> None:
        """Takes every row back."""
        self._free = list(range(len(self.slots) - 1, -1, -1))
        self._dirty.clear()

    def write(self, row: int, start: int, slots: Int32s) -> None:
        """Sets the slots of positions from `start` on; what would lie past the context is dropped."""
        end = min(start + len(slots), self.slots.shape[1])
        self.slots[row, start:end] = slots[: end - start]
        if self._tensor is not None and self._tensor.is_cuda:
            self._dirty.append((row, start, end))

    def attach(self, shape: KVShape, k_buffer: Tensor, v_buffer: Tensor) -> None:
        """Remembers the storage that views point at; the table itself moves to the storage's device."""
        import torch

        expected = (shape.n_layers, shape.n_tokens, shape.n_kv_heads, shape.head_dim)
        assert self._buffers is None, "storage is attached once"
        assert tuple(k_buffer.shape) == tuple(v_buffer.shape) == expected, f"{tuple(k_buffer.shape)} is not {expected}"
        self._buffers = (k_buffer, v_buffer)
        table = torch.from_numpy(self.slots)  # on the CPU the tensor shares the host's memory: never stale
        self._tensor = table.to(k_buffer.device) if k_buffer.is_cuda else table

    def view(self, batch: Batch) -> KVView:
        """Where a step's keys and values lie."""
        import torch

        assert self._buffers is not None, "place() before attach()"
        rows = np.fromiter((_row_of(chunk.sequence.row) for chunk in batch.chunks), np.int64, len(batch.chunks))
        starts = np.fromiter((chunk.start for chunk in batch.chunks), np.int64, len(rows))
        lengths = np.fromiter((chunk.length for chunk in batch.chunks), np.int64, len(rows))
        ends = starts + lengths
        qo_indptr = _prefix_sum(lengths)
        # position of every token of the step, without a Python loop over tokens
        positions = np.arange(qo_indptr[-1], dtype=np.int64) + np.repeat(starts - qo_indptr[:-1], lengths)
        out_cache_loc = self.slots[np.repeat(rows, lengths), positions].astype(np.int64)
        device = self._buffers[0].device

        def there(values: npt.NDArray[np.integer]) -> Tensor:
            tensor = torch.from_numpy(values)
            return tensor.to(device) if device.type != "cpu" else tensor

        return KVView(
            k_buffer=self._buffers[0],
            v_buffer=self._buffers[1],
            req_to_token=self._mirror(),
            req_pool_indices=there(rows),
            seq_lens=there(ends.astype(np.int32)),
            out_cache_loc=there(out_cache_loc),
            max_len=int(ends.max()),
            kv_indptr=there(_prefix_sum(ends)),
            qo_indptr=there(qo_indptr),
            query_lens=tuple(lengths.tolist()),
            context_lens=tuple(ends.tolist()),
        )

    def _mirror(self) -> Tensor:
        import torch

        assert self._tensor is not None
        for row, start, end in self._dirty:
            self._tensor[row, start:end] = torch.from_numpy(self.slots[row, start:end]).to(self._tensor.device)
        self._dirty.clear()
        return self._tensor


def _row_of(row: int | None) -> int:
    assert row is not None, "a chunk's sequence is not admitted"
    return row


def _prefix_sum(lengths: npt.NDArray[np.int64]) -> Int32s:
    sums: Int32s = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums
