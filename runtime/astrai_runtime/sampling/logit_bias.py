"""Logit bias: adds a number to chosen tokens; -100 bans a token, +100 lets only such tokens be chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, ClassVar

from astrai_runtime.errors import ProviderError
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling.base import Knob, Operation, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 100.0


class LogitBias(Stage):
    """The OpenAI API's `logit_bias`. Its ends are exact here: a ban or an exclusive choice, however large the logits are."""

    knobs: ClassVar[tuple[Knob, ...]] = ()
    fields = ("logit_bias",)
    moves_argmax = True

    def refuses(self, params: SamplingParams, n_tokens: int) -> tuple[str, str] | None:
        banned, forced = set(), False
        for token, value in params.logit_bias:
            if not 0 <= token < n_tokens:
                return "logit_bias", f"token {token} does not exist; this model's tokens are 0 to {n_tokens - 1}"
            if not (math.isfinite(value) and -LIMIT <= value <= LIMIT):
                return "logit_bias", f"the bias of token {token} must be between -100 and 100, not {value}"
            forced = forced or value == LIMIT
            if value == -LIMIT:
                banned.add(token)
        if len(banned) == n_tokens and not forced:
            return "logit_bias", "every token is banned, so nothing could be generated"
        return None

    def operation(self, params: SamplingParams) -> Operation:
        bias = dict(params.logit_bias)
        return Operation("logit_bias", ids=tuple(bias), values=tuple(bias.values()))

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        import torch

        for row_V, row in zip(logits_SV, rows, strict=True):
            bias = dict(row.prompt.sampling.logit_bias)
            if not bias:
                continue
            ids = torch.tensor(list(bias), device=row_V.device)
            values = torch.tensor(list(bias.values()), dtype=torch.float32, device=row_V.device)
            row_V[ids] += values
            row_V[ids[values == -LIMIT]] = float("-inf")
            forced = ids[values == LIMIT]
            if forced.numel():
                kept = row_V[forced]
                row_V.fill_(float("-inf"))
                row_V[forced] = kept
            if float(row_V.amax()) == -math.inf:
                raise ProviderError(f"logit_bias removed every token that was left to sequence {row.id}")


PART = LogitBias
