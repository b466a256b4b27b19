"""Compiles the CPU kernels with the machine's C++ compiler into a cache; a second start finds the library there.

The cache's key is made of the sources, the flags, the machine's architecture and the compiler's version, so a library
is never older than what it is made of. Imports no torch and runs nothing when imported: the plan uses `find`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels.base import Isa, isas_of

LIBRARY = "libastrai_cpu.so"
PREBUILT = "prebuilt"  # folder beside the sources: libraries that came with a wheel
COMPILERS = ("c++", "g++", "clang++")
INSTALL = "install g++ 11 or clang 14, or a newer one (Debian, Ubuntu: apt install g++), or name one in $CXX"
# Sums must not depend on how a compiler groups them: no contraction by itself, never -ffast-math.
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread")
TARGETS: dict[Isa, tuple[str, ...]] = {
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"),
        *("-mavx2", "-mfma", "-mf16c"),
    ),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
BUILDING = "building."  # begins the name of a folder that a build works in; then comes its process
KEPT = 4  # libraries in the cache: of older versions or other compilers
SHOWN_ERRORS = 3  # lines of a compiler that an error repeats
VERSION_TIMEOUT_S = 20.0

Progress = Callable[[int, int], None]  # (files compiled, files in all)


def silent(done: int, total: int) -> None:
    """A Progress that shows nothing."""


def sanitised(kinds: str) -> tuple[str, ...]:
    """Flags for a build under sanitizers, e.g. `address,undefined` or `thread`; none for an empty string."""
    return ("-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={kinds}", "-fno-sanitize-recover=all") if kinds else ()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: the words that run it, and the first line it says about itself."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Build:
    """Whether there is a library of exactly these sources, and what could be done about it if not."""

    sources: Path
    library: Path | None
    origin: Literal["cache", "prebuilt", "none"]
    compiler: Compiler | None
    target: Path | None  # where a build puts the library
    reason: str  # why there is no library, or no compiler; empty where nothing is missing

    @property
    def available(self) -> bool:
        """There is a library, or one can be built."""
        return self.library is not None or self.compiler is not None


@dataclass(frozen=True, slots=True)
class _Unit:
    """One source file and what is special about its command line."""

    source: Path
    flags: tuple[str, ...]


def find(
    sources: Path,
    cache: Path,
    *,
    extra: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    architecture: str | None = None,
) -> Build:
    """What there is, without building: reads the sources (0.2 MB) and asks the compiler for its version.

    A library that came with the wheel or lies in the cache counts only when it was made of these very sources with
    these flags. Without a compiler a library that another compiler made is good too: an image may be built elsewhere.
    """
    environ = os.environ if environ is None else environ
    architecture = platform.machine() if architecture is None else architecture
    key = _key(sources, extra, architecture)
    found = find_compiler(environ)
    compiler, reason = (found, "") if isinstance(found, Compiler) else (None, found)
    target = None if compiler is None else _target(cache, key, compiler)
    prebuilt = sources / PREBUILT / key / LIBRARY
    if target is not None and target.is_file():
        return Build(sources, target, "cache", compiler, target, reason)
    if prebuilt.is_file():
        return Build(sources, prebuilt, "prebuilt", compiler, target, reason)
    others = sorted((cache / "kernels").glob(f"{key}-*/{LIBRARY}")) if compiler is None else []
    if others:
        return Build(sources, others[0], "cache", compiler, target, reason)
    return Build(sources, None, "none", compiler, target, reason or "not compiled yet")


def ensure(
    sources: Path,
    cache: Path,
    *,
    extra: Sequence[str] = (),
    progress: Progress = silent,
    environ: Mapping[str, str] | None = None,
    architecture: str | None = None,
) -> Path:
    """The library of these sources; compiles it (about 15 s on two cores) when there is none.

    Two processes that need it at once build it once: the second waits for the first.

    Raises:
        KernelError: there is no compiler, it reports errors (the first lines are repeated), or the cache cannot be written.
    """
    environ = os.environ if environ is None else environ
    architecture = platform.machine() if architecture is None else architecture
    look = partial(find, sources, cache, extra=extra, environ=environ, architecture=architecture)
    found = look()
    if found.library is not None:
        return found.library
    if found.compiler is None or found.target is None:
        raise KernelError(f"the CPU kernels are not compiled: {found.reason}")
    n_files = len(units(sources, architecture))
    progress(0, n_files)  # before the lock: who waits for another process's build has something to look at
    try:
        with _alone(found.target.parent):
            if (other := look().library) is not None:  # another process built it while we waited
                progress(n_files, n_files)
                return other
            built = _Builder(sources, found.compiler, tuple(extra), environ, progress).build(cache, architecture)
            _prune(built.parent)
            return built
    except OSError as error:
        where = error.filename or cache
        raise KernelError(f"the CPU kernels could not be compiled: {where}: {error.strerror or error}") from error


def find_compiler(environ: Mapping[str, str]) -> Compiler | str:
    """The compiler that $CXX names, else the first of c++, g++, clang++ on PATH; or the reason why there is none."""
    path, named = environ.get("PATH", os.defpath), environ.get("CXX", "").strip()
    tried = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    for words in tried:
        program = shutil.which(words[0], path=path)
        if program is None:
            continue
        try:
            said = subprocess.run(  # noqa: S603
                [program, *words[1:], "--version"],
                capture_output=True,
                text=True,
                errors="replace",
                check=True,
                timeout=VERSION_TIMEOUT_S,
                env={**environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"the C++ compiler {program} does not work: {error}; {INSTALL}"
        return Compiler((program, *words[1:]), said.stdout.partition("\n")[0].strip())
    if named:
        return f"$CXX names the C++ compiler '{named}', which is not on PATH; {INSTALL}"
    return f"there is no C++ compiler ({', '.join(COMPILERS)}) on PATH; {INSTALL}"


def prebuilt_name(sources: Path, architecture: str | None = None) -> str:
    """The folder below `prebuilt/` in which a wheel carries the library of these sources."""
    architecture = platform.machine() if architecture is None else architecture
    return _key(sources, (), architecture)


def units(sources: Path, architecture: str) -> list[_Unit]:
    """What is compiled, in the order in which it is linked: every .cpp of the folder; of the files `target_ISA.cpp` those
    that the architecture can run.

    Raises:
        KernelError: the folder holds no sources.
    """
    wanted = {f"target_{isa}": TARGETS[isa] for isa in isas_of(architecture)}
    found = [
        _Unit(file, wanted.get(file.stem, ()))
        for file in sorted(sources.rglob("*.cpp"))
        if not file.stem.startswith("target_") or file.stem in wanted
    ]
    if not found:
        raise KernelError(f"{sources}: there are no sources of the CPU kernels here; install astrai-deploy again")
    # The linker takes the first of several copies of an inline function. In this order, what a lesser CPU runs never comes
    # from a file that was compiled for a better one.
    return sorted(found, key=lambda unit: len(unit.flags))


class _Builder:
    """Runs one compiler over some units."""

    def __init__(
        self, sources: Path, compiler: Compiler, extra: tuple[str, ...], environ: Mapping[str, str], progress: Progress
    ) -> None:
        self._sources, self._compiler, self._extra, self._progress = sources, compiler, extra, progress
        self._copy = sources
        self._environ = {**environ, "LC_ALL": "C"}  # errors are searched for the word "error"

    def build(self, cache: Path, architecture: str) -> Path:
        """Compiles the units side by side and links them; the library appears complete or not at all.

        What is compiled is a copy, so that the key is that of the library even if somebody edits the sources meanwhile.

        Raises:
            KernelError: what the compiler or the linker said.
        """
        with tempfile.TemporaryDirectory(dir=cache / "kernels", prefix=f"{BUILDING}{os.getpid()}.") as temporary:
            work = Path(temporary)
            self._copy = work / "sources"
            for file in _files(self._sources):
                copy = self._copy / file.relative_to(self._sources)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
            target = _target(cache, _key(self._copy, self._extra, architecture), self._compiler)
            found = units(self._copy, architecture)
            objects = [work / f"{unit.source.stem}.o" for unit in found]
            self._compile(found, objects)
            self._run(
                "link", ["-shared", "-Wl,-Bsymbolic", *COMMON, *self._extra, *map(str, objects), "-o", str(work / LIBRARY)]
            )
            target.parent.mkdir(parents=True, exist_ok=True)
            (work / LIBRARY).replace(target)
            return target

    def _compile(self, found: Sequence[_Unit], objects: Sequence[Path]) -> None:
        with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as threads:
            pairs = list(zip(found, objects, strict=True))
            # The best instruction sets take longest: they begin first.
            jobs = [threads.submit(self._compile_one, unit, out) for unit, out in reversed(pairs)]
            try:
                for done, job in enumerate(as_completed(jobs), start=1):
                    job.result()
                    self._progress(done, len(found))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _compile_one(self, unit: _Unit, out: Path) -> None:
        includes = [f"-I{self._copy}", f"-I{self._copy / 'include'}"]
        flags = [*COMMON, *unit.flags, *self._extra, f"-ffile-prefix-map={self._copy}={self._sources}"]
        self._run(unit.source.name, [*flags, *includes, "-c", str(unit.source), "-o", str(out)])

    def _run(self, what: str, arguments: Sequence[str]) -> None:
        done = subprocess.run(  # noqa: S603
            [*self._compiler.command, *arguments], capture_output=True, text=True, errors="replace", env=self._environ
        )
        if done.returncode == 0:
            return
        lines = done.stderr.replace(str(self._copy), str(self._sources)).splitlines() or [f"exit code {done.returncode}"]
        telling = [line.strip() for line in lines if "error" in line or "undefined reference" in line] or lines
        raise KernelError(
            f"the CPU kernels could not be compiled ({what}, {self._compiler.version}): " + "; ".join(telling[:SHOWN_ERRORS])
        )


def _files(sources: Path) -> list[Path]:
    """All that a compiler reads, in a fixed order."""
    return sorted([*sources.rglob("*.h"), *sources.rglob("*.cpp")])


def _target(cache: Path, key: str, compiler: Compiler) -> Path:
    """Where the library of a key and a compiler lies."""
    return cache / "kernels" / f"{key}-{hashlib.sha256(compiler.version.encode()).hexdigest()[:8]}" / LIBRARY


def _key(sources: Path, extra: Sequence[str], architecture: str) -> str:
    """Tells everything that a library depends on but the compiler."""
    digest = hashlib.sha256(repr((COMMON, TARGETS, tuple(extra), architecture)).encode())
    for file in _files(sources):
        digest.update(f"\0{file.relative_to(sources).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{digest.hexdigest()[:16]}-{architecture}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock of one build; the kernel lets go of it when its holder dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prune(newest: Path) -> None:
    """Removes all but the last few libraries, and what killed builds left. Who has a library loaded keeps it."""
    for left in newest.parent.glob(f"{BUILDING}*/"):
        process = left.name.removeprefix(BUILDING).partition(".")[0]
        if not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)
    built = [file.parent for file in newest.parent.glob(f"*/{LIBRARY}") if file.parent != newest]
    for folder in sorted(built, key=lambda folder: folder.stat().st_mtime, reverse=True)[KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
