"""From logits to the next token of every row: the declared stages in their order, then the argmax or a seeded draw."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Literal

from astrai_runtime.errors import ProviderError, did_you_mean
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._draw import draw, uniform
from astrai_runtime.sampling._select import first_best, largest
from astrai_runtime.sampling.base import Knob, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

GREEDY_BELOW = 1e-5  # a lower temperature is the argmax: float32 logits cannot tell the difference
LOGPROB_FLOOR = -9999.0  # stands for -inf, which JSON cannot carry

LogprobsMode = Literal["raw", "filtered"]

_NEUTRAL: dict[str, float] = {
    f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING and isinstance(f.default, int | float)
}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's next token; natural log-probabilities when the row asked for them, of the sampler's `logprobs_mode`."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # likeliest first


def is_greedy(params: SamplingParams) -> bool:
    """True when the highest logit wins, the lowest token id on ties."""
    return params.temperature < GREEDY_BELOW


def value_of(params: SamplingParams, knob: str, neutral: float) -> float:
    """A knob's value in a request. `top_k` -1 means off, like 0."""
    if knob == "top_k" and params.top_k == -1:
        return 0
    if knob in _NEUTRAL:
        return float(getattr(params, knob)) if knob != "top_k" else params.top_k
    return params.extra.get(knob, neutral)


class Sampler:
    """The declared pipeline. Used by one engine thread; `refuses` and `knobs` by any.

    Args:
        stages: in the order in which they edit the logits.
        valid_tokens: ids below it exist in the tokenizer; padding rows of the output matrix above are never chosen.
        logprobs_mode: "raw" reports the model's own distribution, "filtered" the one that the token was drawn from: after
            every stage, removed tokens at `LOGPROB_FLOOR`; a greedy row's token has 0 and all others the floor.
    """

    def __init__(self, stages: Rows[Stage], valid_tokens: int, logprobs_mode: LogprobsMode = "raw") -> None:
        self.stages = tuple(stages)
        self.valid_tokens = valid_tokens
        self.logprobs_mode = logprobs_mode
        self._fields = {name for stage in self.stages for name in stage.fields}

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Every number that a request may set, in pipeline order."""
        return tuple(knob for stage in self.stages for knob in stage.knobs)

    def refuses(self, params: SamplingParams) -> tuple[str, str] | None:
        """The first field that cannot be honoured and why; None when all can."""
        declared = {knob.name: knob for knob in self.knobs}
        for name, neutral in _NEUTRAL.items():
            if name not in declared and value_of(params, name, neutral) != neutral:
                if name == "temperature" and params.temperature == 0.0:
                    continue  # greedy needs no stage
                return name, f"no declared sampling stage obeys it; leave it out or set it to {neutral:g}"
        for name in params.extra:
            if name not in declared or name in _NEUTRAL:
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
            return self._sample(logits_SV, rows)

    def _sample(self, logits_SV: Tensor, rows: Rows[Sequence]) -> list[Sampled]:
        import torch

        if logits_SV.shape[1] > self.valid_tokens:
            logits_SV[:, self.valid_tokens :] = -torch.inf
        best = logits_SV.amax(dim=1)  # NaN wins, so this one pass also finds damaged rows
        damaged = (~best.isfinite()).nonzero().flatten().tolist()
        if damaged:
            raise ProviderError(f"the model computed logits that are not finite (rows {damaged} of {len(rows)})")
        asked = [s for s, row in enumerate(rows) if row.prompt.top_logprobs is not None]
        raw = self.logprobs_mode == "raw"
        logs = {s: logits_SV[s].double().log_softmax(dim=0) for s in asked if raw}
        if self._edit(logits_SV, rows):
            best = logits_SV.amax(dim=1)
        chosen = [_choose(logits_SV[s], top, row) for s, (top, row) in enumerate(zip(best.tolist(), rows, strict=True))]
        for s in asked:
            if not raw:
                logs[s] = _drawn_from(logits_SV[s], chosen[s], rows[s])
        for s, row in enumerate(rows):
            for stage in self.stages:
                if stage.remembers and _concerns(stage, row.prompt.sampling):
                    stage.chosen(logits_SV[s], row, chosen[s])
        return [_sampled(chosen[s], logs[s], row) if s in logs else Sampled(chosen[s]) for s, row in enumerate(rows)]

    def _edit(self, logits_SV: Tensor, rows: Rows[Sequence]) -> bool:
        """Applies each stage to the rows that it concerns. True when a greedy row's argmax may have moved."""
        moved = False
        for stage in self.stages:
            concerned = [s for s, row in enumerate(rows) if _concerns(stage, row.prompt.sampling)]
            if not concerned:
                continue
            moved = moved or stage.moves_argmax
            if len(concerned) == len(rows):
                stage.apply(logits_SV, rows)
            else:
                part = logits_SV[concerned]
                stage.apply(part, [rows[s] for s in concerned])
                logits_SV[concerned] = part
        return moved


def _choose(row_V: Tensor, best: float, row: Sequence) -> int:
    """The next token from logits that every stage has edited. `best` is the largest one, as greedy rows need it."""
    params = row.prompt.sampling
    if is_greedy(params):
        return first_best(row_V, best)
    if params.seed is None:
        raise AssertionError("a request gets its seed when it is submitted")
    return draw(row_V, uniform(params.seed, len(row.tokens)))


def _drawn_from(row_V: Tensor, token: int, row: Sequence) -> Tensor:
    """Log-probabilities of the distribution that the token came from."""
    if not is_greedy(row.prompt.sampling):
        return row_V.double().log_softmax(dim=0)
    logs = row_V.new_full(row_V.shape, float("-inf"))
    logs[token] = 0.0
    return logs


def _concerns(stage: Stage, params: SamplingParams) -> bool:
    if is_greedy(params) and not stage.moves_argmax:
        return False
    if any(getattr(params, name) for name in stage.fields) or not (stage.fields or stage.knobs):
        return True
    return any(value_of(params, knob.name, knob.neutral) != knob.neutral for knob in stage.knobs)


def _outside(knob: Knob, value: float) -> str | None:
    if knob.choices and value not in knob.choices:
        return f"must be {' or '.join(f'{choice:g}' for choice in knob.choices)}, not {value:g}"
    fits = knob.low < value <= knob.high if knob.above_low else knob.low <= value <= knob.high
    if fits and not (knob.integer and value != int(value)):
        return None
    kind = "a whole number " if knob.integer else ""
    low = f"greater than {knob.low:g} and at most" if knob.above_low else f"between {knob.low:g} and"
    return f"must be {kind}{low} {knob.high:.10g}, not {value}"


def _sampled(token: int, logs_V: Tensor, row: Sequence) -> Sampled:
    count = row.prompt.top_logprobs or 0
    ids = largest(logs_V, count).tolist() if count else []
    values = [max(value, LOGPROB_FLOOR) for value in logs_V[[token, *ids]].tolist()]
    return Sampled(token, values[0], tuple(zip(ids, values[1:], strict=True)))
