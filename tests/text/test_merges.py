"""Merge rules found from scores, and the cache that keeps them: equal ids with it and without it, whatever lies there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_runtime.text import _gguf_vocabulary
from astrai_runtime.text._gguf import from_gguf
from astrai_runtime.text._merges import MergeCache, merges_by_score

from .conftest import TEXTS

PIECES = ["a", "b", "c", "ab", "bc", "abc", "abab", "▁", "▁a", "▁ab", "ca", "cab", "▁▁"]
METADATA: Mapping[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", *PIECES],
    "tokenizer.ggml.scores": [0.0, 0.0, *(-float(at) for at in range(len(PIECES)))],
    "tokenizer.ggml.token_type": [2, 3] + [1] * len(PIECES),
    "tokenizer.ggml.bos_token_id": 1,
}
SAID = ["abcab cab", "aabbcc", "   a", "bcabca abab", ""]


def every_split(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to cut a piece into two pieces as a rule: more than can ever be used, but certainly enough."""
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    cuts = ((piece[:cut], piece[cut:]) for piece in ranked for cut in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in scores and right in scores]


def merged(text: str, merges: list[tuple[str, str]]) -> list[str]:
    """BPE as plainly as it can be written: the rule of the lowest rank first, leftmost on ties."""
    rank = {merge: at for at, merge in enumerate(merges)}
    parts = list(text)
    while True:
        found = [(rank[pair], at) for at, pair in enumerate(itertools.pairwise(parts)) if pair in rank]
        if not found:
            return parts
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=7), unique=True, max_size=30), st.text("ab", max_size=40))
def test_one_rule_a_piece_merges_like_all_splits_of_it(pieces: list[str], text: str) -> None:
    scores = {piece: -float(at) for at, piece in enumerate(pieces)}
    few = merges_by_score(scores)
    assert merged(text, few) == merged(text, every_split(scores))
    made = ["".join(merge) for merge in few]
    assert len(made) == len(set(made))


def test_a_piece_that_no_merges_lead_to_has_no_rule() -> None:
    # "ab" merges before "bc" can, so that "a" + "bc" never stand beside each other
    assert merges_by_score({"a": 0, "b": 0, "c": 0, "ab": -1, "bc": -2, "abc": -3}) == [("a", "b"), ("b", "c"), ("ab", "c")]
    assert merges_by_score({"a": 0, "b": 0, "ab": -1, "axb": -2}) == [("a", "b")]


def test_finding_rules_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    merges_by_score(dict.fromkeys(PIECES, 0.0), lambda done, total: told.append((done, total)))
    assert told[0] == (0, len(PIECES))
    assert told[-1] == (len(PIECES), len(PIECES))


def test_the_second_time_no_rule_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = from_gguf(METADATA, cache=MergeCache(tmp_path))
    monkeypatch.setattr(_gguf_vocabulary, "merges_by_score", None)  # calling it now would raise
    second = from_gguf(METADATA, cache=MergeCache(tmp_path))
    bare = {text: first.encode(text) for text in (*SAID, *TEXTS)}
    assert bare == {text: second.encode(text) for text in bare}
    assert first.fingerprint() == second.fingerprint()
    assert [first.token_bytes(at) for at in range(first.vocab_size)] == [
        second.token_bytes(at) for at in range(second.vocab_size)
    ]


def test_with_and_without_a_cache_ids_are_the_same(tmp_path: Path) -> None:
    plain = from_gguf(METADATA)
    for _ in range(2):  # stored, then loaded
        cached = from_gguf(METADATA, cache=MergeCache(tmp_path))
        for text in (*SAID, *TEXTS):
            assert cached.encode(text) == plain.encode(text), text


@pytest.mark.parametrize("damage", [
    lambda content: content[:-1], lambda content: content[:10], lambda content: b"", lambda content: b"x" + content[1:],
    lambda content: content[:-4] + b"\xff\xff\xff\xff", lambda content: content + bytes(8),
])  # fmt: skip
def test_a_damaged_cache_is_replaced_and_changes_nothing(tmp_path: Path, damage: Any) -> None:
    plain = from_gguf(METADATA, cache=MergeCache(tmp_path))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert [from_gguf(METADATA, cache=MergeCache(tmp_path)).encode(text) for text in SAID] == [
        plain.encode(text) for text in SAID
    ]
    assert file.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [file]


def test_rules_of_another_vocabulary_are_never_taken(tmp_path: Path) -> None:
    cache = MergeCache(tmp_path)
    from_gguf(METADATA, cache=cache)
    turned = {**METADATA, "tokenizer.ggml.scores": [0.0, 0.0, *(float(at) for at in range(len(PIECES)))]}
    assert [from_gguf(turned, cache=cache).encode(text) for text in SAID] == [
        from_gguf(turned).encode(text) for text in SAID
    ]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tokenizer = from_gguf(METADATA, cache=MergeCache(tmp_path / "file" / "below"))
    assert tokenizer.encode("abc") == from_gguf(METADATA).encode("abc")


@pytest.mark.demo
def test_the_demo_models_rules_from_the_cache_encode_like_all_its_splits(demo_model: Path, tmp_path: Path) -> None:
    from astrai_runtime.weights._open import open_checkpoint

    checkpoint = open_checkpoint(demo_model)
    found = from_gguf(checkpoint.metadata, cache=MergeCache(tmp_path))
    cached = from_gguf(checkpoint.metadata, cache=MergeCache(tmp_path))
    checkpoint.close()
    texts = [*TEXTS, *(first + glue + second for glue in ("", "\n", "   ") for first in TEXTS for second in TEXTS[::3])]
    for text in texts:
        ids = found.encode(text)
        assert cached.encode(text) == ids
        assert cached.decode(ids) == found.decode(ids)
