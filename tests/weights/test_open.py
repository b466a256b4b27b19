"""Finding out what lies at a path, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._open import open_checkpoint


def test_folder_and_file_are_told_apart(write_folder: Any, write_gguf: Any, arrays: Any) -> None:
    assert open_checkpoint(write_folder(arrays)).naming == "hf"
    assert open_checkpoint(write_gguf(arrays)).naming == "gguf"


def test_gguf_is_known_by_its_content_and_inside_a_folder(write_gguf: Any, arrays: Any, tmp_path: Path) -> None:
    folder = tmp_path / "only"
    folder.mkdir()
    path = write_gguf(arrays)
    path.rename(folder / "blob")
    assert open_checkpoint(folder / "blob").naming == "gguf"
    (folder / "blob").rename(folder / "a.gguf")
    assert open_checkpoint(folder).path == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match="2 GGUF files"):
        open_checkpoint(folder)


def test_what_holds_no_weights_is_refused_with_advice(write_folder: Any, arrays: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file or folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(WeightsError, match="give the folder"):
        open_checkpoint(write_folder(arrays) / "model.safetensors")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(WeightsError, match="neither a model folder nor"):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(WeightsError, match="pickle"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_headers_are_read_without_torch(write_folder: Any, write_gguf: Any, arrays: Any) -> None:
    code = (
        "import sys; from pathlib import Path; from astrai_runtime.weights._open import open_checkpoint\n"
        "for path in sys.argv[1:]: assert open_checkpoint(Path(path)).tensors\n"
        "import astrai_runtime.weights.random\n"
        "assert not {'torch', 'gguf', 'safetensors', 'numpy'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, write_folder(arrays), write_gguf(arrays)], env=environment, check=True)
