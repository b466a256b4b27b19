"""The contract of a sampling stage: it edits logits in place, one row a sequence, each row under its own parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from astrai_runtime.request import SamplingParams
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Knob:
    """One request parameter that a stage obeys: its limits, and the value that changes nothing."""

    name: str  # field of SamplingParams, or a key of its `extra`
    neutral: float
    low: float
    high: float
    integer: bool = False
    above_low: bool = False  # the lower limit itself is not allowed
    choices: tuple[float, ...] = ()  # when there are any, no other value is allowed


class Stage(ABC):
    """One step of the pipeline. Used by one engine thread. What it remembers lies on the sequence, not in the stage."""

    knobs: ClassVar[tuple[Knob, ...]]  # logit_bias, which is no number, has none and names itself in `fields`
    fields: ClassVar[tuple[str, ...]] = ()  # SamplingParams fields that are not numbers
    moves_argmax: ClassVar[bool] = False  # True: greedy rows pass through it too
    remembers: ClassVar[bool] = False  # True: `chosen` is called

    def refuses(self, params: SamplingParams, n_tokens: int) -> tuple[str, str] | None:
        """The field of `fields` that cannot be honoured and why, or None. Token ids run from 0 to `n_tokens` - 1.

        Numbers need nothing here: their limits are in `knobs`.
        """
        return None

    @abstractmethod
    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        """Edits float32 `logits_SV` in place; -inf removes a token. Row s belongs to `rows[s]`.

        A row whose parameters are neutral keeps its values bit for bit. At least one token of a row always stays finite.
        """

    def chosen(self, row_V: Tensor, row: Sequence, token_id: int) -> None:  # noqa: B027  most stages remember nothing
        """Learns which token was drawn from `row_V`, the row as every stage left it; may write `row.sampler_state`.

        Called only when `remembers`, for rows that `apply` concerned, after the whole step was drawn: a step that fails
        leaves every state as it was. The state survives preemption, which computes no token twice.
        """
