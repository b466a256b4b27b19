"""POST /tokenize and /detokenize over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from astrai_runtime.protocols import _tokens
from tests.server.real import TOKENIZER, USER, House, house


@pytest.fixture(scope="module")
def live() -> Iterator[House]:
    with house() as shared:
        yield shared


def test_text_becomes_tokens_and_comes_back(live: House) -> None:
    for text in ("", "hello", "a🌉b\n"):
        told = live.http.post("/tokenize", json={"text": text}).json()
        assert told == {"tokens": TOKENIZER.encode(text), "count": len(TOKENIZER.encode(text))}
        assert live.http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"text": text}


def test_messages_are_rendered_like_a_chat_request(live: House) -> None:
    told = live.http.post("/tokenize", json={"messages": [USER], "pieces": True, "model": "reader"}).json()
    assert "".join(told["pieces"]) == "u:hi;a:"
    usage = live.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == told["count"] == len(told["tokens"]) == len(told["pieces"])


def test_more_than_the_context_is_counted(live: House) -> None:
    assert live.http.post("/tokenize", json={"text": "x" * 1000}).json()["count"] == 1000


def test_tokens_that_are_no_text_are_marked_or_silent(live: House) -> None:
    assert live.http.post("/detokenize", json={"tokens": [65, 0xF0, 66, 256, 257]}).json() == {"text": "A\ufffdB"}
    assert live.http.post("/detokenize", json={"tokens": []}).json() == {"text": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/tokenize", body) for body in ({}, {"text": None}, {"text": 3}, {"text": "x", "messages": [USER]}, [], "x")),
        *(("/tokenize", {"messages": value}) for value in ([], [None], [{"role": "robot", "content": "x"}])),
        ("/tokenize", {"txt": "x"}),
        *(("/detokenize", {"tokens": value}) for value in (None, "x", [-1], [258], [10**30], [1.5], [True])),
        ("/detokenize", {}),
    ],
)
def test_what_cannot_be_read_is_a_400(live: House, path: str, body: Any) -> None:
    reply = live.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_another_model_is_not_found(live: House) -> None:
    for path, body in (("/tokenize", {"text": "x"}), ("/detokenize", {"tokens": []})):
        assert live.http.post(path, json=body | {"model": "other"}).json()["error"]["code"] == "model_not_found"


def test_sizes_are_bounded(live: House) -> None:
    ids = [1] * (_tokens.MAX_IDS + 1)
    with house(max_body_bytes=2_000_000) as other:
        assert other.http.post("/detokenize", json={"tokens": ids}).status_code == 400
        assert other.http.post("/tokenize", json={"text": "x" * (_tokens.MAX_CHARS + 1)}).status_code == 400
    assert live.http.post("/tokenize", json={"text": "x" * 200_000}).status_code == 413
