"""Requests with one right answer: greedy or seeded, on every text route, and how their answers are read."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from _wire import Wire

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
Said = tuple[tuple[str, ...], tuple[str | None, ...], int]  # texts, finish reasons, completion tokens
WORDS = ("the", "lantern", "on", "bridge", "is", "lit", "in", "evening", "and", "keeper", "walks", "along", "river", "until")


class InBand(Exception):
    """A stream carried an error event."""


@dataclass(frozen=True, eq=False)  # each is itself: bodies cannot be hashed
class Question:
    path: str
    body: Mapping[str, Any]

    def encoded(self, stream: bool) -> bytes:
        more: dict[str, Any] = {"stream": True} if stream else {}
        if stream and self.path == CHAT:
            more["stream_options"] = {"include_usage": True}
        return json.dumps({**self.body, **more}).encode()


def questions(seed: int, count: int) -> list[Question]:
    """`count` questions; many begin alike, so that prefixes are shared; some are long enough to be read in pieces."""
    draw = random.Random(seed)
    shared = " ".join(draw.choices(WORDS, k=20))
    made = []
    for number in range(count):
        text = " ".join([shared] * (number % 3 != 0) + draw.choices(WORDS, k=draw.randint(1, 25)))
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": draw.choice((1, 8, 30, 90))}
        path = MESSAGES if number % 4 == 3 else CHAT
        body |= {"temperature": 0} if number % 2 else {"temperature": 1.0, "top_p": 0.9}
        if path == CHAT:
            body |= {"seed": number}
            body |= {"n": 2} if number % 8 == 4 else {}
            body |= {"stop": ["e", "\n\n"]} if number % 8 == 2 else {}
            body |= {"frequency_penalty": 0.7} if number % 8 == 6 else {}
        else:
            body |= {"temperature": 0}  # this route has no seed
        made.append(Question(path, body))
    return made


def read_whole(path: str, answer: Mapping[str, Any]) -> Said:
    if path == MESSAGES:
        text = "".join(block["text"] for block in answer["content"])
        return (text,), (answer["stop_reason"],), answer["usage"]["output_tokens"]
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return (
        tuple(choice["message"]["content"] or "" for choice in choices),
        tuple(choice["finish_reason"] for choice in choices),
        answer["usage"]["completion_tokens"],
    )


async def read_stream(path: str, wire: Wire, size: int = 65536) -> Said:
    """The same from a stream, which must be complete.

    Raises:
        InBand: it carried an error. ConnectionError: it ended early.
    """
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    tokens, done = 0, False
    async for frame in wire.frames(size):
        if frame == "[DONE]" or frame.get("type") == "message_stop":
            done = True
        elif "error" in frame:
            raise InBand(json.dumps(frame["error"]))
        elif path == MESSAGES:
            if frame["type"] == "content_block_delta":
                texts[0] = texts.get(0, "") + frame["delta"]["text"]
            if frame["type"] == "message_delta":
                reasons[0] = frame["delta"]["stop_reason"]
                tokens = frame["usage"]["output_tokens"]
        else:
            for choice in frame["choices"]:
                at = choice["index"]
                texts[at] = texts.get(at, "") + (choice["delta"].get("content") or "")
                reasons[at] = choice["finish_reason"] or reasons.get(at)
            tokens = (frame.get("usage") or {}).get("completion_tokens", tokens)
    if not done:
        raise ConnectionError("the stream ended without its last event")
    order = sorted(reasons)
    return tuple(texts.get(at, "") for at in order), tuple(reasons[at] for at in order), tokens
