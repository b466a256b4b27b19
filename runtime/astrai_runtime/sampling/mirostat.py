"""Mirostat 2: keeps the surprise of the text near a target by a cut-off that follows what was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._select import keep_only, largest
from astrai_runtime.sampling._shares import Left
from astrai_runtime.sampling.base import Knob, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

TAU, ETA = 5.0, 0.1
_CUT = "mirostat_cut"  # bits; tokens more surprising than this are removed


class Mirostat(Stage):
    """Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", 2021, arXiv:2007.14966.

    Version 2 of the authors' code: tokens whose surprise (bits) is above the cut-off are removed, the likeliest never;
    the surprise of the drawn token among those that are left then moves the cut-off by `mirostat_eta` times its distance
    from `mirostat_tau`. The cut-off begins at twice tau and lives on the sequence. It sees what earlier stages left.
    """

    knobs = (
        Knob("mirostat", neutral=0, low=0, high=2, integer=True, choices=(0, 2)),
        Knob("mirostat_tau", neutral=TAU, low=0.0, high=20.0),
        Knob("mirostat_eta", neutral=ETA, low=0.0, high=1.0),
    )
    remembers = True

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        for row_V, row in zip(logits_SV, rows, strict=True):
            if _is_on(row.prompt.sampling):
                left = Left(row_V)
                kept = left.logits.log_softmax(0) >= -_cut_off(row) * math.log(2)
                if kept.any():
                    left.keep(kept.nonzero().flatten())
                else:
                    keep_only(row_V, largest(row_V, 1))

    def chosen(self, row_V: Tensor, row: Sequence, token_id: int) -> None:
        params = row.prompt.sampling
        if not _is_on(params):
            return
        left = Left(row_V)
        share = float(row_V[token_id].double() - row_V.amax().double()) - float(left.logits.logsumexp(0))
        surprise = -share / math.log(2)
        eta = params.extra.get("mirostat_eta", ETA)
        row.sampler_state[_CUT] = _cut_off(row) - eta * (surprise - params.extra.get("mirostat_tau", TAU))


def _is_on(params: SamplingParams) -> bool:
    return params.extra.get("mirostat", 0) == 2


def _cut_off(row: Sequence) -> float:
    return row.sampler_state.get(_CUT, 2 * row.prompt.sampling.extra.get("mirostat_tau", TAU))


PART = Mirostat
