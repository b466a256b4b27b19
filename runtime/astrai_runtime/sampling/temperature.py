"""Temperature: divides the logits, so that a low value sharpens the distribution and a high one flattens it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling.base import Knob, Operation, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class Temperature(Stage):
    """logit / temperature. Greedy rows never come here (see `_recipe.is_greedy`)."""

    knobs = (Knob("temperature", neutral=1.0, low=0.0, high=2.0),)

    def operation(self, params: SamplingParams) -> Operation:
        return Operation("temperature", params.temperature)

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        for row_V, row in zip(logits_SV, rows, strict=True):
            t = row.prompt.sampling.temperature
            if t != 1.0:
                # Taking the largest away first keeps a small temperature from overflowing into inf - inf.
                row_V.sub_(row_V.amax()).div_(t)


PART = Temperature
