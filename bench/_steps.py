"""When steps of the model began and how long they took, recorded around the provider's `run` without touching the engine."""

from __future__ import annotations

import math
import mmap
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

LAYOUT = "<qd"  # steps, seconds in them


@dataclass(frozen=True)
class Step:
    began: float  # seconds of a monotonic clock
    lasted: float  # seconds
    rows: int  # sequences in it
    tokens: int  # of all of them

    @property
    def decodes(self) -> bool:
        """Every sequence got one token: no prompt among them."""
        return self.tokens == self.rows


class Recorder:
    """Every step since the last `clear`; with a file, also their number and time in it, for other processes to read."""

    def __init__(self, counts: Path | None = None) -> None:
        self.steps: list[Step] = []
        self._keep = counts is None
        self._map: mmap.mmap | None = None
        self._n, self._seconds = 0, 0.0
        if counts is not None:
            counts.write_bytes(bytes(struct.calcsize(LAYOUT)))
            with counts.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    def clear(self) -> None:
        self.steps = []

    def wrap(self) -> None:
        """From now on every provider of this process that computes is recorded."""
        from astrai_runtime.provider.local import LocalProvider

        run = LocalProvider.run

        def recorded(provider: LocalProvider, batch: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(provider, batch)
            finally:
                self._note(began, time.perf_counter() - began, batch)

        LocalProvider.run = recorded  # type: ignore[method-assign]

    def _note(self, began: float, lasted: float, batch: Any) -> None:
        if self._keep:
            self.steps.append(Step(began, lasted, len(batch.chunks), sum(chunk.length for chunk in batch.chunks)))
        self._n += 1
        self._seconds += lasted
        if self._map is not None:
            struct.pack_into(LAYOUT, self._map, 0, self._n, self._seconds)


def read_counts(path: Path) -> tuple[int, float]:
    """Steps and seconds in them, as of now."""
    n, seconds = struct.unpack(LAYOUT, path.read_bytes())
    return n, seconds


def full_steps(steps: Sequence[Step], rows: int) -> list[Step]:
    """The longest run of consecutive decode steps with all `rows` sequences."""
    best: list[Step] = []
    run: list[Step] = []
    for step in steps:
        run = [*run, step] if step.decodes and step.rows == rows else []
        best = max(best, run, key=len)
    return best


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def decoding(steps: Sequence[Step], rows: int) -> dict[str, Any]:
    """Tokens a second, step times and the share outside the model, from one step's beginning to the next one's.

    Raises:
        ValueError: there are fewer than two full steps.
    """
    full = full_steps(steps, rows)
    if len(full) < 2:
        raise ValueError(f"{len(full)} steps had {rows} decoding sequences; at least 2 are needed")
    intervals = [after.began - before.began for before, after in pairwise(full)]
    inside = sum(step.lasted for step in full[:-1])
    return {
        "tok_s": rows * len(intervals) / sum(intervals),
        "model_tok_s": rows * len(intervals) / inside,
        "p50_ms": percentile(intervals, 0.5) * 1000,
        "p95_ms": percentile(intervals, 0.95) * 1000,
        "around": 1 - inside / sum(intervals),
    }
