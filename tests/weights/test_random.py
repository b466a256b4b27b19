"""Random weights: the same for the same seed and name, in every order, and of the declared scale."""

from __future__ import annotations

import torch

from astrai_runtime.weights.random import GAINS, RandomCheckpoint

SHAPES = {"embed.weight": (300, 64), "layers.0.down.weight": (64, 256), "final_norm.weight": (64,), "layers.0.q.bias": (64,)}


def test_weights_depend_on_seed_and_name_only() -> None:
    forwards = RandomCheckpoint(SHAPES, 1, {})
    backwards = RandomCheckpoint(dict(reversed(SHAPES.items())), 1, {})
    first = {name: forwards.read(name, torch.float32) for name in forwards.tensors}
    for name in backwards.tensors:
        assert torch.equal(backwards.read(name, torch.float32), first[name])
    other = RandomCheckpoint(SHAPES, 2, {})
    assert not torch.equal(other.read("embed.weight", torch.float32), first["embed.weight"])


def test_scales_keep_a_deep_model_alive() -> None:
    checkpoint = RandomCheckpoint(SHAPES, 0, {"model_type": "llama"})
    assert checkpoint.naming == "canonical"
    assert abs(checkpoint.read("embed.weight", torch.float32).std().item() - 64**-0.5) < 0.01
    assert abs(checkpoint.read("layers.0.down.weight", torch.float32).std().item() - GAINS["down"] * 256**-0.5) < 0.01
    assert abs(checkpoint.read("final_norm.weight", torch.float32).mean().item() - 1) < 0.1
    assert checkpoint.read("layers.0.q.bias", torch.bfloat16).abs().max() < 0.2
    assert checkpoint.tensors["embed.weight"].shape == (300, 64)
    checkpoint.close()
