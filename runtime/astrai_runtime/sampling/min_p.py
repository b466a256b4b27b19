"""Min-p: removes tokens whose probability is below a share of the likeliest token's."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._select import keep_only, not_below
from astrai_runtime.sampling.base import Knob, Operation, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class MinP(Stage):
    """Nguyen et al., "Turning up the heat: min-p sampling", 2024, arXiv:2407.01082. 1 keeps the likeliest and its equals."""

    knobs = (Knob("min_p", neutral=0.0, low=0.0, high=1.0),)

    def operation(self, params: SamplingParams) -> Operation:
        return Operation("min_p", params.min_p)

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        for row_V, row in zip(logits_SV, rows, strict=True):
            p = row.prompt.sampling.min_p
            if p > 0.0:
                # p(token) >= p * p(best) is logit >= logit(best) + ln p: no normalisation is needed.
                keep_only(row_V, not_below(row_V, float(row_V.amax()) + math.log(p)))


PART = MinP
