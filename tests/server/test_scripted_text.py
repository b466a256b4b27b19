"""Scripted text through the public API: stop strings and characters cut anywhere, limits inside one, and faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chain import BROKEN, Script, bitwise, call, cuts, serving

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages"}
MARKED = "alpha</end>beto"
MARK = "</end>"
CUT_CHARACTER = "n\u00e9\u2192\u20acz"  # 2-, 3- and 3-byte characters; the stop string is two of them
EMOJI = "\U0001f9ed"
WIDE = "\u00e9 \u6f22 \U0001f600"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \U0001f1eb\U0001f1ee!"
STRAY = Script((b"\x80",), again=True)
ENDLESS = Script((b"PQ", b"RS", b"TU"), again=True)

SCRIPTS: list[Script] = [*cuts(MARKED), *cuts(CUT_CHARACTER), STRAY, ENDLESS]
CUT_AT = {script.pieces: number for number, script in enumerate(SCRIPTS)}


@dataclass(frozen=True)
class Heard:
    """One answer, whole or put together from a stream."""

    text: str
    reason: str
    tokens: int
    matched: str | None = None
    deltas: tuple[str, ...] = ()

    @property
    def plain(self) -> tuple[str, str, int, str | None]:
        return self.text, self.reason, self.tokens, self.matched


class Asker:
    """Asks one service, on any route, whole or as a stream."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=30)

    def body(self, route: str, message: str, max_tokens: int, stop: list[str]) -> dict[str, Any]:
        name = "stop_sequences" if route == "messages" else "stop"
        said = {"prompt": message} if route == "completions" else {"messages": [{"role": "user", "content": message}]}
        return said | {"max_tokens": max_tokens, "temperature": 0} | ({name: stop} if stop else {})

    def whole(self, route: str, message: str, max_tokens: int = 64, stop: list[str] | None = None) -> Heard:
        reply = self.http.post(PATHS[route], json=self.body(route, message, max_tokens, stop or []))
        assert reply.status_code == 200, reply.text
        said = reply.json()
        if route != "messages":
            choice = said["choices"][0]
            text = choice["text"] if route == "completions" else choice["message"]["content"]
            return Heard(text, choice["finish_reason"], said["usage"]["completion_tokens"])
        text = "".join(block["text"] for block in said["content"])
        return Heard(text, said["stop_reason"], said["usage"]["output_tokens"], said["stop_sequence"])

    def stream(self, route: str, message: str, max_tokens: int = 64, stop: list[str] | None = None) -> Heard:
        more: dict[str, Any] = {"stream": True}
        if route != "messages":
            more["stream_options"] = {"include_usage": True}
        body = self.body(route, message, max_tokens, stop or []) | more
        raw = self.http.post(PATHS[route], json=body).content
        lines = [line.decode("utf-8") for line in raw.split(b"\n")]  # every line is UTF-8 on its own
        frames = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
        assert not [frame for frame in frames if "error" in frame], frames
        if route != "messages":
            choices = [choice for frame in frames for choice in frame["choices"]]
            deltas = tuple(c["text"] if route == "completions" else c["delta"].get("content") or "" for c in choices)
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
            return Heard("".join(deltas), *reasons, frames[-1]["usage"]["completion_tokens"], deltas=deltas)
        deltas = tuple(frame["delta"]["text"] for frame in frames if frame["type"] == "content_block_delta")
        end = next(frame for frame in frames if frame["type"] == "message_delta")
        return Heard(
            "".join(deltas),
            end["delta"]["stop_reason"],
            end["usage"]["output_tokens"],
            end["delta"]["stop_sequence"],
            deltas,
        )

    def both(self, route: str, message: str, max_tokens: int = 64, stop: list[str] | None = None) -> Heard:
        """The stream, which must say what the whole answer says."""
        streamed = self.stream(route, message, max_tokens, stop)
        assert streamed.plain == self.whole(route, message, max_tokens, stop).plain
        return streamed


@pytest.fixture(scope="module")
def ask(chain_checkpoint: Callable[..., Path]) -> Iterator[Asker]:
    with serving(chain_checkpoint(*SCRIPTS)) as url:
        asker = Asker(url)
        yield asker
        asker.http.close()


