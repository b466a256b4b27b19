"""The hub source against a stand-in of the hub's HTTP interface."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from astrai_runtime.errors import SourceError
from astrai_runtime.sources.hub import PART
from astrai_runtime.weights._open import open_checkpoint
from tests.sources.standin import REPO, REVISION


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _source(hub: Any, **changes: Any) -> Any:
    files = {name: _sha(content) for name, content in hub.files.items()}
    settings = {"kind": "hub", "repo": REPO, "revision": REVISION, "files": files, "endpoint": hub.address}
    return PART(PART.Config(**(settings | changes)))


def test_files_are_downloaded_once_with_progress(hub: Any, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "sub/weights.bin": os.urandom(100_000)}
    seen: list[tuple[str, int, int]] = []
    source = _source(hub)
    located = source.locate(cache=tmp_path, offline=False, fetch=True, progress=lambda *step: seen.append(step))
    assert located.path is not None
    assert located.path.is_relative_to(tmp_path / "hub")
    assert {name: (located.path / name).read_bytes() for name in hub.files} == hub.files
    assert located.origin.endswith(f"/{REPO}@0123456")
    assert ("downloading sub/weights.bin", 100_000, 100_000) in seen
    assert ("checking sub/weights.bin", 100_000, 100_000) in seen
    hub.requests.clear()
    seen.clear()
    assert source.locate(cache=tmp_path, offline=False, fetch=True) == located
    assert source.locate(cache=tmp_path, offline=True, fetch=True, progress=lambda *step: seen.append(step)) == located
    assert not hub.requests
    assert not seen  # nothing is hashed again


def test_single_gguf_file_is_the_path(hub: Any, tmp_path: Path) -> None:
    hub.files = {"model.gguf": b"GGUF"}
    located = _source(hub, files={"model.gguf": None}).locate(cache=tmp_path, offline=False, fetch=True)
    assert located.path is not None
    assert located.path.name == "model.gguf"
    assert located.path.read_bytes() == b"GGUF"


def test_downloaded_folder_opens_as_a_checkpoint(hub: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save

    hub.files = {"config.json": b"{}", "model.safetensors": save({"w": torch.ones(3)})}
    located = _source(hub).locate(cache=tmp_path, offline=False, fetch=True)
    assert located.path is not None
    checkpoint = open_checkpoint(located.path)
    assert torch.equal(checkpoint.read("w", torch.float32), torch.ones(3))


def test_broken_connection_is_taken_up_where_it_broke(hub: Any, tmp_path: Path) -> None:
    content = os.urandom(2**20) * 24
    hub.files = {"weights.bin": content}
    hub.cut_after = 23 * 2**20  # the library writes 10 MB at a time
    located = _source(hub).locate(cache=tmp_path, offline=False, fetch=True)
    assert located.path is not None
    assert (located.path / "weights.bin").read_bytes() == content
    first, second = hub.gets()
    assert first[1] is None
    assert second[1] is not None
    assert second[1] == f"bytes={20 * 2**20}-"


def test_wrong_sha256_is_an_error_and_the_file_is_deleted(hub: Any, tmp_path: Path) -> None:
    hub.files = {"weights.bin": b"not what was declared"}
    source = _source(hub, files={"weights.bin": _sha(b"declared")})
    with pytest.raises(SourceError) as caught:
        source.locate(cache=tmp_path, offline=False, fetch=True)
    assert "weights.bin has sha256" in caught.value.message
    assert _sha(b"declared") in caught.value.message
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == hub.files["weights.bin"]]
    with pytest.raises(SourceError, match="has sha256"):  # it was not left in the cache
        source.locate(cache=tmp_path, offline=False, fetch=True)


def test_file_that_changed_on_disk_is_downloaded_again(hub: Any, tmp_path: Path) -> None:
    hub.files = {"weights.bin": b"w" * 1000}
    source = _source(hub)
    located = source.locate(cache=tmp_path, offline=False, fetch=True)
    assert located.path is not None
    (located.path / "weights.bin").resolve().write_bytes(b"rotten")
    with pytest.raises(SourceError, match=r"weights\.bin is not on this machine"):
        source.locate(cache=tmp_path, offline=True, fetch=True)
    source.locate(cache=tmp_path, offline=False, fetch=True)
    assert (located.path / "weights.bin").read_bytes() == b"w" * 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revision": "f" * 40}, "no revision ffffffff"),
        ({"files": {"nothing.json": None}}, "has no file nothing.json"),
        ({"repo": "someone/else"}, "no such repository"),
    ],
)
def test_what_the_hub_does_not_have_is_named(changes: dict[str, Any], message: str, hub: Any, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}"}
    with pytest.raises(SourceError) as caught:
        _source(hub, **changes).locate(cache=tmp_path, offline=False, fetch=True)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("refusal", [(401, "GatedRepo"), (403, "GatedRepo"), (403, None), (401, None)])
def test_gated_repository_says_where_to_accept_its_terms(refusal: tuple[int, str | None], hub: Any, tmp_path: Path) -> None:
    hub.files, hub.refusal = {"config.json": b"{}"}, refusal
    with pytest.raises(SourceError) as caught:
        _source(hub).locate(cache=tmp_path, offline=False, fetch=True)
    assert f"{hub.address}/{REPO}" in caught.value.message
    assert "HF_TOKEN" in caught.value.message


def test_offline_names_the_file_the_place_and_the_command(hub: Any, tmp_path: Path, monkeypatch: Any) -> None:
    hub.files = {"config.json": b"{}", "weights.bin": b"w"}
    source = _source(hub)
    for offline, fetch in ((True, True), (True, False), (False, False)):
        with pytest.raises(SourceError) as caught:
            source.locate(cache=tmp_path, offline=offline, fetch=fetch)
        for part in ("config.json and 1 more are", str(tmp_path / "hub"), "astrai-deploy fetch"):
            assert part in caught.value.message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match="offline"):
        source.locate(cache=tmp_path, offline=False, fetch=True)
    assert not hub.requests
    assert not list(tmp_path.iterdir())


def test_without_fetch_nothing_is_written_and_what_is_there_is_found(hub: Any, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}"}
    source = _source(hub)
    located = source.locate(cache=tmp_path, offline=False, fetch=True)
    before = sorted(tmp_path.rglob("*"))
    assert source.locate(cache=tmp_path, offline=False, fetch=False) == located
    assert sorted(tmp_path.rglob("*")) == before


def test_unreachable_hub_is_one_clear_line(hub: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import huggingface_hub.file_download as transport

    hub.files = {"config.json": b"{}"}
    monkeypatch.setattr(transport, "_ETAG_RETRY_TIMEOUT", 0.1)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    source = _source(hub, endpoint="http://127.0.0.1:9")
    with pytest.raises(SourceError) as caught:
        source.locate(cache=tmp_path, offline=False, fetch=True)
    assert "config.json could not be downloaded from http://127.0.0.1:9" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"revision": "main"},
        {"revision": "0123"},
        {"repo": "gpt2"},
        {"files": {}},
        {"files": {"../out": None}},
        {"files": {"/etc/passwd": None}},
        {"files": {"config.json": "abc"}},
        {"endpoint": "ftp://mirror"},
        {"branch": "main"},
    ],
)
def test_loose_declarations_are_refused_by_the_schema(changes: dict[str, Any]) -> None:
    good = {"kind": "hub", "repo": REPO, "revision": REVISION, "files": {"config.json": None}, "endpoint": None}
    assert PART.Config(**good).endpoint is None
    with pytest.raises(ValidationError):
        PART.Config(**(good | changes))


def test_importing_the_source_imports_no_hub_library() -> None:
    code = "import sys, astrai_runtime.sources.hub; assert not {'torch', 'huggingface_hub', 'httpx'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
