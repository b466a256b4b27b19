"""Typical-p: keeps the tokens whose surprise is nearest to the expected one, until their probabilities sum to p."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.sampling._shares import Left
from astrai_runtime.sampling.base import Knob, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class TypicalP(Stage):
    """Meister et al., "Locally typical sampling", 2022, arXiv:2202.00666.

    The most typical token need not be the likeliest one, which may go. In float64; ties by lowest id. At least one
    token is always kept, so that 0 keeps the most typical.
    """

    knobs = (Knob("typical_p", neutral=1.0, low=0.0, high=1.0),)

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        for row_V, row in zip(logits_SV, rows, strict=True):
            p = row.prompt.sampling.extra.get("typical_p", 1.0)
            if p < 1.0:
                left = Left(row_V)
                logs = left.logits.log_softmax(0)
                probabilities = logs.exp()
                entropy = -(probabilities * logs).nan_to_num(0.0).sum()  # 0 * -inf is 0
                left.keep_first((logs + entropy).abs().neg(), probabilities, p)


PART = TypicalP
