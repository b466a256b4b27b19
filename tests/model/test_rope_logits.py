"""Every kind of rotary scaling, in logits: equal to transformers' before, at and beyond the original context."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_runtime.weights._open import open_checkpoint
from tests.model.running import Runner, kv_mode, load

ORIGINAL = 16  # tokens of context before scaling
TOKENS = torch.randint(3, 60, (ORIGINAL + 6,), generator=torch.Generator().manual_seed(4)).tolist()
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "null": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    "llama3": LLAMA3,
}


def spellings(scaling: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The keys that config.json may say it with: old, older, both, and the newest."""
    if scaling is None:
        return [{"rope_scaling": None, "rope_theta": 10000.0}, {"rope_theta": 10000.0}]
    kind = scaling["rope_type"]
    rest = {key: value for key, value in scaling.items() if key != "rope_type"}
    return [
        {"rope_scaling": scaling, "rope_theta": 10000.0},
        {"rope_scaling": {**rest, "type": kind}, "rope_theta": 10000.0},
        {"rope_scaling": {**rest, "type": "linear", "rope_type": kind}, "rope_theta": 10000.0},
        {"rope_parameters": {**scaling, "rope_theta": 10000.0}},
    ]


def write(folder: Path, scaling: dict[str, Any] | None) -> torch.Tensor:
    """A random checkpoint with this scaling; returns transformers' logits at every position."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": 10000.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(**SMALL, rope_parameters=parameters, attn_implementation="eager")
        torch.manual_seed(7)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1))
            logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
        model.save_pretrained(folder)
    return logits


def say(folder: Path, keys: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_scaling", "rope_parameters", "rope_theta"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize("name", SCALINGS)
def test_l04_logits_equal_transformers_before_and_beyond_the_original_context(name: str, tmp_path: Path) -> None:
    expected = write(tmp_path, SCALINGS[name])
    for keys in spellings(SCALINGS[name]):
        say(tmp_path, keys)
        checkpoint = open_checkpoint(tmp_path)
        decoder = load(checkpoint)
        checkpoint.close()
        logits = Runner(decoder, kv_mode("paged", decoder.spec)).every_position(TOKENS)
        for position in (0, ORIGINAL - 1, ORIGINAL + 5):
            torch.testing.assert_close(logits[position], expected[position], rtol=0.0, atol=1e-4)
