"""What the protocols know of a deployment, and scripted generations to speak about: no engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from astrai_runtime import part
from astrai_runtime.event import Delta, Event, Finished, TokenLogprob, Usage
from astrai_runtime.protocols.base import Completion, Endpoint, Exchange, Protocol, Served
from astrai_runtime.provider.base import ModelInfo
from astrai_runtime.request import SamplingParams, Turn
from astrai_runtime.sampling.base import Knob

Pairs = Sequence[tuple[int, Event]]
KNOBS = (
    Knob("temperature", 1.0, 0.0, 2.0),
    Knob("top_k", 0, 0, 2**31, integer=True),
    Knob("top_p", 1.0, 0.0, 1.0),
    Knob("presence_penalty", 0.0, -2.0, 2.0),
    Knob("frequency_penalty", 0.0, -2.0, 2.0),
    Knob("typical_p", 1.0, 0.0, 1.0, above_low=True),
)


@pytest.fixture
def served() -> Served:
    """A deployment without the stages min_p and repetition_penalty, and with one that SamplingParams does not name."""
    return Served(
        model=ModelInfo("tiny", "llama", 1000, 259, 64, 1717000000),
        defaults=SamplingParams(temperature=0.7, top_k=50),
        knobs=KNOBS,
        max_tokens=100,
        max_choices=8,
        fields=("logit_bias",),
    )


def make(kind: str, dialect: str, path: str = "/v1/generate") -> Protocol:
    protocol_class = part.load("protocols", kind)
    declared = {"kind": kind, "dialect": dialect, "path": path, "max_tokens": 100}
    more = {"completions_path": "/v1/complete"} if kind == "openai" else {}
    made: Protocol = protocol_class(protocol_class.Config.model_validate(declared | more))
    return made


@dataclasses.dataclass(frozen=True)
class Speaker:
    """One protocol in one dialect, with one of its endpoints: the first, or `route` of them."""

    protocol: Protocol
    served: Served
    route: int = 0
    n_prompts: int = 1
    echoes: tuple[str, ...] = ()

    @property
    def endpoint(self) -> Endpoint:
        return self.protocol.endpoints()[self.route]

    def read_all(self, body: Any) -> Sequence[Turn]:
        return self.endpoint.read(self.endpoint.request.model_validate(body), self.served)

    def read(self, body: Any) -> Turn:
        (only,) = self.read_all(body)
        return only

    def exchange(self, turn: Turn) -> Exchange:
        return Exchange("id-1", 1717000000, self.served, turn, 5, self.n_prompts, self.echoes, "req_1")

    def stream(self, turn: Turn, script: Pairs) -> bytes:
        """All bytes of a stream."""

        async def scripted() -> AsyncIterator[tuple[int, Event]]:
            for pair in script:
                yield pair

        async def run() -> bytes:
            return b"".join([frame async for frame in self.endpoint.frames(self.exchange(turn), scripted())])

        return asyncio.run(run())

    def whole(self, turn: Turn, script: Pairs) -> Any:
        """The reply that is not streamed."""
        completions = []
        for index in range(turn.n * self.n_prompts):
            own = [event for at, event in script if at == index]
            text = "".join(event.text for event in own if isinstance(event, Delta))
            logprobs = tuple(record for event in own if isinstance(event, Delta) for record in event.logprobs)
            outcome = next(event for event in own if not isinstance(event, Delta))
            completions.append(Completion(index, text, outcome, logprobs))
        return self.endpoint.reply(self.exchange(turn), completions)


@pytest.fixture
def speak(served: Served) -> Callable[..., Speaker]:
    return lambda kind, dialect, **more: Speaker(make(kind, dialect), served, **more)


def _logprob(text: bytes, value: float, *top: tuple[bytes, float]) -> TokenLogprob:
    return TokenLogprob(1, text, value, tuple(TokenLogprob(2, data, other) for data, other in top))


SCRIPTS: dict[str, Pairs] = {
    "plain": [
        (0, Delta("Hello")),
        (0, Delta(' "wörld" 🌉\n')),
        (0, Finished("stop", Usage(5, 2, 0))),
    ],
    "length": [(0, Delta("Hello")), (0, Finished("length", Usage(5, 1, 4)))],
    "stopped": [(0, Delta("Hello")), (0, Finished("stop", Usage(5, 3, 0), stop_sequence="END"))],
    "empty": [(0, Finished("stop", Usage(5, 1, 0)))],
    "two": [
        (1, Delta("B")),
        (0, Delta("A")),
        (1, Finished("length", Usage(5, 1, 0))),
        (0, Delta("a")),
        (0, Finished("stop", Usage(5, 2, 0))),
    ],
    "logprobs": [
        (0, Delta("", (_logprob(b"\xf0\x9f", -0.5, (b"\xf0\x9f", -0.5), (b"x", -1.5), (b"y", float("-inf"))),))),
        (0, Delta("🌉", (_logprob(b"\x8c\x89", float("-inf"), (b"\x8c\x89", -0.25)),))),
        (0, Finished("stop", Usage(5, 2, 0))),
    ],
}


@pytest.fixture
def scripts() -> dict[str, Pairs]:
    return SCRIPTS
