"""The memory's read bandwidth as a side: `side_ceiling.py THREADS`; a decode step can read its weights no faster."""

from __future__ import annotations

import sys
import time

import torch
from _lines import answer_lines

BYTES = 512 * 2**20  # far more than any cache


class Ceiling:
    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._floats = torch.ones(BYTES // 4)

    def read(self) -> float:
        """GB/s, the best of five passes: whatever disturbs a pass only makes it slower."""
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            self._floats.sum()
            best = min(best, time.perf_counter() - began)
        return BYTES / best / 1e9


if __name__ == "__main__":
    answer_lines(lambda: {"read": Ceiling(int(sys.argv[1])).read}, dict)
