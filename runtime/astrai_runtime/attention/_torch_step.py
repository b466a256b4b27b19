"""One step of `torch_native`: slots and masks that all layers share, then attention for each sequence.

T tokens in the step, Q query tokens of one sequence, M keys that they see, H query heads, K key/value heads, D head size,
G = H / K, B decoding sequences that are padded together, N token slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from astrai_runtime.batch import KVView

# Decoding rows with fewer padded key elements than this are gathered into one call: below it the calls of one row each cost
# more than the copy. Measured on one CPU core, 8 and 32 rows, 1..8 key/value heads of 64..256: they meet near 2^18..2^19.
PADDED_ELEMENTS = 1 << 18


class _Work(Protocol):
    """A part of the step that is computed with one call."""

    def attend(self, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_THD: Tensor, scale: float) -> None:
        """Fills its own rows of `out_THD`."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where the keys that one sequence's queries can see are: a run of slots (no copy) or a list of them."""

    run: tuple[int, int] | None
    slots: Tensor | None

    def of(self, buffer_NKD: Tensor, dtype: torch.dtype) -> Tensor:
        """[1, K, M, D]"""
        if self.run is not None:
            found_MKD = buffer_NKD[self.run[0] : self.run[1]]
        else:
            assert self.slots is not None
            found_MKD = buffer_NKD.index_select(0, self.slots)
        return found_MKD.to(dtype).transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Several queries of one sequence. `mask` [Q, M]; None: plainly causal over as many keys as queries."""

    start: int  # of its rows in the step
    end: int
    keys: _Keys
    mask: Tensor | None

    def attend(self, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_THD: Tensor, scale: float) -> None:
        out = functional.scaled_dot_product_attention(
            q_THD[self.start : self.end].transpose(0, 1)[None],
            self.keys.of(k_NKD, q_THD.dtype),
            self.keys.of(v_NKD, q_THD.dtype),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=q_THD.shape[1] != k_NKD.shape[1],
        )
        out_THD[self.start : self.end] = out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Decode:
    """One query of one sequence. It sees every key, so the G heads of a key/value head are simply G queries."""

    row: int
    keys: _Keys

    def attend(self, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_THD: Tensor, scale: float) -> None:
        _, K, D = k_NKD.shape
        out = functional.scaled_dot_product_attention(
            q_THD[self.row].reshape(1, K, -1, D),
            self.keys.of(k_NKD, q_THD.dtype),
            self.keys.of(v_NKD, q_THD.dtype),
            scale=scale,
        )
        out_THD[self.row] = out.view(-1, D)


@dataclass(frozen=True, slots=True)
class _Padded:
    """One query each of B sequences, their keys padded to the longest. `slots` and `mask` are [B, M]."""

    rows: Tensor
    slots: Tensor
    mask: Tensor

    def attend(self, q_THD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_THD: Tensor, scale: float) -> None:
        B, M = self.slots.shape
        _, K, D = k_NKD.shape
        flat = self.slots.view(-1)
        out = functional.scaled_dot_product_attention(
            q_THD.index_select(0, self.rows).view(B, K, -1, D),
            k_NKD.index_select(0, flat).view(B, M, K, D).to(q_THD.dtype).transpose(1, 2),
            v_NKD.index_select(0, flat).view(B, M, K, D).to(q_THD.dtype).transpose(1, 2),
            attn_mask=self.mask[:, None, None, :],
            scale=scale,
        )
        out_THD.index_copy_(0, self.rows, out.view(B, -1, D))


class Step:
    """The work of one step, by window size. Holds no keys or values of its own."""

    def __init__(self, view: KVView) -> None:
        self.view = view
        self._on_gpu = view.k_buffer.is_cuda
        self._starts = [0, *accumulate(view.query_lens)]
        if self._on_gpu:  # one gather on the device; asking for row numbers would wait for it
            table, rows = view.req_to_token[view.req_pool_indices, : view.max_len], list(range(len(view.query_lens)))
        else:
            table, rows = view.req_to_token, view.req_pool_indices.tolist()
        self._slots = [table[row, :length] for row, length in zip(rows, view.context_lens, strict=True)]
        self._work: dict[int | None, list[_Work]] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None) -> Tensor:
        """See `AttentionBackend.attend`."""
        k_NKD, v_NKD = self.view.k_buffer[layer], self.view.v_buffer[layer]
        k_NKD.index_copy_(0, self.view.out_cache_loc, k_TKD.to(k_NKD.dtype))
        v_NKD.index_copy_(0, self.view.out_cache_loc, v_TKD.to(v_NKD.dtype))
        if window not in self._work:
            self._work[window] = self._plan(window, k_NKD.shape[1] * k_NKD.shape[2])
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for work in self._work[window]:
            work.attend(q_THD, k_NKD, v_NKD, out_THD, scale)
        return out_THD

    def _plan(self, window: int | None, width: int) -> list[_Work]:
        view = self.view
        work: list[_Work] = []
        decoding: list[int] = []
        for index, (length, context) in enumerate(zip(view.query_lens, view.context_lens, strict=True)):
            if length == 1:
                decoding.append(index)
                continue
            first = 0 if window is None else max(0, context - length - window + 1)
            start = self._starts[index]
            mask = _mask(length, context, first, window, view.k_buffer.device)
            work.append(_Prefill(start, start + length, self._keys(index, first), mask))
        firsts = [0 if window is None else max(0, view.context_lens[index] - window) for index in decoding]
        longest = max((view.context_lens[i] - first for i, first in zip(decoding, firsts, strict=True)), default=0)
        if len(decoding) > 1 and (self._on_gpu or len(decoding) * longest * width <= PADDED_ELEMENTS):
            work.append(self._padded(decoding, firsts, longest))
        else:
            for index, first in zip(decoding, firsts, strict=True):
                work.append(_Decode(self._starts[index], self._keys(index, first)))
        return work

    def _keys(self, index: int, first: int) -> _Keys:
        slots = self._slots[index][first:]
        if not self._on_gpu:  # asking a GPU for slot numbers would wait for it
            values = slots.numpy()
            begin = int(values[0])
            if int(values[-1]) - begin == len(values) - 1 and bool((values[1:] - values[:-1] == 1).all()):
                return _Keys((begin, begin + len(values)), None)
        return _Keys(None, slots.long())

    def _padded(self, decoding: list[int], firsts: list[int], longest: int) -> _Padded:
        device = self.view.k_buffer.device
        slots = torch.zeros(len(decoding), longest, dtype=torch.int64, device=device)
        lengths = []
        for at, (index, first) in enumerate(zip(decoding, firsts, strict=True)):
            seen = self._slots[index][first:]
            slots[at, : len(seen)] = seen
            slots[at, len(seen) :] = seen[-1]  # a slot of its own: whatever other slots hold, even NaN, stays out
            lengths.append(len(seen))
        mask = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
        rows = torch.tensor([self._starts[index] for index in decoding], device=device)
        return _Padded(rows, slots, mask)


def _mask(length: int, context: int, first: int, window: int | None, device: torch.device) -> Tensor | None:
    """True where the query at position p may see the key at position s: p - window < s <= p. Keys begin at `first`."""
    if length == context and (window is None or window >= context):
        return None
    queries = torch.arange(context - length, context, device=device)[:, None]
    keys = torch.arange(first, context, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)
