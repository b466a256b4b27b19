"""The sides of a comparison: how each engine is started, and how it measures a group of works."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _lines import Refused, Remote
from _work import PROMPT, SHORT, Work

HERE = Path(__file__).resolve().parent
NEW = 32  # tokens decoded a stream and round
BUSY_S = 10.0  # after which an engine that can stops stepping beside a busy process
BUSY_NEW = 64  # of the p95 beside a busy process: more steps, so that 5 % of them are some
SLOW_NEW, SLOW_BATCHES = 16, (1, 8)  # for sides that need seconds a step

Found = dict[Work, dict[str, float]]


@dataclass(frozen=True)
class Place:
    """Where and how all sides run."""

    threads: int
    cache: Path  # logs, compiled kernels, packed weights

    def env(self, **own: str) -> dict[str, str]:
        """This process's environment without settings that change engines, with the threads said in every way they know."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("ASTRAI", "ASTR_", "LLAMA_ARG", "GGML_"))
        }
        n = str(self.threads)
        return kept | {"OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"} | own

    def our_env(self, state: Path | None = None) -> dict[str, str]:
        homes = {"XDG_CACHE_HOME": str(self.cache / "cache"), "XDG_STATE_HOME": str(state or self.cache / "state")}
        return self.env(**homes, XDG_CONFIG_HOME=str(self.cache / "config"))

    def worker(self, name: str, script: str, *arguments: str) -> Remote:
        """One of our scripts behind a pipe, in this virtual environment."""
        return Remote([sys.executable, str(HERE / script), *arguments], self.log(name), self.env())

    def log(self, name: str) -> Path:
        self.cache.mkdir(parents=True, exist_ok=True)
        return self.cache / f"{name.replace(' ', '-')}.log"


class Side(ABC):
    """One engine that is ready to be measured."""

    name: str
    about: Mapping[str, Any] = {}

    @abstractmethod
    def pids(self) -> list[int]:
        """Processes whose time belongs to its measurements."""

    @abstractmethod
    def measure(self, group: Sequence[Work], turn: int) -> Found:
        """Raises `Refused`: it could not."""

    def can(self, work: Work) -> bool:
        return True

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """Ends its processes."""


@contextmanager
def busy_process() -> Iterator[int]:
    """One process that never waits, at ordinary priority."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


class Worker(Side):
    """An engine behind one of the `side_*.py` scripts: it is loaded once and asked again and again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        place: Place,
        env: Mapping[str, str],
        kinds: Sequence[str] = ("prefill", "decode", "busy"),
        slow: bool = False,
    ) -> None:
        self.name, self._kinds, self._slow = name, kinds, slow
        self._asked = 0
        self._remote = Remote(command, place.log(name), env)
        self.about = self._remote.about
        # Engines that spin may need minutes for this one; those that cannot be bounded do not.
        self._bound = {"limit_s": BUSY_S} if "limit" in self.about else {}

    def pids(self) -> list[int]:
        return [self._remote.pid]

    def can(self, work: Work) -> bool:
        return work.kind in self._kinds and (not self._slow or work.kind == "prefill" or self._quick(work))

    def _quick(self, work: Work) -> bool:
        return work.streams in SLOW_BATCHES and not (work.context and work.streams > 1)

    def measure(self, group: Sequence[Work], turn: int) -> Found:
        return {work: self._one(work) for work in group if self.can(work)}

    def _one(self, work: Work) -> dict[str, float]:
        if work.kind == "prefill":
            self._asked += 1  # a repeated measurement must not find its prompt cached
            return self._remote.ask("prefill", ids=work.prompts(self._asked)[0])
        if work.kind == "decode":
            return self._remote.ask("decode", prompts=work.prompts(), new=SLOW_NEW if self._slow else NEW)
        idle = self._remote.ask("decode", prompts=work.prompts(), new=BUSY_NEW)
        with busy_process():
            busy = self._remote.ask("decode", prompts=work.prompts(), new=BUSY_NEW, **self._bound)
        return {
            "idle_p95_ms": idle["p95_ms"],
            "busy_p95_ms": busy["p95_ms"],
            "slowdown": busy["p95_ms"] / idle["p95_ms"],
            "busy_tok_s": busy["tok_s"],
        }

    def close(self) -> None:
        self._remote.close()


class LlamaTools(Side):
    """llama.cpp's own llama-batched-bench, once a group; it loads the file anew each time, which is not counted."""

    name = "llama.cpp"

    def __init__(self, folder: Path, file: Path, place: Place) -> None:
        self._tool, self._file, self._place = folder / "llama-batched-bench", file, place
        if not self._tool.is_file():
            raise Refused(f"there is no {self._tool}")

    def pids(self) -> list[int]:
        return []  # a child of this process that ends within the measurement

    def can(self, work: Work) -> bool:
        return work.kind in ("prefill", "decode")

    def measure(self, group: Sequence[Work], turn: int) -> Found:
        works = [work for work in group if self.can(work)]
        if not works:
            return {}
        length = max(PROMPT if work.kind == "prefill" else max(work.context, SHORT) for work in works)
        streams = sorted({work.streams for work in works})
        # -pps: one prompt is computed and its keys and values copied for the other streams, which is quicker to set up.
        command = [str(self._tool), "-m", str(self._file), "-pps", "--output-format", "jsonl"]
        command += ["-t", str(self._place.threads), "-tb", str(self._place.threads), "-b", "2048", "-ub", "512"]
        command += ["-c", str(max(streams) * (length + NEW + 64)), "-npp", str(length), "-ntg", str(NEW)]
        command += ["-npl", ",".join(map(str, streams))]
        done = subprocess.run(command, capture_output=True, text=True, env=self._place.env(), timeout=600)
        rows = batched_rows(done.stdout)
        if done.returncode or len(rows) != len(streams):
            raise Refused(f"{self._tool.name} ended with {done.returncode}: {done.stderr[-800:]}")
        found: Found = {}
        for work in works:
            if work.kind == "prefill":
                found[work] = {"tok_s": statistics.median(row["speed_pp"] for row in rows.values())}
            else:
                found[work] = {"tok_s": rows[work.streams]["speed_tg"]}
        return found


def batched_rows(output: str) -> dict[int, dict[str, float]]:
    """llama-batched-bench's JSON lines by number of streams."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {int(row["pl"]): row for row in rows}


def our_worker(overrides: Sequence[str], place: Place) -> Worker:
    """This tree's engine. Its scheduler gets what llama.cpp's tool gets: 16 streams, 512 prompt tokens a step."""
    room = ("kv=paged", "kv.n_tokens=16384", "model.context=1024", "scheduler.max_batch_size=16")
    steps = ("scheduler.max_batch_tokens=1024", "scheduler.max_prompt_tokens_per_tick=512")
    command = [sys.executable, str(HERE / "side_ours.py"), *room, *steps, *overrides]
    return Worker("astrai-deploy", command, place, place.our_env())
