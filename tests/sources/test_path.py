"""A model of the user's own: found where it lies, never touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from astrai_runtime.errors import SourceError
from astrai_runtime.sources.path import PART


def test_path_is_found_absolute_relative_and_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in (str(tmp_path / "model"), "model", "~/model"):
        source = PART(PART.Config(kind="path", path=text))
        located = source.locate(cache=tmp_path / "cache", offline=True, fetch=False)
        assert located.path == tmp_path / "model"
        assert located.origin == str(tmp_path / "model")
    assert not (tmp_path / "cache").exists()


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"no model at {tmp_path}/none"):
        PART(PART.Config(kind="path", path=str(tmp_path / "none"))).locate(cache=tmp_path, offline=False, fetch=True)
