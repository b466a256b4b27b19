"""A stand-in of the hub on the loopback interface: HEAD and GET of resolve, with ranges, cut connections and refusals."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REVISION = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny"


class Hub:
    """What the server holds and how it behaves; `requests` records (method, path, Range header)."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut_after: int | None = None  # bytes of a GET's body after which the connection breaks, once
        self.refusal: tuple[int, str | None] | None = None  # status and X-Error-Code of every answer
        self.requests: list[tuple[str, str, str | None]] = []
        self.address = ""

    def gets(self) -> list[tuple[str, str | None]]:
        return [(path, at) for method, path, at in self.requests if method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _refuse(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self) -> None:
        hub = self.hub
        hub.requests.append((self.command, self.path, self.headers.get("Range")))
        repo, _, rest = self.path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if hub.refusal:
            return self._refuse(*hub.refusal)
        if repo != REPO:
            return self._refuse(404, "RepoNotFound")
        if revision != REVISION:
            return self._refuse(404, "RevisionNotFound")
        if name not in hub.files:
            return self._refuse(404, "EntryNotFound")
        content = hub.files[name]
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        body = content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if hub.cut_after is not None and len(body) > hub.cut_after:
            body, hub.cut_after = body[: hub.cut_after], None
            self.close_connection = True
        self.wfile.write(body)
        return None

    do_GET = do_HEAD = _answer  # noqa: N815 - the names that http.server calls


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A running hub without files."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    server.daemon_threads = True
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
