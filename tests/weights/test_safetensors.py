"""Hugging Face folders: single and sharded, links, casts, and every way in which a file can be broken."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights.safetensors import SafetensorsCheckpoint


def _header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (b"\x01" * 7, "cut off"),
    "huge header": (_header({}, length=2**63), "header would take 9223372036854775808 bytes"),
    "header past the end": (_header({"a": _entry(0, 4)}, length=4096), "cut off"),
    "header not JSON": (_header(b"{nonsense"), "not JSON"),
    "header not UTF-8": (_header(b'{"\xff": 1}'), "not JSON"),
    "header a list": (_header([1]), "not a JSON object"),
    "header nested too deep": (_header(b"[" * 200_000), "not JSON"),
    "overlap": (_header({"a": _entry(0, 8), "b": _entry(4, 12)}, b"\0" * 12), "overlap"),
    "hole": (_header({"a": _entry(0, 4), "b": _entry(8, 12)}, b"\0" * 12), "hole of 4 bytes"),
    "past the end": (_header({"a": _entry(0, 400)}, b"\0" * 16), "cut off"),
    "bytes left over": (_header({"a": _entry(0, 4)}, b"\0" * 16), "12 bytes follow"),
    "duplicate": (_header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":1}', b"\0" * 4), "'a' twice"),
    "name of two lines": (_header({"a\nb": _entry(0, 4)}, b"\0" * 4), "header is damaged"),
    "wrong size": (_header({"a": _entry(0, 8, [3])}, b"\0" * 8), "needs 12 bytes"),
    "negative shape": (_header({"a": _entry(0, 8, [-2])}, b"\0" * 8), "impossible shape"),
    "huge shape": (_header({"a": _entry(0, 8, [2**62, 2**62])}, b"\0" * 8), "needs"),
    "unknown type": (_header({"a": _entry(0, 8, dtype="Q9")}, b"\0" * 8), "unknown type 'Q9'"),
    "type no text": (_header({"a": _entry(0, 8, dtype=[1])}, b"\0" * 8), "unknown type"),
    "no offsets": (_header({"a": {"dtype": "F32", "shape": [1]}}), "lacks dtype"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "pickle": (pickle.dumps({"a": 1}), "pickle"),
    "GGUF": (b"GGUF" + b"\0" * 64, "GGUF file under another name"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_l06_broken_file_is_refused_in_one_line_that_names_file_and_cause(case: str, tmp_path: Path) -> None:
    content, cause = BROKEN[case]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert str(tmp_path / "model.safetensors") in caught.value.message
    assert cause in caught.value.message
    assert "\n" not in caught.value.message


def test_l06_file_cut_in_half_is_refused(write_folder: Any, arrays: Any) -> None:
    file = write_folder(arrays) / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(WeightsError, match="cut off"):
        SafetensorsCheckpoint(file.parent)


def test_l06_no_broken_file_makes_the_loader_allocate(tmp_path: Path) -> None:
    """In a process that may take 100 MB more than it has, every broken file and every absurd length is refused in a line."""
    cases = {**{name: content for name, (content, _) in BROKEN.items()}, "length 2**40": _header({}, length=2**40)}
    for number, content in enumerate(cases.values()):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text("{}")
        (tmp_path / str(number) / "model.safetensors").write_bytes(content)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from astrai_runtime.weights.safetensors import PART\nfrom astrai_runtime.errors import WeightsError\n"
        "size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize() + 100_000_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "for folder in Path(sys.argv[1]).iterdir():\n"
        "    try: PART(folder)\n"
        "    except WeightsError as error: print('refused'); assert '\\n' not in error.message\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True)
    assert done.stdout == "refused\n" * len(cases), done.stderr


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_tensor_is_cast_on_read(source: torch.dtype, target: torch.dtype, write_folder: Any) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(source)
    checkpoint = SafetensorsCheckpoint(write_folder({"w": tensor, "b": tensor[0].clone()}))
    read = checkpoint.read("w", target)
    assert read.dtype is target
    assert torch.equal(read, tensor.to(target))
    assert torch.equal(checkpoint.read("b", target), tensor[0].to(target))
    checkpoint.close()
    checkpoint.close()
    read += 1  # it owns its memory: nothing of the file is needed, or changed


def test_tensor_of_many_slices_is_read_whole(write_folder: Any) -> None:
    from astrai_runtime.weights._fill import SLICE

    tensor = torch.arange(SLICE * 2 + 1000, dtype=torch.float32).view(-1, 8)
    checkpoint = SafetensorsCheckpoint(write_folder({"w": tensor, "flat": tensor.flatten().clone()}))
    assert torch.equal(checkpoint.read("w", torch.float32), tensor)
    assert torch.equal(checkpoint.read("flat", torch.float32), tensor.flatten())
    checkpoint.close()


def test_scalar_and_empty_tensors_are_read(write_folder: Any) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder({"one": torch.tensor(3.0), "none": torch.zeros(0, 4)}))
    assert checkpoint.read("one", torch.float32).item() == 3.0
    assert checkpoint.read("none", torch.float32).shape == (0, 4)
    checkpoint.close()


def test_l13_overflow_in_float16_is_an_error_that_names_the_tensor(write_folder: Any) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder({"big.weight": torch.tensor([1.0, 1e5], dtype=torch.bfloat16)}))
    with pytest.raises(WeightsError, match=r"'big\.weight'.*float16"):
        checkpoint.read("big.weight", torch.float16)
    assert checkpoint.read("big.weight", torch.bfloat16)[1] > 9e4
    checkpoint.close()


def test_integers_are_no_weights(write_folder: Any) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder({"ids": torch.arange(4)}))
    with pytest.raises(WeightsError, match="'ids' has type I64"):
        checkpoint.read("ids", torch.float32)


def test_metadata_carries_the_other_json_files(write_folder: Any, arrays: Any) -> None:
    folder = write_folder(arrays, vocab_size=9)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.metadata["vocab_size"] == 9
    assert checkpoint.metadata["generation_config"] == {"eos_token_id": [1, 2]}
    assert "tokenizer_config" not in checkpoint.metadata
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {k: v.shape for k, v in arrays.items()}


def test_quantised_folder_is_refused(write_folder: Any, arrays: Any) -> None:
    folder = write_folder(arrays, quantization_config={"quant_method": "gptq"})
    with pytest.raises(WeightsError, match="gptq"):
        SafetensorsCheckpoint(folder)


SHARDS = {"model-1.safetensors": ["embed"], "model-2.safetensors": ["layers.0.q", "norm"]}


def test_shards_make_one_checkpoint(write_folder: Any, arrays: Any) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder(arrays, SHARDS))
    assert set(checkpoint.tensors) == set(arrays)
    for name, array in arrays.items():
        assert torch.equal(checkpoint.read(name, torch.float32), torch.from_numpy(array))


def test_l02_missing_shard_is_named(write_folder: Any, arrays: Any) -> None:
    folder = write_folder(arrays, SHARDS)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks model-2\.safetensors"):
        SafetensorsCheckpoint(folder)


def test_tensor_that_the_index_promises_elsewhere_is_named(write_folder: Any, arrays: Any) -> None:
    folder = write_folder(arrays, SHARDS)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["norm"] = "model-1.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match="lacks tensor 'norm'"):
        SafetensorsCheckpoint(folder)


def test_tensor_in_two_shards_is_refused(write_folder: Any, arrays: Any) -> None:
    folder = write_folder(arrays, {"a.safetensors": ["embed", "norm"], "b.safetensors": ["layers.0.q", "norm"]})
    with pytest.raises(WeightsError, match="'norm' is also in"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/secret.safetensors", "a/../../secret.safetensors", "model-1", "", 7, None]
)
def test_l03_index_cannot_point_outside_the_folder(name: object, write_folder: Any, arrays: Any, tmp_path: Path) -> None:
    folder = write_folder(arrays, SHARDS)
    (tmp_path / "secret.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    index = {"weight_map": {"embed": name, "norm": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened: list[str] = []
    watching = [True]  # an audit hook cannot be taken away
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if watching and event == "open" else None)
    with pytest.raises(WeightsError, match=r"leads out|no \.safetensors file"):
        SafetensorsCheckpoint(folder)
    watching.clear()
    assert any(path.endswith("config.json") for path in opened)
    assert not [path for path in opened if path.endswith("secret.safetensors")]


def test_l03_link_out_of_the_folder_is_refused(write_folder: Any, arrays: Any, tmp_path: Path) -> None:
    folder = write_folder(arrays, SHARDS)
    (folder / "model-1.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model-1.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(WeightsError, match="leads out of the folder"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("shared", [False, True])
def test_l03_links_of_the_hub_cache_are_followed(shared: bool, write_folder: Any, arrays: Any, tmp_path: Path) -> None:
    folder = write_folder(arrays, SHARDS)
    repository = tmp_path / "models--me--mine"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(repository / "blobs" / f"{number:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
        if shared:  # between repositories of one cache
            store = tmp_path / "blobs" / f"{number:02}"
            store.mkdir(parents=True)
            (repository / "blobs" / f"{number:040}").rename(store / f"{number:064}")
            (repository / "blobs" / f"{number:040}").symlink_to(f"../../blobs/{number:02}/{number:064}")
    checkpoint = SafetensorsCheckpoint(snapshot)
    assert torch.equal(checkpoint.read("embed", torch.float32), torch.from_numpy(arrays["embed"]))


@pytest.mark.parametrize("content", ["not json", "[1]", '{"weight_map": 3}', '{"weight_map": {}}', "{}"])
def test_l03_bad_index_is_refused(content: str, write_folder: Any, arrays: Any) -> None:
    folder = write_folder(arrays, SHARDS)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"index\.json"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    "names",
    [("pytorch_model.bin",), ("adapter_model.bin",), ("model.pt",), ("pytorch_model.bin", "adapter_model.bin")],
    ids="+".join,
)
def test_l10_pickles_are_never_opened(names: tuple[str, ...], write_folder: Any, arrays: Any, tmp_path: Path) -> None:
    folder = write_folder(arrays)
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "sentinel")))
    checkpoint = SafetensorsCheckpoint(folder)  # safetensors are preferred
    assert set(checkpoint.tensors) == set(arrays)
    checkpoint.close()
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="convert it"):
        SafetensorsCheckpoint(folder)
    assert not (tmp_path / "sentinel").exists()


def test_l10_a_pickle_under_another_name_is_not_opened_as_one(write_folder: Any, arrays: Any, tmp_path: Path) -> None:
    file = write_folder(arrays) / "model.safetensors"
    for protocol in (0, 2, 5):
        file.write_bytes(pickle.dumps(Bomb(tmp_path / "sentinel"), protocol))
        with pytest.raises(WeightsError):
            SafetensorsCheckpoint(file.parent)
    torch.save({"w": torch.ones(2)}, file)  # a zip with a pickle in it
    with pytest.raises(WeightsError, match="pickle"):
        SafetensorsCheckpoint(file.parent)
    assert not (tmp_path / "sentinel").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "sentinel")))
    assert (tmp_path / "sentinel").exists()  # it would have gone off


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return Path.touch, (self.sentinel,)


def test_l13_shards_of_mixed_types_are_finite_in_every_type_that_can_hold_them(write_folder: Any) -> None:
    tensors = {"a": torch.tensor([1e5, -3.0], dtype=torch.bfloat16), "b": torch.tensor([1e-7, 6e4], dtype=torch.float32)}
    checkpoint = SafetensorsCheckpoint(write_folder(tensors, {"x.safetensors": ["a"], "y.safetensors": ["b"]}))
    for dtype in (torch.float32, torch.bfloat16):
        for name, tensor in tensors.items():
            read = checkpoint.read(name, dtype)
            assert torch.isfinite(read).all()
            assert torch.equal(read, tensor.to(dtype))
    with pytest.raises(WeightsError, match="'a'"):
        checkpoint.read("a", torch.float16)
    checkpoint.close()


def test_folder_without_config_or_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)
    with pytest.raises(WeightsError, match="no such folder"):
        SafetensorsCheckpoint(tmp_path / "none")


def test_mutated_byte_loads_or_is_refused(write_folder: Any) -> None:
    """200 seeded mutations of one byte, most of them in the header: nothing but WeightsError ever comes out."""
    file = write_folder({"w": torch.ones(4, 8), "b": torch.ones(8, dtype=torch.bfloat16)}) / "model.safetensors"
    content = file.read_bytes()
    draw = random.Random(13)
    outcomes = {"loaded": 0, "refused": 0}
    for number in range(200):
        mutated = bytearray(content)
        mutated[draw.randrange(len(content) if number % 4 == 0 else 150)] ^= draw.randrange(1, 256)
        file.write_bytes(mutated)
        try:
            checkpoint = SafetensorsCheckpoint(file.parent)
            for name in checkpoint.tensors:
                checkpoint.read(name, torch.float32)
            checkpoint.close()
            outcomes["loaded"] += 1
        except WeightsError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20
    assert outcomes["loaded"] > 20
