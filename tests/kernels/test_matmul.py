"""Products of packed matrices: the same bits for a row whoever its neighbours are and however many threads work on it."""

from __future__ import annotations

import numpy as np
import pytest

from astrai_runtime.kernels.base import FORMATS, SOURCE_TYPES, Format, Isa, MatrixShape
from astrai_runtime.kernels.cpu import Library, Matrix, Pool

ROWS, COLS = 150, 208  # several tiles, the last one not whole; groups of 32 columns, the last one not whole


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(library: Library, pool: Pool, format: Format, values: np.ndarray, *, offsets: bool = False) -> Matrix:
    matrix = library.matrix(MatrixShape(format, *values.shape, offsets=offsets))
    library.pack(pool, matrix, "F32", values.view(np.uint8))
    return matrix


@pytest.mark.parametrize("format", FORMATS)
def test_neighbours_change_no_bit(library: Library, isa: Isa, pool: Pool, format: Format) -> None:
    matrix, x = packed(library, pool, format, numbers(ROWS, COLS)), numbers(40, COLS, seed=1)
    alone = np.concatenate([library.matmul(isa, pool, matrix, x[i : i + 1]) for i in range(40)])
    for n in (2, 3, 4, 5, 7, 12, 13, 16, 17, 24, 31, 40):
        for first in {0, 40 - n}:
            together = library.matmul(isa, pool, matrix, x[first : first + n])
            assert np.array_equal(together.view(np.uint32), alone[first : first + n].view(np.uint32)), (n, first)


@pytest.mark.parametrize("format", FORMATS)
def test_threads_change_no_bit(library: Library, isa: Isa, pool: Pool, n_threads: int, format: Format) -> None:
    matrix, x = packed(library, pool, format, numbers(ROWS, COLS)), numbers(9, COLS, seed=1)
    expected = library.matmul(isa, pool, matrix, x)
    with library.pool_open(n_threads, 0) as other:
        assert np.array_equal(library.matmul(isa, other, matrix, x), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_fault_of_a_row_shows_and_stays_its_own(
    library: Library, isa: Isa, pool: Pool, format: Format, fault: float
) -> None:
    matrix, x = packed(library, pool, format, numbers(ROWS, COLS)), numbers(6, COLS, seed=1)
    healthy = library.matmul(isa, pool, matrix, x)
    x[2, 100] = fault
    y = library.matmul(isa, pool, matrix, x)
    assert not np.isfinite(y[2]).any()
    assert np.array_equal(np.delete(y, 2, 0), np.delete(healthy, 2, 0))


def test_blocks_with_offsets_are_multiplied_with_them(library: Library, isa: Isa, pool: Pool) -> None:
    """Q4_1: 32 weights from a scale, an offset and a nibble each; only its offset tells these rows apart."""
    cols, source = 64, SOURCE_TYPES["Q4_1"]
    blocks = np.zeros((20, cols // 32, source.block_bytes), np.uint8)
    blocks[..., 2:4] = np.arange(20, dtype=np.float16).view(np.uint8).reshape(20, 1, 2)
    matrix = library.matrix(MatrixShape("int4", 20, cols, offsets=True))
    library.pack(pool, matrix, "Q4_1", blocks.reshape(20, -1))
    assert np.array_equal(library.unpack(matrix, range(20)), np.repeat(np.arange(20.0), cols).reshape(20, cols))
    x = numbers(5, cols, seed=1)
    exact = x.sum(-1, keepdims=True) * np.arange(20.0)
    assert np.allclose(library.matmul(isa, pool, matrix, x), exact, rtol=0, atol=0.02 * np.abs(x).sum(-1).max() * 20)
