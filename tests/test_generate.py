"""The engine's plain calls: text in, text out, streamed or not, from threads and event loops."""

from __future__ import annotations

import asyncio

import pytest

from astrai_runtime.errors import (
    ContextLengthExceeded,
    DeadlineExpired,
    InvalidRequest,
)
from tests.asking import SOON, Gate
from tests.provider.reading import Rig, expected


def test_generate_returns_the_seeds_types() -> None:
    with Rig() as rig:
        one, two = expected(list(b"one"), 6), expected(list(b"twotwo"), 6)
        engine = rig.engine
        assert engine.generate("one", max_tokens=6) == one
        assert engine.generate(["one", "twotwo"], max_tokens=6) == [one, two]
        assert "".join(engine.generate("one", stream=True, max_tokens=6)) == one
        pieces: dict[int, str] = {0: "", 1: ""}
        for index, piece in engine.generate(["one", "twotwo"], stream=True, max_tokens=6):
            pieces[index] += piece
        assert pieces == {0: one, 1: two}
        assert engine.generate([], max_tokens=6) == []


def test_generate_takes_more_texts_than_the_queue_has_places() -> None:
    with Rig(max_batch_size=2, max_waiting=1) as rig:
        texts = [f"text {i}" for i in range(20)]
        assert rig.engine.generate(texts, max_tokens=3) == [expected(list(text.encode()), 3) for text in texts]


def test_generate_overrides_the_declared_sampling() -> None:
    with Rig() as rig:
        forced = rig.engine.generate("abc", max_tokens=3, logit_bias={ord("x"): 100})
        assert forced == "xxx"
        assert rig.engine.generate("abc", max_tokens=8, stop=expected(list(b"abc"), 8)[3]) == expected(list(b"abc"), 3)
        with pytest.raises(InvalidRequest, match="did you mean 'temperature'"):
            rig.engine.generate("abc", temprature=1.0)


def test_generate_raises_what_failed() -> None:
    with Rig() as rig:
        gate = Gate(rig)
        with pytest.raises(DeadlineExpired):
            rig.engine.generate("abc", max_tokens=3, timeout=0.02)
        gate.open.set()
        with pytest.raises(ContextLengthExceeded):
            rig.engine.generate("abc", max_tokens=3000)


def test_generator_that_is_left_early_cancels() -> None:
    with Rig() as rig:
        pieces = rig.engine.generate("abc", stream=True, max_tokens=200)
        next(pieces)
        pieces.close()
        assert rig.engine.drain(SOON)
        assert rig.engine.counters().cancelled == 1


def test_generate_async_streams_and_cancels() -> None:
    async def scenario(rig: Rig) -> None:
        answer = "".join([piece async for piece in rig.engine.generate_async("one", max_tokens=6, timeout=SOON)])
        assert answer == expected(list(b"one"), 6)
        both = await asyncio.gather(*(collect(rig, text) for text in ("a", "bb", "ccc")))
        assert both == [expected(list(text.encode()), 10) for text in ("a", "bb", "ccc")]
        left = rig.engine.generate_async("abc", max_tokens=200)
        await anext(left)
        await left.aclose()

    async def collect(rig: Rig, text: str) -> str:
        return "".join([piece async for piece in rig.engine.generate_async(text, max_tokens=10)])

    with Rig() as rig:
        asyncio.run(scenario(rig))
        assert rig.engine.drain(SOON)
        assert rig.engine.counters().cancelled == 1
