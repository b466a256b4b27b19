"""Continuous batching, step by step: order, caps, rotation, preemption, places."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from astrai_runtime.batch import Batch
from astrai_runtime.event import Finished, Usage
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.scheduler.continuous import PATIENCE, ContinuousConfig, ContinuousScheduler
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.decoder import TextDecoder
from tests.provider.reading import admitted, make_kv, make_scheduler

TOKENIZER = byte_tokenizer()


_firsts = itertools.count()


def sequence(n_prompt: int, backend: str | None = None, priority: int = 0) -> Sequence:
    """Every prompt begins with a token of its own, so that no two share pages."""
    tokens = (next(_firsts), *range(1, n_prompt))
    asked = Prompt(tokens, SamplingParams(), Limits(priority=priority), backend=backend)
    return Sequence(asked, Stream(64), TextDecoder(TOKENIZER), 100)


def added(scheduler: ContinuousScheduler, *lengths: int) -> list[Sequence]:
    sequences = [sequence(length) for length in lengths]
    for one in sequences:
        scheduler.add(one)
    return sequences


def step(scheduler: ContinuousScheduler) -> dict[int, int]:
    """One tick; every sampled sequence gets a token. Sequence id -> tokens computed."""
    scheduler.admit()
    batch = scheduler.next_batch()
    if batch is None:
        return {}
    scheduler.complete(batch)
    for one in batch.sampled:
        one.tokens.append(65)
    scheduler.kv.check_integrity(admitted(scheduler))
    return {chunk.sequence.id: chunk.length for chunk in batch.chunks}


def end(scheduler: ContinuousScheduler, one: Sequence) -> None:
    one.outcome = Finished("stop", Usage())
    scheduler.retire(one)
    scheduler.remove(one)


def test_prompts_enter_in_capped_pieces_and_only_the_last_is_sampled() -> None:
    scheduler = make_scheduler(make_kv())
    (one,) = added(scheduler, 37)
    sizes = []
    while one.n_generated == 0:
        sizes.append(step(scheduler)[one.id])
    assert sizes == [16, 16, 5]
    assert step(scheduler) == {one.id: 1}


def test_every_decoding_sequence_gets_one_token_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(make_kv(context=1024, n_tokens=4096), max_batch_tokens=20)
    talkers = added(scheduler, 3, 4, 5)
    step(scheduler)
    (long,) = added(scheduler, 500)
    for _ in range(10):
        taken = step(scheduler)
        assert [taken[one.id] for one in talkers] == [1, 1, 1]
        assert taken[long.id] == 16
        assert sum(taken.values()) <= 20


def test_prompts_take_turns_under_the_step_cap() -> None:
    scheduler = make_scheduler(make_kv(), max_batch_tokens=16)
    sequences = added(scheduler, 64, 64, 64)
    firsts = [next(iter(step(scheduler))) for _ in range(6)]
    assert sorted(firsts) == sorted([one.id for one in sequences] * 2)


def test_places_are_limited_and_given_in_order() -> None:
    scheduler = make_scheduler(make_kv(), max_batch_size=2)
    first, second, third = added(scheduler, 4, 4, 4)
    step(scheduler)
    assert list(scheduler.running) == [first, second]
    assert list(scheduler.waiting) == [third]
    end(scheduler, first)
    step(scheduler)
    assert list(scheduler.running) == [second, third]


def test_retired_sequence_holds_its_place_but_no_memory() -> None:
    scheduler = make_scheduler(make_kv(), max_batch_size=1)
    first, second = added(scheduler, 4, 4)
    step(scheduler)
    first.outcome = Finished("stop", Usage())
    scheduler.retire(first)
    assert scheduler.kv.stats().held == 0
    assert step(scheduler) == {}
    scheduler.remove(first)
    assert step(scheduler) == {second.id: 4}


def test_paused_sequence_is_skipped() -> None:
    scheduler = make_scheduler(make_kv())
    slow, quick = added(scheduler, 4, 4)
    step(scheduler)
    slow.pending += b"x"
    assert step(scheduler) == {quick.id: 1}
    slow.pending.clear()
    assert step(scheduler) == {slow.id: 1, quick.id: 1}


def test_full_pool_preempts_the_youngest_and_brings_it_back_with_its_tokens() -> None:
    scheduler = make_scheduler(make_kv(page_size=4, n_tokens=16, prefix_cache=False))
    old, young = added(scheduler, 7, 7)
    step(scheduler)
    step(scheduler)
    assert step(scheduler) == {old.id: 1}
    assert list(scheduler.waiting) == [young]
    assert (young.row, young.n_computed, young.n_generated, young.preemptions) == (None, 0, 2, 1)
    assert step(scheduler) == {old.id: 1}  # nobody comes in while the pool is short
    end(scheduler, old)
    assert step(scheduler) == {young.id: 9}
    assert young.n_generated == 3
    assert scheduler.preemptions == 1


def test_slow_reader_is_preempted_first_however_old_it_is() -> None:
    scheduler = make_scheduler(make_kv(page_size=4, n_tokens=16, prefix_cache=False))
    slow, quick = added(scheduler, 7, 7)
    step(scheduler)
    slow.pending += b"x"
    step(scheduler)
    step(scheduler)
    assert list(scheduler.waiting) == [slow]
    assert quick.preemptions == 0
    for _ in range(5):
        assert step(scheduler) == {quick.id: 1}  # it does not come back to hold slots that it cannot use
    slow.pending.clear()
    end(scheduler, quick)
    assert step(scheduler) == {slow.id: 8}


def test_preempted_sequence_keeps_its_place() -> None:
    scheduler = make_scheduler(make_kv(page_size=4, n_tokens=16, prefix_cache=False), max_batch_size=2)
    slow, quick, third = added(scheduler, 7, 7, 2)
    step(scheduler)
    slow.pending += b"x"
    step(scheduler)
    step(scheduler)
    assert list(scheduler.waiting) == [slow, third]
    quick.outcome = Finished("stop", Usage())
    scheduler.retire(quick)  # its reader has not seen the end: the place stays taken
    assert step(scheduler) == {}
    slow.pending.clear()
    assert step(scheduler) == {slow.id: 8}
    assert list(scheduler.waiting) == [third]


def test_two_growing_prompts_never_block_each_other_for_ever() -> None:
    scheduler = make_scheduler(make_kv(page_size=1, n_tokens=60), max_batch_tokens=8, max_prompt_tokens_per_tick=8)
    sequences = added(scheduler, 50, 50, 50)
    for _ in range(200):
        step(scheduler)
        for one in sequences:
            if one.n_generated >= 5 and one.outcome is None:
                end(scheduler, one)
    assert all(one.outcome is not None for one in sequences)
    assert scheduler.kv.stats().held == 0


def test_only_one_backend_serves_a_step_and_all_get_their_turn() -> None:
    scheduler = make_scheduler(make_kv())
    for name in (None, "a", None, "b"):
        scheduler.add(sequence(4, name))
    served = []
    for _ in range(6):
        scheduler.admit()
        batch = scheduler.next_batch()
        assert isinstance(batch, Batch)
        assert len({chunk.sequence.prompt.backend for chunk in batch.chunks}) == 1
        served.append(batch.backend)
        scheduler.complete(batch)
        for one in batch.sampled:
            one.tokens.append(65)
    assert served == [None, "a", "b", None, "a", "b"]


def test_sequences_can_be_retired_wherever_they_are() -> None:
    scheduler = make_scheduler(make_kv(), max_batch_size=1)
    running, waiting = added(scheduler, 4, 4)
    step(scheduler)
    for one in (running, waiting, sequence(3)):
        end(scheduler, one)
        end(scheduler, one)
    assert not list(scheduler.running)
    assert not list(scheduler.waiting)
    assert step(scheduler) == {}


def test_step_cap_below_the_number_of_sequences_is_refused() -> None:
    options = {"kind": "continuous", "max_waiting": 1, "undrained_ttl_s": None, "max_prompt_tokens_per_tick": 4}
    with pytest.raises(ValidationError, match="max_batch_tokens=4 must be at least max_batch_size=8"):
        ContinuousConfig(max_batch_size=8, max_batch_tokens=4, **options)
    for field in ("max_batch_size", "max_batch_tokens"):
        with pytest.raises(ValidationError, match=field):
            ContinuousConfig(**{"max_batch_size": 1, "max_batch_tokens": 8, **options, field: 0})
    with pytest.raises(ValidationError, match="max_bacth_size"):
        ContinuousConfig(max_batch_size=1, max_batch_tokens=8, max_bacth_size=2, **options)


def prioritized(scheduler: ContinuousScheduler, *priorities: int, n_prompt: int = 4) -> list[Sequence]:
    sequences = [sequence(n_prompt, priority=priority) for priority in priorities]
    for one in sequences:
        scheduler.add(one)
    return sequences


def test_higher_priority_is_admitted_first_and_equal_ones_in_order() -> None:
    scheduler = make_scheduler(make_kv(), max_batch_size=2)
    low, normal, high, also_high = prioritized(scheduler, -1, 0, 5, 5)
    step(scheduler)
    assert list(scheduler.running) == [high, also_high]
    assert list(scheduler.waiting) == [normal, low]


def test_lowest_priority_is_preempted_first_however_old_it_is() -> None:
    scheduler = make_scheduler(make_kv(page_size=4, n_tokens=16, prefix_cache=False))
    low, high = prioritized(scheduler, 0, 1, n_prompt=7)
    step(scheduler)
    step(scheduler)
    assert step(scheduler) == {high.id: 1}
    assert list(scheduler.waiting) == [low]
    assert low.overtaken == 2  # once for a place, once for memory


def test_nobody_is_overtaken_more_often_than_the_documented_bound() -> None:
    scheduler = make_scheduler(make_kv(), max_batch_size=1)
    (first,) = prioritized(scheduler, 9)
    step(scheduler)
    (low,) = prioritized(scheduler, 0)
    before, current = 0, first
    while low not in scheduler.running:
        prioritized(scheduler, 9)  # there is always somebody more important
        end(scheduler, current)
        step(scheduler)
        (current,) = scheduler.running
        before += 1
        assert before <= PATIENCE + 1
    assert before == PATIENCE + 1


def test_nobody_loses_its_memory_more_often_than_the_documented_bound() -> None:
    scheduler = make_scheduler(make_kv(page_size=4, n_tokens=16, prefix_cache=False), max_batch_size=2)
    (low,) = prioritized(scheduler, 0, n_prompt=7)
    for _ in range(500):
        if not [one for one in [*scheduler.running, *scheduler.waiting] if one is not low]:
            prioritized(scheduler, 9, n_prompt=7)
        step(scheduler)
        for one in list(scheduler.running):
            if one.n_generated >= 6:
                end(scheduler, one)
        if low not in [*scheduler.running, *scheduler.waiting]:
            break
    assert low.outcome is not None
    assert low.preemptions <= PATIENCE


def test_recompute_brings_everybody_back_with_the_tokens_that_they_have() -> None:
    scheduler = make_scheduler(make_kv())
    one, two, gone = added(scheduler, 5, 20, 4)
    step(scheduler)
    step(scheduler)
    gone.outcome = Finished("stop", Usage())
    scheduler.retire(gone)
    had = [list(one.tokens), list(two.tokens)]
    scheduler.recompute()
    assert scheduler.kv.stats().free == scheduler.kv.stats().total
    assert [one.tokens, two.tokens] == had
    assert list(scheduler.running) == [gone]  # its reader has not seen the end
    assert step(scheduler) == {one.id: 7, two.id: 16}


def test_reset_forgets_everybody() -> None:
    scheduler = make_scheduler(make_kv(), max_batch_size=1)
    added(scheduler, 5, 6)
    step(scheduler)
    scheduler.reset()
    assert not list(scheduler.running)
    assert not list(scheduler.waiting)
    assert scheduler.kv.stats().free == scheduler.kv.stats().total
    assert step(scheduler) == {}


def test_time_to_live_of_unread_answers_is_positive_or_null() -> None:
    options = {"kind": "continuous", "max_batch_size": 1, "max_batch_tokens": 8, "max_waiting": 1}
    rest = {"max_prompt_tokens_per_tick": 4}
    assert ContinuousConfig(**options, **rest, undrained_ttl_s=None).undrained_ttl_s is None
    with pytest.raises(ValidationError, match="undrained_ttl_s"):
        ContinuousConfig(**options, **rest, undrained_ttl_s=0)


def test_prompt_that_does_not_fit_beside_the_others_waits_instead_of_being_computed_twice() -> None:
    scheduler = make_scheduler(make_kv(page_size=4, n_tokens=32, prefix_cache=False))
    first, second = added(scheduler, 20, 20)
    computed = 0
    while second.n_generated < 3:
        computed += sum(step(scheduler).values())
        if first.n_generated == 3 and first.outcome is None:
            assert list(scheduler.waiting) == [second]
            end(scheduler, first)
    assert scheduler.preemptions == 0
    assert computed == 2 * (20 + 2)


def test_prompt_of_higher_priority_takes_the_memory_that_it_needs() -> None:
    scheduler = make_scheduler(make_kv(page_size=4, n_tokens=32, prefix_cache=False))
    (low,) = prioritized(scheduler, 0, n_prompt=20)
    step(scheduler)
    step(scheduler)
    (high,) = prioritized(scheduler, 1, n_prompt=20)
    step(scheduler)
    assert list(scheduler.running) == [high]
    assert list(scheduler.waiting) == [low]
