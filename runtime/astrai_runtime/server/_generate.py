"""From a turn to events: one stream a choice, gathered into completions or merged as they come."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING

from astrai_runtime.errors import AstraiError
from astrai_runtime.event import Delta, Event, Failed, TokenLogprob
from astrai_runtime.protocols.base import Completion
from astrai_runtime.request import Prompt
from astrai_runtime.stream import Stream

if TYPE_CHECKING:
    from astrai_runtime.generate import TextInterface


def submit_choices(engine: TextInterface, prompts: Sequence[Prompt], n: int) -> list[Stream]:
    """`n` generations of each prompt, prompt by prompt: under seed, seed + 1, ... or each under a fresh one.

    All are accepted, or none.

    Raises:
        Busy, InvalidRequest, CapacityExceeded: as `Engine.submit`.
    """
    streams: list[Stream] = []
    try:
        for prompt, index in itertools.product(prompts, range(n)):
            seed = prompt.sampling.seed
            own = seed if seed is None else (seed + index) % 2**63
            sampling = dataclasses.replace(prompt.sampling, seed=own)
            streams.append(engine.submit(dataclasses.replace(prompt, sampling=sampling)))
    except AstraiError:
        discard(streams)
        raise
    return streams


def discard(streams: Sequence[Stream]) -> None:
    """Cancels what still runs and drops what was not read. Safe to call twice."""
    for stream in streams:
        stream.discard()


async def gather(streams: Sequence[Stream]) -> list[Completion]:
    """Every choice's whole text. The first failure cancels the other choices."""

    async def collect(index: int, stream: Stream) -> Completion:
        text: list[str] = []
        logprobs: list[TokenLogprob] = []
        async for event in stream.events_async():
            if isinstance(event, Delta):
                text.append(event.text)
                logprobs.extend(event.logprobs)
                continue
            if isinstance(event, Failed):
                for other in streams:
                    other.cancel()
            outcome = event
        return Completion(index, "".join(text), outcome, tuple(logprobs))

    return list(await asyncio.gather(*(collect(index, stream) for index, stream in enumerate(streams))))


async def merge(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event], None]:
    """(choice, event) pairs as they come. Ends after the last choice's outcome."""
    if len(streams) == 1:
        async for event in streams[0].events_async():
            yield 0, event
        return

    async def step(source: AsyncIterator[Event]) -> Event:
        return await anext(source)

    sources = [stream.events_async() for stream in streams]
    waiting = {asyncio.create_task(step(source)): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                event = task.result()
                if isinstance(event, Delta):
                    waiting[asyncio.create_task(step(sources[index]))] = index
                yield index, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
