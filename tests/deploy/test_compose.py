"""Composition: precedence, users' files, text that stays text, the environment, and what a Deployment may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from astrai_deploy._problem import ConfigError
from astrai_deploy.compose import compose
from astrai_deploy.paths import shipped

GLOBAL = "# @package _global_\n"
RECIPES = sorted(file.stem for file in shipped("recipes").glob("*.yaml"))
NEEDS = {"remote": ("provider.url=http://127.0.0.1:9/v1", "model.name=far")}  # what a recipe leaves to its user
MACHINES = sorted(file.stem for file in shipped("conf").glob("machine/*.yaml"))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_on_every_machine(recipe: str, machine: str) -> None:
    composed = compose([f"+recipe={recipe}", f"machine={machine}", *NEEDS.get(recipe, ())])
    assert composed.recipe == recipe
    assert composed.deployment.promise.endswith(".")
    assert composed.deployment.machine.kind == ("probe" if machine == "auto" else "described")


def _options() -> list[str]:
    files = [file for file in shipped("conf").glob("*/*.yaml") if file.parent.name != "protocols"]
    return sorted(f"{file.parent.name}={file.stem}" for file in files)


@pytest.mark.parametrize("option", _options())
def test_every_option_composes_with_the_tiny_recipe(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {
        "model=local": ["model.source.path=/models/mine", "model.name=mine"],
        "model=none": ["model.name=mine"],
        "provider=remote": ["provider.url=http://127.0.0.1:9/v1"],
    }.get(option, [])
    assert compose(["+recipe=tiny", option, *missing]).deployment


def test_first_line_of_every_recipe_is_the_package_and_its_promise_one_sentence() -> None:
    for file in shipped("recipes").glob("*.yaml"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert lines[0] == "# @package _global_", file
        assert lines[1].startswith("# "), f"{file} has no header comment"
        assert yaml.safe_load("\n".join(lines))["promise"].count(". ") == 0, file


def test_described_machine_becomes_a_machine() -> None:
    machine = compose(["+recipe=tiny", "machine=h100"]).deployment.machine.machine()
    assert (machine.device, machine.memory_bytes, machine.compute_capability) == ("cuda", 80 << 30, (9, 0))
    assert not machine.probed


def test_probed_machine_keeps_to_its_budget() -> None:
    machine = compose(["+recipe=tiny", "machine.memory=3 GiB", "machine.device=cpu"]).deployment.machine.machine()
    assert (machine.device, machine.memory_bytes, machine.probed) == ("cpu", 3 << 30, True)


def test_deployment_is_frozen() -> None:
    deployment = compose(["+recipe=tiny"]).deployment
    with pytest.raises(ValidationError, match="frozen"):
        deployment.server.port = 1  # type: ignore[misc]


def test_precedence_is_option_file_then_recipe_then_command_line(write) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nkv: {{page_size: 32}}\n")
    assert compose(["+recipe=tiny"]).deployment.kv.page_size == 16
    assert compose(["+recipe=mine"], ["mine"]).deployment.kv.page_size == 32
    composed = compose(["+recipe=mine", "kv.page_size=8"], ["mine"])
    assert composed.deployment.kv.page_size == 8
    assert [(old.value, str(old.origin)) for old in composed.overridden("kv.page_size")] == [
        ("32", "mine/recipes/mine.yaml:3:6"),
        ("16", "conf/kv/paged.yaml:4:1"),
    ]
    assert str(composed.origin("kv.page_size")) == "command line: kv.page_size=8"


def test_lists_replace_and_mappings_merge(write) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nmodel: {{chat: {{stop: [a, b]}}}}\n")
    chat = compose(["+recipe=mine"], ["mine"]).deployment.model.chat
    assert chat.stop == ("a", "b")
    assert chat.template  # still the option's


def test_bare_recipe_means_the_appended_one() -> None:
    assert compose(["recipe=tiny"]).recipe == "tiny"


def test_two_recipes_lay_over_each_other(write) -> None:
    write("recipes/port.yaml", f"{GLOBAL}server: {{port: 9001}}\n")
    composed = compose(["+recipe=[tiny,port]"], ["mine"])
    assert composed.recipe == "tiny, port"
    assert (composed.deployment.model.name, composed.deployment.server.port) == ("tiny", 9001)


def test_users_option_is_chosen_and_users_file_shadows_the_shipped_one(write) -> None:
    own = (shipped("conf") / "kv/paged.yaml").read_text(encoding="utf-8").replace("page_size: 16", "page_size: 64")
    write("kv/mine.yaml", own)
    chosen = compose(["+recipe=tiny", "kv=mine"], ["mine"])
    assert (chosen.deployment.kv.page_size, chosen.shadowed) == (64, {})
    write("kv/paged.yaml", own)
    shadowing = compose(["+recipe=tiny"], ["mine"])
    assert shadowing.deployment.kv.page_size == 64
    assert shadowing.shadowed == {"mine/kv/paged.yaml": "conf/kv/paged.yaml"}


def test_users_recipe_shadows_a_shipped_one_and_extends_another(write) -> None:
    write("recipes/chat_paged.yaml", f"{GLOBAL}defaults: [tiny, {{override /kv: contiguous}}, _self_]\npromise: Mine.\n")
    composed = compose(["+recipe=chat_paged"], ["mine"])
    assert composed.shadowed == {"mine/recipes/chat_paged.yaml": "recipes/chat_paged.yaml"}
    deployment = composed.deployment
    assert (deployment.promise, deployment.model.name, deployment.kv.kind) == ("Mine.", "tiny", "contiguous")


def test_folders_are_searched_from_flag_to_variable_to_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"flag": home / "flag", "variable": home / "variable", "home": home / "config/astrai-deploy"}
    for port, folder in enumerate(places.values(), start=9001):
        (folder / "server").mkdir(parents=True)
        text = (shipped("conf") / "server/local.yaml").read_text(encoding="utf-8")
        (folder / "server/local.yaml").write_text(text.replace("port: 8000", f"port: {port}"), encoding="utf-8")
    assert compose(["+recipe=tiny"]).deployment.server.port == 9003
    monkeypatch.setenv("ASTRAI_DEPLOY_CONFIG_PATH", str(places["variable"]))
    assert compose(["+recipe=tiny"]).deployment.server.port == 9002
    assert compose(["+recipe=tiny"], [places["flag"]]).deployment.server.port == 9001


def test_protocols_are_a_list_group_in_the_order_that_was_asked() -> None:
    assert list(compose(["+recipe=tiny", "protocols=[anthropic,openai]"]).deployment.protocols) == ["anthropic", "openai"]
    assert list(compose(["+recipe=tiny", "protocols=[openai]"]).deployment.protocols) == ["openai"]
    assert compose(["+recipe=tiny", "protocols=[]"]).deployment.protocols == {}
    assert compose(["+recipe=tiny"]).deployment.agents == {}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((text, text) for text in ("010", "1_000", "no", "off", "12:30:45", "1e3", "007", "true", "3", "2026-01-01", "~x")),
        ("'0123'", "0123"),
    ],
)
def test_f02_text_stays_as_it_was_written(write, written: str, meant: str) -> None:
    write(
        "recipes/mine.yaml",
        f"{GLOBAL}defaults: [tiny, _self_]\nmodel: {{name: {written}}}\nserver: {{api_keys: [{written}]}}\n",
    )
    deployment = compose(["+recipe=mine"], ["mine"]).deployment
    assert deployment.model.name == meant
    assert deployment.server.api_keys[0].get_secret_value() == meant
    if "~" not in written:
        assert compose(["+recipe=tiny", f"model.name={written}"]).deployment.model.name == meant


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [("server.port", "8_080", 8080), ("server.drain_s", "1e1", 10.0), ("sampling.temperature", "5.0e-1", 0.5)],
)
def test_f02_sane_numbers_are_numbers(write, key: str, written: str, value: float) -> None:
    group, name = key.split(".")
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\n{group}: {{{name}: {written}}}\n")
    assert getattr(getattr(compose(["+recipe=mine"], ["mine"]).deployment, group), name) == value


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("010", "YAML reads 010 as 8; write 8, or the number that you mean"),
        ("12:30", "YAML reads 12:30 as 750; write 750, or the number that you mean"),
        ("yes", "must be a number (got true)"),
        ("'x'", "must be a valid integer (got 'x')"),
        ("null", "must be a valid integer (got None)"),
        ("''", "must be a valid integer (got '')"),
        ("[1]", "must be a valid integer"),
    ],
)
def test_f02_numbers_that_were_not_meant_as_such_are_refused(write, written: str, message: str) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nserver: {{port: {written}}}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["+recipe=mine"], ["mine"])
    assert str(caught.value).startswith("mine/recipes/mine.yaml:3:10: server.port: ")
    assert message in str(caught.value)


def test_environment_names_the_backend_and_the_command_line_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTR_BACKEND", "torch_native")
    composed = compose(["+recipe=tiny"])
    assert composed.deployment.attention.strict
    assert str(composed.origin("attention.priority")) == "environment ASTR_BACKEND=torch_native"
    assert not compose(["+recipe=tiny", "attention.strict=false"]).deployment.attention.strict
    monkeypatch.setenv("ASTR_BACKEND", "torch_nativ")
    with pytest.raises(
        ConfigError, match=r"environment ASTR_BACKEND=torch_nativ: attention\.priority\[0\]: no attention back"
    ):
        compose(["+recipe=tiny"])


def test_f02_numbers_from_the_environment_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAI_PORT", "9009")
    assert compose(["+recipe=tiny", "server.port=${oc.env:ASTRAI_PORT}"]).deployment.server.port == 9009


def test_f04_dollar_in_a_password_needs_an_escape_only_before_a_brace() -> None:
    keys = compose(["+recipe=tiny", r"server.api_keys=['pa$s','a\${b}']"]).deployment.server.api_keys
    assert [key.get_secret_value() for key in keys] == ["pa$s", "a${b}"]


def test_missing_value_does_not_undo_one_that_is_there(write) -> None:
    write("recipes/mine.yaml", f"{GLOBAL}defaults: [tiny, _self_]\nserver:\n  port: ???\n")
    composed = compose(["+recipe=mine"], ["mine"])
    assert (composed.deployment.server.port, str(composed.origin("server.port"))) == (8000, "conf/server/local.yaml:2:1")


def test_deleted_key_has_no_value() -> None:
    with pytest.raises(ConfigError, match=r"conf/server/local\.yaml:\d+:1: server\.port: no value given"):
        compose(["+recipe=tiny", "~server.port"])


def test_composing_leaves_hydras_globals_alone() -> None:
    from hydra.core.global_hydra import GlobalHydra

    compose(["+recipe=tiny"])
    assert not GlobalHydra.instance().is_initialized()


def test_third_party_kinds_come_through_entry_points(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    module = home / "foreign_kv.py"
    module.write_text(
        "from typing import Literal\nfrom astrai_runtime.kv.base import KVConfig\n"
        "class Part:\n    class Config(KVConfig):\n        kind: Literal['mine']\n        depth: int\nPART = Part\n",
        encoding="utf-8",
    )
    info = home / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[astrai_deploy.parts]\nkv.mine = foreign_kv\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(home))
    assert compose(["+recipe=tiny", "kv={kind: mine, depth: 3}", "~kv.page_size", "~kv.n_tokens", "~kv.prefix_cache"])
    with pytest.raises(ConfigError, match=r"'page_size' belongs to kv\.kind=paged, but kv\.kind is 'mine'"):
        compose(["+recipe=tiny", "kv={kind: mine, depth: 3}"])
