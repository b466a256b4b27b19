"""Rotary position embedding in torch: frequencies from a RopeSpec, and the rotation itself.

The formulas and their float32 order of operations are those of transformers' modeling_rope_utils.py.
T tokens in the step, H heads, D head size, R = dim / 2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from astrai_runtime.model.base import RopeSpec


def frequencies(spec: RopeSpec, factors_R: Tensor | None = None) -> tuple[Tensor, float]:
    """([R] float32 radians a position, what cosine and sine are multiplied by). `factors_R`: for kind "factors"."""
    plain_R = 1.0 / (spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float) / spec.dim))
    numbers = dict(spec.parameters)
    if spec.kind == "linear":
        return plain_R / numbers["factor"], 1.0
    if spec.kind == "factors":
        assert factors_R is not None, "rope_factors.weight is missing"
        return plain_R / factors_R.to(device="cpu", dtype=torch.float), 1.0
    if spec.kind == "llama3":
        return _llama3(plain_R, numbers), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, numbers), numbers["attention_factor"]
    return plain_R, 1.0


def _llama3(plain_R: Tensor, numbers: dict[str, float]) -> Tensor:
    """Long waves are stretched by `factor`, short ones stay, those between are blended."""
    factor, low, high = numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"]
    original = numbers["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain_R
    stretched = torch.where(wavelength > original / low, plain_R / factor, plain_R)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(between, blended, stretched)


def _yarn(spec: RopeSpec, numbers: dict[str, float]) -> Tensor:
    """arXiv:2309.00071: extrapolate fast features, interpolate slow ones, ramp between `beta_fast` and `beta_slow`."""
    original, dim, factor = numbers["original_max_position_embeddings"], spec.dim, numbers["factor"]

    def feature(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(spec.theta))

    low, high = feature(numbers["beta_fast"]), feature(numbers["beta_slow"])
    if numbers["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp_R = torch.clamp((torch.arange(dim // 2, dtype=torch.float) - low) / (high - low), 0, 1)
    powers_R = spec.theta ** (torch.arange(0, dim, 2).to(torch.float) / dim)
    keep_R = 1 - ramp_R
    return (1.0 / (factor * powers_R)) * (1 - keep_R) + (1.0 / powers_R) * keep_R


def cos_sin(positions_T: Tensor, frequencies_R: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, 1, R] each: computed in float32, then rounded to the model's dtype."""
    angles = positions_T.to(torch.float)[:, None, None] * frequencies_R
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x_THD: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Turns feature i together with feature i + R; features past 2 R stay."""
    R = cos_T1R.shape[-1]
    a, b = x_THD[..., :R], x_THD[..., R : 2 * R]
    turned = [a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R]
    if x_THD.shape[-1] > 2 * R:
        turned.append(x_THD[..., 2 * R :])
    return torch.cat(turned, dim=-1)
