"""Counters of one engine, written under its lock or by its thread and read by anyone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from astrai_runtime.event import Failed, Outcome


@dataclass(slots=True)
class Counters:
    """Monotonic counts since the engine started: `requests == finished + cancelled + failed + (still in flight)`."""

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
