"""Probing a machine: the container's limits, not the host's, from fake /proc and /sys trees."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from astrai_runtime.machine import core_limit, cpu_features, memory_limit, probe, visible_gpu

GIB = 1 << 30
HOST = {"proc/meminfo": f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:        1 kB\n"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def script(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("files", "expected", "origin"),
    [
        ({}, 64 * GIB, "MemTotal"),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 64 * GIB, "MemTotal"),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB, "/sys/fs/cgroup/memory.max"),
        (
            {
                "proc/self/cgroup": "0::/user.slice/app\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/user.slice/app/memory.max": f"{4 * GIB}\n",
            },
            3 * GIB,
            "user.slice/memory.max",
        ),
        (
            {"proc/self/cgroup": "0::/host/path/of/container\n", "sys/fs/cgroup/memory.max": f"{5 * GIB}\n"},
            5 * GIB,
            "container's limit",
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box/inner\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{6 * GIB}\n",
            },
            6 * GIB,
            "box/memory.limit_in_bytes",
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{128 * GIB}\n"}, 64 * GIB, "MemTotal"),
    ],
)
def test_memory_is_the_smallest_limit_that_binds(tmp_path: Path, files: dict[str, str], expected: int, origin: str) -> None:
    limit = memory_limit(tree(tmp_path, HOST | files))

    assert limit.amount == expected
    assert origin in limit.origin


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, len(os.sched_getaffinity(0))),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "1:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, len(os.sched_getaffinity(0))),
    ],
)
def test_cores_are_bounded_by_the_quota(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert core_limit(tree(tmp_path, files)).amount == expected


def test_features_keep_the_spelling_of_the_kernel(tmp_path: Path) -> None:
    x86 = tree(tmp_path / "x86", {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\nflags\t\t: other\n"})
    arm = tree(tmp_path / "arm", {"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd bf16\n"})

    assert cpu_features(x86) == {"fpu", "avx2", "avx512_vnni"}
    assert cpu_features(arm) == {"fp", "asimd", "bf16"}
    assert cpu_features(tmp_path / "nowhere") == frozenset()


def test_gpu_is_read_from_the_driver_and_obeys_visible_devices(tmp_path: Path) -> None:
    script(tmp_path / "bin", "nvidia-smi", 'echo "$1" > "$(dirname "$0")/asked"; echo "NVIDIA H100 80GB HBM3, 81559, 9.0"')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    gpu = visible_gpu({"PATH": path, "CUDA_VISIBLE_DEVICES": "2,3"})

    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability) == ("NVIDIA H100 80GB HBM3", 81559 << 20, (9, 0))
    assert (tmp_path / "bin/asked").read_text().strip() == "--id=2"
    assert visible_gpu({"PATH": path, "CUDA_VISIBLE_DEVICES": ""}) is None


@pytest.mark.parametrize("body", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices were found'"])
def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path: Path, body: str) -> None:
    script(tmp_path / "bin", "nvidia-smi", body)

    assert visible_gpu({"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}) is None


@pytest.mark.parametrize(
    ("version", "device", "memory", "capability"),
    [
        ("cuda: Optional[str] = '12.8'\n", "cuda", 81559 << 20, (9, 0)),
        ("cuda: Optional[str] = None\n", "cpu", 64 * GIB, None),
    ],
)
def test_gpu_counts_only_when_this_torch_can_drive_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    device: str,
    memory: int,
    capability: tuple[int, int] | None,
) -> None:
    script(tmp_path / "bin", "nvidia-smi", 'echo "NVIDIA H100, 81559, 9.0"')
    installed = tree(tmp_path / "site", {"torch/__init__.py": "", "torch/version.py": version}) / "torch/__init__.py"
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        if name == "torch":
            return importlib.util.spec_from_file_location(
                name, installed, submodule_search_locations=[str(installed.parent)]
            )
        return real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    machine = probe(tree(tmp_path, HOST), {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})

    assert (machine.device, machine.memory_bytes, machine.compute_capability) == (device, memory, capability)
    assert machine.probed
    assert ("is not used" in machine.name) == (device == "cpu")


def test_software_is_what_is_on_the_path(tmp_path: Path) -> None:
    script(tmp_path / "bin", "nvcc", "true")

    assert "nvcc" in probe(tree(tmp_path, HOST), {"PATH": str(tmp_path / "bin")}).software
    assert probe(tmp_path, {"PATH": str(tmp_path / "nothing")}).software.isdisjoint({"nvcc", "cxx"})


def test_probing_this_machine_imports_no_torch() -> None:
    code = (
        "import sys; from astrai_runtime.machine import probe; print(probe().memory_bytes)\n"
        "assert not {'torch', 'numpy'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
