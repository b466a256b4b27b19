"""ggml's block formats to float32. Formats: ggml's ggml-quants.c; the arithmetic is the gguf package's, but for Q8_0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._slices import FLOATS
from astrai_runtime.weights.base import TensorInfo

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_BLOCK, _BLOCK_BYTES = 32, 34  # Q8_0: a float16 scale, then 32 signed bytes
# Bytes of a block, and where its float16 scales begin.
_SCALES: dict[str, tuple[int, tuple[int, ...]]] = {
    "Q4_0": (18, (0,)), "Q4_1": (20, (0, 2)), "Q5_0": (22, (0,)), "Q5_1": (24, (0, 2)), "Q8_0": (34, (0,)),
    "Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,)),
}  # fmt: skip


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Twice as fast as the gguf package, which works on 16 rows at a time; embeddings are often Q8_0."""
    blocks = raw.reshape(-1, _BLOCK_BYTES)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    values = np.empty((len(blocks), _BLOCK), np.float32)
    np.multiply(blocks[:, 2:].view(np.int8), scales, out=values)
    return values


def decode(info: TensorInfo, row_length: int, raw: NDArray[np.uint8]) -> torch.Tensor:
    """Raw bytes of whole rows to elements.

    Raises:
        WeightsError: a scale is not finite, so the data is damaged.
    """
    import torch

    if info.dtype in ("F32", "F16", "BF16"):
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype]
        return torch.from_numpy(raw.copy()).view(plain)
    return torch.from_numpy(floats(info, row_length, raw))


def floats(info: TensorInfo, row_length: int, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Raw bytes of whole rows to float32. Raises as `decode`."""
    if info.dtype in FLOATS:
        return FLOATS[info.dtype](raw)
    values: NDArray[Any]
    with np.errstate(all="ignore"):  # what overflows in damaged blocks is reported below, once
        if info.dtype == "Q8_0":
            values = _q8_0(raw)
        else:
            import gguf
            from gguf.quants import dequantize

            kind = gguf.GGMLQuantizationType[info.dtype]
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            values = dequantize(raw.reshape(-1, row_length // block * block_bytes), kind)
        if not np.isfinite(values).all():
            raise _damaged(info)
    return values


def check_scales(info: TensorInfo, raw: NDArray[np.uint8]) -> None:
    """That blocks which are used as they are have finite scales; plain numbers may be anything. Raises as `decode`."""
    if info.dtype not in _SCALES:
        return
    n_bytes, places = _SCALES[info.dtype]
    blocks = raw.reshape(-1, n_bytes)
    for at in places:
        exponents = blocks[:, at + 1] & 0x7C
        if (exponents == 0x7C).any():
            raise _damaged(info)


def _damaged(info: TensorInfo) -> WeightsError:
    return WeightsError(f"{info.file}: tensor '{info.name}' ({info.dtype}) has a scale that is not finite; it is damaged")
