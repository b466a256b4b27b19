"""An engine that computes nothing: it passes prompts to a text provider and its answers into streams.

The same surface, bounds and stream contract as `Engine`: a reader that is slow slows its own answer down and nobody
else's, cancelling ends the work behind it, and every request gets an outcome. One thread runs an event loop for all.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from typing import Literal

from astrai_runtime import log
from astrai_runtime.errors import (
    AstraiError,
    Busy,
    Cancelled,
    DeadlineExpired,
    InvalidRequest,
    NotReady,
    ProviderError,
    Unsupported,
    WrongState,
)
from astrai_runtime.event import Delta, Event, Failed, Finished, Outcome, Usage
from astrai_runtime.generate import Overrides, TextInterface, override
from astrai_runtime.kv.base import KVStats
from astrai_runtime.metrics import Counters, Unobserved
from astrai_runtime.provider.base import ModelInfo, TextProvider
from astrai_runtime.request import Limits, Prompt, SamplingParams, Turn
from astrai_runtime.stream import Stream

_NEUTRAL = {each.name: each.default for each in fields(SamplingParams) if each.name not in {"extra", "seed"}}


@dataclass(eq=False)
class _Errand:
    """One request while it is passed on. Owned by the loop's thread but for `stream`."""

    prompt: Prompt
    stream: Stream
    arrived_at: float = field(default_factory=time.monotonic)
    running: bool = False  # it has a place
    begun: bool = False  # some of its answer has arrived
    why: AstraiError | None = None  # what its task was cancelled for; None: its reader did not want it any more
    room: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    ended_early: bool = False  # its task was cancelled; a second time could cut its cleaning up short
    last_at: float | None = None


