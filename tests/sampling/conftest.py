"""Rows to sample for: real sequences with nothing behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astrai_runtime import part
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sampling._pipeline import Sampler
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.decoder import TextDecoder

ORDER = ("penalties", "logit_bias", "temperature", "top_k", "typical_p", "top_p", "min_p", "mirostat")
MakeRow = Callable[..., Sequence]


@pytest.fixture
def row() -> MakeRow:
    """`row(prompt=(1, 2), generated=(), top_logprobs=None, temperature=0.5, ...)`."""
    tokenizer = byte_tokenizer()

    def make(
        prompt: tuple[int, ...] = (1, 2), generated: tuple[int, ...] = (), top_logprobs: int | None = None, **fields: Any
    ) -> Sequence:
        sampling = SamplingParams(**{"seed": 0, **fields})
        asked = Prompt(prompt, sampling, Limits(), top_logprobs=top_logprobs)
        sequence = Sequence(asked, Stream(64), TextDecoder(tokenizer), 100)
        sequence.tokens.extend(generated)
        return sequence

    return make


@pytest.fixture
def pipeline() -> Callable[..., Sampler]:
    """The shipped pipeline, for a vocabulary of that many tokens."""

    def make(valid_tokens: int, stages: tuple[str, ...] = ORDER, **options: Any) -> Sampler:
        return Sampler([part.load("sampling", name)() for name in stages], valid_tokens, **options)

    return make
