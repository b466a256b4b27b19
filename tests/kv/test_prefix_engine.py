"""The prefix cache under a real engine: every way to end, a pool that is too small, and what callers are told."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from astrai_runtime.errors import CapacityExceeded, ContextLengthExceeded
from astrai_runtime.event import Delta, Failed, Finished
from astrai_runtime.kv.paged import PagedKV
from astrai_runtime.request import Limits, SamplingParams
from astrai_runtime.stream import Stream
from tests.kv.chain import ChainRig, ask, continuation
from tests.provider.reading import EOS, GREEDY, make_kv

SOON = 30.0  # seconds that no healthy wait ever takes
ENDS_AT_ONCE = replace(GREEDY, logit_bias=((EOS, 100.0),))


def read(stream: Stream) -> tuple[str, list[int], Finished | Failed]:
    """The text, the tokens (where log-probabilities were asked for) and the outcome."""
    *deltas, outcome = stream.events(SOON)
    assert not isinstance(outcome, Delta)
    parts = [event for event in deltas if isinstance(event, Delta)]
    tokens = [note.token_id for event in parts for note in event.logprobs]
    return "".join(event.text for event in parts), tokens, outcome


def words(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(40, 90) for _ in range(length)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_k05_accounts_balance_after_a_thousand_mixed_endings(page_size: int) -> None:
    dice = random.Random(page_size)
    beginnings = [words(dice, 12) for _ in range(5)]
    twins, broken = words(dice, 14), words(dice, 9)
    kv = make_kv(rows=8, context=64, page_size=page_size, n_tokens=160)
    with ChainRig(kv, max_waiting=1000, max_batch_tokens=48) as rig:
        rig.failing = {(*broken, extra) for extra in range(40, 50)}
        streams: list[tuple[str, Stream]] = []
        for number in range(1000):
            kind = dice.choice(["length", "eos", "stop", "cancel", "deadline", "broken", "twin", "twin"])
            tokens = twins if kind == "twin" else dice.choice(beginnings)[: dice.randint(1, 12)] + words(dice, 2)
            if kind == "broken":
                tokens = [*broken, 40 + number % 10]
            prompt = ask(
                tokens,
                dice.randint(1, 5),
                ENDS_AT_ONCE if kind == "eos" else GREEDY,
                stop=tuple(map(chr, range(32, 80))) if kind == "stop" else (),
                deadline_s=0.0 if kind == "deadline" else None,
            )
            streams.append((kind, rig.engine.submit(prompt)))
            victim, stream = dice.choice(streams)
            if victim == "cancel":  # while it waits, in its prompt, while it speaks, or when all is over
                stream.cancel()
        outcomes = [read(stream)[2] for _, stream in streams]
    reasons = {kind: set[str]() for kind, _ in streams}
    for (kind, _), outcome in zip(streams, outcomes, strict=True):
        reasons[kind].add(outcome.reason if isinstance(outcome, Finished) else type(outcome.error).__name__)
    assert reasons["eos"] == {"stop"}
    assert reasons["twin"] == {"length"}
    assert reasons["broken"] == {"ProviderError"}
    assert reasons["deadline"] == {"DeadlineExpired"}
    assert "cancelled" in reasons["cancel"]
    assert isinstance(kv, PagedKV)
    assert set(kv._pool.references) == {0}
    assert kv.stats().cached > 0
    kv.forget()
    assert kv.stats().free == kv.stats().total


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5, presence_penalty=0.2, top_k=30)],
    ids=["greedy", "seeded"],
)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_k06_preempted_answers_continue_as_if_nothing_had_happened(prefix_cache: bool, sampling: SamplingParams) -> None:
    dice = random.Random(3)
    asked = [replace(ask(words(dice, 10), 40, sampling), top_logprobs=0) for _ in range(3)]
    answers = []
    for pool in (96, 960):
        with ChainRig(make_kv(n_tokens=pool, prefix_cache=prefix_cache)) as rig:
            answers.append([read(stream) for stream in [rig.engine.submit(prompt) for prompt in asked]])
            assert (rig.engine.counters().preemptions > 0) == (pool == 96)
    for squeezed, free in zip(*answers, strict=True):
        assert squeezed == free
        assert len(squeezed[1]) == squeezed[2].usage.completion_tokens == 40  # nothing was sent twice
        assert squeezed[2].usage.cached_tokens == 0  # its own pages are no saving


def test_k07_request_that_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    dice = random.Random(0)
    with ChainRig(make_kv(page_size=4, n_tokens=32, context=256)) as rig:
        with pytest.raises(CapacityExceeded, match=r"9 pages .* has 8"):
            rig.engine.submit(ask(words(dice, 20), 16))
        small = [ask(words(dice, 9), 4) for _ in range(10)]
        for prompt, stream in [(prompt, rig.engine.submit(prompt)) for prompt in small]:
            text, _, outcome = read(stream)
            assert text == bytes(continuation(prompt, 4)).decode()
            assert isinstance(outcome, Finished)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("length", [20, 31])
def test_k10_answer_ends_at_the_last_position_and_the_next_one_is_clean(kind: str, length: int) -> None:
    tokens = words(random.Random(1), length)
    unlimited = replace(ask(tokens), limits=Limits())
    with ChainRig(make_kv(kind, rows=1, context=32, n_tokens=64), max_batch_size=1) as rig:
        with pytest.raises(ContextLengthExceeded, match="32"):
            rig.engine.submit(ask(tokens, 1000))
        for _ in range(3):
            text, _, outcome = read(rig.engine.submit(unlimited))
            assert isinstance(outcome, Finished)
            assert outcome.reason == "length"
            assert outcome.usage.prompt_tokens + outcome.usage.completion_tokens == 32
            assert text == bytes(continuation(unlimited, 32 - length)).decode()


@pytest.mark.parametrize(("page_size", "expected"), [(1, 20), (4, 20), (16, 16)])
def test_usage_tells_how_much_of_the_prompt_was_cached(page_size: int, expected: int) -> None:
    dice = random.Random(2)
    system = words(dice, 20)
    with ChainRig(make_kv(page_size=page_size)) as rig:
        usages = [read(rig.engine.submit(ask(system + words(dice, 5), 4)))[2].usage for _ in range(3)]
        assert [usage.cached_tokens for usage in usages] == [0, expected, expected]
        assert [usage.prompt_tokens for usage in usages] == [25, 25, 25]
        assert rig.engine.counters().cached_tokens == 2 * expected


def test_next_turn_resumes_right_after_the_last_complete_page() -> None:
    first = ask(words(random.Random(4), 17), 14)  # 31 tokens, of which the last was never computed
    with ChainRig() as rig:
        read(rig.engine.submit(first))
        turn = ask([*first.token_ids, *continuation(first, 14), 60, 61], 4)
        text, _, outcome = read(rig.engine.submit(turn))
    assert outcome.usage.cached_tokens == 28
    assert text == bytes(continuation(turn, 4)).decode()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prompts_that_arrive_together_compute_what_they_share_once(prefix_cache: bool) -> None:
    dice = random.Random(5)
    system = words(dice, 64)
    asked = [ask([*system, *words(dice, 4)], 4) for _ in range(8)]
    with ChainRig(make_kv(prefix_cache=prefix_cache), max_batch_tokens=64) as rig:
        streams = [rig.engine.submit(prompt) for prompt in asked]
        for prompt, stream in zip(asked, streams, strict=True):
            assert read(stream)[0] == bytes(continuation(prompt, 4)).decode()
    computed = sum(batch.n_tokens for batch in rig.batches)
    each = 8 * (4 + 3)
    assert computed == 64 + each if prefix_cache else 8 * 64 + each


def test_failed_request_leaves_nothing_for_others_to_find() -> None:
    dice = random.Random(6)
    good, bad = words(dice, 12), words(dice, 40)
    with ChainRig() as rig:
        read(rig.engine.submit(ask(good, 4)))
        rig.failing.add(tuple(bad))
        outcome = read(rig.engine.submit(ask(bad)))[2]
        assert isinstance(outcome, Failed)
        rig.failing.clear()
        assert read(rig.engine.submit(ask(bad)))[2].usage.cached_tokens == 0
        assert read(rig.engine.submit(ask(good)))[2].usage.cached_tokens == 8  # others' pages are untouched


@pytest.mark.parametrize("options", [{}, {"cache_salt": "a"}, {"cache_identity": ("adapter",)}])
def test_requests_of_one_identity_share_and_others_do_not(options: dict[str, Any]) -> None:
    tokens = words(random.Random(7), 12)
    with ChainRig() as rig:
        read(rig.engine.submit(ask(tokens, 4, cache_salt="b")))
        cached = [read(rig.engine.submit(ask(tokens, 4, **options)))[2].usage.cached_tokens for _ in range(2)]
    assert cached == [0, 8]
