"""A service that a test scripts, on a real socket: what it answers, and what it was asked."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from astrai_runtime.provider.base import ModelInfo, TextProvider
from astrai_runtime.provider.remote import RemoteConfig, RemoteProvider
from astrai_runtime.request import Limits, Message, Prompt, SamplingParams, Turn

KEY = "hush-hush"
MODELS = {"data": [{"id": "far", "max_model_len": 64}, {"id": "other"}]}
DECLARED: dict[str, Any] = {
    "kind": "remote",
    "model": None,
    "api_key": KEY,
    "check": False,
    "tokenize": "never",
    "limit_field": "max_tokens",
    "connect_s": 5,
    "read_s": 5,
    "retry_wait_s": 0,
    "max_frame_bytes": 4096,
    "max_response_bytes": 65536,
}
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Says what `Service.answers` holds for the route. Connections close after each answer."""

    service: Service

    def _serve(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.service.asked.append(Asked(self.command, self.path, dict(self.headers), body))
        waiting = self.service.answers[self.path]
        answer = waiting.popleft() if len(waiting) > 1 else waiting[0] if waiting else reply(404, {"error": "no such route"})
        try:
            answer(self)
        except OSError:
            self.service.gone.set()

    do_GET = do_POST = _serve  # noqa: N815  names that http.server prescribes

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def head(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Service:
    """`says` queues answers of one route; the last one is repeated."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    answers: dict[str, deque[Answer]] = field(default_factory=lambda: defaultdict(deque))
    gone: threading.Event = field(default_factory=threading.Event)  # a client went away while it was answered
    free: threading.Event = field(default_factory=threading.Event)  # set at the end, for answers that wait

    def says(self, *answers: Answer, path: str = "/v1/chat/completions") -> None:
        self.answers[path].extend(answers)

    def provider(self, sampling: Sequence[str] = (), context: int = 0, **changes: Any) -> TextProvider:
        """The remote provider for this service; `changes` are fields of its configuration."""
        config = RemoteConfig.model_validate(DECLARED | {"url": f"{self.url}/v1"} | changes)
        return RemoteProvider.open(config, Plans(sampling=tuple(sampling), info=info(context)))


@dataclass(frozen=True)
class Plans:
    """As much of `Materials` as a remote provider asks for."""

    info: ModelInfo
    sampling: tuple[str, ...] = ()
    template: str = "auto"
    device: str = "cpu"
    phases: Any = None

    def text(self) -> Any:
        raise AssertionError("a remote provider reads no files")

    decoder = kv = backends = text


def info(context: int = 0) -> ModelInfo:
    return ModelInfo("far", "none", 0, 258, context, 0)


@contextmanager
def service() -> Iterator[Service]:
    """Listens on loopback until the end of the block."""
    made = Service()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OurHandler", (Handler,), {"service": made}))
    server.daemon_threads = False  # its end waits for every answer
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.free.set()
        server.shutdown()
        server.server_close()
        thread.join()


def reply(status: int, body: Any, **headers: str) -> Answer:
    """One JSON answer."""

    def answer(handler: Handler) -> None:
        handler.head(status, content_type="application/json", **headers)
        handler.wfile.write(json.dumps(body).encode())

    return answer


def stream(*pieces: bytes, then: Answer | None = None) -> Answer:
    """Server-sent events, one write each."""

    def answer(handler: Handler) -> None:
        handler.head(200, content_type="text/event-stream; charset=utf-8")
        for piece in pieces:
            handler.wfile.write(piece)
        if then is not None:
            then(handler)

    return answer


def frame(data: Any) -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def said(text: str, **more: Any) -> bytes:
    """A chunk of text."""
    return frame({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]})


def ended(reason: str = "stop", usage: tuple[int, int] | None = (3, 2)) -> bytes:
    """The last chunks of an answer."""
    last = frame({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if usage is not None:
        last += frame({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}})
    return last + frame("[DONE]")


def prompt(text: str = "hi", limits: Limits | None = None, **sampling: Any) -> Prompt:
    """A chat prompt as the relay's agent makes it."""
    params, bounds = SamplingParams(**sampling), limits or Limits(max_tokens=8)
    turn = Turn(params, bounds, messages=(Message("user", text),))
    return Prompt((), params, bounds, turn=turn)
