"""A live server over a scripted engine: real sockets, real streams, no model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest

from astrai_runtime import part
from astrai_runtime.agents.base import Agent
from astrai_runtime.engine import Engine
from astrai_runtime.errors import AstraiError, ContextLengthExceeded
from astrai_runtime.event import Finished, Usage
from astrai_runtime.kv.base import KVStats
from astrai_runtime.metrics import Counters
from astrai_runtime.protocols.base import Protocol
from astrai_runtime.provider.base import ModelInfo
from astrai_runtime.request import Prompt, SamplingParams, Turn
from astrai_runtime.sampling.base import Knob
from astrai_runtime.server.app import create_app
from astrai_runtime.server.config import ServerConfig
from astrai_runtime.server.serve import Server
from astrai_runtime.server.state import ServerState
from astrai_runtime.stream import Stream

Script = Callable[["Play"], None]
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
KNOBS = (Knob("temperature", 1.0, 0.0, 2.0), Knob("top_k", 0, 0, 2**31, integer=True), Knob("top_p", 1.0, 0.0, 1.0))


@dataclass
class Play:
    """One submitted prompt, and what its script may do to its stream."""

    prompt: Prompt
    stream: Stream
    changed: threading.Event = field(default_factory=threading.Event)

    def say(self, text: str) -> None:
        self.stream.put(text.encode())

    def end(self, reason: Any = "stop", n: int = 2) -> None:
        self.stream.finish(Finished(reason, Usage(len(self.prompt.token_ids), n, 0)))

    def await_cancel(self) -> bool:
        """Waits until the reader cancels. False: it did not within ten seconds."""
        while not self.stream.cancelled:
            if not self.changed.wait(10):
                return False
            self.changed.clear()
        return True


def hello(play: Play) -> None:
    play.say("Hello")
    play.say(f" {play.prompt.sampling.seed}" if play.prompt.sampling.seed is not None else " you")
    play.end()


class ScriptedEngine:
    """`script` runs in a thread for every prompt; `refusal` is raised instead of accepting one."""

    def __init__(self) -> None:
        self.info = ModelInfo("tiny", "llama", 1000, 259, 64, 1717000000)
        self.ready = True
        self.reason = "has stopped"  # what it says once it is not ready
        self.script: Script = hello
        self.refusal: AstraiError | None = None
        self.refuse_after = 0
        self.plays: list[Play] = []
        self.threads: list[threading.Thread] = []

    def submit(self, prompt: Prompt) -> Stream:
        if self.refusal is not None and len(self.plays) >= self.refuse_after:
            raise self.refusal
        play = Play(prompt, Stream(4096, on_change=lambda: play.changed.set()))
        thread = threading.Thread(target=self.script, args=(play,))
        thread.start()
        self.threads.append(thread)
        self.plays.append(play)  # last: who sees the play may join its thread
        return play.stream

    def counters(self) -> Counters:
        return Counters(requests=len(self.plays))

    def kv_stats(self) -> KVStats:
        return KVStats(free=90, held=8, cached=2, total=100)

    def get_stats(self) -> dict[str, int]:
        return {"total_tasks": len(self.plays), "total_tokens": 7, "active_tasks": 1, "waiting_queue": 2}


class LengthAgent(Agent):
    """One token for each byte of the last message, or of the text; more than 64 do not fit."""

    def encode(self, turn: Turn) -> tuple[int, ...]:
        return turn.token_ids or tuple(self._text(turn).encode())

    def spell(self, token_ids: Iterable[int]) -> list[bytes]:
        return [bytes([token]) for token in token_ids]

    @staticmethod
    def _text(turn: Turn) -> str:
        return turn.messages[-1].content if turn.messages else turn.text or ""

    def prepare(self, turn: Turn) -> Prompt:
        text = self._text(turn)
        if text == "explode":
            raise ZeroDivisionError("a secret of the house")
        if len(text) > 64:
            raise ContextLengthExceeded(len(text), 64)
        return Prompt(self.encode(turn), turn.sampling, turn.limits, top_logprobs=turn.top_logprobs)


def server_config(**changes: Any) -> ServerConfig:
    declared = {
        "host": "127.0.0.1",
        "port": 0,
        "api_keys": (),
        "api_key_file": None,
        "admin_keys": (),
        "allow_open": False,
        "cors_origins": (),
        "max_connections": 100,
        "max_streams_per_key": 50,
        "max_head_bytes": 65536,
        "head_s": 20,
        "body_s": 60,
        "max_json_depth": 64,
        "write_timeout_s": 60,
        "idle_s": 75,
        "tracing": "none",
        "max_body_bytes": 100_000,
        "max_choices": 4,
        "drain_s": 2,
        "stream_bytes": 4096,
        "ping_s": 0,
        "workers": 1,
    }
    return ServerConfig.model_validate(declared | changes)


def protocols(dialects: Mapping[str, str]) -> dict[str, Protocol]:
    made: dict[str, Protocol] = {}
    for name, dialect in dialects.items():
        cls = part.load("protocols", name)
        declared = {"kind": name, "dialect": dialect, "path": PATHS[name], "max_tokens": 100}
        declared |= {"completions_path": "/v1/completions"} if name == "openai" else {}
        made[name] = cls(cls.Config.model_validate(declared))
    return made


@dataclass
class Live:
    """A running server and what stands behind it."""

    engine: ScriptedEngine
    state: ServerState
    server: Server
    http: httpx.Client

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}]} | fields
        return self.http.post(PATHS["openai"], json=body)

    def message(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8} | fields
        return self.http.post(PATHS["anthropic"], json=body)


@pytest.fixture
def serve() -> Iterator[Callable[..., Live]]:
    """Starts servers: `serve(dialects={...}, ready=True, **ServerConfig fields)`."""
    started: list[Live] = []

    def start(dialects: Mapping[str, str] | None = None, ready: bool = True, **changes: Any) -> Live:
        state, engine, config = ServerState(), ScriptedEngine(), server_config(**changes)
        if ready:
            state.ready(cast(Engine, engine), LengthAgent())
        dialects = dialects or {"openai": "openai", "anthropic": "anthropic"}
        made = protocols(dialects)
        app = create_app(config, made, dict.fromkeys(made, 100), state, SamplingParams(), KNOBS, ("logit_bias",))
        server = Server(app, config)
        live = Live(engine, state, server, httpx.Client(base_url=server.start(), timeout=20))
        started.append(live)
        return live

    yield start
    for live in started:
        live.http.close()
        live.server.stop()
        assert live.server.join(10)
        for thread in live.engine.threads:
            thread.join(10)
            assert not thread.is_alive()
