"""Continuous batching: sequences join and leave at every step; prompts and decoding share one packed batch.

Orca (Yu et al., OSDI 2022) for the idea; prompts enter in chunks, as in Sarathi-Serve (arXiv:2403.02310), so that a long
one never keeps others from their next token. When the pool is full the youngest is preempted by recomputation, as in
vLLM (arXiv:2309.06180). The oldest sequence whose reader keeps up can always take every slot, so that a step without
progress is impossible while there is work.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.kv.base import KVMode
from astrai_runtime.scheduler.base import Scheduler, SchedulerConfig
from astrai_runtime.sequence import Sequence


class ContinuousConfig(SchedulerConfig):
    kind: Literal["continuous"]
    max_prompt_tokens_per_tick: PositiveInt  # tokens of one prompt in one step

    @model_validator(mode="after")
    def _every_sequence_decodes(self) -> Self:
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} must be at least max_batch_size={self.max_batch_size}: "
                "every sequence gets one token a step"
            )
        return self


class ContinuousScheduler(Scheduler):
    """First come, first served; the oldest sequence wins every conflict over slots."""

    Config: ClassVar[type[ContinuousConfig]] = ContinuousConfig

    def __init__(self, config: ContinuousConfig, kv: KVMode) -> None:
        super().__init__(config, kv)
        self._prompt_cap = config.max_prompt_tokens_per_tick
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._short = False  # the pool ran out; nobody is admitted until somebody leaves
        self._turn = 0  # whose prompt goes first
        self._last_backend: str | None = ""  # no name: nothing was served yet

    @property
    def running(self) -> list[Sequence]:
        return self._running

    @property
    def waiting(self) -> deque[Sequence]:
        return self._waiting

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def admit(self) -> None:
        free = self.config.max_batch_size - len(self._running) - sum(one.preemptions > 0 for one in self._waiting)
        for sequence in list(self._waiting):
            if sequence.preemptions == 0 and free == 0:
                return
            if self._short and any(not other.ended and not other.paused for other in self._running):
                return
            if sequence.paused:  # preempted while its reader is slow: it would only hold slots that others can use
                continue
            cached_at_first = sequence.n_cached
            if not self.kv.reserve(sequence):
                return
            if sequence.preemptions:
                sequence.n_cached = cached_at_first  # what it finds now is its own, no saving
            else:
                free -= 1
            self._waiting.remove(sequence)
            bisect.insort(self._running, sequence, key=lambda s: s.id)

    def next_batch(self) -> Batch | None:
        able = [sequence for sequence in self._running if not sequence.ended and not sequence.paused]
        for backend in self._backends_in_turn(able):
            chunks = self._fill([sequence for sequence in able if sequence.prompt.backend == backend])
            if chunks:
                self._last_backend = backend
                return Batch(tuple(chunks))
        return None

    def complete(self, batch: Batch) -> None:
        for chunk in batch.chunks:
            chunk.sequence.n_computed = chunk.end

    def retire(self, sequence: Sequence, *, keep: bool = True) -> None:
        self.kv.release(sequence, keep=keep)
        self._short = False
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)

    def _backends_in_turn(self, able: list[Sequence]) -> Iterator[str | None]:
        """The backends that are asked for; the one that served last comes last."""
        wanted = list(dict.fromkeys(sequence.prompt.backend for sequence in able))
        at = wanted.index(self._last_backend) + 1 if self._last_backend in wanted else 0
        return iter(wanted[at:] + wanted[:at])

    def _fill(self, group: list[Sequence]) -> list[Chunk]:
        """One step's chunks: a token of everyone who decodes, then prompts in turn, each under its cap."""
        chunks: dict[int, Chunk] = {}
        for sequence in group:
            if sequence.row is not None and sequence.decoding and self._make_room(sequence, 1, chunks):
                chunks[sequence.id] = Chunk(sequence, sequence.n_computed, 1, sampled=True)
        prompts = [sequence for sequence in group if sequence.row is not None and not sequence.decoding]
        first = self._turn % len(prompts) if prompts else 0
        self._turn += 1
        for sequence in prompts[first:] + prompts[:first]:
            if sequence.row is None:  # preempted a moment ago
                continue
            left = self.config.max_batch_tokens - sum(chunk.length for chunk in chunks.values())
            length = min(sequence.n_uncomputed, self._prompt_cap, left)
            if length > 0 and self._make_room(sequence, length, chunks):
                last = length == sequence.n_uncomputed
                chunks[sequence.id] = Chunk(sequence, sequence.n_computed, length, sampled=last)
        return list(chunks.values())

    def _make_room(self, sequence: Sequence, length: int, chunks: dict[int, Chunk]) -> bool:
        """Slots for `length` more tokens, at the expense of others if need be. False: it has to wait where it is."""
        while not self.kv.extend(sequence, sequence.n_computed + length):
            self._short = True
            victim = self._victim(sequence)
            if victim is None:
                return False
            chunks.pop(victim.id, None)
            self._preempt(victim)
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Whoever makes no use of its slots (a slow reader), else the youngest, but nobody older than `sequence`."""
        holders = [other for other in self._running if other is not sequence and other.row is not None]
        idle = [other for other in holders if other.paused]
        younger = [other for other in holders if other.id > sequence.id]
        candidates = idle or younger
        return candidates[-1] if candidates else None

    def _preempt(self, victim: Sequence) -> None:
        """Its tokens stay, its KV goes; it comes back as a prompt that includes what it has generated.

        Its place stays its own. Otherwise somebody younger could take it, finish, and keep it until being read, by a
        reader who waits for this one first.
        """
        self.kv.release(victim)
        self._running.remove(victim)
        self._waiting.appendleft(victim)
        victim.preemptions += 1
        self.preemptions += 1


PART = ContinuousScheduler
