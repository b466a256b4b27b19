"""Numbers of every side, work and round: medians, ratios between sides of one round, a table, and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from _work import LESS, Work
from rich.table import Table

OURS = "astrai-deploy"
UNITS = {
    "tok_s": "tok/s",
    "ttft_ms": "TTFT ms",
    "p50_ms": "p50 ms",
    "p95_ms": "p95 ms",
    "around": "share around",
    "slowdown": "p95 busy / idle",
    "idle_p95_ms": "idle p95 ms",
    "busy_p95_ms": "busy p95 ms",
    "first_s": "first start s",
    "second_s": "second start s",
    "first_peak_mib": "peak of first start MiB",
    "peak_mib": "peak under load MiB",
    "by_plan": "peak / planned",
}
SHOWN = {
    "prefill": ("tok_s",),
    "decode": ("tok_s", "p95_ms"),
    "busy": ("slowdown", "busy_p95_ms", "idle_p95_ms"),
    "http": ("tok_s", "ttft_ms", "p50_ms", "p95_ms", "around"),
    "start": ("first_s", "second_s", "first_peak_mib", "peak_mib", "by_plan"),
}


def ratio(name: str, ours: float, theirs: float) -> float:
    """How many times better we are; below 1 we are worse."""
    if ours <= 0 or theirs <= 0:
        return float("nan")
    return theirs / ours if name in LESS else ours / theirs


@dataclass
class Results:
    """Values by work, number, side and round; and how far each measurement was disturbed."""

    values: dict[str, dict[str, dict[str, dict[int, float]]]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    disturbed: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each side says of itself
    missing: dict[str, str] = field(default_factory=dict)  # side or "side: work" -> why there is no number

    def note(self, work: Work, side: str, turn: int, found: Mapping[str, float]) -> None:
        self.kinds[work.key] = work.kind
        for name, value in found.items():
            self.values.setdefault(work.key, {}).setdefault(name, {}).setdefault(side, {})[turn] = value

    def median(self, key: str, name: str, side: str) -> float | None:
        found = self.values.get(key, {}).get(name, {}).get(side)
        return statistics.median(found.values()) if found else None

    def ratio(self, key: str, name: str, side: str) -> float | None:
        """The median over rounds of the ratio within a round: both sides met the same machine."""
        sides = self.values.get(key, {}).get(name, {})
        ours, theirs = sides.get(OURS, {}), sides.get(side, {})
        both = [ratio(name, ours[turn], theirs[turn]) for turn in ours.keys() & theirs.keys()]
        return statistics.median(both) if both else None

    def sides(self) -> list[str]:
        """Ours first, then in the order in which they appeared."""
        seen = {side: None for names in self.values.values() for sides in names.values() for side in sides}
        return [OURS, *(side for side in seen if side != OURS)]

    def table(self, title: str) -> Table:
        """Ratios first: `4.6x` is how many times better we are, whatever the number's direction."""
        peers = self.sides()[1:]
        table = Table(title=title)
        for column in ("work", "number", *(f"vs {peer}" for peer in peers), OURS, *peers):
            table.add_column(column, justify="left" if column in ("work", "number") else "right")
        for key, names in self.values.items():
            for i, name in enumerate(n for n in SHOWN[self.kinds[key]] if n in names):
                ratios = [said(self.ratio(key, name, peer), "x") for peer in peers]
                values = [said(self.median(key, name, side)) for side in (OURS, *peers)]
                table.add_row(key if not i else "", UNITS.get(name, name), *ratios, *values, end_section=False)
        return table

    def to_json(self) -> dict[str, Any]:
        peers = self.sides()[1:]
        works = {
            key: {
                "kind": self.kinds[key],
                "medians": {name: {side: self.median(key, name, side) for side in sides} for name, sides in names.items()},
                "ratios": {
                    name: {peer: r for peer in peers if (r := self.ratio(key, name, peer)) is not None} for name in names
                },
                "rounds": {name: {side: list(turns.values()) for side, turns in s.items()} for name, s in names.items()},
            }
            for key, names in self.values.items()
        }
        return {"works": works, "about": self.about, "disturbed": self.disturbed, "missing": self.missing}


def said(value: float | None, unit: str = "") -> str:
    """Three significant digits."""
    if value is None:
        return "-"
    if value != value:  # not a number
        return "?"
    return f"{value:.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}" if value >= 10 else f"{value:.2f}{unit}"
