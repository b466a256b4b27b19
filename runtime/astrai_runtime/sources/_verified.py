"""Which files were checked against their sha256 already, so that a start does not read hundreds of megabytes again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from astrai_runtime.sources.base import Progress

CHUNK = 4 * 2**20  # bytes read at once


def sha256_of(path: Path, progress: Progress, what: str) -> str:
    """The sha256 of a file, in hex. Reports progress in bytes under the name `what`."""
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            done += len(block)
            progress(what, done, total)
    return digest.hexdigest()


def replace_with(path: Path, content: bytes) -> None:
    """Writes a small file so that a reader sees the old or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Verified:
    """Notes in `cache/verified`, one for each checked digest: path, inode, size and modification time of the checked file.

    A file that changed in any of these counts as unchecked.
    """

    def __init__(self, cache: Path) -> None:
        self._folder = cache / "verified"

    @staticmethod
    def _identity(path: Path) -> dict[str, object]:
        real = path.resolve()
        status = real.stat()
        return {"path": str(real), "inode": status.st_ino, "size": status.st_size, "mtime_ns": status.st_mtime_ns}

    def holds(self, path: Path, sha256: str) -> bool:
        """True when exactly this file, unchanged since, was found to have that sha256."""
        with contextlib.suppress(OSError, ValueError):  # no note, or a damaged one: not checked
            return bool(json.loads((self._folder / f"{sha256}.json").read_bytes()) == self._identity(path))
        return False

    def note(self, path: Path, sha256: str) -> None:
        """Remembers that this file was found to have that sha256."""
        replace_with(self._folder / f"{sha256}.json", json.dumps(self._identity(path)).encode())
