"""A live server over the real engine, scheduler, sampler, agent and KV pool; only the logits are made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml

from astrai_runtime import part
from astrai_runtime.agents._relay import RelayAgent
from astrai_runtime.agents._stateless import ChatStyle, StatelessAgent
from astrai_runtime.agents.base import Agent
from astrai_runtime.batch import Batch
from astrai_runtime.engine import Engine
from astrai_runtime.generate import TextInterface
from astrai_runtime.kv.base import KVMode
from astrai_runtime.provider.base import ModelInfo, Provider
from astrai_runtime.provider.mock import MockProvider
from astrai_runtime.provider.remote import RemoteConfig, RemoteProvider
from astrai_runtime.relay import RelayEngine
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._pipeline import Sampler
from astrai_runtime.server.app import create_app
from astrai_runtime.server.serve import Server
from astrai_runtime.server.state import ServerState
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.chat_template import ChatTemplate
from tests import live
from tests.provider.reading import EOS, STAGES, VOCABULARY, ReadingProvider, Step, make_kv, make_scheduler
from tests.provider.upstream import DECLARED, Plans
from tests.server.conftest import protocols, server_config

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message.role[0] }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}]{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ROUTES = (CHAT, TEXT, MESSAGES)
USER = {"role": "user", "content": "hi"}
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 6, "temperature": 0},
    TEXT: {"prompt": "Once", "max_tokens": 6, "temperature": 0},
    MESSAGES: {"messages": [USER], "max_tokens": 6, "temperature": 0},
}
TOKENIZER = byte_tokenizer()
ROOT = Path(__file__).resolve().parent.parent.parent


class Chain(ReadingProvider):
    """Says `script` after every prompt and then ends, while there is a script; else what a hash of the context says."""

    script: Sequence[int] | None = None

    def run(self, batch: Batch) -> torch.Tensor:
        logits = super().run(batch)
        if self.script is not None:
            logits = torch.zeros_like(logits)
            for row, chunk in zip(logits, [chunk for chunk in batch.chunks if chunk.sampled], strict=True):
                at = chunk.end - chunk.sequence.n_prompt
                row[self.script[at] if at < len(self.script) else EOS] = 20.0
        return logits


class Spelling(MockProvider):
    """The mock with a script of bytes that need not be characters, which YAML cannot hold."""

    spelled: bytes | None = None

    def _written(self, prompt: bytes) -> bytes:
        return super()._written(prompt) if self.spelled is None else self.spelled


class Mocked:
    """The provider `mock` as it is shipped, given another script by each test."""

    def __init__(self, kv: KVMode) -> None:
        self.kv = kv
        self._declared = yaml.safe_load((ROOT / "conf" / "provider" / "mock.yaml").read_text(encoding="utf-8"))
        self.before: Step = lambda batch: None
        self.script = None

    def _set(self, script: Sequence[int] | None) -> None:
        changes = {"mode": "infinite" if script is None else "script", "sharpness": 4.0 if script is None else 30.0}
        replies = [{"when": None, "say": "Endless: {this} [is] (what) it says over and over. "}]
        config = MockProvider.Config.model_validate(self._declared | changes | {"replies": replies})
        self._mock = Spelling(config, self.kv)
        self._mock.spelled = script if script is None else bytes(script)

    script = property(fset=_set)

    def table(self) -> Provider:
        info = ModelInfo("reader", "none", 0, VOCABULARY, self.kv.shape.context, 0)
        backends = frozenset({"torch_native"})
        return Provider(info, byte_tokenizer(), None, self.kv, self.run, self._mock.close, backends)

    def run(self, batch: Batch) -> torch.Tensor:
        self.before(batch)
        return self._mock.run(batch)


@dataclass
class House:
    """A running server, and what its model says next."""

    provider: Chain | Mocked
    engine: TextInterface
    state: ServerState
    http: httpx.Client
    behind: House | None = None  # the one that this one passes everything on to

    def says(self, script: str | bytes | None) -> None:
        """From now on; None: what a hash of the context says, which never ends by itself."""
        self.provider.script = script if script is None else list(script.encode() if isinstance(script, str) else script)

    def ask(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=ASK[path] | fields)

    def idle(self) -> bool:
        """Waits for the last answer, then says whether the engine has nothing left to do."""
        assert self.state.wait_idle(10)
        stats = self.http.get("/stats").json()
        return (stats["active_tasks"], stats["waiting_queue"]) == (0, 0) and (self.behind is None or self.behind.idle())


@contextmanager
def house(
    dialect: str | None = None, *, context: int = 64, rows: int = 8, mock: bool = False, **changes: Any
) -> Iterator[House]:
    """Starts it; `changes` are ServerConfig fields. `mock`: with the shipped mock provider."""
    kv = make_kv(context=context, rows=rows)
    provider = Mocked(kv) if mock else Chain(kv)
    stages = [part.load("sampling", name) for name in STAGES]
    sampler = Sampler([stage() for stage in stages], VOCABULARY)
    engine = Engine(provider.table(), make_scheduler(provider.kv), sampler, defaults=SamplingParams())
    agent = StatelessAgent(TOKENIZER, ChatTemplate(TEMPLATE, TOKENIZER), ChatStyle(), context)
    with open_to_all(provider, engine, agent, dialect, **changes) as made:
        yield made
    provider.kv.check_integrity([])


@contextmanager
def open_to_all(
    provider: Chain | Mocked, engine: TextInterface, agent: Agent, dialect: str | None, **changes: Any
) -> Iterator[House]:
    """The HTTP side of a house."""
    stages = [part.load("sampling", name) for name in STAGES]
    config = server_config(**{"max_choices": 8} | changes)
    made = protocols({"openai": dialect or "openai", "anthropic": dialect or "anthropic"})
    knobs = [knob for stage in stages for knob in stage.knobs]
    fields = [name for stage in stages for name in stage.fields]
    state = ServerState()
    app = create_app(config, made, dict.fromkeys(made, 32), state, SamplingParams(), knobs, fields)
    server = Server(app, config)
    engine.start()
    state.ready(engine, agent)
    with live.quiet():
        with httpx.Client(base_url=server.start(), timeout=20) as http:
            yield House(provider, engine, state, http)
        server.stop()
        assert server.join(10)
        engine.shutdown()


@contextmanager
def served_by(provider: str, *, context: int) -> Iterator[House]:
    """A house whose answers come from a provider: `local` (made-up logits), `mock`, or `remote` (another house)."""
    with relayed(context=context) if provider == "remote" else house(context=context, mock=provider == "mock") as made:
        yield made


@contextmanager
def relayed(*, context: int = 64) -> Iterator[House]:
    """A house that passes everything on to another one, over the wire."""
    with house(context=context) as behind:
        stages = [part.load("sampling", name) for name in STAGES]
        names = [name for stage in stages for name in (*(knob.name for knob in stage.knobs), *stage.fields)]
        config = DECLARED | {"url": f"{str(behind.http.base_url).rstrip('/')}/v1", "check": True, "tokenize": "auto"}
        config |= {"max_frame_bytes": 1 << 20, "max_response_bytes": 1 << 24}
        plans = Plans(ModelInfo("reader", "none", 0, 0, context, 0), tuple(names))
        far = RemoteProvider.open(RemoteConfig.model_validate(config), plans)
        engine = RelayEngine(far, max_running=8, max_waiting=64, defaults=SamplingParams(), knobs=names)
        with open_to_all(behind.provider, engine, RelayAgent(far), None, ping_s=5) as front:
            front.behind = behind
            yield front


def text_of(path: str, body: Any) -> list[str]:
    """The text of every choice of a whole answer."""
    if path == MESSAGES:
        return [body["content"][0]["text"]]
    key = (lambda choice: choice["message"]["content"]) if path == CHAT else (lambda choice: choice["text"])
    return [key(choice) for choice in body["choices"]]


def streamed(path: str, items: Sequence[Any]) -> list[str]:
    """The joined text of every choice of a stream's events."""
    if path == MESSAGES:
        return ["".join(item.json["delta"]["text"] for item in items if item.event == "content_block_delta")]
    texts: dict[int, str] = {}
    for item in items:
        for choice in [] if item.data == "[DONE]" else item.json["choices"]:
            said = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + said
    return [texts[index] for index in sorted(texts)]
