"""The k largest of one row, in one order for every machine: by value, then by lowest token id."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def largest(row_V: Tensor, k: int) -> Tensor:
    """Token ids of the `k` largest values (all when `k` exceeds the row), largest first, ties by lowest id.

    `torch.topk` leaves open which of several equal values it takes; a reader's answer must not depend on that.
    """
    import torch

    size = row_V.shape[-1]
    if k >= size:
        return torch.sort(row_V, descending=True, stable=True).indices
    values, ids = torch.topk(row_V, k + 1)
    if values[k - 1] == values[k]:  # a tie at the border: topk's choice among the equals is arbitrary
        border = values[k - 1]
        above = (row_V > border).nonzero().flatten()
        level = (row_V == border).nonzero().flatten()[: k - above.numel()]
        ids = torch.cat([above, level])
    else:
        ids = ids[:k].sort().values
    return ids[torch.sort(row_V[ids], descending=True, stable=True).indices]
