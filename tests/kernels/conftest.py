"""Fixtures for the kernels: the compiled library, each instruction set of this machine, and a pool of threads.

`ASTRAI_TEST_SANITIZE=address,undefined` builds the library under sanitizers (see `just sanitize`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels._build import ensure, find, sanitised
from astrai_runtime.kernels.base import ISAS, Isa, lacks
from astrai_runtime.kernels.cpu import Library, Pool
from astrai_runtime.machine import probe

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / "csrc" / "cpu"


@pytest.fixture(scope="session")
def library_path(kernels_cache: Path) -> Path:
    """The library of the checkout's sources, compiled once for all workers and kept for the next run."""
    extra = sanitised(os.environ.get("ASTRAI_TEST_SANITIZE", ""))
    environ = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}  # not for the compiler
    found = find(SOURCES, kernels_cache, extra=extra, environ=environ)
    if not found.available:
        pytest.skip(found.reason)
    return ensure(SOURCES, kernels_cache, extra=extra, environ=environ)


@pytest.fixture(scope="session")
def library(library_path: Path) -> Library:
    """The CPU kernels, loaded."""
    return Library.open(library_path)


@pytest.fixture(scope="session", params=ISAS)
def isa(request: pytest.FixtureRequest, library: Library) -> Isa:
    """Every instruction set in turn; what this machine or this build lacks is skipped, and says so."""
    wanted: Isa = request.param
    if wanted not in library.built_for():
        pytest.skip(f"{wanted} is not compiled for this architecture")
    if wanted not in library.runs_here():
        pytest.skip(f"this CPU lacks {', '.join(sorted(lacks(wanted, probe()))) or wanted}")
    return wanted


@pytest.fixture(scope="session", params=[1, 2, 3], ids=lambda n: f"{n}threads")
def n_threads(request: pytest.FixtureRequest) -> int:
    """1, 2 and 3 threads, whatever the machine has: results must not tell."""
    n: int = request.param
    return n


@pytest.fixture(scope="session")
def pool(library: Library) -> Iterator[Pool]:
    """Two threads that sleep at once: tests share few cores."""
    with library.pool_open(2, 0) as opened:
        yield opened


@pytest.fixture(scope="session")
def refused() -> type[KernelError]:
    """What every refusal of the library is."""
    return KernelError
