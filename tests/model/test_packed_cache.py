"""The cache of packed weights: the same bytes at the next start, and whatever is wrong with a file only costs time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from astrai_runtime.kernels.base import Format
from astrai_runtime.kernels.cpu import Library, Pool
from astrai_runtime.model import _packed_cache
from astrai_runtime.model._load import read_spec
from astrai_runtime.model._matrices import stored_types
from astrai_runtime.model._pack import Layout, PackedModel
from astrai_runtime.model._packed_cache import KEPT, PAGE, PackedCache
from astrai_runtime.weights._open import open_checkpoint
from tests.model.checkpoints import write_hf

Start = Callable[..., PackedModel]


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A model folder of the test's own, so that it may be changed."""
    return write_hf("llama", tmp_path / "model")


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every time that weights were really packed."""
    made: list[str] = []
    pack = _packed_cache.pack_model

    def counted(*arguments: Any) -> PackedModel:
        made.append(arguments[-2])
        return pack(*arguments)

    monkeypatch.setattr(_packed_cache, "pack_model", counted)
    return made


@pytest.fixture
def start(library: Library, pool: Pool, tiny_folder: Path, tmp_path: Path) -> Start:
    """What a start of the service does: opens the files anew and gets packed weights."""

    def run(weights: Format = "int8", *, folder: Path | None = None, digests: Any = None, model: Path = tiny_folder) -> Any:
        checkpoint = open_checkpoint(model)
        spec, table = read_spec(checkpoint, {})
        cache = PackedCache(folder or tmp_path / "packed")
        packed = cache.load_or_pack(library, pool, checkpoint, spec, table, weights, "portable", lambda *told: None, digests)
        checkpoint.close()
        return packed

    return run


def file_of(folder: Path) -> Path:
    (found,) = folder.glob("*.packed")
    return found


def test_second_start_reads_what_the_first_packed(start: Start, packings: list[str], tmp_path: Path) -> None:
    first, second = start(), start()
    assert packings == ["int8"]
    np.testing.assert_array_equal(first.memory, second.memory)
    assert first.matrices.keys() == second.matrices.keys()
    assert file_of(tmp_path / "packed").stat().st_size == PAGE + len(first.memory)


def test_formats_are_kept_apart(start: Start, packings: list[str]) -> None:
    formats: tuple[Format, ...] = ("float32", "int8", "int4")
    for weights in formats * 2:
        start(weights)
    assert packings == list(formats)


def test_a_changed_file_is_packed_again(start: Start, packings: list[str], tiny_folder: Path) -> None:
    before = start().memory.copy()
    file = tiny_folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x80  # the sign of the last weight
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert (start().memory != before).any()
    assert packings == ["int8", "int8"]


def test_a_declared_digest_spares_reading_the_file(
    start: Start, packings: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    digests = {tiny_folder / "model.safetensors": "ab" * 32}
    start(digests=digests)
    assert not (tmp_path / "packed" / "digests.json").exists()
    start(digests=digests)
    assert packings == ["int8"]
    start()
    assert len(packings) == 2  # whoever does not know it computes another


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]),
        lambda file: file.write_bytes(file.read_bytes()[:20] + b"\xff" + file.read_bytes()[21:]),
        lambda file: file.write_bytes(file.read_bytes()[:-77] + b"\x55" + file.read_bytes()[-76:]),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["empty", "cut", "longer", "no magic", "header", "a byte of a weight", "a folder"],
)
def test_a_damaged_file_is_packed_again(
    damage: Callable[[Path], Any], start: Start, packings: list[str], tmp_path: Path
) -> None:
    good = start().memory.copy()
    damage(file_of(tmp_path / "packed"))
    np.testing.assert_array_equal(start().memory, good)
    assert packings == ["int8", "int8"]


def test_another_version_is_packed_again(start: Start, packings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setattr(_packed_cache, "VERSION", 999)
    start()
    assert packings == ["int8", "int8"]


def test_a_file_under_the_wrong_key_is_not_believed(
    start: Start, library: Library, tiny_folder: Path, tmp_path: Path
) -> None:
    start("int8")
    checkpoint = open_checkpoint(tiny_folder)
    spec, table = read_spec(checkpoint, {})
    stored = stored_types(table, checkpoint.tensors)
    cache, key = PackedCache(tmp_path / "packed"), file_of(tmp_path / "packed").stem
    assert cache.load(key, Layout.of(spec, "int8", stored), library, lambda *told: None) is not None
    assert cache.load(key, Layout.of(spec, "int4", stored), library, lambda *told: None) is None
    assert cache.load("unknown", Layout.of(spec, "int8", stored), library, lambda *told: None) is None
    checkpoint.close()


def test_a_disk_that_takes_nothing_costs_only_the_cache(start: Start, packings: list[str], tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    start(folder=blocked)
    start(folder=blocked)
    assert packings == ["int8", "int8"]


def test_a_full_disk_leaves_nothing_half_written(
    start: Start, packings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert start().matrices
    assert not list((tmp_path / "packed").glob("*.packed"))
    assert not [path for path in (tmp_path / "packed").glob("*.part") if "digests" not in path.name]


def test_a_disk_that_is_nearly_full_is_left_alone(
    start: Start, packings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = len(start().memory)
    file_of(tmp_path / "packed").unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * needed - 1))
    start()
    assert not list((tmp_path / "packed").glob("*.packed"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * needed))
    start()
    assert file_of(tmp_path / "packed").stat().st_size > needed
    assert packings == ["int8"] * 3


def test_only_the_last_used_files_are_kept(start: Start, tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / "packed"
    start()
    used = file_of(folder)
    for n in range(KEPT + 2):
        other = folder / f"{n}.packed"
        other.write_bytes(b"")
        os.utime(other, (n, n))
    (folder / "abandoned.1.part").write_bytes(b"")
    os.utime(folder / "abandoned.1.part", (1, 1))
    start("int4")
    left = {path.name for path in folder.iterdir()}
    assert used.name in left
    assert len([name for name in left if name.endswith(".packed")]) == KEPT
    assert {f"{KEPT}.packed", f"{KEPT + 1}.packed"} <= left
    assert "abandoned.1.part" not in left


def test_weights_made_in_memory_are_not_kept(library: Library, pool: Pool, tmp_path: Path) -> None:
    from astrai_runtime.model._load import spec_of_config
    from astrai_runtime.weights.random import RandomCheckpoint

    conf = Path(__file__).resolve().parent.parent.parent / "conf" / "model" / "tiny.yaml"
    config = yaml.safe_load(conf.read_text())["source"]["config"]
    spec = spec_of_config(config, {})
    checkpoint = RandomCheckpoint(spec.tensor_shapes(), 1, config)
    _, table = read_spec(checkpoint, {})
    cache = PackedCache(tmp_path / "packed")
    cache.load_or_pack(library, pool, checkpoint, spec, table, "int8", "portable", lambda *told: None)
    assert not (tmp_path / "packed").exists()
