"""A file as read-only memory, also when it lies on the disk in several pieces."""

from __future__ import annotations

import bisect
import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path

from astrai_runtime.errors import WeightsError

# What people meet instead of weights, by its first bytes.
_STRANGERS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "this is a Git LFS pointer, not the weights; run `git lfs pull` in its repository"),
    (b"PK\x03\x04", "this is a PyTorch pickle archive, which could run code when it is read; convert it to safetensors"),
    (b"\x80\x02", "this is a Python pickle, which could run code when it is read; convert it to safetensors"),
    (b"\x80\x03", "this is a Python pickle, which could run code when it is read; convert it to safetensors"),
    (b"\x80\x04", "this is a Python pickle, which could run code when it is read; convert it to safetensors"),
    (b"\x80\x05", "this is a Python pickle, which could run code when it is read; convert it to safetensors"),
)


def stranger(head: bytes) -> str | None:
    """What a file that is no weights file seems to be, as half a sentence; None when that is not known."""
    for magic, what in _STRANGERS:
        if head.startswith(magic):
            return what
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        return "this is a web page, not weights; the download went wrong"
    return None


class Pieces:
    """One file, mapped. Bytes are addressed as if the pieces lay behind each other. Copies nothing until it is read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Maps every piece.

        Raises:
            WeightsError: a piece cannot be opened, or is empty.
        """
        self.paths = tuple(paths)
        self.maps: list[mmap.mmap] = []
        self.starts: list[int] = []
        self.size = 0
        try:
            for path in self.paths:
                with path.open("rb") as file:
                    file.seek(0, 2)
                    if file.tell() == 0:
                        raise WeightsError(f"{path}: the file is empty (0 bytes)")
                    self.starts.append(self.size)
                    self.maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                    self.size += file.tell()
        except OSError as error:
            self.close()
            raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
        except WeightsError:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self.maps

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes start..stop: a view of the map, or a copy where they cross from one piece into the next.

        Raises:
            WeightsError: the file was closed.
        """
        if self.closed:
            raise WeightsError(f"{self.paths[0]}: the file was closed before this was read")
        assert 0 <= start <= stop <= self.size
        index = max(bisect.bisect_right(self.starts, start) - 1, 0)
        at = start - self.starts[index]
        if stop - self.starts[index] <= len(self.maps[index]):
            return memoryview(self.maps[index])[at : at + stop - start]
        joined = bytearray()
        while len(joined) < stop - start:
            joined += self.maps[index][at : at + stop - start - len(joined)]
            index, at = index + 1, 0
        return memoryview(joined)

    def forget(self, start: int, stop: int) -> None:
        """Lets the process's memory go that reading these bytes took; they can be read again. Pages at the ends stay."""
        for begin, piece in zip(self.starts, self.maps, strict=True):
            first = max(start - begin, 0) + mmap.PAGESIZE - 1
            first -= first % mmap.PAGESIZE
            last = min(stop - begin, len(piece))
            last -= last % mmap.PAGESIZE
            if first < last and hasattr(mmap, "MADV_DONTNEED"):
                piece.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Unmaps everything; a map that a view still needs goes with the view. Safe to call twice."""
        while self.maps:
            last = self.maps.pop()
            with contextlib.suppress(BufferError):  # a failed read's traceback may hold a view for a while
                last.close()
