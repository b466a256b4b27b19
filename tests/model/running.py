"""Runs a checkpoint through the real loader, KV modes and attention: logits at every position, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
import yaml

from astrai_runtime import part
from astrai_runtime.attention.base import AttentionBackend
from astrai_runtime.attention.torch_native import TorchNative
from astrai_runtime.batch import Batch, Chunk
from astrai_runtime.kv.base import KVMode, KVShape
from astrai_runtime.model._load import check_tensors, load_weights, read_spec
from astrai_runtime.model._native import NativeDecoder
from astrai_runtime.model._torch import TorchDecoder
from astrai_runtime.model.base import DecoderSpec
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sequence import Sequence
from astrai_runtime.stream import Stream
from astrai_runtime.weights.base import Checkpoint

TOKENS = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()  # what the checkpoints are asked
CONF = Path(__file__).resolve().parent.parent.parent / "conf"


class Silent:
    """A Detokenizer for sequences whose text nobody reads."""

    stopped_by: str | None = None

    def push(self, token_id: int) -> bytes:
        return b""

    def finish(self) -> bytes:
        return b""


def sequence_of(tokens: Many[int]) -> Sequence:
    return Sequence(Prompt(tuple(tokens), SamplingParams(), Limits()), Stream(16), Silent(), max_tokens=1000)


def load(
    checkpoint: Checkpoint, overrides: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> TorchDecoder:
    spec, table = read_spec(checkpoint, overrides or {})
    check_tensors(checkpoint, spec, table)
    weights = load_weights(checkpoint, spec, table, dtype, lambda what, done, total: None)
    return TorchDecoder(spec, weights, dtype)


def kv_mode(
    kind: str,
    spec: DecoderSpec,
    *,
    dtype: str = "float32",
    rows: int = 4,
    context: int = 256,
    backend: AttentionBackend | None = None,
    **options: Any,
) -> KVMode:
    """A KV mode as its YAML declares it, with storage."""
    mode = part.load("kv", kind)
    config = mode.Config(**{**yaml.safe_load((CONF / "kv" / f"{kind}.yaml").read_text()), **options})
    first = spec.layers[0]
    n_tokens = mode.pool_tokens(config, rows, context, affordable=1 << 20)
    shape = KVShape(spec.n_layers, first.n_kv_heads, first.head_dim, dtype, rows, context, n_tokens)
    kv: KVMode = mode(config, shape)
    kv.attach(*(backend or TorchNative()).allocate(shape, "cpu"))
    return kv


class Runner:
    """One decoder over one KV mode."""

    def __init__(self, decoder: TorchDecoder | NativeDecoder, kv: KVMode, attention: AttentionBackend | None = None) -> None:
        self.decoder, self.kv, self.attention = decoder, kv, attention or TorchNative()

    def step(self, *chunks: tuple[Sequence, int]) -> torch.Tensor:
        """Computes the next n tokens of each (sequence, n) in one batch; logits of each one's last token."""
        parts = []
        for sequence, length in chunks:
            if sequence.row is None:
                assert self.kv.reserve(sequence)
            assert self.kv.extend(sequence, sequence.n_computed + length)
            parts.append(Chunk(sequence, sequence.n_computed, length, sampled=True))
        batch = Batch(tuple(parts))
        logits = self.decoder(batch, self.kv.place(batch), self.attention)
        for sequence, length in chunks:
            sequence.n_computed += length
        return logits

    def every_position(self, tokens: Many[int]) -> torch.Tensor:
        """[T, V]: the logits after each token, computed one by one."""
        sequence = sequence_of(tokens)
        logits = [self.step((sequence, 1))[0] for _ in tokens]
        self.kv.release(sequence)
        return torch.stack(logits)

    def greedy(self, prompt: Many[int], count: int) -> list[int]:
        """`count` tokens after the prompt, each the likeliest."""
        sequence = sequence_of(prompt)
        logits = self.step((sequence, len(prompt)))
        for _ in range(count):
            sequence.tokens.append(int(logits[0].argmax()))
            if sequence.n_generated < count:
                logits = self.step((sequence, 1))
        self.kv.release(sequence)
        return sequence.tokens[len(prompt) :]
