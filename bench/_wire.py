"""One HTTP/1.1 exchange over a socket of its own, so that a client can be slow, rude, or gone in the middle."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import h11

PATIENCE_S = 60.0  # in which any step of an exchange must come; a longer wait is a hang


class Wire:
    """A connection that is opened, asked once, read as far as the client likes, and closed one way or another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, port: int, *, receive_bytes: int = 0) -> Wire:
        """`receive_bytes`: the kernel keeps no more unread bytes than this, so that not reading is felt by the server."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=receive_bytes or 65536))

    async def ask(self, method: str, path: str, body: bytes = b"") -> None:
        headers = [("Host", "127.0.0.1"), ("Connection", "close")]
        if method == "POST":
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        sent = self._http.send(h11.Request(method=method, target=path, headers=headers)) or b""
        sent += self._http.send(h11.Data(data=body)) or b""
        sent += self._http.send(h11.EndOfMessage()) or b""
        await self.raw(sent)

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            await self._writer.drain()

    async def _event(self, size: int = 65536) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(PATIENCE_S):
                self._http.receive_data(await self._reader.read(size))
        return event

    async def head(self) -> int:
        """The status, once it is there."""
        reply = await self._event()
        if not isinstance(reply, h11.Response):
            raise ConnectionError(f"no response but {type(reply).__name__}")
        self.status = reply.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in reply.headers}
        return self.status

    async def pieces(self, size: int = 65536) -> AsyncIterator[bytes]:
        """The body as it comes, at most `size` bytes from the socket at a time."""
        while True:
            event = await self._event(size)
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise ConnectionError(f"the body ended with {type(event).__name__}")
            yield bytes(event.data)

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def frames(self, size: int = 65536) -> AsyncIterator[Any]:
        """The data of each server-sent event, parsed; `[DONE]` as that text. Each line must be UTF-8 on its own."""
        rest = b""
        async for piece in self.pieces(size):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                text = line.decode("utf-8")
                if text.startswith("data: "):
                    yield "[DONE]" if text == "data: [DONE]" else json.loads(text[6:])

    async def close(self) -> None:
        """An orderly end (FIN)."""
        self._writer.close()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._writer.wait_closed()
        except ConnectionError:
            pass  # the other side had more to say than we wanted to hear

    def reset(self) -> None:
        """Gone without a word (RST)."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
