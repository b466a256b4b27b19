"""Any order of arrivals, steps, cancellations, failures, preemptions and evictions: right accounts and right tokens."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astrai_runtime.event import Finished, Usage
from astrai_runtime.kv.base import KVMode
from astrai_runtime.kv.paged import PagedKV
from astrai_runtime.request import Limits, Prompt
from astrai_runtime.scheduler.continuous import ContinuousScheduler
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from tests.kv.chain import compute, continuation, likeliest
from tests.model.running import Silent
from tests.provider.reading import GREEDY, admitted, make_kv, make_scheduler

BEGINNINGS = ([40, 41, 42, 43] * 5, [40, 41, 42, 43] * 2 + [50, 51] * 6, [42, 43, 40, 41] * 5)
ROWS, CONTEXT, POOL = 3, 40, 56
EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "60"))  # `just machine` asks for more


class Lives(RuleBasedStateMachine):
    """A scheduler over a pool that is too small for everybody, with a model that reads what the pool holds."""

    kind = "paged"

    @initialize(page_size=st.sampled_from([1, 2, 4]), cap=st.sampled_from([3, 8, 16]))
    def begin(self, page_size: int, cap: int) -> None:
        self.kv: KVMode = make_kv(self.kind, rows=ROWS, context=CONTEXT, page_size=page_size, n_tokens=POOL)
        self.page_size = page_size if self.kind == "paged" else CONTEXT
        self.scheduler: ContinuousScheduler = make_scheduler(
            self.kv, max_batch_size=ROWS, max_batch_tokens=24, max_prompt_tokens_per_tick=cap
        )
        self.live: list[Sequence] = []

    @rule(
        base=st.sampled_from(BEGINNINGS),
        length=st.integers(0, 20),
        suffix=st.lists(st.sampled_from([40, 41, 50]), min_size=1, max_size=3),
        count=st.integers(1, 9),
        salt=st.sampled_from(["", "", "", "tenant"]),
    )
    def arrive(self, base: list[int], length: int, suffix: list[int], count: int, salt: str) -> None:
        asked = Prompt((*base[:length], *suffix), GREEDY, Limits(), cache_salt=salt)
        sequence = Sequence(asked, Stream(16), Silent(), count)
        assert self.kv.refuses(sequence.n_prompt + count) is None
        self.scheduler.add(sequence)
        self.live.append(sequence)

    @rule()
    def step(self) -> None:
        self.scheduler.admit()
        self.check()
        batch = self.scheduler.next_batch()
        self.check()
        if batch is None:
            return
        contexts = compute(batch, self.kv)
        self.scheduler.complete(batch)
        for sequence, keys in zip(batch.sampled, contexts, strict=True):
            sequence.tokens.append(likeliest(keys))
            if sequence.n_generated == sequence.max_tokens:
                self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        generated = sequence.tokens[sequence.n_prompt :]
        assert generated == continuation(sequence.prompt, sequence.max_tokens)
        assert sequence.n_cached % self.page_size == 0
        assert 0 <= sequence.n_cached < sequence.n_prompt
        self.leave(sequence)

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        sequence.outcome = Finished("cancelled", Usage())
        self.scheduler.retire(sequence, keep=keep)
        self.scheduler.remove(sequence)
        self.live.remove(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def cancel_or_fail(self, data: st.DataObject, keep: bool) -> None:
        self.leave(data.draw(st.sampled_from(self.live)), keep=keep)

    @precondition(lambda self: admitted(self.scheduler))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler._preempt(data.draw(st.sampled_from(admitted(self.scheduler))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        sequence.pending[:] = b"" if sequence.pending else b"x"

    @precondition(lambda self: self.kv.stats().cached)
    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        if isinstance(self.kv, PagedKV) and self.kv._prefixes is not None:
            self.kv._prefixes.evict(round(share * self.kv._pool.n_cached))

    @rule()
    def forget(self) -> None:
        self.kv.forget()
        assert self.kv.stats().cached == 0

    @invariant()
    def check(self) -> None:
        self.kv.check_integrity(admitted(self.scheduler))
        stats = self.kv.stats()
        assert stats.free + stats.held + stats.cached == stats.total
        assert min(stats.free, stats.held, stats.cached) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "live"):  # it failed before it began
            return
        for sequence in self.live:
            sequence.pending.clear()
        for _ in range(400):
            self.step()
        assert not self.live, "somebody waits for ever"
        assert self.kv.stats().held == 0
        self.kv.forget()
        assert self.kv.stats().free == self.kv.stats().total


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_any_order_of_events_keeps_the_accounts_and_the_tokens(kind: str) -> None:
    machine = type("Lives", (Lives,), {"kind": kind})
    machine.TestCase.settings = settings(  # type: ignore[attr-defined]
        max_examples=EXAMPLES if kind == "paged" else EXAMPLES // 6,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    machine.TestCase().runTest()  # type: ignore[attr-defined]
