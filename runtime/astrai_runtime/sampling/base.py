"""The contract of a sampling stage: it edits logits in place, one row a sequence, each row under its own parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

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


DAMAGED, NOTHING_LEFT = -1, -2  # instead of a token: the row holds NaN or infinity; every token was removed


@dataclass(frozen=True, slots=True)
class Operation:
    """What a stage does to one row, as data: kernels that work on whole rows do it without calling the stage.

    penalties: `values` are repetition, frequency and presence. logit_bias: `values[i]` is added to the logit of `ids[i]`.
    The others are one number, `value`.
    """

    kind: Literal["penalties", "logit_bias", "temperature", "top_k", "top_p", "min_p"]
    value: float = 0.0
    ids: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


class Kernels(Protocol):
    """Compiled searches and sums over rows of float32 logits in the CPU's memory. Used by one engine thread.

    Tokens are those that the stages, one after the other, would lead to; see `_draw` for what a draw is.
    """

    def prepare(self, operations: Rows[Operation]) -> object:
        """The operations of one request in the form that `choose` takes, for all of its steps."""
        ...

    def choose(self, logits_SV: Tensor, asked: Rows[Asked]) -> list[int]:
        """One token of every asked row, or DAMAGED, or NOTHING_LEFT. Edits the rows."""
        ...

    def likeliest(self, row_V: Tensor, k: int) -> tuple[list[tuple[int, float]], float]:
        """The k largest logits (largest first, ties by lowest id), and the logarithm of the sum of all exponentials."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """Which row of the logits, what is done to it, and how its token is chosen."""

    row: int
    prepared: object  # of Kernels.prepare
    u: float  # below 0: the largest logit; else as in `_draw.draw`
    tokens: Rows[int]  # prompt and generated ones, for penalties
    n_prompt: int


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

    def operation(self, params: SamplingParams) -> Operation | None:
        """What `apply` does to a row of these parameters, which are not neutral; None: only `apply` can say."""
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
