"""Chat and text completions over real sockets: streams, choices, limits, stop strings, log-probabilities, fields."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import openai.types
import openai.types.chat
import pytest

from tests.protocols.sse import events
from tests.server.real import CHAT, MESSAGES, ROUTES, TEXT, TOKENIZER, USER, House, house, relayed, streamed, text_of

BOTH = (CHAT, TEXT)
NO_END = {"ignore_eos": True}
CHUNKS: dict[str, Any] = {CHAT: openai.types.chat.ChatCompletionChunk, TEXT: openai.types.Completion}


@pytest.fixture(scope="module", params=["local", "remote"])
def shared(request: pytest.FixtureRequest) -> Iterator[House]:
    with relayed(context=64) if request.param == "remote" else house(context=64) as live:
        yield live


@pytest.fixture
def live(shared: House) -> Iterator[House]:
    """A model that never ends by itself; nothing may be left of a test's requests."""
    shared.says(None)
    yield shared
    assert shared.idle()


def chunks_of(reply: Any) -> list[dict[str, Any]]:
    """A stream's chunks, without the last word."""
    *items, done = events(reply.content)
    assert done.data == "[DONE]"
    return [item.json for item in items]


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}])
def test_h01_nobody_asked_for_usage_so_there_is_none(live: House, path: str, options: dict[str, Any]) -> None:
    for chunk in chunks_of(live.ask(path, stream=True, **options)):
        assert chunk["choices"]
        assert chunk.get("usage") is None


@pytest.mark.parametrize("path", BOTH)
def test_h01_usage_chunk_comes_last_and_equals_the_whole_answers(live: House, path: str) -> None:
    *before, finish, usage = chunks_of(live.ask(path, stream=True, stream_options={"include_usage": True}, max_tokens=3))
    assert finish["choices"][0]["finish_reason"] == "length"
    assert [chunk["usage"] for chunk in (*before, finish)] == [None] * (len(before) + 1)
    assert usage["choices"] == []
    assert {name: usage[name] for name in ("id", "object", "created", "model")} == {
        name: finish[name] for name in ("id", "object", "created", "model")
    }
    whole = live.ask(path, max_tokens=3).json()["usage"]
    for told in (usage["usage"], whole):
        told.pop("prompt_tokens_details")  # the second call finds what the first one left
    assert usage["usage"] == whole
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert whole["completion_tokens"] == 3


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("usage", [False, True])
def test_h02_every_frame_is_a_full_chunk_of_the_sdk(live: House, path: str, usage: bool) -> None:
    chunks = chunks_of(live.ask(path, stream=True, n=2, stream_options={"include_usage": usage}))
    for chunk in chunks:
        assert {"id", "object", "created", "model", "choices"} <= set(chunk)
        if path == CHAT:
            CHUNKS[path].model_validate(chunk, strict=True)
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["created"] > 0
    assert chunks[0]["object"] == {CHAT: "chat.completion.chunk", TEXT: "text_completion"}[path]
    assert [at for at, chunk in enumerate(chunks) if chunk["choices"] == []] == ([len(chunks) - 1] if usage else [])


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("script", "fields", "reason"),
    [("well", {}, "stop"), (None, {"max_tokens": 3}, "length"), ("over and out", {"stop": "and", "max_tokens": 30}, "stop")],
)
def test_h14_each_choice_finishes_once_on_its_last_chunk(
    live: House, path: str, script: str | None, fields: dict[str, Any], reason: str
) -> None:
    live.says(script)
    whole = live.ask(path, n=2, **fields).json()
    last: dict[int, str | None] = {}
    for chunk in chunks_of(live.ask(path, n=2, stream=True, **fields)):
        for choice in chunk["choices"]:
            assert "finish_reason" in choice
            assert last.get(choice["index"]) is None, "a chunk came after the finish"
            last[choice["index"]] = choice["finish_reason"]
    assert last == {0: reason, 1: reason}
    assert [choice["finish_reason"] for choice in whole["choices"]] == [reason] * 2


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


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_h11_chat_has_an_entry_for_each_token(live: House, top: int) -> None:
    live.says("a🌉b")
    choice = live.ask(CHAT, max_tokens=7, logprobs=True, top_logprobs=top).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6  # the end has no text, and no entry
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"] == "a🌉b"
    for entry in content:
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(values) == top
        assert values == sorted(values, reverse=True)
        assert not values or values[0] == entry["logprob"]
    said = [
        entry
        for chunk in chunks_of(live.ask(CHAT, max_tokens=7, logprobs=True, top_logprobs=top, stream=True))
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert said == content


def test_h11_what_is_no_number_of_logprobs_is_a_400(live: House) -> None:
    for fields in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"logprobs": 3}):
        assert live.ask(CHAT, **fields).status_code == 400
    for value in (6, -1, True, "2"):
        assert live.ask(TEXT, logprobs=value).status_code == 400
    assert live.ask(TEXT, logprobs=None).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("top", [0, 1, 5])
