"""From a file's numbers to a tensor that owns its memory: slice by slice, so that no second copy of the whole exists."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._pieces import Pieces
from astrai_runtime.weights.base import TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

SLICE = 2**20  # elements that are converted at once: 4 MB of float32, which stays in the processor's cache

Decode = Callable[["NDArray[np.uint8]"], "torch.Tensor"]  # raw bytes of whole rows -> their elements, in any float type


def fill(file: Pieces, info: TensorInfo, begin: int, dtype: torch.dtype, decode: Decode) -> torch.Tensor:
    """The tensor whose bytes begin at `begin`, decoded and cast.

    Raises:
        WeightsError: a value does not fit into float16; the message names file and tensor.
    """
    import numpy as np
    import torch

    out = torch.empty(info.shape, dtype=dtype)
    rows = math.prod(info.shape[:-1])
    if not info.n_bytes:
        return out
    flat = out.view(rows, -1)
    row_bytes = info.n_bytes // rows
    step = max(SLICE // flat.shape[1], 1)
    for row in range(0, rows, step):
        last = min(row + step, rows)
        span = begin + row * row_bytes, begin + last * row_bytes
        raw = np.frombuffer(file.view(*span), np.uint8)
        target = flat[row:last]
        target.copy_(decode(raw).view(target.shape))
        del raw
        file.forget(*span)
        if dtype is torch.float16 and not torch.isfinite(target).all():
            raise WeightsError(
                f"{info.file}: tensor '{info.name}' holds values that float16 cannot (above 65504, or not finite); "
                "use dtype bfloat16 or float32"
            )
    return out
