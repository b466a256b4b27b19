"""Configuration changes the speed, never the answer: one greedy continuation for every way of computing it.

KV mode and page size x prefix cache off, cold and warm x alone or among neighbours of other lengths x prompt in one piece
or in chunks, on a random tiny checkpoint of every architecture, through the real engine: the torch interpreter, and the
native program in each precision of its weights. A pool that is too small for everybody is one more column.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from astrai_runtime import part
from astrai_runtime.attention.base import AttentionBackend, Phase
from astrai_runtime.attention.cpu import Cpu
from astrai_runtime.attention.torch_native import TorchNative
from astrai_runtime.batch import Batch, KVView
from astrai_runtime.engine import Engine
from astrai_runtime.event import Delta, Event, Finished
from astrai_runtime.kernels.base import FORMATS, Format
from astrai_runtime.kernels.cpu import Library
from astrai_runtime.kv.base import KVMode
from astrai_runtime.model._native import NativeDecoder
from astrai_runtime.model._torch import TorchDecoder
from astrai_runtime.provider.base import ModelInfo
from astrai_runtime.provider.local import local_provider
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sampling._pipeline import Sampler
from astrai_runtime.scheduler.continuous import ContinuousConfig, ContinuousScheduler
from astrai_runtime.text._hf import from_folder
from astrai_runtime.text.tokenizer import Tokenizer
from astrai_runtime.weights._open import open_checkpoint
from tests.model.native import load_native
from tests.model.running import Runner, kv_mode, load, sequence_of

CONTEXT, COUNT = 96, 12
SOON = 60.0
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_k=40, seed=7, frequency_penalty=0.5)
LENGTHS = (1, 5, 16, 17, 33, 50)  # around page borders, on both sides of the checkpoints' sliding window
PROMPTS = [tuple(3 + (17 * i + 31 * length) % 290 for i in range(length)) for length in LENGTHS]
# Four that fill a pool of 64 tokens and then all grow by a page, and two that only fit when those are gone.
TIGHT = [*(tuple(3 + (17 * i + 41 * n) % 290 for i in range(15)) for n in range(4)), *PROMPTS[4:]]
KV = {
    "contiguous": {},
    "paged_1": {"page_size": 1},
    "paged_4": {"page_size": 4},
    "paged_16": {"page_size": 16},
    "paged_4_unshared": {"page_size": 4, "prefix_cache": False},
}
CHUNKS = {"one_piece": 64, "chunks": 7}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int  # tokens of the prompt


class Model:
    """One architecture's decoder and tokenizer, and the reference answers: one sequence, contiguous, no engine.

    `weights` None: the torch interpreter; otherwise the native program, with its weights so.
    """

    def __init__(self, folder: Path, weights: Format | None, library: Library | None) -> None:
        self.tokenizer: Tokenizer = from_folder(folder)
        self.decoder: TorchDecoder | NativeDecoder
        self.backend: AttentionBackend
        if library is None or weights is None:
            self.decoder, self.backend = load(open_checkpoint(folder)), TorchNative()
        else:
            self.decoder, self.backend = load_native(library, folder, weights), Cpu()
        self.kv_dtype = "float32" if weights in (None, "float32") else "bfloat16"
        self.known: dict[tuple[int, ...], Answer] = {}
        self.answers = [answer.tokens for answer in self.reference([asked(tokens) for tokens in PROMPTS])]

    def reference(self, prompts: list[Prompt]) -> list[Answer]:
        """Each prompt alone, contiguous, no engine."""
        for prompt in prompts:
            if prompt.token_ids not in self.known:
                self.known[prompt.token_ids] = self._alone(prompt.token_ids)
        return [self.known[prompt.token_ids] for prompt in prompts]

    def _alone(self, prompt: tuple[int, ...]) -> Answer:
        mode = self.kv_mode("contiguous", rows=1)
        runner = Runner(self.decoder, mode, self.backend)
        sequence, logprobs = sequence_of(prompt), []
        while sequence.n_generated < COUNT:
            row = runner.step((sequence, sequence.n_uncomputed))[0].log_softmax(0)
            sequence.tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        return Answer(sequence.tokens[sequence.n_prompt :], logprobs, 0)

    def kv_mode(self, kind: str, **options: Any) -> KVMode:
        spec = self.decoder.spec
        return kv_mode(kind, spec, dtype=self.kv_dtype, context=CONTEXT, backend=self.backend, **options)

    def run(
        self, kv: str, chunk: int, groups: list[list[Prompt]], *, pool: int | None = None
    ) -> tuple[list[list[int]], int]:
        """The generated tokens of every prompt, group after group, and how often a sequence was preempted."""
        answers, preemptions = self.answer(kv, chunk, groups, pool=pool)
        return [answer.tokens for answer in answers], preemptions

    def answer(
        self, kv: str, chunk: int, groups: list[list[Prompt]], *, pool: int | None = None
    ) -> tuple[list[Answer], int]:
        spec, rows = self.decoder.spec, max(map(len, groups))
        options = dict(KV[kv]) if pool is None else {**KV[kv], "n_tokens": pool}
        mode = self.kv_mode(kv.partition("_")[0], rows=rows, **options)
        info = ModelInfo("tiny", spec.architecture, spec.n_parameters(), spec.vocab_size, CONTEXT, 0)
        phases: dict[Phase, str] = {"prefill": "this", "decode": "this"}
        backends = {"this": self.backend}
        asked_all = threading.Event()  # neighbours must meet: no step is computed before the whole group is there

        def decode(batch: Batch, view: KVView, attention: AttentionBackend) -> Tensor:
            assert asked_all.wait(SOON)
            return self.decoder(batch, view, attention)

        provider = local_provider(info, self.tokenizer, None, mode, decode, backends, phases)
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
            answers = []
            for group in groups:
                asked_all.clear()
                streams = [engine.submit(prompt) for prompt in group]
                asked_all.set()
                answers += [_answer(list(stream.events(SOON))) for stream in streams]
        finally:
            engine.shutdown()
        mode.check_integrity([])
        assert mode.stats().held == 0
        mode.forget()
        assert mode.stats().free == mode.stats().total
        return answers, scheduler.preemptions


def _answer(events: list[Event]) -> Answer:
    *deltas, outcome = events
    assert isinstance(outcome, Finished), outcome
    notes = [note for event in deltas if isinstance(event, Delta) for note in event.logprobs]
    return Answer([note.token_id for note in notes], [note.logprob for note in notes], outcome.usage.cached_tokens)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """Built once each, when first asked for."""
    return {}


@pytest.fixture(params=[f"{name}-{how}" for name in (*part.names("model"), "mistral") for how in ("torch", *FORMATS)])
def model(request: pytest.FixtureRequest, tiny_checkpoints: Mapping[str, Path], models: dict[str, Model]) -> Model:
    if request.param not in models:
        name, how = request.param.split("-")
        native = how in FORMATS
        library = request.getfixturevalue("library") if native else None
        models[request.param] = Model(tiny_checkpoints[name], how if native else None, library)
    return models[request.param]


def asked(tokens: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Prompt:
    """Log-probabilities carry the token ids out of the stream."""
    return Prompt(tokens, sampling, Limits(max_tokens=COUNT, ignore_eos=True), top_logprobs=0)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("company", ["alone", "together"])
@pytest.mark.parametrize("kv", [name for name in KV if "unshared" not in name])
def test_every_configuration_gives_the_same_greedy_tokens(model: Model, kv: str, company: str, chunk: str) -> None:
    prompts = [asked(tokens) for tokens in PROMPTS]
    groups = [[prompt] for prompt in prompts] if company == "alone" else [prompts]
    tokens, _ = model.run(kv, CHUNKS[chunk], groups)
    assert tokens == model.answers


@pytest.mark.parametrize("kv", [name for name in KV if name != "contiguous"])
def test_pool_that_is_too_small_for_all_gives_the_same_tokens(model: Model, kv: str) -> None:
    prompts = [asked(tokens) for tokens in TIGHT]
    tokens, preemptions = model.run(kv, 7, [prompts], pool=64)
    assert tokens == [answer.tokens for answer in model.reference(prompts)]
    assert preemptions > 0


@pytest.mark.parametrize("kv", [name for name in KV if name != "contiguous"])
def test_warm_cache_gives_the_same_tokens(model: Model, kv: str) -> None:
    prompts = [asked(tokens) for tokens in PROMPTS]
    answers, _ = model.answer(kv, 7, [prompts, prompts[::-1]])
    cold, warm = answers[: len(prompts)], answers[len(prompts) :][::-1]
    assert [answer.tokens for answer in cold] == [answer.tokens for answer in warm] == model.answers
    size = KV[kv]["page_size"] if "unshared" not in kv else CONTEXT
    assert [answer.cached for answer in cold] == [0] * len(prompts)
    assert [answer.cached for answer in warm] == [(length - 1) // size * size for length in LENGTHS]


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("model", ["llama-torch", "gemma3-torch", "llama-float32", "gemma3-int8"], indirect=True)
def test_k01_shared_beginning_changes_neither_tokens_nor_logits(model: Model, kv: str, backwards: bool) -> None:
    size = KV[kv].get("page_size", 4)
    pairs = []
    for number, shared in enumerate((0, size - 1, size, size + 1, 3 * size)):
        beginning = [3 + (13 * i + 57 * number + size) % 290 for i in range(shared)]
        pair = [asked((*beginning, *(7 + (number + 29 * tail + i) % 280 for i in range(3 + tail)))) for tail in (1, 2)]
        pairs.append((shared, pair[::-1] if backwards else pair))
    groups = [[prompt] for _, pair in pairs for prompt in pair]
    answers, _ = model.answer(kv, 64, groups)
    expected = model.reference([prompt for _, pair in pairs for prompt in pair])
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for answer, reference in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
    shares = kv in ("paged_1", "paged_4", "paged_16")
    counts = [(0, shared // size * size if shares else 0) for shared, _ in pairs]
    assert [answer.cached for answer in answers] == [cached for pair in counts for cached in pair]


def test_seeded_answers_are_the_same_alone_together_and_preempted(model: Model) -> None:
    prompts = [asked(tokens, replace(SEEDED, seed=i)) for i, tokens in enumerate(TIGHT)]
    alone, _ = model.run("contiguous", 64, [[prompt] for prompt in prompts])
    together, _ = model.run("paged_4", 7, [prompts])
    squeezed, preemptions = model.run("paged_16", 16, [prompts], pool=64)
    assert alone == together == squeezed
    assert preemptions > 0
    assert alone != [answer.tokens for answer in model.reference(prompts)]


@pytest.mark.parametrize("name", [*part.names("model"), "mistral"])
def test_native_float32_gives_the_tokens_of_the_torch_interpreter(
    name: str, tiny_checkpoints: Mapping[str, Path], library: Library
) -> None:
    assert Model(tiny_checkpoints[name], "float32", library).answers == Model(tiny_checkpoints[name], None, None).answers
