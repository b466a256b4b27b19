"""The soak runs, finds nothing in a few seconds, and would find what it looks for."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(("recipe", "seconds"), [("tiny", 8), ("mock", 6)])
def test_r02_a_mixed_crowd_leaves_nothing_behind_and_changes_no_answer(recipe: str, seconds: int, home: Path) -> None:
    told = home / "soak.json"
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--recipe", recipe, "--seconds", str(seconds)]
    command += ["--json", str(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(told.read_text())
    assert found["answers compared"] > 50
    assert found["wrong answers"] == 0
    assert found["violations"] == {}
    assert set(found["statuses"]) >= {"200", "400", "413"} | ({"500"} if recipe == "mock" else set())
    assert len(found["clients"]) == 10 + (recipe == "mock")  # every kind of client came
    assert found["KV slots lost"] == 0
    assert found["samples"][-1]["counted"]["preemptions"] > 0  # the pool was too small for all who ran
    assert found["samples"][-1]["counted"]["cached_tokens"] > 0
    assert found["samples"][-1]["active"] == found["samples"][-1]["waiting"] == 0


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("soak")


def test_every_kind_of_leak_is_a_violation(soak: ModuleType) -> None:
    clean = soak.Sample(1.0, 100, True, 0, 0, 9, 4, 300 * 2**20, {"free": 96, "held": 0, "cached": 0})
    assert violations(soak, clean, clean) == Counter()
    leaks: tuple[dict[str, object], ...] = (
        {"idle": False, "active": 1},
        {"descriptors": 12},
        {"threads": 9},
        {"rss": 400 * 2**20},
        {"slots": {"free": 80, "held": 16, "cached": 0}},
        {"slots": {"free": 48, "held": 0, "cached": 32}},
    )
    for leak in leaks:
        assert violations(soak, clean, replace(clean, requests=200, **leak)).total() == 1, leak


def test_memory_that_grows_with_the_requests_is_a_violation(soak: ModuleType) -> None:
    clean = soak.Sample(1.0, 0, True, 0, 0, 9, 4, 300 * 2**20, {"free": 96, "held": 0, "cached": 0})
    growing = [replace(clean, requests=n * 1000, rss=clean.rss + n * 2**19) for n in range(12)]
    assert soak.slope(growing) == pytest.approx(2**19)
    assert violations(soak, *growing).total() == 1


def violations(soak: ModuleType, *samples: object) -> Counter[str]:
    tally = soak.Tally()
    soak.judge(list(samples), list(samples), tally)
    found: Counter[str] = tally.violations
    return found
