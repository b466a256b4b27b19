"""Tokenizers from GGUF metadata equal the tokenizer.json that they were converted from."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from astrai_runtime.errors import WeightsError
from astrai_runtime.text._gguf import from_gguf, special_texts
from astrai_runtime.text._presplit import known

from .conftest import CORPUS, TEXTS, byte_level_tokenizer, gguf_of, sentencepiece_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# the pre-tokenizers (and normalizers) of published tokenizer.json files
PUBLISHED: dict[str, tuple[Any, Any]] = {
    "gpt-2": (GPT2, None),
    "llama-bpe": (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]), None),
    "qwen2": (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES]),
        normalizers.NFC(),
    ),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None),
    "starcoder": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None),
}


def many_texts() -> list[str]:
    parts = [*TEXTS, *CORPUS[:6]]
    return [first + glue + second for glue in ("", " ", "\n") for first in parts[::2] for second in parts[1::2]][:300]


@pytest.mark.parametrize("tag", PUBLISHED)
def test_l12_known_tags_encode_like_the_published_tokenizer(tag: str) -> None:
    pre, normalizer = PUBLISHED[tag]
    theirs = byte_level_tokenizer(pre)
    if normalizer is not None:
        theirs.normalizer = normalizer
    ours = from_gguf(gguf_of(theirs, pre=tag, add_bos_token=False))
    if tag == "llama-bpe":
        theirs.model.ignore_merges = True
    for text in many_texts():
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
        joined = b"".join(map(ours.token_bytes, ours.encode(text))).decode()
        assert joined == (text if normalizer is None else normalizer.normalize_str(text))


def test_l12_every_known_tag_keeps_every_byte() -> None:
    metadata = gguf_of(byte_level_tokenizer())
    for tag, split in known().items():
        tokenizer = from_gguf({**metadata, "tokenizer.ggml.pre": tag})
        for text in TEXTS:
            wanted = normalizers.NFC().normalize_str(text) if split.nfc else text
            assert tokenizer.decode(tokenizer.encode(text)) == wanted, tag


def test_l12_llama_cpps_default_cuts_digits_in_threes_from_the_left() -> None:
    tokenizer = from_gguf({**gguf_of(byte_level_tokenizer()), "tokenizer.ggml.pre": "default"})
    state = pre_tokenizers.Sequence([known()["default"].pre_tokenizer()]).pre_tokenize_str("ab 12345, x=1")
    assert [piece for piece, _ in state] == ["ab", "Ġ", "123", "45", ",", "Ġx", "=", "1"]
    assert tokenizer.decode(tokenizer.encode("ab 12345, x=1")) == "ab 12345, x=1"


@pytest.mark.parametrize("tag", [None, "nonsense", "qwen3", 7])
def test_l12_unknown_or_missing_tags_are_refused_with_the_known_ones(tag: object) -> None:
    with pytest.raises(WeightsError, match=r"llama-bpe.*qwen2") as caught:
        from_gguf(gguf_of(byte_level_tokenizer(), pre=tag))
    assert "tokenizer.ggml.pre" in caught.value.message


def test_byte_level_metadata_may_hold_lazy_sequences_and_numpy_numbers() -> None:
    metadata = gguf_of(byte_level_tokenizer(), pre="gpt-2")
    plain = from_gguf(metadata)
    lazy = {key: (numpy.array(value) if key.endswith("token_type") else tuple(value)) if isinstance(value, list) else value
            for key, value in metadata.items()}  # fmt: skip
    lazy["tokenizer.ggml.eos_token_id"] = numpy.uint32(lazy["tokenizer.ggml.eos_token_id"])
    other = from_gguf(lazy)
    assert other.encode("the thing <tool>") == plain.encode("the thing <tool>")
    assert other.eos_ids == plain.eos_ids
    assert other.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize(("tag", "declared", "wanted"), [
    ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False),
])  # fmt: skip
def test_t04_bos_follows_the_file_or_its_kinds_rule(tag: str, declared: bool | None, wanted: bool) -> None:
    tokenizer = from_gguf(gguf_of(byte_level_tokenizer(), pre=tag, add_bos_token=declared))
    assert tokenizer.add_bos is wanted
    assert tokenizer.encode("the").count(tokenizer.bos_id) == int(wanted)


def test_t06_ends_are_the_union_of_declared_and_known_ones() -> None:
    made = byte_level_tokenizer()
    metadata = gguf_of(made, pre="gpt-2", eos_token_id=made.token_to_id("<|bos|>"), eot_token_id=made.token_to_id("<tool>"))
    tokenizer = from_gguf(metadata)
    assert tokenizer.eos_ids == {made.token_to_id(text) for text in ("<|bos|>", "<tool>", "<|im_end|>", "<|end|>")}
    assert all(tokenizer.token_bytes(at) == b"" for at in tokenizer.eos_ids)


def test_broken_metadata_is_refused_with_the_key() -> None:
    good = gguf_of(byte_level_tokenizer(), pre="gpt-2")
    for change, named in [
        ({"model": "t5"}, "t5"),
        ({"model": None}, "model"),
        ({"tokens": None}, "tokens"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": ["zzz qqq"]}, "BPE"),
        ({"token_type": [1]}, "token types"),
        ({"eos_token_id": 99999}, "eos_token_id"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": 5}, "tokens"),
        ({"tokens": ["a\ud800"]}, "tokens"),
        ({"token_type": ["x"]}, "token_type"),
        ({"model": ["gpt2"]}, "gpt2"),
        ({"model": "llama", "scores": "no"}, "scores"),
    ]:
        changed = {**good, **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
        with pytest.raises(WeightsError, match=named):
            from_gguf({key: value for key, value in changed.items() if value is not None})


# -- SentencePiece ---------------------------------------------------------------------------------------------------


def sentencepiece_gguf(*, prefix: bool, user_defined: tuple[str, ...] = ()) -> tuple[dict[str, Any], Tokenizer]:
    """A trained vocabulary as GGUF, and the converted tokenizer.json to compare with."""
    theirs = sentencepiece_tokenizer(prefix="prepend" if prefix else None)
    theirs.add_tokens([AddedToken(text, special=False, normalized=False) for text in user_defined])
    state = json.loads(theirs.to_str())["model"]
    rank = {}
    for at, merge in enumerate(state["merges"]):
        rank.setdefault("".join(merge), -float(at))
    tokens = [theirs.id_to_token(at) for at in range(theirs.get_vocab_size())]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259 - len(user_defined)), *[4] * len(user_defined)]
    scores = [0.0] * 259 + [rank.get(token, -10_000.0 - at) for at, token in enumerate(tokens[259:])]
    keys = {
        "model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, theirs


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_from_scores_encodes_like_the_converted_tokenizer(prefix: bool) -> None:
    metadata, theirs = sentencepiece_gguf(prefix=prefix, user_defined=("\n\n", "<b>", "  "))
    ours = from_gguf(metadata)
    assert ours.add_bos
    for text in many_texts():
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_user_defined_pieces_match_before_merging_and_longest_first() -> None:
    metadata, _ = sentencepiece_gguf(prefix=False, user_defined=("the", "there"))
    tokenizer = from_gguf(metadata)
    pieces = [tokenizer.token_bytes(at) for at in tokenizer.encode("there the", bos=False)]
    assert pieces[0] == b"there"
    assert pieces[-1] == b"the"


def test_byte_pieces_spell_one_byte_and_marks_spell_spaces() -> None:
    metadata, _ = sentencepiece_gguf(prefix=False)
    tokenizer = from_gguf(metadata)
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    assert tokenizer.token_bytes(3 + 0xFF) == b"\xff"
    assert tokenizer.token_bytes(metadata["tokenizer.ggml.tokens"].index("▁")) == b" "
    assert all(tokenizer.token_bytes(at) == b"" for at in (0, 1, 2))


def _by_scores(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's BPE, as plainly as it can be written: the best pair of neighbours, leftmost on ties, until none."""
    pieces = list(text)
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        _, at = heapq.nsmallest(1, pairs)[0]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("abc", min_size=2, max_size=5), unique=True, max_size=25), st.text("abc", max_size=30), st.randoms())
def test_merges_from_scores_equal_sentencepieces_own_rule(pieces: list[str], text: str, random: Any) -> None:
    pieces = ["a", "b", "c", *pieces]
    ranks = list(range(len(pieces)))
    random.shuffle(ranks)
    scores = {piece: -float(rank) for piece, rank in zip(pieces, ranks, strict=True)}
    tokens = ["<unk>", *pieces]
    keys = {"model": "llama", "tokens": tokens, "scores": [0.0, *scores.values()], "token_type": [2] + [1] * len(pieces),
            "add_bos_token": False, "add_space_prefix": False}  # fmt: skip
    tokenizer = from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    assert [tokens[at] for at in tokenizer.encode(text)] == _by_scores(text, scores)


