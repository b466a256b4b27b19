"""What one engine counts, and whom it tells how long things took."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from astrai_runtime.event import Failed, Outcome


@dataclass(slots=True)
class Counters:
    """Monotonic counts since the engine started, written under its lock or by its thread and read by anyone.

    `requests == finished + cancelled + failed + (still in flight)`.
    """

    requests: int = 0  # accepted by submit
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0  # Busy, or not ready; counted by the submitting threads
    prompt_tokens: int = 0  # of accepted requests
    generated_tokens: int = 0  # the end token included
    cached_tokens: int = 0  # prompt tokens that the prefix cache saved, counted when a request ends
    ticks: int = 0  # steps that computed something
    preemptions: int = 0
    faults: int = 0  # requests failed by the model's computation, by sampling or by decoding their text
    step_faults: int = 0  # steps that raised and were tried again in smaller ones
    restarts: int = 0  # times that the engine thread died and came back with an empty pool
    abandoned: int = 0  # places taken back from readers that stayed away too long
    expired: int = 0  # requests whose deadline came first

    def count(self, outcome: Outcome) -> None:
        """One more request has its answer."""
        if isinstance(outcome, Failed):
            self.failed += 1
        elif outcome.reason == "cancelled":
            self.cancelled += 1
        else:
            self.finished += 1
        self.cached_tokens += outcome.usage.cached_tokens

    def snapshot(self) -> Counters:
        return replace(self)


class Observer(Protocol):
    """Told by the engine thread how long things took, in seconds: each call must be cheap and never wait.

    An observer that raises is unhooked and logged; no request suffers.
    """

    def queued(self, seconds: float) -> None:
        """A request waited this long, from `submit` to the first step that computes its tokens. Once a request."""
        ...

    def first_token(self, seconds: float) -> None:
        """The time from `submit` to a request's first token. Once a request that gets one."""
        ...

    def token_gap(self, seconds: float) -> None:
        """The time between two tokens of one request, pauses for a slow reader and preemption included."""
        ...

    def finished(self, reason: str) -> None:
        """A request has its outcome: stop, length, cancelled, or the `code` of the error that failed it."""
        ...


class Unobserved:
    """The observer of an engine that nobody watches."""

    def queued(self, seconds: float) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def token_gap(self, seconds: float) -> None: ...
    def finished(self, reason: str) -> None: ...
