"""The relay's agent: turns pass as they are; limits are checked as far as the other service tells."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from astrai_runtime.agents._relay import RelayAgent
from astrai_runtime.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from astrai_runtime.event import Event, Finished, Usage
from astrai_runtime.provider.base import ModelInfo, TextProvider
from astrai_runtime.request import Limits, Message, Prompt, SamplingParams, Turn

TURN = Turn(SamplingParams(), Limits(default_max_tokens=50), messages=(Message("user", "hello"),))


async def complete(prompt: Prompt) -> AsyncGenerator[Event, None]:
    yield Finished("stop", Usage())


def count(turn: Turn) -> tuple[int, ...] | None:
    return tuple(turn.messages[-1].content.encode())


def agent(context: int = 0, *, counts: bool = True) -> RelayAgent:
    info = ModelInfo("far", "remote", 0, 0, context, 0)
    return RelayAgent(TextProvider(info, complete, lambda: None, tokenize=count if counts else None))


def limited(n: int) -> Turn:
    return replace(TURN, limits=Limits(max_tokens=n))


def test_prompt_carries_the_turn_and_its_tokens_where_they_are_counted() -> None:
    prompt = agent().prepare(TURN)
    assert (prompt.turn, prompt.token_ids) == (TURN, tuple(b"hello"))
    assert agent().encode(TURN) == tuple(b"hello")
    assert agent(counts=False).prepare(TURN).token_ids == ()


def test_declared_default_is_lowered_to_the_room_that_is_known() -> None:
    assert agent().prepare(TURN).limits.max_tokens == 50
    assert agent(16).prepare(TURN).limits.max_tokens == 11
    assert agent(16, counts=False).prepare(TURN).limits.max_tokens == 16
    assert agent().prepare(limited(7)).limits.max_tokens == 7
    assert agent().prepare(replace(TURN, limits=Limits())).limits.max_tokens is None


def test_what_cannot_fit_is_refused_with_both_numbers() -> None:
    assert agent(16).prepare(limited(11)).limits.max_tokens == 11
    with pytest.raises(ContextLengthExceeded) as caught:
        agent(16).prepare(limited(12))
    assert (caught.value.needed, caught.value.limit) == (17, 16)
    with pytest.raises(ContextLengthExceeded):
        agent(5).prepare(TURN)


def test_what_the_other_service_cannot_do_is_refused() -> None:
    with pytest.raises(Unsupported, match="cannot be continued"):
        agent().prepare(replace(TURN, prefill=True))
    with pytest.raises(Unsupported, match="does not tokenize"):
        agent(counts=False).encode(TURN)
    with pytest.raises(Unsupported, match="does not spell"):
        agent().spell([1])
    with pytest.raises(InvalidRequest, match="at least one message"):
        agent().prepare(replace(TURN, messages=()))
