"""The contract of a checkpoint: headers without torch, then one tensor at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it. `shape` is row-major, like torch's, in every format."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # the format's own name: "F32", "BF16", "Q4_K", ...
    n_bytes: int  # in the file
    file: Path


class Checkpoint(ABC):
    """A model's files, opened: everything but `read` needs only headers and imports no torch.

    `metadata`: config.json for `hf` (with generation_config.json under "generation_config" and tokenizer_config.json
    under "tokenizer_config" where they exist), the key/value pairs for `gguf` without the long token arrays' copies
    where that can be avoided.
    """

    naming: ClassVar[Literal["hf", "gguf", "canonical"]]  # which table of tensor names applies

    path: Path | None  # the folder (hf) or file (gguf); None when there is none (random weights)
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, dequantised and cast, in the shape of its TensorInfo. The result owns its memory.

        Raises:
            WeightsError: the data is cut off or damaged; the message names file and tensor.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmaps the files. Safe to call twice."""
