"""A tokenizer from GGUF metadata: SentencePiece by scores ("llama") or byte-level BPE by merges ("gpt2")."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import tokenizers
from tokenizers import AddedToken, models, normalizers

from astrai_runtime.errors import WeightsError
from astrai_runtime.text._backend import BackendCodec
from astrai_runtime.text._merges import MergeCache, Progress, merges_by_score
from astrai_runtime.text._presplit import presplit
from astrai_runtime.text._spelling import SPACE_MARK, byte_level, sentencepiece
from astrai_runtime.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
# Converters often declare one end token where a model has more; these texts end a turn wherever they are control tokens.
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>")


def from_gguf(
    metadata: Mapping[str, Any], *, cache: MergeCache | None = None, progress: Progress = lambda done, total: None
) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes.

    Ends are the declared eos, eot and eom ids and the control tokens that are known to end a turn. Merge rules that the
    file does not state are looked up in `cache`; where it lacks them they are found, with `progress`, and left there.

    Raises:
        WeightsError: a key is missing or inconsistent, the model is of another kind, or its pre-tokenizer is unknown.
    """
    kind = _required(metadata, "model")
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise WeightsError(f"no tokenizer for tokenizer.ggml.model = {kind!r}; there are: {', '.join(sorted(_BUILDERS))}")
    vocabulary = _Vocabulary(metadata, cache, progress)
    codec, add_bos_default = _BUILDERS[kind](vocabulary)
    bos_id = vocabulary.special_id("bos_token_id")
    eos_id = vocabulary.special_id("eos_token_id")
    add_bos = bool(metadata.get(_PREFIX + "add_bos_token", add_bos_default))
    add_eos = bool(metadata.get(_PREFIX + "add_eos_token", False))
    return Tokenizer(
        codec,
        bos_id=bos_id,
        eos_ids=vocabulary.end_ids(),
        special_tokens=vocabulary.control,
        prefix=() if bos_id is None or not add_bos else (bos_id,),
        suffix=() if eos_id is None or not add_eos else (eos_id,),
        fingerprint=vocabulary.fingerprint,
    )


