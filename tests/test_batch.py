"""A batch packs its sequences one after the other."""

from __future__ import annotations

from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.decoder import TextDecoder


def make(tokens: tuple[int, ...], backend: str | None = None) -> Sequence:
    prompt = Prompt(tokens, SamplingParams(), Limits(), backend=backend)
    return Sequence(prompt, Stream(64), TextDecoder(byte_tokenizer()), 10)


def test_chunks_are_packed_without_padding() -> None:
    first, second, third = make((1, 2, 3)), make((4, 5, 6, 7)), make((8,))
    batch = Batch((Chunk(first, 2, 1, True), Chunk(second, 1, 2, False), Chunk(third, 0, 1, True)))
    assert batch.token_ids == [3, 5, 6, 8]
    assert batch.positions == [2, 1, 2, 0]
    assert batch.sampled == (first, third)
    assert batch.logit_rows == [0, 3]
    assert batch.n_tokens == 4
    assert [chunk.end for chunk in batch.chunks] == [3, 3, 1]


def test_batch_names_the_backend_that_its_sequences_require() -> None:
    assert Batch((Chunk(make((1,)), 0, 1, True),)).backend is None
    assert Batch((Chunk(make((1,), "torch_native"), 0, 1, True),)).backend == "torch_native"
