"""The mock recipe as clients meet it: scripts, turns, tool calls and declared failures over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live import serving
from tests.protocols.sse import events

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SCRIPT = (
    "provider.replies=[{when: null, say: One.}, {when: null, say: Two.}, {when: weather, say: It rains on the bridge.}]",
    "provider.faults=[{when: break, after: 2, how: error}]",
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving("provider=mock", *SCRIPT) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


def ask(*said: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return {"messages": messages, "max_tokens": 50, "temperature": 0} | fields


def test_conversation_goes_through_the_script(http: httpx.Client) -> None:
    for said, answer in (
        (("hi",), "One."),
        (("hi", "One.", "and?"), "Two."),
        (("hi", "One.", "the weather?"), "It rains on the bridge."),
    ):
        assert http.post(CHAT, json=ask(*said)).json()["choices"][0]["message"]["content"] == answer
        assert http.post(MESSAGES, json=ask(*said)).json()["content"][0]["text"] == answer


def test_usage_and_finish_reason_are_the_engines(http: httpx.Client) -> None:
    whole = http.post(CHAT, json=ask("hi")).json()
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", len("One.") + 1)
    cut = http.post(CHAT, json=ask("the weather?", max_tokens=8)).json()["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "It rains")
    stopped = http.post(MESSAGES, json=ask("the weather?", stop_sequences=[" on"])).json()
    assert (stopped["content"][0]["text"], stopped["stop_sequence"]) == ("It rains", " on")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_declared_fault_is_the_last_event_of_its_stream(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=ask("please break", stream=True))
    last = [item for item in events(answer.content) if item.data != "[DONE]"][-1]
    assert answer.status_code == 200
    assert "declared fault after 2 tokens" in last.json["error"]["message"]
    assert http.post(path, json=ask("please break")).status_code == 500
    assert http.post(path, json=ask("hi")).status_code == 200


def test_tool_call_is_text_that_holds_json() -> None:
    with serving("provider=mock", "provider.mode=tool_call") as url:
        said = httpx.post(f"{url}{CHAT}", json=ask("hi", max_tokens=200)).json()["choices"][0]["message"]["content"]
    call = said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(call) == {"name": "get_weather", "arguments": {"city": "Paris"}}
