"""One random token: a number that only seed and position decide, then the inverse of the distribution function.

The generator is a counter-based hash (splitmix64; Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
2014), so that a request's tokens depend neither on its neighbours in the batch nor on how often it was interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


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

    ids = (row_V > -torch.inf).nonzero().flatten()
    logits = row_V[ids].double()
    weights = (logits - logits.max()).exp()
    ends = weights.cumsum(0)
    index = int(torch.searchsorted(ends, u * ends[-1], right=True))
    if index >= ids.numel():  # u * total was rounded up to the total
        index = int(weights.nonzero()[-1])
    return int(ids[index])
