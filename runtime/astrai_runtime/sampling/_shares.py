"""What is left of a row in float64, for the stages that sum probabilities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from astrai_runtime.sampling._select import keep_only, not_below, remaining

if TYPE_CHECKING:
    from torch import Tensor

_WINDOWS = (2.0, 4.0, 6.0, 8.0, 10.0, 13.0, 20.0, math.inf)  # nats below the best rank, growing until enough is found


class Left:
    """The tokens of one row that are not removed yet.

    Attributes:
        logits: float64, the best one is 0. Equal logits stay exactly equal. All of the row where little was removed,
            -inf included, else only what is left, in order of token id.
    """

    def __init__(self, row_V: Tensor) -> None:
        self._row_V = row_V
        self._ids = remaining(row_V)
        values = (row_V if self._ids is None else row_V[self._ids]).double()
        self.logits = values.sub_(values.amax())

    def keep(self, places: Tensor) -> None:
        """Removes every token from the row but those at `places` of `logits`."""
        keep_only(self._row_V, places if self._ids is None else self._ids[places])

    def keep_first(self, rank: Tensor, weights: Tensor, goal: float) -> None:
        """Keeps the fewest tokens, highest rank first and ties by lowest id, whose weights reach `goal`; at least one."""
        import torch

        best = float(rank.amax())
        for window in _WINDOWS:
            places = not_below(rank, best - window)
            if float(weights[places].sum()) < 0.999 * goal and window < math.inf:
                continue  # surely too few, and sorting is dear
            order = places[torch.sort(rank[places], descending=True, stable=True).indices]
            ordered = weights[order]
            count = max(1, int((ordered.cumsum(0) - ordered < goal).sum()))
            if count < order.numel():
                break
        self.keep(order[:count])
