"""Compiling the kernels: what makes a new library, what reuses one, and what is said when it cannot be done."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from astrai_runtime.errors import KernelError
from astrai_runtime.kernels._build import (
    COMMON,
    LIBRARY,
    TARGETS,
    Compiler,
    ensure,
    find,
    find_compiler,
    prebuilt_name,
    sanitised,
    units,
)
from astrai_runtime.kernels.base import ISAS, isas_of

SOURCES = Path(__file__).resolve().parent.parent.parent / "csrc" / "cpu"
NOTHING = {"PATH": "/nonexistent"}
TWO = "#pragma GCC visibility push(default)\n#define TWO 2\n"
SOURCE = '#include "two.h"\nextern "C" int answer() { return TWO * 21; }\n'


@pytest.fixture(autouse=True)
def _has_compiler() -> None:
    if not isinstance(find_compiler(os.environ), Compiler):
        pytest.skip("no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library of one function, in a folder like csrc/cpu."""
    folder = tmp_path / "csrc"
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "two.h").write_text(TWO, encoding="utf-8")
    (folder / "library.cpp").write_text(SOURCE, encoding="utf-8")
    return folder


@pytest.fixture
def counted(tmp_path: Path) -> Callable[[], tuple[dict[str, str], Callable[[], int]]]:
    """An environment whose compiler writes a line for each run, and the number of lines."""

    def make() -> tuple[dict[str, str], Callable[[], int]]:
        found = find_compiler(os.environ)
        assert isinstance(found, Compiler)
        log, script = tmp_path / "runs", tmp_path / "counted++"
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo run >> {log}\nexec {found.command[0]} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return {**os.environ, "CXX": str(script)}, lambda: len(log.read_text().splitlines()) if log.exists() else 0

    return make


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_first_call_compiles_and_second_finds(sources: Path, tmp_path: Path, counted) -> None:
    environ, runs = counted()
    before = find(sources, tmp_path, environ=environ)
    assert (before.library, before.reason, before.available) == (None, "not compiled yet", True)
    steps: list[tuple[int, int]] = []
    library = ensure(sources, tmp_path, environ=environ, progress=lambda done, total: steps.append((done, total)))
    assert library == before.target
    assert answer(library) == 42
    assert steps == [(0, 1), (1, 1)]
    assert runs() == 2  # one file, one link
    assert ensure(sources, tmp_path, environ=environ) == library
    assert find(sources, tmp_path, environ=environ).origin == "cache"
    assert runs() == 2


def test_changed_header_flags_and_compiler_each_make_another_library(sources: Path, tmp_path: Path, counted) -> None:
    first = ensure(sources, tmp_path)
    (sources / "include" / "two.h").write_text(TWO.replace("2", "3"), encoding="utf-8")
    second = ensure(sources, tmp_path)
    assert (answer(first), answer(second)) == (42, 63)
    sanitised_one = find(sources, tmp_path, extra=sanitised("undefined"))
    assert sanitised_one.library is None
    script = tmp_path / "odd++"
    script.write_text("#!/bin/sh\necho an odd compiler 1.0\n", encoding="utf-8")
    script.chmod(0o755)
    other = find(sources, tmp_path, environ={**os.environ, "CXX": str(script)})
    assert other.library is None
    assert other.compiler == Compiler((str(script),), "an odd compiler 1.0")
    assert len({first, second, sanitised_one.target, other.target}) == 4


def test_compiler_errors_are_repeated_with_their_places(sources: Path, tmp_path: Path) -> None:
    (sources / "broken.cpp").write_text("int f() {\n  return undeclared;\n}\n", encoding="utf-8")
    with pytest.raises(KernelError, match=r"broken\.cpp.*broken\.cpp:2:\d+: error:.*undeclared"):
        ensure(sources, tmp_path)
    assert find(sources, tmp_path).library is None
    assert not list((tmp_path / "kernels").glob("*/*"))


def test_linker_errors_are_repeated(sources: Path, tmp_path: Path) -> None:
    (sources / "twice.cpp").write_text('extern "C" int answer() { return 1; }\n', encoding="utf-8")
    with pytest.raises(KernelError, match=r"could not be compiled \(link.*answer"):
        ensure(sources, tmp_path)


def test_without_a_compiler_the_reason_says_what_to_install(sources: Path, tmp_path: Path) -> None:
    found = find(sources, tmp_path, environ=NOTHING)
    assert not found.available
    assert "there is no C++ compiler (c++, g++, clang++) on PATH; install g++" in found.reason
    with pytest.raises(KernelError, match=r"not compiled: there is no C\+\+ compiler"):
        ensure(sources, tmp_path, environ=NOTHING)


def test_named_compiler_that_is_missing_is_not_replaced_by_another(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"\$CXX names the C\+\+ compiler 'g\+\+-99'"):
        ensure(sources, tmp_path, environ={**os.environ, "CXX": "g++-99"})


def test_named_compiler_that_does_not_work_is_said(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="false does not work"):
        ensure(sources, tmp_path, environ={**os.environ, "CXX": "false"})


def test_compiler_may_be_several_words(sources: Path, tmp_path: Path) -> None:
    found = find_compiler(os.environ)
    assert isinstance(found, Compiler)
    assert answer(ensure(sources, tmp_path, environ={**os.environ, "CXX": f"env LC_ALL=C {found.command[0]}"})) == 42


def test_library_of_a_compiler_that_is_gone_is_still_good(sources: Path, tmp_path: Path) -> None:
    library = ensure(sources, tmp_path)
    found = find(sources, tmp_path, environ=NOTHING)
    assert (found.library, found.origin, found.compiler) == (library, "cache", None)
    assert ensure(sources, tmp_path, environ=NOTHING) == library
    (sources / "library.cpp").write_text(SOURCE.replace("21", "22"), encoding="utf-8")
    assert find(sources, tmp_path, environ=NOTHING).library is None


