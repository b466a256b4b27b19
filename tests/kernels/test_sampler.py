"""The sampling kernels against the stages themselves: the same tokens, whatever the pipeline, the seed, ties and threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from astrai_runtime import part
from astrai_runtime.errors import KernelError, ProviderError
from astrai_runtime.kernels._sampler import SamplerKernels
from astrai_runtime.kernels.base import Isa
from astrai_runtime.kernels.cpu import Library, Pool
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sampling._pipeline import Sampled, Sampler
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.decoder import TextDecoder

SHIPPED = ("penalties", "logit_bias", "temperature", "top_k", "typical_p", "top_p", "min_p", "mirostat")
TOKENIZER = byte_tokenizer()


def row(prompt: Any = (1, 2), generated: Any = (), top_logprobs: int | None = None, **fields: Any) -> Sequence:
    sampling = SamplingParams(**{"seed": 0, **fields})
    asked = Prompt(tuple(prompt), sampling, Limits(), top_logprobs=top_logprobs)
    sequence = Sequence(asked, Stream(64), TextDecoder(TOKENIZER), 100)
    sequence.tokens.extend(generated)
    return sequence


def sampler(n: int, kernels: SamplerKernels | None, stages: tuple[str, ...] = SHIPPED, mode: Any = "raw") -> Sampler:
    return Sampler([part.load("sampling", name)() for name in stages], n, mode, kernels)


@pytest.fixture
def kernels(library: Library, isa: Isa, pool: Pool) -> SamplerKernels:
    return SamplerKernels(library, isa, pool)


@dataclass
class Case:
    """Random logits, a random pipeline, and requests that use it."""

    logits: torch.Tensor
    stages: tuple[str, ...]
    mode: str
    requests: list[dict[str, Any]]
    valid: int


def cases(seed: int, count: int) -> Iterator[Case]:
    pick = random.Random(seed)
    for _ in range(count):
        n, n_rows = pick.choice([1, 2, 5, 17, 37, 256, 257, 300, 1000, 4097, 20_000]), pick.choice([1, 2, 5])
        logits = torch.randn(n_rows, n, generator=torch.Generator().manual_seed(pick.randrange(2**31)))
        logits *= pick.choice([0.1, 1.0, 5.0, 50.0])
        match pick.randrange(5):
            case 0:
                logits = logits.round()  # ties everywhere
            case 1:
                logits = torch.full_like(logits, pick.choice([0.0, 1e5, -1e5]))
            case 2:
                logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.9] = -math.inf
                logits[:, pick.randrange(n) // 2] = 1.0
        names = list(SHIPPED)
        stages = SHIPPED if pick.random() < 0.4 else tuple(pick.sample(names, pick.randrange(len(names) + 1)))
        mode = pick.choice(["raw", "raw", "filtered"])
        valid = n - pick.choice([0, 0, n // 10])
        yield Case(logits, stages, mode, [_request(pick, valid, set(stages)) for _ in range(n_rows)], valid)


def _request(pick: random.Random, n: int, stages: set[str]) -> dict[str, Any]:
    some: dict[str, Any] = {
        "prompt": [pick.randrange(n) for _ in range(pick.randrange(1, 40))],
        "generated": [pick.randrange(n) for _ in range(pick.randrange(30))],
        "top_logprobs": pick.choice([None, None, 0, 5, 40]),
        "seed": pick.randrange(2**40),
        "temperature": pick.choice([0.0, 1.0, 0.7, 1e-4, 2.0]) if "temperature" in stages else pick.choice([0.0, 1.0]),
    }
    if "penalties" in stages and pick.random() < 0.5:
        some |= {"repetition_penalty": pick.choice([1.0, 1.3, 0.7]), "frequency_penalty": pick.choice([0.0, 0.5, -1.0])}
        some |= {"presence_penalty": pick.choice([0.0, 0.3])}
    if "logit_bias" in stages and pick.random() < 0.4:
        amounts = [100.0, 5.0, -3.5] + [-100.0] * (n > 1000)
        some["logit_bias"] = tuple((pick.randrange(max(1, n // 2)), pick.choice(amounts)) for _ in range(3))
    if "top_k" in stages:
        some["top_k"] = pick.choice([0, 1, 2, 50, 300, n - 1 or 1, n, n + 5, 1500])
    if "top_p" in stages:
        some["top_p"] = pick.choice([1.0, 0.9, 0.5, 0.0, 0.99999])
    if "min_p" in stages:
        some["min_p"] = pick.choice([0.0, 0.1, 1.0, 1e-5])
    extra = {"typical_p": 0.5} if "typical_p" in stages and pick.random() < 0.1 else {}
    if "mirostat" in stages and pick.random() < 0.1:
        extra["mirostat"] = 2
    return some | {"extra": extra}


def outcome(sample: Callable[[], list[Sampled]]) -> list[Sampled] | type[Exception]:
    try:
        return sample()
    except ProviderError as error:  # stages that leave nothing do so for both
        return type(error)


def assert_same(ours: list[Sampled], theirs: list[Sampled], case: object) -> None:
    assert [one.token_id for one in ours] == [one.token_id for one in theirs], case
    for one, other in zip(ours, theirs, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-6)


def test_every_stage_takes_part() -> None:
    assert set(SHIPPED) == set(part.names("sampling"))


def test_kernels_choose_the_tokens_that_the_stages_lead_to(kernels: SamplerKernels) -> None:
    for case in cases(seed=1, count=250):
        expected, found = (
            outcome(
                lambda with_kernels=with_kernels, case=case: sampler(
                    case.valid, with_kernels, case.stages, case.mode
                ).sample(case.logits.clone(), [row(**fields) for fields in case.requests])
            )
            for with_kernels in (None, kernels)
        )
        if isinstance(found, list) and isinstance(expected, list):
            assert_same(found, expected, case)
        else:
            assert found == expected, case


def test_a_large_vocabulary_is_sampled_token_for_token(kernels: SamplerKernels) -> None:
    n = 262_144
    logits = torch.randn(2, n, generator=torch.Generator().manual_seed(3)) * 3
    logits[1] = (logits[1] * 8).round() / 8
    chat = {"top_k": 50, "temperature": 0.7, "top_p": 0.9}
    for fields in ({"temperature": 0.0}, {"top_k": 50}, chat, {}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 3000}):
        rows = [row(**{"seed": seed, **fields}, top_logprobs=seed) for seed in (5, 6)]
        found, expected = (sampler(n, which).sample(logits.clone(), rows) for which in (kernels, None))
        assert_same(found, expected, fields)


def test_no_choice_depends_on_threads_or_neighbours(library: Library, isa: Isa, n_threads: int) -> None:
    n = 600_000  # enough work for the threads to be woken
    logits = torch.randn(3, n, generator=torch.Generator().manual_seed(4))
    rows = [row(seed=s, top_logprobs=3, temperature=0.9, top_p=0.95, top_k=(0, 50)[s % 2]) for s in range(3)]
    with library.pool_open(n_threads, 0) as pool, library.pool_open(1, 0) as one:
        together = sampler(n, SamplerKernels(library, isa, pool)).sample(logits.clone(), rows)
        alone = SamplerKernels(library, isa, one)
        assert together == [sampler(n, alone).sample(logits[s : s + 1].clone(), [rows[s]])[0] for s in range(3)]


def test_draws_are_the_same_on_every_instruction_set(library: Library, pool: Pool) -> None:
    n = 9_999
    logits = torch.randn(4, n, generator=torch.Generator().manual_seed(5)) * 2
    rows = [row(seed=s, top_p=(1.0, 0.9)[s % 2], top_logprobs=5) for s in range(4)]
    found = [sampler(n, SamplerKernels(library, isa, pool)).sample(logits.clone(), rows) for isa in library.runs_here()]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("damage", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 255, 256, 998])
def test_damaged_rows_are_named(kernels: SamplerKernels, damage: float, place: int) -> None:
    logits = torch.zeros(4, 999)
    logits[1, place] = damage
    logits[3] = -math.inf
    logits[2, :-1] = -math.inf
    rows = [row(temperature=0.0, top_logprobs=3), row(top_k=5, top_logprobs=3), row(extra={"mirostat": 2}), row(top_k=1)]
    with pytest.raises(ProviderError, match=r"rows \[1, 3\] of 4"):
        sampler(999, kernels).sample(logits, rows)


@pytest.mark.parametrize("last", ["temperature", "top_k", "top_p", "min_p", "penalties"])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_row_without_a_token_left_is_an_error_that_says_so(kernels: SamplerKernels, last: str, temperature: float) -> None:
    fields = {"top_p": 0.5, "min_p": 0.5, "presence_penalty": 1.0, "temperature": temperature, "top_k": 1}
    stages = ("top_k", "logit_bias", last) if last != "top_k" else ("logit_bias", "top_k")
    bans = tuple((token, -100.0) for token in range(4))
    for which in (kernels, None):
        with pytest.raises(ProviderError, match=r"removed every token"):
            sampler(4, which, stages).sample(torch.arange(4.0)[None], [row(logit_bias=bans, **fields)])


def test_what_the_kernels_cannot_read_is_refused(kernels: SamplerKernels) -> None:
    for wrong in (torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(8, 2).t()[:1].expand(2, 8)):
        with pytest.raises(KernelError, match="float32 logits in the CPU's memory"):
            sampler(8, kernels).sample(wrong, [row(top_k=2)] * len(wrong))
    with pytest.raises(KernelError, match="no 9 likeliest"):
        kernels.likeliest(torch.zeros(8), 9)


def test_rows_of_several_widths_and_strides_share_one_sampler(kernels: SamplerKernels) -> None:
    padded = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    for n in (64, 50, 7, 64):
        rows = [row(seed=s, top_k=3, temperature=0.8) for s in range(3)]
        assert sampler(n, kernels).sample(padded.clone(), rows) == sampler(n, None).sample(padded.clone(), rows)
