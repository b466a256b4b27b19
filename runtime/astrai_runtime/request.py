"""What a caller asks for, as frozen values: Turn (messages) -> Prompt (token ids). One SamplingParams travels everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
_EMPTY: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits. Every field's default is its neutral value.

    `extra` carries the knobs of sampling stages that this class does not name, by knob name.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    extra: Mapping[str, float] = field(default_factory=lambda: _EMPTY)

    @property
    def greedy(self) -> bool:
        """Temperature 0: the highest logit wins, the lowest token id on ties."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """When a generation ends besides the model's own end tokens.

    `max_tokens` was asked for and is never lowered in silence; without it, `default_max_tokens` holds, lowered to the
    room that the context leaves. Both None: up to the context's end. `deadline_s` counts from the submission.

    A higher `priority` gets a place first and loses its memory to others last; nobody waits for ever (see the scheduler).
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    deadline_s: float | None = None
    default_max_tokens: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `extra` holds what only chat templates read (name, tool_calls, ...)."""

    role: Role
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of any protocol, neutral: what to answer, how, and how much.

    `messages` for chat, or `text` for a raw completion, or `token_ids` for one that is tokenized already. `prefill`: the
    last assistant message is to be continued, not answered. `top_logprobs` None: no log-probabilities; 0: of the chosen
    token only. `echo`: the answer begins with the prompt's text. `tell_cached`: the caller asked for prompt caching, and
    its usage says what came from the cache. `cache_salt`: as in `Prompt`.
    """

    sampling: SamplingParams
    limits: Limits
    messages: tuple[Message, ...] = ()
    text: str | None = None
    model: str | None = None
    stream: bool = False
    n: int = 1
    top_logprobs: int | None = None
    prefill: bool = False
    include_usage: bool = False
    token_ids: tuple[int, ...] | None = None
    echo: bool = False
    tell_cached: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids ready for the engine. `max_tokens` in `limits` is already clamped to the room that the context leaves.

    `stable_prefix`: how many leading tokens stay the same in the conversation's next turn. Keys and values are reused
    only between prompts of one `cache_salt` (a tenant's, or one that a caller chose) and one `cache_identity` (digests of
    whatever else they depend on: adapters, media).
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    limits: Limits
    stable_prefix: int = 0
    top_logprobs: int | None = None
    trim_leading_space: bool = False
    turn: Turn | None = None  # what was said, for an engine that passes it on instead of computing on tokens
    backend: str | None = None  # attention backend that the caller requires (`attn_backend`); None: the plan's choice
    cache_salt: str = ""
    cache_identity: tuple[str, ...] = ()
