"""What every OpenAI answer is made of: usage, finish reasons, and the error of a reply that is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from astrai_runtime.errors import AstraiError
from astrai_runtime.event import Failed, Outcome, Usage
from astrai_runtime.protocols import _errors
from astrai_runtime.protocols.base import Completion, Exchange

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


def first_error(completions: Sequence[Completion]) -> AstraiError | None:
    return next((error for done in completions if (error := _errors.error_of(done.outcome)) is not None), None)


def error_body(error: AstraiError) -> Mapping[str, Any]:
    kind, param = _errors.wire(error).openai, _errors.pointer(error.param)
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def reason(outcome: Outcome) -> str:
    assert not isinstance(outcome, Failed)
    return outcome.reason


def usages_of(completions: Iterable[Completion]) -> dict[int, Usage]:
    return {done.index: done.outcome.usage for done in completions}


def counts(exchange: Exchange, usages: Mapping[int, Usage]) -> dict[str, Any]:
    """A prompt counts once, however many choices were made from it. What nobody could count before, the answers tell."""
    completion = sum(usage.completion_tokens for usage in usages.values())
    prompt = exchange.prompt_tokens or sum(usage.prompt_tokens for usage in usages.values()) // exchange.turn.n
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_body(exchange: Exchange, usages: Mapping[int, Usage]) -> dict[str, Any]:
    """With what each prompt's first choice found in the cache; later ones may find what the first one left."""
    firsts = range(0, exchange.n_choices, exchange.turn.n)
    cached = sum(usages[first].cached_tokens for first in firsts if first in usages)
    return {**counts(exchange, usages), "prompt_tokens_details": {"cached_tokens": cached}}
