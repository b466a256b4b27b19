"""One model's engine: a thread that turns prompts into streams. Every request gets an answer.

Only two things cross threads: the inbox (under the engine's lock) and each request's Stream. Everything else (scheduler,
KV mode, provider, sampler) belongs to the engine thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

from astrai_runtime import log
from astrai_runtime.attention._select import required_backend
from astrai_runtime.batch import Batch
from astrai_runtime.errors import (
    AstraiError,
    Busy,
    Cancelled,
    DeadlineExpired,
    NotReady,
    ProviderError,
    WrongState,
)
from astrai_runtime.event import Failed, Finished, Outcome, TokenLogprob, Usage
from astrai_runtime.generate import Overrides, TextInterface, override
from astrai_runtime.kv.base import KVStats
from astrai_runtime.metrics import Counters, Observer, Unobserved
from astrai_runtime.provider._accept import accept
from astrai_runtime.provider.base import ModelInfo, Provider
from astrai_runtime.request import Limits, Prompt, SamplingParams, Turn
from astrai_runtime.sampling._pipeline import Sampled, Sampler
from astrai_runtime.scheduler.base import Scheduler
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream

T = TypeVar("T")


class Assembler(Protocol):
    """What the engine needs of an agent: text to a prompt (see `agents/base.py`)."""

    def prepare(self, turn: Turn) -> Prompt: ...


class Engine(TextInterface):
    """Continuous batching over one provider.

    Args:
        provider: computes logits; closed by `shutdown`.
        scheduler: orders work over the provider's KV mode.
        sampler: the declared pipeline.
        defaults: what `generate` samples with unless its caller says otherwise.
        agent: tokenizes `generate`'s text; None: the tokenizer's own rule.
        stream_bytes: output of one request that may wait for its reader.
        undrained_ttl_s: after that long without a reader a full stream fails, and a finished one gives up its place
            (its text stays readable). None: never.

    Attributes:
        observe: told by the engine thread how long things took (see `metrics.Observer`); set it at any time.
    """

    observe: Observer

    def __init__(
        self,
        provider: Provider,
        scheduler: Scheduler,
        sampler: Sampler,
        *,
        defaults: SamplingParams,
        agent: Assembler | None = None,
        stream_bytes: int = 65536,
        undrained_ttl_s: float | None = 300.0,
    ) -> None:
        self.provider = provider
        self.scheduler = scheduler
        self.sampler = sampler
        self.defaults = defaults
        self.agent = agent
        self._stream_bytes = stream_bytes
        self._ttl = undrained_ttl_s
        self._log = log.get("engine")
        self._lock = threading.RLock()  # a stream that is garbage-collected under it may wake us
        self._work = threading.Condition(self._lock)  # the engine thread waits here
        self._answered = threading.Condition(self._lock)  # drain waits here
        self._state: Literal["new", "open", "draining", "closed"] = "new"
        self._woken = False
        self._inbox: deque[Sequence] = deque()
        self._live: dict[int, Sequence] = {}  # submitted and not yet forgotten, by id
        self._counters = Counters()
        self.observe = Unobserved()
        self._kv_stats = provider.kv.stats()
        self._thread: threading.Thread | None = None
        self._closing = False

    # -- life ----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        return self.provider.info

    @property
    def ready(self) -> bool:
        """True while requests are accepted."""
        return self._state == "open"

    def start(self) -> None:
        """Starts the engine thread.

        Raises:
            WrongState: it was started before.
        """
        with self._lock:
            if self._state != "new":
                raise WrongState(f"the engine of '{self.info.name}' was started before; build a new one")
            self._state = "open"
            self._thread = threading.Thread(target=self._run, name=f"engine-{self.info.name}", daemon=True)
            self._thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Stops admission, fails whoever still waits for a place, and waits for the rest. False: `timeout` came first."""
        with self._lock:
            if self._state == "open":
                self._state = "draining"
                self._wake()
            return self._answered.wait_for(lambda: not self._unanswered() or self._state == "closed", timeout)

    def shutdown(self) -> None:
        """Ends every request with an outcome, joins the thread and closes the provider. Safe to call twice."""
        with self._lock:
            self._state = "closed"
            first, self._closing = not self._closing, True
            self._wake()
        if self._thread is not None:
            self._thread.join()
        if first:
            self.provider.close()

    # -- requests, from any thread -------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> Stream:
        """Queues a prompt; its tokens arrive in the stream. Never waits.

        Raises:
            InvalidRequest, ContextLengthExceeded, CapacityExceeded, BackendRefused: see `provider/_accept.py`.
            NotReady: not started, draining or stopped. Busy: every place, waiting ones included, is taken.
        """
        stream = Stream(self._stream_bytes, on_change=self._on_change)
        sequence = accept(prompt, self.provider, self.sampler, stream)
        with self._lock:
            self._refuse_when_full()
            self._counters.requests += 1
            self._counters.prompt_tokens += sequence.n_prompt
            self._live[sequence.id] = sequence
            self._inbox.append(sequence)
            self._wake()
        return stream

    def _refuse_when_full(self) -> None:
        if self._state != "open":
            self._counters.refused += 1
            why = {"new": "is still loading", "draining": "is shutting down", "closed": "has stopped"}[self._state]
            raise NotReady(f"model '{self.info.name}' {why}")
        config = self.scheduler.config
        places = config.max_batch_size + config.max_waiting
        if len(self._live) >= places and sum(not s.stream.drained for s in self._live.values()) >= places:
            self._counters.refused += 1
            raise Busy(f"{config.max_batch_size} requests run and {config.max_waiting} wait, which is all that may")

    def assemble(self, text: str, limits: Limits, sampling: SamplingParams) -> Prompt:
        """Raw text as the agent tokenizes it; remembers the backend that the surrounding `attn_backend` requires."""
        if self.agent is not None:
            prompt = self.agent.prepare(Turn(sampling, limits, text=text))
        else:
            prompt = Prompt(tuple(self.provider.tokenizer.encode(text)), sampling, limits)
        return replace(prompt, backend=prompt.backend or required_backend())

    def sampling(self, overrides: Overrides) -> SamplingParams:
        return override(self.defaults, overrides, [knob.name for knob in self.sampler.knobs])

    def get_stats(self) -> dict[str, int]:
        """The seed's four numbers: requests and generated tokens since the start, requests running and waiting now."""
        with self._lock:
            unanswered = self._unanswered()
            active = sum(sequence.row is not None for sequence in unanswered)
            return {
                "total_tasks": self._counters.requests,
                "total_tokens": self._counters.generated_tokens,
                "active_tasks": active,
                "waiting_queue": len(unanswered) - active,
            }

    def counters(self) -> Counters:
        """A copy of every count."""
        with self._lock:
            return self._counters.snapshot()

    def kv_stats(self) -> KVStats:
        """Token slots by state, as of the last tick."""
        return self._kv_stats

    # -- the engine thread ---------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """One step of everything. False: there was nothing to compute. Called by the engine thread only."""
        self._release_finished()
        self._admit_waiting()
        batch = self.scheduler.next_batch()
        if batch is not None:
            self._note_starts(batch)
            for part, sampled in self._compute(batch):
                self.scheduler.complete(part)
                self._deliver(part, sampled)
            self._counters.ticks += 1
        self._counters.preemptions = self.scheduler.preemptions
        self._kv_stats = self.provider.kv.stats()
        return batch is not None

    def _release_finished(self) -> None:
        """Moves waiting bytes on, ends what was cancelled or is overdue, frees the places of what was read to its end."""
        now = time.monotonic()
        with self._lock:
            live = list(self._live.values())
        for sequence in live:
            if sequence.stream.outcome is None and (outcome := self._early_end(sequence, now)):
                self._end(sequence, outcome)
            self._flush(sequence)
            if sequence.stream.outcome is not None and self._given_up(sequence, now):
                self.scheduler.remove(sequence)
                with self._lock:
                    del self._live[sequence.id]

    def _early_end(self, sequence: Sequence, now: float) -> Outcome | None:
        limit = sequence.prompt.limits.deadline_s
        if sequence.stream.cancelled:
            return Finished("cancelled", _usage(sequence))
        if limit is not None and now >= sequence.arrived_at + limit:
            return Failed(DeadlineExpired(f"the answer was not complete after {limit:g} seconds"), _usage(sequence))
        if sequence.paused and self._unread_for_long(sequence, now):
            return Failed(DeadlineExpired(f"nobody read this answer for {self._ttl:g} seconds"), _usage(sequence))
        if self._state == "draining" and sequence.row is None and not sequence.preemptions and not sequence.ended:
            return Failed(NotReady(f"model '{self.info.name}' is shutting down"), _usage(sequence))
        return None

    def _given_up(self, sequence: Sequence, now: float) -> bool:
        """Its place may be used again: unread output is part of ownership."""
        stream = sequence.stream
        placed = sequence in self.scheduler.running
        return stream.drained or stream.cancelled or not placed or self._unread_for_long(sequence, now)

    def _unread_for_long(self, sequence: Sequence, now: float) -> bool:
        return self._ttl is not None and now >= sequence.stream.last_read_at + self._ttl

    def _admit_waiting(self) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, deque()
        for sequence in arrived:
            if not sequence.ended:
                self.scheduler.add(sequence)
        self.scheduler.admit()

    def _note_starts(self, batch: Batch) -> None:
        now = time.monotonic()
        for chunk in batch.chunks:
            if chunk.sequence.started_at is None:
                chunk.sequence.started_at = now
                self._tell(self.observe.queued, now - chunk.sequence.arrived_at)

    def _compute(self, batch: Batch) -> Iterable[tuple[Batch, list[Sampled]]]:
        """The step's tokens. When it fails each sequence is tried alone, so that only the offender is lost."""
        try:
            return [(batch, self._step(batch))]
        except Exception as error:  # noqa: BLE001  whatever a model raises concerns its requests, not the engine
            if len(batch.chunks) == 1:
                self._fail(batch.chunks[0].sequence, error)
                return []
            self._log.warning("batch_failed", sequences=len(batch.chunks), error=repr(error))
            return [pair for chunk in batch.chunks for pair in self._compute(Batch((chunk,)))]

    def _step(self, batch: Batch) -> list[Sampled]:
        logits = self.provider.run(batch)
        return self.sampler.sample(logits, batch.sampled) if batch.sampled else []

    def _deliver(self, batch: Batch, sampled: list[Sampled]) -> None:
        for sequence, token in zip(batch.sampled, sampled, strict=True):
            try:
                self._advance(sequence, token)
            except Exception as error:  # noqa: BLE001  one sequence's text never takes the others down
                self._fail(sequence, error)

    def _advance(self, sequence: Sequence, sampled: Sampled) -> None:
        """Appends one token, shows its text, and ends the sequence where it has to end. The end token is never shown."""
        sequence.tokens.append(sampled.token_id)
        self._counters.generated_tokens += 1
        self._note_token(sequence)
        decoder = sequence.detokenizer
        at_eos = sampled.token_id in self.provider.tokenizer.eos_ids and not sequence.prompt.limits.ignore_eos
        if not at_eos:
            sequence.pending += decoder.push(sampled.token_id)
        ends = at_eos or decoder.stopped_by is not None
        if ends or sequence.n_generated == sequence.max_tokens:
            sequence.pending += decoder.finish()
        self._flush(sequence)
        if sampled.logprob is not None and not at_eos:
            sequence.stream.note(self._logprob(sampled.token_id, sampled.logprob, sampled.top))
        if ends or sequence.n_generated == sequence.max_tokens:
            reason: Literal["stop", "length"] = "stop" if ends else "length"
            self._end(sequence, Finished(reason, _usage(sequence), decoder.stopped_by))

    def _note_token(self, sequence: Sequence) -> None:
        now, before = time.monotonic(), sequence.last_token_at
        sequence.last_token_at = now
        if before is None:
            sequence.first_token_at = now
            self._tell(self.observe.first_token, now - sequence.arrived_at)
        else:
            self._tell(self.observe.token_gap, now - before)

    def _tell(self, method: Callable[[T], None], value: T) -> None:
        try:
            method(value)
        except Exception:  # noqa: BLE001  whoever watches must not hurt what is watched
            self._log.exception("observer_failed")
            self.observe = Unobserved()

    def _logprob(self, token: int, value: float, top: Iterable[tuple[int, float]] = ()) -> TokenLogprob:
        alternatives = tuple(self._logprob(other, its_value) for other, its_value in top)
        return TokenLogprob(token, self.provider.tokenizer.token_bytes(token), value, alternatives)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._log.error("sequence_failed", sequence=sequence.id, error=repr(error))
        told = error if isinstance(error, AstraiError) else ProviderError(f"the model failed on this request: {error!r}")
        self._end(sequence, Failed(told, _usage(sequence)), keep=False)

    def _end(self, sequence: Sequence, outcome: Outcome, *, keep: bool = True) -> None:
        """Decides the outcome and takes the KV back; the place stays taken until the reader has seen the end."""
        sequence.outcome = outcome
        if isinstance(outcome, Failed) or outcome.reason == "cancelled":
            sequence.pending.clear()
        self.scheduler.retire(sequence, keep=keep)
        self._flush(sequence)

    def _flush(self, sequence: Sequence) -> None:
        if sequence.pending:
            del sequence.pending[: sequence.stream.put(sequence.pending)]
        if sequence.outcome is not None and not sequence.pending and sequence.stream.outcome is None:
            with self._lock:
                self._counters.count(sequence.outcome)
                sequence.stream.finish(sequence.outcome)
                self._answered.notify_all()
            self._tell(self.observe.finished, sequence.outcome.cause)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._state != "closed":
                if not self.tick():
                    self._wait()
            self._end_all()
        except BaseException as caught:  # noqa: BLE001  the thread dies here, and says so to everyone who waits
            error = caught
            self._log.exception("engine_died", model=self.info.name)
        with self._lock:
            self._state = "closed"
            for sequence in self._live.values():  # only what a dying engine could not end properly
                sequence.stream.finish(Failed(ProviderError(f"the engine stopped: {error!r}"), _usage(sequence)))
            self._live.clear()
            self._inbox.clear()
            self._answered.notify_all()

    def _end_all(self) -> None:
        with self._lock:
            live = list(self._live.values())
        for sequence in live:
            if sequence.stream.outcome is None:
                begun = sequence.first_token_at is not None
                gone = Cancelled("the service stopped before this answer was complete")
                error = gone if begun else NotReady(f"model '{self.info.name}' has stopped")
                self._end(sequence, Failed(error, _usage(sequence)))
            self.scheduler.remove(sequence)
            with self._lock:
                del self._live[sequence.id]
        self._kv_stats = self.provider.kv.stats()

    # -- waking --------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleeps until something changed, or until the next deadline."""
        with self._lock:
            self._work.wait_for(lambda: self._woken or self._state == "closed", self._patience())
            self._woken = False

    def _patience(self) -> float | None:
        """Seconds until the first request is overdue; None: nothing is timed."""
        timed = [(s, s.prompt.limits.deadline_s) for s in self._unanswered()]
        due = [sequence.arrived_at + limit for sequence, limit in timed if limit is not None]
        if self._ttl is not None:
            due += [s.stream.last_read_at + self._ttl for s in self._live.values() if s.ended or s.paused]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _wake(self) -> None:
        self._woken = True
        self._work.notify_all()

    def _on_change(self) -> None:
        with self._lock:
            self._wake()

    def _unanswered(self) -> list[Sequence]:
        return [sequence for sequence in self._live.values() if sequence.stream.outcome is None]


def _usage(sequence: Sequence) -> Usage:
    return Usage(sequence.n_prompt, sequence.n_generated, min(sequence.n_cached, sequence.n_prompt))
