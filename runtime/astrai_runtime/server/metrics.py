"""Prometheus metrics of one service: what its HTTP side counts, what its engine tells, and what it reads when scraped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from astrai_runtime import log
from astrai_runtime.server._record import Record
from astrai_runtime.server.state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds between tokens
SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds of a whole wait
KV_STATES = ("free", "held", "cached")
SAID = {
    "requests": "generations that were accepted",
    "finished": "generations that came to their own end",
    "cancelled": "generations that their reader gave up",
    "failed": "generations that ended with an error",
    "refused": "generations refused because every place was taken or the engine was not ready",
    "prompt_tokens": "prompt tokens of accepted generations",
    "generated_tokens": "tokens sampled",
    "cached_tokens": "prompt tokens that the prefix cache saved",
    "ticks": "steps that computed something",
    "preemptions": "times that a generation's KV was taken away for an older one",
    "faults": "generations failed by the model, by sampling or by decoding their text",
    "restarts": "times that the engine thread died and came back",
}


class Metrics(Collector):
    """An `Observer` of the engine too: the four methods below `ended` run on the engine's thread, a microsecond each.

    Nothing is registered globally, so that several services can live in one process.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self._answered = Counter("astrai_http_requests", "requests answered", ("route", "status"), registry=registry)
        self._running = Gauge("astrai_http_requests_in_progress", "requests being answered now", registry=registry)
        self._lasted = Histogram(
            "astrai_http_request_seconds",
            "from a request's arrival to its last byte",
            ("route",),
            buckets=SLOW,
            registry=registry,
        )
        self._queued = Histogram(
            "astrai_queue_seconds", "from submission to the first step", buckets=SLOW, registry=registry
        )
        self._first = Histogram(
            "astrai_time_to_first_token_seconds", "from submission to the first token", buckets=SLOW, registry=registry
        )
        self._gap = Histogram(
            "astrai_inter_token_seconds", "between two tokens of one generation", buckets=FAST, registry=registry
        )
        self._ended = Counter("astrai_generations_ended", "generations by how they ended", ("reason",), registry=registry)
        registry.register(self)
        ProcessCollector(registry=registry)

    def began(self) -> None:
        """A request has arrived."""
        self._running.inc()

    def ended(self, record: Record) -> None:
        """It was answered, or its client is gone."""
        self._running.dec()
        self._answered.labels(record.route, record.status).inc()
        self._lasted.labels(record.route).observe(record.total_s)

    def queued(self, seconds: float) -> None:
        self._queued.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def finished(self, reason: str) -> None:
        self._ended.labels(reason).inc()

    def collect(self) -> Iterator[Metric]:
        """What the engine counts for itself, read when somebody asks."""
        yield GaugeMetricFamily("astrai_ready", "whether requests are answered", value=not self._state.reason)
        yield GaugeMetricFamily(
            "astrai_log_lines_dropped", "log lines lost because their reader was slow", value=log.dropped()
        )
        engine = self._state.engine
        if engine is None:
            return
        stats, kv, counters = engine.get_stats(), engine.kv_stats(), engine.counters()
        yield GaugeMetricFamily("astrai_running", "generations with a place", value=stats["active_tasks"])
        yield GaugeMetricFamily("astrai_waiting", "generations that wait for one", value=stats["waiting_queue"])
        slots = GaugeMetricFamily("astrai_kv_slots", "token slots of the KV pool by state", labels=("state",))
        for name in KV_STATES:
            slots.add_metric((name,), getattr(kv, name))
        yield slots
        for field in dataclasses.fields(counters):
            said = SAID.get(field.name, field.name.replace("_", " "))
            yield CounterMetricFamily(f"astrai_{field.name}", said, value=getattr(counters, field.name))

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)
