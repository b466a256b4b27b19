"""The loaded library: what it refuses before memory is touched, who owns memory, and that calls reach the kernels."""

from __future__ import annotations

import gc
import platform
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels.base import FORMATS, ISAS, SOURCE_TYPES, Isa, MatrixShape, lacks
from astrai_runtime.kernels.cpu import Library, Matrix, Pool, address
from astrai_runtime.machine import probe

# How far a packed weight may be from what it was packed from, as a share of the largest of its group.
ERRORS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.6 / 127, "int4": 0.6 / 7}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def as_rows(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def packed(library: Library, pool: Pool, values: np.ndarray, format: str) -> Matrix:
    matrix = library.matrix(MatrixShape(format, *values.shape))
    library.pack(pool, matrix, "F32", as_rows(values))
    return matrix


def test_library_knows_its_instruction_sets_and_those_of_this_cpu(library: Library) -> None:
    built, here = library.built_for(), library.runs_here()
    assert built == tuple(isa for isa in ISAS if isa in built)
    assert set(here) <= set(built)
    assert here[-1] == "portable"
    assert here == tuple(isa for isa in built if not lacks(isa, probe()))


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "libastrai_cpu.so"
    file.write_bytes(b"not a library")
    with pytest.raises(KernelError, match=r"do not load: .*astrai-deploy kernels build"):
        Library.open(file)


def test_instruction_set_that_does_not_exist_is_refused_in_the_librarys_words(library: Library, pool: Pool) -> None:
    matrix = packed(library, pool, numbers(16, 32), "float32")
    with pytest.raises(KernelError, match=r"astrai_matmul: .*'sse9'.*portable"):
        library.matmul("sse9", pool, matrix, numbers(1, 32))


def test_failure_belongs_to_its_thread(library: Library, pool: Pool) -> None:
    with pytest.raises(KernelError):
        library.rms_norm("sse9", numbers(1, 16), numbers(16), 1e-5)
    elsewhere: list[bytes] = []
    thread = threading.Thread(target=lambda: elsewhere.append(library.functions.astrai_error()))
    thread.start()
    thread.join()
    assert elsewhere == [b""]
    assert b"sse9" in library.functions.astrai_error()


@pytest.mark.parametrize("n_bytes", [1, 64, 4097, 5 << 20])
def test_allocated_memory_is_zero_aligned_and_writable(library: Library, n_bytes: int) -> None:
    memory = library.allocate(n_bytes)
    assert (memory.dtype, memory.shape) == (np.uint8, (n_bytes,))
    assert memory.ctypes.data % 64 == 0
    assert not memory.any()
    memory[:] = 255


def test_allocating_nothing_or_too_much(library: Library) -> None:
    assert library.allocate(0).size == 0
    with pytest.raises(KernelError, match="could not be allocated"):
        library.allocate(1 << 60)


def test_memory_is_freed_with_the_last_view_of_it(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    call = Library.call
    monkeypatch.setattr(Library, "call", lambda self, name, *rest: (called.append(name), call(self, name, *rest))[1])
    view = library.allocate(4096)[1024:].view(np.float32)
    gc.collect()
    assert called == ["astrai_allocate"]
    view[:] = 1.0
    assert view.sum() == 768
    del view
    gc.collect()
    assert called == ["astrai_allocate", "astrai_free"]


def test_pools_close_once_and_by_themselves(library: Library) -> None:
    for n_threads in (1, 2, 4):
        with library.pool_open(n_threads, 0) as pool:
            assert pool.threads == n_threads
            packed(library, pool, numbers(64, 64), "int8")
        pool.close()
    before = threading.active_count()
    for _ in range(20):
        library.pool_open(3, 0)
    gc.collect()
    assert threading.active_count() == before
    assert sum(1 for _ in Path("/proc/self/task").iterdir()) < 40


@pytest.mark.parametrize("format", FORMATS)
def test_rows_come_back_as_they_were_packed(library: Library, pool: Pool, format: str) -> None:
    values = numbers(37, 70)  # neither whole tiles nor whole groups
    matrix = packed(library, pool, values, format)
    order = [36, 0, 5, 5]
    back = library.unpack(matrix, order)
    groups = np.abs(np.pad(values, ((0, 0), (0, 26))).reshape(37, 3, 32)).max(-1).repeat(32, -1)[:, :70]
    assert (np.abs(back - values[order]) <= ERRORS[format] * groups[order]).all()
    assert np.array_equal(back[2], back[3])


def test_rows_are_packed_from_where_they_lie(library: Library, pool: Pool) -> None:
    values = numbers(64, 32)
    whole = packed(library, pool, values, "int8")
    pieces = library.matrix(MatrixShape("int8", 64, 32))
    wide = np.zeros((64, 200), np.uint8)
    wide[:, :128] = as_rows(values)
    for first in (48, 0, 16, 32):
        library.pack(pool, pieces, "F32", wide[first : first + 16, :128], first)
    assert np.array_equal(pieces.data, whole.data)
    assert np.array_equal(pieces.scales, whole.scales)


def test_what_cannot_be_packed_is_refused_before_it_is_read(library: Library, pool: Pool) -> None:
    matrix = library.matrix(MatrixShape("int8", 32, 64))
    rows = as_rows(numbers(32, 64))
    with pytest.raises(KernelError, match="stored as IQ1_S cannot be packed; these can: F32"):
        library.pack(pool, matrix, "IQ1_S", rows)
    with pytest.raises(KernelError, match=r"rows of 64 Q8_0 values are uint8 \[n, 68\]"):
        library.pack(pool, matrix, "Q8_0", rows)
    with pytest.raises(KernelError, match=r"are uint8 \[n, 256\], not float32"):
        library.pack(pool, matrix, "F32", numbers(32, 64))
    with pytest.raises(KernelError, match=r"rows 1..33 do not fit into a matrix of 32 rows"):
        library.pack(pool, matrix, "F32", rows, 1)
    with pytest.raises(KernelError, match="backwards"):
        library.pack(pool, matrix, "F32", rows[::-1])
    with pytest.raises(KernelError, match="has none at -1 or 32"):
        library.unpack(matrix, [-1, 32])
    assert not matrix.data.any()


def test_matrix_refuses_buffers_that_would_be_read_past_their_end(library: Library) -> None:
    shape = MatrixShape("int8", 16, 32)
    data, scales = library.allocate(shape.data_bytes), np.zeros(16, np.uint16)
    assert Matrix(shape, data, scales).struct.rows == 16
    with pytest.raises(KernelError, match="data must be 512 contiguous numbers of uint8, not 511 of uint8"):
        Matrix(shape, data[:-1], scales)
    with pytest.raises(KernelError, match="scales must be 16 contiguous numbers of uint16, not nothing"):
        Matrix(shape, data)
    with pytest.raises(KernelError, match="not 16 of float16"):
        Matrix(shape, data, scales.view(np.float16))
    with pytest.raises(KernelError, match="offsets must be 16"):
        Matrix(MatrixShape("int4", 16, 32, offsets=True), data, scales)
    with pytest.raises(KernelError, match="no multiple of 64"):
        Matrix(MatrixShape("int8", 16, 16), library.allocate(513)[1:], scales)
    with pytest.raises(KernelError, match="not contiguous"):
        address(np.zeros((4, 8), np.float32)[:, :4], np.float32, 16, "x")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [1, 5, 33])
def test_matmul_multiplies_what_unpack_shows(library: Library, pool: Pool, isa: Isa, format: str, n: int) -> None:
    matrix, x, bias = packed(library, pool, numbers(50, 96), format), numbers(n, 96, seed=1), numbers(64, seed=2)
    weights = library.unpack(matrix, range(50)).astype(np.float64)
    exact = x.astype(np.float64) @ weights.T
    y = library.matmul(isa, pool, matrix, x)
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7, "int8": 2e-2, "int4": 2e-2}[format]
    assert y.shape == (n, 50)
    assert np.abs(y - exact).max() <= tolerance * np.abs(exact).max()
    biased = library.matmul(isa, pool, matrix, x, bias)
    assert np.allclose(biased, y + bias[:50], rtol=0, atol=1e-5)


