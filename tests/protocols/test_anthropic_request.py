"""What the messages route makes of a body."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from astrai_runtime.errors import InvalidRequest, ModelNotFound, UnknownField, Unsupported
from astrai_runtime.request import Turn

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def read(speak: Callable[..., Any]) -> Callable[..., Turn]:
    speaker = speak("anthropic", "anthropic")
    return lambda **fields: speaker.read({"messages": [USER], "max_tokens": 8} | fields)


def texts(turn: Turn) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in turn.messages]


def test_fields_reach_the_turn(read: Callable[..., Turn]) -> None:
    turn = read(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], stream=True, model="tiny")
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.top_k) == (0.5, 0.9, 4)
    assert (turn.limits.max_tokens, turn.limits.stop, turn.stream) == (8, ("END",), True)


def test_h22_system_blocks_are_joined_and_their_cache_marks_change_no_prompt(read: Callable[..., Turn]) -> None:
    blocks = [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief."}]
    joined = read(system="Be brief.")
    assert read(system=blocks) == dataclasses.replace(joined, tell_cached=True)
    assert read(system="Be brief.", cache_control={"type": "ephemeral"}).tell_cached
    assert not joined.tell_cached
    assert texts(read(system="Be brief."))[0] == ("system", "Be brief.")


def test_content_blocks_equal_the_string(read: Callable[..., Turn]) -> None:
    blocks = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert read(messages=[{"role": "user", "content": blocks}]) == read()


@pytest.mark.parametrize("ending", ["Answer: (", "Answer: "])
def test_last_assistant_message_is_continued(read: Callable[..., Turn], ending: str) -> None:
    turn = read(messages=[USER, {"role": "assistant", "content": ending}])
    assert turn.prefill
    assert texts(turn)[-1] == ("assistant", ending)
    assert not read().prefill


def test_harmless_fields_change_nothing(read: Callable[..., Turn]) -> None:
    harmless = {
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
        "service_tier": "auto",
        "tools": [],
        "tool_choice": None,
    }
    assert read(**harmless) == read()
    assert read(thinking=None, system=None, metadata=None, stop_sequences=None) == read()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"effort": "low"}}, "output_config"),
    ],
)
def test_field_that_cannot_be_honoured_is_named(read: Callable[..., Turn], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=f"'{named}' is not supported by this deployment") as caught:
        read(**fields)
    assert caught.value.param == f"/{named}"


def test_block_of_another_type_is_named(read: Callable[..., Turn]) -> None:
    with pytest.raises(InvalidRequest, match="'tool_result'") as caught:
        read(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"}]}])
    assert caught.value.param == "/messages/0/content/0/type"


def test_unknown_field_and_unknown_model(read: Callable[..., Turn]) -> None:
    with pytest.raises(UnknownField, match="did you mean 'stop_sequences'"):
        read(stop_sequence=["x"])
    with pytest.raises(ModelNotFound, match="serves: tiny"):
        read(model="claude")


def test_empty_stop_sequence_is_refused(read: Callable[..., Turn]) -> None:
    with pytest.raises(InvalidRequest, match="may not be empty"):
        read(stop_sequences=["x", ""])


@pytest.mark.parametrize(
    "fields",
    [
        *({"max_tokens": value} for value in (0, -1, 1.5, "5", None)),
        *({"messages": value} for value in ([], None, [None], [{}], "hi", [{"role": "system", "content": "x"}])),
        {"messages": [{"role": "user", "content": None}]},
        {"temperature": 1.5},
        {"stop_sequences": "END"},
        {"system": 3},
    ],
)
def test_malformed_field_is_no_request(read: Callable[..., Turn], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(**fields)


def test_public_dialect_needs_max_tokens_and_the_seed_does_not(speak: Callable[..., Any]) -> None:
    with pytest.raises(ValidationError):
        speak("anthropic", "anthropic").read({"messages": [USER]})
    turn = speak("anthropic", "astrai").read({"messages": [USER], "temperature": 2.0, "model": "any"})
    assert (turn.limits.max_tokens, turn.limits.default_max_tokens, turn.model) == (None, 100, "any")
