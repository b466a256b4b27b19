"""Attention inside the native CPU program: what it can serve, and the storage of its keys and values.

L layers, N token slots, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from astrai_runtime.attention.base import AttentionBackend, AttentionShape, Phase, plainly_refuses
from astrai_runtime.batch import KVView
from astrai_runtime.errors import BackendRefused
from astrai_runtime.machine import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from astrai_runtime.kv.base import KVShape

DTYPES = ("float32", "bfloat16")
BLOCK = 16  # token slots whose keys and values lie together; see `astrai_kv` in csrc/cpu/include/astrai_cpu.h
MAX_HEAD_DIM = 256
ALIGNMENT = 64  # bytes: a line of the cache, and the widest vector


class Cpu(AttentionBackend):
    """The attention of model/_native.py. The native program itself writes keys and values and attends."""

    layout: ClassVar[str] = "packed_blocks"
    whole_steps: ClassVar[bool] = True

    @classmethod
    def refuses(cls, machine: Machine, shape: AttentionShape, phase: Phase) -> str | None:
        if machine.device != "cpu":
            return f"it computes on the CPU, and this machine's device is {machine.device}"
        if reason := plainly_refuses(shape, DTYPES):
            return reason
        if shape.head_dim % BLOCK or shape.head_dim > MAX_HEAD_DIM:
            return f"a head of {shape.head_dim} features is not {BLOCK}, {2 * BLOCK} and so on up to {MAX_HEAD_DIM}"
        if shape.rotated is not None:
            return f"it rotates whole heads, and the model only {shape.rotated} of {shape.head_dim} features"
        if not machine.software & {"cxx", "cpu_kernels"}:
            return "there is no C++ compiler to build its kernels with (c++, g++ or clang++, or CXX), and none are built yet"
        return None

    def allocate(self, shape: KVShape, device: str) -> tuple[Tensor, Tensor]:
        """[L, N, K, D] views of storage in whole blocks: only the native program knows the order inside.

        The operating system clears a page when it is first written to, so that a start does not wait for the whole pool.
        """
        import torch

        whole = -(-shape.n_tokens // BLOCK) * BLOCK
        size = (shape.n_layers, whole, shape.n_kv_heads, shape.head_dim)
        dtype: torch.dtype = getattr(torch, shape.dtype)
        k, v = (_zeros(math.prod(size) * dtype.itemsize).view(dtype).view(size) for _ in range(2))
        return k[:, : shape.n_tokens], v[:, : shape.n_tokens]

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, view: KVView, *, scale: float, window: int | None
    ) -> Tensor:
        """Always refuses: whoever computes layer by layer needs another backend.

        Raises:
            BackendRefused: this call.
        """
        raise BackendRefused("attention: 'cpu' is a part of the native decoder's steps; one layer alone needs torch_native")


def _zeros(n_bytes: int) -> Tensor:
    """Bytes that read as 0, aligned; `torch.zeros` would write every one of them."""
    import numpy as np
    import torch

    memory = np.zeros(n_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[begin : begin + n_bytes])


PART = Cpu
