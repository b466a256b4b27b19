"""The compiled CPU kernels: loads the library and calls it. What it cannot do it refuses; it never falls back.

Calls release the GIL. Arrays must be C-contiguous and of the type that the C interface names; they are checked here,
because a wrong one would be read past its end there.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels import _abi
from astrai_runtime.kernels._abi import KV, PARTS, Decoder, Layer, Step
from astrai_runtime.kernels._buffers import ALIGNMENT, Array, Matrix, address
from astrai_runtime.kernels.base import FORMATS, ISAS, SOURCE_TYPES, Format, Isa, MatrixShape

__all__ = ["ALIGNMENT", "KV", "PART", "PARTS", "Decoder", "Layer", "Library", "Matrix", "Pool", "Program", "Step", "address"]


class Pool:
    """A few threads that kernels share. One call at a time may use them."""

    def __init__(self, library: Library, threads: int, spin_us: int) -> None:
        handle = library.call("astrai_pool_open", threads, spin_us)
        if not handle:
            raise library.failure(f"{threads} threads could not be started")
        self.handle: int = handle
        self.threads = threads
        self._close = weakref.finalize(self, library.call, "astrai_pool_close", handle)
        self._close.atexit = False  # the process takes its threads with it

    def close(self) -> None:
        """Ends the threads. Nothing may use the pool any more; closing twice is fine."""
        self._close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Program:
    """A decoder that runs whole steps. Scratch memory grows with the largest step and is kept."""

    def __init__(
        self,
        library: Library,
        isa: Isa,
        decoder: Decoder,
        pool: Pool,
        *,
        max_tokens: int,
        max_logits: int,
        keep: Sequence[object] = (),
    ) -> None:
        handle = library.call("astrai_program_open", isa.encode(), decoder, pool.handle, max_tokens, max_logits)
        if not handle:
            raise library.failure("the decoder could not be opened")
        self._library, self._handle = library, handle
        self._keep = (decoder, pool, *keep)  # what the C side points at
        self._run = library.functions.astrai_program_run
        self._close = weakref.finalize(self, library.call, "astrai_program_close", handle)
        self._close.atexit = False

    def run(self, step: Step) -> None:
        """Computes one step; what `step` points at must stay until this returns.

        Raises:
            KernelError: the step is not valid; nothing was written.
        """
        if self._run(self._handle, step):
            raise self._library.failure("the step failed")

    def bytes(self) -> int:
        """Scratch memory held now."""
        return int(self._library.call("astrai_program_bytes", self._handle))

    def profile(self) -> dict[str, float]:
        """Seconds in each part of all steps since the last call."""
        seconds = (ctypes.c_double * len(PARTS))()
        self._library.call("astrai_program_profile", self._handle, seconds)
        return dict(zip(PARTS, seconds, strict=True))

    def close(self) -> None:
        """Frees the scratch memory; closing twice is fine."""
        self._close()


class Library:
    """One loaded library of CPU kernels."""

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.path, self.functions = path, functions

    @classmethod
    def open(cls, path: Path) -> Library:
        """Loads and checks it.

        Raises:
            KernelError: it does not load on this system, or has another interface than this package.
        """
        try:
            functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(
                f"{path}: the CPU kernels do not load: {error}; remove the file, then run: astrai-deploy kernels build"
            ) from error
        missing = _abi.bind(functions)
        found = None if "astrai_abi" in missing else int(functions.astrai_abi())
        if missing or found != _abi.ABI:
            why = f"version {found} of the interface, {_abi.ABI} is needed" if found != _abi.ABI else f"no {missing[0]}()"
            raise KernelError(
                f"{path}: the CPU kernels are not those of this version of astrai-deploy ({why}); "
                "remove the file, then run: astrai-deploy kernels build"
            )
        return cls(path, functions)

    def call(self, name: str, *arguments: Any) -> Any:
        """One C function by its name; returns what it returns."""
        return getattr(self.functions, name)(*arguments)

    def failure(self, what: str) -> KernelError:
        """An error with the library's own words about the last failure of this thread."""
        said = (self.functions.astrai_error() or b"").decode(errors="replace")
        return KernelError(f"{what}: {said}" if said else what)

    def built_for(self) -> tuple[Isa, ...]:
        """The instruction sets that were compiled, best first."""
        return _isas(self.functions.astrai_built_for())

    def runs_here(self) -> tuple[Isa, ...]:
        """Those of them that this CPU has, best first; the CPU is asked, not /proc/cpuinfo."""
        return _isas(self.functions.astrai_runs_here())

    def pool_open(self, threads: int, spin_us: int) -> Pool:
        """Starts `threads - 1` threads: the caller works too.

        Raises:
            KernelError: the system gives no more threads.
        """
        return Pool(self, threads, spin_us)

    def allocate(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory in huge pages where there are some, aligned to 64 bytes. Freed with the last view of it.

        Raises:
            KernelError: there is not that much.
        """
        if n_bytes <= 0:
            return np.zeros(0, np.uint8)
        start = self.call("astrai_allocate", n_bytes)
        if not start:
            raise self.failure(f"{n_bytes / 2**20:,.1f} MiB could not be allocated")
        memory = (ctypes.c_uint8 * n_bytes).from_address(start)
        weakref.finalize(memory, self.call, "astrai_free", start, n_bytes).atexit = False
        return np.frombuffer(memoryview(memory), np.uint8)

    def matrix(self, shape: MatrixShape) -> Matrix:
        """An empty packed matrix in memory of its own."""
        scales, offsets = shape.scale_bytes > 0, shape.offsets
        return Matrix(
            shape,
            self.allocate(shape.data_bytes),
            self.allocate(shape.scale_bytes).view(np.uint16) if scales else None,
            self.allocate(shape.scale_bytes).view(np.uint16) if offsets else None,
        )

    def pack(self, pool: Pool, matrix: Matrix, stored: str, rows: Array, first_row: int = 0) -> None:
        """Packs rows of plain numbers or of ggml's blocks, quantising where the matrix is quantised.

        Args:
            stored: how the rows are stored, as checkpoints call it: one of SOURCE_TYPES.
            rows: [n, bytes of a row], uint8; rows may lie further apart than they are long.
            first_row: where the first of them goes.

        Raises:
            KernelError: a type that cannot be packed, rows of another size, or more rows than the matrix has.
        """
        source = SOURCE_TYPES.get(stored)
        if source is None:
            raise KernelError(f"rows stored as {stored} cannot be packed; these can: {', '.join(SOURCE_TYPES)}")
        needed = source.row_bytes(matrix.shape.cols)
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != needed or (needed > 1 and rows.strides[1] != 1):
            raise KernelError(
                f"rows of {matrix.shape.cols} {stored} values are uint8 [n, {needed}], not {rows.dtype} {list(rows.shape)}"
            )
        if first_row < 0 or first_row + len(rows) > matrix.shape.rows:
            there = f"{first_row}..{first_row + len(rows)}"
            raise KernelError(f"rows {there} do not fit into a matrix of {matrix.shape.rows} rows")
        stride = rows.strides[0] if len(rows) > 1 else needed
        if stride < needed:
            raise KernelError("rows that overlap, or run backwards, cannot be packed")
        self._check(
            "astrai_pack",
            pool.handle,
            matrix.struct,
            source.number,
            rows.ctypes.data,
            stride,
            first_row,
            len(rows),
        )

    def unpack(self, matrix: Matrix, rows: Sequence[int] | Array) -> npt.NDArray[np.float32]:
        """Some rows of a packed matrix as numbers, [n, cols].

        Raises:
            KernelError: there is no such row.
        """
        wanted = np.ascontiguousarray(rows, np.int32)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < matrix.shape.rows:
            raise KernelError(f"a matrix of {matrix.shape.rows} rows has none at {wanted.min()} or {wanted.max()}")
        out = np.empty((len(wanted), matrix.shape.cols), np.float32)
        self._check("astrai_unpack", matrix.struct, wanted.ctypes.data, len(wanted), out.ctypes.data)
        return out

    def program_open(
        self,
        isa: Isa,
        decoder: Decoder,
        pool: Pool,
        *,
        max_tokens: int,
        max_logits: int,
        keep: Sequence[object] = (),
    ) -> Program:
        """Opens a decoder. `keep` holds whatever owns the memory that it points at.

        Raises:
            KernelError: an instruction set that this CPU lacks, or a decoder that cannot be run.
        """
        return Program(self, isa, decoder, pool, max_tokens=max_tokens, max_logits=max_logits, keep=keep)

    def matmul(self, isa: Isa, pool: Pool, matrix: Matrix, x: Array, bias: Array | None = None) -> npt.NDArray[np.float32]:
        """y = W x for each row of x [n, cols] float32: [n, rows]. A bias has as many numbers as W has padded rows."""
        shape = matrix.shape
        if x.ndim != 2 or x.shape[1] != shape.cols:
            raise KernelError(f"x must be [n, {shape.cols}], not {list(x.shape)}")
        out = np.empty((len(x), shape.padded_rows), np.float32)
        self._check(
            "astrai_matmul",
            isa.encode(),
            pool.handle,
            matrix.struct,
            address(x, np.float32, x.size, "x"),
            len(x),
            None if bias is None else address(bias, np.float32, shape.padded_rows, "bias"),
            out.ctypes.data,
            shape.padded_rows,
        )
        return out[:, : shape.rows]

    def attention(
        self,
        isa: Isa,
        pool: Pool,
        layer: Layer,
        kv_format: Format,
        layer_index: int,
        step: Step,
        q: Array,
        k: Array,
        v: Array,
    ) -> npt.NDArray[np.float32]:
        """Stores k and v [T, K, D] and attends with q [T, H, D]: [T, H, D]. Norms and rotation have been applied."""
        kv_shape = (step.n_tokens, layer.n_kv_heads, layer.head_dim)
        if k.shape != kv_shape or v.shape != kv_shape or q.shape != (step.n_tokens, layer.n_heads, layer.head_dim):
            raise KernelError(f"q, k, v must be [T, H, D], [T, K, D] twice; not {q.shape}, {k.shape}, {v.shape}")
        out = np.empty(q.shape, np.float32)
        self._check(
            "astrai_attention",
            isa.encode(),
            pool.handle,
            layer,
            FORMATS.index(kv_format),
            layer_index,
            step,
            *(address(each, np.float32, each.size, name) for each, name in ((q, "q"), (k, "k"), (v, "v"))),
            out.ctypes.data,
        )
        return out

    def rms_norm(self, isa: Isa, x: Array, weight: Array, eps: float) -> npt.NDArray[np.float32]:
        """x / rms(x) * weight for each row of x [n, cols] float32."""
        n, cols = x.shape
        out = np.empty(x.shape, np.float32)
        self._check(
            "astrai_rms_norm",
            isa.encode(),
            address(x, np.float32, x.size, "x"),
            address(weight, np.float32, cols, "weight"),
            n,
            cols,
            eps,
            out.ctypes.data,
        )
        return out

    def _check(self, name: str, *arguments: Any) -> None:
        if self.call(name, *arguments):
            raise self.failure(name)


def _isas(text: bytes) -> tuple[Isa, ...]:
    names = text.decode().split()
    return tuple(isa for isa in ISAS if isa in names)


PART = Library
