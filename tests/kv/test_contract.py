"""Every KV mode keeps the same promises; a new file in kv/ is tested by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from astrai_runtime import part
from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.kv.base import KVMode, KVShape
from astrai_runtime.sequence import Sequence
from tests.model.running import sequence_of

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "kv"
ROWS, CONTEXT = 3, 20
OPTIONS = [(kind, size) for kind in part.names("kv") for size in (1, 4, 32)]


def make(kind: str, page_size: int, *, rows: int = ROWS, context: int = CONTEXT, affordable: int = 1000) -> KVMode:
    mode = part.load("kv", kind)
    values: dict[str, Any] = yaml.safe_load((CONF / f"{kind}.yaml").read_text())
    if "page_size" in values:
        values["page_size"] = page_size
    config = mode.Config(**values)
    n_tokens = mode.pool_tokens(config, rows, context, affordable)
    kv: KVMode = mode(config, KVShape(2, 1, 4, "float32", rows, context, n_tokens))
    return kv


def storage(kv: KVMode) -> torch.Tensor:
    shape = kv.shape
    return torch.zeros(shape.n_layers, shape.n_tokens, shape.n_kv_heads, shape.head_dim)


def admit(kv: KVMode, n_tokens: int, length: int) -> Sequence:
    sequence = sequence_of(range(n_tokens))
    assert kv.reserve(sequence)
    assert kv.extend(sequence, length)
    return sequence


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_every_position_of_every_sequence_has_a_slot_of_its_own(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    kv.attach(storage(kv), storage(kv))
    sequences = [admit(kv, 20, 3), admit(kv, 20, 20), admit(kv, 20, 1)]
    assert kv.extend(sequences[0], 11)
    batch = Batch((Chunk(sequences[0], 0, 11, True), Chunk(sequences[1], 0, 20, False), Chunk(sequences[2], 0, 1, True)))
    view = kv.place(batch)
    assert len(set(view.out_cache_loc.tolist())) == 32
    assert view.out_cache_loc.min() >= 0
    assert view.out_cache_loc.max() < kv.shape.n_tokens


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_view_describes_the_step(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    k, v = storage(kv), storage(kv)
    kv.attach(k, v)
    first, second = admit(kv, 20, 9), admit(kv, 20, 6)
    view = kv.place(Batch((Chunk(second, 5, 1, True), Chunk(first, 2, 7, False))))
    assert view.k_buffer is k
    assert view.v_buffer is v
    assert view.context_lens == (6, 9)
    assert view.query_lens == (1, 7)
    assert view.max_len == 9
    assert view.req_pool_indices.tolist() == [second.row, first.row]
    assert view.seq_lens.tolist() == [6, 9]
    assert view.kv_indptr.tolist() == [0, 6, 15]
    assert view.qo_indptr.tolist() == [0, 1, 8]
    table = view.req_to_token
    assert table.shape == (ROWS, CONTEXT)
    expected = table[second.row, 5:6].tolist() + table[first.row, 2:9].tolist()
    assert view.out_cache_loc.tolist() == expected
    dtypes = (table, view.req_pool_indices, view.seq_lens, view.out_cache_loc, view.kv_indptr, view.qo_indptr)
    assert [tensor.dtype for tensor in dtypes] == [
        torch.int32,
        torch.int64,
        torch.int32,
        torch.int64,
        torch.int32,
        torch.int32,
    ]


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_positions_keep_their_slots_while_a_sequence_grows(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    kv.attach(storage(kv), storage(kv))
    sequence, neighbour = admit(kv, 20, 5), admit(kv, 20, 5)
    before = kv.place(Batch((Chunk(sequence, 0, 5, True),))).out_cache_loc.tolist()
    assert kv.extend(neighbour, 13)
    assert kv.extend(sequence, 14)
    assert kv.place(Batch((Chunk(sequence, 0, 14, True),))).out_cache_loc.tolist()[:5] == before


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_no_row_means_not_admitted_and_nothing_changed(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    sequences = [admit(kv, 4, 2) for _ in range(ROWS)]
    before = kv.stats()
    late = sequence_of(range(4))
    assert not kv.reserve(late)
    assert late.row is None
    assert kv.stats() == before
    kv.release(sequences[1])
    assert kv.reserve(late)


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_release_is_safe_for_a_sequence_that_was_never_admitted(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    admitted, outsider = admit(kv, 4, 2), sequence_of(range(4))
    before = kv.stats()
    kv.release(outsider)
    assert kv.stats() == before
    admitted.n_computed = 2
    kv.release(admitted)
    kv.release(admitted, keep=False)
    assert (admitted.row, admitted.n_computed) == (None, 0)
    assert kv.stats().held == 0
    kv.check_integrity([])


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_integrity_check_notices_a_sequence_that_nobody_lists(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    admit(kv, 4, 2)
    with pytest.raises(AssertionError, match="row"):
        kv.check_integrity([])


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_a_whole_context_fits_and_one_more_token_is_refused(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    assert kv.refuses(CONTEXT) is None
    assert str(CONTEXT + 1) in (kv.refuses(CONTEXT + 1) or "")
    sequences = [admit(kv, CONTEXT, CONTEXT) for _ in range(ROWS)]
    kv.check_integrity(sequences)


class Life(RuleBasedStateMachine):
    """Sequences come, grow and go in any order; the accounting holds after every step."""

    kind = "contiguous"
    page_size = 1
    affordable = 1000

    def __init__(self) -> None:
        super().__init__()
        self.kv = make(self.kind, self.page_size, affordable=self.affordable)
        self.admitted: dict[int, Sequence] = {}
        self.lengths: dict[int, int] = {}

    @rule()
    def reserve(self) -> None:
        sequence = sequence_of(range(5))
        got_in = self.kv.reserve(sequence)
        assert got_in == (len(self.admitted) < ROWS)
        if got_in:
            assert sequence.row not in [other.row for other in self.admitted.values()]
            self.admitted[sequence.id], self.lengths[sequence.id] = sequence, 0

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), length=st.integers(1, CONTEXT))
    def extend(self, data: st.DataObject, length: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.admitted.values())))
        before = self.kv.stats()
        if self.kv.extend(sequence, length):
            self.lengths[sequence.id] = max(self.lengths[sequence.id], length)
        else:
            assert self.kv.stats() == before
            assert length > self.lengths[sequence.id]

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.admitted.values())))
        name = self.kv.next_page(sequence, 4)
        assert name is None or name == self.kv.next_page(sequence, 5)
        self.kv.reuse(sequence)
        assert sequence.n_cached <= sequence.n_computed <= len(sequence.tokens)
        sequence.n_computed = max(sequence.n_computed, min(self.lengths[sequence.id], len(sequence.tokens)))
        self.kv.record(sequence)
        self.kv.record(sequence)

    @rule()
    def forget(self) -> None:
        held = self.kv.stats().held
        self.kv.forget()
        assert self.kv.stats().held == held
        assert self.kv.stats().cached == 0

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(list(self.admitted.values())))
        self.kv.release(sequence, keep=keep)
        assert sequence.row is None
        del self.admitted[sequence.id], self.lengths[sequence.id]

    @invariant()
    def accounting_holds(self) -> None:
        self.kv.check_integrity(self.admitted.values())
        stats = self.kv.stats()
        assert stats.free + stats.held + stats.cached == stats.total == self.kv.shape.n_tokens
        assert min(stats.free, stats.held, stats.cached) >= 0
        assert stats.held >= max(self.lengths.values(), default=0)


@pytest.mark.parametrize("kind", part.names("kv"))
@pytest.mark.parametrize(("page_size", "affordable"), [(1, 1000), (4, 1000), (4, 24)])
def test_accounting_survives_any_order_of_events(kind: str, page_size: int, affordable: int) -> None:
    machine = type("Life", (Life,), {"kind": kind, "page_size": page_size, "affordable": affordable})
    machine.TestCase.settings = settings(  # type: ignore[attr-defined]
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    machine.TestCase().runTest()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "page_size"), OPTIONS)
def test_reset_takes_everything_back_from_everyone(kind: str, page_size: int) -> None:
    kv = make(kind, page_size)
    for length in (20, 3, 1):
        admit(kv, 20, length)
    kv.reset()
    kv.check_integrity([])
    stats = kv.stats()
    assert (stats.free, stats.held, stats.cached) == (stats.total, 0, 0)
    admit(kv, 20, 20)
