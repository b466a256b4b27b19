"""The README is true: its commands run, its Python runs, its tree exists."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from astrai_deploy import cli
from astrai_runtime import part

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines() if line]
PYTHON = [text for language, text in BLOCKS if language == "python"]

# Commands that need a fresh machine, a terminal or a server, and what runs them.
PROVED_BY = {
    "pip install '.[demo]' && astrai-deploy +recipe=chat_paged": ("tests/deploy/test_demo.py", "chat_paged"),
    "pip install '.[test]' && pytest": (".ci/run", "[demo,test]"),
    "astrai-deploy chat +recipe=chat_paged": ("tests/deploy/test_chat.py", '"chat", "+recipe=chat_paged"'),
    next(line for line in COMMANDS if line.startswith("curl ")): ("tests/deploy/test_demo.py", "curl"),
}
EXIT = {"astrai-deploy plan +recipe=chat_paged machine=small_board kv.n_tokens=400000": 3}


def test_every_command_is_run_here_or_where_it_says() -> None:
    for command in COMMANDS:
        if command in PROVED_BY:
            file, words = PROVED_BY[command]
            assert words in (ROOT / file).read_text(encoding="utf-8"), f"{file} does not run: {command}"
        else:
            assert command.startswith("astrai-deploy "), f"nothing runs: {command}"


@pytest.mark.demo
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in PROVED_BY])
def test_the_command_does_what_the_readme_says(
    command: str, home: Path, demo_package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(shlex.split(command)[1:]) == EXIT.get(command, 0)
    out = capsys.readouterr().out
    if "--json" in command:
        assert json.loads(out)["fits"]
    if "--why" in command:
        assert out.strip() in README
    if EXIT.get(command) == 3:
        said = re.search(r"what\s+would work:\s+(kv.n_tokens=)(\d+)", out)
        assert said
        assert "\n".join(README.split("does not fit:")[1].split("```")[0].split()) == "\n".join(
            out.split("does not fit:")[1].split()
        )


def test_the_mistakes_it_shows_are_the_mistakes_that_are_printed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(text for _, text in BLOCKS if text.startswith("$ astrai-deploy"))
    command, *said = shown.splitlines()
    assert cli.main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err.splitlines() == said


def test_the_python_api_runs_as_written(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [text for text in PYTHON if "open_engine" in text]
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 16


def test_the_new_sampling_stage_is_found_by_its_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [text for text in PYTHON if "class TopA" in text]
    (tmp_path / "top_a.py").write_text(code, encoding="utf-8")
    sampling = importlib.import_module("astrai_runtime.sampling")
    monkeypatch.setattr(sampling, "__path__", [*sampling.__path__, str(tmp_path)])
    try:
        assert "top_a" in part.names("sampling")
        assert [knob.name for knob in part.load("sampling", "top_a").knobs] == ["top_a"]
        assert cli.main(["plan", "+recipe=tiny", "sampling.pipeline=[temperature,top_a]", "sampling.top_k=0"]) == 0
    finally:
        sys.modules.pop("astrai_runtime.sampling.top_a", None)


def test_every_path_of_the_file_tree_exists() -> None:
    tree = next(text for _, text in BLOCKS if text.startswith("pyproject.toml"))
    base = ROOT
    for line in tree.splitlines():
        indented = line.startswith("  ")
        for name in re.split(r" {2,}", line.strip())[:-1]:
            for word in name.split():
                where = (base if indented else ROOT) / word
                assert where.exists() or where.with_suffix(".py").exists(), f"{line!r}: {word} is not there"
        if not indented:
            base = ROOT / line.split()[0]


def test_every_runtime_folder_and_tool_file_is_in_the_tree() -> None:
    tree = next(text for _, text in BLOCKS if text.startswith("pyproject.toml"))
    for folder in (ROOT / "runtime" / "astrai_runtime").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"  {folder.name}/" in tree
    for file in (ROOT / "astrai_deploy").glob("[a-z]*.py"):
        assert file.name in tree
