"""Ten minutes of mixed clients against a real service on loopback; exit 1 when anything was wrong, leaked or hung.

    python bench/soak.py                                  # ten minutes, +recipe=tiny
    python bench/soak.py --seconds 60 --json soak.json    # shorter, and the numbers as JSON
    python bench/soak.py --recipe mock kv.page_size=1     # another recipe; further arguments are overrides

Load and rest alternate. In each rest the service must become idle, and is measured: requests in flight, KV slots,
descriptors, threads, resident memory. What must hold: seeded answers equal those taken alone at the start, whatever the
neighbours do; no status but those the clients provoke (503 with Retry-After is allowed); when idle every KV slot is free or
cached, no request is running or waiting, descriptors and threads are as at the beginning, and memory grows with nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _clients import FAULTS, Crowd, Tally
from _questions import Question, Said, questions, read_whole
from _service import Service, running
from _wire import Wire
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

MAX_BODY_BYTES = 65536
# A pool that is too small for all who run, so that they are preempted; few waiting places, so that some are refused.
OVERRIDES = (
    "model.context=512",
    "kv.page_size=16",
    "kv.n_tokens=640",
    "scheduler.max_batch_size=8",
    "scheduler.max_waiting=20",
    "scheduler.max_batch_tokens=96",
    "scheduler.max_prompt_tokens_per_tick=48",
    f"server.max_body_bytes={MAX_BODY_BYTES}",
    "server.stream_bytes=4096",
    "run.log_level=ERROR",
)
# What the scripted model is asked to do to the requests that say so.
FAULTY = ", ".join(f"{{when: {words}, after: {after}, how: '{words.split()[-1]}'}}" for words, after in FAULTS.items())
COUNTED = ("prompt_tokens", "generated_tokens", "cached_tokens", "preemptions", "cancelled", "refused", "faults", "restarts")
CLIENTS = 24
IDLE_S = 20.0  # in which a service that nobody asks must have nothing left to do
SLOPE = 256 * 1024  # bytes of resident memory per 1000 requests that count as noise
ENOUGH = 8  # samples after warm-up that make a slope worth judging
GROWTH = 48 * 2**20  # bytes that a shorter run may gain after warm-up: allocators fill their pools


@dataclass(frozen=True)
class Sample:
    """One rest: what the service held when nobody asked for anything."""

    at_s: float
    requests: int
    idle: bool
    active: int
    waiting: int
    descriptors: int
    threads: int
    rss: int  # bytes
    slots: dict[str, int] | None  # of the KV pool, by state; None: the service does not tell
    counted: Mapping[str, int] = field(default_factory=dict)  # what the engine has done so far, by name

    @property
    def usable(self) -> int:
        """KV slots that the next request may have: the free ones and the cached ones."""
        return sum(count for state, count in (self.slots or {}).items() if state != "held")


def kv_slots(metrics: Mapping[str, float]) -> dict[str, int] | None:
    """Token slots of the pool by state: free, held by a request, cached. None: the service does not tell."""
    slots = {state: metrics.get(f'astrai_kv_slots{{state="{state}"}}') for state in ("free", "held", "cached")}
    return {state: int(count) for state, count in slots.items() if count is not None} or None


def sample(service: Service, began: float, tally: Tally, fewest: int) -> Sample:
    """Waits until nothing runs and the descriptors of closed connections are gone, then measures."""
    until = time.monotonic() + IDLE_S
    while True:
        stats = service.get("/stats")
        descriptors = service.descriptors()
        idle = not stats["active_tasks"] and not stats["waiting_queue"] and descriptors <= fewest
        if idle or time.monotonic() > until:
            break
        time.sleep(0.05)
    metrics = service.metrics()
    return Sample(
        at_s=round(time.monotonic() - began, 1),
        requests=tally.requests,
        idle=not stats["active_tasks"] and not stats["waiting_queue"],
        active=stats["active_tasks"],
        waiting=stats["waiting_queue"],
        descriptors=descriptors,
        threads=service.status("Threads"),
        rss=service.status("VmRSS") * 1024,
        slots=kv_slots(metrics),
        counted={name: int(metrics.get(f"astrai_{name}_total{{}}", 0)) for name in COUNTED},
    )


async def alone(port: int, asked: list[Question]) -> dict[Question, Said]:
    """Each question's answer when it is the only one, in one piece.

    Raises:
        RuntimeError: it was not answered.
    """
    answers: dict[Question, Said] = {}
    for question in asked:
        wire = await Wire.open(port)
        await wire.ask("POST", question.path, question.encoded(stream=False))
        status, body = await wire.head(), await wire.body()
        await wire.close()
        if status != 200:
            raise RuntimeError(f"the reference answer failed with {status}: {body!r} for {question.body}")
        answers[question] = read_whole(question.path, json.loads(body))
    return answers


async def load(crowd: Crowd, clients: int, seconds: float) -> None:
    """`clients` loops of requests, until the time is over or each has made its share."""
    until = time.monotonic() + seconds
    most = int(seconds * 200) + 10

    async def client() -> None:
        for _ in range(most):
            if time.monotonic() >= until:
                return
            await crowd.one()

    await asyncio.gather(*(client() for _ in range(clients)))


def slope(samples: list[Sample]) -> float:
    """Least squares: bytes of resident memory per 1000 requests."""
    if len(samples) < 2 or samples[0].requests == samples[-1].requests:
        return 0.0
    return statistics.linear_regression([s.requests for s in samples], [s.rss for s in samples]).slope * 1000


def judge(samples: list[Sample], warm: list[Sample], tally: Tally) -> None:
    """Adds what the samples prove wrong to the violations."""
    first = samples[0]
    for one in samples:
        if not one.idle:
            tally.violate(f"at {one.at_s} s: {one.active} running and {one.waiting} waiting, though nobody asked")
        if one.usable != first.usable or (one.slots or {}).get("held"):
            tally.violate(f"at {one.at_s} s: KV slots {one.slots}; there were {first.slots}")
        if one.descriptors > first.descriptors + 2:
            tally.violate(f"at {one.at_s} s: {one.descriptors} descriptors; there were {first.descriptors}")
    if len(warm) > 1 and warm[-1].threads > warm[0].threads + 2:
        tally.violate(f"{warm[-1].threads} threads at the end; there were {warm[0].threads}")
    grown = warm[-1].rss - warm[0].rss
    if len(warm) >= ENOUGH and slope(warm) > SLOPE:
        tally.violate(f"memory grew by {slope(warm):.0f} bytes per 1000 requests; {SLOPE} is noise")
    if len(warm) < ENOUGH and grown > GROWTH:
        tally.violate(f"memory grew by {grown} bytes after warm-up; {GROWTH} is noise")


def soak(service: Service, arguments: argparse.Namespace, console: Console) -> tuple[Tally, list[Sample], list[Sample]]:
    """Load and rest in turn. Returns what the clients saw, every sample, and those after warm-up."""
    answers = asyncio.run(alone(service.port, questions(seed=1, count=32)))
    faults = arguments.recipe == "mock"
    crowd = Crowd(service.port, answers, MAX_BODY_BYTES, random.Random(arguments.seed), faults)
    period = min(10.0, arguments.seconds / 6)
    began = time.monotonic()
    samples = [sample(service, began, crowd.tally, service.descriptors())]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("soak", total=arguments.seconds, said="")
        while time.monotonic() - began < arguments.seconds:
            asyncio.run(load(crowd, arguments.clients, period * 0.85))
            samples.append(sample(service, began, crowd.tally, samples[0].descriptors))
            tally = crowd.tally
            said = f"{tally.requests} requests, {tally.wrong} wrong, {tally.violations.total()} violations"
            progress.update(bar, completed=time.monotonic() - began, said=said)
            if service.process.poll() is not None:
                tally.violate(f"the service died: {service.errors.read_text()[-2000:]}")
                break
    warm = samples[max(1, len(samples) // 4) :]
    judge(samples, warm, crowd.tally)
    return crowd.tally, samples, warm


def report(tally: Tally, samples: list[Sample], warm: list[Sample], console: Console, title: str) -> dict[str, Any]:
    """Prints the table; returns the same numbers."""
    lost = [samples[0].usable - one.usable for one in samples if one.slots is not None]
    rows: Mapping[str, Any] = {
        "seconds": samples[-1].at_s,
        "requests": tally.requests,
        "answers compared": tally.compared,
        "wrong answers": tally.wrong,
        "statuses": ", ".join(f"{status}: {count}" for status, count in sorted(tally.statuses.items())),
        "clients": ", ".join(f"{kind}: {count}" for kind, count in sorted(tally.kinds.items())),
        "running or waiting when idle": max(one.active + one.waiting for one in samples),
        "KV slots lost": max(lost) if lost else "the service does not tell",
        "the engine": ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in samples[-1].counted.items()),
        "descriptors, first and last": f"{samples[0].descriptors}, {samples[-1].descriptors}",
        "threads, first and last": f"{samples[0].threads}, {samples[-1].threads}",
        "memory, first, warm and last (MiB)": ", ".join(f"{s.rss / 2**20:.1f}" for s in (samples[0], warm[0], samples[-1])),
        "memory per 1000 requests after warm-up (KiB)": f"{slope(warm) / 1024:.1f} over {len(warm)} samples",
        "violations": tally.violations.total(),
    }
    table = Table("what", "value", title=title)
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    for violation, times in tally.violations.most_common(20):
        console.print(Text(f"{times} x {violation[:600]}", style="red"))
    return {
        **rows,
        "statuses": dict(tally.statuses),
        "clients": dict(tally.kinds),
        "rss_slope_bytes_per_1000": slope(warm),
        "violations": dict(tally.violations),
        "samples": [asdict(one) for one in samples],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--seed", type=int, default=0, help="of the clients' choices")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    console = Console()
    faults = [f"provider.faults=[{FAULTY}]"] if arguments.recipe == "mock" else []
    with running([f"+recipe={arguments.recipe}", *OVERRIDES, *faults, *overrides]) as service:
        found = soak(service, arguments, console)
    told = report(*found, console, f"soak of +recipe={arguments.recipe}")
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 1 if found[0].violations else 0


if __name__ == "__main__":
    sys.exit(main())
