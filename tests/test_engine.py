"""The engine over real KV modes: right answers under load, and every way in which a request can end."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import replace

import pytest

from astrai_runtime.batch import Batch
from astrai_runtime.engine import MAX_RESTARTS
from astrai_runtime.errors import (
    BackendRefused,
    Busy,
    Cancelled,
    CapacityExceeded,
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    ProviderError,
    WrongState,
)
from astrai_runtime.event import Delta, Failed, Finished
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from tests.asking import SOON, Gate, outcome_of, text_of
from tests.provider.reading import EOS, GREEDY, Rig, admitted, expected, make_kv, prompt


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("jitter", [0, 1, 2])
def test_many_concurrent_requests_equal_their_solo_runs(kind: str, jitter: int) -> None:
    dice = random.Random(jitter)
    asked = [([dice.randrange(33, 120) for _ in range(dice.randint(1, 50))], dice.randint(1, 20)) for _ in range(24)]
    with Rig(make_kv(kind)) as rig:
        streams: dict[int, Stream] = {}

        def submit(indices: range) -> None:
            for index in indices:
                streams[index] = rig.engine.submit(prompt(*asked[index]))

        threads = [threading.Thread(target=submit, args=(range(start, 24, 4),)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answers = {index: text_of(stream) for index, stream in streams.items()}
    for index, (tokens, count) in enumerate(asked):
        assert answers[index] == expected(tokens, count), index


def test_prompts_and_decoding_share_a_batch() -> None:
    with Rig() as rig:
        first = rig.engine.submit(prompt("a", 40))
        second = rig.engine.submit(prompt("b" * 60, 5))
        text_of(first), text_of(second)
    assert any({chunk.length for chunk in batch.chunks} >= {1, 16} for batch in rig.provider.batches)


def test_answer_ends_exactly_at_max_tokens_with_counts() -> None:
    with Rig() as rig:
        outcome = outcome_of(rig.engine.submit(prompt("hello", 7)))
    assert isinstance(outcome, Finished)
    assert (outcome.reason, outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == ("length", 5, 7)


def test_answer_without_a_limit_ends_exactly_at_the_context() -> None:
    with Rig(make_kv(context=20, n_tokens=256)) as rig:
        outcome = outcome_of(rig.engine.submit(prompt("hello", None)))
        assert outcome.usage.completion_tokens == 15
        longest = outcome_of(rig.engine.submit(prompt("x" * 19, 1)))
        assert longest.usage.completion_tokens == 1


def test_end_token_stops_is_counted_and_never_shown() -> None:
    forced = replace(GREEDY, logit_bias=((EOS, 100.0),))
    with Rig() as rig:
        events = list(rig.engine.submit(prompt("hello", 7, forced)).events(SOON))
        ignoring = replace(prompt("hello", 3, forced), limits=Limits(max_tokens=3, ignore_eos=True))
        ignored = outcome_of(rig.engine.submit(ignoring))
    assert len(events) == 1
    assert isinstance(events[0], Finished)
    assert (events[0].reason, events[0].usage.completion_tokens) == ("stop", 1)
    assert (ignored.usage.completion_tokens, ignored.reason) == (3, "length")


def test_stop_string_ends_the_answer_and_is_reported() -> None:
    whole = expected(list(b"hello"), 12)
    with Rig() as rig:
        *deltas, outcome = rig.engine.submit(prompt("hello", 12, stop=(whole[4:7],))).events(SOON)
        held = text_of(rig.engine.submit(prompt("hello", 12, stop=(whole[10:] + "never",))))
    assert "".join(event.text for event in deltas) == whole[: whole.index(whole[4:7])]
    assert (outcome.reason, outcome.stop_sequence) == ("stop", whole[4:7])
    assert held == whole


def test_log_probabilities_arrive_with_their_tokens() -> None:
    with Rig() as rig:
        events = list(rig.engine.submit(prompt("hello", 5, top_logprobs=2)).events(SOON))
    notes = [note for event in events if isinstance(event, Delta) for note in event.logprobs]
    assert b"".join(note.data for note in notes).decode() == expected(list(b"hello"), 5)
    assert all(note.top[0].token_id == note.token_id and len(note.top) == 2 and note.logprob <= 0 for note in notes)


def test_seeded_answer_ignores_its_neighbours() -> None:
    seeded = SamplingParams(temperature=1.2, top_k=20, seed=11)
    with Rig() as rig:
        alone = text_of(rig.engine.submit(prompt("tell me", 20, seeded)))
        noise = [rig.engine.submit(prompt("x" * (5 + i), 30, SamplingParams())) for i in range(5)]
        beside = rig.engine.submit(prompt("tell me", 20, seeded))
        assert text_of(beside) == alone
        assert text_of(rig.engine.submit(prompt("tell me", 20, replace(seeded, seed=12)))) != alone
        unseeded = [text_of(rig.engine.submit(prompt("tell me", 20, replace(seeded, seed=None)))) for _ in range(2)]
        assert unseeded[0] != unseeded[1]
        for stream in noise:
            text_of(stream)


@pytest.mark.parametrize("cache", [False, "auto"])
def test_k06_preempted_answers_equal_those_of_a_large_pool(cache: bool | str) -> None:
    seeded = SamplingParams(
        temperature=1.0, seed=5, top_k=40, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1
    )
    asked = [prompt(word * 6, 60, sampling, top_logprobs=0) for word in ("ab", "cd") for sampling in (GREEDY, seeded)]
    asked.append(prompt("ef" * 6, 60, stop=("never ever",)))
    answers = []
    for pool in (96, 960):
        with Rig(make_kv(n_tokens=pool, prefix_cache=cache)) as rig:
            streams = [rig.engine.submit(one) for one in asked]
            events = [list(stream.events(SOON)) for stream in streams]
            preempted = rig.engine.counters().preemptions
        texts = ["".join(event.text for event in one[:-1]) for one in events]
        notes = [[note.token_id for event in one[:-1] for note in event.logprobs] for one in events]
        assert [len(one) for one in notes] == [60, 60, 60, 60, 0]  # no token was sent twice
        assert [one[-1].usage.completion_tokens for one in events] == [60] * 5
        answers.append((texts, notes))
        assert (preempted > 0) == (pool == 96)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_k10_answer_ends_at_the_last_position_and_leaves_the_slot_clean(kind: str) -> None:
    with Rig(make_kv(kind, rows=1, context=32, n_tokens=32), max_batch_size=1) as rig:
        for word in ("twenty", "others", "twenty"):
            tokens = list((word * 4)[:20].encode())
            *deltas, outcome = rig.engine.submit(prompt(tokens, None)).events(SOON)
            assert "".join(delta.text for delta in deltas) == expected(tokens, 12)
            assert (outcome.reason, outcome.usage.prompt_tokens + outcome.usage.completion_tokens) == ("length", 32)
            with pytest.raises(ContextLengthExceeded, match=r"holds 32 tokens.*needs 1020"):
                rig.engine.submit(prompt(tokens, 1000))
        assert text_of(rig.engine.submit(prompt("x" * 31, 1))) == expected(list(b"x" * 31), 1)


@pytest.mark.parametrize(
    "bias",
    [
        ((-1, 1.0),),
        ((258, 1.0),),
        ((999999, 1.0),),
        ((2**70, 1.0),),
        ((65, 101.0),),
        ((65, float("nan")),),
        ((65, float("inf")),),
        tuple((token, 1.0) for token in range(5000)),
    ],
)
def test_s05_bias_of_tokens_that_do_not_exist_is_refused_and_a_running_stream_goes_on(bias) -> None:
    with Rig() as rig:
        gate = Gate(rig)
        running = rig.engine.submit(prompt("running", 20))
        assert gate.entered.wait(SOON)
        with pytest.raises(InvalidRequest) as caught:
            rig.engine.submit(prompt("abc", 3, replace(GREEDY, logit_bias=bias)))
        assert caught.value.param == "/logit_bias"
        gate.open.set()
        assert text_of(running) == expected(list(b"running"), 20)
        assert rig.engine.ready


def test_s05_bias_forces_and_bans_beside_a_running_stream() -> None:
    best = ord(expected(list(b"abc"), 1))
    with Rig() as rig:
        running = rig.engine.submit(prompt("running", 20))
        forced = rig.engine.submit(prompt("abc", 5, replace(GREEDY, logit_bias=((ord("#"), 100.0),))))
        banned = rig.engine.submit(prompt("abc", 1, replace(GREEDY, logit_bias=((best, -100.0),))))
        assert text_of(forced) == "#####"
        assert text_of(banned) != chr(best)
        assert text_of(running) == expected(list(b"running"), 20)


def test_s08_greedy_and_sampled_requests_in_one_batch_equal_their_solo_runs() -> None:
    settings = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, top_k=2),
        replace(GREEDY, logit_bias=((ord("x"), 100.0),)),
        SamplingParams(temperature=0.7, seed=4, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
    ]
    asked = [prompt("the same text", 25, sampling) for sampling in settings]
    alone = []
    for one in asked:
        with Rig() as rig:
            alone.append(text_of(rig.engine.submit(one)))
    assert len(set(alone)) == 4
    with Rig() as rig:
        gate = Gate(rig)
        streams = [rig.engine.submit(one) for one in asked]
        gate.open.set()
        assert [text_of(stream) for stream in streams] == alone
        assert max(len(batch.sampled) for batch in rig.provider.batches) == 4


def test_k07_request_that_can_never_fit_is_refused_and_blocks_nobody() -> None:
    with Rig(make_kv(page_size=4, n_tokens=32)) as rig:
        with pytest.raises(CapacityExceeded, match=r"needs 9 pages.*has 8"):
            rig.engine.submit(prompt("x" * 30, 6))
        streams = [rig.engine.submit(prompt("abc", 6)) for _ in range(10)]
        assert {text_of(stream) for stream in streams} == {expected(list(b"abc"), 6)}
        unlimited = outcome_of(rig.engine.submit(prompt("abc", None)))
        assert unlimited.usage.completion_tokens == 29


def test_r03_overload_is_refused_at_once_and_the_rest_is_served_in_order() -> None:
    with Rig(max_batch_size=1, max_waiting=2) as rig:
        gate = Gate(rig)
        accepted = [rig.engine.submit(prompt(f"n{i}", 3)) for i in range(3)]
        for _ in range(7):
            with pytest.raises(Busy, match="1 requests run and 2 wait") as busy:
                rig.engine.submit(prompt("more", 3))
            assert not isinstance(busy.value, NotReady)
            assert busy.value.retry_after_s > 0
        gate.open.set()
        assert [text_of(stream) for stream in accepted] == [expected(list(f"n{i}".encode()), 3) for i in range(3)]
        assert text_of(rig.engine.submit(prompt("later", 3))) == expected(list(b"later"), 3)
        assert rig.engine.counters().refused == 7


def test_sequential_clients_are_never_refused_with_one_place() -> None:
    with Rig(max_batch_size=1, max_waiting=0) as rig:
        for i in range(50):
            text_of(rig.engine.submit(prompt(f"{i}", 2)))


def test_engine_that_is_not_running_refuses() -> None:
    rig = Rig()
    with pytest.raises(NotReady, match="loading"):
        rig.engine.submit(prompt("early"))
    assert not rig.engine.ready
    rig.engine.start()
    assert rig.engine.ready
    with pytest.raises(WrongState, match="started before"):
        rig.engine.start()
    rig.engine.shutdown()
    rig.engine.shutdown()
    assert rig.provider.closed == 1
    with pytest.raises(NotReady, match="stopped"):
        rig.engine.submit(prompt("late"))


def test_shutdown_answers_everyone() -> None:
    with Rig(max_batch_size=2) as rig:
        gate = Gate(rig)
        streams = [rig.engine.submit(prompt(f"n{i}", 100)) for i in range(6)]
        assert gate.entered.wait(SOON)
        gate.open.set()
        streams[0].read(1, SOON)
    errors = [outcome_of(stream).error for stream in streams]
    assert isinstance(errors[0], Cancelled)
    assert all(isinstance(error, NotReady | Cancelled) for error in errors)
    assert isinstance(errors[5], NotReady)
    assert not any(thread.name == "engine-reader" for thread in threading.enumerate())


def test_drain_lets_running_answers_finish_and_fails_the_queue() -> None:
    with Rig(max_batch_size=1) as rig:
        gate = Gate(rig)
        running, queued = rig.engine.submit(prompt("running", 20)), rig.engine.submit(prompt("queued", 20))
        assert gate.entered.wait(SOON)
        assert rig.engine.drain(0.0) is False
        assert not rig.engine.ready
        with pytest.raises(NotReady, match="shutting down"):
            rig.engine.submit(prompt("new"))
        gate.open.set()
        assert rig.engine.drain(SOON) is True
        assert text_of(running) == expected(list(b"running"), 20)
        assert isinstance(outcome_of(queued).error, NotReady)


def test_provider_error_fails_the_offender_alone() -> None:
    with Rig() as rig:

        def fail_for_bad(batch: Batch) -> None:
            if any(chunk.sequence.prompt.token_ids[0] == ord("!") for chunk in batch.chunks):
                raise RuntimeError("cannot compute this")

        gate = Gate(rig)
        good = [rig.engine.submit(prompt(f"good{i}", 10)) for i in range(3)]
        assert gate.entered.wait(SOON)
        bad = rig.engine.submit(prompt("!bad", 10))
        rig.provider.before = fail_for_bad
        gate.open.set()
        assert [text_of(stream) for stream in good] == [expected(list(f"good{i}".encode()), 10) for i in range(3)]
        outcome = outcome_of(bad)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, ProviderError)
        assert str(outcome.error) == "the model failed while it worked on this request"
        assert rig.engine.ready
        assert rig.engine.counters().failed == 1


def test_logits_that_are_not_finite_fail_one_request() -> None:
    with Rig() as rig:

        def spoil(batch, logits) -> None:
            for row, sequence in enumerate(batch.sampled):
                if sequence.prompt.token_ids[0] == ord("!") and sequence.n_generated == 2:
                    logits[row, 3] = float("nan")

        rig.provider.after = spoil
        good, bad = rig.engine.submit(prompt("good", 10)), rig.engine.submit(prompt("!bad", 10))
        assert text_of(good) == expected(list(b"good"), 10)
        *deltas, outcome = bad.events(SOON)
        assert "".join(delta.text for delta in deltas) == expected(list(b"!bad"), 2)
        assert isinstance(outcome.error, ProviderError)


def test_engine_that_dies_again_and_again_answers_everyone_and_stays_down() -> None:
    rig = Rig()
    gate = Gate(rig)
    rig.engine.start()
    streams = [rig.engine.submit(prompt(f"n{i}", 10)) for i in range(3)]
    assert gate.entered.wait(SOON)

    def broken() -> None:
        raise ZeroDivisionError("the scheduler is broken")

    rig.scheduler.admit = broken
    gate.open.set()
    assert all(isinstance(outcome_of(stream).error, ProviderError) for stream in streams)
    rig.engine._thread.join(SOON)
    assert not rig.engine.ready
    assert rig.engine.restarts == MAX_RESTARTS
    with pytest.raises(NotReady, match="failed too often"):
        rig.engine.submit(prompt("late"))
    assert rig.engine.drain(SOON)
    rig.engine.shutdown()
    assert rig.provider.closed == 1


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"tokens": []}, InvalidRequest, None),
        ({"tokens": [258]}, InvalidRequest, None),
        ({"tokens": [-1]}, InvalidRequest, None),
        ({"max_tokens": 0}, InvalidRequest, "/max_tokens"),
        ({"max_tokens": 300}, ContextLengthExceeded, None),
        ({"tokens": [65] * 256, "max_tokens": None}, ContextLengthExceeded, None),
        ({"sampling": SamplingParams(top_p=1.5)}, InvalidRequest, "/top_p"),
        ({"sampling": SamplingParams(logit_bias=((999999, 1.0),))}, InvalidRequest, "/logit_bias"),
        ({"stop": ("",)}, InvalidRequest, None),
        ({"backend": "cuda"}, BackendRefused, None),
    ],
)
def test_requests_that_cannot_run_are_refused_before_they_queue(fields, error, param) -> None:
    with Rig() as rig:
        neighbour = rig.engine.submit(prompt("neighbour", 20))
        with pytest.raises(error) as caught:
            rig.engine.submit(prompt(**{"tokens": "abc", **fields}))
        assert caught.value.param == param
        assert text_of(neighbour) == expected(list(b"neighbour"), 20)
        assert rig.engine.counters().requests == 1


def test_requests_that_require_a_backend_never_share_a_batch_with_others() -> None:
    with Rig() as rig:
        gate = Gate(rig)
        streams = [rig.engine.submit(prompt("abc", 10, backend=name)) for name in (None, "torch_native", None)]
        gate.open.set()
        assert {text_of(stream) for stream in streams} == {expected(list(b"abc"), 10)}
    for batch in rig.provider.batches:
        assert len({chunk.sequence.prompt.backend for chunk in batch.chunks}) == 1


def test_stats_count_requests_and_tokens() -> None:
    with Rig() as rig:
        assert rig.engine.get_stats() == {"total_tasks": 0, "total_tokens": 0, "active_tasks": 0, "waiting_queue": 0}
        for _ in range(3):
            text_of(rig.engine.submit(prompt("abc", 4)))
        stats = rig.engine.get_stats()
        assert (stats["total_tasks"], stats["total_tokens"]) == (3, 12)
        assert rig.engine.counters().prompt_tokens == 9
        assert rig.engine.kv_stats().total == 2048
        assert admitted(rig.scheduler) == []


def test_waiting_and_active_requests_are_counted_apart() -> None:
    with Rig(max_batch_size=1) as rig:
        gate = Gate(rig)
        streams = [rig.engine.submit(prompt("abc", 4)) for _ in range(3)]
        assert gate.entered.wait(SOON)
        stats = rig.engine.get_stats()
        assert (stats["active_tasks"], stats["waiting_queue"]) == (1, 2)
        gate.open.set()
        for stream in streams:
            text_of(stream)


def count_sequences() -> int:
    gc.collect()
    return sum(type(one) in (Sequence, Stream) for one in gc.get_objects())


def test_r02_many_mixed_endings_leave_nothing_behind() -> None:
    dice = random.Random(4)
    before = count_sequences()
    with Rig(make_kv(n_tokens=256), engine={"stream_bytes": 64}, max_waiting=1000) as rig:
        for _ in range(10):
            streams = []
            for _ in range(30):
                word = "".join(dice.choices("abcdefgh!", k=dice.randint(1, 12)))
                sampling = dice.choice([GREEDY, SamplingParams(), replace(GREEDY, logit_bias=((EOS, 100.0),))])
                streams.append(
                    rig.engine.submit(prompt(word, dice.randint(1, 30), sampling, stop=dice.choice([(), ("a",)])))
                )
            for stream in streams:
                kind = dice.random()
                if kind < 0.2:
                    stream.discard()
                elif kind < 0.4:
                    stream.cancel()
                else:
                    text_of(stream)
        assert rig.engine.drain(SOON)
        counters = rig.engine.counters()
        assert counters.requests == counters.finished + counters.cancelled == 300
        del streams, stream
    assert rig.engine._flight.everyone() == []
    rig.provider.batches.clear()
    assert count_sequences() == before


def test_prompt_object_is_not_changed_by_the_engine() -> None:
    asked = Prompt((65, 66), SamplingParams(), Limits(max_tokens=2))
    with Rig() as rig:
        text_of(rig.engine.submit(asked))
    assert asked == Prompt((65, 66), SamplingParams(), Limits(max_tokens=2))
