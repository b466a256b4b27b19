"""A tensor's rows as bytes, a few MB at a time, in the type that they are stored in or as float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from astrai_runtime.weights._pieces import Pieces
from astrai_runtime.weights.base import Slice, TensorInfo

CONVERTED = 2**20  # elements that are converted at once: 4 MB of float32, which stays in the processor's cache
AS_STORED = 2**24  # bytes that are handed out at once where nothing is converted

Bytes = NDArray[np.uint8]
ToFloats = Callable[[Bytes], NDArray[np.float32]]


def _from_bfloat16(raw: Bytes) -> NDArray[np.float32]:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _from_float64(raw: Bytes) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return raw.view(np.float64).astype(np.float32)


# Plain numbers by the names that both formats give them. The bytes may begin anywhere, so numpy gets a copy.
FLOATS: Mapping[str, ToFloats] = {
    "F64": lambda raw: _from_float64(raw.copy()),
    "F32": lambda raw: raw.copy().view(np.float32),
    "F16": lambda raw: raw.copy().view(np.float16).astype(np.float32),
    "BF16": lambda raw: _from_bfloat16(raw.copy()),
}


def cut(
    file: Pieces,
    info: TensorInfo,
    begin: int,
    *,
    unit: int,
    types: Collection[str],
    to_floats: ToFloats,
    check: Callable[[Bytes], None] = lambda raw: None,
) -> Iterator[Slice]:
    """The slices of the tensor whose bytes begin at `begin`. `check` sees what is handed out as it is stored."""
    rows = math.prod(info.shape[:-1])
    if not info.n_bytes:
        return
    row_bytes = info.n_bytes // rows
    as_stored = info.dtype in types
    fit = AS_STORED // row_bytes if as_stored else CONVERTED // info.shape[-1] if info.shape else 1
    step = max(fit // unit * unit, unit)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        span = begin + start * row_bytes, begin + stop * row_bytes
        raw = np.frombuffer(file.view(*span), np.uint8)
        if as_stored:
            check(raw)
            yield Slice(start, info.dtype, raw.reshape(stop - start, row_bytes))
        else:
            yield Slice(start, "F32", to_floats(raw).view(np.uint8).reshape(stop - start, -1))
        del raw
        file.forget(*span)
