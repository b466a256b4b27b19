"""The sampler: greedy and seeded rows, log-probabilities, refusals, and rows that ignore their neighbours."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from astrai_runtime.errors import ProviderError
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._draw import draw, uniform
from astrai_runtime.sampling._logprobs import LOGPROB_FLOOR
from astrai_runtime.sampling._pipeline import Sampled, Sampler

VOCABULARY = 32


def tokens(sampled: list[Sampled]) -> list[int]:
    return [one.token_id for one in sampled]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


def test_s03_greedy_takes_the_lowest_id_among_ties(pipeline, row):
    ties = torch.tensor([[0.0, 7.0, 7.0, 1.0]])
    for temperature in (0.0, 1e-8):
        assert pipeline(4).sample(ties.clone(), [row(temperature=temperature)])[0].token_id == 1


def test_greedy_passes_through_penalties_and_bias(pipeline, row):
    values = torch.tensor([[5.0, 4.0, 0.0]])
    banned = row(temperature=0.0, logit_bias=((0, -100.0),))
    repeated = row(temperature=0.0, generated=(0,), presence_penalty=2.0)
    assert pipeline(3).sample(values.clone(), [banned])[0].token_id == 1
    assert pipeline(3).sample(values.clone(), [repeated])[0].token_id == 1


def test_s08_mixed_batch_equals_each_row_alone(pipeline, row, logits):
    rows = [
        row(temperature=0.0),
        row(temperature=1.0, seed=3, top_k=2),
        row(temperature=0.0, logit_bias=((9, 100.0),)),
        row(temperature=1.3, seed=4, generated=(5, 5, 8), frequency_penalty=1.0, top_p=0.8, top_logprobs=4),
        row(temperature=0.7, seed=5, min_p=0.1, top_logprobs=0),
    ]
    sampler = pipeline(VOCABULARY)
    together = sampler.sample(logits.clone(), rows)
    alone = [sampler.sample(logits[s : s + 1].clone(), [rows[s]])[0] for s in range(5)]
    assert together == alone
    assert together[2].token_id == 9


def test_seeded_draws_follow_the_distribution(pipeline, row):
    """2,000 draws of a five-token distribution, each at its own position."""
    probabilities = np.array([0.5, 0.25, 0.125, 0.075, 0.05])
    values = torch.tensor(np.log(probabilities), dtype=torch.float32)
    counts = np.zeros(5)
    for position in range(2000):
        counts[draw(values, uniform(7, position))] += 1
    assert np.abs(counts / 2000 - probabilities).max() < 0.03
    again = [draw(values, uniform(7, position)) for position in range(20)]
    assert again == [draw(values, uniform(7, position)) for position in range(20)]
    assert again != [draw(values, uniform(8, position)) for position in range(20)]


def test_draw_is_the_exact_inverse_of_the_distribution_function():
    values = torch.log(torch.tensor([0.25, 0.5, 0.25]))
    assert [draw(values, u) for u in (0.0, 0.2, 0.3, 0.7, 0.8, 1 - 2**-53)] == [0, 0, 1, 1, 2, 2]
    values[0] = -torch.inf
    assert draw(values, 0.0) == 1


def test_uniform_numbers_are_fixed_for_ever():
    assert uniform(0, 0) == pytest.approx(uniform(0, 0), abs=0)
    numbers = [uniform(seed, position) for seed in range(20) for position in range(50)]
    assert len(set(numbers)) == 1000
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 0.03


def test_s09_padding_of_the_vocabulary_is_never_chosen(pipeline, row):
    values = torch.zeros(2, 16)
    values[:, 12:] = 50.0
    sampler = pipeline(12)
    assert sampler.sample(values.clone(), [row(temperature=0.0), row(seed=1)])[0].token_id == 0
    drawn = {sampler.sample(values[:1].clone(), [row(seed=seed, top_logprobs=16)])[0].token_id for seed in range(200)}
    assert drawn <= set(range(12))
    assert len(drawn) == 12


def test_s10_log_probabilities_are_the_models_own_and_finite(pipeline, row, logits):
    asked = row(temperature=0.5, seed=2, top_k=1, logit_bias=((3, -100.0), (4, 100.0)), top_logprobs=5)
    sampled = pipeline(VOCABULARY - 2).sample(logits[:1].clone(), [asked])[0]
    expected = logits[0, : VOCABULARY - 2].double().log_softmax(0)
    assert sampled.token_id == 4
    assert sampled.logprob == pytest.approx(float(expected[4]), abs=1e-6)
    assert [i for i, _ in sampled.top] == expected.argsort(descending=True)[:5].tolist()
    json.dumps([value for _, value in sampled.top], allow_nan=False)


def test_s10_removed_tokens_have_a_floor_instead_of_infinity(pipeline, row):
    values = torch.tensor([[1.0, -math.inf, -math.inf]])
    sampled = pipeline(3).sample(values, [row(temperature=0.0, top_logprobs=10**6)])[0]
    assert sampled.top == ((0, 0.0), (1, LOGPROB_FLOOR), (2, LOGPROB_FLOOR))


def test_rows_that_do_not_ask_get_no_log_probabilities(pipeline, row, logits):
    assert pipeline(VOCABULARY).sample(logits[:1], [row(temperature=0.0)])[0].logprob is None


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(pipeline, row, logits, damage):
    logits[1, 5] = damage
    with pytest.raises(ProviderError, match="rows \\[1\\] of 2"):
        pipeline(VOCABULARY).sample(logits[:2], [row(temperature=0.0), row(temperature=0.0)])


@pytest.mark.parametrize("temperature", [1e-8, 1e-4])
@pytest.mark.parametrize("seed", range(1, 6))
def test_s03_tiny_temperature_equals_the_argmax(pipeline, row, logits, temperature, seed):
    large = logits * 5000
    sampled = pipeline(VOCABULARY).sample(large.clone(), [row(temperature=temperature, seed=seed)] * 5)
    assert [one.token_id for one in sampled] == large.argmax(dim=1).tolist()


def test_inference_tensors_can_be_sampled(pipeline, row, logits):
    with torch.inference_mode():
        made = logits * 2
    assert pipeline(VOCABULARY).sample(made, [row(seed=1, top_k=5)] * 5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": 1.0000001}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((VOCABULARY, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": tuple((i, -100.0) for i in range(VOCABULARY))}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"extra": {"typical_p": 1.5}}, "typical_p"),
        ({"extra": {"mirostat": 1}}, "mirostat"),
        ({"extra": {"mirostat_tau": -1}}, "mirostat_tau"),
        ({"extra": {"typical": 0.5}}, "typical"),
    ],
)
def test_s01_s02_s03_s05_what_cannot_be_honoured_is_refused_by_name(pipeline, fields, named):
    refusal = pipeline(VOCABULARY).refuses(SamplingParams(**fields))
    assert refusal is not None
    assert refusal[0] == named


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"top_k": -1}, {"top_k": 10**9}, {"top_p": 0.0}, {"top_p": 1e-9}, {"temperature": 0.0}, {"seed": -5}),
        *({"min_p": 1.0}, {"extra": {"typical_p": 0.0}}, {"extra": {"mirostat": 2}}),
    ],
)
def test_s01_s02_s03_what_can_be_honoured_is_accepted(pipeline, fields):
    assert pipeline(VOCABULARY).refuses(SamplingParams(**fields)) is None


def test_without_stages_only_neutral_values_and_greedy_are_accepted(row):
    bare = Sampler([], VOCABULARY)
    assert bare.knobs == ()
    assert bare.refuses(SamplingParams(temperature=0.0, top_k=-1)) is None
    for fields in ({"temperature": 0.5}, {"top_k": 5}, {"logit_bias": ((1, 1.0),)}, {"repetition_penalty": 1.1}):
        assert bare.refuses(SamplingParams(**fields))[0] in fields


def test_request_is_never_drawn_without_a_seed(pipeline, row, logits):
    with pytest.raises(AssertionError, match="seed"):
        pipeline(VOCABULARY).sample(logits[:1], [row(seed=None)])


@pytest.mark.parametrize("k", [-1, 0, 1, 31, 32, 33, 10**9, 2**31 - 1])
def test_s01_any_top_k_works_beside_neighbours_with_others(pipeline, row, logits, k):
    sampler = pipeline(VOCABULARY)
    rows = [row(seed=1, top_k=50, top_logprobs=10**6), row(seed=2, top_k=k, top_logprobs=40), row(seed=3)]
    together = sampler.sample(logits[:3].clone(), rows)
    assert together == [sampler.sample(logits[s : s + 1].clone(), [rows[s]])[0] for s in range(3)]
    assert len(together[1].top) == VOCABULARY
    if k == 1:
        assert together[1].token_id == logits[1].argmax()
    if k in (-1, 0) or k >= VOCABULARY:
        assert together[1].token_id == sampler.sample(logits[1:2].clone(), [row(seed=2)])[0].token_id


@pytest.mark.parametrize("fields", [{"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-4}])
def test_s02_s03_values_that_leave_one_token_equal_greedy(pipeline, row, logits, fields):
    large = logits * 5
    greedy = tokens(pipeline(VOCABULARY).sample(large.clone(), [row(temperature=0.0)] * 5))
    for seed in range(1, 6):
        assert tokens(pipeline(VOCABULARY).sample(large.clone(), [row(seed=seed, **fields)] * 5)) == greedy


def test_s03_large_logits_and_high_temperature_make_no_nan(pipeline, row):
    values = torch.tensor([[1e4, -1e4, 9999.0, 0.0]])
    drawn = {tokens(pipeline(4).sample(values.clone(), [row(temperature=2.0, seed=seed)]))[0] for seed in range(100)}
    assert drawn == {0, 2}


def test_s05_a_bias_of_a_hundred_forces_and_of_minus_a_hundred_bans(pipeline, row, logits):
    forced, banned = row(seed=1, logit_bias=((7, 100.0),)), row(temperature=0.0, logit_bias=((7, -100.0),))
    values = logits[:2].clone()
    values[1, 7] = 1e6
    assert tokens(pipeline(VOCABULARY).sample(values.clone(), [forced, banned])) != [7, 7]
    assert pipeline(VOCABULARY).sample(values.clone(), [forced, banned])[0].token_id == 7
    everything = row(temperature=0.0, logit_bias=tuple((token, -100.0) for token in range(VOCABULARY) if token != 4))
    assert pipeline(VOCABULARY).sample(values[1:].clone(), [everything])[0].token_id == 4


def test_s09_a_tokenizer_larger_than_the_model_changes_nothing(pipeline, row, logits):
    rows = [row(temperature=0.0, top_logprobs=3), row(seed=1), row(seed=2, top_k=3), row(temperature=0.0), row(seed=4)]
    assert pipeline(VOCABULARY + 100).sample(logits.clone(), rows) == pipeline(VOCABULARY).sample(logits.clone(), rows)


def test_s10_filtered_log_probabilities_are_those_of_the_draw(pipeline, row, logits):
    sampler = pipeline(VOCABULARY, logprobs_mode="filtered")
    asked = row(temperature=0.5, seed=2, top_k=3, top_logprobs=5)
    sampled = sampler.sample(logits[:1].clone(), [asked])[0]
    best = logits[0].argsort(descending=True)[:3]
    expected = (logits[0, best].double() / 0.5).log_softmax(0)
    assert [token for token, _ in sampled.top[:3]] == best.tolist()
    assert [value for _, value in sampled.top[:3]] == pytest.approx(expected.tolist(), abs=1e-6)
    assert [value for _, value in sampled.top[3:]] == [LOGPROB_FLOOR] * 2
    assert sampled.logprob == dict(sampled.top)[sampled.token_id]
    json.dumps(sampled.top, allow_nan=False)


def test_s10_a_greedy_token_is_certain_in_filtered_mode(pipeline, row, logits):
    asked = row(temperature=0.0, top_logprobs=2, presence_penalty=1.0, generated=(3,))
    sampled = pipeline(VOCABULARY, logprobs_mode="filtered").sample(logits[:1].clone(), [asked])[0]
    assert (sampled.logprob, sampled.top[0]) == (0.0, (sampled.token_id, 0.0))
    assert sampled.top[1][1] == LOGPROB_FLOOR


@pytest.mark.parametrize("mode", ["raw", "filtered"])
def test_both_modes_draw_the_same_tokens(pipeline, row, logits, mode):
    rows = [row(seed=seed, top_p=0.9, top_logprobs=2) for seed in range(5)]
    silent = [row(seed=seed, top_p=0.9) for seed in range(5)]
    sampled = pipeline(VOCABULARY, logprobs_mode=mode).sample(logits.clone(), rows)
    assert tokens(sampled) == tokens(pipeline(VOCABULARY).sample(logits.clone(), silent))


@pytest.mark.parametrize("size", [4096, 33_000])
def test_s01_long_rows_are_sampled_like_a_plain_sort_would(pipeline, row, size):
    """Ties at every border, and rows that are all equal, in vocabularies that are searched block by block."""
    from astrai_runtime.sampling._select import first_best, largest, not_below

    generator = torch.Generator().manual_seed(size)
    coarse = torch.randint(-9, 9, (size,), generator=generator).float()
    rows = [torch.randn(size, generator=generator), coarse, torch.zeros(size), -torch.arange(size).float()]
    for values in rows:
        order = torch.sort(values, descending=True, stable=True).indices
        for k in (1, 2, 50, 400, size - 1, size, size + 1):
            assert torch.equal(largest(values, k), order[:k])
        assert first_best(values, float(values.max())) == int(order[0])
        border = float(values[order[60]])
        assert torch.equal(not_below(values, border), (values >= border).nonzero().flatten())
