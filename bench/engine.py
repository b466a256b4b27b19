"""Load time, prefill and decode speed, and peak memory of one recipe on this machine; optionally beside transformers.

    python bench/engine.py +recipe=chat_paged                         # this engine alone
    python bench/engine.py --peer +recipe=chat_paged model.dtype=float32    # the same weights in transformers, interleaved

Prints one table and, with --json FILE, the numbers. Medians of --rounds rounds; greedy; ratios are what to quote, because
absolute numbers move with whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from astrai_deploy.build import Built, build
from astrai_deploy.compose import compose
from astrai_deploy.plan import Plan, make_plan
from astrai_runtime.event import Delta, Finished
from astrai_runtime.request import Limits, Prompt, SamplingParams

PROMPT, NEW = 512, 64


def prompt_of(length: int, vocabulary: int, salt: int) -> Prompt:
    """Distinct tokens for every round, so that no cache can help."""
    ids = tuple(3 + (salt * 7919 + i * 31) % (min(vocabulary, 30000) - 3) for i in range(length))
    return Prompt(ids, SamplingParams(temperature=0), Limits(max_tokens=NEW, ignore_eos=True))


def engine_rate(built: Built, streams: int, salt: int) -> dict[str, float]:
    """One round of `streams` concurrent requests: prompt tokens a second until the first text, then tokens a second."""
    prompts = [prompt_of(16, built.engine.info.vocab_size, salt * 100 + i) for i in range(streams)]
    began = time.perf_counter()
    running = [built.engine.submit(prompt) for prompt in prompts]
    tokens = 0
    for stream in running:
        for event in stream.events():
            if isinstance(event, Finished):
                tokens += event.usage.completion_tokens
    return {f"decode, {streams} stream{'s' if streams > 1 else ''} (tok/s)": tokens / (time.perf_counter() - began)}


def engine_prefill(built: Built, salt: int) -> dict[str, float]:
    """Prompt tokens a second of one prompt of PROMPT tokens, until its first token exists."""
    base = prompt_of(PROMPT, built.engine.info.vocab_size, salt)
    prompt = Prompt(base.token_ids, base.sampling, Limits(max_tokens=1, ignore_eos=True))
    began = time.perf_counter()
    for event in built.engine.submit(prompt).events():
        assert isinstance(event, Delta | Finished)
    return {f"prefill {PROMPT} (tok/s)": PROMPT / (time.perf_counter() - began)}


def peer(plan: Plan) -> Callable[[int], dict[str, float]]:
    """The same file in transformers, same dtype and threads: one round of prefill and single-stream decode."""
    from transformers import AutoModelForCausalLM

    path = plan.located.path
    assert path is not None, "a random model has no files for transformers"
    where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, plan.dtype), **where).eval()

    def generate(ids: tuple[int, ...], new: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(torch.tensor([ids]), min_new_tokens=new, max_new_tokens=new, do_sample=False)
        return time.perf_counter() - began

    def one(salt: int) -> dict[str, float]:
        long, short = prompt_of(PROMPT, 30000, salt).token_ids, prompt_of(16, 30000, salt).token_ids
        return {
            f"prefill {PROMPT} (tok/s)": PROMPT / generate(long, 1),
            "decode, 1 stream (tok/s)": NEW / generate(short, NEW),
        }

    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="store_true", help="measure transformers in the same run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    plan = make_plan(compose(overrides))
    built = build(plan)
    built.engine.start()
    engine_rate(built, 1, 0)  # warm up
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    other = peer(plan) if arguments.peer else None
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for salt in range(1, arguments.rounds + 1):
        for found in (engine_prefill(built, salt), *(engine_rate(built, n, salt * 10 + n) for n in (1, 4, 8))):
            for name, value in found.items():
                ours.setdefault(name, []).append(value)
        for name, value in (other(salt) if other else {}).items():
            theirs.setdefault(name, []).append(value)
    built.engine.shutdown()
    rows = {name: statistics.median(values) for name, values in ours.items()}
    peers = {name: statistics.median(values) for name, values in theirs.items()}
    machine = platform.processor() or platform.machine()
    table = Table(title=f"{plan.deployment.model.name}, {plan.dtype}, {torch.get_num_threads()} threads, {machine}")
    for column in ("work", "astrai-deploy", "transformers", "ratio"):
        table.add_column(column)
    for name, value in rows.items():
        at = peers.get(name)
        table.add_row(name, f"{value:.1f}", f"{at:.1f}" if at else "-", f"{value / at:.2f}" if at else "-")
    table.add_row("load (s)", f"{built.load_s:.1f}", "-", "-")
    table.add_row("peak memory after warm-up (MiB)", f"{peak:.0f}", "-", "-")
    Console().print(table)
    if arguments.json:
        told = {
            "ours": rows,
            "transformers": peers,
            "load_s": built.load_s,
            "peak_mib": peak,
            "plan_bytes": plan.memory.peak,
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
