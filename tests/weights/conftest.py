"""Small checkpoints on the disk: the same weights as a Hugging Face folder and as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}


@pytest.fixture
def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """A few float32 arrays of shapes that a model has, rows of 256 so that every block format fits."""
    draw = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"embed": (40, 256), "layers.0.q": (24, 256), "norm": (256,)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


WriteFolder = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """write_folder(tensors, shards={file: [names]}, name=...) -> a model folder; tensors are torch tensors or arrays."""
    import torch
    from safetensors.torch import save_file

    def write(
        tensors: Mapping[str, Any], shards: Mapping[str, list[str]] | None = None, name: str = "model", **config: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
        ready = {
            key: value if isinstance(value, torch.Tensor) else torch.from_numpy(value) for key, value in tensors.items()
        }
        if shards is None:
            save_file(ready, folder / "model.safetensors")
            return folder
        for file, names in shards.items():
            save_file({key: ready[key] for key in names}, folder / file)
        weight_map = {key: file for file, names in shards.items() for key in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return write


WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """write_gguf(tensors, kind="Q8_0", tokens=300) -> a GGUF file written by the gguf package."""
    import gguf

    def write(tensors: Mapping[str, Any], kind: str = "F32", name: str = "model.gguf", tokens: int = 300) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_bool("tokenizer.ggml.add_bos_token", True)
        writer.add_token_list([f"tök{i}" for i in range(tokens)])
        writer.add_token_scores([-float(i) for i in range(tokens)])
        writer.add_array("general.tags", ["a", "b"])
        quant = gguf.GGMLQuantizationType[kind]
        for key, value in tensors.items():
            if isinstance(value, bytes):  # blocks that are ready: (rows of) raw bytes of shape [n, bytes]
                raise TypeError("give raw blocks as uint8 arrays")
            if value.dtype == np.uint8:
                writer.add_tensor(key, value, raw_dtype=quant)
            else:
                writer.add_tensor(key, gguf.quants.quantize(value, quant), raw_dtype=quant)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
