"""From logits to the next token of every row: the declared stages in their order, then the argmax or a seeded draw."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from astrai_runtime.errors import ProviderError, did_you_mean
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._by_stages import ByStages
from astrai_runtime.sampling._logprobs import KernelLogs, Logs, TorchLogs
from astrai_runtime.sampling._recipe import NEUTRAL, Recipe, Recipes, value_of
from astrai_runtime.sampling.base import DAMAGED, NOTHING_LEFT, Asked, Kernels, Knob, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

LogprobsMode = Literal["raw", "filtered"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's next token; natural log-probabilities when the row asked for them, of the sampler's `logprobs_mode`."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # likeliest first


class Sampler:
    """The declared pipeline. Used by one engine thread; `refuses` and `knobs` by any.

    Args:
        stages: in the order in which they edit the logits.
        valid_tokens: ids below it exist in the tokenizer; padding rows of the output matrix above are never chosen.
        logprobs_mode: "raw" reports the model's own distribution, "filtered" the one that the token was drawn from: after
            every stage, removed tokens at `LOGPROB_FLOOR`; a greedy row's token has 0 and all others the floor.
        kernels: do the work of rows whose stages can all say it as operations; the stages themselves do that of the others.
    """

    def __init__(
        self,
        stages: Rows[Stage],
        valid_tokens: int,
        logprobs_mode: LogprobsMode = "raw",
        kernels: Kernels | None = None,
    ) -> None:
        self.stages = tuple(stages)
        self.valid_tokens = valid_tokens
        self.logprobs_mode = logprobs_mode
        self._kernels = kernels
        self._recipes = Recipes(self.stages, kernels)
        self._fields = {name for stage in self.stages for name in stage.fields}

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Every number that a request may set, in pipeline order."""
        return tuple(knob for stage in self.stages for knob in stage.knobs)

    def refuses(self, params: SamplingParams) -> tuple[str, str] | None:
        """The first field that cannot be honoured and why; None when all can."""
        declared = {knob.name: knob for knob in self.knobs}
        for name, neutral in NEUTRAL.items():
            if name not in declared and value_of(params, name, neutral) != neutral:
                if name == "temperature" and params.temperature == 0.0:
                    continue  # greedy needs no stage
                return name, f"no declared sampling stage obeys it; leave it out or set it to {neutral:g}"
        for name in params.extra:
            if name not in declared or name in NEUTRAL:
                return name, f"no declared sampling stage has a knob of that name{did_you_mean(name, declared)}"
        for knob in declared.values():
            if reason := _outside(knob, value_of(params, knob.name, knob.neutral)):
                return knob.name, reason
        if params.logit_bias and "logit_bias" not in self._fields:
            return "logit_bias", "no declared sampling stage obeys it; leave it out"
        if params.seed is not None and not -(2**63) <= params.seed < 2**63:
            return "seed", f"must be a signed 64-bit integer, not {params.seed}"
        found = (stage.refuses(params, self.valid_tokens) for stage in self.stages)
        return next((refusal for refusal in found if refusal is not None), None)

    def sample(self, logits_SV: Tensor, rows: Rows[Sequence]) -> list[Sampled]:
        """The next token of every row. Edits `logits_SV` in place. A row's result does not depend on its neighbours.

        The draw of a row uses its seed and the position of the new token, nothing else.

        Raises:
            ProviderError: a row's logits hold NaN or infinity, or no finite value at all.
        """
        import torch

        with torch.inference_mode():  # what a model returns from inference mode may be edited in no other
            return self._sample(logits_SV[:, : self.valid_tokens], rows)

    def _sample(self, logits_SV: Tensor, rows: Rows[Sequence]) -> list[Sampled]:
        recipes = self._recipes.of(rows)
        asked = [s for s, row in enumerate(rows) if row.prompt.top_logprobs is not None]
        filtered = asked if self.logprobs_mode == "filtered" else []
        # Only the stages leave a row behind that shows the distribution which its token was drawn from.
        ours = [s for s, recipe in enumerate(recipes) if recipe.prepared is None or s in filtered]
        by_stages = ByStages(logits_SV, rows, recipes, ours)
        logs = {} if filtered or by_stages.damaged else {s: self._logs(logits_SV[s], rows[s]) for s in asked}
        chosen = self._by_kernels(logits_SV, rows, recipes, ours)
        damaged = sorted([*by_stages.damaged, *(s for s, token in chosen.items() if token == DAMAGED)])
        if damaged:
            raise ProviderError(f"the model computed logits that are not finite (rows {damaged} of {len(rows)})")
        if emptied := [s for s, token in chosen.items() if token == NOTHING_LEFT]:
            raise ProviderError(f"the sampling stages removed every token (rows {emptied} of {len(rows)})")
        chosen |= by_stages.choose(self.stages)
        for s in filtered:
            logs[s] = TorchLogs(by_stages.drawn_from(s, chosen[s]), rows[s].prompt.top_logprobs or 0)
        by_stages.tell(chosen)
        return [Sampled(chosen[s], *logs[s].of(chosen[s])) if s in logs else Sampled(chosen[s]) for s in range(len(rows))]

    def _by_kernels(
        self, logits_SV: Tensor, rows: Rows[Sequence], recipes: Rows[Recipe], others: Rows[int]
    ) -> dict[int, int]:
        """Tokens of the rows that the kernels can do as a whole; DAMAGED or NOTHING_LEFT where there is none."""
        asked = [
            Asked(s, recipe.prepared, recipe.place_of(row), row.tokens, row.n_prompt)
            for s, (row, recipe) in enumerate(zip(rows, recipes, strict=True))
            if s not in others
        ]
        if self._kernels is None or not asked:
            return {}
        return {one.row: token for one, token in zip(asked, self._kernels.choose(logits_SV, asked), strict=True)}

    def _logs(self, row_V: Tensor, row: Sequence) -> Logs:
        count = row.prompt.top_logprobs or 0
        if self._kernels is None:
            return TorchLogs(row_V.double().log_softmax(dim=0), count)
        return KernelLogs(row_V, count, self._kernels)


def _outside(knob: Knob, value: float) -> str | None:
    if knob.choices and value not in knob.choices:
        return f"must be {' or '.join(f'{choice:g}' for choice in knob.choices)}, not {value:g}"
    fits = knob.low < value <= knob.high if knob.above_low else knob.low <= value <= knob.high
    if fits and not (knob.integer and value != int(value)):
        return None
    kind = "a whole number " if knob.integer else ""
    low = f"greater than {knob.low:g} and at most" if knob.above_low else f"between {knob.low:g} and"
    return f"must be {kind}{low} {knob.high:.10g}, not {value}"
