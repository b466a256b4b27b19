"""What one client can take: connections, time, bytes, depth, streams; and who may read an answer from a browser."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import PATHS

Serve = Callable[..., Any]
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
STREAM = USER | {"stream": True}


def until_cancelled(play: Any) -> None:
    play.say("first")
    if play.await_cancel():
        play.end("cancelled")


def endless(play: Any) -> None:
    """Says more as long as there is room, until it is cancelled."""
    while not play.stream.cancelled:
        if not play.stream.put(b"x" * 1024):
            play.changed.wait(10)
            play.changed.clear()
    play.end("cancelled")


@contextlib.contextmanager
def raw(live: Any, sent: bytes, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as client:
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(15)
        client.connect(("127.0.0.1", live.server.port))
        client.sendall(sent)
        yield client


def post(body: Any, path: str = PATHS["openai"]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def until(client: socket.socket, said: bytes) -> None:
    received = b""
    while said not in received:
        received += (piece := client.recv(4096))
        assert piece, received


def test_one_connection_too_many_is_told_to_come_back_and_the_others_go_on(serve: Serve) -> None:
    live = serve(max_connections=3)
    live.engine.script = until_cancelled
    with contextlib.ExitStack() as open_ones:
        for _ in range(3):
            until(open_ones.enter_context(raw(live, post(STREAM))), b"first")
        for _ in range(5):
            with raw(live, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as refused:
                said = rest(refused)
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in said
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "busy"
        assert not any(play.stream.cancelled for play in live.engine.plays)
    deadline = time.monotonic() + 10
    while live.http.get("/health").status_code != 200:  # the places come back
        assert time.monotonic() < deadline


def test_idle_connections_make_room_for_those_that_ask(serve: Serve) -> None:
    live = serve(max_connections=3)
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with contextlib.ExitStack() as open_ones:
        clients = []
        for _ in range(5):
            clients.append(open_ones.enter_context(raw(live, ask)))
            until(clients[-1], b'"model_loaded":true}')
        for client in clients[:2]:  # the oldest were closed
            assert rest(client) == b""
        for client in clients[2:]:
            client.sendall(ask)
            until(client, b'"model_loaded":true}')


def test_many_slow_heads_are_cut_off_and_stall_nobody(serve: Serve) -> None:
    live = serve(head_s=0.5, max_connections=20)
    with contextlib.ExitStack() as open_ones:
        slow = [open_ones.enter_context(raw(live, b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-a:")) for _ in range(40)]
        assert live.chat().status_code == 200
        for client in slow:
            assert rest(client) == b""


def test_a_body_that_trickles_is_cut_off_with_408(serve: Serve) -> None:
    live = serve(body_s=0.1)
    for path in PATHS.values():
        with raw(live, f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode()) as client:
            said = rest(client)
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"within 0.1 seconds" in said
    assert live.chat().status_code == 200


def test_an_endless_body_is_cut_off(serve: Serve) -> None:
    live = serve(max_body_bytes=1000, body_s=20)
    with raw(live, b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n") as client:
        sent = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < 1 << 28:
                client.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 65536
        assert sent < 1 << 26
    assert live.chat().status_code == 200


def test_an_announced_giant_is_refused_before_it_comes(serve: Serve) -> None:
    live = serve()
    with raw(live, b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{") as client:
        said = client.recv(1000)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in said


def test_a_caller_without_a_key_cannot_feed_a_body_for_ever(serve: Serve) -> None:
    live = serve(api_keys=["s3cret"], head_s=0.2)
    with raw(live, b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n") as client:
        assert client.recv(15).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(OSError):  # noqa: PT012
            for _ in range(1000):
                client.sendall(b"1\r\nx\r\n")
                time.sleep(0.01)


def test_depth_of_json_is_the_declared_one(serve: Serve) -> None:
    live = serve(max_json_depth=8)
    for depth, said in ((8, "/messages"), (9, "nested more than 8 levels")):
        nested = "[" * (depth - 1) + "]" * (depth - 1)
        reply = live.http.post(PATHS["openai"], content='{"deeply":' + nested + "}")
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]


def test_a_key_streams_as_many_answers_as_it_may(serve: Serve) -> None:
    live = serve(api_keys=["alice", "bob"], max_streams_per_key=2)
    live.engine.script = until_cancelled
    with contextlib.ExitStack() as streams:
        for _ in range(2):
            one = streams.enter_context(
                live.http.stream("POST", PATHS["openai"], json=STREAM, headers={"x-api-key": "alice"})
            )
            assert one.status_code == 200
        third = live.http.post(PATHS["openai"], json=STREAM, headers={"x-api-key": "alice"})
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(third.headers["retry-after"]) >= 1
        third = live.http.post(PATHS["anthropic"], json=STREAM, headers={"x-api-key": "alice"})
        assert (third.status_code, third.json()["error"]["type"]) == (429, "rate_limit_error")
        assert len(live.engine.plays) == 2
        live.engine.script = lambda play: play.end()
        whole = live.http.post(PATHS["openai"], json=USER, headers={"x-api-key": "alice"})
        assert whole.status_code == 200  # not a stream
        other = live.http.post(PATHS["openai"], json=STREAM, headers={"x-api-key": "bob"})
        assert other.status_code == 200
    assert live.state.wait_idle(10)
    again = live.http.post(PATHS["openai"], json=STREAM, headers={"x-api-key": "alice"})
    assert again.status_code == 200


def test_without_keys_an_address_is_the_caller(serve: Serve) -> None:
    live = serve(max_streams_per_key=1)
    live.engine.script = until_cancelled
    with live.http.stream("POST", PATHS["openai"], json=STREAM):
        assert live.chat(stream=True).status_code == 429


def test_a_refused_stream_gives_its_place_back(serve: Serve) -> None:
    live = serve(max_streams_per_key=1)
    for _ in range(3):
        assert live.chat("x" * 65, stream=True).status_code == 400
        assert live.chat(stream=True).status_code == 200


def test_r04_a_client_that_never_reads_is_cut_off_and_its_generation_cancelled(serve: Serve) -> None:
    live = serve(write_timeout_s=0.3)
    live.engine.script = endless
    with raw(live, post(STREAM), receive_buffer=4096) as client:
        client.recv(100)
        live.engine.threads[0].join(15)
        assert not live.engine.threads[0].is_alive()
        assert live.engine.plays[0].stream.cancelled
        assert live.state.wait_idle(10)
    live.engine.script = lambda play: play.end()
    assert live.chat().status_code == 200


def test_a_client_that_reads_slowly_but_steadily_gets_everything(serve: Serve) -> None:
    live = serve(write_timeout_s=0.5, stream_bytes=4096)
    total = 400_000

    def long(play: Any) -> None:
        left = total
        while left and not play.stream.cancelled:
            left -= (taken := play.stream.put(b"x" * min(left, 1024)))
            if not taken:
                play.changed.wait(10)
                play.changed.clear()
        play.end("length")

    live.engine.script = long
    with raw(live, post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"), receive_buffer=4096) as client:
        pieces, began = [], time.monotonic()
        while piece := client.recv(16384):
            pieces.append(piece)
            if time.monotonic() - began < 1.0:  # twice the time-out
                time.sleep(0.02)
    received = b"".join(pieces)
    assert received.endswith(b"data: [DONE]\n\n")
    assert received.count(b"x") >= total


def test_other_origins_are_not_told_anything_by_default(serve: Serve) -> None:
    live = serve()
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    preflight = live.http.options(PATHS["openai"], headers=asked)
    answered = live.http.get("/health", headers={"origin": "https://evil.example"})
    for reply in (preflight, answered):
        assert not [name for name in reply.headers if name.startswith("access-control-allow")]


def test_a_declared_origin_may_call_from_a_browser_and_no_other(serve: Serve) -> None:
    live = serve(cors_origins=["https://chat.example.org"], api_keys=["s3cret"])
    asked = {
        "origin": "https://chat.example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, anthropic-version",
    }
    preflight = live.http.options(PATHS["openai"], headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert "access-control-allow-credentials" not in preflight.headers
    for key, status in (("s3cret", 200), ("wrong", 401)):
        headers = {"origin": "https://chat.example.org", "authorization": f"Bearer {key}"}
        reply = live.http.post(PATHS["openai"], json=USER, headers=headers)
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
    other = {**asked, "origin": "https://evil.example"}
    assert live.http.options(PATHS["openai"], headers=other).status_code == 400
    reply = live.http.post(
        PATHS["openai"], json=USER, headers={"origin": "https://evil.example", "authorization": "Bearer s3cret"}
    )
    assert reply.headers.get("access-control-allow-origin") != "https://evil.example"


def test_a_strange_page_cannot_make_a_browser_post(serve: Serve) -> None:
    live = serve()
    own = live.server.url
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        (f"http://evil.example:{live.server.port}", 403),
        (own, 200),
        (None, 200),
    ):
        headers = {"content-type": "text/plain"} | ({"origin": origin} if origin else {})
        assert live.http.post(PATHS["openai"], json=USER, headers=headers).status_code == status, origin
    rebound = {"origin": "http://evil.example", "host": "evil.example"}
    assert live.http.post(PATHS["openai"], json=USER, headers=rebound).status_code == 403
    assert len(live.engine.plays) == 2
    for origins in (["https://chat.example.org"], ["*"]):
        declared = serve(cors_origins=origins)
        reply = declared.http.post(PATHS["openai"], json=USER, headers={"origin": "https://chat.example.org"})
        assert reply.status_code == 200


def test_every_answer_tells_browsers_to_do_nothing_with_it(serve: Serve) -> None:
    live = serve()
    replies = [live.chat(), live.chat(stream=True), live.http.get("/nowhere"), live.http.get("/health")]
    for reply in replies:
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")
        assert "server" not in reply.headers


def test_nonsense_on_the_wire_closes_its_connection_only(serve: Serve) -> None:
    live = serve()
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/two\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n",
        b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ):
        with raw(live, sent) as client, httpx.Client(base_url=live.server.url) as other:
            said = rest(client)
            assert b" 400 " in said or said == b"", sent
            assert other.get("/health").status_code == 200


def test_a_path_has_a_bound(serve: Serve) -> None:
    live = serve()
    reply = live.http.get("/v1/models/" + "x" * 3000)
    assert (reply.status_code, reply.json()["error"]["type"]) == (414, "invalid_request_error")
    assert live.http.get("/v1/models/" + "x" * 300).status_code == 404


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("apart", [True, False])
def test_r01_a_client_that_says_more_than_its_request_is_still_seen_to_leave(
    serve: Serve, stream: bool, version: bytes, apart: bool
) -> None:
    live = serve()
    live.engine.script = lambda play: play.end("cancelled") if play.await_cancel() else None
    request = post(USER | {"stream": stream}).replace(b"HTTP/1.1", b"HTTP/" + version)
    with raw(live, request if apart else request + b"\r\n") as client:
        while not live.engine.plays:
            time.sleep(0.005)
        if apart:
            client.sendall(b"\r\n")
            assert live.http.get("/health").status_code == 200
            assert not live.engine.plays[0].stream.cancelled
    live.engine.threads[0].join(10)
    assert live.engine.plays[0].stream.cancelled
    assert live.state.wait_idle(10)


def test_requests_sent_ahead_are_answered_in_order(serve: Serve) -> None:
    live = serve()
    first, second = post(USER), b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    last = second.replace(b"host: x", b"host: x\r\nconnection: close")
    waiting: list[Any] = []
    live.engine.script = waiting.append
    with raw(live, first + second) as client:
        while not waiting:
            time.sleep(0.005)
        client.sendall(second[:10])
        client.sendall(second[10:] + last)
        waiting[0].say("answer")
        waiting[0].end()
        said = rest(client)
    assert said.count(b"HTTP/1.1 200 ") == 4
    assert said.index(b"answer") < said.index(b"model_loaded")


def test_a_flood_sent_ahead_stays_bounded(serve: Serve) -> None:
    live = serve()
    waiting: list[Any] = []
    live.engine.script = waiting.append
    with raw(live, post(USER)) as client:
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):  # noqa: PT012  the server reads no more of it
            while True:
                client.sendall(b"x" * 65536)
        waiting[0].end()
    assert live.state.wait_idle(10)
