"""How long a start takes until GET /ready answers 200: the first one in an empty home, and later ones; with its parts.

    python bench/startup.py +recipe=chat_paged            # 1 first start, 5 later ones, medians
    python bench/startup.py --rounds 9 --json out.json +recipe=chat_paged kernels.isa=avx2

A first start assembles or downloads the model, compiles the CPU kernels, packs the weights and prepares the tokenizer.
Parts are what the service itself logs; `interpreter` is the rest: Python, and waiting for the first answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PAUSE_S = 0.005  # between two looks at /ready
LIMIT_S = 600.0  # a first start may download, compile and pack


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:  # nobody listens yet, or 503 (urllib.error.HTTPError is one too)
        return False


def parts_of(errors: Path, patience_s: float = 10.0) -> dict[str, float]:
    """The seconds that the service's own line about its start tells, in order. The line follows the first 200.

    Raises:
        RuntimeError: there is no such line after `patience_s` seconds.
    """
    until = time.perf_counter() + patience_s
    while True:
        for line in errors.read_text().splitlines():
            if line.startswith("{") and line.endswith("}") and '"event": "ready"' in line:
                told: Mapping[str, Any] = json.loads(line)
                return {key.removesuffix("_s"): value for key, value in told.items() if key.endswith("_s")}
        if time.perf_counter() > until:
            raise RuntimeError(f"the service did not say what its start took: {errors.read_text()[-2000:]}")
        time.sleep(PAUSE_S)


def start(overrides: Sequence[str], home: Path) -> dict[str, float]:
    """Starts a service below `home`, waits until it is ready, ends it. Seconds by part, with `ready` for the whole, and
    `peak_mib`, the most memory it had until then.

    Raises:
        RuntimeError: it ended by itself, or was not ready after `LIMIT_S` seconds.
    """
    own = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}"}
    port = free_port()
    command = [sys.executable, "-m", "astrai_deploy.cli", "serve", *overrides]
    command += [f"server.port={port}", "run.log_format=json", "run.log_level=INFO"]
    with (home / "stderr").open("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=home, env={**os.environ, **own, **paths}, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            while not is_ready(f"http://127.0.0.1:{port}"):
                if process.poll() is not None or time.perf_counter() - began > LIMIT_S:
                    raise RuntimeError(f"the service did not start: {(home / 'stderr').read_text()[-4000:]}")
                time.sleep(PAUSE_S)
            took = time.perf_counter() - began
            status = Path(f"/proc/{process.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else []
            peak = next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)
            parts = parts_of(home / "stderr")
        finally:
            process.terminate()
            process.wait(30)
    return {"interpreter": max(took - sum(parts.values()), 0.0), **parts, "ready": took, "peak_mib": peak}


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="later starts; medians are shown")
    parser.add_argument("--home", type=Path, help="a folder that is kept: its first start is one only if it is empty")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="astrai-startup-") as made:
        home = arguments.home or Path(made)
        home.mkdir(parents=True, exist_ok=True)
        first = start(overrides, home)
        later = [start(overrides, home) for _ in range(arguments.rounds)]
    middle = medians(later)
    title = f"start to /ready, {' '.join(overrides)}; {os.cpu_count()} cores, {platform.machine()}"
    table = Table(title=title)
    for column in ("part", "first start (s)", f"later, median of {len(later)} (s)", "best (s)"):
        table.add_column(column)
    for name, value in middle.items():
        if name != "peak_mib":
            best = min(found[name] for found in later)
            table.add_row(name, f"{first[name]:.2f}", f"{value:.2f}", f"{best:.2f}", end_section=name == "engine")
    table.add_row("peak memory (MiB)", f"{first['peak_mib']:.0f}", f"{middle['peak_mib']:.0f}", "")
    Console().print(table)
    if arguments.json:
        told = {"first": first, "later": middle, "rounds": later}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