class RelayEngine(TextInterface):
    """`Engine`'s surface over a provider that answers in text.

    Args:
        provider: closed by `shutdown`.
        max_running: answers that are passed on at once.
        max_waiting: requests that may wait for a place; one more is refused at once.
        defaults: what `generate` samples with unless its caller says otherwise.
        knobs: sampling fields that are passed on; a request that needs another one is refused.
        stream_bytes: output of one request that may wait for its reader.
        undrained_ttl_s: after that long without a reader a full stream fails, and a finished one gives up its place.
    """

    def __init__(
        self,
        provider: TextProvider,
        *,
        max_running: int,
        max_waiting: int,
        defaults: SamplingParams,
        knobs: Iterable[str],
        stream_bytes: int = 65536,
        undrained_ttl_s: float | None = 300.0,
    ) -> None:
        self.provider = provider
        self.defaults = defaults
        self.observe = Unobserved()
        self._knobs = frozenset(knobs)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._stream_bytes = stream_bytes
        self._ttl = undrained_ttl_s
        self._log = log.get("relay")
        self._lock = threading.RLock()
        self._answered = threading.Condition(self._lock)
        self._state: Literal["new", "open", "draining", "closed"] = "new"
        self._live: set[_Errand] = set()  # submitted and not yet forgotten
        self._counters = Counters()
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(max_running)
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

    @property
    def reason(self) -> str:
        """Why requests are refused; empty while they are accepted."""
        return {"new": "is still loading", "open": "", "draining": "is shutting down", "closed": "has stopped"}[self._state]

    def start(self) -> None:
        """Starts the thread.

        Raises:
            WrongState: it was started before.
        """
        with self._lock:
            if self._state != "new":
                raise WrongState(f"the engine of '{self.info.name}' was started before; build a new one")
            self._state = "open"
            self._thread = threading.Thread(target=self._run, name=f"relay-{self.info.name}", daemon=True)
            self._thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Stops admission, fails whoever still waits for a place, and waits for the rest. False: `timeout` came first."""
        with self._lock:
            if self._state == "open":
                self._state = "draining"
                self._on_loop(self._end_waiting)
            return self._answered.wait_for(lambda: not self._unanswered() or self._state == "closed", timeout)

    def shutdown(self) -> None:
        """Ends every request with an outcome, joins the thread and closes the provider. Safe to call twice."""
        with self._lock:
            self._state = "closed"
            first, self._closing = not self._closing, True
        if self._thread is not None:
            if first:
                self._on_loop(self._loop.stop)
            self._thread.join()
        if first:
            self._loop.close()
            self.provider.close()

    # -- requests, from any thread -------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> Stream:
        """Passes a prompt on; its answer arrives in the stream. Never waits.

        Raises:
            InvalidRequest: it needs a sampling field that is not passed on.
            NotReady: not started, draining or stopped. Busy: every place, waiting ones included, is taken.
        """
        self._refuse_sampling(prompt.sampling)
        errand: _Errand
        stream = Stream(self._stream_bytes, on_change=lambda: self._on_loop(lambda: self._changed(errand)))
        errand = _Errand(prompt, stream)
        with self._lock:
            self._refuse_when_full()
            self._counters.requests += 1
            self._live.add(errand)
            self._on_loop(lambda: self._begin(errand))
        return stream

    def _refuse_sampling(self, sampling: SamplingParams) -> None:
        given = {name: getattr(sampling, name) for name in _NEUTRAL} | dict(sampling.extra)
        for name, value in given.items():
            if name in self._knobs or (name in _NEUTRAL and value == _NEUTRAL[name]):
                continue
            if name == "temperature" or (name == "top_k" and value == -1):
                continue  # greedy and "off" need no stage
            there = ", ".join(sorted(self._knobs)) or "none"
            raise InvalidRequest(f"{name}: this deployment does not pass it on; it passes on: {there}", param=f"/{name}")

    def _refuse_when_full(self) -> None:
        if self._state != "open":
            self._counters.refused += 1
            raise NotReady(f"model '{self.info.name}' {self.reason}")
        places = self._max_running + self._max_waiting
        if len(self._live) >= places and sum(not errand.stream.drained for errand in self._live) >= places:
            self._counters.refused += 1
            raise Busy(f"{self._max_running} requests run and {self._max_waiting} wait, which is all that may")

    def tune(self, *, max_prompt_tokens_per_tick: int) -> None:
        raise Unsupported("this deployment's model answers elsewhere: there is no scheduler here to tune")

    def assemble(self, text: str, limits: Limits, sampling: SamplingParams) -> Prompt:
        """Raw text as it is: the service behind tokenizes it."""
        return Prompt((), sampling, limits, turn=Turn(sampling, limits, text=text))

    def sampling(self, overrides: Overrides) -> SamplingParams:
        return override(self.defaults, overrides, [name for name in self._knobs if name not in _NEUTRAL])

    def get_stats(self) -> dict[str, int]:
        """The seed's four numbers: requests and generated tokens since the start, requests running and waiting now."""
        with self._lock:
            unanswered = self._unanswered()
            active = sum(errand.running for errand in unanswered)
            return {
                "total_tasks": self._counters.requests,
                "total_tokens": self._counters.generated_tokens,
                "active_tasks": active,
                "waiting_queue": len(unanswered) - active,
            }

    def counters(self) -> Counters:
        """A copy of every count. Tokens are those that the service counted."""
        with self._lock:
            return self._counters.snapshot()

    def kv_stats(self) -> KVStats:
        """No slots: the KV is the service's."""
        return KVStats(0, 0, 0, 0)

    # -- the loop's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with self._lock:
                self._state = "closed"
                live = list(self._live)
            for errand in live:
                self._stop(errand, self._stopped(errand))
            tasks = [errand.task for errand in live if errand.task is not None]
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            with self._lock:
                self._live.clear()
                self._answered.notify_all()

    def _stopped(self, errand: _Errand) -> AstraiError:
        if errand.begun:
            return Cancelled("the service stopped before this answer was complete")
        return NotReady(f"model '{self.info.name}' has stopped")

    def _end_waiting(self) -> None:
        for errand in self._unanswered():
            if not errand.running:
                self._stop(errand, NotReady(f"model '{self.info.name}' is shutting down"))

    def _begin(self, errand: _Errand) -> None:
        if errand.stream.outcome is not None:
            return
        errand.task = self._loop.create_task(self._answer(errand))
        errand.task.add_done_callback(lambda task: self._finish(errand, self._cut_off(errand)))
        if self._state == "draining":
            self._stop(errand, NotReady(f"model '{self.info.name}' is shutting down"))
        elif errand.stream.cancelled:
            self._cancel(errand)

    @staticmethod
    def _cut_off(errand: _Errand) -> Outcome:
        """The outcome of a task that was cancelled, perhaps before its first step."""
        return Finished("cancelled", Usage()) if errand.why is None else Failed(errand.why, Usage())

    def _stop(self, errand: _Errand, why: AstraiError) -> None:
        """Ends an errand whose outcome is still open."""
        if errand.stream.outcome is not None:
            return
        errand.why = errand.why or why
        if errand.task is None:
            self._finish(errand, self._cut_off(errand))
        else:
            self._cancel(errand)

    @staticmethod
    def _cancel(errand: _Errand) -> None:
        if errand.task is not None and not errand.ended_early:
            errand.ended_early = True
            errand.task.cancel()

    def _changed(self, errand: _Errand) -> None:
        """Its reader made room, cancelled, or saw the end."""
        errand.room.set()
        if errand.stream.outcome is None and errand.stream.cancelled:
            self._cancel(errand)
        self._forget_drained(errand)

    async def _answer(self, errand: _Errand) -> None:
        """Waits for a place, passes the answer on, and decides the outcome."""
        limit = errand.prompt.limits.deadline_s
        left = None if limit is None else max(0.0, errand.arrived_at + limit - time.monotonic())
        usage = Usage()
        outcome: Outcome
        try:
            async with asyncio.timeout(left), self._places:
                errand.running = True
                self.observe.queued(time.monotonic() - errand.arrived_at)
                outcome = await self._pass_on(errand)
        except asyncio.CancelledError:
            outcome = self._cut_off(errand)
        except TimeoutError:  # only the clock raises it
            self._counters.expired += 1
            outcome = Failed(DeadlineExpired(f"the answer was not complete after {limit} seconds"), usage)
        except AstraiError as error:
            outcome = Failed(error, usage)
        except Exception as error:  # noqa: BLE001  whatever a provider raises concerns its request alone
            self._log.error("relay_failed", error=repr(error), exc_info=error)
            outcome = Failed(ProviderError(f"the provider failed on this request: {error!r}"), usage)
        errand.running = False
        self._finish(errand, outcome)

    async def _pass_on(self, errand: _Errand) -> Finished:
        async with aclosing(self.provider.complete(errand.prompt)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return event
                await self._deliver(errand, event)
        raise ProviderError("the provider's answer has no end")

    async def _deliver(self, errand: _Errand, event: Event) -> None:
        """Puts a piece into the stream, and waits as long as its reader leaves no room."""
        assert isinstance(event, Delta), event
        self._time(errand)
        data = memoryview(event.text.encode())
        while data:
            data = data[errand.stream.put(data) :]
            if data:
                await self._room(errand)
        for note in event.logprobs:
            while errand.stream.room == 0:
                await self._room(errand)
            errand.stream.note(note)

    async def _room(self, errand: _Errand) -> None:
        errand.room.clear()
        if errand.stream.room:
            return
        try:
            async with asyncio.timeout(self._ttl):  # wait_for can lose a cancellation
                await errand.room.wait()
        except TimeoutError:
            self._counters.abandoned += 1
            raise DeadlineExpired(f"nobody read this answer for {self._ttl:g} seconds") from None

    def _time(self, errand: _Errand) -> None:
        now = time.monotonic()
        if errand.last_at is None:
            errand.begun = True
            self.observe.first_token(now - errand.arrived_at)
        else:
            self.observe.token_gap(now - errand.last_at)
        errand.last_at = now

    def _finish(self, errand: _Errand, outcome: Outcome) -> None:
        """Tells the reader how it ended, unless it was told before."""
        if errand.stream.outcome is not None:
            return
        self.observe.finished(outcome.cause)
        with self._lock:
            self._counters.count(outcome)
            self._counters.faults += isinstance(outcome, Failed) and isinstance(outcome.error, ProviderError)
            self._counters.prompt_tokens += outcome.usage.prompt_tokens
            self._counters.generated_tokens += outcome.usage.completion_tokens
            errand.stream.finish(outcome)
            self._answered.notify_all()
        self._forget_drained(errand)
        if self._ttl is not None and errand in self._live:
            self._loop.call_later(self._ttl, self._forget, errand)

    def _forget_drained(self, errand: _Errand) -> None:
        stream = errand.stream
        if stream.outcome is not None and (stream.drained or stream.cancelled):
            self._forget(errand)

    def _forget(self, errand: _Errand) -> None:
        """Gives up its place."""
        with self._lock:
            self._live.discard(errand)

    def _on_loop(self, work: Callable[[], object]) -> None:
        """Runs something on the loop's thread soon; nothing once the loop is gone."""
        with self._lock:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(work)

    def _unanswered(self) -> list[_Errand]:
        with self._lock:
            return [errand for errand in self._live if errand.stream.outcome is None]
