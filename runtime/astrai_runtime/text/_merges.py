"""Merge rules for SentencePiece vocabularies, which state scores instead, and a cache of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

MAGIC = b"astrai merges 1\n"  # the number changes with the rules below
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


class MergeCache:
    """Merge rules as pairs of ids, one small file a vocabulary. Only a cache: what is damaged or missing is found again.

    Args:
        folder: where the files lie; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, fingerprint: str, tokens: Sequence[str]) -> list[tuple[str, str]] | None:
        """The rules of the vocabulary with that fingerprint, or None: never stored, damaged, or of another version."""
        try:
            content = self._file(fingerprint).read_bytes()
        except OSError:
            return None
        head, payload = content[: len(MAGIC) + _DIGEST_BYTES], content[len(MAGIC) + _DIGEST_BYTES :]
        if head != MAGIC + hashlib.sha256(payload).digest() or len(payload) % 8:
            return None
        ids = _little_endian(array("I", payload))
        if ids and max(ids) >= len(tokens):
            return None
        texts = map(tokens.__getitem__, ids)
        return list(zip(texts, texts, strict=True))

    def store(self, fingerprint: str, merges: Sequence[tuple[str, str]], ids: Mapping[str, int]) -> None:
        """Remembers rules. A folder that cannot be written is no reason to fail: they are found again next time."""
        payload = _little_endian(array("I", [ids[piece] for merge in merges for piece in merge])).tobytes()
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
