"""What belongs to a Hugging Face model folder, and that nothing is opened outside of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from astrai_runtime.errors import WeightsError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 64 * 2**20  # bytes; tokenizer_config.json of large vocabularies has a few MB
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        WeightsError: it is unreadable, too large, or no JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise WeightsError(f"{path}: {path.stat().st_size} bytes are too many for this JSON file")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path}: holds a JSON {type(content).__name__}, where an object was expected")
    return content


def read_metadata(folder: Path) -> dict[str, Any]:
    """config.json, with generation_config.json and tokenizer_config.json under their names where they exist.

    Raises:
        WeightsError: no config.json, or the weights are quantised in a way that needs more than the safetensors files.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder")
    _refuse_pickles(folder)
    if not (folder / "config.json").exists():
        raise WeightsError(f"{folder}: has no config.json; a model folder holds config.json, tokenizer.json and {SINGLE}")
    metadata = read_json(inside(folder, "config.json"))
    if (quantised := metadata.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise WeightsError(
            f"{folder / 'config.json'}: the weights are quantised ({method}), which is not supported; "
            "use the unquantised model or a GGUF file"
        )
    for name in ("generation_config", "tokenizer_config"):
        if (folder / f"{name}.json").exists():
            metadata[name] = read_json(inside(folder, f"{name}.json"))
    return metadata


def inside(folder: Path, name: str) -> Path:
    """The file `name` of the folder, refused when it lies elsewhere.

    The hub's cache consists of links (models--org--name/snapshots/<revision>/<file> -> ../../blobs/<etag>, and that one
    often on to <cache>/blobs/<xx>/<hash>, which repositories share), so these are followed.

    Raises:
        WeightsError: the name is no plain relative path, or leads out of the folder.
    """
    path = folder / name
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise WeightsError(f"{folder}: the file name {name!r:.100} leads out of the folder; it was not opened")
    home = folder.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise WeightsError(f"{path}: cannot be followed: {error}") from error
    if target.is_relative_to(home):
        return path
    if home.parent.name == "snapshots" and home.parents[1].name.startswith("models--"):
        repository, cache = home.parents[1], home.parents[2]
        if target.parent == repository / "blobs" or target.parent.parent == cache / "blobs":
            return path
    raise WeightsError(f"{path}: is a link that leads out of the folder; it was not opened")


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Every safetensors file of the model, with the tensors that the index promises in it (None without an index).

    Raises:
        WeightsError: no weights, pickles only, a bad index, or a shard that is missing.
    """
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        path = inside(folder, SINGLE)
        if not path.is_file():
            raise WeightsError(f"{path}: is missing; the link leads nowhere")
        return {path: None}
    if (folder / INDEX).exists():
        return _indexed(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {inside(folder, found[0].name): None}
    if found:
        raise WeightsError(f"{folder}: has {len(found)} safetensors files, but no {INDEX} that says which belong together")
    raise WeightsError(f"{folder}: has no {SINGLE} and no {INDEX}; are the weights downloaded?")


def _indexed(folder: Path) -> dict[Path, set[str] | None]:
    index = folder / INDEX
    weight_map = read_json(inside(folder, INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: has no 'weight_map' from tensor names to files")
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise WeightsError(f"{index}: puts tensor '{tensor}' into {name!r:.100}, which is no .safetensors file")
        shards.setdefault(name, set()).add(tensor)
    files: dict[Path, set[str] | None] = {inside(folder, name): promised for name, promised in shards.items()}
    if missing := sorted(path.name for path in files if not path.is_file()):
        raise WeightsError(f"{folder}: lacks {', '.join(missing)}, named in {INDEX}; the download is incomplete")
    return files


def _refuse_pickles(folder: Path) -> None:
    files = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in files if name.endswith(_PICKLES)]
    if pickles and not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        raise WeightsError(
            f"{folder}: holds its weights only as pickle ({pickles[0]}), which could run code when it is read; convert it: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder, safe_serialization=True)"
        )
