"""Top-k: keeps the k likeliest tokens of a row, exactly k even among ties (lowest ids first)."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._select import keep_only, largest
from astrai_runtime.sampling.base import Knob, Operation, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class TopK(Stage):
    """Fan et al., "Hierarchical neural story generation", 2018. 0 and -1 are off; more than the vocabulary keeps it all."""

    knobs = (Knob("top_k", neutral=0, low=-1, high=2**31 - 1, integer=True),)

    def operation(self, params: SamplingParams) -> Operation:
        return Operation("top_k", params.top_k)

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        for row_V, row in zip(logits_SV, rows, strict=True):
            k = row.prompt.sampling.top_k
            if 0 < k < row_V.numel():
                keep_only(row_V, largest(row_V, k))


PART = TopK
