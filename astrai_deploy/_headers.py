"""What the plan knows of a model's files: headers only, no torch, nothing fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from astrai_runtime import part
from astrai_runtime.model._config import ModelConfig
from astrai_runtime.model._load import check_tensors, read_spec, spec_of_config
from astrai_runtime.model.base import DecoderSpec, LayerSpec, RopeSpec, TensorSource
from astrai_runtime.sources.base import Located
from astrai_runtime.weights._open import open_checkpoint
from astrai_runtime.weights.base import Checkpoint, TensorInfo

PLAIN = ("F64", "F32", "F16", "BF16")
FREE_CONTEXT = 4096  # tokens of a model without files whose card says `auto`


@dataclass(frozen=True, slots=True)
class Headers:
    """One model as its headers describe it. `tensors`: the file's own names, shapes and stored types."""

    spec: DecoderSpec
    table: Mapping[str, TensorSource]
    tensors: Mapping[str, TensorInfo]
    located: Located
    sentencepiece: bool = False  # the vocabulary is one that the native library merges by itself

    @property
    def n_parameters(self) -> int:
        """Weights that this process holds."""
        return self.spec.n_parameters() if self.tensors else 0

    @property
    def types(self) -> tuple[str, ...]:
        """The types that weights are stored in, plain ones or names of quantisations, most bytes first."""
        n_bytes: Counter[str] = Counter()
        for info in self.tensors.values():
            n_bytes[info.dtype.upper()] += info.n_bytes
        return tuple(name for name, _ in n_bytes.most_common())

    @property
    def stored(self) -> str:
        """The type that most weights are stored in."""
        return self.types[0] if self.tensors else "F32"

    @property
    def quantised(self) -> bool:
        return self.stored not in PLAIN

    @property
    def file_bytes(self) -> int:
        return sum(info.n_bytes for info in self.tensors.values())


def open_model(model: ModelConfig, located: Located) -> Checkpoint:
    """The model's files, opened: headers now, tensors when they are read.

    Raises:
        WeightsError: damaged, incomplete or unsupported files.
    """
    if located.path is not None:
        return open_checkpoint(located.path, parts=located.parts)
    declared = model.source.model_dump()
    spec = spec_of_config(declared["config"], model.overrides)
    made: Checkpoint = part.load("weights", "random")(spec.tensor_shapes(), declared["seed"], declared["config"])
    return made


def no_headers(model: ModelConfig, provider: str) -> Headers:
    """What stands for a model that the provider brings along: no tensors, and the least layer that a KV pool can serve."""
    context = FREE_CONTEXT if model.context == "auto" else model.context
    layer = LayerSpec(n_heads=1, n_kv_heads=1, head_dim=1, intermediate_size=1, rope=RopeSpec(1.0, 1), scale=1.0)
    spec = DecoderSpec(provider, 258, 1, (layer,), 1e-5, context, tied_head=True)
    return Headers(spec, {}, {}, Located(None, f"the provider '{provider}'"))


def read_headers(model: ModelConfig, *, cache: Path, offline: bool) -> Headers:
    """Finds the model's files without fetching any, and checks every tensor's name and shape.

    Raises:
        SourceError: the files are not on this disk; the message says how to get them.
        WeightsError: they are damaged, incomplete or unsupported.
    """
    source = part.load("sources", model.source.kind)(model.source)
    located: Located = source.locate(cache=cache, offline=offline, fetch=False)
    checkpoint = open_model(model, located)
    try:
        spec, table = read_spec(checkpoint, model.overrides)
        check_tensors(checkpoint, spec, table)
        sentencepiece = checkpoint.metadata.get("tokenizer.ggml.model") == "llama"
        return Headers(spec, table, dict(checkpoint.tensors), located, sentencepiece)
    finally:
        checkpoint.close()
