"""The command line: what each verb prints, Hydra's own flags, secrets, and what is never imported or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from astrai_deploy._problem import Key, sounds_secret
from astrai_deploy.compose import compose

GLOBAL = "# @package _global_\n"


def test_help_lists_verbs_recipes_with_promises_and_groups(ask, write) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}promise: It is mine.\n")
    write("kv/mine.yaml", "kind: paged\n")
    answer = ask("--help", "--config-dir", "mine")
    assert answer.code == 0
    for text in ("  serve ", "  plan ", "  tiny ", "It is mine.", "contiguous, mine, paged", "--why KEY"):
        assert text in answer.out


def test_version(ask) -> None:
    assert ask("--version").out.startswith("astrai-deploy 0.")


def test_config_prints_yaml_that_means_the_same(ask, write) -> None:
    text = ask("config", "+recipe=tiny", "kv.page_size=32").out
    printed = yaml.safe_load(text)
    assert printed["kv"]["page_size"] == 32
    write("recipes/again.yaml", GLOBAL + text)
    assert compose(["+recipe=[tiny,again]"], ["mine"]).deployment == compose(["+recipe=tiny", "kv.page_size=32"]).deployment


def test_config_tells_what_it_shadows(ask, write) -> None:
    write("recipes/tiny.yaml", f"{GLOBAL}defaults: [chat_paged, override /model: tiny]\n")
    answer = ask("config", "--config-dir", "mine", "+recipe=tiny")
    assert answer.out.startswith("# +recipe=tiny\n# mine/recipes/tiny.yaml shadows the shipped recipes/tiny.yaml\n")


def test_why_prints_value_origin_and_what_it_overrode(ask, write) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nkv:\n  page_size: 32\n")
    answer = ask("config", "--config-dir", "mine", "--why", "kv.page_size", "+recipe=mine")
    assert answer.out == "32  mine/recipes/mine.yaml:4:3 (over 16 from conf/kv/paged.yaml:4:1)\n"
    below = ask("config", "--config-dir", "mine", "--why", "kv", "+recipe=mine").out.splitlines()
    assert below[0] == "kv.kind: paged  conf/kv/paged.yaml:2:1"
    assert "kv.page_size: 32  mine/recipes/mine.yaml:4:3 (over 16 from conf/kv/paged.yaml:4:1)" in below
    assert ask("config", "--why", "agents", "+recipe=tiny").out == "{}  nothing declares it; it is empty\n"
    assert ask("config", "--why", "attention.priority", "+recipe=tiny").out.startswith("[cpu, torch_native]")


def test_config_json_tells_origins_and_files(ask) -> None:
    told = json.loads(ask("config", "--json", "+recipe=tiny", "kv.page_size=32").out)
    assert told["recipe"] == "tiny"
    assert told["config"]["kv"]["page_size"] == 32
    assert told["origins"]["kv.page_size"] == "command line: kv.page_size=32"
    assert told["origins"]["model.name"] == "conf/model/tiny.yaml:2:1"
    assert told["files"][-1] == "recipes/tiny.yaml"


def test_secrets_are_never_printed(ask, write, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-very-secret"
    monkeypatch.setenv("ASTRAI_API_KEY", secret)
    write(
        "recipes/mine.yaml",
        f"{GLOBAL}defaults: [tiny, _self_]\nserver: {{api_keys: ['{secret}']}}\n"
        f"model: {{overrides: {{hub_token: {secret}}}}}\n",
    )
    typed = f"server.api_keys=[{secret}]"
    for arguments in (
        ["config", "+recipe=mine"],
        ["config", "--json", "+recipe=mine", typed],
        ["config", "--why", "server", "+recipe=mine", typed],
        ["config", "--why", "model", "+recipe=mine"],
        ["config", "+recipe=tiny", "server.api_keys=[${oc.env:ASTRAI_API_KEY}]"],
        ["config", "+recipe=tiny", f"server.api_keys={secret}"],
        ["config", "+recipe=tiny", f"server.api_key={secret}"],
        ["config", "+recipe=tiny", f"server.api_keys={{{secret}"],
        ["config", "+recipe=tiny", f"server.api_keys=[{secret}", "x"],
    ):
        answer = ask(*arguments, "--config-dir", "mine")
        assert secret not in answer.out + answer.err, arguments
    assert "**********" in ask("config", "+recipe=mine", "--config-dir", "mine").out


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        (("server", "api_keys"), True),
        (("hub_token",), True),
        (("client_secret",), True),
        (("max_tokens",), False),
        (("kv", "n_tokens"), False),
        (("bos_token_id",), False),
    ],
)
def test_names_that_sound_secret(key: Key, secret: bool) -> None:
    assert sounds_secret(key) is secret


def test_plan_exits_3_when_it_does_not_fit(ask) -> None:
    answer = ask("plan", "+recipe=tiny", "machine=small_board", "kv.n_tokens=1073741824")
    assert answer.code == 3
    assert "kv.n_tokens" in answer.out + answer.err


def test_hydra_shows_the_job(ask) -> None:
    answer = ask("--cfg", "job", "-p", "kv", "+recipe=tiny", "kv.page_size=8")
    assert (answer.code, yaml.safe_load(answer.out)["page_size"]) == (0, 8)


def test_hydra_shows_its_search_path_users_first(ask, write) -> None:
    write("recipes/mine.yaml", GLOBAL)
    answer = ask("--info", "searchpath", "--config-dir", "mine")
    shown = [line.split("|")[2].strip() for line in answer.out.splitlines() if "://" in line]
    assert [path.partition("://")[0] for path in shown] == [
        "pkg",
        "user",
        "user-recipes",
        "shipped",
        "recipes",
        "structured",
    ]


def test_hydra_refuses_in_one_line(ask) -> None:
    answer = ask("--cfg", "job", "kv.page_sise=8")
    assert answer.code == 2
    assert answer.err.startswith("astrai-deploy: ")
    assert "Traceback" not in answer.err


def test_sweep_runs_the_verb_for_each_cell(ask, home: Path) -> None:
    answer = ask("config", "-m", "+recipe=tiny", "kv=contiguous,paged", "--why", "kv.kind")
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines() if "conf/kv/" in line] == ["contiguous", "paged"]


def test_bad_cell_of_a_sweep_does_not_keep_the_others_from_running(ask) -> None:
    answer = ask("config", "-m", "recipe=tiny", "kv.page_size=3,8", "--why", "kv.page_size")
    assert answer.code == 2
    assert "kv.page_size=3: " in answer.err
    assert "8  command line: kv.page_size=8 (over 16 from" in answer.out


@pytest.mark.parametrize("line", ["astrai-deploy +recipe=", "astrai-deploy plan +recipe="])
def test_shell_completes_recipes_also_behind_a_verb(ask, write, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    write("recipes/mine.yaml", GLOBAL)
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    answer = ask("-sc", "query=bash", "--config-dir", "mine")
    assert answer.code == 0
    assert {"+recipe=chat_paged", "+recipe=tiny", "+recipe=mine"} <= set(answer.out.split())


def test_nothing_is_written_into_the_working_directory(ask, home: Path) -> None:
    for arguments in (
        ["config", "+recipe=tiny"],
        ["--cfg", "job", "+recipe=tiny"],
        ["--info", "defaults", "+recipe=tiny"],
        ["config", "-m", "+recipe=tiny", "kv=contiguous,paged"],
    ):
        ask(*arguments)
        assert {path.name for path in home.iterdir()} <= {"state", "cache", "config"}, arguments


@pytest.mark.parametrize("arguments", [["--help"], ["config", "+recipe=tiny"], ["plan", "+recipe=tiny"]])
def test_answers_without_torch_or_litestar(home: Path, arguments: list[str]) -> None:
    program = (
        "import sys; from astrai_deploy.cli import main; code = main(sys.argv[1:])\n"
        "found = sorted({'torch', 'litestar', 'uvicorn', 'transformers'} & set(sys.modules))\n"
        "assert not found, found\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
