"""What a person and a program read of a plan, from the command line: every part of it, each with its origin."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors.numpy import load_file, save_file

from astrai_deploy.cli import main
from astrai_deploy.compose import Composed, compose
from astrai_deploy.paths import shipped
from astrai_deploy.plan import Plan, make_plan
from astrai_deploy.plan_report import plan_json, print_plan
from astrai_runtime import part
from astrai_runtime.attention.base import AttentionShape, Phase
from astrai_runtime.attention.torch_native import TorchNative
from astrai_runtime.machine import Machine

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINES = sorted(file.stem for file in (ROOT / "conf/machine").glob("*.yaml"))
NEEDS = {"remote": ("provider.url=http://127.0.0.1:9/v1", "model.name=far")}  # what a recipe leaves to its user
RECIPES = sorted(file.stem for file in (ROOT / "recipes").glob("*.yaml"))


def report(plan: Plan, composed: Composed, encoding: str = "utf-8") -> str:
    """The report as it is piped into a file of 80 columns."""
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_plan(plan, composed, Console(file=buffer, width=80, color_system=None))
    buffer.seek(0)
    return buffer.read()


def text_of(*overrides: str, config_dir: Path | None = None, encoding: str = "utf-8") -> str:
    composed = compose(overrides, [config_dir] if config_dir else [], {})
    return report(make_plan(composed), composed, encoding)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("home")
def test_the_report_says_what_runs_and_where_each_part_was_declared() -> None:
    text = text_of("+recipe=tiny", "machine=laptop", "kv.page_size=32", "sampling.top_k=40")
    said = unwrapped(text)

    assert "tiny: llama, 107.1 K parameters, 2 layers" in said
    assert "laptop: cpu, 8 cores, 16.0 GiB" in said
    assert "serving needs machine=auto" in said
    assert "weights float32 425 KiB * | bfloat16 213 KiB | int8 114 KiB | int4 " in said
    assert "weights 425.2 KiB" in said
    assert "kernels.isa avx2 avx512 needs avx512_bf16," in said
    assert "kernels.threads 8 one for each of 8 cores (conf/kernels/auto.yaml:" in said
    assert "paged: 16,384 tokens in pages of 32, 512 B a token (float32)" in said
    assert "room for 8 whole contexts of 2,048 tokens at once" in said
    assert "prefill cpu decode cpu conf/attention/auto.yaml:" in said
    pipeline = "penalties > logit_bias > temperature 1 > top_k 40 > typical_p 1 > top_p 1 > min_p 0 > mirostat"
    assert f"{pipeline} conf/sampling/default.yaml:" in said
    assert "POST /v1/chat/completions openai, dialect openai (conf/protocols/openai.yaml:" in said
    assert "GET /health /ready /stats /v1/models" in said
    assert "http://127.0.0.1:8000 (conf/server/local.yaml:" in said
    assert "kv.page_size 32 command line" in said
    assert "kv.n_tokens 16384 scheduler.max_batch_size 8 x model.context 2048" in said
    assert said.endswith("of 14.4 GiB")
    assert max(map(len, text.splitlines())) <= 80
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert "\x1b" not in text


@pytest.mark.usefixtures("home")
def test_the_bar_is_drawn_with_letters_where_there_is_only_ascii() -> None:
    text = text_of("+recipe=tiny", "machine=small_board", encoding="ascii")

    assert "rrrr....." in text
    assert "r runtime" in text


@pytest.mark.usefixtures("home")
def test_what_does_not_fit_names_key_value_and_line_and_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "+recipe=tiny", "machine=small_board", "kv.n_tokens=1073741824"])
    said = unwrapped(capsys.readouterr().out)

    assert code == 3
    assert "does not fit: it needs 576.8 GiB, and 3.6 GiB of small board can be used; what would work:" in said
    fitting = int(said.partition("kv.n_tokens=")[2].partition(" ")[0])
    assert f"kv.n_tokens={fitting} or less instead of 1073741824 (command line)" in said
    assert main(["plan", "+recipe=tiny", "machine=small_board", f"kv.n_tokens={fitting}"]) == 0
    assert main(["plan", "+recipe=tiny", "machine=small_board", f"kv.n_tokens={fitting + 16}"]) == 3


@pytest.mark.usefixtures("home")
def test_f06_a_memory_budget_is_obeyed_on_either_side_of_its_edge() -> None:
    needed = make_plan(compose(["+recipe=tiny"], [], {})).memory.peak
    for budget, fits in ((int(needed / 0.9) + 1, True), (int(needed / 0.9) - 2**20, False)):
        plan = make_plan(compose(["+recipe=tiny", f"machine.memory={budget}", "kv.n_tokens=16384"], [], {}))
        assert plan.fits is fits
        assert plan.machine.memory_bytes == budget


@pytest.mark.usefixtures("home")
def test_programs_read_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "+recipe=tiny", "machine=laptop", "server.api_keys=[hush]"]) == 0
    text = capsys.readouterr().out
    told = json.loads(text)

    assert set(told) == {
        *("recipe", "promise", "fits", "machine", "model", "provider", "memory", "kv", "attention", "kernels"),
        *("sampling", "routes", "server", "decisions", "set", "shadowed", "problem"),
    }
    assert told["fits"] is True
    assert told["memory"]["weights"] == told["model"]["weight_bytes"]["float32"] == 435_456
    assert told["model"]["weight_bytes"].keys() == {"float32", "bfloat16", "int8", "int4"}
    assert (told["model"]["weights"], told["kernels"]) == ("float32", {"isa": "avx2", "threads": 8})
    assert told["memory"]["serving"] == sum(
        told["memory"][name] for name in ("overhead", "tokenizer", "weights", "kv", "tables", "activations")
    )
    assert told["attention"]["decode"] == {"backend": "cpu", "passed_over": {}}
    assert [stage["name"] for stage in told["sampling"]][:2] == ["penalties", "logit_bias"]
    posted = {route["path"] for route in told["routes"] if route["method"] == "POST"}
    spoken = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"}
    assert posted == spoken | {"/tokenize", "/detokenize"}
    assert {"key": "server.api_keys", "value": "**********", "origin": "command line"} in told["set"]
    assert "hush" not in text


@pytest.mark.usefixtures("home")
def test_a_users_file_that_shadows_a_shipped_one_is_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "kv").mkdir(parents=True)
    own = (shipped("conf") / "kv/paged.yaml").read_text().replace("page_size: 16", "page_size: 64")
    (mine / "kv/paged.yaml").write_text(own)
    said = unwrapped(text_of("+recipe=tiny", config_dir=mine)).replace(" ", "")

    assert "mine/kv/paged.yamlreplacestheshippedconf/kv/paged.yaml" in said
    assert "inpagesof64" in said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with the weights of the shipped `tiny` model."""
    spec = make_plan(compose(["+recipe=tiny"], [], {})).spec
    names = part.load("model", "llama").hf_tensors(spec)
    tensors = {names[name].name: np.zeros(shape, np.float32) for name, shape in spec.tensor_shapes().items()}
    made = tmp_path / "model"
    made.mkdir()
    card = yaml.safe_load((ROOT / "conf/model/tiny.yaml").read_text())
    (made / "config.json").write_text(json.dumps(card["source"]["config"]))
    save_file(tensors, made / "model.safetensors")
    return made


