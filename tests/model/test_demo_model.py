"""The real Gemma 3 270M continues prompts token for token as transformers does, from its quantised GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from astrai_runtime.model._torch import TorchDecoder
from astrai_runtime.weights._open import open_checkpoint
from tests.model.running import Runner, kv_mode, load

CASES = json.loads((Path(__file__).parent / "demo_greedy.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def decoder(demo_model: Path) -> TorchDecoder:
    return load(open_checkpoint(demo_model))


@pytest.mark.demo
@pytest.mark.parametrize("index", range(len(CASES)))
def test_greedy_continuation_equals_transformers(decoder: TorchDecoder, index: int) -> None:
    case = CASES[index]
    runner = Runner(decoder, kv_mode("paged", decoder.spec, rows=1, context=128))
    assert runner.greedy(case["prompt_ids"], len(case["generated_ids"])) == case["generated_ids"]


@pytest.mark.demo
def test_real_model_is_read_as_declared(decoder: TorchDecoder) -> None:
    spec = decoder.spec
    assert (spec.architecture, spec.n_layers, spec.vocab_size, spec.context) == ("gemma3", 18, 262144, 32768)
    assert [layer.window for layer in spec.layers[:6]] == [512] * 5 + [None]
    assert {layer.rope.theta for layer in spec.layers} == {1e4, 1e6}
    assert spec.tied_head
    assert spec.n_parameters() == 268_098_176
    assert decoder.dtype == torch.float32
