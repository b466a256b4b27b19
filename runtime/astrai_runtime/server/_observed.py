"""Wraps the whole application: each request gets an id, safe headers, a log line, its counts and, if declared, a span."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from astrai_runtime import log
from astrai_runtime.server._record import Record, attach
from astrai_runtime.server._request_id import request_id
from astrai_runtime.server.metrics import Metrics

Spans = Callable[[Record, Any], None]
Send = Callable[[Any], Awaitable[None]]
# What a browser may do with an answer: nothing but hand it to the page that asked.
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
]
MAX_PATH_BYTES = 2048  # the router remembers the last thousand paths
MAX_METHOD = 16  # characters of a method that a log line repeats
TOO_LONG = b'{"error":{"message":"this path is too long","type":"invalid_request_error","param":null,"code":"not_found"}}'
QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds by programs


class Observed:
    """ASGI. `spans`, if given, is called once for each request when it has ended."""

    def __init__(self, app: Callable[..., Awaitable[None]], metrics: Metrics, spans: Spans | None) -> None:
        self._app, self._metrics, self._spans = app, metrics, spans
        self._log = log.get("server")

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        name = request_id(scope)
        record = Record(name, scope["method"][:MAX_METHOD])
        attach(scope, record)
        added = [(b"x-request-id", name.encode()), (b"request-id", name.encode()), *SAFE_HEADERS]

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        self._metrics.began()
        try:
            if len(scope["raw_path"]) > MAX_PATH_BYTES:
                headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(TOO_LONG))]
                await noted({"type": "http.response.start", "status": 414, "headers": headers})
                await noted({"type": "http.response.body", "body": TOO_LONG, "more_body": False})
            else:
                await self._app(scope, receive, noted)
        finally:
            record.ended = time.monotonic()
            record.route = scope.get("path_template") or record.route
            self._metrics.ended(record)
            write = self._log.debug if record.route in QUIET else self._log.info
            write("request_answered", **record.fields())
            if self._spans is not None:
                self._spans(record, scope)
