"""Slices of a tensor: together they are the tensor, as stored or as float32, in whole units, checked like a read."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights import _slices
from astrai_runtime.weights.base import Checkpoint, Slice
from astrai_runtime.weights.gguf import GgufCheckpoint
from astrai_runtime.weights.random import RandomCheckpoint
from astrai_runtime.weights.safetensors import SafetensorsCheckpoint

BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slices, "CONVERTED", 2048)  # elements: 8 rows of 256
    monkeypatch.setattr(_slices, "AS_STORED", 4000)  # bytes: 3 rows of float32, 14 of Q8_0


def joined(checkpoint: Checkpoint, name: str, types: Collection[str], unit: int = 1) -> tuple[str, np.ndarray[Any, Any]]:
    """Type and all bytes of a tensor's slices, which must follow each other in whole units."""
    slices = [Slice(each.start, each.dtype, each.rows.copy()) for each in checkpoint.slices(name, types, unit)]
    at = 0
    for each in slices:
        assert each.start == at
        at += len(each.rows)
    assert all(len(each.rows) % unit == 0 for each in slices[:-1])
    assert len({each.dtype for each in slices}) == 1
    return slices[0].dtype, np.concatenate([each.rows for each in slices])


def as_floats(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(rows.copy().view(np.float32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *BLOCKS])
def test_converted_slices_are_what_read_returns(kind: str, write_gguf: Any, arrays: Any) -> None:
    file = GgufCheckpoint(write_gguf(arrays, kind))
    for name in arrays:
        dtype, rows = joined(file, name, ())
        assert dtype == "F32"
        assert torch.equal(as_floats(rows).view(file.tensors[name].shape), file.read(name, torch.float32))
    assert len(list(file.slices("embed", ()))) == 5  # 40 rows, 8 at a time
    file.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_stored_slices_are_the_bytes_of_the_file(kind: str, write_gguf: Any, arrays: Any) -> None:
    import gguf

    file = GgufCheckpoint(write_gguf(arrays, kind))
    dtype, rows = joined(file, "embed", (kind,))
    assert dtype == kind
    np.testing.assert_array_equal(rows, gguf.quants.quantize(arrays["embed"], gguf.GGMLQuantizationType[kind]))
    file.close()


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_folders_slice_in_every_float_type(stored: torch.dtype, write_folder: Any, arrays: Any) -> None:
    folder = SafetensorsCheckpoint(write_folder({name: torch.from_numpy(a).to(stored) for name, a in arrays.items()}))
    for name, info in folder.tensors.items():
        assert torch.equal(as_floats(joined(folder, name, ())[1]).view(info.shape), folder.read(name, torch.float32))
        dtype, rows = joined(folder, name, (info.dtype,))
        assert dtype == info.dtype
        expected = torch.from_numpy(arrays[name]).to(stored)
        assert torch.equal(torch.from_numpy(rows).view(stored).view(info.shape), expected)
    folder.close()


def test_slices_come_in_whole_units_however_large(write_folder: Any, arrays: Any) -> None:
    folder = SafetensorsCheckpoint(write_folder(arrays))
    assert [len(each.rows) for each in folder.slices("embed", ("F32",), 2)] == [2] * 20
    assert [len(each.rows) for each in folder.slices("embed", ("F32",), 16)] == [16, 16, 8]  # more than fits, but whole
    folder.close()


def test_pieces_slice_like_the_whole_file(write_gguf: Any, arrays: Any, tmp_path: Any) -> None:
    path = write_gguf(arrays, "Q8_0")
    data = path.read_bytes()
    cuts = [0, len(data) - 9001, len(data) - 4000, len(data)]  # the header lies in the first
    parts = []
    for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
        parts.append(tmp_path / f"part{i}")
        parts[-1].write_bytes(data[start:stop])
    whole, split = GgufCheckpoint(path), GgufCheckpoint(parts[0], parts=parts)
    for name in arrays:
        np.testing.assert_array_equal(joined(split, name, ("Q8_0",))[1], joined(whole, name, ("Q8_0",))[1])
    whole.close()
    split.close()


@pytest.mark.parametrize("types", [(), ("Q8_0",)])
def test_damaged_scale_is_an_error_that_names_the_tensor(types: tuple[str, ...], write_gguf: Any) -> None:
    blocks = np.zeros((4, 2 * 34), np.uint8)
    blocks[2, 34:36] = (0x00, 0x7C)  # infinity
    file = GgufCheckpoint(write_gguf({"embed": blocks}, "Q8_0"))
    with pytest.raises(WeightsError, match=r"model\.gguf: tensor 'embed' \(Q8_0\) has a scale that is not finite"):
        list(file.slices("embed", types))
    file.close()


def test_random_weights_slice_as_they_read() -> None:
    checkpoint = RandomCheckpoint({"embed.weight": (30, 64), "norm.weight": (64,)}, 3, {})
    for name, info in checkpoint.tensors.items():
        dtype, rows = joined(checkpoint, name, ("F32", "BF16"))
        assert dtype == "F32"
        assert torch.equal(as_floats(rows).view(info.shape), checkpoint.read(name, torch.float32))
    assert len(joined(checkpoint, "norm.weight", ())[1]) == 1
