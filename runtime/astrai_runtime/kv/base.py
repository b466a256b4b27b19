"""The contract of a KV mode: which token slots each sequence owns. Three layers: storage, index table, allocator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from astrai_runtime.batch import Batch, KVView
from astrai_runtime.part import PartConfig
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

KVDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the plan decided: the pool in numbers. Every `auto` is resolved."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: str  # torch's name: "float32", "bfloat16", "float16"
    max_batch_size: int  # sequences that may be admitted at once
    context: int  # tokens that one sequence may hold
    n_tokens: int  # token slots in the pool

    @property
    def bytes_per_token(self) -> int:
        size = 4 if self.dtype == "float32" else 2
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * size


@dataclass(frozen=True, slots=True)
class KVStats:
    """Token slots by state; `free + held + cached == total` whenever no tick is running."""

    free: int
    held: int  # owned by admitted sequences
    cached: int  # kept for later prompts, and all of it can be evicted
    total: int


class KVConfig(PartConfig):
    """Options that every KV mode shares."""

    dtype: KVDtype  # of the stored keys and values; auto: the model's


class KVMode(ABC):
    """Owns the slots. One engine thread calls it. Accounting (everything but `place`) needs no tensors and no storage."""

    @staticmethod
    @abstractmethod
    def pool_tokens(config: KVConfig, max_batch_size: int, context: int, affordable: int) -> int:
        """Token slots that a deployment of this mode allocates when `affordable` fit in memory; pure, for the plan.

        A fixed size is returned as it is, even when it is larger than `affordable`: saying so is the plan's job.
        """

    def __init__(self, config: KVConfig, shape: KVShape) -> None:
        self.config = config
        self.shape = shape

    @abstractmethod
    def refuses(self, n_tokens: int) -> str | None:
        """Why a sequence of `n_tokens` in all can never be held, or None. Changes nothing."""

    @abstractmethod
    def reserve(self, sequence: Sequence) -> bool:
        """Admits a sequence: sets `row`, and `n_computed` to its cached prefix. False: no row; nothing changed.

        At least one token always stays uncomputed, so that there are logits to sample from. `n_cached` becomes what the
        cache saved; a preempted sequence's stays, because what it finds now are mostly its own pages.
        """

    @abstractmethod
    def extend(self, sequence: Sequence, length: int) -> bool:
        """Makes sure that the first `length` tokens of an admitted sequence have slots. False: no room; nothing changed."""

    @abstractmethod
    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Takes everything back and clears `row` and `n_computed`. Safe to call on a sequence that was never admitted.

        keep: complete pages may stay as a cached prefix; False after a failure, whose KV must never be reused: what the
        sequence computed or reused leaves the cache.
        """

    @abstractmethod
    def reset(self) -> None:
        """Takes everything back from everyone and forgets what was cached: for a pool whose accounting cannot be trusted.

        The caller clears `row`, `n_computed` and `n_cached` of the sequences that it had admitted. Storage stays attached.
        """

    @abstractmethod
    def reuse(self, sequence: Sequence) -> None:
        """Moves an admitted sequence's `n_computed` on over what others have recorded since it was reserved.

        Adds to `n_cached` as `reserve` does. To be called before its next chunk is chosen; a mode that shares nothing
        does nothing.
        """

    @abstractmethod
    def next_page(self, sequence: Sequence, length: int) -> Hashable | None:
        """A name for the page that the next `length` tokens of an admitted sequence complete, the first one if several.

        Equal for sequences that would compute the same page: all but one had better wait and `reuse` it. None: no page
        is completed, or none that can be reused. Changes nothing.
        """

    @abstractmethod
    def record(self, sequence: Sequence) -> None:
        """Offers the first `n_computed` tokens of an admitted sequence for reuse, now that their KV is in the pool.

        Does not change what the sequence owns, but perhaps where it lies. `release` records as well.
        """

    @abstractmethod
    def forget(self) -> None:
        """Gives up every cached prefix; what was cached becomes free. Admitted sequences keep what they own."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Slots by state. Cheap."""

    @abstractmethod
    def check_integrity(self, admitted: Iterable[Sequence]) -> None:
        """Proves the accounting against the sequences that are admitted right now.

        Raises:
            AssertionError: a slot is owned twice, lost, or counted wrong; the message names it.
        """

    @abstractmethod
    def attach(self, k_buffer: Tensor, v_buffer: Tensor) -> None:
        """Gives the mode its storage, [L, N, K, D] each, made by the attention backend. Once, before the first `place`."""

    @abstractmethod
    def place(self, batch: Batch) -> KVView:
        """Where this step's keys and values lie. Every chunk must have been covered by `extend`. Changes no accounting."""
