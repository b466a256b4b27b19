"""Where the service stands: loading, ready, draining or failed, and the engine and agent once they are there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from astrai_runtime.errors import NotReady
from astrai_runtime.metrics import Observer, Unobserved

if TYPE_CHECKING:
    from astrai_runtime.agents.base import Agent
    from astrai_runtime.generate import TextInterface

Phase = Literal["loading", "ready", "draining", "failed"]
RETRY_S: dict[Phase, float] = {"loading": 5.0, "ready": 1.0, "draining": 30.0, "failed": 30.0}


class ServerState:
    """Set by the service, read by every request. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._phase: Phase = "loading"
        self._reason = "the model is still loading"
        self._engine: TextInterface | None = None
        self._agent: Agent | None = None
        self._answering = 0
        self._observer: Observer = Unobserved()

    def watch(self, observer: Observer) -> None:
        """Every engine that answers here tells `observer` how long things took."""
        with self._changed:
            self._observer = observer
            if self._engine is not None:
                self._engine.observe = observer

    def ready(self, engine: TextInterface, agent: Agent) -> None:
        """From now on requests are answered."""
        with self._changed:
            self._engine, self._agent = engine, agent
            engine.observe = self._observer
            self._phase, self._reason = "ready", ""

    def drain(self, reason: str = "the service is shutting down") -> None:
        """New requests are refused; running ones go on."""
        with self._changed:
            self._phase, self._reason = "draining", reason

    def fail(self, reason: str) -> None:
        """Requests are refused with this reason until `ready` is called again."""
        with self._changed:
            self._phase, self._reason = "failed", reason

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def reason(self) -> str:
        """Why the service is not ready; empty when it is."""
        with self._changed:
            if self._phase == "ready" and self._engine is not None and not self._engine.ready:
                return f"the engine {self._engine.reason}"
            return self._reason

    @property
    def engine(self) -> TextInterface | None:
        return self._engine

    def require(self) -> tuple[TextInterface, Agent]:
        """The engine and the agent.

        Raises:
            NotReady: the service is loading, draining or failed.
        """
        reason = self.reason
        with self._changed:
            if reason or self._engine is None or self._agent is None:
                raise NotReady(reason or "the model is still loading", retry_after_s=RETRY_S[self._phase])
            return self._engine, self._agent

    @property
    def answering(self) -> int:
        """Requests that are being answered now."""
        return self._answering

    @contextmanager
    def one_answer(self) -> Iterator[None]:
        """Counts a request while it is being answered."""
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Waits until nothing is being answered. False: `timeout` seconds passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._answering == 0, timeout)
