"""How many answers each caller streams now: one key cannot take every place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from astrai_runtime.errors import RateLimited


class StreamPlaces:
    """Used from one event loop."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._open: Counter[str] = Counter()

    @contextmanager
    def one(self, caller: str) -> Iterator[None]:
        """A place for one streamed answer.

        Raises:
            RateLimited: this caller streams as many as it may.
        """
        if self._open[caller] >= self._each:
            raise RateLimited(
                f"{self._each} answers are being streamed to this caller, which is all that may; end one first"
            )
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]
