"""OpenVINO GenAI as a side: `side_openvino.py FILE.gguf THREADS`, its continuous batching straight from the file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from _lines import answer_lines
from _steps import percentile


class OpenVino:
    """Answers the verbs `prefill` and `decode`. Greedy; the end token is ignored."""

    def __init__(self, path: str, threads: int) -> None:
        began = time.perf_counter()
        scheduling = genai.SchedulerConfig()
        scheduling.max_num_batched_tokens, scheduling.max_num_seqs = 16 * 640, 16
        scheduling.dynamic_split_fuse, scheduling.enable_prefix_caching = True, True  # as ours: contexts are computed once
        scheduling.cache_size = 1  # GB
        self._pipe = genai.ContinuousBatchingPipeline(path, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._next = 0
        self.about = {"load_s": time.perf_counter() - began, "version": ov.__version__}

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        return {"prefill": self.prefill, "decode": self.decode}

    def _run(self, prompts: list[list[int]], new: int) -> list[float]:
        """Seconds of each step. The first one computes all prompts, each later one a token of each."""
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = new
        wanted.do_sample, wanted.ignore_eos = False, True
        handles = []
        for ids in prompts:
            handles.append(self._pipe.add_request(self._next, ov.Tensor(np.array([ids], dtype=np.int64)), wanted))
            self._next += 1
        lasted = []
        while self._pipe.has_non_finished_requests():
            began = time.perf_counter()
            self._pipe.step()
            lasted.append(time.perf_counter() - began)
        return lasted

    def prefill(self, ids: list[int]) -> dict[str, float]:
        return {"tok_s": len(ids) / sum(self._run([ids], 1))}

    def decode(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        lasted = self._run(prompts, new + 1)[-new:]
        return {
            "tok_s": len(prompts) * len(lasted) / sum(lasted),
            "p50_ms": percentile(lasted, 0.5) * 1000,
            "p95_ms": percentile(lasted, 0.95) * 1000,
        }


if __name__ == "__main__":
    side: list[OpenVino] = []

    def start() -> Mapping[str, Callable[..., Any]]:
        side.append(OpenVino(sys.argv[1], int(sys.argv[2])))
        return side[0].verbs()

    answer_lines(start, lambda: side[0].about)
