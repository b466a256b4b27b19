"""Bytes that are no HTTP, or HTTP of the worst kind: answered or hung up on, never a server error, never a hang."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .conftest import TIMEOUT_S, few

BODY = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1}'
GOOD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
)
CHUNKED = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "a TLS hello": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\x55" * 160,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
    "no version": b"GET /health\r\n\r\n",
    "another version": b"GET /health HTTP/3.7\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "an absolute target": b"GET http://169.254.169.254/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target of stars": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an upgrade": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "a negative length": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "a length of words": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
    "two lengths": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length too large": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    "a length and chunks": CHUNKED[:-2] + b"Content-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a bad chunk": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a huge chunk": CHUNKED + b"ffffffffffffffff\r\n{}",
    "chunks that end early": CHUNKED + b"5\r\n{}",
    "trailers": CHUNKED + b"2\r\n{}\r\n0\r\nX: y\r\n\r\n",
    "a null in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n  b\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    "headers in Latin-1": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: \xe9\xff\r\nX-Request-Id: \xfc\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 300_000 + b"\r\n\r\n",
    "a long target": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target of bytes": b"GET /\xff\xfe%00%ff%c0%af/../.. HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path upwards": b"GET /v1/models/../../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "a pipeline": GOOD + BODY + GOOD + BODY + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "half a body": GOOD + BODY[:20],
    "a longer body": GOOD + BODY + b"tail that is no request\r\n\r\n",
    "an expectation": GOOD[:-2] + b"Expect: 100-continue\r\n\r\n" + BODY,
    "line feeds alone": b"GET /health HTTP/1.1\nHost: x\n\n",
    "nothing": b"",
    "empty lines": b"\r\n" * 1000,
}


def exchange(url: str, data: bytes) -> bytes:
    """Sends everything, says that no more comes, and reads until the other side hangs up."""
    host, port = url.removeprefix("http://").split(":")
    heard = bytearray()
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as wire:
        try:
            wire.sendall(data)
            wire.shutdown(socket.SHUT_WR)
            while piece := wire.recv(65536):
                heard += piece
        except TimeoutError as error:
            raise AssertionError(f"hangs on {data[:200]!r}") from error
        except OSError:
            pass  # it had heard enough and hung up
    return bytes(heard)


def check(answer: bytes, data: bytes) -> None:
    statuses = [line.split(b" ")[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(status < b"500" or status == b"503" for status in statuses), (statuses, data[:500])


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_is_answered_or_hung_up_on(url: str, name: str) -> None:
    check(exchange(url, BROKEN[name]), BROKEN[name])


@few
@given(
    st.binary(max_size=300)
    | st.builds(
        lambda at, data, drop: (GOOD + BODY)[:at] + data + (GOOD + BODY)[at + drop :],
        st.integers(0, len(GOOD + BODY)),
        st.binary(max_size=4) | st.sampled_from((b"\r\n", b"\n", b": ", b"\0", b" ", b"\r\n\r\n")),
        st.integers(0, 5),
    )
)
def test_any_bytes_are_answered_or_hung_up_on(url: str, data: bytes) -> None:
    check(exchange(url, data), data)
