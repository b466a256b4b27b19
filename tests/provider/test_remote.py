"""The remote provider against a scripted service on loopback: health, keys, tokenization, streaming, embeddings, bounds."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from astrai_runtime import errors
from astrai_runtime.errors import AstraiError, Unsupported, UpstreamError, UpstreamTimeout
from astrai_runtime.event import Delta, Event, Finished, Usage
from astrai_runtime.protocols._errors import wire
from astrai_runtime.provider._upstream import RETRIED
from astrai_runtime.provider.base import TextProvider, operation
from astrai_runtime.provider.remote import RemoteConfig
from astrai_runtime.request import Limits, Prompt, SamplingParams, Turn
from tests.provider.upstream import (
    DECLARED,
    KEY,
    MODELS,
    Handler,
    Service,
    ended,
    frame,
    prompt,
    reply,
    said,
    service,
    stream,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = stream(said("Hel"), said("lo"), ended())


@pytest.fixture
def far() -> Iterator[Service]:
    with service() as made:
        yield made


def events(provider: TextProvider, asked: Prompt | None = None) -> list[Event]:
    """One whole answer."""

    async def run() -> list[Event]:
        return [event async for event in provider.complete(asked or prompt())]

    try:
        return asyncio.run(run())
    finally:
        provider.close()


def refused(provider: TextProvider, asked: Prompt | None = None) -> AstraiError:
    with pytest.raises(AstraiError) as caught:
        events(provider, asked)
    return caught.value


def text_of(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, Delta))


# -- health and authentication -------------------------------------------------------------------------------------------


def test_health_check_accepts_a_service_that_has_the_model(far: Service) -> None:
    far.says(reply(200, MODELS), path="/v1/models")
    provider = far.provider(check=True)
    provider.close()
    assert (provider.info.name, provider.info.context) == ("far", 64)
    assert [(asked.method, asked.path) for asked in far.asked] == [("GET", "/v1/models")]


def test_declared_context_is_lowered_to_the_services_own(far: Service) -> None:
    far.says(reply(200, MODELS), path="/v1/models")
    for declared, expected in ((32, 32), (100, 64)):
        provider = far.provider(check=True, context=declared)
        provider.close()
        assert provider.info.context == expected


def test_health_check_says_that_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UpstreamError, match=f"http://127.0.0.1:{port}/v1 cannot be reached"):
        Service(url=f"http://127.0.0.1:{port}").provider(check=True)


def test_wrong_key_is_an_error_before_anything_exists(far: Service) -> None:
    far.says(reply(401, {"error": {"message": "bad key"}}), path="/v1/models")
    with pytest.raises(UpstreamError, match=r"401: bad key; check provider.api_key"):
        far.provider(check=True)
    assert len(far.asked) == 1


def test_unknown_model_lists_those_that_are_there(far: Service) -> None:
    far.says(reply(200, MODELS), path="/v1/models")
    with pytest.raises(UpstreamError, match="has no model 'near'; it has: far, other"):
        far.provider(check=True, model="near")


@pytest.mark.parametrize("body", [{"models": []}, {"data": "x"}, [1]])
def test_another_api_is_recognised(far: Service, body: Any) -> None:
    far.says(reply(200, body), path="/v1/models")
    with pytest.raises(UpstreamError, match=r"OpenAI-compatible API|no JSON object"):
        far.provider(check=True)


def test_key_travels_in_the_header_and_appears_nowhere_else(far: Service) -> None:
    far.says(reply(403, {"error": {"message": "no"}}))
    error = refused(far.provider())
    assert far.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in error.message
    assert KEY not in repr(RemoteConfig.model_validate(DECLARED | {"url": far.url}))


def test_without_a_key_none_is_sent(far: Service) -> None:
    far.says(HELLO)
    events(far.provider(api_key=None))
    assert "authorization" not in {name.lower() for name in far.asked[0].headers}


@pytest.mark.parametrize(
    "url", ["ftp://a/v1", "http:///v1", "http://me:pw@a/v1", "http://a/v1?x=1", "http://a/v1#x", "a:80"]
)
def test_addresses_that_hide_something_are_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        RemoteConfig.model_validate(DECLARED | {"url": url})


def test_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ValidationError, match="printable ASCII"):
        RemoteConfig.model_validate(DECLARED | {"url": "http://a/v1", "api_key": "a\r\nx: y"})


# -- tokenization --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["prompt", "text", "content"])
def test_tokenization_is_used_where_it_is_offered(far: Service, field: str) -> None:
    def tokens(handler: Handler) -> None:
        body = far.asked[-1].body
        known = "messages" in body or field in body
        reply(200 if known else 400, {"tokens": [1, 2, 3]} if known else {"error": "unknown field"})(handler)

    far.says(tokens, path="/tokenize")
    provider = far.provider(tokenize="auto")
    tokenize = operation(provider, "tokenize")
    assert tokenize(prompt().turn) == (1, 2, 3)
    assert far.asked[-1].body == {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
    assert tokenize(Turn(SamplingParams(), Limits(), text="abc")) == (1, 2, 3)
    assert far.asked[-1].body == {"model": "far", field: "abc"}
    provider.close()
    assert "tokenize" in provider.capabilities


@pytest.mark.parametrize("status", [404, 405, 501, 400])
def test_without_tokenization_nothing_is_claimed(far: Service, status: int) -> None:
    far.says(reply(status, {"error": "no"}), path="/tokenize")
    provider = far.provider(tokenize="auto")
    provider.close()
    assert provider.tokenize is None
    with pytest.raises(Unsupported, match="cannot 'tokenize'; it can: embed, text"):
        operation(provider, "tokenize")


def test_tokenization_that_ignores_conversations_is_not_trusted(far: Service) -> None:
    far.says(reply(200, {"tokens": []}), path="/tokenize")
    provider = far.provider(tokenize="auto")
    provider.close()
    assert provider.tokenize is None


# -- requests ------------------------------------------------------------------------------------------------------------


def test_declared_fields_are_passed_on_and_no_others(far: Service) -> None:
    far.says(HELLO)
    asked = prompt(
        "hi",
        Limits(max_tokens=5, stop=("a", "b"), ignore_eos=True),
        temperature=0.5,
        top_k=3,
        seed=7,
        logit_bias=((9, 1.5),),
    )
    events(far.provider(sampling=["top_k", "min_p", "logit_bias", "mirostat"]), asked)
    assert far.asked[0].body == {
        "model": "far",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 3,
        "min_p": 0,
        "seed": 7,
        "logit_bias": {"9": 1.5},
        "max_tokens": 5,
        "stop": ["a", "b"],
        "ignore_eos": True,
    }


def test_other_name_of_the_token_limit_can_be_declared(far: Service) -> None:
    far.says(HELLO)
    events(far.provider(limit_field="max_completion_tokens"))
    assert far.asked[0].body["max_completion_tokens"] == 8
    assert "max_tokens" not in far.asked[0].body


@pytest.mark.parametrize("turn", [{"text": "Once"}, {"token_ids": (1, 2)}])
def test_raw_text_and_token_ids_go_to_the_completions_route(far: Service, turn: dict[str, Any]) -> None:
    chunk = {"choices": [{"index": 0, "text": "ab", "finish_reason": "length"}], "usage": {"prompt_tokens": 1}}
    far.says(stream(frame(chunk), frame("[DONE]")), path=TEXT)
    params, limits = SamplingParams(), Limits(max_tokens=2)
    found = events(far.provider(), Prompt((), params, limits, turn=Turn(params, limits, **turn)))
    assert found == [Delta("ab"), Finished("length", Usage(1, 0))]
    assert far.asked[0].body["prompt"] == (turn.get("text") or [1, 2])


# -- streaming -----------------------------------------------------------------------------------------------------------


def test_stream_becomes_deltas_usage_and_the_finish_reason(far: Service) -> None:
    far.says(stream(said("Hel"), b": ping\n\n", said("lo"), ended("length", (5, 2))))
    assert events(far.provider()) == [Delta("Hel"), Delta("lo"), Finished("length", Usage(5, 2))]


def test_events_are_found_wherever_the_bytes_are_cut(far: Service) -> None:
    whole = (said("héllo 🌉") + ended()).replace(b"\n", b"\r\n")
    far.says(stream(*(whole[i : i + 1] for i in range(len(whole)))))
    assert text_of(events(far.provider())) == "héllo 🌉"


def test_several_data_lines_are_one_event(far: Service) -> None:
    chunk = {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
    first, second = json.dumps(chunk, indent=1).split("\n", 1)
    lines = "\n".join(f"data: {line}" for line in (first, *second.split("\n")))
    far.says(stream(f"event: chunk\n{lines}\n\n".encode(), frame("[DONE]")))
    assert text_of(events(far.provider())) == "x"


def test_service_that_does_not_stream_answers_at_once(far: Service) -> None:
    body = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "all"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}},
    }
    far.says(reply(200, body))
    assert events(far.provider()) == [Delta("all"), Finished("stop", Usage(3, 1, 2))]


def test_log_probabilities_are_passed_on(far: Service) -> None:
    entry = {"token": "é", "bytes": [195, 169], "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.0}]}
    far.says(stream(said("é", logprobs={"content": [entry]}), ended()))
    asked = dataclasses.replace(prompt(), top_logprobs=1)
    first = events(far.provider(), asked)[0]
    assert isinstance(first, Delta)
    (found,) = first.logprobs
    assert (found.data, found.logprob, [(top.data, top.logprob) for top in found.top]) == (
        "é".encode(),
        -0.5,
        [(b"b", -1.0)],
    )
    assert (far.asked[0].body["logprobs"], far.asked[0].body["top_logprobs"]) == (True, 1)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((said("a"),), "without a finish reason"),
        ((said("a"), ended("content_filter")), "'content_filter'"),
        ((said("a"), frame({"error": {"message": "out of cards"}})), "gave up: out of cards"),
        ((frame("{not json"),), "no JSON object"),
        ((frame({"choices": [7]}),), "unknown shape"),
        ((said("\ud800"),), "unknown shape"),
        ((frame({"choices": [], "usage": {"prompt_tokens": "many"}}),), "unknown shape"),
        ((frame({"choices": [{"delta": {"content": "a" * 5000}}]}),), "larger than provider.max_frame_bytes=4096"),
        ((b"data: " + b"a" * 5000,), "larger than provider.max_frame_bytes=4096"),
        ((said("a" * 1000),) * 80, "larger than provider.max_response_bytes=65536"),
    ],
)
def test_damaged_or_oversize_answers_are_errors_and_never_cut(far: Service, pieces: tuple[bytes, ...], message: str) -> None:
    far.says(stream(*pieces))
    error = refused(far.provider())
    assert message in error.message
    assert wire(error).status == 502
    assert len(far.asked) == 1  # some of it may have been delivered: no second try


def test_oversize_whole_answer_is_an_error(far: Service) -> None:
    far.says(reply(200, {"choices": [{"message": {"content": "a" * 70_000}, "finish_reason": "stop"}]}))
    assert "max_response_bytes=65536" in refused(far.provider()).message


def test_compressed_answer_is_refused_unread(far: Service) -> None:
    def bomb(handler: Handler) -> None:
        handler.head(200, content_type="application/json", content_encoding="gzip")
        handler.wfile.write(gzip.compress(b" " * 1_000_000))

    far.says(bomb)
    assert "'gzip'" in refused(far.provider()).message
    assert far.asked[0].headers["accept-encoding"] == "identity"


# -- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", sorted(RETRIED))
def test_transient_status_is_tried_once_more(far: Service, status: int) -> None:
    far.says(reply(status, {"error": {"message": "later"}}), HELLO)
    assert text_of(events(far.provider())) == "Hello"
    assert len(far.asked) == 2


@pytest.mark.parametrize(
    ("status", "expected", "seen"),
    [
        (400, errors.InvalidRequest, 400),
        (401, UpstreamError, 502),
        (403, UpstreamError, 502),
        (404, UpstreamError, 502),
        (408, UpstreamTimeout, 504),
        (413, errors.CapacityExceeded, 413),
        (422, errors.InvalidRequest, 400),
        (429, errors.Busy, 503),
        (500, UpstreamError, 502),
        (502, UpstreamError, 502),
        (503, errors.Busy, 503),
        (504, UpstreamTimeout, 504),
    ],
)
def test_refusal_has_its_error(far: Service, status: int, expected: type[AstraiError], seen: int) -> None:
    far.says(reply(status, {"error": {"message": "because", "param": "top_p"}}, retry_after="0"))
    error = refused(far.provider())
    assert type(error) is expected
    assert wire(error).status == seen
    assert "because" in error.message
    assert len(far.asked) == (2 if status in RETRIED else 1)


def test_busy_service_says_when_to_come_back(far: Service) -> None:
    far.says(reply(503, {"error": "full"}, retry_after="0"), reply(503, {"error": "full"}, retry_after="9"))
    error = refused(far.provider())
    assert isinstance(error, errors.Busy)
    assert error.retry_after_s == 9


def test_overlong_prompt_is_recognised(far: Service) -> None:
    far.says(
        reply(400, {"error": {"message": "64 tokens at most", "code": "context_length_exceeded", "param": "/messages"}})
    )
    error = refused(far.provider())
    assert isinstance(error, errors.ContextLengthExceeded)
    assert (error.code, error.message, error.param) == ("context_length_exceeded", "64 tokens at most", "/messages")


def test_redirect_leads_nowhere(far: Service) -> None:
    far.says(reply(307, {}, location=f"{far.url}/v1/elsewhere"))
    assert "only the declared provider.url is contacted" in refused(far.provider()).message
    assert [asked.path for asked in far.asked] == [CHAT]


def test_proxies_of_the_environment_are_not_used(far: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    far.says(HELLO)
    assert text_of(events(far.provider())) == "Hello"


@pytest.mark.parametrize("pieces", [(), (said("a"),)])
def test_silence_is_given_up(far: Service, pieces: tuple[bytes, ...]) -> None:
    def wait(handler: Handler) -> None:
        handler.wfile.flush()
        far.free.wait(10)

    far.says(stream(*pieces, then=wait) if pieces else wait)
    error = refused(far.provider(read_s=0.2))
    far.free.set()
    assert isinstance(error, UpstreamTimeout)
    assert wire(error).status == 504


def test_error_pages_are_repeated_in_part_only(far: Service) -> None:
    def page(handler: Handler) -> None:
        handler.head(418)
        handler.wfile.write(b"<html>" + b"x" * 5000)

    far.says(page)
    assert len(refused(far.provider()).message) < 500


# -- embeddings ----------------------------------------------------------------------------------------------------------


def test_embeddings_come_back_in_the_order_of_their_texts(far: Service) -> None:
    data = [{"index": 1, "embedding": [0.5, 2]}, {"index": 0, "embedding": [1, 0]}]
    far.says(reply(200, {"data": data, "usage": {"prompt_tokens": 4}}), path="/v1/embeddings")
    provider = far.provider()
    found = operation(provider, "embed")(["a", "b"])
    provider.close()
    assert (found.rows, found.prompt_tokens) == (((1.0, 0.0), (0.5, 2.0)), 4)
    assert far.asked[0].body == {"model": "far", "input": ["a", "b"], "encoding_format": "float"}


def test_service_without_embeddings_is_unsupported(far: Service) -> None:
    provider = far.provider()
    with pytest.raises(Unsupported, match="no embeddings"):
        operation(provider, "embed")(["a"])
    far.says(reply(200, {"data": [{"index": 0}]}), path="/v1/embeddings")
    with pytest.raises(UpstreamError, match="unknown shape"):
        operation(provider, "embed")(["a"])
    provider.close()
