"""Every attention backend equals a naive float64 computation; a new file in attention/ is tested by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from astrai_runtime import part
from astrai_runtime.attention.base import AttentionBackend, AttentionShape
from astrai_runtime.batch import KVView
from astrai_runtime.kv.base import KVShape
from astrai_runtime.machine import Machine

LAPTOP = Machine("laptop", "cpu", 8 << 30, 2, probed=True)
TOKEN_SLOTS = [name for name in part.names("attention") if part.load("attention", name).layout == "token_slots"]


@dataclass(frozen=True)
class Case:
    """(tokens before the step, tokens of the step) for each sequence, and the shape of the heads."""

    lengths: tuple[tuple[int, int], ...]
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    order: str = "shuffled"  # of each sequence's slots


RAGGED = ((0, 5), (9, 1), (3, 4), (0, 1), (30, 1), (17, 2))
DECODE = ((9, 1), (0, 1), (30, 1), (3, 1))
CASES = {
    "ragged": Case(RAGGED),
    "ragged_run": Case(RAGGED, order="run"),
    "window": Case(RAGGED, window=4),
    "window_of_one": Case(RAGGED, window=1),
    "window_run": Case(RAGGED, window=4, order="run"),
    "window_longer_than_all": Case(RAGGED, window=100),
    "one_kv_head": Case(RAGGED, n_kv_heads=1),
    "no_groups": Case(RAGGED, n_kv_heads=4),
    "decode_only": Case(DECODE),
    "decode_window": Case(DECODE, window=7, order="run"),
    "decode_alone": Case(((12, 1),)),
    "decode_wide": Case(((700, 1), (900, 1), (4, 1)), head_dim=64),
    "prefill_alone": Case(((0, 33),), order="run"),
}


def make_view(case: Case, backend: AttentionBackend, dtype: str, seed: int = 0) -> KVView:
    """A pool in which each sequence's slots lie in `case.order`; slots of nobody are filled with NaN."""
    contexts = [before + now for before, now in case.lengths]
    total, n_tokens = sum(contexts), sum(contexts) + 11
    chance = np.random.default_rng(seed)
    slots = chance.permutation(n_tokens)[:total] if case.order == "shuffled" else np.arange(3, 3 + total)
    table = np.zeros((len(contexts) + 2, max(contexts) + 3), dtype=np.int32)
    rows = chance.permutation(len(table))[: len(contexts)]
    parts = np.split(slots, np.cumsum(contexts)[:-1])
    for row, mine in zip(rows, parts, strict=True):
        table[row, : len(mine)] = mine
    k, v = backend.allocate(KVShape(2, case.n_kv_heads, case.head_dim, dtype, 9, 99, n_tokens), "cpu")
    for buffer in (k, v):
        buffer.fill_(math.nan)
        buffer[:, slots] = torch.from_numpy(chance.standard_normal((2, total, *buffer.shape[2:]))).to(buffer.dtype)
    now = [now for _, now in case.lengths]
    new_slots = np.concatenate([mine[before:] for mine, (before, _) in zip(parts, case.lengths, strict=True)])
    return KVView(
        k_buffer=k,
        v_buffer=v,
        req_to_token=torch.from_numpy(table),
        req_pool_indices=torch.from_numpy(rows.astype(np.int64)),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        out_cache_loc=torch.from_numpy(new_slots.astype(np.int64)),
        max_len=max(contexts),
        kv_indptr=torch.tensor([0, *np.cumsum(contexts)], dtype=torch.int32),
        qo_indptr=torch.tensor([0, *np.cumsum(now)], dtype=torch.int32),
        query_lens=tuple(now),
        context_lens=tuple(contexts),
    )


def make_inputs(case: Case, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    T = sum(now for _, now in case.lengths)
    heads = (case.n_heads, case.n_kv_heads, case.n_kv_heads)
    q, k, v = (torch.randn(T, n, case.head_dim, generator=chance).to(dtype) for n in heads)
    return q, k, v


def naive(q: torch.Tensor, view: KVView, layer: int, scale: float, window: int | None) -> torch.Tensor:
    """Softmax of scaled scores, one query at a time, in float64, over keys and values that are stored already."""
    out, at = [], 0
    for row, now, context in zip(view.req_pool_indices.tolist(), view.query_lens, view.context_lens, strict=True):
        for position in range(context - now, context):
            first = 0 if window is None else max(0, position - window + 1)
            slots = view.req_to_token[row, first : position + 1].long()
            groups = q.shape[1] // view.k_buffer.shape[2]
            keys = view.k_buffer[layer, slots].double().repeat_interleave(groups, dim=1)
            values = view.v_buffer[layer, slots].double().repeat_interleave(groups, dim=1)
            weights = torch.softmax(torch.einsum("hd,nhd->hn", q[at].double(), keys) * scale, dim=-1)
            out.append(torch.einsum("hn,nhd->hd", weights, values))
            at += 1
    return torch.stack(out)


def serving(name: str, case: Case, dtype: str) -> AttentionBackend:
    backend: type[AttentionBackend] = part.load("attention", name)
    shape = AttentionShape(case.n_heads, case.n_kv_heads, case.head_dim, dtype, (case.window,), None)
    for phase in ("prefill", "decode"):
        reason = backend.refuses(LAPTOP, shape, phase)
        if reason:
            pytest.skip(f"{name} refuses: {reason}")
    return backend()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", TOKEN_SLOTS)
def test_backend_equals_the_naive_computation(name: str, case: Case) -> None:
    backend = serving(name, case, "float32")
    view = make_view(case, backend, "float32")
    for layer in (0, 1):
        q, k, v = make_inputs(case, torch.float32, seed=layer)
        out = backend.attend(layer, q, k, v, view, scale=0.3, window=case.window)
        assert torch.equal(view.k_buffer[layer, view.out_cache_loc], k)
        assert torch.equal(view.v_buffer[layer, view.out_cache_loc], v)
        expected = naive(q, view, layer, 0.3, case.window)
        torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [CASES["ragged"], CASES["window_run"], CASES["decode_wide"]])
