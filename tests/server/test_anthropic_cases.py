"""Messages and token counts over real sockets: event order, blocks, prefill, caching, and errors in their envelope."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import anthropic.types
import pytest

from tests.protocols.sse import events
from tests.server.real import MESSAGES, TOKENIZER, USER, House, house, served_by, text_of

COUNT = f"{MESSAGES}/count_tokens"
CACHED = {"cache_control": {"type": "ephemeral"}}
ORDER = {
    "message_start": {"content_block_start"},
    "content_block_start": {"ping", "content_block_delta", "content_block_stop"},
    "ping": {"ping", "content_block_delta", "content_block_stop"},
    "content_block_delta": {"ping", "content_block_delta", "content_block_stop"},
    "content_block_stop": {"message_delta"},
    "message_delta": {"message_stop"},
    "message_stop": {"end"},
}


@pytest.fixture(scope="module", params=["local", "mock", "remote"])
def shared(request: pytest.FixtureRequest) -> Iterator[House]:
    with served_by(request.param, context=256) as live:
        yield live


@pytest.fixture
def live(shared: House) -> Iterator[House]:
    shared.says(None)
    yield shared
    assert shared.idle()


def test_h03_events_come_in_the_apis_order_and_nothing_else(live: House) -> None:
    live.says("a word or two")
    reply = live.ask(MESSAGES, stream=True, max_tokens=30)
    assert b"[DONE]" not in reply.content
    found = events(reply.content)
    names = [item.event for item in found]
    assert names[0] == "message_start"
    for before, after in zip(names, [*names[1:], "end"], strict=True):
        assert after in ORDER[before], names
    assert all(item.event == item.json["type"] for item in found)
    started = found[0].json["message"]
    assert (started["type"], started["role"], started["content"]) == ("message", "assistant", [])
    assert (started["stop_reason"], started["model"]) == (None, "reader")
    assert {"input_tokens", "output_tokens"} <= set(started["usage"])
    with anthropic.Anthropic(base_url=str(live.http.base_url), api_key="x", max_retries=0) as client:
        asked: Any = {"model": "reader", "messages": [USER], "max_tokens": 30}
        with client.messages.stream(**asked) as stream:
            joined = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert final.content[0].type == "text"
    assert joined == final.content[0].text == "a word or two"


BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": "Be brief, be kind, and never say more than was asked."},
    "system blocks": {"system": [{"type": "text", "text": "Be brief, "}, {"type": "text", "text": "be kind."}]},
    "marked blocks": {"system": [{"type": "text", "text": "Be brief, be kind, and never say more."} | CACHED]},
    "nothing but null": {"thinking": None, "metadata": None, "system": None, "tools": None, "tool_choice": None},
    "no tools": {"tools": [], "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "top_k": 4},
    "prefill": {"messages": [USER, {"role": "assistant", "content": "Answer: ("}]},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | CACHED]}]},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_h06_count_equals_the_input_of_the_real_call(live: House, body: dict[str, Any]) -> None:
    asked = {"messages": [USER], "model": "reader"} | body
    if live.behind is not None and asked["messages"][-1]["role"] == "assistant":
        assert live.http.post(COUNT, json=asked).status_code == 400  # a prefill would be counted as a finished turn
        return
    for _ in range(2):  # the second time, pages come from the cache
        counted = live.http.post(COUNT, json=asked)
        usage = live.http.post(MESSAGES, json=asked | {"max_tokens": 3}).json()["usage"]
        assert counted.status_code == 200
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        if "cache_control" not in str(body):
            assert counted.json() == {"input_tokens": usage["input_tokens"]}
    assert live.http.post(COUNT, json=asked | {"max_tokens": 3, "stream": True}).json() == counted.json()


def test_h06_both_routes_refuse_the_same_bodies(live: House) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    for fields in ({"tools": tools}, {"messages": []}, {"temprature": 1}, {"model": "claude"}, {"system": 3}):
        replies = [live.http.post(path, json={"messages": [USER], "max_tokens": 3} | fields) for path in (MESSAGES, COUNT)]
        first, second = (reply.json() for reply in replies)
        assert replies[0].status_code == replies[1].status_code >= 400
        assert first["error"] == second["error"]
    assert live.http.post(COUNT, json={"messages": [{"role": "user", "content": "x" * 999}]}).json()["input_tokens"] > 999


def test_h06_counting_needs_no_slot() -> None:
    entered, release = threading.Event(), threading.Event()
    with house(rows=1) as live:

        def hold(batch: Any) -> None:
            entered.set()
            assert release.wait(20)

        live.provider.before = hold
        busy = threading.Thread(target=live.ask, args=(MESSAGES,))
        busy.start()
        assert entered.wait(10)
        before = len(live.provider.batches)
        assert live.http.post(COUNT, json={"messages": [USER]}, timeout=5).json() == {"input_tokens": len("u:hi;a:")}
        assert live.http.post("/tokenize", json={"text": "abc"}, timeout=5).json()["count"] == 3
        assert len(live.provider.batches) == before
        release.set()
        busy.join()


def test_usage_tells_what_came_from_the_cache_when_the_request_asked_for_caching(live: House) -> None:
    long = "the same beginning of a conversation, every time"
    asked = {"messages": [{"role": "user", "content": long}], "max_tokens": 2}
    first, again = (live.http.post(MESSAGES, json=asked | CACHED).json()["usage"] for _ in range(2))
    whole = first["input_tokens"]
    assert (first["cache_read_input_tokens"], first["cache_creation_input_tokens"]) == (0, 0)
    assert again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == whole
    unasked = live.http.post(MESSAGES, json=asked).json()["usage"]
    assert (unasked["input_tokens"], unasked["cache_read_input_tokens"]) == (whole, 0)
    with anthropic.Anthropic(base_url=str(live.http.base_url), api_key="x", max_retries=0) as client:
        sent: Any = {"model": "reader", "extra_body": CACHED} | asked
        with client.messages.stream(**sent) as stream:
            usage = stream.get_final_message().usage
    assert usage.cache_read_input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == whole


@pytest.mark.parametrize("ending", ["Answer: (", "Answer: "])
def test_h20_prefill_is_continued_and_not_repeated(live: House, ending: str) -> None:
    seen: list[str] = []
    live.provider.before = lambda batch: seen.append(TOKENIZER.decode(batch.chunks[0].sequence.tokens))
    live.says("B) yes")
    if live.behind is not None:
        refused = live.ask(MESSAGES, messages=[USER, {"role": "assistant", "content": ending}])
        assert (refused.status_code, "cannot be continued" in refused.text) == (400, True)
        return
    body = live.ask(MESSAGES, messages=[USER, {"role": "assistant", "content": ending}], max_tokens=20).json()
    live.provider.before = lambda batch: None
    assert text_of(MESSAGES, body) == ["B) yes"]
    assert seen[0] == f"u:hi;a:{ending}"


def test_h22_system_blocks_reach_the_prompt_and_a_system_turn_is_refused(live: House) -> None:
    seen: list[str] = []
    live.provider.before = lambda batch: seen.append(TOKENIZER.decode(batch.chunks[0].sequence.tokens))
    blocks = [{"type": "text", "text": "Be "} | CACHED, {"type": "text", "text": "brief."} | CACHED]
    for system in ("Be brief.", blocks):
        live.ask(MESSAGES, system=system, max_tokens=1)
    live.provider.before = lambda batch: None
    assert set(seen) == {"s:Be brief.;u:hi;a:"}  # in as many steps as the cache leaves over
    for path in (MESSAGES, COUNT):
        refused = live.http.post(path, json={"max_tokens": 3, "messages": [USER, {"role": "system", "content": "x"}]})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert refused.json()["request_id"] == refused.headers["request-id"]


def test_neighbours_of_one_role_are_one_turn(live: House) -> None:
    said = [USER, {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "re"}]}]
    one = [{"role": "user", "content": "hi\nthere"}]
    counts = [live.http.post(COUNT, json={"messages": messages}).json() for messages in (said, one)]
    assert counts[0] == counts[1] == {"input_tokens": len("u:hi\nthere;a:")}


def test_stop_sequence_is_reported(live: House) -> None:
    if live.behind is not None:
        return  # the API in between does not say which stop string it was
    live.says("one two three")
    body = live.ask(MESSAGES, stop_sequences=["three", "two"], max_tokens=20).json()
    assert (body["stop_reason"], body["stop_sequence"], text_of(MESSAGES, body)) == ("stop_sequence", "two", ["one "])
    live.says("one")
    assert live.ask(MESSAGES).json()["stop_reason"] == "end_turn"


def test_errors_carry_the_requests_id(live: House) -> None:
    version = {"anthropic-version": "2023-06-01"}
    for reply in (
        live.http.post(MESSAGES, content=b"{"),
        live.ask(MESSAGES, model="claude"),
        live.http.get("/nowhere", headers=version),
        live.http.get("/v1/models/none", headers=version),
        live.http.post("/tokenize", json={}, headers=version),
        live.http.put(MESSAGES),
    ):
        body = reply.json()
        assert body["type"] == "error", body
        assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
        anthropic.types.ErrorResponse.model_validate(body)


def test_seed_dialect_has_no_count_and_its_own_usage() -> None:
    with house("astrai") as live:
        assert live.http.post(COUNT, json={"messages": [USER]}).status_code == 404
        assert set(live.ask(MESSAGES).json()["usage"]) == {"input_tokens", "output_tokens"}
