"""The requests of one engine between `submit` and the end: all that its callers and its thread share, under one lock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from astrai_runtime import log
from astrai_runtime.event import Outcome
from astrai_runtime.metrics import Counters, Observer, Unobserved
from astrai_runtime.sequence import Sequence

T = TypeVar("T")


class InFlight:
    """Who is here, and what is counted about them.

    Attributes:
        lock: re-entrant, because a stream that is garbage-collected under it may wake the engine.
        answered: notified whenever a request has its outcome, or the engine's state changes.
        draining: nobody who waits is started any more.
        answer_s: how long an answer takes once it has begun: a moving average.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.answered = threading.Condition(self.lock)
        self.counters = Counters()
        self.observe: Observer = Unobserved()
        self.draining = False
        self.answer_s = 0.0
        self._work = threading.Condition(self.lock)  # the engine thread waits here
        self._woken = False
        self._inbox: deque[Sequence] = deque()
        self._live: dict[int, Sequence] = {}  # submitted and not yet forgotten, by id
        self._log = log.get("engine")

    def add(self, sequence: Sequence) -> None:
        """One more request. The caller holds the lock."""
        self.counters.requests += 1
        self.counters.prompt_tokens += sequence.n_prompt
        self._live[sequence.id] = sequence
        self._inbox.append(sequence)
        self.wake()

    def arrivals(self) -> deque[Sequence]:
        """Whoever came since the last call."""
        if not self._inbox:
            return self._inbox
        with self.lock:
            arrived, self._inbox = self._inbox, deque()
        return arrived

    def everyone(self) -> list[Sequence]:
        with self.lock:
            return list(self._live.values())

    def unanswered(self) -> list[Sequence]:
        return [sequence for sequence in self.everyone() if sequence.stream.outcome is None]

    def full(self, places: int) -> bool:
        """Every place is taken: unread output is part of ownership."""
        if len(self._live) < places:
            return False
        return sum(not sequence.stream.drained for sequence in self.everyone()) >= places

    def forget(self, sequence: Sequence) -> None:
        with self.lock:
            self._live.pop(sequence.id, None)

    def clear_inbox(self) -> None:
        with self.lock:
            self._inbox.clear()

    def answer(self, sequence: Sequence, outcome: Outcome) -> None:
        """Tells a request's stream how it ended."""
        if sequence.started_at is not None:
            took = time.monotonic() - sequence.started_at
            self.answer_s = 0.8 * self.answer_s + 0.2 * took if self.answer_s else took
        with self.lock:
            self.counters.count(outcome)
            sequence.stream.finish(outcome)
            self.answered.notify_all()
        self.tell(self.observe.finished, outcome.cause)

    def tell(self, method: Callable[[T], None], value: T) -> None:
        """Calls the observer; one that raises is unhooked."""
        try:
            method(value)
        except Exception as error:  # noqa: BLE001  whoever watches must not hurt what is watched
            self._log.error("observer_failed", error=repr(error))
            self.observe = Unobserved()

    def wake(self) -> None:
        """Something changed: the engine thread looks again. From any thread."""
        with self.lock:
            self._woken = True
            self._work.notify_all()

    def wait(self, timeout: float | None) -> None:
        """The engine thread sleeps until it is woken, `timeout` seconds at most."""
        with self.lock:
            self._work.wait_for(lambda: self._woken, timeout)
            self._woken = False
