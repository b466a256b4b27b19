"""What comes back: Delta* and then exactly one Finished or Failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from astrai_runtime.errors import AstraiError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token, in the distribution that `sampling.logprobs_mode` names."""

    token_id: int
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one generation. `cached_tokens` of the prompt came from the KV prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of text: whole characters, never empty unless it only carries log-probabilities."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end. `stop_sequence` names the stop string that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None

    @property
    def cause(self) -> str:
        """One word for counting: stop, length or cancelled."""
        return self.reason


@dataclass(frozen=True, slots=True)
class Failed:
    """The end, with an error that concerns this request alone."""

    error: AstraiError
    usage: Usage

    @property
    def cause(self) -> str:
        """One word for counting: the error's code."""
        return self.error.code


Outcome = Finished | Failed
Event = Delta | Finished | Failed
