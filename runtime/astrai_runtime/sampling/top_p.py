"""Top-p (nucleus): keeps the smallest set of likeliest tokens whose probabilities sum to at least p."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._shares import Left
from astrai_runtime.sampling.base import Knob, Operation, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class TopP(Stage):
    """Holtzman et al., "The curious case of neural text degeneration", 2019, arXiv:1904.09751.

    In float64; ties by lowest id. At least one token is always kept, so that 0, like any tiny p, keeps the likeliest.
    """

    knobs = (Knob("top_p", neutral=1.0, low=0.0, high=1.0),)

    def operation(self, params: SamplingParams) -> Operation:
        return Operation("top_p", params.top_p)

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        for row_V, row in zip(logits_SV, rows, strict=True):
            p = row.prompt.sampling.top_p
            if p < 1.0:
                left = Left(row_V)
                weights = left.logits.exp()
                left.keep_first(left.logits, weights, p * float(weights.sum()))


PART = TopP
