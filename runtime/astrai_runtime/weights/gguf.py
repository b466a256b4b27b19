"""One GGUF file, whole or in pieces: llama.cpp's format, dequantised while it is read."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._gguf_header import read_header
from astrai_runtime.weights._pieces import Pieces
from astrai_runtime.weights.base import Checkpoint, Slice

if TYPE_CHECKING:
    import torch

READABLE = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip


class GgufCheckpoint(Checkpoint):
    naming = "gguf"

    def __init__(self, path: Path, parts: Sequence[Path] | None = None) -> None:
        """Opens the file, or the pieces that make it up in order (the header lies in the first). Reads the header.

        `metadata` holds long arrays as lazy sequences; look at them before `close`.

        Raises:
            WeightsError: the file is missing, damaged, or has tensors of a type that cannot be dequantised.
        """
        self.path = path
        self._file = Pieces(tuple(parts) if parts else (path,))
        try:
            header = read_header(self._file, path)
            for info in header.tensors.values():
                if info.dtype not in READABLE:
                    raise WeightsError(
                        f"{info.file}: tensor '{info.name}' has type {info.dtype}, which cannot be dequantised here; "
                        f"supported are {', '.join(READABLE)}"
                    )
        except WeightsError:
            self.close()
            raise
        self.metadata, self.tensors, self._offsets = header.metadata, header.tensors, header.offsets

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        from astrai_runtime.weights._dequantise import decode
        from astrai_runtime.weights._fill import fill

        info = self.tensors[name]
        row_length = info.shape[-1] if info.shape else 1
        return fill(self._file, info, self._offsets[name], dtype, functools.partial(decode, info, row_length))

    def slices(self, name: str, types: Collection[str], unit: int = 1) -> Iterator[Slice]:
        from astrai_runtime.weights._dequantise import check_scales, floats
        from astrai_runtime.weights._slices import cut

        info = self.tensors[name]
        row_length = info.shape[-1] if info.shape else 1
        return cut(
            self._file,
            info,
            self._offsets[name],
            unit=unit,
            types=types,
            to_floats=functools.partial(floats, info, row_length),
            check=functools.partial(check_scales, info),
        )

    def close(self) -> None:
        self._file.close()


PART = GgufCheckpoint
