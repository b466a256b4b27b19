"""Text to token ids and back, with the exact bytes of every token and one rule for the beginning-of-sequence mark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from astrai_runtime.errors import InvalidRequest

_NO_SIDES: Mapping[int, tuple[bool, bool]] = MappingProxyType({})


class Codec(Protocol):
    """What turns text into ids and one id into bytes; knows nothing of BOS rules. Safe to share between threads."""

    vocab_size: int

    def encode(self, text: str, *, special: bool, start: bool) -> list[int]:
        """The ids of `text` alone. `special`: control tokens spelled in it are parsed. `start`: a prompt begins here,
        so that vocabularies which open a text with a space do so."""
        ...

    def spell(self, token_id: int) -> bytes:
        """The exact bytes of an id below `vocab_size`; b"" where a token spells nothing."""
        ...


class Tokenizer:
    """One model's vocabulary. Immutable after construction; every method is safe to call from several threads.

    Args:
        codec: the vocabulary itself.
        bos_id: the mark that begins a sequence, if the model has one.
        eos_ids: every id that ends a generation.
        special_tokens: text -> id of the control tokens. Their bytes, and those of `eos_ids`, are never shown.
        prefix: ids that the tokenizer's own rule puts before raw text.
        suffix: ids that the tokenizer's own rule puts after raw text.
        swallows: control token -> whether it takes the white space before and after it; absent ones take none.
        fingerprint: a digest of everything above, see `fingerprint`.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        special_tokens: Mapping[str, int],
        prefix: Iterable[int] = (),
        suffix: Iterable[int] = (),
        swallows: Mapping[int, tuple[bool, bool]] = _NO_SIDES,
        fingerprint: str,
    ) -> None:
        self.vocab_size = codec.vocab_size
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.special_tokens: Mapping[str, int] = MappingProxyType(dict(special_tokens))
        self.swallows: Mapping[int, tuple[bool, bool]] = MappingProxyType(dict(swallows))
        self._codec = codec
        self._prefix = tuple(prefix)
        self._suffix = tuple(suffix)
        self._fingerprint = fingerprint
        self.add_bos = bos_id is not None and bos_id in self._prefix
        self._silent = self.eos_ids | frozenset(self.special_tokens.values()) | ({bos_id} if bos_id is not None else set())
        self._bytes: dict[int, bytes] = {}  # filled as tokens are met

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        Args:
            special: text that spells a control token becomes that token (templates); otherwise it stays plain text.
            bos: None follows the tokenizer's own rule, which may also end the text with a mark; True begins with BOS
                where the model has one; False adds nothing. There are never two BOS: a text whose own first token is
                BOS (possible only with `special`) gets no other. With `special=False` a text that spells BOS is plain
                text, and the rule's BOS comes before it.

        Raises:
            InvalidRequest: `text` holds half of a surrogate pair, which no bytes can spell.
        """
        ids = self._encode(text, special=special, start=True)
        if bos is None:
            prefix, suffix = self._prefix, self._suffix
        else:
            prefix, suffix = (self.bos_id,) if bos and self.bos_id is not None else (), ()
        if prefix and ids and prefix[-1] == ids[0] == self.bos_id:
            prefix = prefix[:-1]
        return [*prefix, *ids, *suffix]

    def encode_part(self, text: str) -> list[int]:
        """Plain ids of a piece from the middle of a prompt: no marks, no opening space, control tokens stay text."""
        return self._encode(text, special=False, start=False)

    def _encode(self, text: str, *, special: bool, start: bool) -> list[int]:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                lost = text[error.start]
                raise InvalidRequest(
                    f"the text holds {lost!a} at position {error.start}, half of a surrogate pair; send whole characters"
                ) from error
        return self._codec.encode(text, special=special, start=start)

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token, not necessarily whole characters; b"" for control and end tokens.

        Raises:
            InvalidRequest: no such id.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(f"token id {token_id} is out of range; this vocabulary has ids 0 to {self.vocab_size - 1}")
        known = self._bytes.get(token_id)
        if known is None:
            known = b"" if token_id in self._silent else self._codec.spell(token_id)
            self._bytes[token_id] = known
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """The joined bytes as UTF-8; what is no valid UTF-8 becomes U+FFFD. Control tokens leave nothing."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """SHA-256 (hex) of what defines this tokenizer: equal fingerprints mean equal ids for equal text."""
        return self._fingerprint
