"""What a deployment may use: a Machine is data, so that a recipe for a big one can be planned on a small one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as the planner sees it.

    `memory_bytes` is what the model's device offers: on `cpu` the container's limit (not the host's memory), on `cuda`
    the memory of one GPU. `features` names CPU instruction sets in the kernel's spelling (`avx512_vnni`).
    `software` names what is importable or on PATH and matters to a backend: `flash_attn`, `nvcc`, `cxx`.
    """

    name: str
    device: Device
    memory_bytes: int
    cores: int
    features: frozenset[str] = frozenset()
    compute_capability: tuple[int, int] | None = None
    software: frozenset[str] = frozenset()
    probed: bool = False  # True: this very machine; only such a machine can serve
