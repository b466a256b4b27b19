"""Attention by PyTorch's own scaled_dot_product_attention, on any device: the reference for every other backend.

T tokens in the step, H query heads, K key/value heads, D head size, N token slots, L layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from astrai_runtime.attention.base import AttentionBackend, AttentionShape, Phase, plainly_refuses
from astrai_runtime.batch import KVView
from astrai_runtime.machine import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from astrai_runtime.attention._torch_step import Step
    from astrai_runtime.kv.base import KVShape

DTYPES = ("float32", "bfloat16", "float16")


class TorchNative(AttentionBackend):
    """Writes keys and values by slot, then attends to each sequence's own slots and no others.

    Short decoding rows are padded together and long ones computed one by one, so that a sequence's result may differ
    with its neighbours by float rounding, and by nothing else.
    """

    def __init__(self) -> None:
        self._step: Step | None = None

    @classmethod
    def refuses(cls, machine: Machine, shape: AttentionShape, phase: Phase) -> str | None:
        return plainly_refuses(shape, DTYPES)

    def allocate(self, shape: KVShape, device: str) -> tuple[Tensor, Tensor]:
        import torch

        size = (shape.n_layers, shape.n_tokens, shape.n_kv_heads, shape.head_dim)
        dtype = getattr(torch, shape.dtype)
        return torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, view: KVView, *, scale: float, window: int | None
    ) -> Tensor:
        from astrai_runtime.attention._torch_step import Step

        if self._step is None or self._step.view is not view:
            self._step = Step(view)  # what all layers of a step share is worked out once
        return self._step.attend(layer, q_THD, k_TKD, v_TKD, scale=scale, window=window)


PART = TorchNative
