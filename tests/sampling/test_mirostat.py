"""Mirostat follows its reference over a whole text, is steered by its target, and its memory is the sequence's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.sampling.reference import Mirostat

VOCABULARY, STEPS = 200, 400


@pytest.fixture
def steps() -> torch.Tensor:
    """One row of logits for each step, as different as those of a text are."""
    scale = np.random.default_rng(2).uniform(1, 4, (STEPS, 1))
    return torch.tensor(np.random.default_rng(1).normal(0, 1, (STEPS, VOCABULARY)) * scale, dtype=torch.float32)


def write(sampler, sequence, steps: torch.Tensor) -> list[int]:
    """Samples one token a step and appends it, as the engine does."""
    for logits in steps:
        sequence.tokens.append(sampler.sample(logits[None].clone(), [sequence])[0].token_id)
    return sequence.tokens[2:]


def on(**extra: float) -> dict[str, dict[str, float]]:
    return {"extra": {"mirostat": 2, **extra}}


def test_every_cut_off_equals_the_reference(pipeline, row, steps) -> None:
    reference = Mirostat(3.0, 0.1)
    sampler, sequence = pipeline(VOCABULARY, ("mirostat",)), row(**on(mirostat_tau=3.0))
    for logits in steps:
        values = logits.double().numpy()
        allowed = reference.cut(values)
        token = sampler.sample(logits[None].clone(), [sequence])[0].token_id
        assert np.isfinite(allowed[token])
        reference.learn(allowed, token)
        sequence.tokens.append(token)
        assert sequence.sampler_state == {"mirostat_cut": pytest.approx(reference.mu, abs=1e-5)}


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 3.0])
def test_mean_surprise_among_what_is_left_is_the_target(pipeline, row, steps, tau) -> None:
    sampler = pipeline(VOCABULARY, ("mirostat",), logprobs_mode="filtered")
    sequence, surprise = row(top_logprobs=0, **on(mirostat_tau=tau, mirostat_eta=0.3)), []
    for logits in steps:
        sampled = sampler.sample(logits[None].clone(), [sequence])[0]
        sequence.tokens.append(sampled.token_id)
        surprise.append(-sampled.logprob / math.log(2))
    assert abs(np.mean(surprise[50:]) - tau) < 0.15


def test_memory_belongs_to_the_sequence_and_neighbours_do_not_touch_it(pipeline, row, steps) -> None:
    sampler = pipeline(VOCABULARY)
    alone = write(sampler, row(seed=5, **on(mirostat_tau=2.0)), steps[:60])
    watched = row(seed=5, **on(mirostat_tau=2.0))
    for at in range(60):
        rows = [row(seed=at), watched, row(temperature=0.0, **on()), row(seed=at, **on(mirostat_tau=9.0))]
        watched.tokens.append(sampler.sample(steps[at].repeat(4, 1), rows)[1].token_id)
    assert watched.tokens[2:] == alone
    assert alone == write(sampler, row(seed=5, **on(mirostat_tau=2.0)), steps[:60])
    assert alone != write(sampler, row(seed=6, **on(mirostat_tau=2.0)), steps[:60])


def test_memory_survives_preemption(pipeline, row, steps) -> None:
    """A preempted sequence loses its KV, not its memory: the next token is what it would have been."""
    sampler = pipeline(VOCABULARY)
    whole, cut = row(seed=5, **on(mirostat_tau=2.0)), row(seed=5, **on(mirostat_tau=2.0))
    expected = write(sampler, whole, steps[:30])
    write(sampler, cut, steps[:20])
    cut.n_computed, cut.preemptions = 0, 1
    assert write(sampler, cut, steps[20:30]) == expected


def test_a_step_that_fails_leaves_every_memory_as_it_was(pipeline, row, steps) -> None:
    sampler, sequence, bad = pipeline(VOCABULARY), row(**on()), row(seed=None)
    write(sampler, sequence, steps[:3])
    before = dict(sequence.sampler_state)
    with pytest.raises(AssertionError):
        sampler.sample(steps[3].repeat(2, 1), [sequence, bad])
    assert sequence.sampler_state == before


@pytest.mark.parametrize("fields", [{}, {"extra": {"mirostat": 0, "mirostat_tau": 1.0}}, {**on(), "temperature": 0.0}])
def test_rows_without_it_remember_nothing(pipeline, row, steps, fields) -> None:
    sequence = row(**fields)
    write(pipeline(VOCABULARY), sequence, steps[:3])
    assert sequence.sampler_state == {}


@pytest.mark.parametrize("tau", [0.0, 20.0])
def test_the_ends_of_its_target_are_the_argmax_and_everything(pipeline, row, steps, tau) -> None:
    sampler = pipeline(VOCABULARY, ("mirostat",))
    sequence, free = row(seed=3, **on(mirostat_tau=tau, mirostat_eta=0.0)), row(seed=3)
    if tau == 0.0:
        assert write(sampler, sequence, steps[:40]) == steps[:40].argmax(dim=1).tolist()
    else:
        assert write(sampler, sequence, steps[:40]) == write(sampler, free, steps[:40])
