"""The first event of an answer, awaited before its status line is sent: what never began can still be refused properly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from astrai_runtime.errors import AstraiError, Busy, CapacityExceeded, InvalidRequest, UpstreamError
from astrai_runtime.event import Event, Failed
from astrai_runtime.server._body import ClientGone

Pair = tuple[int, Event]
REFUSALS = (Busy, CapacityExceeded, InvalidRequest, UpstreamError)  # errors of an answer that was never worked on


class FirstEvent:
    """Wraps the events of `merge`; read `pairs` instead of them, and close it instead of them."""

    def __init__(self, events: AsyncGenerator[Pair, None]) -> None:
        self._events = events
        self._first = asyncio.create_task(_next(events))

    async def refusal(self, within_s: float, gone: asyncio.Task[None]) -> AstraiError | None:
        """Why the answer never began: the service drains, its places are taken, or the one behind it refused or failed.

        None: it began, or may yet.

        Raises:
            ClientGone: the client went away first.
        """
        await asyncio.wait({self._first, gone}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            if gone.done():
                raise ClientGone
            return None
        _, event = self._first.result()
        return event.error if isinstance(event, Failed) and isinstance(event.error, REFUSALS) else None

    async def pairs(self) -> AsyncGenerator[Pair, None]:
        """All of them, the first included."""
        yield await self._first
        async for pair in self._events:
            yield pair

    async def aclose(self) -> None:
        """Ends the events, wherever they are."""
        if self._first.cancel():
            await asyncio.gather(self._first, return_exceptions=True)
        await self._events.aclose()


async def _next(events: AsyncGenerator[Pair, None]) -> Pair:
    return await anext(events)
