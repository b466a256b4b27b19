"""Configuration changes the speed, never the answer: one greedy continuation for every way of computing it.

KV mode and page size x alone or among neighbours of other lengths x prompt in one piece or in chunks, on a random tiny
checkpoint of every architecture, through the real engine. A pool that is too small for everybody is one more column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from astrai_runtime import part
from astrai_runtime.attention.torch_native import TorchNative
from astrai_runtime.engine import Engine
from astrai_runtime.event import Delta
from astrai_runtime.model._torch import TorchDecoder
from astrai_runtime.provider.base import ModelInfo
from astrai_runtime.provider.local import local_provider
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sampling._pipeline import Sampler
from astrai_runtime.scheduler.continuous import ContinuousConfig, ContinuousScheduler
from astrai_runtime.text._hf import from_folder
from astrai_runtime.text.tokenizer import Tokenizer
from astrai_runtime.weights._open import open_checkpoint
from tests.model.running import Runner, kv_mode, load

CONTEXT, COUNT = 96, 12
SOON = 60.0
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_k=40, seed=7, frequency_penalty=0.5)
LENGTHS = (1, 5, 16, 17, 33, 50)  # around page borders, on both sides of the checkpoints' sliding window
PROMPTS = [tuple(3 + (17 * i + 31 * length) % 290 for i in range(length)) for length in LENGTHS]
KV = {
    "contiguous": {},
    "paged_1": {"page_size": 1},
    "paged_4": {"page_size": 4},
    "paged_16": {"page_size": 16},
}
CHUNKS = {"one_piece": 64, "chunks": 7}


class Model:
    """One architecture's decoder and tokenizer, and the reference answers: step by step, contiguous, no engine."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = from_folder(folder)
        self.decoder: TorchDecoder = load(open_checkpoint(folder))
        runner = Runner(self.decoder, kv_mode("contiguous", self.decoder.spec, rows=1, context=CONTEXT))
        self.answers = [runner.greedy(prompt, COUNT) for prompt in PROMPTS]

    def run(
        self, kv: str, chunk: int, groups: list[list[Prompt]], *, pool: int | None = None
    ) -> tuple[list[list[int]], int]:
        """The generated tokens of every prompt, group after group, and how often a sequence was preempted."""
        spec, rows = self.decoder.spec, max(map(len, groups))
        options = dict(KV[kv]) if pool is None else {**KV[kv], "n_tokens": pool}
        mode = kv_mode(kv.partition("_")[0], spec, rows=rows, context=CONTEXT, **options)
        info = ModelInfo("tiny", spec.architecture, spec.n_parameters(), spec.vocab_size, CONTEXT, 0)
        phases = {"prefill": "torch_native", "decode": "torch_native"}
        backends = {"torch_native": TorchNative()}
        provider = local_provider(info, self.tokenizer, None, mode, self.decoder, backends, phases)
        config = ContinuousConfig(
            kind="continuous",
            max_batch_size=rows,
            max_batch_tokens=max(2 * chunk, rows),
            max_waiting=8,
            undrained_ttl_s=None,
            max_prompt_tokens_per_tick=chunk,
        )
        stages = [part.load("sampling", name)() for name in ("penalties", "temperature", "top_k")]
        scheduler = ContinuousScheduler(config, mode)
        engine = Engine(provider, scheduler, Sampler(stages, spec.vocab_size), defaults=GREEDY)
        engine.start()
        try:
            tokens = []
            for group in groups:
                streams = [engine.submit(prompt) for prompt in group]
                events = [list(stream.events(SOON)) for stream in streams]
                tokens += [[note.token_id for e in one if isinstance(e, Delta) for note in e.logprobs] for one in events]
        finally:
            engine.shutdown()
        mode.check_integrity([])
        assert mode.stats().held == 0
        return tokens, scheduler.preemptions


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """Built once each, when first asked for."""
    return {}


@pytest.fixture(params=[*part.names("model"), "mistral"])
def model(request: pytest.FixtureRequest, tiny_checkpoints: Mapping[str, Path], models: dict[str, Model]) -> Model:
    name = request.param
    if name not in models:
        models[name] = Model(tiny_checkpoints[name])
    return models[name]


def asked(tokens: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Prompt:
    """Log-probabilities carry the token ids out of the stream."""
    return Prompt(tokens, sampling, Limits(max_tokens=COUNT, ignore_eos=True), top_logprobs=0)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("company", ["alone", "together"])
@pytest.mark.parametrize("kv", KV)
def test_every_configuration_gives_the_same_greedy_tokens(model: Model, kv: str, company: str, chunk: str) -> None:
    prompts = [asked(tokens) for tokens in PROMPTS]
    groups = [[prompt] for prompt in prompts] if company == "alone" else [prompts]
    tokens, _ = model.run(kv, CHUNKS[chunk], groups)
    assert tokens == model.answers


@pytest.mark.parametrize("kv", [name for name in KV if name != "contiguous"])
def test_pool_that_is_too_small_for_all_gives_the_same_tokens(model: Model, kv: str) -> None:
    tokens, preemptions = model.run(kv, 7, [[asked(tokens) for tokens in PROMPTS]], pool=80)
    assert tokens == model.answers
    assert preemptions > 0


def test_seeded_answers_are_the_same_alone_together_and_preempted(model: Model) -> None:
    prompts = [asked(tokens, replace(SEEDED, seed=i)) for i, tokens in enumerate(PROMPTS)]
    alone, _ = model.run("contiguous", 64, [[prompt] for prompt in prompts])
    together, _ = model.run("paged_4", 7, [prompts])
    squeezed, preemptions = model.run("paged_16", 16, [prompts], pool=80)
    assert alone == together == squeezed
    assert preemptions > 0
    assert alone != model.answers
