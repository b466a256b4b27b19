"""Text in, text out: `generate` and `generate_async` for whatever turns prompts into streams."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping
from collections.abc import Sequence as Items
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, Literal, overload

from astrai_runtime.errors import Busy, Cancelled, DeadlineExpired, InvalidRequest, NotReady, did_you_mean
from astrai_runtime.event import Delta, Event, Failed, Finished
from astrai_runtime.kv.base import KVStats
from astrai_runtime.metrics import Counters, Observer
from astrai_runtime.provider.base import ModelInfo
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.stream import EventReader, Stream

_NAMED = {f.name for f in fields(SamplingParams)} - {"extra"}
Overrides = Mapping[str, Any]


class TextInterface(ABC):
    """What answers, whether it computes or passes on, and plain calls over its streams.

    Text is a raw prompt, no chat; sampling fields are keyword arguments. All calls raise what `submit` raises,
    `DeadlineExpired` when `timeout` seconds pass before the end, and the error that failed the generation.
    """

    observe: Observer  # told how long things took; set it at any time

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """The model that answers."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True while requests are accepted."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why requests are refused; empty while they are accepted."""

    @abstractmethod
    def start(self) -> None:
        """Begins to accept requests. Once."""

    @abstractmethod
    def drain(self, timeout: float | None = None) -> bool:
        """Stops admission, fails whoever still waits for a place, and waits for the rest. False: `timeout` came first."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends every request with an outcome and closes the provider. Safe to call twice."""

    @abstractmethod
    def tune(self, *, max_prompt_tokens_per_tick: int) -> None:
        """Changes a bound of the running scheduler."""

    @abstractmethod
    def get_stats(self) -> dict[str, int]:
        """The seed's four numbers."""

    @abstractmethod
    def counters(self) -> Counters:
        """A copy of every count."""

    @abstractmethod
    def kv_stats(self) -> KVStats:
        """Token slots by state."""

    @abstractmethod
    def submit(self, prompt: Prompt) -> Stream:
        """Queues a prompt without waiting."""

    @abstractmethod
    def assemble(self, text: str, limits: Limits, sampling: SamplingParams) -> Prompt:
        """Tokenizes raw text."""

    @abstractmethod
    def sampling(self, overrides: Overrides) -> SamplingParams:
        """The declared defaults with some fields replaced."""

    @overload
    def generate(
        self,
        prompt: str,
        stream: Literal[False] = False,
        *,
        max_tokens: int | None = None,
        stop: str | Items[str] = (),
        timeout: float | None = None,
        **sampling: Any,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        stream: Literal[False] = False,
        *,
        max_tokens: int | None = None,
        stop: str | Items[str] = (),
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompt: str,
        stream: Literal[True],
        *,
        max_tokens: int | None = None,
        stop: str | Items[str] = (),
        timeout: float | None = None,
        **sampling: Any,
    ) -> Generator[str, None, None]: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        stream: Literal[True],
        *,
        max_tokens: int | None = None,
        stop: str | Items[str] = (),
        timeout: float | None = None,
        **sampling: Any,
    ) -> Generator[tuple[int, str], None, None]: ...

    def generate(
        self,
        prompt: str | list[str],
        stream: bool = False,
        *,
        max_tokens: int | None = None,
        stop: str | Items[str] = (),
        timeout: float | None = None,
        **sampling: Any,
    ) -> str | list[str] | Generator[str, None, None] | Generator[tuple[int, str], None, None]:
        """Continues one text or several at once.

        With `stream` the pieces come as they are generated, those of a list as (index in the list, piece). A list may be
        longer than the engine's queue: the rest follows as places become free. Leaving a generator early cancels.
        """
        limits, params = _limits(max_tokens, stop), self.sampling(sampling)
        texts = [prompt] if isinstance(prompt, str) else prompt
        pieces = self._pieces([self.assemble(text, limits, params) for text in texts], timeout)
        if stream:
            return (piece for _, piece in pieces) if isinstance(prompt, str) else pieces
        answers = [""] * len(texts)
        for index, piece in pieces:
            answers[index] += piece
        return answers[0] if isinstance(prompt, str) else answers

    async def generate_async(
        self,
        prompt: str,
        *,
        max_tokens: int | None = None,
        stop: str | Items[str] = (),
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[str, None]:
        """`generate(prompt, stream=True)` for an event loop."""
        limits = replace(_limits(max_tokens, stop), deadline_s=timeout)
        ready = await asyncio.to_thread(self.assemble, prompt, limits, self.sampling(sampling))
        async with aclosing(self.submit(ready).events_async()) as events:
            async for event in events:
                if piece := _text(event):
                    yield piece

    def _pieces(self, prompts: list[Prompt], timeout: float | None) -> Generator[tuple[int, str], None, None]:
        """Reads every stream from this one thread: (index, piece) in the order of arrival."""
        deadline = None if timeout is None else time.monotonic() + timeout
        arrived = threading.Event()
        waiting, readers = deque(enumerate(prompts)), dict[int, EventReader]()
        try:
            while waiting or readers:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineExpired(f"the answer was not complete after {timeout:g} seconds")
                arrived.clear()
                self._submit_some(waiting, readers, arrived)
                events = [(index, event) for index, reader in readers.items() for event in reader.poll()]
                readers = {index: reader for index, reader in readers.items() if not _closed(reader)}
                for index, event in events:
                    if piece := _text(event):
                        yield index, piece
                if not events and readers:
                    arrived.wait(left)
        finally:
            for reader in readers.values():
                reader.close()

    def _submit_some(
        self, waiting: deque[tuple[int, Prompt]], readers: dict[int, EventReader], arrived: threading.Event
    ) -> None:
        """Submits as many as there are places for; a full queue is an error only when no place of it is ours."""
        while waiting:
            index, prompt = waiting[0]
            try:
                readers[index] = self.submit(prompt).reader(arrived.set)
            except NotReady:
                raise
            except Busy:
                if not readers:
                    raise
                return
            waiting.popleft()


def override(defaults: SamplingParams, overrides: Overrides, knobs: Items[str]) -> SamplingParams:
    """`defaults` with fields replaced; `knobs` are the names of declared stages' knobs, which may go to `extra`.

    Raises:
        InvalidRequest: no such field.
    """
    named = {name: value for name, value in overrides.items() if name in _NAMED}
    extra = {name: value for name, value in overrides.items() if name not in _NAMED}
    for name in extra:
        if name not in knobs:
            known = sorted({*_NAMED, *knobs})
            raise InvalidRequest(f"there is no sampling field '{name}'{did_you_mean(name, known)}", param=f"/{name}")
    if isinstance(named.get("logit_bias"), Mapping):
        named["logit_bias"] = tuple(named["logit_bias"].items())
    return replace(defaults, **named, extra={**defaults.extra, **extra})


def _limits(max_tokens: int | None, stop: str | Items[str]) -> Limits:
    return Limits(max_tokens=max_tokens, stop=(stop,) if isinstance(stop, str) else tuple(stop))


def _closed(reader: EventReader) -> bool:
    """Closes a reader that has seen the end."""
    if reader.ended:
        reader.close()
    return reader.ended


def _text(event: Event) -> str:
    """An event's text; raises what ended the generation unless it ended well."""
    if isinstance(event, Delta):
        return event.text
    if isinstance(event, Failed):
        raise event.error
    if isinstance(event, Finished) and event.reason == "cancelled":
        raise Cancelled("the generation was cancelled before its end")
    return ""
