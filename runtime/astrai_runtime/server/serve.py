"""The application on a socket: uvicorn, run by the program instead of running it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from litestar import Litestar

from astrai_runtime.errors import AstraiError
from astrai_runtime.server._connection import bounded
from astrai_runtime.server.config import ServerConfig

START_S = 30.0


class CannotListen(AstraiError):
    code = "cannot_listen"


class Server:
    """Listens from the moment it is made. Handles no signals: the service calls `stop`.

    Raises:
        CannotListen: the address is taken or not this machine's.
    """

    def __init__(self, app: Litestar, config: ServerConfig) -> None:
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            self._socket = socket.create_server((config.host, config.port), family=family, backlog=512)
            # asyncio sets this only on sockets that name their protocol, which accepted ones do not; they inherit it.
            # Without it an answer's second packet waits 40 ms for the client to acknowledge the first.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise CannotListen(
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose another server.port, "
                "or 0 for any free one"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self.port}"
        settings = uvicorn.Config(
            app,
            http=bounded(config),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # what a client sends wrongly is no warning of ours
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who a request is from is what its socket says
            timeout_keep_alive=math.ceil(config.idle_s),
            timeout_graceful_shutdown=max(1, math.ceil(config.drain_s)),
            h11_max_incomplete_event_size=config.max_head_bytes,
        )
        self._uvicorn = _Quiet(settings)
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serves from a thread of its own. Returns the URL once requests are accepted."""
        up = threading.Event()
        self._uvicorn.on_up = up.set
        self._thread = threading.Thread(target=self._run, args=(up,), name="http", daemon=True)
        self._thread.start()
        up.wait(START_S)
        if not self._uvicorn.started:
            raise CannotListen(f"the HTTP server on {self.url} did not start")
        return self.url

    def _run(self, up: threading.Event) -> None:
        try:
            asyncio.run(self.serve())
        finally:
            up.set()

    async def serve(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Serves on the running loop until `stop`. `on_ready` gets the URL once requests are accepted."""
        if on_ready is not None:
            self._uvicorn.on_up = lambda: on_ready(self.url)
        await self._uvicorn.serve(sockets=[self._socket])

    def stop(self, *, at_once: bool = False) -> None:
        """Closes the socket, lets running requests end within `drain_s` (or cuts them), and ends. From any thread."""
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = self._uvicorn.force_exit or at_once

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread of `start`. False: it still runs."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()


def run(app: Litestar, config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    """Serves on this thread until the process's owner stops it; `on_ready` gets the URL that was bound."""
    asyncio.run(Server(app, config).serve(on_ready))


class _Quiet(uvicorn.Server):
    """uvicorn without signal handlers, and with a call once it accepts requests."""

    on_up: Callable[[], Any] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self.on_up is not None:
            self.on_up()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tells the application that it ends, in a hurry too: uvicorn leaves that out then, and its task dies loudly."""
        await super().shutdown(sockets=sockets)
        if self.force_exit:
            await self.lifespan.shutdown()
