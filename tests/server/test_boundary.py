"""What a request must get past: keys, size, JSON, validation, readiness, known routes and methods."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import PATHS

Serve = Callable[..., Any]
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
BAD_MESSAGES: list[Any] = [[], None, [None], [{}], "hi"]


def test_every_route_but_health_asks_for_a_key(serve: Serve) -> None:
    live = serve(api_keys=["s3cret", "other-ключ"])
    routes = [(method, route.path) for route in live.server._uvicorn.config.app.routes for method in sorted(route.methods)]
    assert ("POST", PATHS["openai"]) in routes
    for method, path in routes:
        reply = live.http.request(method, path.replace("{model:path}", "tiny"))
        assert reply.status_code == (200 if (method, path) == ("GET", "/health") else 401), (method, path)
    openai_said = live.http.post(PATHS["openai"], json=USER)
    assert openai_said.json()["error"]["code"] == "invalid_api_key"
    anthropic_said = live.http.post(PATHS["anthropic"], json=USER)
    assert anthropic_said.json()["error"]["type"] == "authentication_error"
    models = live.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert models.json()["error"]["type"] == "authentication_error"


def test_key_comes_in_either_header(serve: Serve) -> None:
    live = serve(api_keys=["s3cret", "ключ"])
    for name, value, status in (
        ("authorization", "Bearer s3cret", 200),
        ("authorization", "bearer  s3cret", 200),
        ("x-api-key", "s3cret", 200),
        ("x-api-key", "ключ", 200),
        ("authorization", "Bearer s3cre", 401),
        ("authorization", "Bearer", 401),
        ("authorization", "Basic s3cret", 401),
        ("x-api-key", "s3cret2", 401),
    ):
        reply = live.http.post(PATHS["openai"], json=USER, headers={name: value.encode()})
        assert reply.status_code == status, (name, value)


def test_body_over_the_limit_is_413(serve: Serve) -> None:
    live = serve(max_body_bytes=1000)
    fits = b'{"messages":[{"role":"user","content":"hi"}]}'
    assert live.http.post(PATHS["openai"], content=fits.ljust(1000)).status_code == 200
    for body in (fits.ljust(1001), b"x" * 3_000_000):
        reply = live.http.post(PATHS["openai"], content=body)
        assert reply.status_code == 413
        assert "1000 bytes" in reply.json()["error"]["message"]
        chunked = live.http.post(PATHS["anthropic"], content=iter([body]))
        assert (chunked.status_code, chunked.json()["error"]["type"]) == (413, "request_too_large")


MALFORMED = [
    (b"", "no JSON"),
    (b"{", "no JSON"),
    (b'{"messages":[]}x', "no JSON"),
    (b'{"temperature":NaN}', "NaN"),
    (b'{"temperature":-Infinity}', "Infinity"),
    (b'{"temperature":1e400}', "too large"),
    (b'{"seed":' + b"9" * 5000 + b"}", "no JSON"),
    (b"\xff\xfe", "no UTF-8"),
    (b'{"user":"\\ud800"}', "surrogate"),
    (b"[" * 100 + b"]" * 100, "nested"),
    (b"[" * 90_000, "nested"),
]


def test_malformed_json_is_told_in_the_envelope(serve: Serve) -> None:
    live = serve()
    for body, said in MALFORMED:
        reply = live.http.post(PATHS["openai"], content=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
        assert said in reply.json()["error"]["message"]
        assert live.http.post(PATHS["anthropic"], content=body).json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_bad_messages_are_400_and_leave_nothing_behind(serve: Serve, stream: bool) -> None:
    live = serve()
    for path in PATHS.values():
        for messages in BAD_MESSAGES:
            reply = live.http.post(path, json={"messages": messages, "max_tokens": 8, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
        missing = live.http.post(path, json={"max_tokens": 8, "stream": stream})
        assert missing.json()["error"]["param"] == "/messages"
        assert live.http.post(path, json=["not an object"]).status_code == 400
    assert live.engine.plays == []
    assert live.chat().status_code == 200


def test_seed_dialect_answers_422_with_details(serve: Serve) -> None:
    live = serve({"openai": "astrai", "anthropic": "astrai"})
    for path in PATHS.values():
        for messages in BAD_MESSAGES:
            reply = live.http.post(path, json={"messages": messages})
            assert reply.status_code == 422
            assert reply.json()["detail"][0]["loc"][:2] == ["body", "messages"]
    assert live.chat(model="anything").json()["model"] == "anything"
    assert live.chat().json()["model"] == "astrai"
    assert live.chat(stream=True).content.endswith(b'"total_tokens":4}\n\ndata: [DONE]\n\n')
    assert live.message(stream=True).content.endswith(
        b'event: message_stop\ndata: {"type":"message_stop"}\n\ndata: [DONE]\n\n'
    )


def test_service_that_is_not_ready_says_why(serve: Serve) -> None:
    live = serve(ready=False)
    assert live.http.get("/health").json() == {"status": "ok", "model_loaded": False}
    loading = live.chat()
    assert (loading.status_code, loading.json()["error"]["code"]) == (503, "not_ready")
    assert int(loading.headers["retry-after"]) >= 1
    assert live.http.get("/ready").status_code == 503
    live.state.fail("weights are damaged: model.safetensors")
    assert "weights are damaged" in live.message().json()["error"]["message"]
    assert live.http.get("/ready").json() == {"status": "failed", "reason": "weights are damaged: model.safetensors"}
    assert live.http.get("/v1/models").status_code == 503
    assert live.http.get("/stats").json() == {"total_tasks": 0, "total_tokens": 0, "active_tasks": 0, "waiting_queue": 0}


def test_seed_dialect_says_the_seed_words_while_loading(serve: Serve) -> None:
    live = serve({"openai": "astrai"}, ready=False)
    assert (live.chat().status_code, live.chat().json()) == (503, {"detail": "Engine not initialized"})


def test_draining_service_refuses_new_requests_and_finishes_old_ones(serve: Serve) -> None:
    live = serve()
    plays: list[Any] = []
    live.engine.script = plays.append
    body = USER | {"stream": True}
    with live.http.stream("POST", PATHS["openai"], json=body) as reply:
        live.state.drain()
        assert live.chat().status_code == 503
        assert live.http.get("/ready").json()["status"] == "draining"
        assert not live.state.wait_idle(0)
        plays[0].say("to the end")
        plays[0].end()
        assert b"to the end" in reply.read()
    assert live.state.wait_idle(10)


def test_engine_that_stopped_is_not_ready(serve: Serve) -> None:
    live = serve()
    live.engine.ready = False
    assert live.chat().status_code == 503
    assert live.http.get("/ready").json()["reason"] == "the engine has stopped"


def test_unknown_routes_and_methods_have_an_envelope(serve: Serve) -> None:
    live = serve()
    missing = live.http.post("/v1/completion", json={})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = live.http.get(PATHS["openai"])
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    assert "POST" in wrong.headers["allow"]
    assert live.http.get(PATHS["anthropic"]).json()["type"] == "error"


def test_another_model_is_404_with_the_served_names(serve: Serve) -> None:
    live = serve()
    reply = live.chat(model="gpt-4o")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "tiny" in reply.json()["error"]["message"]
    assert live.message(model="claude").json()["error"]["type"] == "not_found_error"


def test_request_head_has_a_bound(serve: Serve) -> None:
    live = serve()
    with socket.create_connection(("127.0.0.1", live.server.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000)
        assert b"400" in client.recv(100)
    assert live.http.get("/health").status_code == 200
