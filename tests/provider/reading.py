"""A provider without a model: it stores token ids as keys, reads each context back from the pool, and hashes it to logits.

What it says next depends on every token of the context and on nothing else, so a wrong slot, a lost page or a mixed-up
neighbour changes the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from astrai_runtime import part
from astrai_runtime.batch import Batch
from astrai_runtime.engine import Engine
from astrai_runtime.kv.base import KVMode, KVShape
from astrai_runtime.provider.base import ModelInfo, Provider
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sampling._pipeline import Sampler
from astrai_runtime.scheduler.continuous import ContinuousConfig, ContinuousScheduler
from astrai_runtime.sequence import Sequence
from astrai_runtime.text._bytes import byte_tokenizer

VOCABULARY, EOS = 258, 257
STAGES = ("penalties", "logit_bias", "temperature", "top_k", "typical_p", "top_p", "min_p", "mirostat")
GREEDY = SamplingParams(temperature=0.0)
Step = Callable[[Batch], None]


def logits_of(context: list[int]) -> torch.Tensor:
    """[V] logits; printable ASCII only, so that every token is a character and no generation ends by itself."""
    digest = hashlib.sha256(repr(context).encode()).digest()
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))) * 2
    logits[:32] = logits[127:] = -50.0
    return logits


def expected(prompt: list[int], count: int) -> str:
    """The greedy continuation, computed without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens).argmax()))
    return bytes(tokens[len(prompt) :]).decode()


def make_kv(
    kind: str = "paged",
    *,
    rows: int = 8,
    context: int = 256,
    page_size: int = 4,
    n_tokens: int = 2048,
    prefix_cache: bool | str = "auto",
) -> KVMode:
    mode = part.load("kv", kind)
    options: dict[str, Any] = {"kind": kind, "dtype": "float32"}
    if kind == "paged":
        options |= {"page_size": page_size, "n_tokens": n_tokens, "prefix_cache": prefix_cache}
    pool = mode.pool_tokens(mode.Config(**options), rows, context, n_tokens)
    kv: KVMode = mode(mode.Config(**options), KVShape(1, 1, 1, "float32", rows, context, pool))
    kv.attach(torch.zeros(1, pool, 1, 1), torch.zeros(1, pool, 1, 1))
    return kv


class ReadingProvider:
    """Counts steps, and calls `before` at the start of each one, where a test may watch, wait or raise."""

    def __init__(self, kv: KVMode) -> None:
        self.kv = kv
        self.batches: list[Batch] = []
        self.closed = 0
        self.before: Step = lambda batch: None
        self.after: Callable[[Batch, torch.Tensor], None] = lambda batch, logits: None

    def run(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        self.before(batch)
        view = self.kv.place(batch)
        view.k_buffer[0, view.out_cache_loc, 0, 0] = torch.tensor(batch.token_ids, dtype=torch.float32)
        rows = []
        for chunk, row in zip(batch.chunks, view.req_pool_indices.tolist(), strict=True):
            if chunk.sampled:
                slots = view.req_to_token[row, : chunk.end].long()
                rows.append(logits_of([int(value) for value in view.k_buffer[0, slots, 0, 0].tolist()]))
        logits = torch.stack(rows) if rows else torch.empty(0, VOCABULARY)
        self.after(batch, logits)
        return logits

    def close(self) -> None:
        self.closed += 1

    def table(self) -> Provider:
        info = ModelInfo("reader", "none", 0, VOCABULARY, self.kv.shape.context, 0)
        return Provider(info, byte_tokenizer(), None, self.kv, self.run, self.close, frozenset({"torch_native"}))


class CheckedScheduler(ContinuousScheduler):
    """Proves the pool's accounting before every step."""

    def next_batch(self) -> Batch | None:
        self.kv.check_integrity(admitted(self))
        return super().next_batch()


def make_scheduler(kv: KVMode, **options: Any) -> ContinuousScheduler:
    chosen: dict[str, Any] = {
        "max_batch_size": 8,
        "max_batch_tokens": 32,
        "max_waiting": 64,
        "max_prompt_tokens_per_tick": 16,
        **options,
    }
    chosen.setdefault("undrained_ttl_s", 300.0)
    return CheckedScheduler(ContinuousConfig(kind="continuous", **chosen), kv)


class Rig:
    """An engine over a ReadingProvider, with everything that a test looks at.

    At the end of its `with` block nothing is left: no token slot, place or request, and the engine has died `deaths` times.
    """

    def __init__(
        self, kv: KVMode | None = None, *, engine: dict[str, Any] | None = None, deaths: int = 0, **scheduler: Any
    ) -> None:
        self.deaths = deaths
        self.kv = kv or make_kv()
        self.provider = ReadingProvider(self.kv)
        self.scheduler = make_scheduler(self.kv, **scheduler)
        sampler = Sampler([part.load("sampling", name)() for name in STAGES], VOCABULARY)
        self.engine = Engine(self.provider.table(), self.scheduler, sampler, defaults=GREEDY, **(engine or {}))

    def __enter__(self) -> Rig:
        self.engine.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.shutdown()
        self.check()

    def check(self) -> None:
        """Nothing is held once the engine has stopped."""
        assert self.engine.restarts == self.deaths
        counters = self.engine.counters()
        assert counters.requests == counters.finished + counters.cancelled + counters.failed
        assert not list(self.scheduler.running)
        assert not list(self.scheduler.waiting)
        self.kv.check_integrity([])
        stats = self.kv.stats()
        assert stats.held == 0
        assert stats.free + stats.cached == stats.total


def prompt(tokens: str | list[int], max_tokens: int | None = 8, sampling: SamplingParams = GREEDY, **fields: Any) -> Prompt:
    ids = list(tokens.encode()) if isinstance(tokens, str) else tokens
    limits = Limits(max_tokens=max_tokens, **{name: fields.pop(name) for name in ("stop", "deadline_s") if name in fields})
    return Prompt(tuple(ids), sampling, limits, **fields)


def admitted(scheduler: ContinuousScheduler) -> list[Sequence]:
    return [sequence for sequence in scheduler.running if sequence.row is not None]
