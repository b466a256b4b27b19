"""One model's engine: a thread that turns prompts into streams. Every request gets an answer.

What one request breaks fails that request. What breaks the thread itself fails everybody who is being served; then it
begins again with an empty pool, unless that happened too often lately.

Only two things cross threads: the requests in flight (under their lock) and each request's Stream. Everything else
(scheduler, KV mode, provider, sampler) belongs to the engine thread.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from dataclasses import replace
from typing import Literal, Protocol

from astrai_runtime import log
from astrai_runtime.attention._select import required_backend
from astrai_runtime.errors import Busy, InvalidRequest, NotReady, ProviderError, WrongState
from astrai_runtime.event import Failed
from astrai_runtime.generate import Overrides, TextInterface, override
from astrai_runtime.inflight import InFlight
from astrai_runtime.kv.base import KVStats
from astrai_runtime.loop import Loop
from astrai_runtime.metrics import Counters, Observer
from astrai_runtime.provider._accept import accept
from astrai_runtime.provider.base import ModelInfo, Provider
from astrai_runtime.request import Limits, Prompt, SamplingParams, Turn
from astrai_runtime.sampling._pipeline import Sampler
from astrai_runtime.scheduler.base import Scheduler
from astrai_runtime.step import usage_of
from astrai_runtime.stream import Stream

State = Literal["new", "open", "draining", "restarting", "down", "closed"]
MAX_RESTARTS, WITHIN_S = 3, 60.0  # an engine that dies more often than that stays down


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
    """

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
        self._log = log.get("engine")
        self._flight = InFlight()
        self._lock = self._flight.lock
        self._loop = Loop(provider, scheduler, sampler, self._flight, undrained_ttl_s)
        self._state: State = "new"
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
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
        """What the model is doing instead of accepting requests; empty while it accepts them."""
        return {
            "new": "is still loading",
            "open": "",
            "draining": "is shutting down",
            "restarting": "failed and is starting again",
            "down": "failed too often and has stopped; the log says why",
            "closed": "has stopped",
        }[self._state]

    @property
    def restarts(self) -> int:
        """Times that the engine died and began again with an empty pool."""
        return self._flight.counters.restarts

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
            if self._state in ("open", "restarting"):
                self._state = "draining"
                self._flight.draining = True
                self._flight.wake()
            return self._flight.answered.wait_for(
                lambda: not self._flight.unanswered() or self._state in ("down", "closed"), timeout
            )

    def shutdown(self) -> None:
        """Ends every request with an outcome, joins the thread and closes the provider. Safe to call twice."""
        with self._lock:
            self._state = "closed"
            first, self._closing = not self._closing, True
            self._flight.wake()
        if self._thread is not None:
            self._thread.join()
        if first:
            try:
                self.provider.close()
            except Exception:  # noqa: BLE001  everyone was answered; what is left behind ends with the process
                self._complain("close_failed")

    # -- requests, from any thread -------------------------------------------------------------------------------

    def submit(self, prompt: Prompt) -> Stream:
        """Queues a prompt; its tokens arrive in the stream. Never waits.

        Raises:
            InvalidRequest, ContextLengthExceeded, CapacityExceeded, BackendRefused: see `provider/_accept.py`.
            NotReady: not started, draining or stopped. Busy: every place, waiting ones included, is taken; it says to
                try again after about as long as an answer takes.
        """
        stream = Stream(self._stream_bytes, on_change=self._flight.wake)
        sequence = accept(prompt, self.provider, self.sampler, stream)
        with self._lock:
            self._refuse_when_full()
            self._flight.add(sequence)
        return stream

    def _refuse_when_full(self) -> None:
        if self._state != "open":
            self._flight.counters.refused += 1
            raise NotReady(f"model '{self.info.name}' {self.reason}")
        config = self.scheduler.config
        if self._flight.full(config.max_batch_size + config.max_waiting):
            self._flight.counters.refused += 1
            raise Busy(
                f"{config.max_batch_size} requests run and {config.max_waiting} wait, which is all that may",
                retry_after_s=min(max(1.0, self._flight.answer_s), 60.0),
            )

    def tune(self, *, max_prompt_tokens_per_tick: int) -> None:
        """Changes how many tokens of one prompt a tick takes, from the next tick on. May be called from any thread.

        Raises:
            InvalidRequest: less than one. Unsupported: this scheduler has no such bound.
        """
        if max_prompt_tokens_per_tick < 1:
            raise InvalidRequest(f"max_prompt_tokens_per_tick must be at least 1, not {max_prompt_tokens_per_tick}")
        self.scheduler.tune(max_prompt_tokens_per_tick=max_prompt_tokens_per_tick)

    def assemble(self, text: str, limits: Limits, sampling: SamplingParams) -> Prompt:
        """Raw text as the agent tokenizes it; remembers the backend that the surrounding `attn_backend` requires."""
        if self.agent is not None:
            prompt = self.agent.prepare(Turn(sampling, limits, text=text))
        else:
            prompt = Prompt(tuple(self.provider.tokenizer.encode(text)), sampling, limits)
        return replace(prompt, backend=prompt.backend or required_backend())

    def sampling(self, overrides: Overrides) -> SamplingParams:
        return override(self.defaults, overrides, [knob.name for knob in self.sampler.knobs])

    # -- what is seen from outside -------------------------------------------------------------------------------

    @property
    def observe(self) -> Observer:
        """Told by the engine thread how long things took (see `metrics.Observer`); may be set at any time."""
        return self._flight.observe

    @observe.setter
    def observe(self, observer: Observer) -> None:
        self._flight.observe = observer

    def get_stats(self) -> dict[str, int]:
        """The seed's four numbers: requests and generated tokens since the start, requests running and waiting now."""
        with self._lock:
            unanswered = self._flight.unanswered()
            active = sum(sequence.row is not None for sequence in unanswered)
            return {
                "total_tasks": self._flight.counters.requests,
                "total_tokens": self._flight.counters.generated_tokens,
                "active_tasks": active,
                "waiting_queue": len(unanswered) - active,
            }

    def counters(self) -> Counters:
        """A copy of every count."""
        with self._lock:
            return self._flight.counters.snapshot()

    def kv_stats(self) -> KVStats:
        """Token slots by state, as of the last tick."""
        return self._loop.kv_stats

    # -- the engine thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                while self._state != "closed":
                    if not self._loop.tick():
                        self._loop.prove()
                        self._flight.wait(self._loop.patience())
                self._loop.end_all()
                return
            except BaseException:  # noqa: BLE001  this life ends here, and everyone who waits is told
                self._complain("engine_died")
            if not self._begin_again():
                return

    def _begin_again(self) -> bool:
        """Empties the pool and fails whoever was being served. False: this was the last life."""
        with self._lock:
            lives = self._state in ("open", "draining")
            self._state = "restarting" if self._state == "open" else self._state
        self._deaths.append(time.monotonic())
        if len(self._deaths) > MAX_RESTARTS and self._deaths[-1] - self._deaths[0] < WITHIN_S:
            lives = False
        try:
            self._loop.reset()
        except Exception:  # noqa: BLE001
            self._complain("engine_cannot_restart")
            lives = False
        with self._lock:
            if not lives and self._state != "closed":
                self._state = "down"
            self._flight.counters.restarts += lives
            self._fail_all(lives)
            self._state = "open" if self._state == "restarting" else self._state
            self._flight.answered.notify_all()
        if lives:
            self._log.warning("engine_restarted", model=self.info.name, restarts=self.restarts)
        return lives

    def _fail_all(self, lives: bool) -> None:
        """Whose answer is complete still gets what he has not read yet, if there is somebody to pass it on."""
        for sequence in self._flight.everyone():
            if lives and sequence.ended and sequence.stream.outcome is None:
                continue
            self._flight.forget(sequence)
            if sequence.stream.outcome is None:
                error = ProviderError("the engine failed while it worked on this request")
                self._flight.answer(sequence, Failed(error, usage_of(sequence)))
        self._flight.clear_inbox()

    def _complain(self, event: str) -> None:
        """Logs the exception that is being handled, and where it came from: no more of it than helps."""
        self._log.error(event, model=self.info.name, traceback=traceback.format_exc(limit=-8))
