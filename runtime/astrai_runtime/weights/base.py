"""The contract of a checkpoint: headers without torch, then one tensor at a time, whole or in slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it. `shape` is row-major, like torch's, in every format."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # the format's own name: "F32", "BF16", "Q4_K", ...
    n_bytes: int  # in the file
    file: Path


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive rows of a tensor as bytes, [n, bytes of a row], from row `start` on. A vector is one row."""

    start: int
    dtype: str  # how the bytes are to be read, by the format's own name
    rows: NDArray[np.uint8]


class Checkpoint(ABC):
    """A model's files, opened: everything but `read` and `slices` needs only headers; only `read` imports torch.

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
    def slices(self, name: str, types: Collection[str], unit: int = 1) -> Iterator[Slice]:
        """One tensor's rows in order, a few MB at a time: as they are stored if `types` has that type, else as "F32".

        Rows that are not converted are views of the file where they can be: use them before the next slice. Every slice
        but the last has a multiple of `unit` rows.

        Raises:
            WeightsError: the data is cut off or damaged; the message names file and tensor.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmaps the files. Safe to call twice."""
