"""The start-up measurement starts services, first and later, and its parts add up to the whole."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_first_and_a_later_start_are_measured_part_by_part(tmp_path: Path) -> None:
    told = tmp_path / "startup.json"
    command = [sys.executable, str(ROOT / "bench" / "startup.py"), "--rounds", "1", "--json", str(told), "+recipe=mock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(told.read_text())
    for start in (found["first"], found["later"]):
        parts = {name: value for name, value in start.items() if name not in ("ready", "peak_mib")}
        assert {"interpreter", "configuration", "plan", "listening", "engine"} <= set(parts)
        assert sum(parts.values()) == pytest.approx(start["ready"], rel=0.02)
        assert start["peak_mib"] > 30
    assert len(found["rounds"]) == 1


def test_a_service_that_does_not_start_is_an_error_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    startup = importlib.import_module("startup")
    with pytest.raises(RuntimeError, match="did you mean 'mock'"):
        startup.start(["+recipe=mok"], tmp_path)
    with pytest.raises(RuntimeError, match="did not say"):
        startup.parts_of(tmp_path / "stderr", patience_s=0.0)
