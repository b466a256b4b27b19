"""Native decoders of checkpoints, and the runner that takes them step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from astrai_runtime.attention.cpu import Cpu
from astrai_runtime.kernels.base import Format, Isa
from astrai_runtime.kernels.cpu import Library
from astrai_runtime.kv.base import KVMode
from astrai_runtime.model._load import check_tensors, read_spec
from astrai_runtime.model._native import NativeDecoder
from astrai_runtime.model._pack import pack_model
from astrai_runtime.weights._open import open_checkpoint
from tests.model.running import Runner, kv_mode


def load_native(
    library: Library,
    path: Path,
    weights: Format = "float32",
    *,
    isa: Isa | None = None,
    threads: int = 2,
    max_tokens: int = 8,
) -> NativeDecoder:
    """A checkpoint packed and opened. Threads sleep at once: tests share few cores. Larger steps make memory grow."""
    checkpoint = open_checkpoint(path)
    spec, table = read_spec(checkpoint, {})
    check_tensors(checkpoint, spec, table)
    pool = library.pool_open(threads, 0)
    packed = pack_model(library, pool, checkpoint, spec, table, weights, lambda what, done, total: None)
    checkpoint.close()
    kv_dtype = "float32" if weights == "float32" else "bfloat16"
    best = isa or library.runs_here()[0]
    return NativeDecoder(library, spec, packed, pool, isa=best, kv_dtype=kv_dtype, max_tokens=max_tokens, max_logits=2)


class NativeRunner(Runner):
    """One native decoder over one KV mode with storage of its own."""

    def __init__(self, decoder: NativeDecoder, kind: str, weights: Format, **options: Any) -> None:
        dtype = "float32" if weights == "float32" else "bfloat16"
        kv = kv_mode(kind, decoder.spec, dtype=dtype, backend=Cpu(), **options)
        super().__init__(decoder, kv, Cpu())

    def step(self, *chunks: Any) -> torch.Tensor:
        return super().step(*chunks).clone()  # the program writes the next step's logits to the same place


def stale(kv: KVMode) -> None:
    """Fills a pool's storage with NaN, as a failed sequence might leave it: nothing that is computed may notice."""
    table = kv._table  # type: ignore[attr-defined]
    for buffer in table._buffers:
        buffer.fill_(torch.nan)


__all__ = ["NativeRunner", "load_native", "stale"]
