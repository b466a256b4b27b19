"""The bounded pool in which bodies are validated, and prompts rendered and tokenized."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from astrai_runtime.errors import Busy

T = TypeVar("T")
BACKLOG = 32  # jobs that may wait for each thread


class Workers:
    """`count` threads and a bounded queue. Used from one event loop."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="prepare")
        self._room = count * (BACKLOG + 1)

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result, from a thread.

        Raises:
            Busy: too many jobs are waiting already. Whatever the job raises.
        """
        if self._room == 0:
            raise Busy("too many requests are being prepared; try again soon")
        self._room -= 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        finally:
            self._room += 1

    def close(self) -> None:
        """Drops waiting jobs; running ones end by themselves. Safe to call twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)
