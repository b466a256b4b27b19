"""csrc/cpu/include/astrai_text.h for ctypes: SentencePiece's BPE in the compiled library, and a codec over it.

It opens in hundredths of a second where `tokenizers` takes half a second and ten times the memory, and encodes without the
GIL. `_gguf` uses it where there is a library; both give the same ids for every text.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_uint32, c_void_p

ABI = 1


class Vocabulary(Structure):
    """What a merger is made of; see the header."""

    _fields_ = [
        ("texts", c_char_p),
        ("n_text_bytes", c_int64),
        ("types", c_char_p),
        ("merges", c_void_p),
        ("n_tokens", c_int32),
        ("n_merges", c_int32),
        ("unknown", c_int32),
        ("byte_fallback", c_int32),
        ("space_prefix", c_int32),
    ]


class Merger:
    """One vocabulary in the library's memory. Safe to share between threads; it is closed when nobody has it any more."""

    def __init__(self, functions: ctypes.CDLL, handle: int) -> None:
        self._functions, self._handle = functions, handle
        weakref.finalize(self, functions.astrai_merger_close, handle).atexit = False  # the process takes its memory along

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of `text`. Raises MemoryError when there is not enough."""
        raw, ids = text.encode("utf-8"), POINTER(c_uint32)()
        n = self._functions.astrai_merger_encode(self._handle, raw, len(raw), int(special), byref(ids))
        if n < 0:
            raise MemoryError(f"not enough memory for the tokens of {len(raw)} bytes")
        try:
            return ids[:n]
        finally:
            self._functions.astrai_merger_free(ids)

    def text(self, token_id: int) -> str:
        """The text of a token."""
        n = c_int64()
        return ctypes.string_at(self._functions.astrai_merger_text(self._handle, token_id, byref(n)), n.value).decode()


def open_merger(
    functions: ctypes.CDLL,
    *,
    texts: bytes,
    types: bytes,
    merges: array[int],
    unknown: int | None,
    byte_fallback: bool,
    space_prefix: bool,
) -> Merger | None:
    """A merger over a vocabulary whose texts all differ.

    Args:
        functions: the compiled library.
        texts: of each token its length (8 bytes, little-endian) and its UTF-8.
        types: `tokenizer.ggml.token_type`, one byte a token.
        merges: ids in threes: left, right, what they become; the first rule happens first.

    Returns:
        None where the library has another interface or refuses the vocabulary.
    """
    if not _bind(functions):
        return None
    address, n = merges.buffer_info()
    unknown_id = -1 if unknown is None else unknown
    vocabulary = Vocabulary(
        texts, len(texts), types, address, len(types), n // 3, unknown_id, int(byte_fallback), int(space_prefix)
    )
    handle = functions.astrai_merger_open(byref(vocabulary))
    return None if handle is None else Merger(functions, handle)


class MergerCodec:
    """`tokenizer.Codec` over a merger.

    Args:
        spell: piece -> bytes.
        literal: id -> text of tokens that spell exactly their text.
    """

    def __init__(
        self, merger: Merger, *, spell: Callable[[str], bytes], literal: Mapping[int, str], vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self._merger, self._spell, self._literal = merger, spell, literal

    def encode(self, text: str, *, special: bool, start: bool) -> list[int]:
        return self._merger.encode(text, special=special)

    def spell(self, token_id: int) -> bytes:
        text = self._literal.get(token_id)
        return self._spell(self._merger.text(token_id)) if text is None else text.encode("utf-8")


def _bind(functions: ctypes.CDLL) -> bool:
    """Declares the functions' types. False: the library lacks one, or its interface is another one."""
    table = {
        "astrai_text_abi": (c_int32, ()),
        "astrai_merger_open": (c_void_p, (POINTER(Vocabulary),)),
        "astrai_merger_close": (None, (c_void_p,)),
        "astrai_merger_encode": (c_int64, (c_void_p, c_char_p, c_int64, c_int32, POINTER(POINTER(c_uint32)))),
        "astrai_merger_free": (None, (POINTER(c_uint32),)),
        "astrai_merger_text": (c_void_p, (c_void_p, c_int32, POINTER(c_int64))),
    }
    for name, (result, arguments) in table.items():
        function = getattr(functions, name, None)
        if function is None:
            return False
        function.restype, function.argtypes = result, arguments
    return bool(functions.astrai_text_abi() == ABI)
