"""How long each part of a start took, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable


class Laps:
    """A clock that is read at the end of each part. `parts`: seconds by name, in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """What happened since the last lap was `part`; a part that comes twice is added up."""
        now = self._clock()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now