def special_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the declared special tokens under the names that chat templates use (`bos_token`, ...)."""
    tokens = _texts(metadata, "tokens")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    ids = {f"{name}_token": _token_id(metadata, f"{key}_token_id", len(tokens)) for name, key in keys.items()}
    return {name: tokens[at] for name, at in ids.items() if at is not None}


class _Vocabulary:
    """The arrays, read once and checked."""

    def __init__(self, metadata: Mapping[str, Any], cache: MergeCache | None, progress: Progress) -> None:
        self.metadata = metadata
        self.tokens = _texts(metadata, "tokens")
        stated = metadata.get(_PREFIX + "token_type") is not None
        self.types = _types(metadata) if stated else bytes([NORMAL]) * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise WeightsError(f"tokenizer.ggml has {len(self.tokens)} tokens but {len(self.types)} token types")
        self.ids = {token: at for at, token in enumerate(self.tokens)}
        self.control = {self.tokens[at]: at for at in self.of_type(CONTROL, UNKNOWN)}
        self.fingerprint = self._digest()
        self._cache, self._progress = cache, progress

    def of_type(self, *kinds: int) -> list[int]:
        return [found.start() for found in re.finditer(b"[%b]" % re.escape(bytes(kinds)), self.types)]

    def special_id(self, key: str) -> int | None:
        return _token_id(self.metadata, key, len(self.tokens))

    def end_ids(self) -> set[int]:
        declared = {self.special_id(f"{key}_token_id") for key in ("eos", "eot", "eom")}
        # gpt-oss ends with <|return|> or <|call|>; its <|end|> only closes a message
        by_text = {self.control.get(text) for text in _END_TEXTS if text != "<|end|>" or "<|return|>" not in self.control}
        return {at for at in declared | by_text if at is not None}

    def backend(self, model: models.Model) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(model)
        added = self.of_type(CONTROL, UNKNOWN, USER_DEFINED)
        backend.add_tokens(
            [
                AddedToken(self.tokens[at], special=self.types[at] != USER_DEFINED, normalized=False)
                for at in added
                if self.tokens[at]
            ]
        )
        if backend.get_vocab_size(with_added_tokens=True) > len(self.tokens):
            raise WeightsError("tokenizer.ggml.tokens cannot be loaded: added tokens received ids of their own")
        return backend

    def literal(self) -> dict[int, str]:
        """What spells its own text, and the unused places, which spell nothing."""
        texts = {at: self.tokens[at] for at in self.of_type(USER_DEFINED)}
        return texts | dict.fromkeys(self.of_type(UNUSED), "")

    def merges(self) -> list[tuple[str, str]]:
        """What the scores of the normal pieces say about their order.

        Raises:
            WeightsError: there is not one score for each token.
        """
        scores = _numbers(self.metadata, "scores")
        if len(scores) != len(self.tokens):
            raise WeightsError(f"tokenizer.ggml has {len(self.tokens)} tokens but {len(scores)} scores")
        known = None if self._cache is None else self._cache.load(self.fingerprint, self.tokens)
        if known is not None:
            return known
        found = merges_by_score({self.tokens[at]: scores[at] for at in self.of_type(NORMAL)}, self._progress)
        if self._cache is not None:
            self._cache.store(self.fingerprint, found, self.ids)
        return found

    def _digest(self) -> str:
        """Over every key but the chat template, which has no part in turning plain text into ids."""
        digest = hashlib.sha256()
        for key in sorted(self.metadata):
            if key.startswith(_PREFIX):
                digest.update(key.encode() + b"\0" + _bytes_of(self.metadata[key]) + b"\0")
        return digest.hexdigest()


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[BackendCodec, bool]:
    metadata = vocabulary.metadata
    unknown = vocabulary.special_id("unknown_token_id")
    if unknown is None:
        unknown = next(iter(vocabulary.of_type(UNKNOWN)), None)
    model = _model(
        vocabulary,
        vocabulary.merges(),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    backend = vocabulary.backend(model)
    marked: normalizers.Normalizer = normalizers.Replace(" ", SPACE_MARK)
    if metadata.get(_PREFIX + "add_space_prefix", True):
        marked = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marked])
    backend.normalizer = marked
    codec = BackendCodec(backend, spell=sentencepiece, literal=vocabulary.literal(), vocab_size=len(vocabulary.tokens))
    return codec, True


def _byte_level(vocabulary: _Vocabulary) -> tuple[BackendCodec, bool]:
    split = presplit(vocabulary.metadata.get(_PREFIX + "pre"))
    merges = []
    for rank, line in enumerate(_texts(vocabulary.metadata, "merges")):
        cut = line.find(" ", 1)
        if cut < 0:
            raise WeightsError(f"tokenizer.ggml.merges[{rank}] is {line!r}, which is not two pieces with a space between")
        merges.append((line[:cut], line[cut + 1 :]))
    model = _model(vocabulary, merges, ignore_merges=split.whole_words)
    backend = vocabulary.backend(model)
    normalizer = split.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split.pre_tokenizer()
    codec = BackendCodec(backend, spell=byte_level, literal=vocabulary.literal(), vocab_size=len(vocabulary.tokens))
    return codec, split.add_bos


_BUILDERS = {"llama": _sentencepiece, "gpt2": _byte_level}


def _model(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception for every damage it finds
        raise WeightsError(f"tokenizer.ggml holds no usable BPE vocabulary: {error}") from error


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise WeightsError(f"the file's metadata lacks {_PREFIX}{key}; it holds no complete tokenizer")
    return value


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    try:
        texts: list[str] = list(_required(metadata, key))
        "".join(texts).encode("utf-8")
    except (TypeError, UnicodeEncodeError) as error:
        raise WeightsError(f"{_PREFIX}{key} must be a list of texts: {error}") from error
    return texts


def _types(metadata: Mapping[str, Any]) -> bytes:
    """One byte a token, so that a search over all of them is cheap."""
    try:
        return bytes(iter(_required(metadata, "token_type")))  # not the bytes of an array in memory
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{_PREFIX}token_type must be a list of small numbers: {error}") from error


def _numbers(metadata: Mapping[str, Any], key: str) -> Sequence[float]:
    try:
        return array("d", _required(metadata, key))
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{_PREFIX}{key} must be a list of numbers: {error}") from error


def _token_id(metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if not isinstance(value, SupportsIndex) or not 0 <= int(value) < n_tokens:
        raise WeightsError(f"{_PREFIX}{key} is {value!r}, but the ids are 0 to {n_tokens - 1}")
    return int(value)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    items: Sequence[Any] = list(value) if isinstance(value, Iterable) else [value]
    try:
        return array("d", items).tobytes()
    except TypeError:  # not numbers alone
        return "\0".join(map(str, items)).encode("utf-8", "surrogatepass")
