"""One step of the engine: from a batch to the next token of its sequences, so that whoever breaks it is lost alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from astrai_runtime import log
from astrai_runtime.batch import Batch
from astrai_runtime.errors import ProviderError
from astrai_runtime.event import Finished, TokenLogprob, Usage
from astrai_runtime.sampling._pipeline import Sampled, Sampler
from astrai_runtime.sequence import Sequence
from astrai_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from astrai_runtime.provider.base import Provider


@dataclass(frozen=True, slots=True)
class Done:
    """A part of the step that succeeded: one result for each of `batch.sampled`."""

    batch: Batch
    sampled: list[Sampled]


@dataclass(frozen=True, slots=True)
class Lost:
    """A sequence that fails even alone."""

    sequence: Sequence
    error: Exception


class Stepper:
    """Runs and samples. Used by the engine thread.

    A batch that raises is tried again in halves down to single sequences: what is computed again is written to the same
    slots, and no token depends on its neighbours, so that the others' answers do not change. A single prompt that is too
    large for the memory that is left is tried again with half of its tokens.
    """

    def __init__(self, provider: Provider, sampler: Sampler) -> None:
        self._provider = provider
        self._sampler = sampler
        self._log = log.get("engine")
        self.faults = 0  # batches that raised

    def compute(self, batch: Batch) -> list[Done | Lost]:
        """Every chunk's outcome. A sequence may have been given fewer tokens than its chunk asked for.

        Raises:
            Exception: the device is lost: no further step can succeed.
        """
        sampled, error = self._attempt(batch)
        if error is None:
            return [Done(batch, sampled)]
        self.faults += 1
        first, *others = batch.chunks
        exhausted = _out_of_memory(error)
        if exhausted:
            _free_device_memory()
        if others:
            self._log.warning("batch_failed", sequences=len(batch.chunks), error=repr(error))
            half = len(batch.chunks) // 2
            return self.compute(Batch(batch.chunks[:half])) + self.compute(Batch(batch.chunks[half:]))
        if exhausted and first.length > 1:
            self._log.warning("chunk_halved", sequence=first.sequence.id, tokens=first.length, error=repr(error))
            return self.compute(Batch((replace(first, length=first.length // 2, sampled=False),)))
        return [Lost(first.sequence, error)]

    def _attempt(self, batch: Batch) -> tuple[list[Sampled], Exception | None]:
        remembered = [dict(sequence.sampler_state) for sequence in batch.sampled]
        try:
            return self._run(batch), None
        except Exception as error:  # whatever a model raises concerns its requests, not the engine
            if type(error).__name__ == "AcceleratorError":  # torch's: the device's state is undefined from now on
                raise
            for sequence, state in zip(batch.sampled, remembered, strict=True):
                sequence.sampler_state = state
            if _out_of_memory(error):
                error.__traceback__ = None  # its frames hold the tensors that there was no room for
            return [], error

    def _run(self, batch: Batch) -> list[Sampled]:
        logits = self._provider.run(batch)
        count = len(batch.sampled)
        if not count:
            return []
        shape = tuple(logits.shape)
        if len(shape) != 2 or shape[0] != count or shape[1] < 1:
            raise ProviderError(f"the model returned logits of shape {shape} for {count} sequences")
        sampled = self._sampler.sample(logits, batch.sampled)
        if len(sampled) != count:
            raise ProviderError(f"sampling returned {len(sampled)} tokens for {count} sequences")
        return sampled


def take(sequence: Sequence, sampled: Sampled, tokenizer: Tokenizer) -> tuple[TokenLogprob | None, Finished | None]:
    """Appends one token and its text, which goes to `pending`. The end token is never shown.

    Returns its log-probability, to be attached to the bytes that are pending now, and the outcome of a sequence that ends.
    """
    sequence.tokens.append(sampled.token_id)
    decoder = sequence.detokenizer
    at_eos = sampled.token_id in tokenizer.eos_ids and not sequence.prompt.limits.ignore_eos
    if not at_eos:
        sequence.pending += decoder.push(sampled.token_id)
    stops = at_eos or decoder.stopped_by is not None
    ends = stops or sequence.n_generated >= sequence.max_tokens
    if ends:
        sequence.pending += decoder.finish()
    note = None
    if sampled.logprob is not None and not at_eos:
        note = _logprob(tokenizer, sampled.token_id, sampled.logprob, sampled.top)
    if not ends:
        return note, None
    return note, Finished("stop" if stops else "length", usage_of(sequence), decoder.stopped_by)


def usage_of(sequence: Sequence) -> Usage:
    """Its tokens so far."""
    return Usage(sequence.n_prompt, sequence.n_generated, min(sequence.n_cached, sequence.n_prompt))


def _logprob(tokenizer: Tokenizer, token: int, value: float, top: Iterable[tuple[int, float]] = ()) -> TokenLogprob:
    alternatives = tuple(_logprob(tokenizer, other, its_value) for other, its_value in top)
    return TokenLogprob(token, tokenizer.token_bytes(token), value, alternatives)


def _out_of_memory(error: Exception) -> bool:
    """torch has a class for a GPU's memory and only a sentence for the CPU's."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _free_device_memory() -> None:
    torch = sys.modules.get("torch")  # never a reason to load it
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