def test_special_texts_are_the_declared_tokens() -> None:
    metadata, _ = sentencepiece_gguf(prefix=True)
    assert special_texts(metadata) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


# -- the demo model --------------------------------------------------------------------------------------------------

GREEDY = {  # token ids of the model's reference implementation
    "The three primary colours are": [2, 818, 1806, 5905, 22640, 659],
    "User: Hello!\nAssistant: Hi! How can I help you today?\nUser: What is a bridge?\nAssistant:": [
        2, 2887, 236787, 26352, 236888, 107, 74314, 236787, 18428, 236888, 2088, 740, 564, 1601, 611, 3124, 236881, 107,
        2887, 236787, 2900, 563, 496, 11825, 236881, 107, 74314, 236787,
    ],
}  # fmt: skip


@pytest.mark.demo
def test_demo_model_encodes_like_its_reference_and_gives_back_every_text(demo_model: Path) -> None:
    from astrai_runtime.weights._open import open_checkpoint

    checkpoint = open_checkpoint(demo_model)
    tokenizer = from_gguf(checkpoint.metadata)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (262144, 2, {1, 106})
    for text, ids in GREEDY.items():
        assert tokenizer.encode(text) == ids
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    assert 105 not in tokenizer.encode("<start_of_turn>user")
    assert 105 in tokenizer.encode("<start_of_turn>user", special=True)
    checkpoint.close()
