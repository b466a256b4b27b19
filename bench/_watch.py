"""How much processor time others took while something was measured, and waiting until they take little (Linux, /proc)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PROC = Path("/proc")


@dataclass(frozen=True)
class Ticks:
    """Clock ticks of all cores since boot."""

    busy: int  # user, nice, system, interrupts
    stolen: int  # taken by the host
    total: int

    @classmethod
    def now(cls) -> Ticks:
        fields = [int(word) for word in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
        return cls(fields[0] + fields[1] + fields[2] + fields[5] + fields[6], fields[7], sum(fields[:8]))


def _own_ticks(pid: int) -> tuple[int, int] | None:
    """(parent, ticks with those of children that ended) of one process; None: it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), sum(map(int, fields[11:15]))


def tree_ticks(roots: Iterable[int]) -> int:
    """Ticks that these processes and all below them have used, without this process's own living children."""
    found = {int(path.name): own for path in PROC.iterdir() if path.name.isdigit() and (own := _own_ticks(int(path.name)))}
    wanted = set(roots)
    here = os.getpid()
    while more := {pid for pid, (parent, _) in found.items() if parent in wanted and parent != here} - wanted:
        wanted |= more
    return sum(found[pid][1] for pid in wanted if pid in found)


@dataclass(frozen=True)
class Taken:
    """Shares of all cores' time during one measurement."""

    foreign: float  # by processes that were not measured
    stolen: float  # by the host


@dataclass(frozen=True)
class Quiet:
    """When a measurement counts as undisturbed."""

    limit: float  # largest share of all cores' time that others may take
    tries: int
    patience_s: float = 5.0  # to wait for silence before each try

    def wait(self) -> None:
        """Returns when nothing runs, or when patience is over."""
        until = time.monotonic() + self.patience_s
        while time.monotonic() < until:
            before = Ticks.now()
            time.sleep(0.15)
            after = Ticks.now()
            if after.busy - before.busy <= max(1, self.limit * (after.total - before.total)):
                return

    def measure(self, work: Callable[[], T], pids: Iterable[int]) -> tuple[T, list[Taken]]:
        """The result of the quietest try, and what was taken in each: the first try under the limit is the last.

        `pids`: processes that belong to the measurement besides this one and what it starts meanwhile.
        """
        owners = [os.getpid(), *pids]
        best: tuple[float, T] | None = None
        taken: list[Taken] = []
        for _ in range(self.tries):
            self.wait()
            before, own = Ticks.now(), tree_ticks(owners)
            result = work()
            after, own_after = Ticks.now(), tree_ticks(owners)
            total = max(1, after.total - before.total)
            foreign = max(0, after.busy - before.busy - (own_after - own)) / total
            taken.append(Taken(foreign, (after.stolen - before.stolen) / total))
            if best is None or foreign < best[0]:
                best = foreign, result
            if foreign <= self.limit:
                break
        assert best is not None
        return best[1], taken
