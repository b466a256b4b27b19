"""What a sequence knows of itself."""

from __future__ import annotations

from astrai_runtime.event import Finished, Usage
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.decoder import TextDecoder


def make(n_prompt: int, capacity: int = 64) -> Sequence:
    prompt = Prompt(tuple(range(n_prompt)), SamplingParams(), Limits())
    return Sequence(prompt, Stream(capacity), TextDecoder(byte_tokenizer()), 10)


def test_sequence_decodes_when_all_but_its_last_generated_token_is_computed() -> None:
    sequence = make(3)
    assert (sequence.n_uncomputed, sequence.decoding) == (3, False)
    sequence.n_computed = 2
    assert not sequence.decoding  # its last prompt token is still prompt work
    sequence.n_computed = 3
    sequence.tokens.append(9)
    assert (sequence.n_generated, sequence.n_uncomputed, sequence.decoding) == (1, 1, True)


def test_sequence_pauses_on_pending_bytes_and_on_a_full_stream() -> None:
    sequence = make(1, capacity=2)
    assert not sequence.paused
    sequence.stream.put(b"ab")
    assert sequence.paused
    sequence.stream.read()
    assert not sequence.paused
    sequence.pending += b"c"
    assert sequence.paused


def test_sequence_with_an_outcome_has_ended() -> None:
    sequence = make(1)
    assert not sequence.ended
    sequence.outcome = Finished("stop", Usage())
    assert sequence.ended


def test_sequences_are_numbered_in_order_and_never_equal() -> None:
    first, second = make(1), make(1)
    assert first.id < second.id
    assert first != second
