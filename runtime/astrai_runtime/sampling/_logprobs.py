"""Log-probabilities of one row: of the token that was chosen, and of the likeliest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from astrai_runtime.sampling._select import largest
from astrai_runtime.sampling.base import Kernels

if TYPE_CHECKING:
    from torch import Tensor

LOGPROB_FLOOR = -9999.0  # stands for -inf, which JSON cannot carry

Top = tuple[tuple[int, float], ...]


class Logs(Protocol):
    """One row's distribution, taken before anything edits the row."""

    def of(self, token: int) -> tuple[float, Top]:
        """The token's log-probability, and the likeliest tokens with theirs."""
        ...


class TorchLogs:
    """All log-probabilities of a row, as a tensor."""

    def __init__(self, logs_V: Tensor, count: int) -> None:
        self._logs_V, self._count = logs_V, count

    def of(self, token: int) -> tuple[float, Top]:
        ids = largest(self._logs_V, self._count).tolist() if self._count else []
        values = [max(value, LOGPROB_FLOOR) for value in self._logs_V[[token, *ids]].tolist()]
        return values[0], tuple(zip(ids, values[1:], strict=True))


class KernelLogs:
    """The likeliest ones and the sum of all weights; the row itself is kept for the token that is chosen later."""

    def __init__(self, row_V: Tensor, count: int, kernels: Kernels) -> None:
        self._row_V = row_V.clone()
        self._top, self._log_sum = kernels.likeliest(row_V, min(count, row_V.numel()))

    def of(self, token: int) -> tuple[float, Top]:
        return self._log(float(self._row_V[token])), tuple((other, self._log(value)) for other, value in self._top)

    def _log(self, logit: float) -> float:
        return max(logit - self._log_sum, LOGPROB_FLOOR)
