"""OpenTelemetry spans, one a request, where they are declared; the `otel` extra holds the libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from astrai_runtime.errors import BackendRefused
from astrai_runtime.server._record import Record


class Tracing:
    """Spans through one provider. A span is made when its request has ended, with the request's own times."""

    def __init__(self, provider: Any, parent: Callable[[dict[str, str]], Any]) -> None:
        self._tracer = provider.get_tracer("astrai_runtime.server")
        self._shutdown = provider.shutdown
        self._parent = parent

    def end(self, record: Record, scope: Any) -> None:
        """The span of an answered request. Continues the trace that its `traceparent` header names."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            f"{record.method} {record.route}", context=self._parent(headers), start_time=record.began_ns
        )
        for name, value in attributes(record).items():
            span.set_attribute(name, value)
        span.end(end_time=record.began_ns + int(record.total_s * 1e9))

    def close(self) -> None:
        """Sends what is left."""
        self._shutdown()


class NoTracing:
    """What `tracing: none` means."""

    def end(self, record: Record, scope: Any) -> None: ...
    def close(self) -> None: ...


def attributes(record: Record) -> dict[str, Any]:
    """OpenTelemetry's names where it has one (HTTP and GenAI conventions), ours for the rest."""
    said = record.fields()
    named = {
        "http.request.method": said["method"],
        "http.route": said["route"],
        "http.response.status_code": said["status"],
        "gen_ai.usage.input_tokens": said["prompt_tokens"],
        "gen_ai.usage.output_tokens": said["completion_tokens"],
        "gen_ai.response.finish_reasons": said["finish_reason"] and [said["finish_reason"]],
        "astrai.request_id": said["request_id"],
        "astrai.stream": said["stream"],
        "astrai.key": said["key"],
        "astrai.time_to_first_token_ms": said["ttft_ms"],
    }
    return {name: value for name, value in named.items() if value is not None}


def open_tracing(kind: Literal["none", "otlp"]) -> Tracing | NoTracing:
    """`otlp` exports over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT, from a thread of its own.

    Raises:
        BackendRefused: the libraries are missing.
    """
    if kind == "none":
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise BackendRefused(
            f"server.tracing=otlp needs {error.name}, which is missing: pip install 'astrai-deploy[otel]', or declare none"
        ) from None
    return tracing_through(BatchSpanProcessor(OTLPSpanExporter()))


def tracing_through(processor: Any) -> Tracing:
    """Spans that go to one span processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    provider = TracerProvider(resource=Resource.create({"service.name": "astrai-deploy"}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return Tracing(provider, TraceContextTextMapPropagator().extract)
