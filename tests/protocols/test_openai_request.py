"""What the chat route makes of a body: the tables of what is honoured, accepted without effect, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from astrai_runtime.errors import InvalidRequest, ModelNotFound, UnknownField, Unsupported
from astrai_runtime.request import Message, Turn

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def read(speak: Callable[..., Any]) -> Callable[..., Turn]:
    speaker = speak("openai", "openai")
    return lambda **fields: speaker.read({"messages": [USER]} | fields)


def test_sampling_fields_override_the_declared_defaults(read: Callable[..., Turn]) -> None:
    given = read(temperature=0.5, top_p=0.9, seed=7, presence_penalty=1, logit_bias={"5": -100, "3": 2.5}).sampling
    assert (given.temperature, given.top_k, given.top_p, given.seed) == (0.5, 50, 0.9, 7)
    assert given.presence_penalty == 1
    assert given.logit_bias == ((3, 2.5), (5, -100.0))


def test_null_means_the_declared_default(read: Callable[..., Turn]) -> None:
    names = ("temperature", "top_p", "top_k", "seed", "logit_bias", "max_tokens", "stop", "n", "logprobs", "stream", "user")
    assert read(**dict.fromkeys(names)) == read()
    assert read().sampling.temperature == 0.7
    assert (read().limits.max_tokens, read().limits.default_max_tokens) == (None, 100)


def test_knob_of_a_declared_stage_is_a_field_of_the_request(read: Callable[..., Turn]) -> None:
    assert read(typical_p=0.25).sampling.extra == {"typical_p": 0.25}
    with pytest.raises(InvalidRequest, match="above 0 to 1") as caught:
        read(typical_p=0)
    assert caught.value.param == "/typical_p"
    with pytest.raises(InvalidRequest, match="number"):
        read(typical_p="much")


def test_parameter_without_a_stage_is_refused_unless_neutral(read: Callable[..., Turn]) -> None:
    assert read(min_p=0, repetition_penalty=1.0) == read()
    with pytest.raises(InvalidRequest, match="no stage of this deployment's sampling pipeline obeys 'min_p'") as caught:
        read(min_p=0.1)
    assert caught.value.param == "/min_p"


@pytest.mark.parametrize(("top_k", "kept"), [(-1, 0), (0, 0), (1, 1), (10**9, 10**9)])
def test_top_k_zero_and_minus_one_are_off(read: Callable[..., Turn], top_k: int, kept: int) -> None:
    assert read(top_k=top_k).sampling.top_k == kept


@pytest.mark.parametrize(
    "bias", [{"-1": 1}, {"259": 1}, {"abc": 1}, {" 5 ": 1}, {"5": 101}, {"٣": 1}, {str(i): 1 for i in range(5000)}]
)
def test_logit_bias_names_what_is_wrong(read: Callable[..., Turn], bias: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias|bias") as caught:
        read(logit_bias=bias)
    assert (caught.value.param or "").startswith("/logit_bias")


def test_both_names_of_the_token_limit_are_honoured(read: Callable[..., Turn]) -> None:
    assert read(max_completion_tokens=2).limits.max_tokens == 2
    assert read(max_tokens=3, max_completion_tokens=3).limits.max_tokens == 3
    with pytest.raises(InvalidRequest, match="two names of one limit") as caught:
        read(max_tokens=3, max_completion_tokens=4)
    assert caught.value.param == "/max_completion_tokens"


@pytest.mark.parametrize(
    ("stop", "kept"),
    [(None, ()), ([], ()), ("X", ("X",)), (["a", "b", "a"], ("a", "b")), ([str(i) for i in range(16)], None)],
)
def test_stop_strings(read: Callable[..., Turn], stop: Any, kept: tuple[str, ...] | None) -> None:
    assert read(stop=stop).limits.stop == (tuple(stop) if kept is None else kept)


@pytest.mark.parametrize(
    ("stop", "place"), [("", "/stop"), ([""], "/stop/0"), (["X", ""], "/stop/1"), (["x"] * 17, "/stop")]
)
def test_empty_and_too_many_stop_strings_are_refused(read: Callable[..., Turn], stop: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(stop=stop)
    assert caught.value.param == place


def test_n_is_bounded_by_the_deployment(read: Callable[..., Turn]) -> None:
    assert read(n=8).n == 8
    with pytest.raises(InvalidRequest, match="1 to 8"):
        read(n=1000)


@pytest.mark.parametrize(
    ("fields", "top"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_logprobs(read: Callable[..., Turn], fields: dict[str, Any], top: int | None) -> None:
    assert read(**fields).top_logprobs == top


def test_top_logprobs_alone_is_refused(read: Callable[..., Turn]) -> None:
    with pytest.raises(InvalidRequest, match="needs 'logprobs'"):
        read(top_logprobs=5)


HARMLESS = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "stream_options": {"include_usage": False},
    "parallel_tool_calls": True,
    "safety_identifier": "x",
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "auto",
    "functions": None,
    "audio": None,
    "modalities": ["text"],
    "best_of": 1,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_field_that_asks_for_nothing_is_accepted(read: Callable[..., Turn], name: str) -> None:
    assert read(**{name: HARMLESS[name]}) == read()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ],
)
def test_field_that_cannot_be_honoured_is_named(read: Callable[..., Turn], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match="not supported by this deployment") as caught:
        read(**fields)
    assert named in caught.value.message
    assert (caught.value.param or "").startswith(f"/{named}")


def test_misspelt_field_is_refused_with_its_neighbour(read: Callable[..., Turn]) -> None:
    with pytest.raises(UnknownField, match="did you mean 'temperature'") as caught:
        read(temprature=0.5)
    assert caught.value.param == "/temprature"


def test_another_model_is_not_found_and_none_may_be_left_out(read: Callable[..., Turn]) -> None:
    assert read(model="tiny").model == "tiny"
    assert read().model is None
    with pytest.raises(ModelNotFound, match="serves: tiny"):
        read(model="gpt-4o")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": None},
        {"messages": [None]},
        {"messages": [{}]},
        {"messages": "hi"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": "x", "contnet": "y"}]},
        *({"max_tokens": value} for value in (0, -1, 1.5, "5", True)),
        {"max_completion_tokens": 0},
        {"temperature": 2.1},
        {"temperature": -1},
        {"top_p": -0.1},
        {"top_p": 1.0000001},
        {"top_k": -2},
        {"top_k": 2**63},
        {"n": 0},
        {"stop": 3},
        {"stop": [3]},
        {"top_logprobs": 21, "logprobs": True},
        {"stream": "yes"},
        {"seed": -1},
        {"service_tier": "priority"},
        {"logit_bias": {"5": "x"}},
    ],
)
def test_malformed_field_is_no_request(read: Callable[..., Turn], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(**fields)


def test_missing_messages_are_no_request(speak: Callable[..., Any]) -> None:
    with pytest.raises(ValidationError):
        speak("openai", "openai").read({"max_tokens": 3})


def texts(turn: Turn) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in turn.messages]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_text_parts_are_joined_with_nothing_between(read: Callable[..., Turn], role: str) -> None:
    def content(*pieces: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": piece} for piece in pieces]

    for pieces in ((), ("one",), ("one ", "two")):
        as_parts = read(messages=[USER, {"role": role, "content": content(*pieces)}])
        assert as_parts == read(messages=[USER, {"role": role, "content": "".join(pieces)}])


def test_unknown_part_type_is_named_with_its_place(read: Callable[..., Turn]) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    with pytest.raises(InvalidRequest, match="'image_url' is not supported") as caught:
        read(messages=[{"role": "user", "content": parts}])
    assert caught.value.param == "/messages/0/content/1/type"


def test_developer_is_the_system_role(read: Callable[..., Turn]) -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}, USER]
    assert texts(read(messages=messages)) == [("system", "a"), ("system", "b"), ("user", "hi")]


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_replayed_tool_call_without_text_reaches_the_template(read: Callable[..., Turn], content: dict[str, Any]) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    replayed = {"role": "assistant", "tool_calls": calls, "refusal": None, "audio": None, "function_call": None} | content
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    turn = read(messages=[USER, replayed, result, USER])
    assert turn.messages[1] == Message("assistant", "", {"tool_calls": calls})
    assert turn.messages[2] == Message("tool", "42", {"tool_call_id": "c1"})


def test_user_message_needs_a_content(read: Callable[..., Turn]) -> None:
    with pytest.raises(InvalidRequest, match="needs a content") as caught:
        read(messages=[{"role": "user", "content": None}])
    assert caught.value.param == "/messages/0/content"


def test_last_assistant_message_is_a_finished_turn(read: Callable[..., Turn]) -> None:
    assert read(messages=[USER, {"role": "assistant", "content": "Answer: ("}]).prefill is False


def test_seed_dialect_echoes_any_model_name(speak: Callable[..., Any]) -> None:
    assert speak("openai", "astrai").read({"messages": [USER], "model": "whatever"}).model == "whatever"
