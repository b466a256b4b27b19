"""The pool of threads: right sums under many short runs, and no data race that the thread sanitizer sees."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from astrai_runtime.kernels._build import COMMON, Compiler, find_compiler

HERE = Path(__file__).resolve().parent
POOL = HERE.parent.parent / "csrc" / "cpu"
RUNS = int(os.environ.get("POOL_RUNS", "300"))


def compiled(folder: Path, *flags: str) -> Path:
    """The stress program with the pool; skips where the compiler lacks the flags' run-time library."""
    compiler = find_compiler(os.environ)
    if not isinstance(compiler, Compiler):
        pytest.skip(compiler)
    program = folder / "pool_stress"
    sources = [str(HERE / "pool_stress.cpp"), str(POOL / "pool.cpp")]
    command = [*compiler.command, *COMMON, "-Wall", "-Wextra", "-Werror", *flags, f"-I{POOL}", *sources, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "tsan" in done.stderr:
        pytest.skip("this compiler has no thread sanitizer")
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("raced"), "-O1", "-g1", "-fsanitize=thread")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("plain"))


def run(program: Path, *arguments: int) -> None:
    environ = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    if "FATAL: ThreadSanitizer: unexpected memory mapping" in done.stderr:  # too much address randomness for this version
        done = subprocess.run(["setarch", "-R", *command], capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("spin_us", [0, 50])
@pytest.mark.parametrize("n_threads", [1, 2, 3, 4])
def test_pool_is_free_of_races(raced: Path, n_threads: int, spin_us: int) -> None:
    run(raced, n_threads, spin_us, RUNS)


@pytest.mark.parametrize("spin_us", [0, 50])
@pytest.mark.parametrize("n_threads", [2, 4])
def test_pool_does_every_item_once_at_full_speed(plain: Path, n_threads: int, spin_us: int) -> None:
    run(plain, n_threads, spin_us, 2 * RUNS)


def test_threads_that_the_system_does_not_give_are_an_error_and_no_crash(plain: Path) -> None:
    limited = f"ulimit -v {1 << 19}; exec {plain} 5000 0 1"  # KiB: room for the stacks of a few dozen threads
    done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stdout + done.stderr
