"""Fixtures for the tool: a configuration folder of the test's own, and the command line run in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from astrai_deploy.cli import main


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines below the heading."""
        return self.err.splitlines()[1:]


Ask = Callable[..., Answer]


@pytest.fixture(autouse=True)
def own_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, no user configuration, no variables of ours."""
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs `astrai-deploy ARGS...` in this process."""

    def run(*arguments: str) -> Answer:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


Write = Callable[[str, str], Path]


@pytest.fixture
def write(home: Path) -> Write:
    """Puts a file into the test's own configuration folder `mine/` (give it with --config-dir mine)."""

    def put(name: str, text: str) -> Path:
        file = home / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    return put
