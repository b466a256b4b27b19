"""This engine beside others: same machine, files, prompts and threads, measured in turn within each round; ratios first.

    python bench/peers.py --model demo --llama-bin DIR                     # all kinds of work, llama.cpp's own tools
    python bench/peers.py --model qwen-int8 --work prefill,decode --peers llama.cpp,openvino --llama-python PYTHON
    python bench/peers.py --model demo --work http --url vllm=http://127.0.0.1:8001/v1 --out docs/bench.json

Models: demo (the demo extra's Gemma 3 270M), qwen-int8 and qwen-int4 (random weights at Qwen2.5-0.5B's shape in Q8_0 and
Q4_0, made on first use), tiny (our random recipe, for trying this out), own (ours alone, as the overrides say),
or a .gguf file. Peers:
llama.cpp (its tools with --llama-bin, llama-cpp-python otherwise), transformers, openvino; those that are not there are
left out, and the end of the output says so. Further arguments are overrides of our configuration. --out FILE replaces
what the file has of these works and keeps the rest, so that several runs make one plot (`plot.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _compare import Comparison
from _work import BATCHES, CONTEXTS, KINDS, PREFIXES
from rich.console import Console

# What the README's picture is made of, about 11 minutes on two cores; each line can be run alone.
SUITE = (
    "--model qwen-int8 --work prefill,decode",
    "--model qwen-int4 --work prefill,decode --peers llama.cpp,openvino",
    "--model demo --work prefill,decode --peers llama.cpp",
    "--model demo --work http --peers llama.cpp --rounds 2",
    "--model qwen-int8 --work http --peers llama.cpp --clients 1,8 --prefixes shared",
    "--model demo --work busy,start --peers llama.cpp",
)


def comma(allowed: Sequence[str] | None = None) -> Callable[[str], list[str]]:
    def split(words: str) -> list[str]:
        given = [word for word in words.split(",") if word]
        for word in given:
            if allowed is not None and word not in allowed:
                raise argparse.ArgumentTypeError(f"'{word}' is none of {', '.join(allowed)}")
        return given

    return split


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def named_url(words: str) -> tuple[str, str]:
    name, _, url = words.partition("=")
    if not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"'{words}' is not NAME=http://HOST:PORT/v1")
    return name, url.rstrip("/")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "astrai-deploy-bench"
    add("--model", default="demo")
    add("--suite", action="store_true", help="all that the README shows, one after the other; other arguments hold for each")
    add("--work", type=comma(KINDS), default=list(KINDS), help=f"of {','.join(KINDS)}")
    add("--peers", type=comma(("llama.cpp", "transformers", "openvino")), default=["llama.cpp", "openvino", "transformers"])
    add("--llama-bin", type=Path, metavar="DIR", help="with llama-batched-bench and llama-server")
    add("--llama-python", default=sys.executable, metavar="PYTHON", help="one that has llama-cpp-python")
    add("--openvino-python", metavar="PYTHON", help="one that has openvino-genai; by default as --llama-python")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of transformers")
    add(
        "--url",
        type=named_url,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="an OpenAI-compatible server, with /v1",
    )
    add("--route", choices=("completions", "chat/completions"), default="completions")
    add("--batches", type=numbers, default=list(BATCHES))
    add("--contexts", type=numbers, default=list(CONTEXTS))
    add("--clients", type=numbers, default=list(BATCHES))
    add("--prefixes", type=comma(PREFIXES), default=list(PREFIXES))
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--limit", type=float, default=5.0, help="percent of all cores that others may take in a measurement")
    add("--tries", type=int, default=3, help="of a measurement that was disturbed")
    add("--cache", type=Path, default=cache, help="models, logs, compiled kernels, packed weights")
    add("--out", type=Path, help="JSON; what it has of other models stays")
    return parser


def save(path: Path, told: dict[str, Any]) -> None:
    """Adds a run to the file; what it does not have of the same model's works stays."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    before = next((run for run in runs if run["model"] == told["model"]), None)
    if before is not None:
        told["disturbed"] = [one for one in before["disturbed"] if one["work"] not in told["works"]] + told["disturbed"]
        for name in ("works", "about", "missing"):
            told[name] = {**before[name], **told[name]}
        told["memory_gb_s"] = before["memory_gb_s"] + told["memory_gb_s"]
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [run for run in runs if run is not before]
    path.write_text(json.dumps({"runs": [*kept, told]}, indent=1) + "\n", encoding="utf-8")


def compare(given: argparse.Namespace, ours: Sequence[str], console: Console) -> bool:
    """One model's works, printed and saved. False: nothing was measured."""
    given.openvino_python = given.openvino_python or given.llama_python
    began = time.monotonic()
    comparison = Comparison(given, ours, console)
    try:
        comparison.run(set(given.work))
    finally:  # an interrupted run tells what it has
        told = comparison.told(time.monotonic() - began)
        if given.out and told["works"]:
            save(given.out, told)
        low, high = min(comparison.ceiling, default=0), max(comparison.ceiling, default=0)
        title = f"{comparison.model.name}, {told['cpu']}, {given.threads} threads, memory {low:.0f}-{high:.0f} GB/s"
        wide = console if console.is_terminal else Console(width=160)
        wide.print(comparison.results.table(title))
        for name, why in comparison.results.missing.items():
            console.print(f"missing: {name}: {why}", style="yellow", markup=False)
        count = len(comparison.results.disturbed)
        console.print(f"{count} measurements stayed disturbed after {given.tries} tries; {told['seconds']} s in all")
    return bool(comparison.results.values)


def main() -> int:
    parser, console = arguments(), Console()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # as an interrupt does: every side is ended, what there is is told
    given, ours = parser.parse_known_args()
    if not given.suite:
        return 0 if compare(given, ours, console) else 1
    own = [word for word in sys.argv[1:] if word != "--suite"]
    measured = [compare(*parser.parse_known_args([*one.split(), *own]), console) for one in SUITE]
    return 0 if all(measured) else 1


if __name__ == "__main__":
    sys.exit(main())
