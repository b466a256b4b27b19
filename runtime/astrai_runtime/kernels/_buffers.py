"""Memory that the C interface reads and writes: arrays checked before their addresses are taken, and packed matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels import _abi
from astrai_runtime.kernels.base import FORMATS, MatrixShape

Array = npt.NDArray[Any]
ALIGNMENT = 64


class Matrix:
    """A packed matrix: its shape, its memory, and the struct that the C interface takes.

    Raises:
        KernelError: a buffer is too small, of another type or not aligned.
    """

    def __init__(self, shape: MatrixShape, data: Array, scales: Array | None = None, offsets: Array | None = None) -> None:
        self.shape, self.data, self.scales, self.offsets = shape, data, scales, offsets
        scaled = shape.scale_bytes > 0
        self.struct = _abi.Matrix(
            format=FORMATS.index(shape.format),
            rows=shape.rows,
            cols=shape.cols,
            data=address(data, np.uint8, shape.data_bytes, "data"),
            scales=address(scales, np.uint16, shape.scale_bytes // 2, "scales") if scaled else None,
            offsets=address(offsets, np.uint16, shape.scale_bytes // 2, "offsets") if shape.offsets else None,
        )
        if self.struct.data % ALIGNMENT:
            raise KernelError(f"a packed matrix begins at address {self.struct.data}, which is no multiple of {ALIGNMENT}")


def address(array: Array | None, dtype: npt.DTypeLike, size: int, what: str) -> int:
    """Where a C-contiguous array of at least `size` numbers of `dtype` begins.

    Raises:
        KernelError: it is none of that.
    """
    if array is None or array.dtype != np.dtype(dtype) or array.size < size or not array.flags.c_contiguous:
        found = "nothing" if array is None else f"{array.size:,} of {array.dtype}"
        loose = "" if array is None or array.flags.c_contiguous else ", not contiguous"
        raise KernelError(f"{what} must be {size:,} contiguous numbers of {np.dtype(dtype).name}, not {found}{loose}")
    return int(array.ctypes.data)
