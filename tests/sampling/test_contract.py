"""What every sampling stage promises, for every file of sampling/."""

from __future__ import annotations

import pytest
import torch

from astrai_runtime import part
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._recipe import value_of
from astrai_runtime.sampling.base import Stage

STAGES = part.names("sampling")
VOCABULARY = 40
ACTIVE = {
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": ((3, 5.0), (4, -100.0))},
    "typical_p": {"extra": {"typical_p": 0.3}},
    "mirostat": {"extra": {"mirostat": 2, "mirostat_tau": 0.4}},
}


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> Stage:
    made: Stage = part.load("sampling", request.param)()
    return made


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def test_every_stage_is_tested_with_active_values():
    assert set(ACTIVE) == set(STAGES)


def test_neutral_row_keeps_its_values_bit_for_bit(stage, row, request):
    name = request.node.callspec.params["stage"]
    active, neutral = row(generated=(3, 3, 5), **ACTIVE[name]), row(generated=(3, 3, 5))
    before = logits(2)
    after = before.clone()
    stage.apply(after, [active, neutral])
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


def test_result_of_a_row_is_the_same_beside_any_neighbours(stage, row, request):
    fields = ACTIVE[request.node.callspec.params["stage"]]
    alone, batch = logits(1, seed=4), logits(3, seed=5)
    batch[1] = alone[0]
    stage.apply(alone, [row(generated=(3, 7), **fields)])
    stage.apply(batch, [row(**fields), row(generated=(3, 7), **fields), row()])
    assert torch.equal(batch[1], alone[0])


def test_one_token_stays_finite_even_when_all_are_equal(stage, row, request):
    flat = torch.zeros(1, VOCABULARY)
    stage.apply(flat, [row(generated=(3,), **ACTIVE[request.node.callspec.params["stage"]])])
    assert flat.isfinite().any()
    assert not flat.isnan().any()


def test_knobs_are_neutral_in_a_default_request(stage):
    for knob in stage.knobs:
        assert value_of(SamplingParams(), knob.name, knob.neutral) == knob.neutral
        assert knob.low <= knob.neutral <= knob.high


def test_a_greedy_row_passes_only_through_stages_that_move_the_argmax(row, pipeline, request):
    for name in STAGES:
        if not part.load("sampling", name).moves_argmax:
            before = logits(1, seed=8)
            sampled = pipeline(VOCABULARY, (name,)).sample(before.clone(), [row(**{**ACTIVE[name], "temperature": 0.0})])
            assert sampled[0].token_id == before.argmax()


@pytest.mark.parametrize("size", [4096, 5000, 40_000])
def test_long_rows_are_edited_as_short_ones_are(stage, row, request, size):
    """Long rows are searched block by block: the same values among many that cannot matter give the same result."""
    fields = ACTIVE[request.node.callspec.params["stage"]]
    short = logits(1, seed=6)
    long = torch.full((1, size), -torch.inf)
    places = torch.randperm(size, generator=torch.Generator().manual_seed(size))[:VOCABULARY].sort().values
    long[0, places] = short[0]
    bias = tuple((int(places[token]), value) for token, value in fields.get("logit_bias", ()))
    moved = {**fields, "logit_bias": bias} if bias else fields
    stage.apply(short, [row(prompt=(1,), generated=(3, 7), **fields)])
    stage.apply(long, [row(prompt=(int(places[1]),), generated=(int(places[3]), int(places[7])), **moved)])
    assert torch.equal(long[0, places], short[0])
    assert int((long > -torch.inf).sum()) == int((short > -torch.inf).sum())
