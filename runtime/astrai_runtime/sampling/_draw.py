"""One random token: a number that only seed and position decide, then the inverse of the distribution function.

The generator is a counter-based hash (splitmix64; Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
2014), so that a request's tokens depend neither on its neighbours in the batch nor on how often it was interrupted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from astrai_runtime.sampling._select import remaining

if TYPE_CHECKING:
    from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FEW = 256  # candidates up to which plain floats are faster than tensors


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same seed and position for ever."""
    key = _mix((seed + _GAMMA) & _MASK)
    return (_mix((key + (position + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def draw(row_V: Tensor, u: float) -> int:
    """The token whose share of softmax(row) contains `u`, shares laid out in order of token id, in float64.

    Tokens at -inf are never drawn.
    """
    import torch

    ids = remaining(row_V)
    if ids is not None and ids.numel() <= _FEW:
        return int(ids[_index(row_V[ids].tolist(), u)])
    values = row_V.double() if ids is None else row_V[ids].double()
    weights = values.sub_(values.max()).exp_()
    ends = weights.cumsum(0)
    index = int(torch.searchsorted(ends, u * ends[-1], right=True))  # never a weight of 0: its end is its neighbour's
    if index >= weights.numel():  # u * total was rounded up to the total
        index = int(weights.nonzero()[-1])
    return index if ids is None else int(ids[index])


def _index(values: list[float], u: float) -> int:
    best = max(values)
    weights = [math.exp(value - best) for value in values]
    ends = list(accumulate(weights))
    index = bisect_right(ends, u * ends[-1])
    if index >= len(ends):
        index = max(i for i, weight in enumerate(weights) if weight > 0.0)
    return index
