"""The contract of a scheduler: which sequences take part in the next step, and with how many tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from astrai_runtime.batch import Batch
from astrai_runtime.errors import Unsupported
from astrai_runtime.kv.base import KVMode
from astrai_runtime.part import PartConfig
from astrai_runtime.sequence import Sequence, SequenceFault

P = ParamSpec("P")
T = TypeVar("T")


class SchedulerConfig(PartConfig):
    """Options that every scheduler shares."""

    max_batch_size: PositiveInt  # sequences that are admitted at once
    max_batch_tokens: PositiveInt  # tokens in one step, prompts and decoding together
    max_waiting: NonNegativeInt  # requests that may wait for a place; one more is refused at once
    undrained_ttl_s: PositiveFloat | None  # seconds without a reader after which an answer gives up its place; null: never


class Scheduler(ABC):
    """Orders work; owned by the engine thread. Knows sequences and the KV mode; no tensors, no threads, no clock.

    Every method that calls the KV mode for a sequence raises `SequenceFault` when that fails, with its own state intact.
    """

    def __init__(self, config: SchedulerConfig, kv: KVMode) -> None:
        self.config = config
        self.kv = kv
        self.preemptions = 0  # times that a sequence's KV was taken away for another's

    @abstractmethod
    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the waiting queue."""

    @abstractmethod
    def admit(self) -> None:
        """Moves waiting sequences in while there are places and room for them: higher priority first, then first come."""

    @abstractmethod
    def next_batch(self) -> Batch | None:
        """The next step: at most one decode token a sequence, then prompt tokens under `max_batch_tokens`.

        Reserves the slots of every chunk; may preempt (its tokens are kept and recomputed later). None: nothing to do.
        Skips sequences that are paused or have ended.
        """

    @abstractmethod
    def complete(self, batch: Batch) -> None:
        """Notes that the batch's tokens are in the cache: advances `n_computed`, and records complete pages for reuse."""

    @abstractmethod
    def retire(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Releases the KV of a sequence that has ended (see `KVMode.release`); a place that it held stays taken.

        A waiting sequence leaves the queue. Safe to call on a sequence that was never added.
        """

    @abstractmethod
    def remove(self, sequence: Sequence) -> None:
        """Frees the place of a retired sequence. Safe to call on one that holds none."""

    @abstractmethod
    def recompute(self) -> None:
        """Empties the KV; whoever ran comes back as preempted, with the tokens that it has. Nobody's answer changes."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets every sequence and empties the KV."""

    def tune(self, *, max_prompt_tokens_per_tick: int) -> None:
        """Changes how many tokens of one prompt a step takes, from the next step on. May be called from any thread.

        Raises:
            Unsupported: this scheduler has no such bound.
        """
        raise Unsupported("this scheduler has no max_prompt_tokens_per_tick")

    @property
    @abstractmethod
    def running(self) -> Iterable[Sequence]:
        """Sequences that hold a place: admitted ones, and retired ones until `remove`."""

    @property
    @abstractmethod
    def waiting(self) -> Iterable[Sequence]:
        """Sequences that are not admitted, in order."""

    def _reserve(self, sequence: Sequence) -> bool:
        return _blaming(sequence, self.kv.reserve)

    def _reuse(self, sequence: Sequence) -> None:
        _blaming(sequence, self.kv.reuse)

    def _next_page(self, sequence: Sequence, length: int) -> Hashable | None:
        return _blaming(sequence, self.kv.next_page, length)

    def _record(self, sequence: Sequence) -> None:
        _blaming(sequence, self.kv.record)

    def _extend(self, sequence: Sequence, length: int) -> bool:
        return _blaming(sequence, self.kv.extend, length)

    def _release(self, sequence: Sequence, *, keep: bool = True) -> None:
        _blaming(sequence, self.kv.release, keep=keep)


def _blaming(
    sequence: Sequence, operation: Callable[Concatenate[Sequence, P], T], *arguments: P.args, **options: P.kwargs
) -> T:
    """Calls an operation of the KV mode for a sequence, which is blamed for whatever it raises."""
    try:
        return operation(sequence, *arguments, **options)
    except Exception as error:
        raise SequenceFault(sequence, error) from error
