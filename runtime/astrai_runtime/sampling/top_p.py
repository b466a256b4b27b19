"""Top-p (nucleus): keeps the smallest set of likeliest tokens whose probabilities sum to at least p."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.sampling._select import largest
from astrai_runtime.sampling.base import Knob, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_LOOK = 1024  # likeliest tokens that are sorted before the whole vocabulary is; nearly always enough


class TopP(Stage):
    """Holtzman et al., "The curious case of neural text degeneration", 2019, arXiv:1904.09751.

    In float64; ties by lowest id. At least one token is always kept, so that a tiny p is greedy; 0 itself is refused.
    """

    knobs = (Knob("top_p", neutral=1.0, low=0.0, high=1.0, above_low=True),)

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        for row_V, row in zip(logits_SV, rows, strict=True):
            p = row.prompt.sampling.top_p
            if p < 1.0:
                _keep_nucleus(row_V, p)


def _keep_nucleus(row_V: Tensor, p: float) -> None:
    import torch

    candidates = (row_V > -torch.inf).nonzero().flatten()
    logits = row_V[candidates].double()
    weights = (logits - logits.max()).exp()
    goal = p * weights.sum()
    for n in dict.fromkeys((min(_FIRST_LOOK, candidates.numel()), candidates.numel())):
        order = largest(weights, n)
        before = weights[order].cumsum(0) - weights[order]
        count = max(1, int((before < goal).sum()))
        if count < n or n == candidates.numel():
            break
    kept = candidates[order[:count]]
    values = row_V[kept]
    row_V.fill_(float("-inf"))
    row_V[kept] = values


PART = TopP
