"""uvicorn's HTTP/1.1 connection with one more bound: a request's head must arrive in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # seconds from a connection's first byte of a request, or from connecting, to the end of its head


class TimedConnection(H11Protocol):
    """Closes a connection that is slow to say what it wants, so that idle sockets cannot pile up."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self._between_requests():
            self._start_clock()
        super().data_received(data)
        if self._deadline is not None and not self._between_requests():
            self._stop_clock()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The beginning of a next request may have come together with the last one.
        if self._deadline is None and self._between_requests() and self.conn.trailing_data[0]:
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
