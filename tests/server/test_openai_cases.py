"""Chat and text completions over real sockets: refusals, messages, choices, limits, stop strings, fields."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.protocols.sse import events
from tests.server.real import CHAT, MESSAGES, ROUTES, TEXT, TOKENIZER, USER, House, house, served_by, streamed, text_of

BOTH = (CHAT, TEXT)


@pytest.fixture(scope="module", params=["local", "mock", "remote"])
def shared(request: pytest.FixtureRequest) -> Iterator[House]:
    with served_by(request.param, context=64) as live:
        yield live


@pytest.fixture
def live(shared: House) -> Iterator[House]:
    """A model that never ends by itself; nothing may be left of a test's requests."""
    shared.says(None)
    yield shared
    assert shared.idle()


# -- refusals before anything is sent ----------------------------------------------------------------------------------

EMPTY: list[tuple[str, dict[str, Any]]] = [
    *((path, {"messages": value}) for path in (CHAT, MESSAGES) for value in ([], None, [None], [{}], "hi", {}, 3)),
    *(
        (TEXT, {"prompt": value})
        for value in ("", [], None, [None], [[]], [""], {}, 3, ["a", 3], [True], [-1], [258], [1.5])
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), EMPTY)
def test_h07_nothing_to_answer_is_a_400_in_the_routes_envelope(
    live: House, path: str, fields: dict[str, Any], stream: bool
) -> None:
    reply = live.http.post(path, json={"max_tokens": 4, "stream": stream} | fields, timeout=2)
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert ("request_id" in reply.json()) == (path == MESSAGES)


@pytest.mark.parametrize("path", ROUTES)
def test_h07_missing_list_is_a_400_and_the_next_request_is_answered(live: House, path: str) -> None:
    refused = live.http.post(path, json={"max_tokens": 4}, timeout=2)
    assert refused.status_code == 400
    assert ("prompt" if path == TEXT else "messages") in refused.json()["error"]["message"]
    assert live.ask(path).status_code == 200


def test_h07_the_seed_dialect_says_422() -> None:
    values: list[Any] = [[], None, [None], [{}], "hi"]
    with house("astrai") as live:
        for path, value, stream in itertools.product((CHAT, MESSAGES), values, (False, True)):
            reply = live.http.post(path, json={"messages": value, "stream": stream})
            assert (reply.status_code, list(reply.json())) == (422, ["detail"]), value
        assert live.http.post(TEXT, json={"prompt": "x"}).status_code == 404
        assert live.idle()


# -- messages ----------------------------------------------------------------------------------------------------------


def prompt_ids(live: House, messages: Any) -> list[int]:
    ids = live.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_h08_text_parts_render_like_the_string(live: House, role: str) -> None:
    for pieces in ((), ("one",), ("one ", "two")):
        parts = [{"type": "text", "text": piece} for piece in pieces]
        said = [[USER, {"role": role, "content": content}] for content in (parts, "".join(pieces))]
        assert prompt_ids(live, said[0]) == prompt_ids(live, said[1])
        first, second = (live.ask(CHAT, messages=messages).json() for messages in said)
        assert first["choices"] == second["choices"]
        assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    refused = live.ask(CHAT, messages=[{"role": role, "content": [{"type": "hologram"}]}])
    assert refused.status_code == 400
    assert "'hologram'" in refused.json()["error"]["message"]


def test_h09_replayed_tool_call_without_content_never_renders_as_none(live: House) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    rendered = set()
    for content in ({"content": None}, {}, {"content": ""}):
        messages = [USER, {"role": "assistant", "tool_calls": calls, **content}, result, USER]
        rendered.add(TOKENIZER.decode(prompt_ids(live, messages)))
        assert live.ask(CHAT, messages=messages).status_code == 200
    assert rendered == {"u:hi;a:[f];t:42;u:hi;a:"}


def test_h20_on_the_chat_route_a_last_assistant_message_is_a_finished_turn(live: House) -> None:
    messages = [USER, {"role": "assistant", "content": "Answer: ("}]
    assert TOKENIZER.decode(prompt_ids(live, messages)) == "u:hi;a:Answer: (;a:"
    first, second = (live.ask(CHAT, messages=messages).json()["choices"] for _ in range(2))
    assert first == second