@pytest.mark.usefixtures("home")
def test_l02_a_models_own_files_are_checked_by_their_headers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "+recipe=tiny", "model=local", "model.name=mine", f"model.source.path={folder}"]
    assert main(asked) == 0
    assert "mine: llama, 107.1 K parameters" in capsys.readouterr().out

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert main(asked) == 2
    assert "missing: model.layers.1.self_attn.k_proj.weight" in capsys.readouterr().err


@pytest.mark.usefixtures("home")
def test_files_that_are_not_on_this_disk_are_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+recipe=tiny", "model=qwen3_0_6b", "run.offline=true"]) == 2
    assert "astrai-deploy fetch" in capsys.readouterr().err


class _Refusing(TorchNative):
    """A backend that never can."""

    @classmethod
    def refuses(cls, machine: Machine, shape: AttentionShape, phase: Phase) -> str | None:
        return "nvcc is missing" if phase == "decode" else None


@pytest.fixture
def fancy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attention backend, named `fancy`, as another distribution would register it."""
    names, load = part.names, part.load
    monkeypatch.setattr(part, "names", lambda group: [*names(group), *(["fancy"] if group == "attention" else [])])
    monkeypatch.setattr(part, "load", lambda group, name: _Refusing if name == "fancy" else load(group, name))


@pytest.mark.usefixtures("home", "fancy_backend")
def test_a_backend_that_was_passed_over_is_named_with_its_reason() -> None:
    composed = compose(["+recipe=tiny", "attention.priority=[fancy,torch_native]"], [], {})
    plan = make_plan(composed)
    said = unwrapped(report(plan, composed))

    assert "prefill fancy decode torch_native not fancy: nvcc is missing" in said
    told = plan_json(plan, composed)
    assert told["attention"]["decode"] == {"backend": "torch_native", "passed_over": {"fancy": "nvcc is missing"}}


@pytest.mark.usefixtures("home")
def test_without_a_compiler_the_report_says_why_torch_serves() -> None:
    said = unwrapped(text_of("+recipe=tiny", "machine=small_board"))

    assert "prefill torch_native decode torch_native not cpu: there is no C++ compiler to build its kernels with" in said
    assert "weights float32 418 KiB * | bfloat16 210 KiB" in said
    assert "kernels." not in said


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("home", "demo_package")
def test_every_recipe_plans_on_every_machine(recipe: str, machine: str) -> None:
    composed = compose([f"+recipe={recipe}", f"machine={machine}", *NEEDS.get(recipe, ())], [], {})
    plan = make_plan(composed)

    assert plan.fits, str(plan.problem)
    assert plan.machine.probed == (machine == "auto")
    assert plan.full_contexts >= 1
    assert composed.deployment.promise in unwrapped(report(plan, composed))
    json.dumps(plan_json(plan, composed))


@pytest.mark.usefixtures("home")
def test_planning_imports_neither_torch_nor_the_server() -> None:
    code = (
        "import sys; from astrai_deploy.cli import main; code = main(['plan', '+recipe=tiny'])\n"
        "heavy = {'torch', 'litestar', 'uvicorn', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
