"""The relaying engine: bounds, outcomes and streams as the computing one has them, over answers that tests hold back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from astrai_runtime.errors import (
    Busy,
    Cancelled,
    DeadlineExpired,
    InvalidRequest,
    NotReady,
    ProviderError,
    Unsupported,
    UpstreamError,
    WrongState,
)
from astrai_runtime.event import Delta, Event, Failed, Finished, TokenLogprob, Usage
from astrai_runtime.provider.base import TextProvider
from astrai_runtime.relay import RelayEngine
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.stream import Stream
from tests.provider.upstream import Handler, info, prompt, said, service, stream

WAIT_S = 10.0


class Scripted:
    """Says what the prompt's text asks for: `hello`, `hold` (until `go`), `boom`, `endless`, `silent`, `long`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.closed = 0
        self.put = 0

    async def complete(self, asked: Prompt) -> AsyncGenerator[Event, None]:
        assert asked.turn is not None
        what = asked.turn.text or asked.turn.messages[-1].content
        self.begun.release()
        try:
            match what:
                case "boom":
                    yield Delta("so ")
                    raise ZeroDivisionError("inside")
                case "refused":
                    raise UpstreamError("they said no")
                case "silent":
                    return
                case "hold":
                    while not self.go.is_set():
                        await asyncio.sleep(0.005)
                case "endless" | "long":
                    for _ in range(100_000 if what == "endless" else 200):
                        self.put += 1
                        yield Delta("0123456789")
            yield Delta("hello", (TokenLogprob(-1, b"hello", -0.5),))
            yield Finished("stop", Usage(3, 1))
        finally:
            self.ended.release()

    def close(self) -> None:
        self.closed += 1

    def table(self) -> TextProvider:
        return TextProvider(info(), self.complete, self.close)


def make(provider: TextProvider, **options: Any) -> RelayEngine:
    chosen = {"max_running": 2, "max_waiting": 1, "stream_bytes": 256} | options
    return RelayEngine(provider, defaults=SamplingParams(temperature=0.5), knobs=("temperature", "top_a"), **chosen)


@contextmanager
def relaying(**options: Any) -> Iterator[tuple[Scripted, RelayEngine]]:
    script = Scripted()
    engine = make(script.table(), **options)
    engine.start()
    try:
        yield script, engine
    finally:
        script.go.set()
        engine.shutdown()
        assert script.closed == 1
    threads = [thread.name for thread in threading.enumerate()]
    assert "relay-far" not in threads


def last(answer: Stream) -> Event:
    return list(answer.events(WAIT_S))[-1]


def error_of(answer: Stream) -> Exception:
    outcome = last(answer)
    assert isinstance(outcome, Failed), outcome
    return outcome.error


def test_answer_arrives_with_its_log_probabilities_usage_and_reason() -> None:
    with relaying() as (_, engine):
        assert list(engine.submit(prompt("hello")).events(WAIT_S)) == [
            Delta("hello", (TokenLogprob(-1, b"hello", -0.5),)),
            Finished("stop", Usage(3, 1)),
        ]
        assert engine.get_stats() == {"total_tasks": 1, "total_tokens": 1, "active_tasks": 0, "waiting_queue": 0}
        counted = engine.counters()
        assert (counted.requests, counted.finished, counted.prompt_tokens) == (1, 1, 3)
        assert engine.kv_stats().total == 0


def test_python_interface_relays_texts_lists_and_streams() -> None:
    with relaying() as (_, engine):
        assert engine.generate("hello") == "hello"
        assert engine.generate(["hello"] * 7) == ["hello"] * 7  # more than there are places
        assert "".join(engine.generate("long", stream=True)) == "0123456789" * 200 + "hello"


def test_more_than_run_and_wait_is_busy_and_places_come_back() -> None:
    with relaying() as (script, engine):
        held = [engine.submit(prompt("hold")) for _ in range(3)]
        with pytest.raises(Busy, match="2 requests run and 1 wait"):
            engine.submit(prompt("hello"))
        assert engine.counters().refused == 1
        for _ in range(2):
            assert script.begun.acquire(timeout=WAIT_S)
        assert not script.begun.acquire(blocking=False)  # the third has no place yet
        assert engine.get_stats()["waiting_queue"] == 1
        script.go.set()
        assert all(isinstance(last(answer), Finished) for answer in held)
        assert isinstance(last(engine.submit(prompt("hello"))), Finished)


def test_slow_reader_pauses_its_own_answer_and_no_other() -> None:
    with relaying() as (script, engine):
        slow = engine.submit(prompt("long"))
        assert script.begun.acquire(timeout=WAIT_S)
        assert engine.generate("hello") == "hello"
        assert script.put < 60  # 256 bytes wait, 2000 were to come
        text = b""
        while piece := slow.read(100, WAIT_S):
            text += piece
        assert text.decode() == "0123456789" * 200 + "hello"


def test_answer_that_nobody_reads_expires() -> None:
    with relaying(undrained_ttl_s=0.05) as (script, engine):
        answer = engine.submit(prompt("endless"))
        assert script.begun.acquire(timeout=WAIT_S)
        assert engine.drain(WAIT_S)
        assert isinstance(answer.outcome, Failed)
        assert isinstance(answer.outcome.error, DeadlineExpired)
        assert engine.counters().abandoned == 1


