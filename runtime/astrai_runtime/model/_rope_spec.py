"""Rotary settings as config.json spells them (old and new forms) to a RopeSpec, without torch.

The meaning of every key is that of transformers' modeling_rope_utils.py, so that logits agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from astrai_runtime.errors import WeightsError, did_you_mean
from astrai_runtime.model._keys import Keys
from astrai_runtime.model.base import RopeSpec

KINDS = ("default", "linear", "llama3", "yarn")


def rope_of_config(config: Mapping[str, Any], head_dim: int, context: int) -> RopeSpec:
    """One rotary setting for all layers: `rope_scaling` (old) or `rope_parameters` (new), else plain with `rope_theta`."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if "full_attention" in scaling or "sliding_attention" in scaling:
        raise WeightsError("rope_parameters differ by layer type, which this architecture does not have")
    theta = config.get("rope_theta") or 10000.0
    partial = config.get("partial_rotary_factor") or 1.0
    return rope_of_parameters({"rope_theta": theta, "partial_rotary_factor": partial, **scaling}, head_dim, context)


def rope_of_parameters(parameters: Mapping[str, Any], head_dim: int, context: int) -> RopeSpec:
    """One mapping with `rope_theta` and the scaling's keys. `rope_type` wins over the older spelling `type`."""
    keys = Keys(parameters)
    kind = keys.word("rope_type", keys.word("type", "default"))
    if kind not in KINDS:
        raise WeightsError(
            f"rope scaling of type '{kind}' is not supported; there are: {', '.join(KINDS)}{did_you_mean(kind, KINDS)}"
        )
    if keys.number("partial_rotary_factor", 1.0) != 1.0:
        raise keys.wrong("partial_rotary_factor", keys.get("partial_rotary_factor"), "1 for this architecture")
    theta = keys.number("rope_theta")
    if kind == "linear":
        return RopeSpec(theta, head_dim, "linear", _numbers(factor=keys.number("factor")))
    if kind == "llama3":
        low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
        if low >= high:
            raise keys.wrong("high_freq_factor", high, f"greater than low_freq_factor, which is {low}")
        original = keys.count("original_max_position_embeddings", context)
        numbers = _numbers(
            factor=keys.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
        return RopeSpec(theta, head_dim, "llama3", numbers)
    if kind == "yarn":
        original = keys.count("original_max_position_embeddings", context)
        # A factor that is present but null means the ratio of the two contexts (DeepSeek's convention).
        factor = keys.number("factor", context / original) if keys.has("factor") else keys.number("factor")
        return yarn(theta, head_dim, factor, original, keys)
    return RopeSpec(theta, head_dim)


def yarn(theta: float, dim: int, factor: float, original: int, keys: Keys) -> RopeSpec:
    """YaRN with its defaults filled in, the attention factor included (arXiv:2309.00071, section 3.4)."""
    mscale, mscale_all_dim = keys.get("mscale"), keys.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        usual = temperature(factor, keys.number("mscale")) / temperature(factor, keys.number("mscale_all_dim"))
    else:
        usual = temperature(factor)
    numbers = _numbers(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=keys.number("attention_factor", usual),
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        truncate=keys.flag("truncate", True),
    )
    return RopeSpec(theta, dim, "yarn", numbers)


def temperature(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cosine and sine by when a context is stretched `factor` times."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _numbers(**values: float) -> tuple[tuple[str, float], ...]:
    return tuple((name, float(value)) for name, value in values.items())
