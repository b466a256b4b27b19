"""A tokenizer from GGUF metadata: SentencePiece by scores ("llama") or byte-level BPE by merges ("gpt2")."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from astrai_runtime.errors import WeightsError
from astrai_runtime.text._gguf_vocabulary import BYTE, UNKNOWN, Vocabulary, required, texts, token_id
from astrai_runtime.text._merger import MergerCodec, open_merger
from astrai_runtime.text._merges import MergeCache, Progress
from astrai_runtime.text._spelling import sentencepiece
from astrai_runtime.text.tokenizer import Codec, Tokenizer

if TYPE_CHECKING:
    from astrai_runtime.text._merges import Merges


def from_gguf(
    metadata: Mapping[str, Any],
    *,
    cache: MergeCache | None = None,
    progress: Progress = lambda done, total: None,
    library: ctypes.CDLL | None = None,
) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes.

    Ends are the declared eos, eot and eom ids and the control tokens that are known to end a turn. Merge rules that the
    file does not state are looked up in `cache`; where it lacks them they are found, with `progress`, and left there.
    `library`, where there is one, merges instead of `tokenizers`: the same ids from a tenth of the memory.

    Raises:
        WeightsError: a key is missing or inconsistent, the model is of another kind, or its pre-tokenizer is unknown.
    """
    kind = required(metadata, "model")
    if kind not in ("llama", "gpt2"):
        raise WeightsError(f"no tokenizer for tokenizer.ggml.model = {kind!r}; there are: gpt2, llama")
    vocabulary = Vocabulary(metadata, cache, progress)
    codec, add_bos_default = _sentencepiece(vocabulary, library) if kind == "llama" else _byte_level(vocabulary)
    bos_id = vocabulary.special_id("bos_token_id")
    eos_id = vocabulary.special_id("eos_token_id")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos_default))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
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
    tokens = texts(metadata, "tokens")
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    ids = {f"{name}_token": token_id(metadata, f"{key}_token_id", len(tokens)) for name, key in keys.items()}
    return {name: tokens[at] for name, at in ids.items() if at is not None}


def _sentencepiece(vocabulary: Vocabulary, library: ctypes.CDLL | None) -> tuple[Codec, bool]:
    """The codec, and whether it begins with BOS where the file does not say."""
    merges = vocabulary.merges()
    unknown = vocabulary.special_id("unknown_token_id")
    if unknown is None:
        unknown = next(iter(vocabulary.of_type(UNKNOWN)), None)
    space_prefix = bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True))
    if library is not None and merges.distinct:
        vocabulary.merger = open_merger(
            library,
            texts=vocabulary.packed,
            types=vocabulary.types,
            merges=merges.ids,
            unknown=unknown,
            byte_fallback=BYTE in vocabulary.types,
            space_prefix=space_prefix,
        )
    if vocabulary.merger is not None:
        literal = vocabulary.literal()
        return MergerCodec(vocabulary.merger, spell=sentencepiece, literal=literal, vocab_size=vocabulary.size), True
    return _by_tokenizers(vocabulary, merges, unknown, space_prefix), True


def _by_tokenizers(vocabulary: Vocabulary, merges: Merges, unknown: int | None, space_prefix: bool) -> Codec:
    from astrai_runtime.text import _gguf_backend

    return _gguf_backend.sentencepiece_codec(vocabulary, merges, unknown, space_prefix=space_prefix)


def _byte_level(vocabulary: Vocabulary) -> tuple[Codec, bool]:
    from astrai_runtime.text import _gguf_backend

    return _gguf_backend.byte_level_codec(vocabulary)
