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
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from _compare import Comparison
from _work import BATCHES, CONTEXTS, KINDS, PREFIXES
from rich.console import Console


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


def save(path: Path, told: dict[str, object]) -> None:
    """Works of the same model that this run did not measure stay too."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    for run in runs:
        if run["model"] == told["model"]:
            told = {**told, "works": {**run["works"], **told["works"]}}  # type: ignore[dict-item]
    kept = [run for run in runs if run["model"] != told["model"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": [*kept, told]}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    given, ours = arguments().parse_known_args()
    given.openvino_python = given.openvino_python or given.llama_python
    began, console = time.monotonic(), Console()
    comparison = Comparison(given, ours, console)
    try:
        comparison.run(set(given.work))
    finally:
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
    return 0 if comparison.results.values else 1


if __name__ == "__main__":
    sys.exit(main())
