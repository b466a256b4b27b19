"""What chat and text completions answer over real sockets: streams, log-probabilities, and prompts of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai.types.chat
import pytest

from tests.protocols.sse import events
from tests.server.real import CHAT, TEXT, TOKENIZER, House, house, relayed, streamed, text_of

BOTH = (CHAT, TEXT)


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
            openai.types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)
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
