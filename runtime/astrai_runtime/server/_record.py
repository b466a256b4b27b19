"""What is known of one request while it is answered: for its log line, its metrics and its span."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from astrai_runtime.stream import Stream

_KEY = "record"
UNMATCHED = "unmatched"


@dataclass(slots=True)
class Record:
    """Never holds a body, a key or a raw path. `status` is 499 until the first byte of an answer is sent."""

    request_id: str
    method: str
    route: str = UNMATCHED  # the declared path, not the client's spelling of it
    key: str | None = None  # a short hash
    status: int = 499
    stream: bool = False
    prompt_tokens: int | None = None
    streams: Sequence[Stream] = ()
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    ended: float | None = None

    @property
    def total_s(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival to its first text."""
        times = [stream.first_at for stream in self.streams if stream.first_at is not None]
        return min(times) - self.began if times else None

    @property
    def completion_tokens(self) -> int | None:
        """Of every choice; None while, or because, the engine has not counted them."""
        outcomes = [stream.outcome for stream in self.streams]
        known = [outcome.usage.completion_tokens for outcome in outcomes if outcome is not None]
        return sum(known) if known else None

    @property
    def finish_reason(self) -> str | None:
        """The first choice's: stop, length, cancelled, or the code of the error that ended it."""
        if not self.streams:
            return None
        outcome = self.streams[0].outcome
        return "cancelled" if outcome is None else outcome.cause

    def fields(self) -> dict[str, Any]:
        """The log line and the span's attributes."""
        ttft = self.ttft_s
        return {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "stream": self.stream,
            "key": self.key,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": None if ttft is None else round(ttft * 1000, 2),
            "total_ms": round(self.total_s * 1000, 2),
            "finish_reason": self.finish_reason,
        }


def record_of(scope: Any) -> Record:
    """The request's record, which `Observed` made."""
    record: Record = scope["state"][_KEY]
    return record


def attach(scope: Any, record: Record) -> None:
    scope["state"][_KEY] = record
