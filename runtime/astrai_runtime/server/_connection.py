"""uvicorn's HTTP/1.1 connection with more bounds: how many there are, how slowly one may ask, how slowly one may read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from astrai_runtime import log
from astrai_runtime.server.config import ServerConfig

MAX_EARLY_BYTES = 65536  # of a next request that came before the answer to the last one
LINGER_S = 1.0  # in which a refused client may read why
REFUSAL = (
    b'{"error":{"message":"too many connections are open; try again soon","type":"server_error","param":null,"code":"busy"}}'
)
REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(REFUSAL), REFUSAL)
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """`head_s`: seconds from a connection's first byte of a request, or from connecting, to the end of its head."""

    max_connections: int
    head_s: float
    write_timeout_s: float


def bounded(config: ServerConfig) -> type[H11Protocol]:
    """The connection class of one server; uvicorn makes the instances."""
    bounds = Bounds(config.max_connections, config.head_s, config.write_timeout_s)
    return type("BoundedConnection", (BoundedConnection,), {"bounds": bounds})


class BoundedConnection(H11Protocol):
    """Closes a connection that is slow to say what it wants, or to take what it asked for: sockets cannot pile up."""

    bounds: Bounds
    _head: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _unsent = 0
    _moved = False
    _refused = False
    _idle_since = 0.0  # on the loop's clock; counts while no request is being answered
    _early = b""  # what a client sent after its request, while the answer runs

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        if len(self.connections) > self.bounds.max_connections and not self._take_an_idle_place():
            self._refuse()
        else:
            self._start_clock()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self.transport.close()
            return
        if self._answering():
            self._keep_for_later(data)
            return
        if self._head is None and self._between_requests():
            self._start_clock()
        super().data_received(data)
        if self._head is not None and not self._between_requests():
            self._stop_clock()
        if self._answering() and self.conn.trailing_data[0]:
            self.flow.resume_reading()  # uvicorn pauses here, and would not see the client leave

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # in the middle of an answer, or after it: nothing can be said any more
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_since = self.loop.time()
        self._watch_writing()
        # The beginning of a next request may have come together with the last one.
        if self._head is None and self._between_requests() and self.conn.trailing_data[0]:
            self._start_clock()
        early, self._early = self._early, b""
        if early and not self.transport.is_closing():
            self.data_received(early)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._moved = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._writing is not None:
            self._writing.cancel()
        super().connection_lost(exc)

    def _take_an_idle_place(self) -> bool:
        """Closes the connection that has asked for nothing the longest. False: every other one is being answered."""
        idle = [one for one in self.connections if isinstance(one, BoundedConnection) and one._between_requests()]
        oldest = min((one for one in idle if one is not self), key=lambda one: one._idle_since, default=None)
        if oldest is None:
            return False
        self.connections.discard(oldest)
        oldest.transport.close()
        return True

    def _refuse(self) -> None:
        self._refused = True
        self.connections.discard(self)
        self.transport.write(REFUSED)
        self.loop.call_later(LINGER_S, self.transport.close)

    def _answering(self) -> bool:
        """Whether a whole request has arrived and its answer is not complete."""
        return not self._between_requests() and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)

    def _keep_for_later(self, data: bytes) -> None:
        self._early += data
        if len(self._early) > MAX_EARLY_BYTES:
            self.flow.pause_reading()

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_clock(self) -> None:
        self._head = self.loop.call_later(self.bounds.head_s, self.transport.close)

    def _stop_clock(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _watch_writing(self) -> None:
        """Looks again after `write_timeout_s` whether the client took anything of what waits for it."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and self._writing is None:
            self._unsent, self._moved = unsent, False
            self._writing = self.loop.call_later(self.bounds.write_timeout_s, self._check_writing)

    def _check_writing(self) -> None:
        self._writing = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= self._unsent and not self._moved:
            log.get("server").warning("client_stopped_reading", unsent=unsent, seconds=self.bounds.write_timeout_s)
            self.transport.abort()
        else:
            self._watch_writing()
