"""Routes about the service itself."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from litestar import Litestar

from astrai_runtime.server.serve import CannotListen, Server
from tests.server.conftest import server_config

Serve = Callable[..., Any]


def test_health_ready_and_stats(serve: Serve) -> None:
    live = serve()
    assert live.http.get("/health").json() == {"status": "ok", "model_loaded": True}
    assert live.http.get("/ready").json() == {"status": "ready"}
    assert live.http.get("/stats").json() == {"total_tasks": 0, "total_tokens": 7, "active_tasks": 1, "waiting_queue": 2}


def test_models_take_the_shape_of_the_client(serve: Serve) -> None:
    live = serve({"anthropic": "anthropic", "openai": "openai"})
    assert live.http.get("/v1/models").json()["object"] == "list"
    assert live.http.get("/v1/models/tiny").json()["object"] == "model"
    version = {"anthropic-version": "2023-06-01"}
    assert live.http.get("/v1/models", headers=version).json()["data"][0]["type"] == "model"
    assert live.http.get("/v1/models/tiny", headers=version).json()["display_name"] == "tiny"
    missing = live.http.get("/v1/models/a/b")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert live.http.get("/v1/models/x", headers=version).json()["error"]["type"] == "not_found_error"


def test_document_holds_the_schemas_of_the_protocol_routes(serve: Serve) -> None:
    live = serve()
    document = live.http.get("/openapi.json").json()
    assert document == live.http.get("/schema").json()
    for path, name in (("/v1/chat/completions", "ChatRequest"), ("/v1/messages", "MessagesRequest")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert "messages" in document["components"]["schemas"][name]["required"]
    served = {route.path.replace("{model:path}", "{model}") for route in live.server._uvicorn.config.app.routes}
    assert served == set(document["paths"])


def test_taken_port_is_an_error_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotListen, match=r"choose another server\.port"):
        Server(Litestar(logging_config=None, openapi_config=None), server_config(port=taken.getsockname()[1]))


def test_free_port_is_chosen_and_told(serve: Serve) -> None:
    live = serve()
    assert live.server.url == f"http://127.0.0.1:{live.server.port}"
    assert live.server.port > 0


def test_connection_that_never_finishes_its_head_is_closed(serve: Serve) -> None:
    live = serve(head_s=0.05)
    for sent in (b"", b"GET /health HTTP/1.1\r\nhost:", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET"):
        with socket.create_connection(("127.0.0.1", live.server.port), timeout=10) as client:
            client.sendall(sent)
            received = b"".join(iter(lambda: client.recv(4096), b""))
            assert (b"model_loaded" in received) == sent.endswith(b"\r\n\r\nGET")


def test_stop_lets_a_running_stream_end(serve: Serve) -> None:
    live = serve()
    plays: list[Any] = []
    live.engine.script = plays.append
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with live.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        live.server.stop()
        plays[0].say("to the end")
        plays[0].end()
        assert b"to the end" in reply.read()
    assert live.server.join(10)
    with pytest.raises(httpx.ConnectError):
        live.http.get("/health")
