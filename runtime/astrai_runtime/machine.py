"""What a deployment may use: a Machine is data, so that a recipe for a big one can be planned on a small one.

`probe` describes the machine that this process runs on, without importing torch: the container's limits, not the
host's. Sources: the kernel's cgroup-v2 and cgroup-v1 documents, proc(5), `nvidia-smi --help-query-gpu`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]

ROOT = Path("/")
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
SMI_TIMEOUT_S = 5.0  # a driver without persistence mode needs 1-2 s to answer


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as the planner sees it.

    `memory_bytes` is what the model's device offers: on `cpu` the container's limit (not the host's memory), on `cuda`
    the memory of one GPU. `features` names CPU instruction sets in the kernel's spelling (`avx512_vnni`).
    `software` names what is importable or on PATH and matters to a backend: `flash_attn`, `nvcc`, `cxx`; and `cpu_kernels`
    where the CPU kernels are compiled already, which the plan knows.
    """

    name: str
    device: Device
    memory_bytes: int
    cores: int
    features: frozenset[str] = frozenset()
    compute_capability: tuple[int, int] | None = None
    software: frozenset[str] = frozenset()
    probed: bool = False  # True: this very machine; only such a machine can serve


@dataclass(frozen=True, slots=True)
class Limit:
    """An amount and what sets it, for people."""

    amount: int
    origin: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first visible GPU as its driver describes it."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


def probe(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> Machine:
    """The machine this process runs on. Reads /proc and /sys below `root`; runs nvidia-smi when it is on PATH.

    A GPU that the installed torch cannot drive is left out, and the name says so.
    """
    environ = os.environ if environ is None else environ
    gpu = visible_gpu(environ)
    usable = gpu is not None and _torch_has_cuda()
    name = "this machine"
    if gpu is not None:
        name += f" ({gpu.name})" if usable else f" ({gpu.name} is not used: this torch is built without CUDA)"
    return Machine(
        name=name,
        device="cuda" if usable else "cpu",
        memory_bytes=gpu.memory_bytes if gpu is not None and usable else memory_limit(root).amount,
        cores=core_limit(root).amount,
        features=cpu_features(root),
        compute_capability=gpu.compute_capability if gpu is not None and usable else None,
        software=_software(environ),
        probed=True,
    )


def memory_limit(root: Path = ROOT) -> Limit:
    """Bytes that this process may use: the smallest limit of its cgroups (v2 or v1), or the host's memory."""
    found = [Limit(_mem_total(root), "the host's memory (MemTotal)")]
    for folder in _cgroups(root, "memory"):
        for file in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / file).strip()
            if text.isdigit() and int(text) < UNLIMITED:
                found.append(Limit(int(text), f"the container's limit ({_inside(root, folder / file)})"))
    return min(found, key=lambda limit: limit.amount)


def core_limit(root: Path = ROOT) -> Limit:
    """Cores that this process may use: its affinity, or the CPU quota of its cgroups, rounded down but at least 1."""
    found = [Limit(len(os.sched_getaffinity(0)), "this process's CPU affinity")]
    for folder in _cgroups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        file = "cpu.max"
        if not period:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
            file = "cpu.cfs_quota_us"
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            origin = f"the container's CPU quota ({_inside(root, folder / file)})"
            found.append(Limit(max(1, int(quota) // int(period)), origin))
    return min(found, key=lambda limit: limit.amount)


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Instruction sets of the CPU in the kernel's spelling: `flags` on x86, `Features` on ARM."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def visible_gpu(environ: Mapping[str, str]) -> Gpu | None:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves visible, or None: no nvidia-smi, no driver, no GPU."""
    smi = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    first = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if smi is None or first in {"", "-1"}:
        return None
    command = [smi, f"--id={first}", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer cannot compute either
        return None
    found = re.match(r"(.*), (\d+), (\d+)\.(\d+)$", answer.stdout.partition("\n")[0].strip())
    return Gpu(found[1], int(found[2]) << 20, (int(found[3]), int(found[4]))) if found else None


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, read from its generated version.py: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return any(re.search(r"^cuda\b.*= ['\"]", _read(Path(folder) / "version.py"), re.MULTILINE) for folder in folders)


def _software(environ: Mapping[str, str]) -> frozenset[str]:
    path = environ.get("PATH", os.defpath)
    found = {
        "flash_attn": importlib.util.find_spec("flash_attn") is not None,
        "nvcc": shutil.which("nvcc", path=path) is not None,
        "cxx": any(shutil.which(name, path=path) for name in (environ.get("CXX") or "c++", "g++", "clang++")),
    }
    return frozenset(name for name, there in found.items() if there)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """This process's control-group folders and their parents, v2 then v1.

    Inside a container the path in /proc/self/cgroup may be the host's and not exist below the mount; the mount's root is
    then the container's own group, so walking up finds the limit in every case.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            bases = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            bases = [mounts / controllers, mounts / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        for base in bases:
            for folder in (inner, *inner.parents):
                yield base / folder


def _mem_total(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    if found:
        return int(found[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _inside(root: Path, file: Path) -> str:
    return f"/{file.relative_to(root).as_posix()}"


def _read(file: Path) -> str:
    """A small file's text, or nothing when it is not there or not ours to read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
