"""Continuous batching: sequences join and leave at every step; prompts and decoding share one packed batch.

Orca (Yu et al., OSDI 2022) for the idea; prompts enter in chunks, as in Sarathi-Serve (arXiv:2403.02310), so that a long
one never keeps others from their next token. When the pool is full somebody is preempted by recomputation, as in vLLM
(arXiv:2309.06180).

Every conflict, over places and over slots, is decided by one order: higher priority first, then whoever came first. A
sequence that later ones overtook `PATIENCE` times goes before all that were not, so that nobody waits for ever. The first
sequence of that order whose reader keeps up can always take every slot: while there is work there is progress.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.kv.base import KVMode
from astrai_runtime.scheduler.base import Scheduler, SchedulerConfig
from astrai_runtime.sequence import Sequence

PATIENCE = 16  # times that later sequences of higher priority may take a place or slots from one


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
    """Between equal priorities the oldest sequence wins."""

    Config: ClassVar[type[ContinuousConfig]] = ContinuousConfig

    def __init__(self, config: ContinuousConfig, kv: KVMode) -> None:
        super().__init__(config, kv)
        self._prompt_cap = config.max_prompt_tokens_per_tick
        self._waiting: list[Sequence] = []  # both in the order of `_rank`
        self._running: list[Sequence] = []
        self._short = False  # the pool ran out; nobody is admitted until somebody leaves
        self._blocked: list[Sequence] = []  # ran, but found no slots in the last step
        self._turn = 0  # whose prompt goes first
        self._last_backend: str | None = ""  # no name: nothing was served yet

    @property
    def running(self) -> list[Sequence]:
        return self._running

    @property
    def waiting(self) -> list[Sequence]:
        return self._waiting

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_rank)

    def admit(self) -> None:
        if not self._waiting:
            return
        preempted = [sequence for sequence in self._waiting if sequence.preemptions]  # these have kept their places
        free = self.config.max_batch_size - len(self._running) - len(preempted)
        for sequence in list(self._waiting) if free > 0 else preempted:
            if free <= 0 and not sequence.preemptions:
                continue
            if self._short and self._busy:
                break
            if sequence.paused:  # preempted while its reader is slow: it would only hold slots that others can use
                continue
            if not self._reserve(sequence):
                break
            if not self._extend(sequence, len(sequence.tokens)) and self._busy and self._victim(sequence) is None:
                self._release(sequence)  # it would compute what it soon had to give up: it waits until somebody leaves
                break
            if not sequence.preemptions:
                free -= 1
            self._waiting.remove(sequence)
            bisect.insort(self._running, sequence, key=_rank)
            self._overtake([other for other in self._waiting if not other.paused] + self._blocked, sequence)

    def next_batch(self) -> Batch | None:
        self._blocked.clear()
        able = [sequence for sequence in self._running if not sequence.ended and not sequence.paused]
        for backend in self._backends_in_turn(able):
            chunks = self._fill([sequence for sequence in able if sequence.prompt.backend == backend])
            if chunks:
                self._last_backend = backend
                return Batch(tuple(chunks))
        return None

    def complete(self, batch: Batch) -> None:
        for chunk in batch.chunks:
            if chunk.sequence.row is not None:  # else the pool was emptied meanwhile
                chunk.sequence.n_computed = chunk.end
        for chunk in batch.chunks:
            if chunk.sequence.row is not None:
                self._record(chunk.sequence)

    def retire(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._short = False
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._release(sequence, keep=keep)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)

    def recompute(self) -> None:
        self.kv.reset()
        for sequence in list(self._running):
            sequence.row, sequence.n_computed = None, 0
            if not sequence.ended:
                self._send_back(sequence)
        self._short = False

    def reset(self) -> None:
        for sequence in self._running:
            sequence.row, sequence.n_computed = None, 0
        self._running, self._waiting, self._blocked, self._short = [], [], [], False
        self.kv.reset()

    def tune(self, *, max_prompt_tokens_per_tick: int) -> None:
        self._prompt_cap = max_prompt_tokens_per_tick

    @property
    def _busy(self) -> bool:
        """Somebody computes, and will give its slots back."""
        return any(not other.ended and not other.paused for other in self._running)

    def _backends_in_turn(self, able: list[Sequence]) -> Iterator[str | None]:
        """The backends that are asked for; the one that served last comes last."""
        wanted = list(dict.fromkeys(sequence.prompt.backend for sequence in able))
        at = wanted.index(self._last_backend) + 1 if self._last_backend in wanted else 0
        return iter(wanted[at:] + wanted[:at])

    def _fill(self, group: list[Sequence]) -> list[Chunk]:
        """One step's chunks: a token of everyone who decodes, then prompts in turn, each under its cap."""
        chunks: dict[int, Chunk] = {}
        prompts = []
        for sequence in group:
            if not sequence.decoding:
                prompts.append(sequence)
            elif sequence.row is not None and self._make_room(sequence, 1, chunks):
                chunks[sequence.id] = Chunk(sequence, sequence.n_computed, 1, sampled=True)
        if not prompts:
            return list(chunks.values())
        first, self._turn = self._turn % len(prompts), self._turn + 1
        begun = set[Hashable]()  # pages that this step completes
        for sequence in prompts[first:] + prompts[:first]:
            if sequence.row is None:  # preempted a moment ago
                continue
            self._reuse(sequence)
            left = self.config.max_batch_tokens - sum(chunk.length for chunk in chunks.values())
            length = min(sequence.n_uncomputed, self._prompt_cap, left)
            page = self._next_page(sequence, length)
            if page is not None and page in begun:  # somebody computes it now: the next step finds it
                continue
            if length > 0 and self._make_room(sequence, length, chunks):
                last = length == sequence.n_uncomputed
                chunks[sequence.id] = Chunk(sequence, sequence.n_computed, length, sampled=last)
                begun.add(page)
        return list(chunks.values())

    def _make_room(self, sequence: Sequence, length: int, chunks: dict[int, Chunk]) -> bool:
        """Slots for `length` more tokens, at the expense of others if need be. False: it has to wait where it is."""
        while not self._extend(sequence, sequence.n_computed + length):
            self._short = True
            victim = self._victim(sequence)
            if victim is None:
                self._blocked.append(sequence)
                return False
            chunks.pop(victim.id, None)
            self._preempt(victim)
            self._overtake([victim], sequence)
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Whoever makes no use of its slots (a slow reader), else the last, but nobody who goes before `sequence`."""
        holders = [other for other in self._running if other is not sequence and other.row is not None]
        idle = [other for other in holders if other.paused]
        later = [other for other in holders if _rank(other) > _rank(sequence)]
        candidates = idle or later
        return candidates[-1] if candidates else None

    def _preempt(self, victim: Sequence) -> None:
        """Its tokens stay, its KV goes; it comes back as a prompt that includes what it has generated.

        Its place stays its own. Otherwise somebody later could take it, finish, and keep it until being read, by a
        reader who waits for this one first.
        """
        self._release(victim)
        self._send_back(victim)

    def _send_back(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        bisect.insort(self._waiting, sequence, key=_rank)
        sequence.preemptions += 1
        self.preemptions += 1

    def _overtake(self, left_behind: list[Sequence], winner: Sequence) -> None:
        """Counts against those who came before `winner` that it was served first."""
        patient = [other for other in left_behind if other.id < winner.id]
        for sequence in patient:
            sequence.overtaken += 1
        if any(sequence.overtaken == PATIENCE for sequence in patient):
            self._waiting.sort(key=_rank)
            self._running.sort(key=_rank)


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    """Who goes first: the least."""
    if sequence.overtaken >= PATIENCE:
        return 0, 0, sequence.id
    return 1, -sequence.prompt.limits.priority, sequence.id


PART = ContinuousScheduler
