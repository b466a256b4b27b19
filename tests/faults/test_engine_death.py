"""When the engine thread itself dies: everyone is told, nothing is kept, and it begins again, though not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from astrai_runtime import engine as engine_module
from astrai_runtime import loop
from astrai_runtime.batch import Batch
from astrai_runtime.engine import MAX_RESTARTS
from astrai_runtime.errors import NotReady, ProviderError
from astrai_runtime.event import Delta, Failed, Finished
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from tests.provider.reading import Rig, expected, make_kv, prompt

SOON = 20.0


class Killed(BaseException):
    """What no handler of ordinary errors catches."""


def text_of(stream: Stream) -> str:
    return "".join(event.text for event in stream.events(SOON) if isinstance(event, Delta))


def outcome_of(stream: Stream) -> Finished | Failed:
    *_, last = stream.events(SOON)
    assert not isinstance(last, Delta)
    return last


def kill_once(rig: Rig, error: BaseException) -> Callable[[], None]:
    """The next step after calling the result kills the engine thread."""
    armed = threading.Event()

    def before(batch: Batch) -> None:
        if armed.is_set():
            armed.clear()
            raise error

    rig.provider.before = before
    return armed.set


def wait_ready(rig: Rig) -> None:
    with rig.engine._lock:
        assert rig.engine._flight.answered.wait_for(lambda: rig.engine.ready, SOON)


@pytest.mark.parametrize("error", [Killed(), SystemExit(1), KeyboardInterrupt(), torch.AcceleratorError("device lost")])
def test_dead_engine_tells_everyone_and_begins_again_with_an_empty_pool(error: BaseException) -> None:
    with Rig(engine={"stream_bytes": 8}, deaths=1, max_batch_size=3) as rig:
        kill = kill_once(rig, error)
        streams = [rig.engine.submit(prompt("a long prompt" * i, 100)) for i in range(1, 6)]
        streams[0].read(1, SOON)
        kill()
        outcomes = [outcome_of(stream) for stream in streams]
        assert all(isinstance(outcome, Failed) and isinstance(outcome.error, ProviderError) for outcome in outcomes)
        assert "lost" not in str(outcomes[0].error)
        wait_ready(rig)
        assert rig.engine.restarts == 1
        outcome = outcome_of(rig.engine.submit(prompt("a long prompt", 5)))
        assert outcome.usage.cached_tokens == 0
        assert text_of(rig.engine.submit(prompt("abc", 5))) == expected(list(b"abc"), 5)
        counters = rig.engine.counters()
        assert (counters.requests, counters.failed, counters.finished) == (7, 5, 2)


def test_engine_says_not_ready_while_it_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(deaths=1) as rig:
        kill = kill_once(rig, Killed())
        resetting, go_on = threading.Event(), threading.Event()
        reset = rig.scheduler.reset

        def slow_reset() -> None:
            resetting.set()
            assert go_on.wait(SOON)
            reset()

        monkeypatch.setattr(rig.scheduler, "reset", slow_reset)
        kill()
        stream = rig.engine.submit(prompt("abc", 5))
        assert resetting.wait(SOON)
        assert not rig.engine.ready
        assert "starting again" in rig.engine.reason
        with pytest.raises(NotReady, match="starting again"):
            rig.engine.submit(prompt("meanwhile"))
        go_on.set()
        assert isinstance(outcome_of(stream), Failed)
        wait_ready(rig)
        assert text_of(rig.engine.submit(prompt("abc", 5))) == expected(list(b"abc"), 5)


def test_answer_that_is_complete_survives_the_death_of_the_engine() -> None:
    with Rig(engine={"stream_bytes": 4}, deaths=1) as rig:
        ended, retire = threading.Event(), rig.scheduler.retire

        def watched(sequence: Sequence, **options: Any) -> None:
            retire(sequence, **options)
            ended.set()

        rig.scheduler.retire = watched
        answer = expected(list(b"abc"), 6)
        held_back = answer[:5] + "never"  # until the sixth character, and then six are more than the ring takes
        whole = rig.engine.submit(prompt("abc", 6, stop=(held_back,)))
        assert ended.wait(SOON)
        kill_once(rig, Killed())()
        assert isinstance(outcome_of(rig.engine.submit(prompt("dies", 5))), Failed)
        assert text_of(whole) == answer


def test_engine_that_dies_too_often_stays_down_and_says_so() -> None:
    with Rig(deaths=MAX_RESTARTS) as rig:
        for _ in range(MAX_RESTARTS + 1):
            kill_once(rig, Killed())()
            assert isinstance(outcome_of(rig.engine.submit(prompt("abc", 5))), Failed)
            if rig.engine.restarts < MAX_RESTARTS:
                wait_ready(rig)
        rig.engine._thread.join(SOON)
        assert not rig.engine.ready
        assert "too often" in rig.engine.reason
        with pytest.raises(NotReady, match="too often"):
            rig.engine.submit(prompt("abc"))


def test_deaths_long_ago_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WITHIN_S", 0.0)
    with Rig(deaths=6) as rig:
        for _ in range(6):
            wait_ready(rig)
            kill_once(rig, Killed())()
            assert isinstance(outcome_of(rig.engine.submit(prompt("abc", 5))), Failed)
        wait_ready(rig)


def test_engine_whose_pool_cannot_be_emptied_stays_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig() as rig:
        kill_once(rig, Killed())()
        with monkeypatch.context() as patch:
            patch.setattr(rig.kv, "reset", lambda: 1 / 0)
            assert isinstance(outcome_of(rig.engine.submit(prompt("abc", 5))), Failed)
            rig.engine._thread.join(SOON)
        assert not rig.engine.ready
        rig.scheduler.reset()


def test_idle_engine_that_finds_slots_missing_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FULL_CHECK_S", 0.0)
    with Rig(make_kv(prefix_cache=False), deaths=1) as rig:
        rig.kv._pool.acquire(3)  # lost: nobody owns them
        rig.scheduler.kv = Unchecked(rig.kv)
        text_of(rig.engine.submit(prompt("abc", 5)))
        with rig.engine._lock:
            assert rig.engine._flight.answered.wait_for(lambda: rig.engine.restarts == 1, SOON)
        wait_ready(rig)
        assert rig.engine.kv_stats().free == rig.engine.kv_stats().total


class Unchecked:
    """A KV mode whose scheduler does not notice what is wrong with it."""

    def __init__(self, kv: Any) -> None:
        self._kv = kv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def check_integrity(self, admitted: Any) -> None: ...


def test_drain_and_shutdown_work_after_a_death() -> None:
    with Rig(deaths=1) as rig:
        kill_once(rig, Killed())()
        assert isinstance(outcome_of(rig.engine.submit(prompt("abc", 5))), Failed)
        wait_ready(rig)
        last = rig.engine.submit(prompt("last", 5))
        first = last.read(1, SOON).decode()
        assert rig.engine.drain(SOON)
        assert first + text_of(last) == expected(list(b"last"), 5)
        assert not rig.engine.ready


def test_death_while_draining_ends_the_drain() -> None:
    with Rig(deaths=1, engine={"stream_bytes": 8}) as rig:
        kill = kill_once(rig, Killed())
        stream = rig.engine.submit(prompt("abc", 100))
        stream.read(1, SOON)
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(rig.engine.drain(SOON)))
        drain.start()
        kill()
        assert isinstance(outcome_of(stream), Failed)
        drain.join()
        assert drained == [True]
        assert not rig.engine.ready