def test_finished_answer_that_nobody_reads_gives_up_its_place_and_keeps_its_text() -> None:
    with relaying(undrained_ttl_s=0.05, max_running=1, max_waiting=0) as (_, engine):
        unread = engine.submit(prompt("hello"))
        later: Stream | None = None
        clock = threading.Event()
        for _ in range(200):
            try:
                later = engine.submit(prompt("hello"))
                break
            except Busy:
                clock.wait(0.02)
        assert later is not None
        assert isinstance(last(later), Finished)
        assert unread.read(timeout=WAIT_S) == b"hello"


@pytest.mark.parametrize("phase", ["waiting", "before the first byte", "in the middle"])
def test_cancelling_ends_the_work_behind_it(phase: str) -> None:
    with relaying(max_running=1) as (script, engine):
        first = engine.submit(prompt("endless" if phase == "in the middle" else "hold"))
        assert script.begun.acquire(timeout=WAIT_S)
        target = engine.submit(prompt("hello")) if phase == "waiting" else first
        if phase == "in the middle":
            assert target.read(5, WAIT_S)
        target.cancel()
        outcome = last(target)
        assert isinstance(outcome, Finished)
        assert outcome.reason == "cancelled"
        if phase != "waiting":
            assert script.ended.acquire(timeout=WAIT_S)
        first.cancel()
        assert engine.drain(WAIT_S)
        assert engine.counters().cancelled == engine.counters().requests
        assert not script.begun.acquire(blocking=False)  # the one that waited was never begun


def test_cancelling_closes_the_upstream_connection() -> None:
    with service() as far:
        far.says(stream(said("x"), then=lambda handler: endless(handler, far.free)))
        engine = make(far.provider())
        engine.start()
        answer = engine.submit(prompt())
        assert answer.read(1, WAIT_S) == b"x"
        answer.discard()
        assert far.gone.wait(WAIT_S)
        engine.shutdown()


def endless(handler: Handler, end: threading.Event) -> None:
    while not end.wait(0.005):
        handler.wfile.write(said("x"))


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [("boom", ProviderError, "ZeroDivisionError"), ("refused", UpstreamError, "no"), ("silent", ProviderError, "no end")],
)
def test_failure_concerns_its_own_request(what: str, kind: type[Exception], message: str) -> None:
    with relaying() as (script, engine):
        held = engine.submit(prompt("hold"))
        error = error_of(engine.submit(prompt(what)))
        assert type(error) is kind
        assert message in str(error)
        script.go.set()
        assert isinstance(last(held), Finished)
        assert (engine.counters().failed, engine.counters().faults) == (1, 1)


def test_deadline_counts_from_the_submission() -> None:
    with relaying(max_running=1) as (_, engine):
        running = engine.submit(prompt("hold", Limits(deadline_s=0.1)))
        waiting = engine.submit(prompt("hold", Limits(deadline_s=0.05)))
        assert isinstance(error_of(waiting), DeadlineExpired)
        assert isinstance(error_of(running), DeadlineExpired)
        assert engine.counters().expired == 2


def test_what_is_not_passed_on_is_refused() -> None:
    with relaying() as (_, engine):
        with pytest.raises(InvalidRequest, match=r"top_k: this deployment does not pass it on; it passes on: temperature"):
            engine.submit(prompt(top_k=5))
        with pytest.raises(InvalidRequest, match="min_q"):
            engine.submit(prompt(extra={"min_q": 1.0}))
        with pytest.raises(Unsupported, match="no scheduler"):
            engine.tune(max_prompt_tokens_per_tick=1)
        assert isinstance(last(engine.submit(prompt("hello", top_k=-1, extra={"top_a": 0.5}))), Finished)


def test_drain_fails_who_waits_and_lets_the_others_end() -> None:
    with relaying(max_running=1) as (script, engine):
        running, waiting = engine.submit(prompt("hold")), engine.submit(prompt("hello"))
        assert script.begun.acquire(timeout=WAIT_S)
        assert not engine.drain(0.05)
        assert not engine.ready
        assert engine.reason == "is shutting down"
        with pytest.raises(NotReady):
            engine.submit(prompt("hello"))
        assert isinstance(error_of(waiting), NotReady)
        script.go.set()
        assert engine.drain(WAIT_S)
        assert isinstance(last(running), Finished)


def test_shutdown_gives_everyone_an_outcome() -> None:
    with relaying(max_running=2) as (script, engine):
        held, begun, waiting = (engine.submit(prompt(what)) for what in ("hold", "endless", "hello"))
        for _ in range(2):
            assert script.begun.acquire(timeout=WAIT_S)
        assert begun.read(1, WAIT_S)
        engine.shutdown()
        assert isinstance(error_of(begun), Cancelled)
        assert {type(error_of(answer)) for answer in (held, waiting)} == {NotReady}
        for _ in range(2):
            assert script.ended.acquire(timeout=WAIT_S)
        engine.shutdown()


def test_engine_starts_once_and_answers_only_then() -> None:
    script = Scripted()
    engine = make(script.table())
    with pytest.raises(NotReady, match="still loading"):
        engine.submit(prompt("hello"))
    engine.start()
    with pytest.raises(WrongState):
        engine.start()
    engine.shutdown()
    with pytest.raises(NotReady, match="has stopped"):
        engine.submit(prompt("hello"))
    unused = Scripted()
    make(unused.table()).shutdown()
    assert unused.closed == 1
