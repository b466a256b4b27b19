"""Searches of one long row: its best token, its k largest, what is left of it; ties go to the lowest token id.

A vocabulary is looked at block by block: only blocks whose best value is high enough are read value by value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256  # a vocabulary of 262,144 has 1,024 blocks
_SMALL = 16 * _BLOCK  # shorter rows are looked at as a whole
_SHARE = 4  # so is a row when more than one block in so many would have to be read


def largest(row_V: Tensor, k: int) -> Tensor:
    """Token ids of the `k` largest values (all when `k` exceeds the row), largest first, ties by lowest id.

    `torch.topk` leaves open which of several equal values it takes; a reader's answer must not depend on that.
    """
    import torch

    blocks = row_V.numel() // _BLOCK
    if 0 < k * _SHARE <= blocks and row_V.numel() >= _SMALL:
        best = _whole_blocks(row_V).amax(dim=1)
        # Each of the k best blocks holds a value that is not below the k-th, so the row's k largest are not either.
        border = torch.topk(best, k).values[-1]
        ids = _not_below(row_V, best, border)
        if ids is not None:
            return ids[_largest(row_V[ids], k)]
    return _largest(row_V, k)


def not_below(row_V: Tensor, border: float) -> Tensor:
    """Ids of the values that reach `border`, in order."""
    if row_V.numel() >= _SMALL:
        ids = _not_below(row_V, _whole_blocks(row_V).amax(dim=1), border)
        if ids is not None:
            return ids
    return (row_V >= border).nonzero().flatten()


def first_best(row_V: Tensor, best: float) -> int:
    """The lowest id of the largest value, which is `best`."""
    return int(not_below(row_V, best)[0])


def remaining(row_V: Tensor) -> Tensor | None:
    """Ids of the values above -inf, in order; None when so much is left that a list of it would cost more than it saves."""
    import torch

    border = torch.finfo(row_V.dtype).min
    if row_V.numel() < _SMALL:
        return (row_V >= border).nonzero().flatten()
    return _not_below(row_V, _whole_blocks(row_V).amax(dim=1), border)


def keep_only(row_V: Tensor, ids: Tensor) -> None:
    """Removes every token but `ids`, whose values stay bit for bit."""
    values = row_V[ids]
    row_V.fill_(float("-inf"))
    row_V[ids] = values


def _whole_blocks(row_V: Tensor) -> Tensor:
    blocks = row_V.numel() // _BLOCK
    return row_V[: blocks * _BLOCK].view(blocks, _BLOCK)


def _not_below(row_V: Tensor, best: Tensor, border: Tensor | float) -> Tensor | None:
    """As `not_below`, with the blocks' maxima given; None when too many blocks reach the border."""
    import torch

    whole = _whole_blocks(row_V)
    hot = (best >= border).nonzero().flatten()
    if hot.numel() * _SHARE > best.numel():
        return None
    block, place = (whole[hot] >= border).nonzero(as_tuple=True)
    beyond = (row_V[whole.numel() :] >= border).nonzero().flatten()
    return torch.cat([hot[block] * _BLOCK + place, beyond + whole.numel()])


def _largest(row_V: Tensor, k: int) -> Tensor:
    import torch

    if k >= row_V.shape[-1]:
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
