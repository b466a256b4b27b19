"""What every sampling stage promises, for every file of sampling/."""

from __future__ import annotations

import pytest
import torch

from astrai_runtime import part
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._pipeline import value_of
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


def test_only_stages_that_move_the_argmax_are_applied_to_greedy_rows(stage, row, request):
    fields = ACTIVE[request.node.callspec.params["stage"]]
    if stage.moves_argmax:
        return
    before = logits(1, seed=8)
    after = before.clone()
    stage.apply(after, [row(**fields)])
    assert after.argmax() == before.argmax()
