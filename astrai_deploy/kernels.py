"""The verbs `kernels build` and `kernels check`, and where this installation has its CPU kernels."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from astrai_deploy.paths import cache_dir, shipped, shown
from astrai_deploy.progress import shown as bars
from astrai_runtime.errors import KernelError
from astrai_runtime.kernels._build import LIBRARY, Build, Compiler, ensure, find, prebuilt_name
from astrai_runtime.kernels.base import ISAS, Isa, KernelsConfig, best_isa, isas_of, lacks
from astrai_runtime.machine import Machine, core_limit
from astrai_runtime.sources.base import Progress, silent

if TYPE_CHECKING:
    from astrai_deploy.compose import Composed
    from astrai_runtime.kernels.cpu import Library

WHAT = "compiling the CPU kernels"


def sources() -> Path:
    """The C++ sources of the CPU kernels in this installation."""
    return shipped("csrc") / "cpu"


def ensure_library(cache: Path, progress: Progress = silent) -> Path:
    """The compiled CPU kernels; compiles them into `cache` when they are not there (about 15 s on two cores).

    Raises:
        KernelError: there is no compiler, or it reports errors.
    """
    return ensure(sources(), cache, progress=lambda done, total: progress(WHAT, done, total, "files"))


def kernels(composed: Composed, action: str, into: str | None = None) -> int:
    """The verb `kernels`. Returns the exit code: 0 also when `check` finds nothing.

    Raises:
        KernelError: `build` has no compiler, or it reports errors.
    """
    console, cache = Console(stderr=action == "build"), cache_dir(composed.deployment.run.cache)
    if action == "build":
        _build(console, cache, into)
        return 0
    machine = composed.deployment.machine.machine()
    rows = dict(_found(find(sources(), cache), machine, composed.deployment.kernels))
    width = max(map(len, rows))
    for name, text in rows.items():
        console.print(f"{name.ljust(width)}  {text}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _build(console: Console, cache: Path, into: str | None) -> None:
    found, began = find(sources(), cache), time.monotonic()
    with bars(console) as progress:
        library = ensure_library(cache, progress)
    took = "they are there already" if found.library == library else f"{time.monotonic() - began:.1f} s"
    console.print(f"{library}: {took}", highlight=False, markup=False, soft_wrap=True)
    if into is not None:
        target = Path(into) / prebuilt_name(sources()) / LIBRARY
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, target)
        except OSError as error:
            raise KernelError(f"{target}: {error.strerror or error}; --into needs a folder to write to") from error
        console.print(f"{target}: a copy for a wheel or an image", highlight=False, markup=False, soft_wrap=True)


def _found(build: Build, machine: Machine, config: KernelsConfig) -> Iterator[tuple[str, str]]:
    """One row for each thing that the kernels need."""
    yield "sources", _place(build.sources)
    yield "compiler", _compiler(build.compiler, build.reason)
    library, why = _opened(build.library)
    yield "library", why or _library(build)
    for isa in ISAS:
        yield isa, _isa(isa, library, machine, config)
    cores = core_limit()
    counted = f"{machine.cores} cores" if not machine.probed else f"{cores.amount}: {cores.origin}"
    yield "threads", f"{config.threads}: kernels.threads" if config.threads != "auto" else counted


def _compiler(compiler: Compiler | None, reason: str) -> str:
    return reason if compiler is None else f"{compiler.version} ({' '.join(compiler.command)})"


def _library(build: Build) -> str:
    if build.library is not None:
        return f"{_place(build.library)}, " + ("compiled here" if build.origin == "cache" else "came with the package")
    if build.available:
        return "not compiled yet; the first start does it, or: astrai-deploy kernels build"
    return "not compiled, and it cannot be: see compiler"


def _opened(path: Path | None) -> tuple[Library | None, str]:
    """The library, and why it does not load if it does not."""
    if path is None:
        return None, ""
    from astrai_runtime.kernels.cpu import Library

    try:
        return Library.open(path), ""
    except KernelError as error:
        return None, str(error)


def _isa(isa: Isa, library: Library | None, machine: Machine, config: KernelsConfig) -> str:
    compiled = isas_of(platform.machine()) if library is None else library.built_for()
    state = "would be compiled" if library is None else "compiled in"
    missing = sorted(lacks(isa, machine))
    if isa not in compiled:
        return f"not for {platform.machine()}"
    if missing:
        return f"{state}; this CPU lacks {', '.join(missing)}"
    if machine.probed and library is not None and isa not in library.runs_here():
        return f"{state}; this CPU has it, but the system does not let programs use it"
    chosen = best_isa(machine) if config.isa == "auto" else config.isa
    return f"{state}; this CPU has it" + (f"; chosen (kernels.isa: {config.isa})" if isa == chosen else "")


def _place(path: Path) -> str:
    root = shipped("csrc").parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else shown(path)
