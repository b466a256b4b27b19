"""A Hugging Face model folder: config.json and one or several safetensors files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._folder import read_metadata, weight_files
from astrai_runtime.weights._pieces import Pieces
from astrai_runtime.weights._safetensors_header import SafetensorsHeader, read_header
from astrai_runtime.weights.base import Checkpoint, Slice, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

# Types that hold plain weights, by torch's names. What scaled 8-bit formats mean is not in the file.
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsCheckpoint(Checkpoint):
    naming = "hf"

    def __init__(self, path: Path) -> None:
        """Opens the folder: reads its JSON files and every safetensors header.

        Raises:
            WeightsError: a file is missing, damaged, or outside the folder; or the folder holds pickles only.
        """
        self.path = path
        self.metadata = read_metadata(path)
        self._files: dict[Path, Pieces] = {}
        tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        try:
            for file, expected in weight_files(path).items():
                self._files[file] = Pieces((file,))
                header = read_header(self._files[file])
                _check_shard(file, header, expected, tensors)
                tensors |= header.tensors
                self._offsets |= header.offsets
        except WeightsError:
            self.close()
            raise
        self.tensors = tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        import torch

        from astrai_runtime.weights._fill import fill

        info = self._plain(name)
        source: torch.dtype = getattr(torch, _FLOATS[info.dtype])

        def decode(raw: NDArray[np.uint8]) -> torch.Tensor:
            return torch.from_numpy(raw.copy()).view(source)

        return fill(self._files[info.file], info, self._offsets[name], dtype, decode)

    def slices(self, name: str, types: Collection[str], unit: int = 1) -> Iterator[Slice]:
        from astrai_runtime.weights._slices import FLOATS, cut

        info = self._plain(name)
        file, begin = self._files[info.file], self._offsets[name]
        return cut(file, info, begin, unit=unit, types=types, to_floats=FLOATS[info.dtype])

    def _plain(self, name: str) -> TensorInfo:
        info = self.tensors[name]
        if info.dtype not in _FLOATS:
            raise WeightsError(
                f"{info.file}: tensor '{name}' has type {info.dtype}; weights are read from {', '.join(_FLOATS)}"
            )
        return info

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _check_shard(file: Path, header: SafetensorsHeader, expected: set[str] | None, seen: dict[str, TensorInfo]) -> None:
    """That a shard holds what the index says, and nothing that another shard holds too."""
    if twice := sorted(seen.keys() & header.tensors.keys()):
        raise WeightsError(f"{file}: tensor '{twice[0]}' is also in {seen[twice[0]].file.name}")
    if expected is not None and (missing := sorted(expected - header.tensors.keys())):
        raise WeightsError(f"{file}: lacks tensor '{missing[0]}' ({len(missing)} in all) that the index promises in it")


PART = SafetensorsCheckpoint
