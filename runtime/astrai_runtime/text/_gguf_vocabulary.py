"""The arrays of `tokenizer.ggml.*`, checked; what only the slower of two codecs needs is read when it is asked for."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex

from astrai_runtime.errors import WeightsError
from astrai_runtime.text._merges import MergeCache, Merges, Progress, merges_by_score

if TYPE_CHECKING:
    from astrai_runtime.text._merger import Merger

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
# Converters often declare one end token where a model has more; these texts end a turn wherever they are control tokens.
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>")


class Vocabulary:
    """The tokens of a file and what it says about them.

    `merger`, once somebody sets it, knows the texts too: then the file's are never made into a quarter of a million strings.
    """

    merger: Merger | None = None

    def __init__(self, metadata: Mapping[str, Any], cache: MergeCache | None, progress: Progress) -> None:
        self.metadata = metadata
        self.size = _length(metadata, "tokens")
        stated = metadata.get(PREFIX + "token_type") is not None
        self.types = _types(metadata) if stated else bytes([NORMAL]) * self.size
        if len(self.types) != self.size:
            raise WeightsError(f"tokenizer.ggml has {self.size} tokens but {len(self.types)} token types")
        self._cache, self._progress = cache, progress

    @cached_property
    def tokens(self) -> list[str]:
        return texts(self.metadata, "tokens")

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: at for at, token in enumerate(self.tokens)}

    @cached_property
    def packed(self) -> bytes:
        """Of each token its length (8 bytes, little-endian) and its UTF-8: what GGUF files hold."""
        stored = getattr(required(self.metadata, "tokens"), "packed_texts", None)
        if stored is not None:
            packed: bytes = stored()
            return packed
        encoded = [token.encode("utf-8") for token in self.tokens]
        return b"".join(len(text).to_bytes(8, "little") + text for text in encoded)

    @cached_property
    def control(self) -> dict[str, int]:
        return {self.text(at): at for at in self.of_type(CONTROL, UNKNOWN)}

    @cached_property
    def fingerprint(self) -> str:
        """Over every key but the chat template, which has no part in turning plain text into ids."""
        digest = hashlib.sha256()
        for key in sorted(self.metadata):
            if key.startswith(PREFIX):
                known = {"tokens": lambda: self.packed, "token_type": lambda: self.types}.get(key.removeprefix(PREFIX))
                digest.update(key.encode() + b"\0" + (known() if known else _bytes_of(self.metadata[key])) + b"\0")
        return digest.hexdigest()

    def text(self, at: int) -> str:
        return self.tokens[at] if self.merger is None else self.merger.text(at)

    def of_type(self, *kinds: int) -> list[int]:
        return [found.start() for found in re.finditer(b"[%b]" % re.escape(bytes(kinds)), self.types)]

    def special_id(self, key: str) -> int | None:
        return token_id(self.metadata, key, self.size)

    def end_ids(self) -> set[int]:
        declared = {self.special_id(f"{key}_token_id") for key in ("eos", "eot", "eom")}
        # gpt-oss ends with <|return|> or <|call|>; its <|end|> only closes a message
        by_text = {self.control.get(text) for text in _END_TEXTS if text != "<|end|>" or "<|return|>" not in self.control}
        return {at for at in declared | by_text if at is not None}

    def literal(self) -> dict[int, str]:
        """What spells its own text, and the unused places, which spell nothing."""
        own = {at: self.text(at) for at in self.of_type(USER_DEFINED)}
        return own | dict.fromkeys(self.of_type(UNUSED), "")

    def merges(self) -> Merges:
        """What the scores of the normal pieces say about their order; from the cache where it has it.

        Raises:
            WeightsError: there is not one score for each token.
        """
        if (n_scores := _length(self.metadata, "scores")) != self.size:
            raise WeightsError(f"tokenizer.ggml has {self.size} tokens but {n_scores} scores")
        known = None if self._cache is None else self._cache.load(self.fingerprint)
        if known is not None:
            return known
        scores = _numbers(self.metadata, "scores")
        rules = merges_by_score({self.tokens[at]: scores[at] for at in self.of_type(NORMAL)}, self._progress)
        found = Merges.of(rules, self.ids, distinct=len(self.ids) == self.size)
        if self._cache is not None:
            self._cache.store(self.fingerprint, found)
        return found


def required(metadata: Mapping[str, Any], key: str) -> Any:
    """The value of `tokenizer.ggml.KEY`.

    Raises:
        WeightsError: there is none.
    """
    value = metadata.get(PREFIX + key)
    if value is None:
        raise WeightsError(f"the file's metadata lacks {PREFIX}{key}; it holds no complete tokenizer")
    return value


def texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts that UTF-8 can write.

    Raises:
        WeightsError: there is none, or it is something else.
    """
    try:
        found: list[str] = list(required(metadata, key))
        "".join(found).encode("utf-8")
    except (TypeError, UnicodeEncodeError) as error:
        raise WeightsError(f"{PREFIX}{key} must be a list of texts: {error}") from error
    return found


def token_id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    """An id that the metadata states, or None.

    Raises:
        WeightsError: it is no id of this vocabulary.
    """
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if not isinstance(value, SupportsIndex) or not 0 <= int(value) < n_tokens:
        raise WeightsError(f"{PREFIX}{key} is {value!r}, but the ids are 0 to {n_tokens - 1}")
    return int(value)


def _length(metadata: Mapping[str, Any], key: str) -> int:
    try:
        return len(required(metadata, key))
    except TypeError as error:
        raise WeightsError(f"{PREFIX}{key} must be a list: {error}") from error


def _types(metadata: Mapping[str, Any]) -> bytes:
    """One byte a token, so that a search over all of them is cheap."""
    try:
        return bytes(iter(required(metadata, "token_type")))  # not the bytes of an array in memory
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{PREFIX}token_type must be a list of small numbers: {error}") from error


def _numbers(metadata: Mapping[str, Any], key: str) -> Sequence[float]:
    try:
        return array("d", required(metadata, key))
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{PREFIX}{key} must be a list of numbers: {error}") from error


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    items: Sequence[Any] = list(value) if isinstance(value, Iterable) else [value]
    try:
        return array("d", items).tobytes()
    except TypeError:  # not numbers alone
        return "\0".join(map(str, items)).encode("utf-8", "surrogatepass")
