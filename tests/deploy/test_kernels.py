"""The verbs `kernels check` and `kernels build`: what they print, with a small library in the place of the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from astrai_deploy import kernels
from astrai_deploy.cli import main
from astrai_runtime.kernels._build import LIBRARY, Compiler, find_compiler, prebuilt_name
from astrai_runtime.kernels.base import FEATURES

AVX2 = ",".join(sorted(FEATURES["avx2"]))
DESCRIBED = (
    "machine={kind: described, name: x, device: cpu, memory: 8GiB, cores: 6, features: [%s], "
    "compute_capability: null, software: []}"
)
TINY = '#pragma GCC visibility push(default)\nextern "C" int astrai_abi() { return 999; }\n'


@pytest.fixture
def sources(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time, of another interface."""
    if not isinstance(find_compiler(os.environ), Compiler):
        pytest.skip("no C++ compiler")
    folder = home / "sources"
    folder.mkdir()
    (folder / "library.cpp").write_text(TINY, encoding="utf-8")
    monkeypatch.setattr(kernels, "sources", lambda: folder)
    return folder


def rows(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_check_says_what_is_there_before_anything_is_compiled(ask, sources: Path) -> None:
    answer = ask("kernels", "check", "run.cache=own")
    assert answer.code == 0
    told = rows(answer.out)
    assert list(told) == ["sources", "compiler", "library", "avx512", "avx2", "portable", "threads"]
    assert told["library"].startswith("not compiled yet; ")
    assert "this CPU has it" in told["portable"]


def test_check_names_the_features_that_a_machine_lacks_and_the_choice(ask, sources: Path) -> None:
    told = rows(ask("kernels", "check", "run.cache=own", DESCRIBED % AVX2, "kernels.threads=3").out)
    assert "lacks avx512_bf16, avx512_vnni, avx512bw" in told["avx512"]
    assert told["avx2"].endswith("chosen (kernels.isa: auto)")
    assert told["threads"] == "3: kernels.threads"
    told = rows(ask("kernels", "check", "run.cache=own", DESCRIBED % "", "kernels.isa=portable").out)
    assert "lacks avx2, f16c, fma" in told["avx2"]
    assert told["portable"].endswith("chosen (kernels.isa: portable)")
    assert told["threads"] == "6 cores"


def test_build_compiles_once_and_check_tells_that_another_interface_is_no_use(ask, sources: Path, home: Path) -> None:
    built = ask("kernels", "build", "run.cache=own")
    assert built.code == 0, built.err
    first, *middle, last = built.err.splitlines()
    assert first == "compiling the CPU kernels: 1 files"
    assert middle == ["compiling the CPU kernels: done"]
    assert LIBRARY in last
    assert last.endswith(" s")
    again = ask("kernels", "build", "run.cache=own")
    assert again.err.splitlines() == [f"{last.rpartition(': ')[0]}: they are there already"]
    told = rows(ask("kernels", "check", "run.cache=own").out)
    assert "are not those of this version of astrai-deploy" in told["library"]


def test_build_into_a_folder_makes_what_a_wheel_carries(ask, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("kernels", "build", "run.cache=own", "--into", str(sources / "prebuilt")).code == 0
    assert (sources / "prebuilt" / prebuilt_name(sources) / LIBRARY).is_file()
    monkeypatch.setenv("PATH", "/nonexistent")
    told = rows(ask("kernels", "check", "run.cache=other").out)
    assert told["compiler"].startswith("there is no C++ compiler (")
    assert ask("kernels", "build", "run.cache=other").code == 0


def test_build_without_a_compiler_fails_in_one_line(ask, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    answer = ask("kernels", "build", "run.cache=own")
    assert answer.code == 2
    assert answer.err.startswith("astrai-deploy: the CPU kernels are not compiled: there is no C++ compiler")
    assert len(answer.err.splitlines()) == 1
    told = rows(ask("kernels", "check", "run.cache=own").out)
    assert told["library"] == "not compiled, and it cannot be: see compiler"


def test_broken_sources_fail_in_one_line(ask, sources: Path) -> None:
    (sources / "library.cpp").write_text("int f() { return x; }\n", encoding="utf-8")
    answer = ask("kernels", "build", "run.cache=own")
    assert answer.code == 2
    assert "library.cpp:1:" in answer.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kernels"], "two words: astrai-deploy kernels check or astrai-deploy kernels build"),
        (["kernels", "bild"], "two words"),
        (["kernels", "check", "--into", "x"], "--into goes with the verb kernels build"),
        (["kernels", "build", "--into"], "--into needs a value"),
        (["kernels", "check", "kernels.isa=sse"], "kernels.isa"),
        (["kernels", "check", "kernels.spin_us=-1"], "kernels.spin_us"),
        (["kernels", "check", "kernels.threads=0"], "kernels.threads"),
    ],
)
def test_mistakes_are_refused(ask, arguments: list[str], said: str) -> None:
    answer = ask(*arguments)
    assert answer.code == 2
    assert said in answer.err


def test_check_imports_no_torch(home: Path) -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; from astrai_deploy.cli import main; code = main(['kernels', 'check'])\n"
        "found = sorted({'torch', 'litestar', 'uvicorn'} & set(sys.modules))\nassert not found, found\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["sources"] == "csrc/cpu"


def test_help_is_given_for_the_verb_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--help"]) == 0
    assert "kernels build" in capsys.readouterr().out
