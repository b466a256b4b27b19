"""Codecs of `tokenizers` over the vocabulary of a GGUF file."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from astrai_runtime.errors import WeightsError
from astrai_runtime.text._backend import BackendCodec
from astrai_runtime.text._gguf_vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, texts
from astrai_runtime.text._merges import Merges
from astrai_runtime.text._presplit import presplit
from astrai_runtime.text._spelling import SPACE_MARK, byte_level, sentencepiece


def sentencepiece_codec(vocabulary: Vocabulary, merges: Merges, unknown: int | None, *, space_prefix: bool) -> BackendCodec:
    """SentencePiece's BPE by the ranks of its merges.

    Raises:
        WeightsError: the vocabulary cannot be loaded.
    """
    model = _model(
        vocabulary,
        merges.texts(vocabulary.tokens),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    backend = _backend(vocabulary, model)
    marked: normalizers.Normalizer = normalizers.Replace(" ", SPACE_MARK)
    if space_prefix:
        marked = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marked])
    backend.normalizer = marked
    return BackendCodec(backend, spell=sentencepiece, literal=vocabulary.literal(), vocab_size=vocabulary.size)


def byte_level_codec(vocabulary: Vocabulary) -> tuple[BackendCodec, bool]:
    """Byte-level BPE by the file's own merges, and whether its pre-tokenizer's family begins with BOS.

    Raises:
        WeightsError: the vocabulary cannot be loaded, or its pre-tokenizer is unknown.
    """
    split = presplit(vocabulary.metadata.get("tokenizer.ggml.pre"))
    merges = []
    for rank, line in enumerate(texts(vocabulary.metadata, "merges")):
        cut = line.find(" ", 1)
        if cut < 0:
            raise WeightsError(f"tokenizer.ggml.merges[{rank}] is {line!r}, which is not two pieces with a space between")
        merges.append((line[:cut], line[cut + 1 :]))
    backend = _backend(vocabulary, _model(vocabulary, merges, ignore_merges=split.whole_words))
    normalizer = split.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split.pre_tokenizer()
    codec = BackendCodec(backend, spell=byte_level, literal=vocabulary.literal(), vocab_size=vocabulary.size)
    return codec, split.add_bos


def _model(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception for every damage it finds
        raise WeightsError(f"tokenizer.ggml holds no usable BPE vocabulary: {error}") from error


def _backend(vocabulary: Vocabulary, model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    added = [at for at in vocabulary.of_type(CONTROL, UNKNOWN, USER_DEFINED) if vocabulary.tokens[at]]
    backend.add_tokens(
        [AddedToken(vocabulary.tokens[at], special=vocabulary.types[at] != USER_DEFINED, normalized=False) for at in added]
    )
    if backend.get_vocab_size(with_added_tokens=True) > vocabulary.size:
        raise WeightsError("tokenizer.ggml.tokens cannot be loaded: added tokens received ids of their own")
    return backend
