"""Penalties on repetition: presence and frequency (generated tokens), repetition (prompt and generated tokens)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling.base import Knob, Operation, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class Penalties(Stage):
    """First repetition (divides positive logits, multiplies negative ones), then frequency and presence (subtract).

    Repetition: Keskar et al., "CTRL", 2019, arXiv:1909.05858, as in Transformers. Frequency and presence: the OpenAI
    API's definition, `logit - count * frequency - (count > 0) * presence`.
    """

    knobs = (
        Knob("presence_penalty", neutral=0.0, low=-2.0, high=2.0),
        Knob("frequency_penalty", neutral=0.0, low=-2.0, high=2.0),
        Knob("repetition_penalty", neutral=1.0, low=0.0, high=10.0, above_low=True),
    )
    moves_argmax = True

    def operation(self, params: SamplingParams) -> Operation:
        return Operation("penalties", values=(params.repetition_penalty, params.frequency_penalty, params.presence_penalty))

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        import torch

        for row_V, row in zip(logits_SV, rows, strict=True):
            params = row.prompt.sampling
            if params.repetition_penalty != 1.0:
                seen = torch.tensor(list(set(row.tokens)), device=row_V.device)
                seen = seen[seen < row_V.numel()]
                values = row_V[seen]
                r = params.repetition_penalty
                row_V[seen] = torch.where(values > 0, values / r, values * r)
            if (params.presence_penalty or params.frequency_penalty) and row.n_generated:
                counted = Counter(row.tokens[row.n_prompt :])
                ids = torch.tensor(list(counted), device=row_V.device)
                counts = torch.tensor(list(counted.values()), device=row_V.device)
                row_V[ids] -= counts * params.frequency_penalty + params.presence_penalty


PART = Penalties
