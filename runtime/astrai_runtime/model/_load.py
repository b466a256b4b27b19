"""From a checkpoint to a spec and canonical tensors: finds the architecture, checks every name and shape, then reads.

Tensors that no spec asks for are errors, but for these known harmless ones:
    *.rotary_emb.inv_freq     older Hugging Face files store the rotary frequencies, which the spec computes
    lm_head.weight            beside a tied head: config.json decides, and the copy is not read
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from astrai_runtime import part
from astrai_runtime.errors import WeightsError, did_you_mean
from astrai_runtime.model.base import Architecture, DecoderSpec, TensorSource
from astrai_runtime.weights.base import Checkpoint

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int, int], None]  # (tensor, bytes read, bytes in all)
SHOWN = 40  # names of each kind of mistake in one message


def read_spec(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> tuple[DecoderSpec, dict[str, TensorSource]]:
    """What the files describe, and where each canonical tensor is. Reads headers only, imports no torch.

    `overrides` replace keys of config.json (of the metadata, under its full names, for GGUF).

    Raises:
        WeightsError: the architecture is not supported, a value is missing or odd, or an override is never read.
    """
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    settings = _Overridden(checkpoint.metadata, overrides)
    if checkpoint.naming == "gguf":
        name = settings.get("general.architecture")
        architecture = _find(lambda each: name in each.gguf_names, f"'{name}'", lambda each: each.gguf_names)
        spec = architecture.from_gguf(settings, shapes)
        table = architecture.gguf_tensors(spec)
    else:
        architecture = _of_config(settings)
        spec = architecture.from_hf(settings, shapes)
        table = architecture.hf_tensors(spec) if checkpoint.naming == "hf" else _canonical(spec)
    settings.check_all_read(spec.architecture)
    return spec, table


def spec_of_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json that has no files: its `tensor_shapes()` are what random weights are made for.

    Raises as `read_spec`.
    """
    settings = _Overridden(config, overrides)
    spec = _of_config(settings).from_hf(settings, {})
    settings.check_all_read(spec.architecture)
    return spec


def check_tensors(checkpoint: Checkpoint, spec: DecoderSpec, table: Mapping[str, TensorSource]) -> None:
    """Proves from the headers that every tensor is there in its shape, and that nothing else is.

    Raises:
        WeightsError: one message with every missing, unexpected and misshapen tensor.
    """
    expected = {table[name].name: shape for name, shape in spec.tensor_shapes().items()}
    present = {name: info.shape for name, info in checkpoint.tensors.items()}
    missing = [name for name in expected if name not in present]
    unexpected = [name for name in present if name not in expected and not _harmless(name, spec, checkpoint)]
    wrong = [
        f"{name} is {list(present[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in present and present[name] != shape
    ]
    head = table["embed.weight"].name if spec.tied_head else None
    if checkpoint.naming == "hf" and head in present and present.get("lm_head.weight", present[head]) != present[head]:
        wrong.append(f"lm_head.weight is {list(present['lm_head.weight'])}, but the head is tied to {list(present[head])}")
    if not (missing or unexpected or wrong):
        return
    where = f"{checkpoint.path}: " if checkpoint.path else ""
    lines = [f"{where}the tensors do not fit the architecture {spec.architecture}"]
    for title, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"  {title}: {', '.join(sorted(names)[:SHOWN])}{more}")
    if missing and unexpected and all(f"model.{name}" in expected for name in unexpected):
        lines.append("  the names lack their prefix 'model.': save the model with its head, not its base alone")
    if missing == ["lm_head.weight"]:
        lines.append("  if the head is the embedding, the configuration must say tie_word_embeddings: true")
    raise WeightsError("\n".join(lines))


def load_weights(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    table: Mapping[str, TensorSource],
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Every canonical tensor in `dtype` (norms and rotary factors in float32), after `check_tensors`.

    `progress` is called after each tensor.

    Raises:
        WeightsError: a tensor's data is damaged.
    """
    import torch

    weights: dict[str, torch.Tensor] = {}
    total = sum(checkpoint.tensors[table[name].name].n_bytes for name in spec.tensor_shapes())
    done = 0
    for name in spec.tensor_shapes():
        source = table[name]
        precise = name.endswith("norm.weight") or name == "rope_factors.weight"
        tensor = checkpoint.read(source.name, torch.float if precise else dtype)
        weights[name] = _unpermute(tensor, source.unpermute_heads) if source.unpermute_heads else tensor
        done += checkpoint.tensors[source.name].n_bytes
        progress(source.name, done, total)
    return weights


def _unpermute(tensor: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of each head from (pair, half) order, as GGUF's llama converter leaves them, to (half, pair) order."""
    pairs = tensor.shape[0] // n_heads // 2
    return tensor.reshape(n_heads, pairs, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _harmless(name: str, spec: DecoderSpec, checkpoint: Checkpoint) -> bool:
    if checkpoint.naming != "hf":
        return False
    return name.endswith(".rotary_emb.inv_freq") or (spec.tied_head and name == "lm_head.weight")


def _canonical(spec: DecoderSpec) -> dict[str, TensorSource]:
    return {name: TensorSource(name) for name in spec.tensor_shapes()}


def _of_config(settings: Mapping[str, Any]) -> type[Architecture]:
    classes = settings.get("architectures") or ()
    if isinstance(classes, str) or not classes:
        raise WeightsError(f"config.json must list the model's class under `architectures`; it says {classes!r}")
    wanted = ", ".join(f"'{name}'" for name in classes)
    return _find(lambda each: any(name in each.hf_classes for name in classes), wanted, lambda each: each.hf_classes)


def _find(
    fits: Callable[[type[Architecture]], bool], wanted: str, names: Callable[[type[Architecture]], tuple[str, ...]]
) -> type[Architecture]:
    known: list[str] = []
    for name in part.names("model"):
        architecture: type[Architecture] = part.load("model", name)
        if fits(architecture):
            return architecture
        known.extend(names(architecture))
    raise WeightsError(f"the architecture {wanted} is not supported; there are: {', '.join(known)}")


class _Overridden(Mapping[str, Any]):
    """A model's own configuration under the user's, remembering which keys were asked for."""

    def __init__(self, own: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        self._own = own
        self._overrides = overrides
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._overrides[key] if key in self._overrides else self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **self._overrides})

    def __len__(self) -> int:
        return len({**self._own, **self._overrides})

    def check_all_read(self, architecture: str) -> None:
        """Fails if an override changed nothing: a misspelling, or a key of another architecture."""
        for key in self._overrides:
            if key not in self._read:
                near = did_you_mean(key, self._read)
                raise WeightsError(f"model.overrides: nothing in the architecture {architecture} reads '{key}'{near}")
