"""Draws after each stage follow the distribution that a float64 reference computes: Pearson's chi-square, fixed seeds.

Seeds are fixed, so a test always gives the same answer. The critical value is that of p = 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from astrai_runtime.sampling._draw import draw, uniform
from tests.sampling import reference
from tests.sampling.reference import Row, softmax

VOCABULARY, DRAWS, ROWS = 24, 3200, 64
PROMPT, MADE = (1, 2), (3, 3, 5)
BIAS = {2: 3.0, 6: -100.0, 9: -1.5}
STAGES: dict[str, tuple[dict[str, object], Callable[[Row], Row]]] = {
    "none": ({}, lambda x: x),
    "temperature": ({"temperature": 0.6}, lambda x: reference.temperature(x, 0.6)),
    "hot": ({"temperature": 2.0}, lambda x: reference.temperature(x, 2.0)),
    "top_k": ({"top_k": 7}, lambda x: reference.top_k(x, 7)),
    "top_p": ({"top_p": 0.85}, lambda x: reference.top_p(x, 0.85)),
    "min_p": ({"min_p": 0.05}, lambda x: reference.min_p(x, 0.05)),
    "typical_p": ({"extra": {"typical_p": 0.7}}, lambda x: reference.typical_p(x, 0.7)),
    "mirostat": ({"extra": {"mirostat": 2, "mirostat_tau": 1.5}}, lambda x: reference.Mirostat(1.5, 0.1).cut(x)),
    "logit_bias": ({"logit_bias": tuple(BIAS.items())}, lambda x: reference.logit_bias(x, BIAS)),
    "penalties": (
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.5},
        lambda x: reference.penalties(x, list(PROMPT), list(MADE), 1.4, 0.3, 0.5),
    ),
    "all": (
        {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.5, "logit_bias": ((2, 3.0),)},
        lambda x: reference.min_p(
            reference.top_p(
                reference.top_k(
                    reference.temperature(
                        reference.logit_bias(reference.penalties(x, [], list(MADE), 1.0, 0.0, 0.5), {2: 3.0}), 0.9
                    ),
                    20,
                ),
                0.95,
            ),
            0.01,
        ),
    ),
}


def critical(freedom: int) -> float:
    """Chi-square's 0.999 quantile (Wilson and Hilferty 1931; within 1 % of the tables from 3 degrees of freedom on)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.0902 * math.sqrt(part)) ** 3


def distance(counts: Row, shares: Row) -> tuple[float, float]:
    """Pearson's statistic and its critical value. Rare tokens are counted as one, so that every cell expects five."""
    rare = shares * counts.sum() < 5
    cells = np.append(counts[~rare], counts[rare].sum()), np.append(shares[~rare], shares[rare].sum()) * counts.sum()
    seen, expected = (cell[cells[1] > 0] for cell in cells)
    return float(((seen - expected) ** 2 / expected).sum()), critical(len(seen) - 1)


@pytest.fixture
def spread() -> Row:
    return np.random.default_rng(11).normal(0, 2, VOCABULARY).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", STAGES)
def test_draws_after_each_stage_follow_the_reference(name: str, pipeline, row, spread: Row) -> None:
    fields, expected_of = STAGES[name]
    expected = expected_of(spread)
    sampler = pipeline(VOCABULARY)
    counts = np.zeros(VOCABULARY)
    for first in range(0, DRAWS, ROWS):
        rows = [row(prompt=PROMPT, generated=MADE, **fields, seed=first + at) for at in range(ROWS)]
        for sampled in sampler.sample(torch.tensor(np.tile(spread, (ROWS, 1)), dtype=torch.float32), rows):
            counts[sampled.token_id] += 1
    assert counts[~np.isfinite(expected)].sum() == 0
    statistic, limit = distance(counts, softmax(expected))
    assert statistic < limit


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1), (1e-9, 1), (0.5, 1), (0.75, 2), (0.76, 3), (1.0, 5), (None, 5)])
def test_s02_top_p_at_its_borders_draws_what_it_keeps(pipeline, row, p: float | None, kept: int) -> None:
    """0 keeps the likeliest token, like every tiny value; 1 is off."""
    shares = np.array([0.125, 0.5, 0.25, 0.075, 0.05])
    wanted = np.where(np.isin(np.arange(5), np.argsort(-shares)[:kept]), shares, 0.0)
    values = torch.tensor(np.log(shares), dtype=torch.float32).repeat(2000, 1)
    rows = [row(seed=seed, **({} if p is None else {"top_p": p})) for seed in range(2000)]
    counts = np.bincount([one.token_id for one in pipeline(5).sample(values, rows)], minlength=5).astype(np.float64)
    if kept == 1:
        assert counts.tolist() == [0, 2000, 0, 0, 0]
    else:
        statistic, limit = distance(counts, wanted / wanted.sum())
        assert statistic < limit


def test_the_test_of_distributions_can_fail(spread: Row) -> None:
    values = torch.tensor(spread, dtype=torch.float32)
    counts = np.bincount([draw(values, uniform(3, at)) for at in range(2000)], minlength=VOCABULARY).astype(np.float64)
    for wrong in (spread / 1.2, reference.top_p(spread, 0.97), np.roll(spread, 1)):
        shares = softmax(wrong)
        seen, limit = distance(counts, np.maximum(shares, 1e-12))
        assert seen > limit
    right, limit = distance(counts, softmax(spread))
    assert right < limit


@pytest.mark.parametrize("size", [40, 300, 20_000])
def test_few_and_many_candidates_are_drawn_by_the_same_rule(size: int) -> None:
    """Rows of any length, dense or nearly empty, give the token in whose share the number lies."""
    values = np.random.default_rng(size).normal(0, 1, size)
    for removed in (0.0, 0.5, 0.999):
        logits = np.where(np.random.default_rng(1).random(size) < removed, -np.inf, values)
        logits[size // 2] = 1.0
        ends = softmax(logits.astype(np.float32).astype(np.float64)).cumsum()
        row = torch.tensor(logits, dtype=torch.float32)
        for at in range(200):
            u = uniform(5, at)
            token = draw(row, u)
            assert ends[token] > u - 1e-9
            assert token == 0 or ends[token - 1] <= u + 1e-9
            assert np.isfinite(logits[token])
