"""Each stage against a float64 reference written in plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from astrai_runtime import part
from tests.sampling import reference


def apply(name: str, values: list[float], sequence) -> np.ndarray:
    logits = torch.tensor([values], dtype=torch.float32)
    part.load("sampling", name)().apply(logits, [sequence])
    return logits[0].double().numpy()


def kept(result: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.isfinite(result)).tolist())


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


@pytest.fixture
def spread() -> list[float]:
    return np.random.default_rng(3).normal(0, 3, 50).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.7, 1e-4])
def test_temperature_is_a_division_of_logits(row, spread, temperature):
    result = apply("temperature", spread, row(temperature=temperature))
    expected = softmax(np.array(spread, dtype=np.float32).astype(np.float64) / temperature)
    assert np.allclose(softmax(result), expected, atol=1e-5)


def test_s03_small_temperature_on_large_logits_makes_no_nan(row):
    result = apply("temperature", [1e4, -1e4, 9999.0], row(temperature=1.1e-5))
    assert not np.isnan(result).any()
    assert result.argmax() == 0


@pytest.mark.parametrize(("k", "count"), [(1, 1), (3, 3), (5, 5), (6, 5), (10**9, 5), (0, 5), (-1, 5)])
def test_s01_top_k_keeps_k_and_is_clamped_to_the_vocabulary(row, k, count):
    assert kept(apply("top_k", [0.1, 0.5, -1.0, 2.0, 0.3], row(top_k=k))) == {3, 1, 4, 0, 2} & set([3, 1, 4, 0, 2][:count])


def test_top_k_takes_the_lowest_ids_among_ties(row):
    assert kept(apply("top_k", [1.0, 2.0, 1.0, 1.0, 2.0], row(top_k=3))) == {0, 1, 4}
    assert kept(apply("top_k", [0.0] * 6, row(top_k=2))) == {0, 1}


def test_top_p_keeps_the_smallest_sufficient_set(row, spread):
    probabilities = softmax(np.array(spread))
    order = np.argsort(-probabilities, kind="stable")
    for p in (0.1, 0.5, 0.9, 0.999):
        count = int(np.searchsorted(probabilities[order].cumsum(), p)) + 1
        assert kept(apply("top_p", spread, row(top_p=p))) == set(order[:count].tolist())


def test_s02_top_p_at_its_borders(row):
    for p in (0.0, 1e-9):
        assert kept(apply("top_p", [0.0, 1.0, 0.5], row(top_p=p))) == {1}
    assert kept(apply("top_p", [0.0, 1.0, 0.5], row(top_p=1.0))) == {0, 1, 2}
    ties = apply("top_p", [math.log(0.25)] * 4, row(top_p=0.5))
    assert kept(ties) == {0, 1}


def test_top_p_looks_past_its_first_thousand_candidates(row):
    flat = np.full(5000, 1.0)
    flat[4000:] = 1.5
    assert kept(apply("top_p", flat.tolist(), row(top_p=0.2))) == set(
        range(4000, 4000 + math.ceil(0.2 * (4000 + 1000 * math.exp(0.5)) / math.exp(0.5)))
    )


def test_min_p_cuts_at_a_share_of_the_best(row):
    values = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert kept(apply("min_p", values, row(min_p=0.25))) == {0, 1, 2}
    assert kept(apply("min_p", values, row(min_p=1.0))) == {0}


def test_presence_and_frequency_count_generated_tokens_only(row):
    sequence = row(prompt=(0, 1), generated=(2, 2, 3), presence_penalty=0.5, frequency_penalty=0.25)
    assert apply("penalties", [1.0, 1.0, 1.0, 1.0], sequence).tolist() == [1.0, 1.0, 0.0, 0.25]


def test_repetition_penalty_covers_prompt_and_answer_and_both_signs(row):
    sequence = row(prompt=(0, 1), generated=(2,), repetition_penalty=2.0)
    assert apply("penalties", [1.0, -1.0, 4.0, 4.0], sequence).tolist() == [0.5, -2.0, 2.0, 4.0]


def test_s05_logit_bias_adds_bans_and_forces(row):
    assert apply("logit_bias", [1.0, 2.0, 3.0], row(logit_bias=((0, 5.0), (2, -1.0)))).tolist() == [6.0, 2.0, 2.0]
    banned = apply("logit_bias", [1.0, 1e6, 3.0], row(logit_bias=((1, -100.0),)))
    assert kept(banned) == {0, 2}
    forced = apply("logit_bias", [1.0, 1e6, 3.0], row(logit_bias=((2, 100.0),)))
    assert kept(forced) == {2}


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.05, 0.2, 0.5, 0.9, 0.999])
def test_typical_p_keeps_what_the_reference_keeps(row, p):
    for seed in range(5):
        values = np.random.default_rng(seed).normal(0, 3, 60).astype(np.float32).astype(np.float64)
        expected = reference.typical_p(values, p)
        assert kept(apply("typical_p", values.tolist(), row(extra={"typical_p": p}))) == kept(expected)


def test_typical_p_may_drop_the_likeliest_token(row):
    values = np.log([0.4, *[0.6 / 60] * 60]).tolist()
    assert 0 not in kept(apply("typical_p", values, row(extra={"typical_p": 0.3})))


def test_typical_p_ignores_removed_tokens_and_breaks_ties_by_id(row):
    values = [0.0, -math.inf, 0.0, 0.0, -math.inf, 0.0]
    assert kept(apply("typical_p", values, row(extra={"typical_p": 0.5}))) == {0, 2}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("top_k", {"top_k": 5}, lambda x: reference.top_k(x, 5)),
        ("top_p", {"top_p": 0.3}, lambda x: reference.top_p(x, 0.3)),
        ("top_p", {"top_p": 0.999999}, lambda x: reference.top_p(x, 0.999999)),
        ("min_p", {"min_p": 1e-6}, lambda x: reference.min_p(x, 1e-6)),
        ("min_p", {"min_p": 0.9}, lambda x: reference.min_p(x, 0.9)),
        ("temperature", {"temperature": 2.0}, lambda x: reference.temperature(x, 2.0)),
        ("penalties", {"repetition_penalty": 10.0}, lambda x: reference.penalties(x, [1, 2], [3, 3], 10.0, 0, 0)),
        ("penalties", {"repetition_penalty": 1e-3}, lambda x: reference.penalties(x, [1, 2], [3, 3], 1e-3, 0, 0)),
        ("penalties", {"frequency_penalty": 2.0}, lambda x: reference.penalties(x, [1, 2], [3, 3], 1, 2.0, 0)),
        ("penalties", {"frequency_penalty": -2.0}, lambda x: reference.penalties(x, [1, 2], [3, 3], 1, -2.0, 0)),
        ("penalties", {"presence_penalty": -2.0}, lambda x: reference.penalties(x, [1, 2], [3, 3], 1, 0, -2.0)),
        ("logit_bias", {"logit_bias": ((4, 99.0), (5, -99.0))}, lambda x: reference.logit_bias(x, {4: 99.0, 5: -99.0})),
    ],
)
def test_stages_equal_the_reference_at_their_limits(row, name, fields, expected):
    for seed in range(5):
        values = np.random.default_rng(seed).normal(0, 3, 5000).astype(np.float32).astype(np.float64)
        result, wanted = apply(name, values.tolist(), row(generated=(3, 3), **fields)), expected(values)
        assert kept(result) == kept(wanted)
        assert np.allclose(softmax(result), softmax(wanted), atol=1e-6)
