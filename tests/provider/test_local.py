"""The local provider: which backend serves which step, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from astrai_runtime import part
from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.errors import BackendRefused
from astrai_runtime.kv.base import KVMode
from astrai_runtime.provider.base import ModelInfo
from astrai_runtime.provider.local import local_provider
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.decoder import TextDecoder
from tests.provider.reading import make_kv


@dataclass
class Recorder:
    """A decoder that remembers what it was given."""

    calls: list[tuple] = field(default_factory=list)

    def __call__(self, batch, view, attention) -> torch.Tensor:
        self.calls.append((batch, view, attention))
        return torch.zeros(len(batch.sampled), 4)


def batch(kv: KVMode, length: int, backend: str | None = None) -> Batch:
    asked = Prompt(tuple(range(length)), SamplingParams(), Limits(), backend=backend)
    sequence = Sequence(asked, Stream(64), TextDecoder(byte_tokenizer()), 10)
    assert kv.reserve(sequence)
    assert kv.extend(sequence, length)
    return Batch((Chunk(sequence, 0, length, sampled=True),))


def make(kv: KVMode, decoder: Recorder, context: int = 64):
    info = ModelInfo("tiny", "llama", 1, 4, context, 0)
    backends = {"a": "backend a", "b": "backend b"}
    return local_provider(info, byte_tokenizer(), None, kv, decoder, backends, {"prefill": "a", "decode": "b"})


def test_each_phase_uses_the_backend_of_the_plan() -> None:
    kv, decoder = make_kv(), Recorder()
    provider = make(kv, decoder)
    assert provider.run(batch(kv, 5)).shape == (1, 4)
    provider.run(batch(kv, 1))
    assert [attention for _, _, attention in decoder.calls] == ["backend a", "backend b"]
    assert decoder.calls[0][1].out_cache_loc.numel() == 5


def test_required_backend_replaces_the_plans_choice_or_is_refused() -> None:
    kv, decoder = make_kv(), Recorder()
    provider = make(kv, decoder)
    assert provider.backends == {"a", "b"}
    provider.run(batch(kv, 5, "b"))
    assert decoder.calls[0][2] == "backend b"
    with pytest.raises(BackendRefused, match="'c' was required, but this deployment runs: a, b"):
        provider.run(batch(kv, 5, "c"))


def test_context_is_never_more_than_the_pool_holds() -> None:
    assert make(make_kv(n_tokens=32, context=64), Recorder()).info.context == 32
    assert make(make_kv(n_tokens=128, context=64), Recorder()).info.context == 64


def test_closing_twice_is_safe() -> None:
    provider = make(make_kv(), Recorder())
    provider.close()
    provider.close()


def test_every_provider_has_a_closed_configuration() -> None:
    for name in part.names("provider"):
        config = part.load("provider", name).Config
        assert config.model_fields["kind"].annotation.__args__ == (name,)
        with pytest.raises(ValueError, match="surprise"):
            config(kind=name, surprise=1)
