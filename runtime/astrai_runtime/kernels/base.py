"""What native kernels are asked for, as plain data: which instruction set, how many threads, how large a packed matrix is.

The layouts are those of csrc/cpu/include/astrai_cpu.h. Imports no torch and loads no library: the plan uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import NonNegativeInt, PositiveInt, StrictBool

from astrai_runtime.machine import Machine
from astrai_runtime.part import Config

Isa = Literal["avx512", "avx2", "portable"]
ISAS: tuple[Isa, ...] = get_args(Isa)  # best first
# What each needs of a CPU, in the kernel's spelling; see csrc/cpu/isa/.
FEATURES: dict[Isa, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "portable": frozenset(),
}

X86 = ("x86_64", "AMD64")  # as platform.machine() spells it

Format = Literal["float32", "bfloat16", "int8", "int4"]
FORMATS: tuple[Format, ...] = get_args(Format)  # their places are the numbers of astrai_cpu.h
TILE = 16  # rows of a packed matrix that lie together
GROUP = 32  # columns that share a scale
_BITS: dict[Format, int] = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}


class KernelsConfig(Config):
    """The `kernels` group: how the native kernels of a CPU run."""

    isa: Literal["auto", "avx512", "avx2", "portable"]  # auto: the best that the CPU has; a lower one for comparison
    threads: PositiveInt | Literal["auto"]  # auto: the cores that this process may use
    spin_us: NonNegativeInt  # microseconds that an idle worker spins before it sleeps
    packed_cache: StrictBool  # keep packed weights in the state folder, so that the next start maps them


def isas_of(architecture: str) -> tuple[Isa, ...]:
    """The instruction sets that are compiled for an architecture (`platform.machine()`), best first."""
    return ISAS if architecture in X86 else ("portable",)


def lacks(isa: Isa, machine: Machine) -> frozenset[str]:
    """The CPU features that `isa` needs and the machine does not have."""
    return FEATURES[isa] - machine.features


def best_isa(machine: Machine) -> Isa:
    """The best instruction set that the machine has; `portable` always works."""
    return next(isa for isa in ISAS if not lacks(isa, machine))


@dataclass(frozen=True, slots=True)
class SourceType:
    """How rows lie that a matrix is packed from: its number in astrai_cpu.h, and bytes for so many values."""

    number: int
    block_values: int
    block_bytes: int

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row. Whole blocks only."""
        return -(-cols // self.block_values) * self.block_bytes


# By the names that checkpoints give them. The blocks are ggml's.
SOURCE_TYPES: Mapping[str, SourceType] = {
    "F32": SourceType(0, 1, 4),
    "BF16": SourceType(1, 1, 2),
    "F16": SourceType(2, 1, 2),
    "Q4_0": SourceType(4, 32, 18),
    "Q4_1": SourceType(5, 32, 20),
    "Q5_0": SourceType(6, 32, 22),
    "Q5_1": SourceType(7, 32, 24),
    "Q8_0": SourceType(8, 32, 34),
    "Q4_K": SourceType(12, 256, 144),
    "Q5_K": SourceType(13, 256, 176),
    "Q6_K": SourceType(14, 256, 210),
}


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A packed matrix as numbers. Rows are padded to whole tiles, columns to whole groups."""

    format: Format
    rows: int
    cols: int
    offsets: bool = False  # int4 with an offset besides the scale of each group

    @property
    def padded_rows(self) -> int:
        return padded(self.rows, TILE)

    @property
    def padded_cols(self) -> int:
        return padded(self.cols, GROUP)

    @property
    def data_bytes(self) -> int:
        return self.padded_rows * self.padded_cols * _BITS[self.format] // 8

    @property
    def scale_bytes(self) -> int:
        """Of the scales, and of the offsets where there are some: float16, one a row and group."""
        return self.padded_rows * self.padded_cols // GROUP * 2 if self.format in ("int8", "int4") else 0

    @property
    def n_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes * (2 if self.offsets else 1)


def padded(n: int, unit: int) -> int:
    """`n` rounded up to whole units."""
    return -(-n // unit) * unit
