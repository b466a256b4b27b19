"""Finds out what kind of checkpoint lies at a path, and opens it. Headers only; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._pieces import stranger
from astrai_runtime.weights.base import Checkpoint
from astrai_runtime.weights.gguf import GgufCheckpoint
from astrai_runtime.weights.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: Path, parts: Sequence[Path] = ()) -> Checkpoint:
    """A folder as safetensors, a .gguf file (or its `parts`, in order, while it is not assembled) as GGUF.

    Raises:
        WeightsError: there is nothing, or something that holds no weights; the message says what would work.
    """
    if parts:
        return GgufCheckpoint(path, parts)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise WeightsError(f"{path}: no such file or folder; give a folder (config.json, *.safetensors) or a .gguf file")
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    if path.suffix.lower() == ".gguf" or head.startswith(b"GGUF"):
        return GgufCheckpoint(path)
    if (what := stranger(head)) is not None:
        raise WeightsError(f"{path}: {what}")
    if path.suffix == ".safetensors":
        raise WeightsError(f"{path}: give the folder that it lies in; its config.json and tokenizer.json are needed too")
    raise WeightsError(f"{path}: is neither a model folder nor a .gguf file")


def _open_folder(path: Path) -> Checkpoint:
    """A model folder, or one that holds nothing but a GGUF file."""
    found = sorted(path.glob("*.gguf"))
    if found and not (path / "config.json").exists():
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:5])
            raise WeightsError(f"{path}: holds {len(found)} GGUF files ({names}); give the path of one of them")
        return GgufCheckpoint(found[0])
    return SafetensorsCheckpoint(path)