def test_h22_developer_is_system_on_the_chat_route(live: House) -> None:
    said = [{"role": "developer", "content": "brief"}, {"role": "system", "content": "kind"}, USER]
    assert TOKENIZER.decode(prompt_ids(live, said)) == "s:brief;s:kind;u:hi;a:"


# -- choices, limits, stops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BOTH)
def test_h10_choices_are_told_apart_and_the_prompt_counts_once(live: House, path: str) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 8}
    whole = live.ask(path, **fields).json()
    texts = text_of(path, whole)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == text_of(path, live.ask(path, **fields).json())
    assert streamed(path, events(live.ask(path, **fields, stream=True).content)) == texts
    assert len(set(text_of(path, live.ask(path, n=3, temperature=0).json()))) == 1
    alone = live.ask(path, **fields | {"n": 1}).json()["usage"]
    assert whole["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 3 * alone["completion_tokens"] == 24
    for n in (0, 1000):
        assert live.ask(path, n=n).status_code == 400


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("limit", [1, 2])
def test_h12_tiny_limits_are_exact(live: House, path: str, limit: int) -> None:
    body = live.ask(path, max_tokens=limit).json()
    usage = body["usage"]
    assert usage["output_tokens" if path == MESSAGES else "completion_tokens"] == limit
    assert (body["stop_reason"] if path == MESSAGES else body["choices"][0]["finish_reason"]) in ("length", "max_tokens")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("limit", [0, -1, 1.5, "5", True, 10**30])
def test_h12_no_limit_at_all_is_a_400(live: House, path: str, limit: Any) -> None:
    assert live.ask(path, max_tokens=limit).status_code == 400
    assert live.ask(TEXT, max_tokens=limit, echo=True).status_code == 400


def test_h12_null_is_the_default_where_there_is_one(live: House) -> None:
    assert live.ask(TEXT, max_tokens=None).json()["usage"]["completion_tokens"] == 16
    assert live.ask(CHAT, max_tokens=None).json()["usage"]["completion_tokens"] == 32
    assert live.ask(MESSAGES, max_tokens=None).status_code == 400


def overhead(path: str) -> int:
    return 0 if path == TEXT else len("u:;a:")


def of_length(path: str, length: int) -> dict[str, Any]:
    """A body whose prompt has that many tokens."""
    text = "x" * (length - overhead(path))
    return {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "limit", "answered"),
    [(63, 1, 1), (63, 2, None), (64, 1, None), (65, 1, None), (10_000, 1, None), (60, 4, 4), (60, 5, None), (60, None, 4)],
)
def test_h13_prompt_and_answer_share_the_context(
    live: House, path: str, stream: bool, length: int, limit: int | None, answered: int | None
) -> None:
    if path == MESSAGES and limit is None:
        return  # the public API asks for a limit
    reply = live.ask(path, **of_length(path, length), max_tokens=limit, stream=stream)
    if answered is None:
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["code"] == "context_length_exceeded"
        assert "64" in error["message"]
        assert str(length + (limit or 1)) in error["message"]
    elif stream:
        assert len(streamed(path, events(reply.content))[0]) == answered
    else:
        assert reply.json()["usage"]["output_tokens" if path == MESSAGES else "completion_tokens"] == answered


