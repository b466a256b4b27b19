"""A model whose keys depend on every token before them, as a transformer's do, and whose answer depends on every key.

It stores in each slot a mix of the slot before and the token. A page reused after another beginning, for another identity,
before it was computed or after it was given away changes what is said next.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from astrai_runtime.batch import Batch
from astrai_runtime.engine import Engine
from astrai_runtime.kv.base import KVMode
from astrai_runtime.provider.base import ModelInfo, Provider
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.text._bytes import byte_tokenizer
from tests.provider.reading import GREEDY, VOCABULARY, Rig, make_kv, make_scheduler

Int32s = np.ndarray[Any, np.dtype[np.int32]]
FIRST, LAST = 32, 127  # printable ASCII only: every token is a character, and nothing ends by itself


def begin(prompt: Prompt) -> int:
    """What stands before the first token: everything else that keys depend on."""
    return zlib.crc32(repr((prompt.cache_salt, prompt.cache_identity)).encode()) & 0xFFFF


def mix(before: int, token: int) -> int:
    return (before * 31 + token * 17 + 7) & 0x7FFFFF  # exact in float32


def keys_of(tokens: list[int], start: int) -> Int32s:
    keys, before = [], start
    for token in tokens:
        before = mix(before, token)
        keys.append(before)
    return np.array(keys, np.int32)


def likeliest(keys: Int32s) -> int:
    return FIRST + zlib.crc32(keys.tobytes()) % (LAST - FIRST)


def logits_of(keys: Int32s) -> torch.Tensor:
    """[V] logits with the same winner as `likeliest`."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(zlib.crc32(keys.tobytes())))
    logits[:FIRST] = logits[LAST:] = -50.0
    logits[likeliest(keys)] = 6.0
    return logits


def continuation(prompt: Prompt, count: int) -> list[int]:
    """The greedy answer of a single sequence, without any engine."""
    tokens, start = list(prompt.token_ids), begin(prompt)
    for _ in range(count):
        tokens.append(likeliest(keys_of(tokens, start)))
    return tokens[len(prompt.token_ids) :]


def compute(batch: Batch, kv: KVMode) -> list[Int32s]:
    """Writes the step's keys, and reads the whole context of each sampled sequence back from the pool."""
    view = kv.place(batch)
    pool, table = view.k_buffer.numpy().reshape(-1), view.req_to_token.numpy()
    contexts = []
    for chunk, row in zip(batch.chunks, view.req_pool_indices.tolist(), strict=True):
        slots = table[row, : chunk.end]
        before = int(pool[slots[chunk.start - 1]]) if chunk.start else begin(chunk.sequence.prompt)
        pool[slots[chunk.start :]] = keys_of(chunk.sequence.tokens[chunk.start : chunk.end], before)
        if chunk.sampled:
            contexts.append(pool[slots].astype(np.int32))
    return contexts


class ChainRig(Rig):
    """An engine over this model."""

    def __init__(self, kv: KVMode | None = None, **scheduler: Any) -> None:
        super().__init__(kv or make_kv(), **scheduler)
        info = ModelInfo("chain", "none", 0, VOCABULARY, self.kv.shape.context, 0)
        self.batches: list[Batch] = []
        self.failing: set[tuple[int, ...]] = set()  # prompts whose computation raises

        def run(batch: Batch) -> torch.Tensor:
            self.batches.append(batch)
            if any(chunk.sequence.prompt.token_ids in self.failing for chunk in batch.chunks):
                raise RuntimeError("broken on purpose")
            contexts = compute(batch, self.kv)
            return torch.stack([logits_of(keys) for keys in contexts]) if contexts else torch.empty(0, VOCABULARY)

        table = Provider(info, byte_tokenizer(), None, self.kv, run, lambda: None, frozenset({"torch_native"}))
        self.scheduler = make_scheduler(self.kv, **scheduler)
        self.engine = Engine(table, self.scheduler, self.engine.sampler, defaults=GREEDY)

    def __enter__(self) -> ChainRig:
        super().__enter__()
        return self


def ask(tokens: list[int], count: int = 8, sampling: SamplingParams = GREEDY, **fields: Any) -> Prompt:
    limits = Limits(max_tokens=count, **{name: fields.pop(name) for name in ("stop", "deadline_s") if name in fields})
    return Prompt(tuple(tokens), sampling, limits, **fields)
