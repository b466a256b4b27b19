"""What the pipeline does for one request: the stages that concern it, decided once and kept while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import MISSING, dataclass, fields

from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling._draw import uniform
from astrai_runtime.sampling.base import Kernels, Operation, Stage
from astrai_runtime.sequence import Sequence

GREEDY_BELOW = 1e-5  # a lower temperature is the argmax: float32 logits cannot tell the difference

NEUTRAL: dict[str, float] = {
    f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING and isinstance(f.default, int | float)
}


def is_greedy(params: SamplingParams) -> bool:
    """True when the highest logit wins, the lowest token id on ties."""
    return params.temperature < GREEDY_BELOW


def value_of(params: SamplingParams, knob: str, neutral: float) -> float:
    """A knob's value in a request. `top_k` -1 means off, like 0."""
    if knob == "top_k" and params.top_k == -1:
        return 0
    if knob in NEUTRAL:
        return float(getattr(params, knob)) if knob != "top_k" else params.top_k
    return params.extra.get(knob, neutral)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One request's way through the pipeline. `prepared`: the same for kernels; None where a stage has no operation."""

    params: SamplingParams
    greedy: bool
    stages: tuple[Stage, ...]
    prepared: object | None

    def place_of(self, row: Sequence) -> float:
        """The number in [0, 1) that draws the row's next token; -1 where the largest logit wins."""
        if self.greedy:
            return -1.0
        if self.params.seed is None:
            raise AssertionError("a request gets its seed when it is submitted")
        return uniform(self.params.seed, len(row.tokens))


class Recipes:
    """The recipes of the rows of the last step: a sequence that is sampled step after step is looked at once."""

    def __init__(self, stages: Rows[Stage], kernels: Kernels | None) -> None:
        self._stages, self._kernels = stages, kernels
        self._known: dict[int, Recipe] = {}

    def of(self, rows: Rows[Sequence]) -> list[Recipe]:
        """One for every row."""
        known, self._known = self._known, {}
        recipes = []
        for row in rows:
            recipe = known.get(row.id)
            if recipe is None or recipe.params is not row.prompt.sampling:
                recipe = self._make(row.prompt.sampling)
            self._known[row.id] = recipe
            recipes.append(recipe)
        return recipes

    def _make(self, params: SamplingParams) -> Recipe:
        greedy = is_greedy(params)
        stages = tuple(stage for stage in self._stages if (stage.moves_argmax or not greedy) and _concerns(stage, params))
        return Recipe(params, greedy, stages, self._prepared(stages, params))

    def _prepared(self, stages: Rows[Stage], params: SamplingParams) -> object | None:
        if self._kernels is None:
            return None
        operations: list[Operation] = []
        for stage in stages:
            operation = None if stage.remembers else stage.operation(params)
            if operation is None:
                return None
            operations.append(operation)
        return self._kernels.prepare(operations)


def _concerns(stage: Stage, params: SamplingParams) -> bool:
    if any(getattr(params, name) for name in stage.fields) or not (stage.fields or stage.knobs):
        return True
    return any(value_of(params, knob.name, knob.neutral) != knob.neutral for knob in stage.knobs)
