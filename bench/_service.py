"""A real service of this tree as a subprocess on loopback, and what the operating system and its routes tell about it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


@dataclass(frozen=True)
class Service:
    """A running service: its address, its process, and the file that holds what it wrote to standard error."""

    url: str
    process: subprocess.Popen[str]
    errors: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def get(self, path: str) -> Any:
        """The JSON of a route.

        Raises:
            urllib.error.HTTPError: its status is an error.
        """
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics as `name{labels}` -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        found = (SAMPLE.match(line) for line in lines)
        return {f"{at['name']}{{{at['labels'] or ''}}}": float(at["value"]) for at in found if at}

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def status(self, key: str) -> int:
        """A number of /proc/PID/status: VmRSS (KiB), Threads, ..."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _share_kernels(cache: Path) -> None:
    """Lets that cache have the user's compiled kernels: which they are is in their name, and compiling takes a while."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "astrai-deploy" / "kernels"
    users.mkdir(parents=True, exist_ok=True)
    (cache / "astrai-deploy").mkdir(parents=True)
    (cache / "astrai-deploy" / "kernels").symlink_to(users.resolve())


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[Service]:
    """`astrai-deploy ARGS... server.port=0` until the block ends, then SIGTERM.

    Raises:
        RuntimeError: it did not start, or it did not end with exit code 0 within 30 seconds.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ASTRAI", "ASTR_", "HF_"))}
    with tempfile.TemporaryDirectory(prefix="astrai-bench-") as home:
        own = {f"XDG_{name}_HOME": f"{home}/{name.lower()}" for name in ("CACHE", "CONFIG", "STATE")}
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", "PYTHONUNBUFFERED": "1"}
        _share_kernels(Path(own["XDG_CACHE_HOME"]))
        errors = Path(home) / "stderr"
        command = [sys.executable, "-m", "astrai_deploy.cli", "serve", *arguments, "server.port=0"]
        with errors.open("w") as log:
            process = subprocess.Popen(
                command, cwd=home, env={**kept, **own, **paths}, text=True, stdout=subprocess.PIPE, stderr=log
            )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url.startswith("http://127.0.0.1:"):
                raise RuntimeError(f"the service did not start: {errors.read_text()}")
            yield Service(url, process, errors)
            if process.poll() is not None:
                raise RuntimeError(f"the service died with {process.returncode}: {errors.read_text()[-4000:]}")
            process.terminate()
            if process.wait(30):
                raise RuntimeError(f"the service ended with {process.returncode}: {errors.read_text()[-4000:]}")
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