@pytest.fixture(scope="module", params=[WIDE, FAMILY, EMOJI], ids=["wide", "family", "emoji"])
def in_bytes(request: pytest.FixtureRequest, chain_checkpoint: Callable[..., Path]) -> Iterator[tuple[str, Script, Asker]]:
    """One text in the smallest tokens there can be, with a service that writes it."""
    script = bitwise(request.param)
    with serving(chain_checkpoint(script)) as url:
        asker = Asker(url)
        yield request.param, script, asker
        asker.http.close()


STOPS = {
    "one": [MARK],
    "four": ["nothing", MARK, "beto", "</endless"],
    "prefix": ["</e", MARK],
    "longer": [MARK, "</end>be"],
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_h15_no_byte_of_a_stop_string_is_shown_wherever_tokens_cut_it(ask: Asker, stop: list[str]) -> None:
    ends_at = MARKED.index("<") + len("</e" if "</e" in stop else MARK)
    for number, script in enumerate(SCRIPTS[: len(MARKED) - 1]):
        heard = ask.both("chat", call(number), stop=stop)
        needed = 1 if len(script.pieces[0]) >= ends_at else 2  # tokens until the string is complete: no more are computed
        assert heard.plain == ("alpha", "stop", needed, None), script


def test_h15_a_stop_string_is_found_when_a_token_cuts_a_character_of_it(ask: Asker) -> None:
    first = CUT_AT[SCRIPTS[len(MARKED) - 1].pieces]
    for number in range(first, first + len(CUT_CHARACTER.encode()) - 1):
        for stop in ("\u2192\u20ac", "z"):
            heard = ask.both("messages", call(number), stop=["unseen", stop])
            assert heard.text == CUT_CHARACTER.split(stop)[0]
            assert (heard.reason, heard.matched) == ("stop_sequence", stop)


def test_h15_text_that_only_begins_like_a_stop_string_is_shown_in_full(ask: Asker) -> None:
    for number in range(len(MARKED) - 1):
        assert ask.both("chat", call(number), stop=["</ending>", "betongue"]).text == MARKED


@pytest.mark.parametrize("route", PATHS)
def test_t01_characters_made_of_many_tokens_arrive_whole(in_bytes: tuple[str, Script, Asker], route: str) -> None:
    text, script, ask = in_bytes
    heard = ask.both(route, call(0), max_tokens=100)
    assert heard.text == text
    assert not [delta for delta in heard.deltas if "\ufffd" in delta]
    assert heard.reason in ("stop", "end_turn")
    assert heard.tokens in (len(script.pieces), len(script.pieces) + 1)  # an end token counts or not


def test_t03_a_limit_inside_a_character_is_flushed_once(in_bytes: tuple[str, Script, Asker]) -> None:
    _, script, ask = in_bytes
    for limit in range(1, len(script.pieces) + 1):
        heard = ask.both("chat", call(0), max_tokens=limit)
        given = b"".join(script.pieces[:limit])
        assert heard.text == given.decode("utf-8", "replace")
        assert heard.tokens == limit
        assert heard.text.count("\ufffd") <= 3


@pytest.mark.parametrize("route", PATHS)
def test_t03_stray_continuation_bytes_are_one_mark_each(ask: Asker, route: str) -> None:
    heard = ask.both(route, call(SCRIPTS.index(STRAY)), max_tokens=200)
    assert heard.text == "\ufffd" * 200
    assert (heard.reason, heard.tokens) == ("max_tokens" if route == "messages" else "length", 200)


def test_a_fault_ends_its_own_request_and_no_other(ask: Asker) -> None:
    """A row of NaN, reached by public input: the model fails on that request, whole or in its stream, and on that alone."""
    endless = call(SCRIPTS.index(ENDLESS))
    alone = ask.whole("chat", endless, max_tokens=200)
    body = ask.body("chat", BROKEN, 8, [])
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(ask.both, "chat", endless, 200) for _ in range(2)]
        failed = [pool.submit(ask.http.post, PATHS["chat"], json=body | {"stream": stream}) for stream in (False, True) * 3]
        whole, streamed = [[f.result() for f in failed[at::2]] for at in (0, 1)]
        assert {heard.result().plain for heard in neighbours} == {alone.plain}
    for reply in whole:
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
    for reply in streamed:
        assert reply.status_code == 200
        frames = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        assert [json.loads(frame)["error"]["type"] for frame in frames if '"error"' in frame] == ["server_error"]
        assert frames[-1] == "[DONE]"
    assert ask.http.get("/ready").status_code == 200
    assert ask.whole("chat", endless, max_tokens=200) == alone