def test_prebuilt_library_is_taken_only_for_the_very_sources(sources: Path, tmp_path: Path) -> None:
    built = ensure(sources, tmp_path / "elsewhere")
    carried = sources / "prebuilt" / prebuilt_name(sources) / LIBRARY
    carried.parent.mkdir(parents=True)
    shutil.copy(built, carried)
    found = find(sources, tmp_path, environ=NOTHING)
    assert (found.library, found.origin) == (carried, "prebuilt")
    assert find(sources, tmp_path, extra=sanitised("undefined")).library is None
    assert find(sources, tmp_path, architecture="riscv64").library is None
    (sources / "include" / "two.h").write_text(TWO.replace("2", "3"), encoding="utf-8")
    assert find(sources, tmp_path).library is None


def test_two_processes_build_once(sources: Path, tmp_path: Path, counted) -> None:
    environ, runs = counted()
    code = (
        "import sys; from pathlib import Path; from astrai_runtime.kernels._build import ensure\n"
        "print(ensure(Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    environ = {**environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code, sources, tmp_path], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(paths) == 1
    assert answer(Path(paths.pop())) == 42
    assert runs() == 2


def test_what_a_killed_build_left_is_removed_by_the_next(sources: Path, tmp_path: Path) -> None:
    target = find(sources, tmp_path).target
    assert target is not None
    left = tmp_path / "kernels" / "building.999999999.x"  # no process has this number
    left.mkdir(parents=True)
    (left / "library.o").write_bytes(b"half")
    ensure(sources, tmp_path)
    assert {path.name for path in (tmp_path / "kernels").iterdir()} == {target.parent.name, f"{target.parent.name}.lock"}


def test_sources_that_change_under_the_compiler_make_no_library_of_another_name(sources: Path, tmp_path: Path) -> None:
    def edit(done: int, total: int) -> None:
        if done:
            (sources / "include" / "two.h").write_text(TWO.replace("2", "5"), encoding="utf-8")

    before = find(sources, tmp_path).target
    library = ensure(sources, tmp_path, progress=edit)
    assert (library, answer(library)) == (before, 42)
    assert answer(ensure(sources, tmp_path)) == 105


def test_only_the_last_few_libraries_are_kept(sources: Path, tmp_path: Path) -> None:
    made = []
    for number in range(6):
        (sources / "include" / "two.h").write_text(TWO.replace("2", str(number)), encoding="utf-8")
        made.append(ensure(sources, tmp_path))
        os.utime(made[-1].parent, (number, number))
    assert [path.exists() for path in made] == [False, False, True, True, True, True]


def test_cache_that_cannot_be_written_is_said(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KernelError, match=r"could not be compiled: .*file"):
        ensure(sources, tmp_path / "file")


def test_folder_without_sources_is_said(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="no sources of the CPU kernels"):
        ensure(tmp_path, tmp_path / "cache")


def test_each_architecture_compiles_what_it_can_run(sources: Path) -> None:
    for isa in ISAS:
        (sources / f"target_{isa}.cpp").write_text("", encoding="utf-8")
    assert isas_of("aarch64") == ("portable",)
    assert {unit.source.stem for unit in units(sources, "aarch64")} == {"library", "target_portable"}
    x86 = {unit.source.stem: unit.flags for unit in units(sources, "x86_64")}
    assert set(x86) == {"library", *(f"target_{isa}" for isa in ISAS)}
    assert "-mavx512vnni" in x86["target_avx512"]
    assert x86["target_portable"] == x86["library"] == ()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction sets of x86")
def test_inline_functions_that_several_files_share_come_from_the_least_instruction_set(
    sources: Path, tmp_path: Path
) -> None:
    """Otherwise a CPU without AVX-512 would meet its instructions in, say, a vector's growth, and die."""
    (sources / "include" / "shared.h").write_text(
        "__attribute__((noinline)) inline int compiled_for() {\n"
        "#if defined(__AVX512F__)\n  return 512;\n#elif defined(__AVX2__)\n  return 2;\n#else\n  return 0;\n#endif\n}\n",
        encoding="utf-8",
    )
    (sources / "library.cpp").write_text(
        '#include "two.h"\nextern "C" { int avx512(); int answer() { return avx512(); } }\n', encoding="utf-8"
    )
    (sources / "target_avx512.cpp").write_text(
        '#include "shared.h"\nextern "C" int avx512() { return compiled_for(); }\n', encoding="utf-8"
    )
    (sources / "target_portable.cpp").write_text(
        '#include "shared.h"\nextern "C" int portable() { return compiled_for(); }\n', encoding="utf-8"
    )
    assert answer(ensure(sources, tmp_path)) == 0


@pytest.mark.parametrize("unit", units(SOURCES, platform.machine()), ids=lambda unit: unit.source.stem)
def test_our_sources_compile_without_warnings(unit) -> None:
    compiler = find_compiler(os.environ)
    assert isinstance(compiler, Compiler)
    flags = [*COMMON, *unit.flags, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    done = subprocess.run([*compiler.command, *flags, str(unit.source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_readme_builds_by_hand_what_the_cache_holds() -> None:
    text = (SOURCES.parent / "README.md").read_text(encoding="utf-8")
    for flags in (COMMON, *TARGETS.values()):
        assert " ".join(flags) in text
    for unit in units(SOURCES, "x86_64"):
        assert unit.source.stem in text
