"""Hugging Face transformers as a side: `side_transformers.py FOLDER_OR_GGUF THREADS DTYPE`; greedy, with its KV cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _lines import answer_lines
from _steps import percentile
from transformers import AutoModelForCausalLM


class Transformers:
    """Answers the verbs `prefill` and `decode`: what `generate` does, a forward pass and an argmax a token."""

    def __init__(self, path: Path, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where).eval()
        self.about = {
            "load_s": time.perf_counter() - began,
            "dtype": dtype,
            "version": sys.modules["transformers"].__version__,
        }

    def verbs(self) -> Mapping[str, Callable[..., Any]]:
        return {"prefill": self.prefill, "decode": self.decode}

    def prefill(self, ids: list[int]) -> dict[str, float]:
        began = time.perf_counter()
        with torch.inference_mode():
            self._model(torch.tensor([ids]), logits_to_keep=1).logits.argmax(-1)
        return {"tok_s": len(ids) / (time.perf_counter() - began)}

    def decode(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        lasted = []
        with torch.inference_mode():
            out = self._model(torch.tensor(prompts), logits_to_keep=1, use_cache=True)
            for _ in range(new):
                began = time.perf_counter()
                chosen = out.logits[:, -1:].argmax(-1)
                out = self._model(chosen, past_key_values=out.past_key_values, use_cache=True)
                lasted.append(time.perf_counter() - began)
        return {
            "tok_s": len(prompts) * len(lasted) / sum(lasted),
            "p50_ms": percentile(lasted, 0.5) * 1000,
            "p95_ms": percentile(lasted, 0.95) * 1000,
        }


if __name__ == "__main__":
    side: list[Transformers] = []

    def start() -> Mapping[str, Callable[..., Any]]:
        side.append(Transformers(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
        return side[0].verbs()

    answer_lines(start, lambda: side[0].about)
