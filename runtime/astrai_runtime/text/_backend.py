"""A codec over `tokenizers.Tokenizer`: twin backends that parse or ignore control tokens, and exact bytes per id."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping

import tokenizers
from tokenizers import pre_tokenizers


class BackendCodec:
    """Encodes with Hugging Face tokenizers; spells ids itself, because their decoder works on whole texts only.

    Args:
        backend: a complete tokenizer. It belongs to this codec afterwards and is changed: truncation and padding go.
        spell: piece -> bytes for the vocabulary's own pieces.
        literal: id -> text of added tokens, which spell exactly their text.
        vocab_size: number of ids; those that the backend does not know (padding of the weights) spell nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        spell: Callable[[str], bytes],
        literal: Mapping[int, str],
        vocab_size: int,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self.vocab_size = vocab_size
        self._spell = spell
        self._literal = literal
        self._parsing = backend
        self._plain = twin(backend, plain=True)
        self._inner = _without_opening_space(self._plain)

    def encode(self, text: str, *, special: bool, start: bool) -> list[int]:
        backend = self._parsing if special else self._plain if start else self._inner
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, token_id: int) -> bytes:
        text = self._literal.get(token_id)
        if text is not None:
            return text.encode("utf-8")
        piece = self._parsing.id_to_token(token_id)
        return b"" if piece is None else self._spell(piece)


def twin(backend: tokenizers.Tokenizer, *, plain: bool) -> tokenizers.Tokenizer:
    """A second tokenizer over the same vocabulary (shared, not copied). `plain`: it never parses control tokens.

    The switch is a field of the tokenizer, so that turning it per call would race between threads.
    """
    other = tokenizers.Tokenizer(backend.model)
    added = backend.get_added_tokens_decoder()
    if added:
        other.add_tokens([added[token_id] for token_id in sorted(added)])
    if other.get_added_tokens_decoder().keys() != added.keys():  # ids that adding in order does not reproduce
        other = tokenizers.Tokenizer.from_str(backend.to_str())
    if backend.normalizer is not None:
        other.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        other.pre_tokenizer = backend.pre_tokenizer
    other.encode_special_tokens = plain
    return other


def _without_opening_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for pieces from a text's middle, where `Metaspace(first)` must not open with a space."""
    if backend.pre_tokenizer is None:
        return backend
    changed = copy.deepcopy(backend.pre_tokenizer)
    steps = [changed]
    if isinstance(changed, pre_tokenizers.Sequence):  # knows no len()
        steps = [changed[at] for at in range(len(json.loads(changed.__getstate__())["pretokenizers"]))]
    first = [step for step in steps if isinstance(step, pre_tokenizers.Metaspace) and step.prepend_scheme == "first"]
    if not first:
        return backend
    for step in first:
        step.prepend_scheme = "never"
    other = twin(backend, plain=True)
    other.pre_tokenizer = changed
    return other
