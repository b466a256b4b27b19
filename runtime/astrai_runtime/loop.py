"""What the engine thread does, tick by tick: pass waiting bytes on, end what has to end, admit, compute, deliver."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

from astrai_runtime import log
from astrai_runtime.batch import Batch
from astrai_runtime.errors import AstraiError, Cancelled, DeadlineExpired, NotReady, ProviderError
from astrai_runtime.event import Failed, Finished, Outcome
from astrai_runtime.inflight import InFlight
from astrai_runtime.kv.base import KVStats
from astrai_runtime.provider.base import Provider
from astrai_runtime.sampling._pipeline import Sampled, Sampler
from astrai_runtime.sequence import Sequence, SequenceFault
from astrai_runtime.step import Done, Lost, Stepper, take, usage_of

if TYPE_CHECKING:
    from astrai_runtime.scheduler.base import Scheduler

FULL_CHECK_S = 30.0  # the pool's accounting is proved no more often than that, and only while there is nothing to do


class Loop:
    """One engine's ticks. Its thread alone calls these methods, whose exceptions end a life of the engine."""

    def __init__(
        self, provider: Provider, scheduler: Scheduler, sampler: Sampler, flight: InFlight, undrained_ttl_s: float | None
    ) -> None:
        self._provider = provider
        self._scheduler = scheduler
        self._stepper = Stepper(provider, sampler)
        self._flight = flight
        self._counters = flight.counters
        self._ttl = undrained_ttl_s
        self._log = log.get("engine")
        self.kv_stats: KVStats = provider.kv.stats()
        self._proved_at = time.monotonic()  # when the pool's accounting was last proved

    def tick(self) -> bool:
        """One step of everything. False: there was nothing to compute."""
        self._release_finished()
        try:
            self._admit_waiting()
            batch = self._scheduler.next_batch()
        except SequenceFault as fault:
            self._fail(fault.sequence, fault.error)
            self._mend()
            return True
        if batch is not None:
            self._note_starts(batch)
            for part in self._stepper.compute(batch):
                if isinstance(part, Lost):
                    self._fail(part.sequence, part.error)
                    continue
                self._deliver(part)
            self._counters.ticks += 1
        self._counters.preemptions = self._scheduler.preemptions
        self._counters.step_faults = self._stepper.faults
        self._note_kv()
        return batch is not None

    def patience(self) -> float | None:
        """Seconds until the first request is overdue; None: nothing is timed."""
        due = []
        for sequence in self._flight.everyone():
            limit = sequence.prompt.limits.deadline_s
            if limit is not None and sequence.stream.outcome is None:
                due.append(sequence.arrived_at + limit)
            if self._ttl is not None and (sequence.ended or sequence.paused):
                due.append(sequence.stream.ignored_since + self._ttl)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def prove(self) -> None:
        """Proves the pool's accounting while there is nothing to do.

        Raises:
            AssertionError: it does not add up.
        """
        stats, now = self.kv_stats, time.monotonic()
        assert stats.free + stats.held + stats.cached == stats.total, f"slots were lost or counted twice: {stats}"
        if now >= self._proved_at + FULL_CHECK_S:
            self._provider.kv.check_integrity(self._admitted())
            self._proved_at = now

    def reset(self) -> None:
        """Forgets every sequence and empties the pool, which then adds up.

        Raises:
            Exception: it cannot be emptied.
        """
        self._scheduler.reset()
        self._provider.kv.check_integrity([])
        self._note_kv()

    def end_all(self) -> None:
        """Answers everyone: the service stops."""
        for sequence in self._flight.everyone():
            if sequence.stream.outcome is None:
                begun = sequence.first_token_at is not None
                gone = Cancelled("the service stopped before this answer was complete")
                error = gone if begun else NotReady(f"model '{self._provider.info.name}' has stopped")
                self._end(sequence, Failed(error, usage_of(sequence)))
            self._scheduler.remove(sequence)
            self._flight.forget(sequence)
        self._note_kv()

    # -- before the step -----------------------------------------------------------------------------------------

    def _release_finished(self) -> None:
        """Moves waiting bytes on, ends what was cancelled or is overdue, frees the places of what was read to its end."""
        now = time.monotonic()
        for sequence in self._flight.everyone():
            stream = sequence.stream
            if stream.outcome is None:
                if outcome := self._early_end(sequence, now):
                    self._end(sequence, outcome)
                self._flush(sequence)
            if stream.outcome is not None and self._given_up(sequence, now):
                self._scheduler.remove(sequence)
                self._flight.forget(sequence)

    def _early_end(self, sequence: Sequence, now: float) -> Outcome | None:
        limit = sequence.prompt.limits.deadline_s
        if sequence.stream.cancelled:
            return Finished("cancelled", usage_of(sequence))
        if limit is not None and now >= sequence.arrived_at + limit:
            self._counters.expired += 1
            return Failed(DeadlineExpired(f"the answer was not complete after {limit:g} seconds"), usage_of(sequence))
        if self._ttl is not None and sequence.paused and self._unread_for_long(sequence, now):
            self._counters.abandoned += 1
            return Failed(DeadlineExpired(f"nobody read this answer for {self._ttl:g} seconds"), usage_of(sequence))
        if self._flight.draining and sequence.row is None and not sequence.preemptions and not sequence.ended:
            return Failed(NotReady(f"model '{self._provider.info.name}' is shutting down"), usage_of(sequence))
        return None

    def _given_up(self, sequence: Sequence, now: float) -> bool:
        """Its place may be used again: unread output is part of ownership."""
        stream = sequence.stream
        if stream.drained or stream.cancelled or sequence not in self._scheduler.running:
            return True
        if self._unread_for_long(sequence, now):
            self._counters.abandoned += not isinstance(stream.outcome, Failed)  # that one was counted when it failed
            return True
        return False

    def _unread_for_long(self, sequence: Sequence, now: float) -> bool:
        return self._ttl is not None and now >= sequence.stream.ignored_since + self._ttl

    def _admit_waiting(self) -> None:
        for sequence in self._flight.arrivals():
            if not sequence.ended:
                self._scheduler.add(sequence)
        self._scheduler.admit()

    def _note_starts(self, batch: Batch) -> None:
        now = time.monotonic()
        for chunk in batch.chunks:
            if chunk.sequence.started_at is None:
                chunk.sequence.started_at = now
                self._flight.tell(self._flight.observe.queued, now - chunk.sequence.arrived_at)

    # -- after the step ------------------------------------------------------------------------------------------

    def _deliver(self, part: Done) -> None:
        try:
            self._scheduler.complete(part.batch)
        except SequenceFault as fault:
            self._fail(fault.sequence, fault.error)
            self._mend()
        now = time.monotonic()
        for sequence, token in zip(part.batch.sampled, part.sampled, strict=True):
            if not sequence.ended:
                self._advance(sequence, token, now)

    def _advance(self, sequence: Sequence, sampled: Sampled, now: float) -> None:
        """One more token of one sequence; whatever its text does wrong never takes the others down."""
        self._counters.generated_tokens += 1
        self._note_token(sequence, now)
        try:
            note, outcome = take(sequence, sampled, self._provider.tokenizer)
        except Exception as error:  # noqa: BLE001
            self._fail(sequence, error)
            return
        self._flush(sequence)
        if note is not None:
            sequence.stream.note(note)
        if outcome is not None:
            self._end(sequence, outcome)

    def _note_token(self, sequence: Sequence, now: float) -> None:
        before, sequence.last_token_at = sequence.last_token_at, now
        if before is None:
            sequence.first_token_at = now
            self._flight.tell(self._flight.observe.first_token, now - sequence.arrived_at)
        else:
            self._flight.tell(self._flight.observe.token_gap, now - before)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """The client is told a sentence; what happened inside is for the log."""
        where = "".join(traceback.format_exception(error, limit=-8))
        self._log.error("sequence_failed", sequence=sequence.id, error=repr(error), traceback=where)
        self._counters.faults += 1
        told = error if isinstance(error, AstraiError) else ProviderError("the model failed while it worked on this request")
        told.__traceback__ = told.__cause__ = told.__context__ = None  # their frames hold the step's tensors
        self._end(sequence, Failed(told, usage_of(sequence)), keep=False)

    def _end(self, sequence: Sequence, outcome: Outcome, *, keep: bool = True) -> None:
        """Decides the outcome and takes the KV back; the place stays taken until the reader has seen the end."""
        sequence.outcome = outcome
        if isinstance(outcome, Failed) or outcome.reason == "cancelled":
            sequence.pending.clear()
        try:
            self._scheduler.retire(sequence, keep=keep)
        except SequenceFault as fault:  # nobody knows what it still holds
            self._log.error("kv_damaged", error=repr(fault))
            self._scheduler.recompute()
        self._flush(sequence)

    def _flush(self, sequence: Sequence) -> None:
        if sequence.pending:
            del sequence.pending[: sequence.stream.put(sequence.pending)]
        if sequence.outcome is not None and not sequence.pending and sequence.stream.outcome is None:
            self._flight.answer(sequence, sequence.outcome)

    def _mend(self) -> None:
        """After the KV mode raised: its accounting still adds up, or the pool is emptied and everybody recomputed."""
        try:
            self._provider.kv.check_integrity(self._admitted())
        except Exception as error:  # noqa: BLE001
            self._log.error("kv_damaged", error=repr(error))
            self._scheduler.recompute()

    def _admitted(self) -> list[Sequence]:
        return [sequence for sequence in self._scheduler.running if sequence.row is not None]

    def _note_kv(self) -> None:
        try:
            self.kv_stats = self._provider.kv.stats()
        except Exception as error:  # noqa: BLE001  nothing depends on it but a display and `prove`
            self._log.error("kv_stats_failed", error=repr(error))
