"""llama.cpp through llama-cpp-python as a side: `side_llama_cpp.py FILE.gguf THREADS`. Matrices only: nothing is sampled."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import llama_cpp as api
from _lines import answer_lines
from _steps import percentile

STREAMS, CONTEXT, CHUNK = 16, 1024, 512


class LlamaCpp:
    """Answers the verbs `prefill` and `decode` with the same ids as the other sides."""

    def __init__(self, path: str, threads: int) -> None:
        began = time.perf_counter()
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        given = api.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_ubatch, given.n_seq_max = STREAMS * CONTEXT, 2048, CHUNK, STREAMS
        given.n_threads = given.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, given)
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(CHUNK, 0, 1)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self.about = {"load_s": time.perf_counter() - began, "version": api.__version__, "limit": True}

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        return {"prefill": self.prefill, "decode": self.decode}

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether logits are wanted)."""
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self._batch.token[i], self._batch.pos[i] = token, position
            self._batch.n_seq_id[i], self._batch.seq_id[i][0], self._batch.logits[i] = 1, sequence, wanted
        self._batch.n_tokens = len(rows)
        if api.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        api.llama_synchronize(self._context)

    def _prompt(self, ids: list[int], sequence: int) -> None:
        for at in range(0, len(ids), CHUNK):
            piece = ids[at : at + CHUNK]
            self._step([(t, at + i, sequence, at + i == len(ids) - 1) for i, t in enumerate(piece)])

    def prefill(self, ids: list[int]) -> dict[str, float]:
        api.llama_memory_clear(self._memory, False)
        began = time.perf_counter()
        self._prompt(ids, 0)
        return {"tok_s": len(ids) / (time.perf_counter() - began)}

    def decode(self, prompts: list[list[int]], new: int, limit_s: float = 60.0) -> dict[str, Any]:
        """The first prompt is computed and its keys and values copied for the other streams, which is quicker to set up.

        Fewer than `new` tokens after `limit_s`: beside a busy process a step may take seconds.
        """
        api.llama_memory_clear(self._memory, False)
        self._prompt(prompts[0], 0)
        for sequence in range(1, len(prompts)):
            api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        length = len(prompts[0])
        lasted = []
        for i in range(new + 1):
            rows = [((i * 31 + s * 7919) % self._vocabulary, length + i, s, True) for s in range(len(prompts))]
            began = time.perf_counter()
            self._step(rows)
            lasted.append(time.perf_counter() - began)
            if sum(lasted) > limit_s and i:
                break
        lasted = lasted[1:]  # the first one does the copying
        return {
            "tok_s": len(prompts) * len(lasted) / sum(lasted),
            "p50_ms": percentile(lasted, 0.5) * 1000,
            "p95_ms": percentile(lasted, 0.95) * 1000,
        }


if __name__ == "__main__":
    side: list[LlamaCpp] = []
    silent = api.llama_log_callback(lambda *_: None) if hasattr(api, "llama_log_callback") else None
    if silent is not None:
        api.llama_log_set(silent, ctypes.c_void_p(0))

    def start() -> Mapping[str, Callable[..., Any]]:
        side.append(LlamaCpp(sys.argv[1], int(sys.argv[2])))
        return side[0].verbs()

    answer_lines(start, lambda: side[0].about)
