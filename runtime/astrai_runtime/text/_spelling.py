"""How vocabularies write bytes as text: the byte-level table of GPT-2 and the marks of SentencePiece."""

from __future__ import annotations

import re
from functools import cache

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this block character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_of_char() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level(piece: str) -> bytes:
    """Bytes of a byte-level piece. A piece with a character outside the table is an added token and spells itself."""
    table = byte_of_char()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8")


def sentencepiece(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: `<0x0A>` is one byte, the block mark is a space."""
    one_byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(one_byte[1], 16)]) if one_byte else piece.replace(SPACE_MARK, " ").encode("utf-8")