def test_h11_completions_have_their_own_shape(live: House, top: int) -> None:
    live.says("a🌉b")
    choice = live.ask(TEXT, max_tokens=6, logprobs=top).json()["choices"][0]
    told = choice["logprobs"]
    assert {len(values) for values in told.values()} == {6}
    assert told["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "🌉".encode()), "b"]
    assert told["text_offset"] == [0, 1, 1, 1, 1, 2]
    for token, value, best in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert best[token] == value
        assert len(best) == max(top, 1)
    pieces = [
        chunk["choices"][0]["logprobs"]
        for chunk in chunks_of(live.ask(TEXT, max_tokens=6, logprobs=top, stream=True))
        if chunk["choices"][0]["logprobs"]
    ]
    assert {name: [one for piece in pieces for one in piece[name]] for name in told} == told


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


# -- prompts of text completions ---------------------------------------------------------------------------------------


def test_prompts_come_as_text_as_ids_and_as_lists_of_both(live: House) -> None:
    texts = ["Once upon", "The end"]
    ids = [TOKENIZER.encode(text) for text in texts]
    alone = [text_of(TEXT, live.ask(TEXT, prompt=text).json())[0] for text in texts]
    assert text_of(TEXT, live.ask(TEXT, prompt=ids[0]).json()) == alone[:1]
    for prompts in (texts, ids):
        body = live.ask(TEXT, prompt=prompts).json()
        assert text_of(TEXT, body) == alone
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert streamed(TEXT, events(live.ask(TEXT, prompt=prompts, stream=True).content)) == alone


def test_several_prompts_times_choices_are_numbered_prompt_by_prompt(live: House) -> None:
    fields = {"n": 2, "seed": 5, "temperature": 1}
    body = live.ask(TEXT, prompt=["Once", "Twice"], echo=True, **fields).json()
    assert [text[: text.index("e") + 1] for text in text_of(TEXT, body)] == ["Once", "Once", "Twice", "Twice"]
    alone = text_of(TEXT, live.ask(TEXT, prompt="Twice", echo=True, **fields).json())
    assert text_of(TEXT, body)[2:] == alone
    assert body["usage"]["prompt_tokens"] == len("OnceTwice")
    too_many = live.ask(TEXT, prompt=["x"] * 5, n=2)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "/prompt")
    assert "5 prompts x 2" in too_many.json()["error"]["message"]


def test_echo_says_the_prompt_first_and_streams_it_as_a_chunk_of_its_own(live: House) -> None:
    for prompt in ("Once 🌉", TOKENIZER.encode("Once 🌉")):
        if live.behind is not None and not isinstance(prompt, str):
            refused = live.ask(TEXT, prompt=prompt, echo=True)
            assert (refused.status_code, "does not spell tokens" in refused.text) == (400, True)
            continue
        plain = text_of(TEXT, live.ask(TEXT, prompt=prompt).json())[0]
        assert text_of(TEXT, live.ask(TEXT, prompt=prompt, echo=True).json()) == [f"Once 🌉{plain}"]
        chunks = chunks_of(live.ask(TEXT, prompt=prompt, echo=True, stream=True))
        assert chunks[0]["choices"][0]["text"] == "Once 🌉"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"Once 🌉{plain}"


def test_what_came_from_the_cache_is_told(live: House) -> None:
    fields: dict[str, Any] = {"prompt": "a beginning that many share", "max_tokens": 1}
    live.ask(TEXT, **fields)
    again = live.ask(TEXT, **fields).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]
    for cached in (0, again["prompt_tokens_details"]["cached_tokens"]):
        salted = live.ask(TEXT, **fields, cache_salt="mine").json()["usage"]
        assert salted["prompt_tokens_details"]["cached_tokens"] == cached
