"""A tokenizer from a model folder: tokenizer.json and the small files that say what begins and ends a sequence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from astrai_runtime.errors import WeightsError
from astrai_runtime.text._backend import BackendCodec
from astrai_runtime.text._spelling import SPACE_MARK, byte_level, sentencepiece
from astrai_runtime.text.tokenizer import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def from_folder(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder.

    It encodes raw text as `transformers` 5 does with `add_special_tokens`: the post-processor in tokenizer.json is the
    rule, and `add_bos_token` in tokenizer_config.json, which repeats it for older versions, has no part. Ends are
    the union of the ids in generation_config.json, config.json (also its `text_config`) and the `eos_token` of
    tokenizer_config.json.

    Raises:
        WeightsError: a file is missing or damaged, or the vocabulary is neither byte-level nor SentencePiece.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(
            f"{path} has no tokenizer.json; save the tokenizer with a current `transformers` (save_pretrained writes it)"
        )
    settings = read_json(path / "tokenizer_config.json")
    generation = read_json(path / "generation_config.json")
    config = read_json(path / "config.json")
    backend = _backend(file)
    _add_declared(backend, settings)
    named = special_texts(settings)
    bos_id = _id_of(backend, named.get("bos_token"))
    if bos_id is None:
        bos_id = next(_ids(config.get("bos_token_id")), None)
    eos_id = _id_of(backend, named.get("eos_token"))
    prefix, suffix = _own_rule(backend)
    text_config = config.get("text_config")
    declared = [generation, config, text_config if isinstance(text_config, dict) else {}]
    eos_ids = {at for source in declared for at in _ids(source.get("eos_token_id"))}
    added = backend.get_added_tokens_decoder()
    padded = [size for source in declared for size in _ids(source.get("vocab_size"))]
    codec = BackendCodec(
        backend,
        spell=_speller(backend, file),
        literal={at: token.content for at, token in added.items() if not token.special},
        vocab_size=max([backend.get_vocab_size(with_added_tokens=True), *padded, *(at + 1 for at in added)]),
    )
    return Tokenizer(
        codec,
        bos_id=bos_id,
        eos_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
        special_tokens={token.content: at for at, token in added.items() if token.special},
        prefix=prefix,
        suffix=suffix,
        swallows={at: (token.lstrip, token.rstrip) for at, token in added.items() if token.lstrip or token.rstrip},
        fingerprint=_digest(file, prefix, suffix, bos_id, sorted(eos_ids), codec.vocab_size, sorted(added)),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is no such file.

    Raises:
        WeightsError: the file is not readable as a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json as texts: `bos_token`, `eos_token`, ..."""
    values = {name: settings.get(name) for name in NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every damage it finds
        raise WeightsError(f"{file} is damaged or of an unknown form: {error}") from error


def _add_declared(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Adds what tokenizer_config.json declares and tokenizer.json lacks, in the order of ids, as `transformers` does."""
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    table = settings.get("added_tokens_decoder")
    entries = table if isinstance(table, dict) else {}
    for at in sorted((at for at in entries if at.isdecimal()), key=int):
        entry = entries[at] if isinstance(entries[at], dict) else {}
        content = entry.get("content")
        if isinstance(content, str) and content and content not in there:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            backend.add_tokens([AddedToken(content, **{flag: bool(entry.get(flag, False)) for flag in flags})])
            there.add(content)
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    more = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    for value in [*special_texts(settings).values(), *more]:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content and content not in special:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
            special.add(content)


def _own_rule(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after raw text."""
    whole: list[int] = backend.encode("a", add_special_tokens=True).ids
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _speller(backend: tokenizers.Tokenizer, file: Path) -> Callable[[str], bytes]:
    if backend.decoder is None:
        raise WeightsError(f"{file} states no decoder, so that the bytes of its tokens are unknown")
    steps = list(_steps(json.loads(backend.decoder.__getstate__())))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return byte_level
    marks = any(step.get("type") == "Replace" and step.get("pattern") == {"String": SPACE_MARK} for step in steps)
    if marks or kinds & {"Metaspace", "ByteFallback"}:
        return sentencepiece
    raise WeightsError(
        f"{file} uses the decoder {', '.join(sorted(map(str, kinds)))}; supported are byte-level BPE and SentencePiece"
    )


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in decoder.get("decoders") or [decoder]:
        yield from _steps(step) if "decoders" in step else [step]


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _ids(value: object) -> Iterator[int]:
    """The ids in a value that is an integer, a list of them, or nothing."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            yield item


def _digest(file: Path, *rules: object) -> str:
    digest = hashlib.sha256(file.read_bytes())
    digest.update(repr(rules).encode())
    return digest.hexdigest()
