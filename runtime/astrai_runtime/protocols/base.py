"""The contract of a protocol: JSON bodies and server-sent events of one public API. Knows neither engine nor Litestar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from astrai_runtime.errors import AstraiError
from astrai_runtime.event import Event, Outcome, TokenLogprob
from astrai_runtime.part import PartConfig
from astrai_runtime.protocols._sse import PING
from astrai_runtime.request import SamplingParams, Turn
from astrai_runtime.sampling.base import Knob

if TYPE_CHECKING:
    from astrai_runtime.agents.base import Agent
    from astrai_runtime.provider.base import ModelInfo


@dataclass(frozen=True, slots=True)
class Served:
    """What a protocol may know of the deployment: which model answers, and what sampling it can honour."""

    model: ModelInfo
    defaults: SamplingParams  # declared under `sampling`; a request's fields override them
    knobs: tuple[Knob, ...]  # of the declared pipeline
    max_tokens: int  # declared default of this protocol
    max_choices: int  # largest `n`
    fields: tuple[str, ...] = ()  # SamplingParams fields of the declared pipeline that are no knobs: logit_bias


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice of a reply that is not streamed. Choices of several prompts are numbered prompt by prompt."""

    index: int
    text: str
    outcome: Outcome
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer as data."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request while it is answered: fixed id and time, so that every frame of a stream agrees.

    `turn` is the first of `n_prompts` turns, which differ in nothing but their prompts; each has `turn.n` choices.
    """

    id: str
    created: int  # unix seconds
    served: Served
    turn: Turn
    prompt_tokens: int  # of all prompts
    n_prompts: int = 1
    echoes: tuple[str, ...] = ()  # each prompt's text, when the turn asks for an echo
    request_id: str = ""

    @property
    def n_choices(self) -> int:
        return self.n_prompts * self.turn.n

    def echo(self, choice: int) -> str:
        """What comes before a choice's own text."""
        return self.echoes[choice // self.turn.n] if self.echoes else ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route that generates text.

    `request` validates the JSON body; `read` makes it neutral, one turn for each prompt; `reply` answers at once,
    `frames` as a stream of complete SSE frames (bytes, each with its blank line). `frames` receives (choice index, event)
    pairs and sees every choice's outcome before it ends. The server sets the exchange's id with `new_id`.
    """

    path: str
    request: type[BaseModel]
    new_id: Callable[[], str]
    read: Callable[[Any, Served], Sequence[Turn]]
    reply: Callable[[Exchange, Sequence[Completion]], Reply]
    frames: Callable[[Exchange, AsyncIterator[tuple[int, Event]]], AsyncIterator[bytes]]
    ping: bytes = PING  # keeps a silent stream alive


@dataclass(frozen=True, slots=True)
class Lookup:
    """One route that is answered from the body, the tokenizer and the chat template: nothing is generated.

    `answer` runs in a worker and takes the validated body; what it raises gets the envelope of its protocol.
    """

    path: str
    request: type[BaseModel]
    answer: Callable[[Any, Served, Agent], Reply]


class Protocol(ABC):
    """One public API. `PART.Config` is its YAML; the class is called with its configuration."""

    Config: ClassVar[type[PartConfig]]

    @abstractmethod
    def __init__(self, config: Any) -> None: ...

    @abstractmethod
    def endpoints(self) -> Sequence[Endpoint]:
        """The routes that generate text."""

    def lookups(self) -> Sequence[Lookup]:
        """The routes that generate nothing."""
        return ()

    @abstractmethod
    def error(self, error: AstraiError) -> Reply:
        """Status, envelope and headers of an error before any frame was sent. Total: every AstraiError has one."""

    @abstractmethod
    def invalid(self, errors: Sequence[Mapping[str, Any]]) -> Reply:
        """The answer to a body that is no JSON or fails validation; `errors` as pydantic's `ValidationError.errors()`."""

    @abstractmethod
    def models(self, served: Sequence[ModelInfo]) -> Mapping[str, Any]:
        """The body of GET /v1/models."""

    def signed(self, reply: Reply, request_id: str) -> Reply:
        """An error's reply with the request's id in its body, where this API has a place for it."""
        return reply

    def speaks(self, headers: Mapping[str, str]) -> bool:
        """True when these (lower-case) request headers can only come from this protocol's clients."""
        return False
