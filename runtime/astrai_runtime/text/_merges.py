"""Merge rules for SentencePiece vocabularies, which state scores instead, and a cache of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MAGIC = b"astrai merges 2\n"  # the number changes with what a file holds, and with the rules
_DIGEST_BYTES = 32
# What `_ranks` says of two neighbours that make no piece.
_NEVER = sys.maxsize


class Progress(Protocol):
    """Told how many pieces of how many are done."""

    def __call__(self, done: int, total: int, /) -> None: ...


def merges_by_score(scores: Mapping[str, float], progress: Progress = lambda done, total: None) -> list[tuple[str, str]]:
    """Merge rules under which rank-ordered BPE gives what SentencePiece's BPE gives: best score first.

    A piece has one rule, the last merge on the way to it from its characters, or none if no way leads to it. That is
    enough: the merges inside a piece's span happen in the same order wherever it stands, because none may cross its ends.
    """
    order = sorted(scores, key=scores.__getitem__, reverse=True)
    rank = {piece: at for at, piece in enumerate(order)}
    merges = []
    for at, piece in enumerate(order):
        if len(piece) > 1 and (last := _last_merge(piece, rank)) is not None:
            merges.append(last)
        if at & 0x3FFF == 0:
            progress(at, len(order))
    progress(len(order), len(order))
    return merges


def _last_merge(piece: str, rank: Mapping[str, int]) -> tuple[str, str] | None:
    """The two pieces that become `piece` when the best neighbours merge first, leftmost on ties."""
    parts = list(piece)
    if any(part not in rank for part in parts):
        return None
    ranks = [rank.get(left + right, _NEVER) for left, right in itertools.pairwise(parts)]
    while len(parts) > 2:
        best = min(ranks)
        if best == _NEVER:
            return None
        at = ranks.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del ranks[at]
        if at:
            ranks[at - 1] = rank.get(parts[at - 1] + parts[at], _NEVER)
        if at < len(ranks):
            ranks[at] = rank.get(parts[at] + parts[at + 1], _NEVER)
    return parts[0], parts[1]


@dataclass(frozen=True)
class Merges:
    """Merge rules by ids in threes: left, right, and what they become; the first rule happens first.

    `distinct`: no two tokens of the vocabulary have the same text.
    """

    ids: array[int]
    distinct: bool

    @classmethod
    def of(cls, rules: Sequence[tuple[str, str]], ids: Mapping[str, int], *, distinct: bool) -> Merges:
        found = array("I")
        for left, right in rules:
            found.extend((ids[left], ids[right], ids[left + right]))
        return cls(found, distinct)

    def texts(self, tokens: Sequence[str]) -> list[tuple[str, str]]:
        """The rules as pairs of pieces."""
        lefts, rights = map(tokens.__getitem__, self.ids[::3]), map(tokens.__getitem__, self.ids[1::3])
        return list(zip(lefts, rights, strict=True))


class MergeCache:
    """Merge rules, one small file a vocabulary. Only a cache: what is damaged or missing is found again.

    Args:
        folder: where the files lie; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, fingerprint: str) -> Merges | None:
        """The rules of the vocabulary with that fingerprint, or None: never stored, damaged, or of another version."""
        try:
            content = self._file(fingerprint).read_bytes()
        except OSError:
            return None
        head, payload = content[: len(MAGIC) + _DIGEST_BYTES], content[len(MAGIC) + _DIGEST_BYTES :]
        if head != MAGIC + hashlib.sha256(payload).digest():
            return None
        numbers = _little_endian(array("I", payload))
        return Merges(numbers[1:], bool(numbers[0]))

    def store(self, fingerprint: str, merges: Merges) -> None:
        """Remembers rules. A folder that cannot be written is no reason to fail: they are found again next time."""
        payload = _little_endian(array("I", [merges.distinct]) + merges.ids).tobytes()
        file = self._file(fingerprint)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(MAGIC + hashlib.sha256(payload).digest() + payload)
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)

    def _file(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.merges"


def _little_endian(numbers: array[int]) -> array[int]:
    """The numbers with their bytes as the file has them, or back."""
    assert numbers.itemsize == 4, "array('I') has 4 bytes on every platform that CPython supports"
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
