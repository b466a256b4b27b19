"""The tokenizer of models without one: ids 0 to 255 are bytes, then <bos> and <eos>."""

from __future__ import annotations

import hashlib
import re

from astrai_runtime.text.tokenizer import Tokenizer

BOS, EOS = 256, 257
_MARKS = {"<bos>": BOS, "<eos>": EOS}
_MARK = re.compile("(" + "|".join(map(re.escape, _MARKS)) + ")")


class _ByteCodec:
    vocab_size = 258

    def encode(self, text: str, *, special: bool, start: bool) -> list[int]:
        if not special:
            return list(text.encode("utf-8"))
        ids: list[int] = []
        for part in _MARK.split(text):
            ids += [_MARKS[part]] if part in _MARKS else part.encode("utf-8")
        return ids

    def spell(self, token_id: int) -> bytes:
        return bytes([token_id])


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 258 ids that needs no files. Its own rule adds no BOS."""
    return Tokenizer(
        _ByteCodec(), bos_id=BOS, eos_ids=(EOS,), special_tokens=_MARKS, fingerprint=hashlib.sha256(b"bytes-258").hexdigest()
    )
