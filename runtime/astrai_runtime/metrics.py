"""Counters of one engine, written by its thread and read by anyone."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Counters:
    """Monotonic counts since the engine started. Single writer: the engine thread."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    ticks: int = 0
    preemptions: int = 0

    def snapshot(self) -> Counters:
        return replace(self)
