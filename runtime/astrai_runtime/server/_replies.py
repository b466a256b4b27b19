"""Answers as ASGI applications: one JSON body, or a stream of frames that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from astrai_runtime import log
from astrai_runtime.protocols._sse import encode
from astrai_runtime.protocols.base import Reply
from astrai_runtime.server._body import Receive

Send = Callable[[Any], Awaitable[None]]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold frames back
]


class JsonAnswer:
    """A whole reply at once."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        body = encode(self.reply.body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **self.reply.headers}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.reply.status, "headers": pairs})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class EventStream:
    """Frames as they come, and `ping` after every `ping_s` silent seconds (0: never).

    `gone` ends when the client does. `close` is called exactly once, however the stream ends.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        gone: asyncio.Task[None],
        close: Callable[[], Awaitable[None]],
        ping_s: float,
        ping: bytes,
        request_id: str,
    ) -> None:
        self._frames, self._gone, self._close, self._ping_s = frames, gone, close, ping_s
        self._request_id, self._keep_alive = request_id, ping
        self._sent_at = 0.0

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            writer = asyncio.create_task(self._write(send))
            tasks.append(writer)
            if self._ping_s:
                tasks.append(asyncio.create_task(self._ping(send)))
            await asyncio.wait({writer, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and (error := writer.exception()) is not None:
                log.get("server").error("stream_failed", request_id=self._request_id, error=repr(error), exc_info=error)
                raise error
        finally:
            for task in (*tasks, self._gone):
                task.cancel()
            await asyncio.gather(*tasks, self._gone, return_exceptions=True)
            await self._close()

    async def _write(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async for frame in self._frames:
            self._sent_at = clock()
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._ping_s = 0
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        while self._ping_s:
            await asyncio.sleep(self._sent_at + self._ping_s - clock())
            if self._ping_s and clock() - self._sent_at >= self._ping_s:
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
