"""The services of a comparison: started, asked by streaming clients, stopped; and how long they need to start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from _lines import Refused, Remote
from _sides import HERE, Found, Place, Side
from _steps import read_counts
from _work import Work

NEW = 64  # tokens a client
START_S = 180.0
SLOTS, CONTEXT = 16, 1024  # answers at once, and tokens of each


@dataclass
class Running:
    """A service that answers. `ready_s`: from its command to that moment."""

    process: subprocess.Popen[str]
    base: str  # with /v1
    ready_s: float

    def peak_mib(self) -> float:
        """The largest resident memory so far, mapped files included."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(command: Sequence[str], env: Mapping[str, str], port: int, probe: str, log: Path) -> Running:
    """Starts a service and waits until `probe` answers 200.

    Raises:
        Refused: it ended, or was not ready in time; the message holds the end of its log.
    """
    began = time.perf_counter()
    with log.open("w") as said:
        process = subprocess.Popen(list(command), env=dict(env), text=True, stdout=said, stderr=said)
    running = Running(process, f"http://127.0.0.1:{port}/v1", 0.0)
    try:
        while time.perf_counter() - began < START_S and process.poll() is None:
            if answers(f"http://127.0.0.1:{port}{probe}"):
                running.ready_s = time.perf_counter() - began
                return running
            time.sleep(0.02)
    except BaseException:  # interrupted
        running.stop()
        raise
    running.stop()
    raise Refused(f"{command[0]} was not ready: {log.read_text()[-1200:]}")


def answers(url: str) -> bool:
    """Whether it says 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def our_command(overrides: Sequence[str], place: Place, *script: str) -> tuple[list[str], dict[str, str]]:
    """This tree's command line and its environment, with the room that all services get."""
    room = ("kv=paged", f"kv.n_tokens={SLOTS * CONTEXT}", f"model.context={CONTEXT}", f"scheduler.max_batch_size={SLOTS}")
    env = place.our_env() | {"PYTHONPATH": f"{HERE.parent}:{HERE.parent / 'runtime'}"}
    return [sys.executable, *script, *room, *overrides], env


def launch_ours(overrides: Sequence[str], place: Place, state: Path | None = None, counts: Path | None = None) -> Running:
    """`astrai-deploy serve` of this tree. `state`: another folder for packed weights; `counts`: where steps are counted."""
    port = free_port()
    script = [str(HERE / "serve_counted.py"), str(counts)] if counts else ["-m", "astrai_deploy.cli", "serve"]
    command, env = our_command([*overrides, f"server.port={port}"], place, *script)
    return launch(command, env | place.our_env(state), port, "/ready", place.log("our service"))


def planned_mib(overrides: Sequence[str], place: Place) -> float | None:
    """What the plan says that the service needs at most; None: it has no plan."""
    command, env = our_command(overrides, place, "-m", "astrai_deploy.cli", "plan", "--json")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout)["memory"]["peak"] / 2**20 if done.returncode == 0 else None


def launch_llama(folder: Path, file: Path, place: Place) -> Running:
    """llama-server with as many slots of the same size, and its own defaults otherwise (prompt cache on)."""
    port = free_port()
    command = [str(folder / "llama-server"), "-m", str(file), "-t", str(place.threads), "-tb", str(place.threads)]
    command += ["-c", str(SLOTS * CONTEXT), "-np", str(SLOTS), "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    return launch(command, place.env(), port, "/health", place.log("llama-server"))


def owner_of(port: int) -> list[int]:
    """The processes that listen on a loopback port, as far as this user may see them."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _holds(p / "fd", inodes)]


def _holds(descriptors: Path, wanted: set[str]) -> bool:
    try:
        return any(str(one.readlink()) in wanted for one in descriptors.iterdir())
    except OSError:
        return False


@dataclass
class Asked:
    """What all services are asked with."""

    clients: Remote
    route: str  # completions or chat/completions
    prefix_words: int = 0


class Service(Side):
    """A service that is running, whoever started it."""

    def __init__(
        self, name: str, base: str, asked: Asked, running: Running | None = None, counts: Path | None = None
    ) -> None:
        self.name, self.base, self._asked, self._running, self._counts = name, base, asked, running, counts
        self._loads = 0
        self._pids = [running.process.pid] if running else owner_of(urlsplit(base).port or 80)

    def pids(self) -> list[int]:
        return [*self._pids, self._asked.clients.pid]

    def can(self, work: Work) -> bool:
        return work.kind == "http"

    def words_for(self, tokens: int) -> int:
        return int(self._asked.clients.ask("words_for", base=self.base, route=self._asked.route, tokens=tokens))

    def measure(self, group: Sequence[Work], turn: int) -> Found:
        return {work: self._one(work) for work in group if self.can(work)}

    def load(self, clients: int, prefix: str, new: int, salt: str) -> dict[str, float]:
        how = {"base": self.base, "route": self._asked.route, "prefix_words": self._asked.prefix_words}
        return dict(self._asked.clients.ask("load", clients=clients, prefix=prefix, new=new, salt=salt, **how))

    def _one(self, work: Work) -> dict[str, float]:
        if work.prefix == "shared":
            self.load(1, "shared", 2, "warm")  # the prefix has been seen before, as in a service's life
        before = read_counts(self._counts) if self._counts else None
        self._loads += 1  # a repeated measurement must not find its prompts cached
        found = self.load(work.streams, work.prefix, NEW, f"{work.key}/{self._loads}")
        if before and self._counts:
            found["around"] = 1 - (read_counts(self._counts)[1] - before[1]) / found["wall_s"]
        return found

    def close(self) -> None:
        if self._running:
            self._running.stop()


class Starts(Side):
    """A service's starts: the first with an empty state folder, the second with what that left; then its peak memory."""

    def __init__(self, name: str, start: Callable[[Path], Running], asked: Asked, planned: float | None = None) -> None:
        """`planned`: MiB that it should need at most."""
        self.name, self._start, self._asked, self._planned = name, start, asked, planned

    def pids(self) -> list[int]:
        return [self._asked.clients.pid]

    def can(self, work: Work) -> bool:
        return work.kind == "start"

    def measure(self, group: Sequence[Work], turn: int) -> Found:
        with tempfile.TemporaryDirectory(prefix="bench-state-") as state:
            first = self._start(Path(state))
            first_peak = first.peak_mib()
            first.stop()
            second = self._start(Path(state))
            try:
                Service(self.name, second.base, self._asked, second).load(8, "shared", 32, f"start/{turn}")
                found = {"first_s": first.ready_s, "second_s": second.ready_s}
                found |= {"first_peak_mib": first_peak, "peak_mib": second.peak_mib()}
                if self._planned:
                    found["by_plan"] = found["peak_mib"] / self._planned
            finally:
                second.stop()
        return {work: found for work in group if self.can(work)}
