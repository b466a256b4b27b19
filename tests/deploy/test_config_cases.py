"""Configuration cases from other systems' users: each is a startup error in one line, or a documented meaning."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import serving

GLOBAL = "# @package _global_\n"
Ask = Callable[..., Any]


def refused(answer: Any, *said: str) -> None:
    """Exit code 2, nothing on standard output, one line below the heading, and all of `said` in it."""
    assert (answer.code, answer.out) == (2, "")
    assert len(answer.errors) == 1, answer.err
    for words in said:
        assert words in answer.errors[0], answer.err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.pagesize=16", "unknown key 'engine'"),
        ("kv.pagesize=16", "did you mean 'page_size'?"),
        ("kv=pagged", "did you mean 'paged'?"),
        ("model.chat.trim_leadng_space=true", "did you mean 'trim_leading_space'?"),
        ("+new=1", "unknown key 'new'"),
        ("+kv.new=1", "unknown key 'new'"),
        ("+model.source.new.deep=1", "unknown key"),
    ],
)
def test_f01_a_misspelt_key_stops_the_start(ask: Ask, override: str, said: str) -> None:
    refused(ask("serve", "+recipe=tiny", override), override, said)


def test_f01_a_misspelt_key_in_a_file_is_told_with_its_place(ask: Ask, write: Callable[[str, str], Path]) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nscheduler:\n  max_bacth_size: 4\n")
    place = "mine/recipes/mine.yaml:4:3: scheduler.max_bacth_size"
    refused(ask("serve", "--config-dir", "mine", "+recipe=mine"), place, "did you mean 'max_batch_size'?")


def test_f01_free_keys_are_taken_where_they_are_documented_to_be(ask: Ask) -> None:
    assert ask("config", "+recipe=tiny", "+model.overrides.rope_theta=5000").code == 0
    refused(ask("config", "+recipe=tiny", "+sampling.extra.what=5"), "no stage of sampling.pipeline obeys 'what'")


@pytest.mark.parametrize("written", ["0123", "1e-3", "12:30", "off"])
def test_f02_text_is_the_same_from_file_command_line_and_environment(
    ask: Ask, write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nmodel:\n  name: {written}\n")
    monkeypatch.setenv("ASTRAI_NAME", written)
    from_file = ask("config", "--config-dir", "mine", "+recipe=mine", "--why", "model.name")
    from_environment = ask("config", "+recipe=tiny", "model.name=${oc.env:ASTRAI_NAME}", "--why", "model.name")
    from_line = ask("config", "+recipe=tiny", f"model.name='{written}'", "--why", "model.name")
    shown = {answer.out.split("  ")[0].strip("'\"") for answer in (from_file, from_environment, from_line)}
    assert shown == {written}


@pytest.mark.parametrize("written", ["1e-3", "1.0e-3"])
def test_f02_a_small_number_is_a_number_however_it_is_written(
    ask: Ask, write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nsampling:\n  temperature: {written}\n")
    monkeypatch.setenv("ASTRAI_HEAT", written)
    why = ("--why", "sampling.temperature")
    for arguments in (
        ("--config-dir", "mine", "+recipe=mine"),
        ("+recipe=tiny", f"sampling.temperature={written}"),
        ("+recipe=tiny", "sampling.temperature=${oc.env:ASTRAI_HEAT}"),
    ):
        assert float(ask("config", *arguments, *why).out.split("  ")[0]) == 0.001


@pytest.mark.parametrize("written", ["~", "''", "12:30", "1.5"])
def test_f02_what_is_no_number_is_a_type_error_naming_key_and_value(
    ask: Ask, write: Callable[[str, str], Path], written: str
) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nkv:\n  page_size: {written}\n")
    refused(ask("serve", "--config-dir", "mine", "+recipe=mine"), "mine/recipes/mine.yaml:4:3: kv.page_size")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.name=${oc.env:ASTRAI_NOT_SET}", "'ASTRAI_NOT_SET' is not set"),
        ("model.name=${no.such.key}", "cannot be resolved"),
        ("model.name=${model.name}", "refers to itself"),
        ("model.name=???", "no value given"),
        ("server.api_keys=['pa${ss']", "a literal ${ is written"),
    ],
)
def test_f04_what_cannot_be_resolved_is_told_at_once_by_key(ask: Ask, override: str, said: str) -> None:
    refused(ask("serve", "+recipe=tiny", override), override.split("=")[0], said)


def test_f04_a_circle_through_two_keys_is_told_at_once(ask: Ask) -> None:
    answer = ask("serve", "+recipe=tiny", "model.name=${server.host}", "server.host=${model.name}")
    assert answer.code == 2
    assert "refers to itself" in answer.err or "circle" in answer.err


def test_f04_nothing_is_loaded_before_the_configuration_is_right(tmp_path: Path) -> None:
    """In a process of its own: torch, which takes longer than everything else, is not even imported."""
    code = (
        "import sys; from astrai_deploy.cli import main\n"
        "code = main(['serve', '+recipe=tiny', 'model.name=${oc.env:ASTRAI_NOT_SET}'])\n"
        "print(code, 'torch' in sys.modules)\n"
    )
    root = Path(__file__).resolve().parent.parent.parent
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{root}:{root / 'runtime'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "2 False\n", done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["kv.page_size=0"], "must be greater than 0 (got 0)"),
        (["kv.page_size=3", "model.context=64"], "page_size must be a power of two, not 3; 2 or 4 would work"),
        (["kv.page_size=128", "model.context=64"], "a page of 128 tokens is larger than model.context=64"),
        (["scheduler.max_batch_size=0"], "must be greater than 0 (got 0)"),
        (["scheduler.max_waiting=-1"], "must be greater than or equal to 0 (got -1)"),
        (["scheduler.max_prompt_tokens_per_tick=0"], "must be greater than 0 (got 0)"),
        (["model.context=0"], "must be greater than 0"),
        (["kv=contiguous", "+kv.prefix_cache=true"], "'prefix_cache' belongs to kv.kind=paged"),
        (["attention.priority=[flashinfer,torch_native]"], "no attention backend named 'flashinfer'; there are: "),
    ],
)
def test_f05_sizes_that_make_no_sense_and_switches_that_contradict_are_errors(
    ask: Ask, overrides: list[str], said: str
) -> None:
    refused(ask("serve", "+recipe=tiny", *overrides), said)


@pytest.fixture(scope="module")
def odd_sizes() -> Any:
    """Prompt pieces that are no multiple of the page, and a default answer length beyond the context."""
    sizes = ("kv.page_size=16", "scheduler.max_prompt_tokens_per_tick=7", "protocols.openai.max_tokens=9999")
    with serving("model.context=64", *sizes) as url:
        yield url


def test_f05_a_default_answer_beyond_the_context_is_lowered_to_the_room(odd_sizes: str) -> None:
    """As conf/protocols says: never more than the context leaves. A length that a request names is not touched."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
    usage = httpx.post(f"{odd_sizes}/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 64
    refused_one = httpx.post(f"{odd_sizes}/v1/chat/completions", json={**body, "max_tokens": 64})
    assert refused_one.status_code == 400
    assert refused_one.json()["error"]["code"] == "context_length_exceeded"


def test_f05_prompt_pieces_need_not_be_whole_pages(odd_sizes: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a" * 30}], "temperature": 0, "max_tokens": 8}
    in_pieces = httpx.post(f"{odd_sizes}/v1/chat/completions", json=body).json()["choices"]
    with serving("model.context=64", "kv=contiguous") as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"] == in_pieces


def test_f06_a_pool_of_a_terabyte_is_refused_before_anything_is_allocated(ask: Ask) -> None:
    answer = ask("serve", "+recipe=tiny", "kv.n_tokens=4294967296", "machine.memory=8GiB")
    assert answer.code == 3
    said = " ".join((answer.out + answer.err).split())
    assert re.search(r"does not fit: it needs 2\.\d TiB, and \d\.\d GiB of this machine can be used", said), said
    assert "kv.n_tokens=" in said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"", "is empty"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("pytorch_model.bin", b"\x80\x04.", "convert it"),
    ],
)
def test_l06_a_broken_model_file_stops_the_start_in_one_line(
    ask: Ask, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / name).write_bytes(content)
    answer = ask("serve", "+recipe=tiny", "model=local", "model.name=mine", f"model.source.path={tmp_path / 'model'}")
    assert answer.code == 2
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_l13_an_unknown_precision_is_a_configuration_error(ask: Ask) -> None:
    refused(ask("serve", "+recipe=tiny", "model.dtype=fp8"), "model.dtype=fp8", "'float32'")