STOP = "</e🌉d>"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("others", [(), ("<<", "nowhere", "zz"), ("</e🌉d>beta",), ("</e",)])
def test_h15_no_byte_of_a_stop_string_is_ever_sent(live: House, path: str, others: tuple[str, ...]) -> None:
    live.says(f"alpha{STOP}beta and on and on")
    stops = [*others[:1], STOP, *others[1:]]
    first = min(stops, key=lambda stop: (f"alpha{STOP}beta".encode() + b"~" * 99).find(stop.encode()) % 999)
    name = "stop_sequences" if path == MESSAGES else "stop"
    whole = live.ask(path, max_tokens=40, **{name: stops}).json()
    assert text_of(path, whole) == ["alpha"]
    sent = live.ask(path, max_tokens=40, stream=True, **{name: stops})
    assert streamed(path, events(sent.content)) == ["alpha"]
    if path == MESSAGES and live.behind is not None:
        assert whole["stop_reason"] == "end_turn"  # the API in between does not say that a stop string ended it
    elif path == MESSAGES:
        assert whole["stop_reason"] == "stop_sequence"
        assert whole["stop_sequence"] in stops
    else:
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert len("alpha") < whole["usage"]["completion_tokens"] <= len(f"alpha{first}".encode())


@pytest.mark.parametrize("at", range(1, len(STOP.encode())))
def test_h15_a_stop_that_is_cut_short_is_text_after_all(live: House, at: int) -> None:
    begun = STOP.encode()[:at]
    live.says(b"alpha" + begun)
    whole, sent = (live.ask(TEXT, max_tokens=40, stop=STOP, stream=stream) for stream in (False, True))
    assert text_of(TEXT, whole.json()) == streamed(TEXT, events(sent.content))
    assert text_of(TEXT, whole.json()) == [(b"alpha" + begun).decode(errors="replace")]


@pytest.mark.parametrize("path", ROUTES)
def test_h21_stop_strings_that_say_nothing_are_ignored_or_refused(live: House, path: str) -> None:
    name = "stop_sequences" if path == MESSAGES else "stop"
    without = text_of(path, live.ask(path).json())
    for ignored in (None, [], [f"never {index}" for index in range(5)]):
        assert text_of(path, live.ask(path, **{name: ignored}).json()) == without
    for refused in ("", [""], ["", "X"], 3, [3], ["x"] * 17):
        reply = live.ask(path, **{name: refused})
        assert reply.status_code == 400, refused
        assert name in str(reply.json()["error"])


# -- fields ------------------------------------------------------------------------------------------------------------

POLICY: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"max_completion_tokens": 2, "max_tokens": None}, 200, ""),
    (CHAT, {"max_completion_tokens": 2, "max_tokens": 3}, 400, "max_completion_tokens"),
    *((path, {"temprature": 1}, 400, "temperature") for path in ROUTES),
    (CHAT, {"audio": {"voice": "x", "format": "wav"}}, 400, "audio"),
    *((path, {"best_of": 3}, 400, "best_of") for path in BOTH),
    *((path, {"suffix": "end"}, 400, "suffix") for path in BOTH),
    *((CHAT, {name: value}, 200, "") for name, value in {"service_tier": "auto", "store": True, "user": "u"}.items()),
    (CHAT, {"metadata": {"a": "b"}}, 200, ""),
    *((TEXT, {name: value}, 200, "") for name, value in {"user": "u", "suffix": None, "best_of": 1, "echo": False}.items()),
    (TEXT, {"echo": True, "logprobs": 1}, 400, "echo"),
    (MESSAGES, {"metadata": {"user_id": "u"}}, 200, ""),
    *((CHAT, {name: value}, 400, name) for name, value in {"tool_choice": "required", "functions": [{"name": "f"}]}.items()),
    *((path, {"tools": [{"name": "f"}]}, 400, "tools") for path in ROUTES),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format"),
]


@pytest.mark.parametrize(("path", "fields", "status", "named"), POLICY)
def test_h19_fields_are_honoured_harmless_or_refused_by_name(
    live: House, path: str, fields: dict[str, Any], status: int, named: str
) -> None:
    reply = live.ask(path, **fields)
    assert reply.status_code == status, reply.text
    if status == 200 and "max_completion_tokens" in fields:
        assert reply.json()["usage"]["completion_tokens"] == 2
    if status == 400:
        assert named in reply.json()["error"]["message"]


def test_h18_no_vectors_are_made_so_the_route_does_not_exist(live: House) -> None:
    """The case is about base64 vectors of an embeddings route; it applies the day there is one."""
    reply = live.http.post("/v1/embeddings", json={"input": "x", "model": "reader"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