def test_matmul_refuses_inputs_of_other_shapes(library: Library, pool: Pool) -> None:
    matrix = packed(library, pool, numbers(16, 32), "float32")
    with pytest.raises(KernelError, match=r"x must be \[n, 32\], not \[1, 31\]"):
        library.matmul("portable", pool, matrix, numbers(1, 31))
    with pytest.raises(KernelError, match=r"x must be .* float32, not 32 of float64"):
        library.matmul("portable", pool, matrix, numbers(1, 32).astype(np.float64))
    with pytest.raises(KernelError, match="bias must be 16"):
        library.matmul("portable", pool, matrix, numbers(1, 32), numbers(15))


def test_rms_norm_is_the_formula(library: Library, isa: Isa) -> None:
    x, weight = numbers(3, 80) * 5, numbers(80, seed=1)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    assert np.allclose(library.rms_norm(isa, x, weight, 1e-5), exact, rtol=1e-5, atol=1e-6)


def test_every_source_type_has_a_size_for_whole_rows() -> None:
    assert [SOURCE_TYPES[name].row_bytes(256) for name in ("F32", "BF16", "Q8_0", "Q4_K")] == [1024, 512, 272, 144]


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="looks at x86 instructions")
def test_code_outside_the_instruction_sets_runs_on_any_cpu(library_path: Path) -> None:
    """A CPU without AVX loads the library, asks it what it can run, packs weights: without meeting one vector of AVX."""
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(library_path)], check=True, capture_output=True, text=True
    ).stdout
    function, wrong = "", set()
    for line in listing.splitlines():
        if named := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            function = named[1]
        elif re.search(r"\t(v[a-z0-9]+ .*%[xyz]mm|k(mov|or|and)[a-z]+ )", line) and not re.search(
            r"astrai::avx(2|512)::", function
        ):
            wrong.add(function)
    assert not wrong
