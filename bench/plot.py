"""A picture of what `peers.py --out` wrote: `plot.py docs/bench.json docs/bench.png`, how many times ahead we are per work.

A bar begins at 1x (equal) and goes right where we are ahead, left where we are behind, on a logarithmic axis. Times and
memory are turned round, so that right is always better.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# (work, number, label) of what is drawn, in this order; the table has the rest.
ROWS = (
    ("prefill 512", "tok_s", "prefill, 512 tokens"),
    ("decode x1 @0", "tok_s", "decode, 1 stream"),
    ("decode x4 @0", "tok_s", "decode, 4 streams"),
    ("decode x8 @0", "tok_s", "decode, 8 streams"),
    ("decode x16 @0", "tok_s", "decode, 16 streams"),
    ("decode x1 @512", "tok_s", "decode, 1 stream, context 512"),
    ("decode x8 @512", "tok_s", "decode, 8 streams, context 512"),
    ("decode x16 @512", "tok_s", "decode, 16 streams, context 512"),
    ("http x1 none", "tok_s", "HTTP, 1 client: tokens/s"),
    ("http x8 none", "tok_s", "HTTP, 8 clients: tokens/s"),
    ("http x1 shared", "tok_s", "HTTP, 1 client, shared prefix: tokens/s"),
    ("http x8 shared", "tok_s", "HTTP, 8 clients, shared prefix: tokens/s"),
    ("http x1 shared", "ttft_ms", "HTTP, 1 client, shared prefix: first token"),
    ("http x8 shared", "ttft_ms", "HTTP, 8 clients, shared prefix: first token"),
    ("busy x8", "busy_p95_ms", "p95 step beside a busy process"),
    ("start", "second_s", "second start"),
    ("start", "peak_mib", "peak memory"),
)
MODELS = {
    "demo": "Gemma 3 270M, Q4_K_M",
    "qwen-int8": "Qwen2.5-0.5B shape, Q8_0",
    "qwen-int4": "Qwen2.5-0.5B shape, Q4_0",
}
# Sides that are one engine to a reader.
ENGINES = {"llama-server": "llama.cpp", "llama-cpp-python": "llama.cpp"}
COLOURS = {"llama.cpp": "#2f6f9f", "openvino": "#d9822b", "transformers": "#8c8c8c"}
NAMES = {"openvino": "OpenVINO GenAI"}
OTHERS = ("#7a5195", "#4c9f70", "#bc5090")


@dataclass(frozen=True)
class Bar:
    label: str
    engine: str
    times: float  # ahead


def bars(run: Mapping[str, Any]) -> list[Bar]:
    """What the run has of `ROWS`; where an engine has two sides, the one that comes closest to us."""
    found = []
    for work, number, label in ROWS:
        nearest: dict[str, float] = {}
        for side, times in run["works"].get(work, {}).get("ratios", {}).get(number, {}).items():
            engine = ENGINES.get(side, side)
            nearest[engine] = min(times, nearest.get(engine, times))
        found += [Bar(label, engine, times) for engine, times in nearest.items()]
    return found


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel a model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    panels = [(run, found) for run in runs if (found := bars(run))]
    if not panels:
        raise SystemExit("there is nothing to draw: no work of the file has a ratio")
    engines = list(dict.fromkeys(bar.engine for _, found in panels for bar in found))
    spare = iter(OTHERS)
    colours = {engine: COLOURS.get(engine) or next(spare, "#555555") for engine in engines}
    labels = [label for *_, label in ROWS if any(bar.label == label for _, found in panels for bar in found)]
    width, height = 3.4 + 3.3 * len(panels), 1.5 + 0.4 * max(len(labels), 4)
    figure, axes = plt.subplots(1, len(panels), figsize=(width, height), squeeze=False, sharey=True, layout="constrained")
    for axis, (run, found) in zip(axes[0], panels, strict=True):
        thick = 0.8 / len({bar.engine for bar in found})
        for bar in found:
            # Bars of a row are centred on it, whichever engines it has.
            of_row = [other.engine for other in found if other.label == bar.label]
            y = labels.index(bar.label) + (of_row.index(bar.engine) - (len(of_row) - 1) / 2) * thick
            axis.barh(y, bar.times - 1, thick * 0.92, left=1, color=colours[bar.engine], zorder=2)
            ahead = bar.times >= 1
            axis.annotate(
                f"{bar.times:.1f}×" if bar.times < 10 else f"{bar.times:.0f}×",
                (bar.times, y),
                (3 if ahead else -3, 0),
                textcoords="offset points",
                ha="left" if ahead else "right",
                va="center",
                fontsize=8,
            )
        least, most = min(bar.times for bar in found), max(bar.times for bar in found)
        axis.set_xscale("log", base=2)
        axis.set_xlim(min(0.7, least / 1.5), max(2.0, most * 1.6))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.axvline(1, color="black", linewidth=1, zorder=3)
        axis.grid(axis="x", color="#dddddd", zorder=0)
        axis.set_yticks(range(len(labels)), labels, fontsize=9)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.set_title(MODELS.get(run["model"], run["model"]), fontsize=11, fontweight="bold", loc="left")
    axes[0][0].invert_yaxis()  # the first row on top; the panels share it
    marks = [plt.Rectangle((0, 0), 1, 1, color=colours[engine]) for engine in engines]
    figure.legend(
        marks,
        [f"vs {NAMES.get(engine, engine)}" for engine in engines],
        loc="outside upper left",
        ncols=len(engines),
        frameon=False,
    )
    last = panels[-1][0]
    said = f"times ahead, medians of interleaved rounds; {last['cpu']}, {last['threads']} threads"
    figure.supxlabel(f"{said}; {last['when'][:10]}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    order = list(MODELS)
    told = json.loads(given.results.read_text())["runs"]
    draw(sorted(told, key=lambda run: order.index(run["model"]) if run["model"] in order else len(order)), given.picture)
