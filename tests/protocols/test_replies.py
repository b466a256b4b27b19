"""Whole replies, errors and model lists of both protocols in both dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic.types
import openai.types.chat
import pytest
from pydantic import ValidationError

from astrai_runtime import errors
from astrai_runtime.errors import AstraiError, Busy, ContextLengthExceeded, InvalidRequest, NotReady, UnknownPart
from astrai_runtime.event import Failed, Finished, Usage
from tests.protocols.sse import events

DIALECTS = [("openai", "openai"), ("openai", "astrai"), ("anthropic", "anthropic"), ("anthropic", "astrai")]
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def test_chat_completion_is_what_the_sdk_expects(speak: Callable[..., Any], scripts: dict[str, Any]) -> None:
    speaker = speak("openai", "openai")
    reply = speaker.whole(speaker.read(USER | {"n": 2}), scripts["two"])
    assert reply.status == 200
    assert reply.body == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 1717000000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Aa", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "B", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            },
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    openai.types.chat.ChatCompletion.model_validate(reply.body, strict=True)


def test_every_stream_chunk_is_a_chunk_of_the_sdk(speak: Callable[..., Any], scripts: dict[str, Any]) -> None:
    speaker = speak("openai", "openai")
    turn = speaker.read(USER | {"n": 2, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [item.json for item in events(speaker.stream(turn, scripts["two"]))[:-1]]
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert [index for index, chunk in enumerate(chunks) if not chunk["choices"]] == [len(chunks) - 1]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"] == speaker.whole(turn, scripts["two"]).body["usage"]


def test_logprobs_have_one_strict_entry_for_each_token(speak: Callable[..., Any], scripts: dict[str, Any]) -> None:
    speaker = speak("openai", "openai")
    body = speaker.whole(speaker.read(USER | {"logprobs": True, "top_logprobs": 2}), scripts["logprobs"]).body
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "🌉"
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 1]
    assert content[1]["logprob"] == -9999.0
    openai.types.chat.ChatCompletion.model_validate(body, strict=True)


def test_seed_chat_completion_has_the_seed_fields_only(speak: Callable[..., Any], scripts: dict[str, Any]) -> None:
    speaker = speak("openai", "astrai")
    assert speaker.whole(speaker.read(USER), scripts["plain"]).body == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 1717000000,
        "model": "astrai",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": 'Hello "wörld" 🌉\n'}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }


@pytest.mark.parametrize(
    ("script", "reason", "sequence"),
    [("plain", "end_turn", None), ("length", "max_tokens", None), ("stopped", "stop_sequence", "END")],
)
def test_message_says_why_it_stopped(
    speak: Callable[..., Any], scripts: dict[str, Any], script: str, reason: str, sequence: str | None
) -> None:
    speaker = speak("anthropic", "anthropic")
    body = speaker.whole(speaker.read({**USER, "stop_sequences": ["END"]}), scripts[script]).body
    message = anthropic.types.Message.model_validate(body)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, scripts[script][-1][1].usage.completion_tokens)
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")


@pytest.mark.parametrize("script", ["plain", "stopped", "empty"])
def test_message_events_come_in_the_api_order(speak: Callable[..., Any], scripts: dict[str, Any], script: str) -> None:
    speaker = speak("anthropic", "anthropic")
    turn = speaker.read(USER | {"stream": True})
    found = events(speaker.stream(turn, scripts[script]))
    names = [item.event for item in found if item.event not in ("ping", "content_block_delta")]
    assert names == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert all(item.event == item.json["type"] for item in found)
    text = "".join(item.json["delta"]["text"] for item in found if item.event == "content_block_delta")
    assert text == speaker.whole(turn, scripts[script]).body["content"][0]["text"]


def every_error() -> list[AstraiError]:
    """One of each class of the tree."""
    made: dict[type, AstraiError] = {
        UnknownPart: UnknownPart("kv", "pagd", ["paged"]),
        ContextLengthExceeded: ContextLengthExceeded(70, 64),
    }
    found: list[AstraiError] = []
    classes: list[type[AstraiError]] = [AstraiError]
    while classes:
        cls = classes.pop()
        if cls.__module__ == errors.__name__:
            found.append(made[cls] if cls in made else cls("what went wrong"))
        classes.extend(cls.__subclasses__())
    return found


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("kind", "dialect"), DIALECTS)
def test_every_error_has_a_status_and_an_envelope(
    speak: Callable[..., Any], kind: str, dialect: str, error: AstraiError
) -> None:
    reply = speak(kind, dialect).protocol.error(error)
    assert 400 <= reply.status < 600
    if dialect == "astrai":
        assert list(reply.body) == ["detail"]
    elif kind == "openai":
        assert list(reply.body["error"]) == ["message", "type", "param", "code"]
        assert reply.body["error"]["code"] == error.code
    else:
        assert reply.body["type"] == "error"
        assert reply.body["error"]["message"] == error.message
    assert ("retry-after" in reply.headers) == (reply.status in (429, 503))


def test_errors_keep_their_numbers_names_and_places(speak: Callable[..., Any]) -> None:
    public = speak("openai", "openai").protocol
    long = public.error(ContextLengthExceeded(70, 64))
    assert (long.status, long.body["error"]["type"]) == (400, "invalid_request_error")
    assert long.body["error"]["code"] == "context_length_exceeded"
    assert "70" in long.body["error"]["message"]
    assert "64" in long.body["error"]["message"]
    assert public.error(InvalidRequest("x", param="logit_bias")).body["error"]["param"] == "/logit_bias"
    assert public.error(Busy("full", retry_after_s=2.5)).headers == {"retry-after": "3"}
    overloaded = speak("anthropic", "anthropic").protocol.error(Busy("full"))
    assert (overloaded.status, overloaded.body["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_seed_dialect_has_the_seed_error_bodies(speak: Callable[..., Any], kind: str) -> None:
    seed = speak(kind, "astrai").protocol
    loading = seed.error(NotReady("the model is still loading"))
    assert (loading.status, loading.body) == (503, {"detail": "Engine not initialized"})
    refused = seed.error(InvalidRequest("no", param="/stop/0"))
    assert refused.status == 422
    assert refused.body == {"detail": [{"type": "invalid_value", "loc": ["body", "stop", "0"], "msg": "no"}]}


@pytest.mark.parametrize(("kind", "dialect"), DIALECTS)
def test_validation_errors_name_their_place(speak: Callable[..., Any], kind: str, dialect: str) -> None:
    speaker = speak(kind, dialect)
    with pytest.raises(ValidationError) as caught:
        speaker.read({"messages": [{"role": "user", "content": [{"type": 3}], "contnet": "x"}], "max_tokens": 0})
    reply = speaker.protocol.invalid(caught.value.errors(include_url=False, include_context=False, include_input=False))
    if dialect == "astrai":
        assert reply.status == 422
        places = [tuple(item["loc"]) for item in reply.body["detail"]]
        assert ("body", "messages", 0, "content", 0, "type") in places
        assert ("body", "max_tokens") in places
    else:
        assert reply.status == 400
        message = reply.body["error"]["message"]
        assert "/messages/0/contnet: unknown field; did you mean 'content'?" in message
        assert "/messages/0/content/0/type: " in message
        assert "/max_tokens: " in message


@pytest.mark.parametrize(("kind", "dialect"), DIALECTS)
@pytest.mark.parametrize("outcome", [Failed(Busy("gone"), Usage()), Finished("cancelled", Usage(5, 1, 0))])
def test_reply_without_an_answer_is_an_error(speak: Callable[..., Any], kind: str, dialect: str, outcome: Any) -> None:
    speaker = speak(kind, dialect)
    assert speaker.whole(speaker.read(USER), [(0, outcome)]).status == 503


def test_model_lists_have_each_api_shape(speak: Callable[..., Any], served: Any) -> None:
    listed = speak("openai", "openai").protocol.models([served.model])
    assert listed == {
        "object": "list",
        "data": [{"id": "tiny", "object": "model", "created": 1717000000, "owned_by": "astrai-deploy"}],
    }
    (other,) = speak("anthropic", "anthropic").protocol.models([served.model])["data"]
    assert anthropic.types.ModelInfo.model_validate(other).created_at.year == 2024


def test_long_names_are_said_back_short(speak: Callable[..., Any]) -> None:
    speaker = speak("openai", "openai")
    name = "x" * 100_000
    for fields in ({name: 1}, {"model": name}, {"messages": [{"role": "user", "content": [{"type": name}]}]}):
        with pytest.raises(AstraiError) as caught:
            speaker.read(USER | fields)
        assert len(str(speaker.protocol.error(caught.value).body)) < 1000


def test_a_stop_string_of_the_model_card_is_an_ordinary_end_of_turn(
    speak: Callable[..., Any], scripts: dict[str, Any]
) -> None:
    speaker = speak("anthropic", "anthropic")
    body = speaker.whole(speaker.read(USER), scripts["stopped"]).body
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
