"""What a request leaves behind: one log line without secrets, counts and times for Prometheus, one span."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from astrai_runtime import log
from astrai_runtime.errors import BackendRefused, Busy, ProviderError
from astrai_runtime.event import Failed, Usage
from astrai_runtime.server import app as application
from astrai_runtime.server._tracing import open_tracing, tracing_through
from tests.server.conftest import PATHS

Serve = Callable[..., Any]
SECRETS = ("s3cret-key", "wr0ng-key", "tell me of the heron", "a secret of the house", "Hello you")


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What the log says, as objects."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, out = list(root.handlers), io.StringIO()
    log.configure("DEBUG", "json", out)

    def read() -> list[dict[str, Any]]:
        assert log.flush()
        return [json.loads(line) for line in out.getvalue().splitlines()]

    yield read
    structlog.configure(**before)
    root.handlers = handlers


def answered(lines: Callable[[], list[dict[str, Any]]], name: str) -> dict[str, Any]:
    """The one line about a request. It is written after the last byte of the answer."""
    while not (found := [line for line in lines() if line["event"] == "request_answered" and line["request_id"] == name]):
        pass
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_leaves_one_line_with_its_timings(serve: Serve, lines: Any, stream: bool) -> None:
    live = serve(api_keys=["s3cret-key"])
    live.http.headers["authorization"] = "Bearer s3cret-key"
    reply = live.chat("hi", stream=stream, n=2)
    line = answered(lines, reply.headers["x-request-id"])
    assert (line["method"], line["route"], line["status"]) == ("POST", PATHS["openai"], 200)
    assert (line["stream"], line["finish_reason"]) == (stream, "stop")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 4)
    assert 0 <= line["ttft_ms"] <= line["total_ms"]
    assert len(line["key"]) == 8


def test_neither_keys_nor_texts_nor_paths_reach_the_log(serve: Serve, lines: Any) -> None:
    live = serve(api_keys=["s3cret-key"])
    live.http.headers["authorization"] = "Bearer s3cret-key"
    replies = [
        live.chat("tell me of the heron"),
        live.message("tell me of the heron", stream=True),
        live.chat("explode"),
        live.chat("tell me of the heron " * 9),
        live.chat("hi", tell_me_of_the_heron=1),
        live.http.post(PATHS["openai"], content=b'{"tell me of the heron'),
        live.http.get("/v1/models/tell me of the heron"),
        live.http.get("/tell me of the heron?key=s3cret-key"),
        live.http.get("/ready", headers={"x-api-key": "wr0ng-key", "authorization": ""}),
    ]
    for reply in replies:
        answered(lines, reply.headers["x-request-id"])
    kept = [line for line in lines() if line["event"] != "request_failed"]
    for secret in SECRETS:
        assert secret not in json.dumps(kept), secret
    crash = [line for line in lines() if line["event"] == "request_failed"]
    assert [line["request_id"] for line in crash] == [replies[2].headers["x-request-id"]]
    assert "heron" not in json.dumps(crash)
    assert "key" not in crash[0]


def test_a_request_that_fails_says_how(serve: Serve, lines: Any) -> None:
    live = serve()
    live.engine.script = lambda play: play.stream.finish(Failed(ProviderError("the model failed"), Usage(2, 1)))
    line = answered(lines, live.chat(stream=True).headers["x-request-id"])
    assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (200, "provider_error", 1)
    live.engine.refusal = Busy("full")
    line = answered(lines, live.chat().headers["x-request-id"])
    assert (line["status"], line["finish_reason"], line["ttft_ms"]) == (503, None, None)
    line = answered(lines, live.http.get("/nowhere").headers["x-request-id"])
    assert (line["status"], line["route"], line["key"]) == (404, "unmatched", None)


def test_a_vanished_client_is_told_apart(serve: Serve, lines: Any) -> None:
    live = serve()
    live.engine.script = lambda play: play.end("cancelled") if play.await_cancel() else None
    with live.http.stream(
        "POST", PATHS["openai"], json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    ) as it:
        name = it.headers["x-request-id"]
    assert answered(lines, name)["finish_reason"] == "cancelled"


def test_what_clients_send_wrongly_is_no_warning(serve: Serve, lines: Any) -> None:
    live = serve()
    for sent in (b"nonsense\r\n\r\n", b"GET /health HTTP/1.0\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", live.server.port), timeout=10) as client:
            client.sendall(sent)
            while client.recv(4096):
                pass
    name = live.http.request("X" * 5000, "/health").headers["x-request-id"]
    assert answered(lines, name)["method"] == "X" * 16
    assert {line["event"] for line in lines()} == {"request_answered"}


def test_probes_are_logged_quietly(serve: Serve, lines: Any) -> None:
    live = serve()
    for path in ("/health", "/ready", "/metrics"):
        assert answered(lines, live.http.get(path).headers["x-request-id"])["level"] == "debug"
    assert answered(lines, live.chat().headers["x-request-id"])["level"] == "info"


def scraped(live: Any) -> dict[str, float]:
    """Every sample as `name{label=value,...}`."""
    reply = live.http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(reply.text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_metrics_count_requests_by_route_and_status(serve: Serve) -> None:
    live = serve()
    assert live.chat().status_code == 200
    assert live.chat(n=0).status_code == 400
    assert live.message(stream=True).status_code == 200
    for path in ("/nowhere", "/elsewhere", "/v1/models/a", "/v1/models/b"):
        live.http.get(path)
    assert live.state.wait_idle(10)
    seen = scraped(live)
    assert seen["astrai_http_requests_total{route=/v1/chat/completions,status=200}"] == 1
    assert seen["astrai_http_requests_total{route=/v1/chat/completions,status=400}"] == 1
    assert seen["astrai_http_requests_total{route=unmatched,status=404}"] == 2
    (route,) = [name for name in seen if name.startswith("astrai_http_requests_total{route=/v1/models/")]
    assert seen[route] == 2  # one series, whatever clients ask for
    assert seen["astrai_http_requests_in_progress"] == 1  # this one
    assert seen["astrai_http_request_seconds_count{route=/v1/chat/completions}"] == 2


def test_metrics_show_the_engine_when_there_is_one(serve: Serve) -> None:
    live = serve(ready=False)
    before = scraped(live)
    assert before["astrai_ready"] == 0
    assert "astrai_waiting" not in before
    live.state.ready(live.engine, object())
    watch = live.engine.observe
    for tell, value in ((watch.queued, 0.2), (watch.first_token, 0.3), (watch.token_gap, 0.02), (watch.finished, "stop")):
        tell(value)
    seen = scraped(live)
    assert seen["astrai_ready"] == 1
    assert (seen["astrai_running"], seen["astrai_waiting"]) == (1, 2)
    assert [seen[f"astrai_kv_slots{{state={state}}}"] for state in ("free", "held", "cached")] == [90, 8, 2]
    assert seen["astrai_generations_ended_total{reason=stop}"] == 1
    for name, value in (("queue", 0.2), ("time_to_first_token", 0.3), ("inter_token", 0.02)):
        assert seen[f"astrai_{name}_seconds_count"] == 1
        assert seen[f"astrai_{name}_seconds_sum"] == pytest.approx(value)
    for name in ("requests", "generated_tokens", "cached_tokens", "preemptions", "faults", "restarts", "refused"):
        assert f"astrai_{name}_total" in seen
    assert seen["process_open_fds"] > 0


def test_two_services_in_one_process_count_apart(serve: Serve) -> None:
    one, other = serve(), serve()
    one.chat()
    assert one.state.wait_idle(10)
    route = "astrai_http_requests_total{route=/v1/chat/completions,status=200}"
    assert route in scraped(one)
    assert route not in scraped(other)


def test_a_request_is_one_span_in_the_trace_of_its_caller(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = InMemorySpanExporter()
    tracing = tracing_through(SimpleSpanProcessor(spans))
    monkeypatch.setattr(application, "open_tracing", lambda kind: tracing)
    live = serve(api_keys=["s3cret-key"])
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    live.http.headers.update({"authorization": "Bearer s3cret-key", "traceparent": f"00-{trace}-{parent}-01"})
    reply = live.chat("tell me of the heron", stream=True)
    live.http.get("/nowhere")
    while len(spans.get_finished_spans()) < 2:
        pass
    span, missing = spans.get_finished_spans()
    assert span.name == "POST /v1/chat/completions"
    assert f"{span.context.trace_id:032x}" == trace
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent
    said = dict(span.attributes or {})
    assert said["http.response.status_code"] == 200
    assert said["gen_ai.usage.input_tokens"] == len("tell me of the heron")
    assert said["gen_ai.usage.output_tokens"] == 2
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["astrai.request_id"] == reply.headers["x-request-id"]
    assert 0 <= float(str(said["astrai.time_to_first_token_ms"])) <= (span.end_time - span.start_time) / 1e6  # type: ignore[operator]
    assert missing.name == "GET unmatched"
    for secret in SECRETS:
        assert secret not in span.to_json()


def test_tracing_without_its_libraries_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BackendRefused, match=r"astrai-deploy\[otel\]"):
        open_tracing("otlp")
    open_tracing("none").close()
