"""Rows that the stages themselves edit, with torch, on any device: the reference that kernels must equal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.sampling._draw import draw
from astrai_runtime.sampling._recipe import Recipe
from astrai_runtime.sampling._select import first_best
from astrai_runtime.sampling.base import Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class ByStages:
    """Some rows of one step.

    Args:
        ours: which of the rows; the others are not looked at.

    Attributes:
        damaged: those of them that hold NaN or infinity, or no finite value at all.
    """

    def __init__(self, logits_SV: Tensor, rows: Rows[Sequence], recipes: Rows[Recipe], ours: Rows[int]) -> None:
        self._logits_SV, self._rows, self._recipes, self._ours = logits_SV, rows, recipes, ours
        self._best = self._largest()
        self.damaged = [s for s, best in self._best.items() if not math.isfinite(best)]

    def choose(self, stages: Rows[Stage]) -> dict[int, int]:
        """Edits the rows, each stage those that it concerns, and chooses each one's token."""
        if self._edit(stages):
            self._best = self._largest()
        return {s: self._choose(s) for s in self._ours}

    def drawn_from(self, s: int, token: int) -> Tensor:
        """Log-probabilities of the distribution that the token came from."""
        row_V = self._logits_SV[s]
        if not self._recipes[s].greedy:
            return row_V.double().log_softmax(dim=0)
        logs = row_V.new_full(row_V.shape, float("-inf"))
        logs[token] = 0.0
        return logs

    def tell(self, chosen: Mapping[int, int]) -> None:
        """Lets the stages that remember know, after all of the step was drawn."""
        for s in self._ours:
            for stage in self._recipes[s].stages:
                if stage.remembers:
                    stage.chosen(self._logits_SV[s], self._rows[s], chosen[s])

    def _largest(self) -> dict[int, float]:
        """The best logit of each row. NaN wins, so that this one pass also finds damaged rows."""
        if not self._ours:
            return {}
        part = self._logits_SV if len(self._ours) == len(self._rows) else self._logits_SV[self._ours]
        return dict(zip(self._ours, part.amax(dim=1).tolist(), strict=True))

    def _edit(self, stages: Rows[Stage]) -> bool:
        """True when a greedy row's argmax may have moved."""
        moved = False
        for stage in stages:
            concerned = [s for s in self._ours if stage in self._recipes[s].stages]
            if not concerned:
                continue
            moved = moved or stage.moves_argmax
            if len(concerned) == len(self._rows):
                stage.apply(self._logits_SV, self._rows)
            else:
                part = self._logits_SV[concerned]
                stage.apply(part, [self._rows[s] for s in concerned])
                self._logits_SV[concerned] = part
        return moved

    def _choose(self, s: int) -> int:
        recipe = self._recipes[s]
        if recipe.greedy:
            return first_best(self._logits_SV[s], self._best[s])
        return draw(self._logits_SV[s], recipe.place_of(self._rows[s]))
