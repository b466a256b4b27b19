"""Generating routes over real sockets: whole answers, streams, choices, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from astrai_runtime.errors import Busy, InvalidRequest, ProviderError
from astrai_runtime.event import Failed, Usage
from astrai_runtime.protocols.anthropic import AnthropicProtocol
from astrai_runtime.server._workers import BACKLOG, Workers
from tests.protocols.sse import events

Serve = Callable[..., Any]


def test_whole_answer_and_stream_say_the_same(serve: Serve) -> None:
    live = serve()
    whole = live.chat().json()
    assert whole["choices"][0]["message"]["content"] == "Hello you"
    assert whole["usage"]["prompt_tokens"] == 2
    streamed = live.chat(stream=True)
    chunks = [item.json for item in events(streamed.content)[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello you"
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.headers["x-accel-buffering"] == "no"
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert live.message().json()["content"] == [{"type": "text", "text": "Hello you"}]
    assert events(live.message(stream=True).content)[-1].event == "message_stop"


def test_every_reply_carries_its_own_request_id(serve: Serve) -> None:
    live = serve()
    replies = [live.chat(), live.chat(stream=True), live.chat(n=0), live.http.get("/nowhere"), live.http.get("/health")]
    assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_run_under_successive_seeds_and_count_the_prompt_once(serve: Serve, stream: bool) -> None:
    live = serve()
    reply = live.chat(n=3, seed=7, stream=stream, stream_options={"include_usage": True})
    texts = {0: "", 1: "", 2: ""}
    if stream:
        chunks = [item.json for item in events(reply.content)[:-1]]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        usage = chunks[-1]["usage"]
    else:
        texts = {choice["index"]: choice["message"]["content"] for choice in reply.json()["choices"]}
        usage = reply.json()["usage"]
    assert texts == {0: "Hello 7", 1: "Hello 8", 2: "Hello 9"}
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 6, 8)


def test_choices_are_all_accepted_or_none(serve: Serve) -> None:
    live = serve()
    live.engine.script = lambda play: play.end("cancelled") if play.await_cancel() else None
    live.engine.refusal, live.engine.refuse_after = Busy("full", retry_after_s=3), 2
    reply = live.chat(n=3)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "3")
    assert [play.stream.cancelled for play in live.engine.plays] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_cancels_its_generation(serve: Serve, stream: bool) -> None:
    live = serve()

    def endless(play: Any) -> None:
        play.say("first")
        play.end("cancelled") if play.await_cancel() else None

    live.engine.script = endless
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": 2}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", live.server.port)) as client:
        client.sendall(head + body)
        if stream:
            received = b""
            while b"first" not in received:
                received += client.recv(4096)
        else:
            while len(live.engine.plays) < 2:
                assert live.http.get("/health").status_code == 200
    for thread in live.engine.threads:
        thread.join(10)
    assert [play.stream.cancelled for play in live.engine.plays] == [True, True]
    assert live.state.wait_idle(10)
    assert all(play.stream.drained for play in live.engine.plays)
    live.engine.script = lambda play: play.end()
    assert live.chat().status_code == 200


def test_client_that_leaves_a_silent_stream_cancels_it(serve: Serve) -> None:
    live = serve()
    live.engine.script = lambda play: play.end("cancelled") if play.await_cancel() else None
    with live.http.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    ):
        pass
    live.engine.threads[0].join(10)
    assert live.engine.plays[0].stream.cancelled
    assert live.state.wait_idle(10)


def test_silent_stream_is_kept_alive_by_comments(serve: Serve) -> None:
    live = serve(ping_s=0.01)
    release = []

    def slow(play: Any) -> None:
        release.append(play)

    live.engine.script = slow
    seen = b""
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with live.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        for piece in reply.iter_bytes():
            seen += piece
            if seen.count(b": ping\n\n") == 2 and not release[0].stream.outcome:
                release[0].say("late")
                release[0].end()
    assert "".join(item.json["choices"][0]["delta"].get("content", "") for item in events(seen)[:-1]) == "late"


def test_silent_message_is_kept_alive_by_the_apis_own_event(serve: Serve) -> None:
    live = serve(ping_s=0.01)
    plays: list[Any] = []
    live.engine.script = plays.append
    seen = b""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
    with live.http.stream("POST", "/v1/messages", json=body) as reply:
        for piece in reply.iter_bytes():
            seen += piece
            if seen.count(b"event: ping\n") >= 3 and not plays[0].stream.outcome:
                plays[0].say("late")
                plays[0].end()
    found = events(seen)
    assert found[0].event == "message_start"
    assert [item.event for item in found[-4:]] == [
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(item.json["type"] == item.event for item in found)


def test_failure_of_one_request_is_told_before_and_during_a_stream(serve: Serve) -> None:
    live = serve()

    def fail(play: Any) -> None:
        play.say("Hel")
        play.stream.finish(Failed(ProviderError("the logits are not finite"), Usage(2, 1, 0)))

    live.engine.script = fail
    whole = live.chat(n=2)
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "provider_error")
    streamed = live.chat(stream=True)
    assert streamed.status_code == 200
    assert events(streamed.content)[-2].json["error"]["message"] == "the logits are not finite"
    assert events(live.message(stream=True).content)[-1].json["error"]["type"] == "api_error"
    assert live.state.wait_idle(10)


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_before_any_event(serve: Serve, stream: bool) -> None:
    live = serve()
    long = live.chat("x" * 65, stream=stream)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    live.engine.refusal = InvalidRequest("no such token", param="/logit_bias")
    refused = live.message(stream=stream)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "/logit_bias")
    assert refused.headers["content-type"] == "application/json"
    live.engine.refusal = Busy("full")
    busy = live.message(stream=stream)
    assert (busy.status_code, busy.json()["error"]["type"], busy.headers["retry-after"]) == (503, "overloaded_error", "1")


def test_unexpected_exception_is_a_500_that_tells_no_secrets(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    live = serve()
    reply = live.chat("explode")
    assert reply.status_code == 500
    assert "secret" not in reply.text
    name = reply.headers["x-request-id"]
    assert name in reply.json()["error"]["message"]
    logged = capfd.readouterr()
    assert name in logged.err + logged.out
    assert "a secret of the house" in logged.err + logged.out
    assert live.message("explode").json()["type"] == "error"


def test_generation_that_the_service_ends_is_an_error(serve: Serve) -> None:
    live = serve()
    live.engine.script = lambda play: play.end("cancelled")
    assert live.chat().status_code == 503
    assert "error" in events(live.chat(stream=True).content)[-2].json


def test_slow_reader_gets_the_whole_text(serve: Serve) -> None:
    live = serve()
    text = "0123456789" * 2000

    def long(play: Any) -> None:
        data = text.encode()
        while data:
            data = data[play.stream.put(data) :]
            if data:
                play.changed.wait(10)
                play.changed.clear()
        play.end()

    live.engine.script = long
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with live.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        sent = b"".join(reply.iter_raw(chunk_size=64))
    assert "".join(item.json["choices"][0]["delta"].get("content", "") for item in events(sent)[:-1]) == text


def test_protocol_that_breaks_mid_stream_cuts_the_connection(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(self: Any, exchange: Any, pairs: Any) -> AsyncIterator[bytes]:
        async for _ in pairs:
            yield b"data: {}\n\n"
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(AnthropicProtocol, "_frames", broken)
    live = serve()

    def endless(play: Any) -> None:
        play.say("first")
        play.end("cancelled") if play.await_cancel() else None

    live.engine.script = endless
    with pytest.raises(httpx.RemoteProtocolError):
        live.message(stream=True)
    live.engine.threads[0].join(10)
    assert live.engine.plays[0].stream.cancelled
    logged = capfd.readouterr()
    assert "stream_failed" in logged.err + logged.out
    live.engine.script = lambda play: play.end()
    assert live.chat().status_code == 200


def test_preparation_is_bounded() -> None:
    async def run() -> None:
        workers = Workers(1)
        release = threading.Event()
        jobs = [asyncio.create_task(workers.run(release.wait)) for _ in range(1 + BACKLOG)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="being prepared"):
            await workers.run(release.wait)
        release.set()
        assert all(await asyncio.gather(*jobs))
        assert await workers.run(lambda: 42) == 42
        workers.close()

    asyncio.run(run())
