"""The contract of an attention backend: it writes this step's keys and values, then attends over the whole context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from astrai_runtime.batch import KVView
from astrai_runtime.machine import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from astrai_runtime.kv.base import KVShape

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend is asked to serve, as the plan knows it before anything is loaded."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: str  # of queries, keys and values: "float32", "bfloat16", "float16"
    windows: tuple[int | None, ...] = (None,)  # distinct sliding windows over the layers, in tokens
    page_size: int | None = None  # None: contiguous
    softcap: float | None = None
    rotated: int | None = None  # first features of a head that rotary embedding turns; None: all of them


def plainly_refuses(shape: AttentionShape, dtypes: Sequence[str]) -> str | None:
    """Why a backend that computes plain grouped attention in `dtypes` cannot serve that; None when it can."""
    if shape.dtype not in dtypes:
        return f"it computes in {', '.join(dtypes[:-1])} and {dtypes[-1]}, not in {shape.dtype}"
    if shape.softcap is not None:
        return f"it has no soft cap of attention scores, and the model asks for {shape.softcap}"
    if shape.n_heads % shape.n_kv_heads:
        return f"{shape.n_heads} query heads cannot be shared out over {shape.n_kv_heads} key/value heads"
    return None


class AttentionBackend(ABC):
    """One way to compute attention. Stateless but for scratch buffers; used by one engine thread."""

    layout: ClassVar[str] = "token_slots"  # how it stores KV; a plan never mixes layouts
    whole_steps: ClassVar[bool] = False  # True: it is part of a native program, which runs steps without calling `attend`

    @classmethod
    @abstractmethod
    def refuses(cls, machine: Machine, shape: AttentionShape, phase: Phase) -> str | None:
        """Why this backend cannot serve that, as half a sentence; None when it can. Imports no torch, probes nothing."""

    @abstractmethod
    def allocate(self, shape: KVShape, device: str) -> tuple[Tensor, Tensor]:
        """Zeroed K and V storage in this backend's layout; [L, N, K, D] for `token_slots`."""

    @abstractmethod
    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, view: KVView, *, scale: float, window: int | None
    ) -> Tensor:
        """Stores k and v at `view.out_cache_loc`, then attends causally; returns [T, H, D].

        A token at position p sees positions p - window + 1 .. p of its own sequence (all up to p without a window).
        Rotary embedding has already been applied to q and k.
        """
