"""Random weights of any architecture, made in memory: for trying a deployment and for tests, without a download."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astrai_runtime.weights.base import Checkpoint, TensorInfo

if TYPE_CHECKING:
    import torch


class RandomCheckpoint(Checkpoint):
    """Each tensor is drawn from a generator seeded by (seed, its name): the order of reading does not matter.

    Norms lie around one, biases near zero, and matrices have a standard deviation of 1/sqrt(fan in). The embedding has
    that small scale too, so that the layers outweigh the token itself and a tied head does not repeat it for ever.
    """

    naming = "canonical"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, metadata: Mapping[str, Any]) -> None:
        self.path = None
        self.metadata = metadata
        self._seed = seed
        nowhere = Path("<random>")
        self.tensors = {
            name: TensorInfo(name, tuple(shape), "F32", 4 * math.prod(shape), nowhere) for name, shape in shapes.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        import torch

        shape = self.tensors[name].shape
        digest = hashlib.sha256(f"{self._seed}\0{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values.mul_(0.1).add_(1.0)
        elif name.endswith(".bias"):
            values.mul_(0.02)
        else:
            values.mul_(shape[-1] ** -0.5)
        return values.to(dtype)

    def close(self) -> None:
        """Nothing is open."""


PART = RandomCheckpoint
