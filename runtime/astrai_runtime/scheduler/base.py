"""The contract of a scheduler: which sequences take part in the next step, and with how many tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from astrai_runtime.batch import Batch
from astrai_runtime.kv.base import KVMode
from astrai_runtime.part import PartConfig
from astrai_runtime.sequence import Sequence


class SchedulerConfig(PartConfig):
    """Options that every scheduler shares."""

    max_batch_size: int  # sequences that are admitted at once
    max_batch_tokens: int  # tokens in one step, prompts and decoding together
    max_waiting: int  # requests that may wait for a place; one more is refused at once


class Scheduler(ABC):
    """Orders work; owned by the engine thread. Knows sequences and the KV mode; no tensors, no threads, no clock."""

    def __init__(self, config: SchedulerConfig, kv: KVMode) -> None:
        self.config = config
        self.kv = kv

    @abstractmethod
    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the waiting queue."""

    @abstractmethod
    def admit(self) -> None:
        """Moves waiting sequences in while there are rows and room for them, first come first served."""

    @abstractmethod
    def next_batch(self) -> Batch | None:
        """The next step: at most one decode token a sequence, then prompt tokens under `max_batch_tokens`.

        Reserves the slots of every chunk; may preempt (its tokens are kept and recomputed later). None: nothing to do.
        """

    @abstractmethod
    def complete(self, batch: Batch) -> None:
        """Records that the batch's tokens are in the cache: advances `n_computed`."""

    @abstractmethod
    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Takes a sequence out, wherever it is, and releases its KV (see `KVMode.release`)."""

    @property
    @abstractmethod
    def running(self) -> Iterable[Sequence]:
        """Admitted sequences."""

    @property
    @abstractmethod
    def waiting(self) -> Iterable[Sequence]:
        """Sequences that are not admitted, in order."""
