"""One step of `torch_native`: slots and masks that all layers share, then attention for each sequence.

T tokens in the step, Q query tokens of one sequence, M keys that they see, H query heads, K key/value heads,
G = H / K, D head size, B decoding sequences that are padded together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from astrai_runtime.batch import KVView

# Decoding rows below this many padded keys and values are gathered into one call: there the calls cost more than the copy.
# Measured on one CPU core with float32, 8 sequences, head size 64..256.
PADDED_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where the keys that one sequence's queries can see are: a run of slots (no copy) or a list of them."""

    run: tuple[int, int] | None
    slots: Tensor | None

    def of(self, buffer_NKD: Tensor) -> Tensor:
        """[M, K, D]"""
        if self.run is not None:
            return buffer_NKD[self.run[0] : self.run[1]]
        assert self.slots is not None
        return buffer_NKD.index_select(0, self.slots)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Queries of one sequence. `mask` None: plainly causal over as many keys as queries."""

    start: int  # of its rows in the step
    end: int
    keys: _Keys
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Decode:
    """One query of one sequence: it sees every key that it is given."""

    row: int
    keys: _Keys


@dataclass(frozen=True, slots=True)
class _Padded:
    """One query each of several sequences, keys padded to the longest; padding is masked."""

    rows: Tensor
    slots: Tensor
    mask: Tensor


_Work = _Prefill | _Decode | _Padded


class Step:
    """The work of one step, by window size. Holds no keys or values of its own."""

    def __init__(self, view: KVView) -> None:
        self.view = view
        self._on_gpu = view.k_buffer.is_cuda
        self._starts = [0]
        for length in view.query_lens:
            self._starts.append(self._starts[-1] + length)
        rows = view.req_pool_indices.tolist() if not self._on_gpu else range(len(view.query_lens))
        table = view.req_to_token if not self._on_gpu else view.req_to_token[view.req_pool_indices, : view.max_len]
        self._slots = [table[row, :length] for row, length in zip(rows, view.context_lens, strict=True)]
        self._work: dict[int | None, list[_Work]] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float, window: int | None) -> Tensor:
        """See `AttentionBackend.attend`."""
        view = self.view
        k_NKD, v_NKD = view.k_buffer[layer], view.v_buffer[layer]
        k_NKD.index_copy_(0, view.out_cache_loc, k_TKD.to(k_NKD.dtype))
        v_NKD.index_copy_(0, view.out_cache_loc, v_TKD.to(v_NKD.dtype))
        H, D = q_THD.shape[1:]
        K = k_NKD.shape[1]
        G = H // K
        if window not in self._work:
            self._work[window] = self._plan(window, K * D)
        out_THD = torch.empty_like(q_THD)
        for work in self._work[window]:
            if isinstance(work, _Decode):
                # One position sees all its keys: the G heads of a key/value head become G queries, and nothing is repeated.
                k_KMD = work.keys.of(k_NKD).to(q_THD.dtype).transpose(0, 1)
                v_KMD = work.keys.of(v_NKD).to(q_THD.dtype).transpose(0, 1)
                q_KGD = q_THD[work.row].view(1, K, G, D)
                out = functional.scaled_dot_product_attention(q_KGD, k_KMD[None], v_KMD[None], scale=scale)
                out_THD[work.row] = out.view(H, D)
            elif isinstance(work, _Prefill):
                k_KMD = work.keys.of(k_NKD).to(q_THD.dtype).transpose(0, 1)
                v_KMD = work.keys.of(v_NKD).to(q_THD.dtype).transpose(0, 1)
                q_HQD = q_THD[work.start : work.end].transpose(0, 1)
                out = functional.scaled_dot_product_attention(
                    q_HQD[None],
                    k_KMD[None],
                    v_KMD[None],
                    attn_mask=work.mask,
                    is_causal=work.mask is None,
                    scale=scale,
                    enable_gqa=G > 1,
                )
                out_THD[work.start : work.end] = out[0].transpose(0, 1)
            else:
                B, M = work.slots.shape
                flat = work.slots.view(-1)
                k_BKMD = k_NKD.index_select(0, flat).view(B, M, K, D).to(q_THD.dtype).transpose(1, 2)
                v_BKMD = v_NKD.index_select(0, flat).view(B, M, K, D).to(q_THD.dtype).transpose(1, 2)
                q_BKGD = q_THD.index_select(0, work.rows).view(B, K, G, D)
                mask = work.mask[:, None, None, :]
                out = functional.scaled_dot_product_attention(q_BKGD, k_BKMD, v_BKMD, attn_mask=mask, scale=scale)
                out_THD.index_copy_(0, work.rows, out.view(B, H, D))
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
