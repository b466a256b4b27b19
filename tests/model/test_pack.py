"""Packed weights against a reference in numpy, bit by bit; what files hold already is kept; faults stay visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from astrai_runtime.errors import KernelError, WeightsError
from astrai_runtime.kernels.base import FORMATS, GROUP, SOURCE_TYPES, TILE, Format, MatrixShape, padded
from astrai_runtime.kernels.cpu import Library, Matrix, Pool
from astrai_runtime.model._load import read_spec
from astrai_runtime.model._matrices import layer_format, matrices, packed_bytes, stored_types
from astrai_runtime.model._pack import Layout, PackedModel, pack_model
from astrai_runtime.model.base import DecoderSpec
from astrai_runtime.weights._open import open_checkpoint
from tests.model.checkpoints import write_gguf, write_hf

Array = npt.NDArray[Any]
BLOCKS = tuple(name for name in SOURCE_TYPES if name.startswith("Q"))
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a K block has its float16 numbers


def numbers(rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) * np.float32(0.05)


def stored_as(name: str, rows: int, cols: int) -> tuple[Array, npt.NDArray[np.float32]]:
    """Rows of one source type as bytes, and the numbers that they stand for."""
    if name in SCALES:  # the gguf package only reads these: any bytes with sane scales are blocks
        draw = np.random.default_rng(3)
        n_bytes = SOURCE_TYPES[name].block_bytes
        raw = draw.integers(0, 256, (rows, cols // 256, n_bytes), dtype=np.uint8)
        for at in SCALES[name]:
            raw[:, :, at : at + 2] = (draw.random((rows, cols // 256, 1)) * 0.01).astype(np.float16).view(np.uint8)
        raw = raw.reshape(rows, -1)
    else:
        raw = gguf.quants.quantize(numbers(rows, cols), gguf.GGMLQuantizationType[name]).view(np.uint8)
    return raw, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def packed(
    library: Library, pool: Pool, values: Array, format_: Format, *, offsets: bool = False, stored: str = "F32"
) -> Matrix:
    """One matrix of its own from float32 numbers, or from rows of bytes that are stored in another type."""
    rows = np.ascontiguousarray(values).view(np.uint8)
    source = SOURCE_TYPES[stored]
    cols = rows.shape[1] // source.block_bytes * source.block_values
    matrix = library.matrix(MatrixShape(format_, len(rows), cols, offsets))
    library.pack(pool, matrix, stored, rows)
    return matrix


def unpacked(library: Library, matrix: Matrix) -> npt.NDArray[np.float32]:
    return library.unpack(matrix, range(matrix.shape.rows))


def grid(values: Array) -> Array:
    """[tiles, groups, 32 columns, 16 rows], zero in the padding."""
    rows, cols = values.shape
    whole = np.zeros((padded(rows, TILE), padded(cols, GROUP)), values.dtype)
    whole[:rows, :cols] = values
    return whole.reshape(-1, TILE, whole.shape[1] // GROUP, GROUP).transpose(0, 2, 3, 1)


def there(rows: int, cols: int) -> Array:
    """One where a row is, zero in rows that only pad the last tile: nobody writes those."""
    whole = np.ones((rows, padded(cols, GROUP)), np.uint8)
    return grid(whole)


def fours(codes: Array) -> Array:
    """Four columns of a row side by side: [.., k / 4, row, k % 4]."""
    *outer, k, r = codes.shape
    return codes.reshape(*outer, k // 4, 4, r).swapaxes(-1, -2)


@pytest.mark.parametrize(("rows", "cols"), [(32, 64), (21, 80), (1, 5)])
def test_floats_lie_as_the_interface_says(rows: int, cols: int, library: Library, pool: Pool) -> None:
    values = numbers(rows, cols)
    matrix = packed(library, pool, values, "float32")
    np.testing.assert_array_equal(matrix.data.view(np.float32), grid(values).ravel())

    bits = values.view(np.uint32)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    pairs = grid(nearest).reshape(-1, 2, TILE).swapaxes(1, 2)
    np.testing.assert_array_equal(packed(library, pool, values, "bfloat16").data.view(np.uint16), pairs.ravel())


@pytest.mark.parametrize(("rows", "cols"), [(32, 64), (21, 80), (1, 5)])
def test_int8_is_rounded_against_the_stored_scale(rows: int, cols: int, library: Library, pool: Pool) -> None:
    values = numbers(rows, cols)
    matrix = packed(library, pool, values, "int8")
    groups = grid(values)
    scales = (np.abs(groups).max(2) / np.float32(127)).astype(np.float16)
    assert matrix.scales is not None
    np.testing.assert_array_equal(matrix.scales, scales.view(np.uint16).ravel())
    with np.errstate(divide="ignore"):
        factors = np.where(scales == 0, np.float32(0), np.float32(1) / scales.astype(np.float32))
    codes = np.clip(np.rint(groups * factors[:, :, None]), -127, 127).astype(np.int32) + 128
    np.testing.assert_array_equal(matrix.data, fours(codes.astype(np.uint8) * there(rows, cols)).ravel())


@pytest.mark.parametrize("offsets", [False, True])
def test_int4_codes_are_the_nearest_to_their_weights(offsets: bool, library: Library, pool: Pool) -> None:
    values = numbers(21, 80)
    matrix = packed(library, pool, values, "int4", offsets=offsets)
    groups = grid(values)
    assert matrix.scales is not None
    scales = matrix.scales.view(np.float16).astype(np.float32).reshape(*groups.shape[:2], 1, TILE)
    middle = np.zeros_like(scales)
    if matrix.offsets is not None:
        middle = matrix.offsets.view(np.float16).astype(np.float32).reshape(scales.shape)
    assert (matrix.offsets is not None) == offsets
    with np.errstate(divide="ignore"):
        factors = np.where(scales == 0, np.float32(0), 1 / scales)
    codes = (np.clip(np.rint((groups - middle) * factors) + 8, 0, 15)).astype(np.uint8)
    written = codes * there(21, 80)
    np.testing.assert_array_equal(matrix.data, fours(written[:, :, :16] | written[:, :, 16:] << 4).ravel())
    expected = (scales * (codes.astype(np.float32) - 8) + middle).transpose(0, 3, 1, 2).reshape(padded(21, TILE), -1)
    np.testing.assert_array_equal(unpacked(library, matrix), expected[:21, :80])


@pytest.mark.parametrize("offsets", [False, True])
def test_int4_scales_are_better_than_the_obvious_ones(offsets: bool, library: Library, pool: Pool) -> None:
    values = numbers(64, 256)
    groups = values.reshape(-1, GROUP)
    if offsets:
        low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
        obvious = np.rint((groups - low) / ((high - low) / 15)) * ((high - low) / 15) + low
    else:
        most = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
        obvious = np.clip(np.rint(groups / (most / -8)), -8, 7) * (most / -8)
    found = unpacked(library, packed(library, pool, values, "int4", offsets=offsets)).reshape(-1, GROUP)
    errors = [float(((each - groups) ** 2).mean()) for each in (found, obvious)]
    assert errors[0] < 0.9 * errors[1]
    one_by_one = ((found - groups) ** 2).sum(1) > 1.02 * ((obvious - groups) ** 2).sum(1)
    assert one_by_one.mean() < 0.02  # float16 scales may lose a little now and then


@pytest.mark.parametrize("stored", SOURCE_TYPES)
def test_every_source_is_read_as_its_format_says(stored: str, library: Library, pool: Pool) -> None:
    raw, values = stored_as(stored, 18, 512)
    np.testing.assert_array_equal(unpacked(library, packed(library, pool, raw, "float32", stored=stored)), values)
    best = unpacked(library, packed(library, pool, values, "int8"))
    if stored != "Q8_0":  # whose own codes are kept
        np.testing.assert_array_equal(unpacked(library, packed(library, pool, raw, "int8", stored=stored)), best)


@pytest.mark.parametrize(
    ("stored", "format_", "offsets"), [("Q8_0", "int8", False), ("Q4_0", "int4", False), ("Q4_0", "int4", True)]
)
def test_blocks_of_the_same_kind_lose_nothing(
    stored: str, format_: Format, offsets: bool, library: Library, pool: Pool
) -> None:
    raw, values = stored_as(stored, 35, 96)
    matrix = packed(library, pool, raw, format_, offsets=offsets, stored=stored)
    np.testing.assert_array_equal(unpacked(library, matrix), values)


@pytest.mark.parametrize("stored", ["Q4_1", "Q4_K"])
def test_blocks_with_a_minimum_keep_their_codes(stored: str, library: Library, pool: Pool) -> None:
    raw, values = stored_as(stored, 35, 256)
    found = unpacked(library, packed(library, pool, raw, "int4", offsets=True, stored=stored))
    steps = np.abs(values).reshape(-1, GROUP).max(1)
    assert (np.abs(found - values).reshape(-1, GROUP).max(1) <= steps * 2**-10).all()  # scale and offset are float16


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_stays_visible(format_: Format, fault: float, library: Library, pool: Pool) -> None:
    values = numbers(20, 96)
    values[17, 40] = fault
    for offsets in (False, True) if format_ == "int4" else (False,):
        found = unpacked(library, packed(library, pool, values, format_, offsets=offsets))
        assert not np.isfinite(found[17, 40])
        whole_group = not np.isfinite(found[17, 32:64]).any()
        assert whole_group == (format_ in ("int8", "int4"))
        found[17, 32:64] = 0
        assert np.isfinite(found).all()


@pytest.mark.parametrize(
    "values", [np.zeros((3, 40)), np.full((3, 40), 0.25), np.full((3, 40), 1e-9)], ids=["0", "one", "tiny"]
)
@pytest.mark.parametrize("format_", FORMATS)
def test_flat_groups_have_a_scale(values: Array, format_: Format, library: Library, pool: Pool) -> None:
    flat = values.astype(np.float32)
    for offsets in (False, True) if format_ == "int4" else (False,):
        found = unpacked(library, packed(library, pool, flat, format_, offsets=offsets))
        np.testing.assert_allclose(found, flat, rtol=0.005, atol=1e-8)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_is_packed_alike_in_any_company(format_: Format, library: Library, pool: Pool) -> None:
    values = numbers(70, 96)
    whole = packed(library, pool, values, format_)
    for step in (1, 3, 16, 17):
        pieces = library.matrix(whole.shape)
        for first in range(0, 70, step):
            library.pack(pool, pieces, "F32", values[first : first + step].view(np.uint8), first)
        np.testing.assert_array_equal(pieces.data, whole.data)
    alone = packed(library, pool, values[33:34], format_)
    np.testing.assert_array_equal(unpacked(library, alone)[0], unpacked(library, whole)[33])


def test_rows_that_are_no_whole_blocks_are_refused(library: Library, pool: Pool) -> None:
    matrix = library.matrix(MatrixShape("int8", 4, 40))
    with pytest.raises(KernelError, match="rows of this length cannot be stored"):
        library.pack(pool, matrix, "Q8_0", np.zeros((4, 68), np.uint8))


# -- a whole model -----------------------------------------------------------------------------------------------------


def pack(library: Library, pool: Pool, path: Path, weights: Format) -> tuple[DecoderSpec, PackedModel, dict[str, Array]]:
    """A checkpoint packed, and its canonical tensors as they are read."""
    import torch

    checkpoint = open_checkpoint(path)
    spec, table = read_spec(checkpoint, {})
    told: list[tuple[int, int]] = []
    model = pack_model(library, pool, checkpoint, spec, table, weights, lambda name, done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    tensors = {name: checkpoint.read(table[name].name, torch.float32).numpy() for name in spec.tensor_shapes()}
    layout = Layout.of(spec, weights, stored_types(table, checkpoint.tensors))
    assert layout.n_bytes == len(model.memory)
    assert 0 <= len(model.memory) - packed_bytes(spec, weights) < 64 * len(list(layout.sections()))
    checkpoint.close()
    return spec, model, tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packing")
    for name in ("llama_biases", "gemma3"):
        write_hf(name, root / name)
    write_hf("llama_llama3", root / "llama", seed=1)
    write_gguf("llama_llama3", root / "llama.gguf", seed=1)
    return root


def test_projections_of_one_input_lie_one_below_the_other(folders: Path, library: Library, pool: Pool) -> None:
    spec, model, tensors = pack(library, pool, folders / "llama_biases", "float32")
    for index in range(spec.n_layers):
        at = f"layers.{index}."
        joined = np.concatenate([tensors[f"{at}{name}.weight"] for name in "qkv"])
        np.testing.assert_array_equal(unpacked(library, model.matrices[f"{at}qkv"]), joined)
        bias = np.concatenate([tensors[f"{at}{name}.bias"] for name in "qkv"])
        np.testing.assert_array_equal(model.vectors[f"{at}qkv_bias"], bias)
        gate_up = model.matrices[f"{at}gate_up"]
        F, start = spec.layers[index].intermediate_size, padded(spec.layers[index].intermediate_size, TILE)
        assert gate_up.shape.rows == 2 * start
        rows = unpacked(library, gate_up)
        for name, first in (("gate", 0), ("up", start)):
            np.testing.assert_array_equal(rows[first : first + F], tensors[f"{at}{name}.weight"])
            np.testing.assert_array_equal(model.vectors[f"{at}gate_up_bias"][first : first + F], tensors[f"{at}{name}.bias"])
        for name in ("o", "down"):
            np.testing.assert_array_equal(unpacked(library, model.matrices[at + name]), tensors[f"{at}{name}.weight"])
            np.testing.assert_array_equal(model.vectors[f"{at}{name}_bias"], tensors[f"{at}{name}.bias"])
    np.testing.assert_array_equal(unpacked(library, model.matrices["head"]), tensors["head.weight"])
    assert model.matrices["head"] is not model.matrices["embed"]


def test_norms_have_their_offset_and_a_tied_head_is_the_embedding(folders: Path, library: Library, pool: Pool) -> None:
    spec, model, tensors = pack(library, pool, folders / "gemma3", "bfloat16")
    assert spec.norm_offset == 1.0
    for name in ("final_norm", "layers.3.attn_norm", "layers.0.post_mlp_norm", "layers.6.k_norm"):
        np.testing.assert_array_equal(model.vectors[name], tensors[f"{name}.weight"] + np.float32(1))
    assert model.matrices["head"] is model.matrices["embed"]


@pytest.mark.parametrize("weights", FORMATS)
def test_interleaved_heads_of_a_gguf_file_become_those_of_the_folder(
    weights: Format, folders: Path, library: Library, pool: Pool
) -> None:
    _, folder, _ = pack(library, pool, folders / "llama", weights)
    spec, file, _ = pack(library, pool, folders / "llama.gguf", weights)
    assert spec.layers[0].rope.kind == "factors"
    assert len(file.vectors["rope_factors"]) == spec.layers[0].rope.dim // 2
    for name, matrix in folder.matrices.items():
        np.testing.assert_array_equal(matrix.data, file.matrices[name].data)
    for name, vector in folder.vectors.items():
        np.testing.assert_array_equal(vector, file.vectors[name])


@pytest.mark.parametrize(
    ("weights", "stored", "expected"),
    [
        ("int8", {"Q4_K"}, ("int8", False)),
        ("bfloat16", {"F32"}, ("bfloat16", False)),
        *(("int4", {name}, ("int4", True)) for name in ("F32", "F16", "BF16", "F64", "Q4_1", "Q4_K", "Q3_K", "Q2_K")),
        ("int4", {"Q4_0"}, ("int4", False)),
        ("int4", {"Q4_0", "Q4_1"}, ("int4", True)),
        *(("int4", {"Q4_K", name}, ("int8", False)) for name in ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")),
    ],
)
def test_int4_leaves_alone_what_its_file_keeps_in_more_bits(
    weights: Format, stored: set[str], expected: tuple[Format, bool]
) -> None:
    assert layer_format(weights, stored) == expected


def test_embedding_and_head_of_int4_are_int8(folders: Path, library: Library, pool: Pool) -> None:
    spec, model, _ = pack(library, pool, folders / "llama", "int4")
    formats = {name: matrix.shape for name, matrix in model.matrices.items()}
    assert formats == matrices(spec, "int4")
    assert [formats[name].format for name in ("embed", "head", "layers.0.qkv")] == ["int8", "int8", "int4"]


def test_damaged_blocks_are_an_error_that_names_the_tensor(
    folders: Path, library: Library, pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "broken.gguf"
    reader = gguf.GGUFReader(folders / "llama.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = field.types
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        if tensor.name == "blk.1.attn_k.weight":
            blocks = gguf.quants.quantize(np.asarray(tensor.data), gguf.GGMLQuantizationType.Q8_0)
            blocks[3, :2] = (0x00, 0xFC)  # minus infinity
            writer.add_tensor(tensor.name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, np.asarray(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"broken\.gguf: tensor 'blk\.1\.attn_k\.weight' \(Q8_0\) has a scale"):
        pack(library, pool, path, "int8")