@pytest.mark.parametrize("name", TOKEN_SLOTS)
def test_short_dtypes_stay_within_their_rounding(name: str, case: Case, dtype: str) -> None:
    backend = serving(name, case, dtype)
    view = make_view(case, backend, dtype)
    q, k, v = make_inputs(case, getattr(torch, dtype))
    out = backend.attend(0, q, k, v, view, scale=0.3, window=case.window)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), naive(q, view, 0, 0.3, case.window), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", TOKEN_SLOTS)
def test_random_ragged_batches_equal_the_naive_computation(name: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    lengths = tuple(
        (int(chance.integers(0, 60)), int(chance.choice([1, 1, 2, 9, 31]))) for _ in range(int(chance.integers(1, 9)))
    )
    kv_heads = int(chance.choice([1, 2, 3]))
    case = Case(
        lengths,
        n_heads=kv_heads * int(chance.choice([1, 2, 4])),
        n_kv_heads=kv_heads,
        head_dim=int(chance.choice([8, 16, 64])),
        window=int(chance.integers(1, 40)) if chance.random() < 0.5 else None,
        order=str(chance.choice(["run", "shuffled"])),
    )
    backend = serving(name, case, "float32")
    view = make_view(case, backend, "float32", seed)
    q, k, v = make_inputs(case, torch.float32, seed)
    out = backend.attend(1, q, k, v, view, scale=case.head_dim**-0.5, window=case.window)
    expected = naive(q, view, 1, case.head_dim**-0.5, case.window)
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=3e-6)


@pytest.mark.parametrize("name", TOKEN_SLOTS)
def test_page_order_changes_nothing(name: str) -> None:
    case = CASES["ragged"]
    backend = serving(name, case, "float32")
    outs = []
    for order in ("run", "shuffled"):
        view = make_view(Case(RAGGED, order=order), backend, "float32")
        view.k_buffer.nan_to_num_(0.0).zero_()
        view.v_buffer.nan_to_num_(0.0).zero_()
        outs.append(backend.attend(0, *make_inputs(case, torch.float32), view, scale=0.3, window=None))
    torch.testing.assert_close(outs[0], outs[1], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", TOKEN_SLOTS)
def test_a_damaged_neighbour_harms_nobody(name: str) -> None:
    case = CASES["decode_only"]
    backend = serving(name, case, "float32")
    view = make_view(case, backend, "float32")
    broken = view.req_to_token[view.req_pool_indices[2], :31].long()
    view.v_buffer[:, broken] = math.nan
    out = backend.attend(0, *make_inputs(case, torch.float32), view, scale=0.3, window=None)
    assert out.isfinite().all(dim=(1, 2)).tolist() == [True, True, False, True]


@pytest.mark.parametrize("name", part.names("attention"))
def test_storage_begins_zeroed_in_the_declared_dtype(name: str) -> None:
    backend = part.load("attention", name)()
    for dtype in ("float32", "bfloat16"):
        if backend.refuses(LAPTOP, AttentionShape(4, 2, 16, dtype), "decode"):
            continue
        shape = KVShape(2, 2, 16, dtype, 2, 10, 20)
        k, v = backend.allocate(shape, "cpu")
        assert k.dtype == v.dtype == getattr(torch, dtype)
        assert k.nbytes + v.nbytes == shape.bytes_per_token * 20
        assert not k.any()
        assert not v.any()


@pytest.mark.parametrize("name", part.names("attention"))
def test_refusals_are_half_sentences_that_name_the_value(name: str) -> None:
    backend = part.load("attention", name)
    for shape in (AttentionShape(4, 2, 16, "int7"), AttentionShape(5, 2, 16, "float32")):
        reason = backend.refuses(LAPTOP, shape, "prefill")
        assert reason
        assert not reason.endswith(".")
        assert "int7" in reason or "5" in reason or "cuda" in reason
