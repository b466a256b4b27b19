"""The built wheel works far from the checkout: it carries conf/, recipes/ and csrc/, and the console script finds them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from astrai_runtime.kernels._build import prebuilt_name

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that holds only the wheel and borrows the dependencies of this one."""
    home = tmp_path_factory.mktemp("fresh")
    venv.EnvBuilder(with_pip=False).create(home)
    python = home / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return home


def run(fresh: Path, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ASTRAI", "XDG"))}
    environment |= {
        "XDG_CACHE_HOME": str(cwd / "cache"),
        "XDG_CONFIG_HOME": str(cwd / "config"),
        "XDG_STATE_HOME": str(cwd / "state"),
    }
    return subprocess.run(
        [str(fresh / "bin" / command[0]), *command[1:]],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )


def test_the_wheel_carries_the_data_folders_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert "astrai_deploy/conf/astrai_deploy.yaml" in names
    assert "astrai_deploy/recipes/chat_paged.yaml" in names
    kernels = {
        file.relative_to(ROOT).as_posix() for file in (ROOT / "csrc" / "cpu").rglob("*") if file.suffix in (".h", ".cpp")
    }
    assert {f"astrai_deploy/{name}" for name in kernels} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"astrai_deploy", "astrai_runtime"}


def test_the_installed_package_is_the_wheel_and_not_the_checkout(fresh: Path, tmp_path: Path) -> None:
    done = run(
        fresh,
        tmp_path,
        "python",
        "-c",
        "import astrai_deploy, astrai_runtime; print(astrai_deploy.__file__, astrai_runtime.__file__)",
    )
    assert done.returncode == 0, done.stderr
    for file in done.stdout.split():
        assert Path(file).is_relative_to(fresh)


@pytest.mark.demo
def test_plan_runs_from_another_directory(fresh: Path, tmp_path: Path, demo_package: None) -> None:
    done = run(fresh, tmp_path, "astrai-deploy", "plan", "+recipe=chat_paged")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gemma" in done.stdout
    assert not [*tmp_path.glob("outputs"), *tmp_path.glob("*.log")]


def test_tiny_plans_from_another_directory_without_the_demo_extra(fresh: Path, tmp_path: Path) -> None:
    done = run(fresh, tmp_path, "astrai-deploy", "plan", "+recipe=tiny")
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_of_the_wheel_are_those_of_the_checkout(fresh: Path, tmp_path: Path) -> None:
    done = run(fresh, tmp_path, "astrai-deploy", "kernels", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    told = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert told["sources"] == "csrc/cpu"
    assert "this CPU has it" in told["portable"]
    code = (
        "from astrai_deploy.kernels import sources; from astrai_runtime.kernels._build import prebuilt_name\n"
        "print(sources(), prebuilt_name(sources()))"
    )
    folder, name = run(fresh, tmp_path, "python", "-c", code).stdout.split()
    assert Path(folder).is_relative_to(fresh)
    assert name == prebuilt_name(ROOT / "csrc" / "cpu")
