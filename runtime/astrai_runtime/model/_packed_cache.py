"""Packed weights on the disk: one file for each model, format and instruction set, read back at the next start.

A file is a header, then the block of memory that `_pack.Layout` describes. It is only a cache: what is missing, damaged,
of another version or cannot be written costs the time of packing and nothing else. Files are read, not mapped: a map
dies with a file that is cut short under it, its first steps wait for the disk, and it was not faster (the demo model's
285 MB are read from the page cache in 0.05 s; its head multiplies as fast from a map as from huge pages, 5.2 ms).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import numpy as np

from astrai_runtime import log
from astrai_runtime.kernels.base import Format, Isa, padded
from astrai_runtime.kernels.cpu import Library, Pool
from astrai_runtime.model._matrices import stored_types
from astrai_runtime.model._pack import Bytes, Layout, PackedModel, Progress, pack_model
from astrai_runtime.model.base import DecoderSpec, TensorSource
from astrai_runtime.weights.base import Checkpoint

VERSION = 1  # changes with what the kernels make of the same weights (csrc/cpu/kernels/pack.h) and with the layout
MAGIC = b"astrai packed\n"
PAGE = 4096  # the block begins at a multiple of it
KEPT = 4  # files; the longest unused go first
STALE_S = 3600.0  # a file half written for longer was abandoned
READ_BYTES = 1 << 26  # at once, so that progress can be told

_log = log.get("model")


class PackedCache:
    """One folder of packed models.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_or_pack(
        self,
        library: Library,
        pool: Pool,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        table: Mapping[str, TensorSource],
        weights: Format,
        isa: Isa,
        progress: Progress,
        digests: Mapping[Path, str] | None = None,
    ) -> PackedModel:
        """`pack_model`, or what it made at an earlier start. `digests`: sha256 of files where somebody knows them.

        Raises as `pack_model`.
        """
        key = self._key(checkpoint, spec, table, weights, isa, digests or {})
        if key is None:
            return pack_model(library, pool, checkpoint, spec, table, weights, progress)
        layout = Layout.of(spec, weights, stored_types(table, checkpoint.tensors))
        packed = self.load(key, layout, library, progress)
        if packed is None:
            packed = pack_model(library, pool, checkpoint, spec, table, weights, progress)
            self.store(key, layout, packed)
        return packed

    def load(self, key: str, layout: Layout, library: Library, progress: Progress) -> PackedModel | None:
        """The model stored under that key, or None: never stored, damaged, or laid out differently."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                expected, found = _header(layout), file.read(PAGE)
                total = _sums_from(found, expected)
                if total is None or os.fstat(file.fileno()).st_size != len(expected) + layout.n_bytes:
                    raise _DamagedError
                file.seek(len(expected))
                memory = library.allocate(layout.n_bytes)
                _read(file, memory, progress)
        except FileNotFoundError:
            return None
        except (OSError, _DamagedError) as error:
            _log.warning("packed_weights_unusable", file=str(path), error=str(error) or "damaged, or of another version")
            return None
        if _sum(memory) != total:
            _log.warning("packed_weights_unusable", file=str(path), error="damaged")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now, so it is not among the first to go
        return layout.over(memory)

    def store(self, key: str, layout: Layout, packed: PackedModel) -> None:
        """Keeps a model for later starts, and lets old ones go. A full or read-only disk is logged, no more.

        Half of what the disk has free is left to others.
        """
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
            if free < 2 * layout.n_bytes:
                raise OSError(f"only {free / 2**20:.0f} MiB are free, for {layout.n_bytes / 2**20:.0f} MiB of weights")
            with part.open("wb") as file:
                file.write(_header(layout, _sum(packed.memory)))
                file.write(packed.memory.data)
            part.replace(path)  # not synced: what a crash cuts off is noticed by its size or its sum
            self._prune()
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            _log.warning("packed_weights_not_kept", folder=str(self._folder), error=error.strerror or str(error))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.packed"

    def _prune(self) -> None:
        def age(path: Path) -> float:
            return path.stat().st_mtime

        for abandoned in self._folder.glob("*.part"):
            with contextlib.suppress(OSError):
                if age(abandoned) < time.time() - STALE_S:
                    abandoned.unlink()
        for old in sorted(self._folder.glob("*.packed"), key=age, reverse=True)[KEPT:]:
            old.unlink(missing_ok=True)

    def _key(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        table: Mapping[str, TensorSource],
        weights: Format,
        isa: Isa,
        known: Mapping[Path, str],
    ) -> str | None:
        """Names everything that the packed bytes follow from; None for weights that come from no file."""
        if checkpoint.path is None:
            return None
        files = sorted({checkpoint.tensors[source.name].file for source in table.values()})
        remembered = _Digests(self._folder / "digests.json")
        try:
            contents = [known.get(file) or remembered.of(file) for file in files]
        except OSError:  # in pieces, or gone since: whoever reads it will say so
            return None
        told = [VERSION, contents, repr(spec), sorted((name, repr(source)) for name, source in table.items()), weights, isa]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


class _DamagedError(Exception):
    """A file that is not what its name says."""


class _Digests:
    """sha256 of files, remembered by path, size and time of change."""

    def __init__(self, index: Path) -> None:
        self._index = index
        try:
            found = json.loads(index.read_bytes())
        except (OSError, ValueError):
            found = {}
        self._known: dict[str, list[object]] = found if isinstance(found, dict) else {}

    def of(self, file: Path) -> str:
        """Reads the file only where it has changed. Raises OSError."""
        stat = file.stat()
        mark = [stat.st_size, stat.st_mtime_ns]
        entry = self._known.get(str(file.absolute()))
        if isinstance(entry, list) and entry[:2] == mark and isinstance(entry[-1], str):
            return entry[-1]
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        self._known[str(file.absolute())] = [*mark, digest]
        self._save()
        return digest

    def _save(self) -> None:
        kept = {path: entry for path, entry in self._known.items() if Path(path).exists()}
        part = self._index.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):  # then it is computed again
            self._index.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(kept), encoding="utf-8")
            part.replace(self._index)


def _header(layout: Layout, total: int = 0) -> bytes:
    """What precedes the block: a line of magic, the sum of the block, and a digest of the layout; whole pages."""
    described = hashlib.sha256(json.dumps([VERSION, list(layout.sections())]).encode()).digest()
    head = MAGIC + total.to_bytes(8, "little") + described
    head += hashlib.sha256(head).digest()
    return head.ljust(padded(len(head), PAGE), b"\0")


def _sums_from(found: bytes, expected: bytes) -> int | None:
    """The block's sum from a header that is like the expected one but for that sum; None for any other."""
    at = len(MAGIC)
    total, rest = int.from_bytes(found[at : at + 8], "little"), at + 8 + 32
    if found[:at] != expected[:at] or found[at + 8 : rest] != expected[at + 8 : rest]:
        return None
    return total if found[rest : rest + 32] == hashlib.sha256(found[:rest]).digest() else None


def _sum(memory: Bytes) -> int:
    """Of 8 bytes at a time, overflowing: as fast as memory is, and enough to notice what a disk does to a file."""
    return int(np.add.reduce(memory.view(np.uint64)))


def _read(file: FileIO, memory: Bytes, progress: Progress) -> None:
    for at in range(0, len(memory), READ_BYTES):
        block = memory[at : at + READ_BYTES].data
        while block:
            n = file.readinto(block)
            if not n:
                raise _DamagedError
            block = block[n:]
        progress("packed weights", min(at + READ_BYTES, len(memory)), len(memory))
