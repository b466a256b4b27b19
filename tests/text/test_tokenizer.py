"""Ids equal the reference tokenizer's, bytes are exact, and BOS comes once."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_runtime.errors import InvalidRequest, WeightsError
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text._hf import from_folder

from .conftest import TEXTS, byte_level_tokenizer, save_folder, sentencepiece_tokenizer


@pytest.mark.parametrize("kind", ["byte_level_folder", "sentencepiece_folder"])
def test_raw_text_encodes_like_the_reference(
    kind: str, request: pytest.FixtureRequest, reference: Callable[[Path], Any]
) -> None:
    folder = request.getfixturevalue(kind)
    ours, theirs = from_folder(folder), reference(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.encode(text, bos=False) == theirs(text, add_special_tokens=False)["input_ids"], text


def test_raw_text_encodes_like_the_reference_with_metaspace(tmp_path: Path, reference: Callable[[Path], Any]) -> None:
    folder = save_folder(tmp_path, sentencepiece_tokenizer(prefix="first"), {"bos_token": "<s>", "eos_token": "</s>"})
    ours, theirs = from_folder(folder), reference(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.encode_part("the") == ours.encode("x the", bos=False)[2:] or ours.decode(ours.encode_part("the")) == "the"


@pytest.mark.parametrize("kind", ["byte_level_folder", "sentencepiece_folder"])
def test_t01_joined_token_bytes_are_the_text_byte_for_byte(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = from_folder(request.getfixturevalue(kind))
    for text in TEXTS:
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode("utf-8")
        opened = " " if kind == "sentencepiece_folder" and text else ""
        assert joined == opened + text.replace("▁", " " if opened else "▁")


@given(st.text(max_size=40))
def test_bytes_of_any_text_come_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == list(text.encode())


def test_text_that_spells_a_control_token_stays_text_unless_asked(byte_level_folder: Path) -> None:
    tokenizer = from_folder(byte_level_folder)
    text = "a<|im_start|>b<|end|>"
    control = set(tokenizer.special_tokens.values())
    assert not control & set(tokenizer.encode(text, bos=False))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    parsed = tokenizer.encode(text, special=True, bos=False)
    assert [at for at in parsed if at in control] == [
        tokenizer.special_tokens["<|im_start|>"],
        tokenizer.special_tokens["<|end|>"],
    ]
    assert tokenizer.decode(parsed) == "ab"


def test_added_tokens_that_are_not_control_tokens_are_text(byte_level_folder: Path) -> None:
    tokenizer = from_folder(byte_level_folder)
    ids = tokenizer.encode("x<tool>y", bos=False)
    assert len(ids) == 3
    assert tokenizer.token_bytes(ids[1]) == b"<tool>"


@pytest.mark.parametrize("explicit", [None, True, False])
@pytest.mark.parametrize("written", [True, False])
def test_t04_raw_text_follows_the_tokenizers_own_rule_with_one_bos(
    explicit: bool | None, written: bool, tmp_path: Path, reference: Callable[[Path], Any]
) -> None:
    settings: dict[str, Any] = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    if explicit is not None:
        settings["add_bos_token"] = explicit
    folder = save_folder(tmp_path, byte_level_tokenizer(bos=written), settings)
    ours = from_folder(folder)
    wants = written  # transformers 5 reads tokenizer.json and nothing else
    assert ours.add_bos is wants
    assert ours.encode("hello") == reference(folder)("hello")["input_ids"]
    assert ours.encode("hello").count(ours.bos_id) == int(wants)
    assert ours.encode("hello", bos=True).count(ours.bos_id) == 1
    assert ours.encode("hello", bos=False).count(ours.bos_id) == 0
    assert ours.encode("<|bos|>hello", special=True).count(ours.bos_id) == 1
    assert ours.encode("<|bos|>hello", special=True, bos=True).count(ours.bos_id) == 1
    assert ours.encode("<|bos|>hello").count(ours.bos_id) == int(wants)


def test_t06_every_declared_end_token_ends(tmp_path: Path) -> None:
    made = byte_level_tokenizer()
    a, b, c = (made.token_to_id(text) for text in ("<|im_end|>", "<|im_start|>", "<|end|>"))
    settings = {"eos_token": {"content": "<|end|>"}}
    for number, ids in enumerate(([a, b], [b, a])):
        folder = save_folder(
            tmp_path / str(number), made, settings, generation_config={"eos_token_id": ids}, config={"eos_token_id": a}
        )
        assert from_folder(folder).eos_ids == {a, b, c}
    folder = save_folder(tmp_path / "few", made, settings, config={"text_config": {"eos_token_id": a}})
    tokenizer = from_folder(folder)
    assert tokenizer.eos_ids == {a, c}
    assert tokenizer.token_bytes(a) == tokenizer.token_bytes(c) == b""


def test_named_tokens_that_only_the_settings_declare_are_control_tokens(
    tmp_path: Path, reference: Callable[[Path], Any]
) -> None:
    settings = {
        "bos_token": "<|bos|>",
        "eos_token": "<|stop|>",
        "added_tokens_decoder": {"9001": {"content": "<|stop|>", "special": True}},
        "additional_special_tokens": ["<|more|>"],
    }
    folder = save_folder(tmp_path, byte_level_tokenizer(), settings)
    ours, theirs = from_folder(folder), reference(folder)
    assert ours.special_tokens["<|stop|>"] == theirs.eos_token_id
    text = "a<|stop|>b<|more|>"
    assert ours.encode(text, special=True) == theirs(text)["input_ids"]


def test_padded_ids_of_the_weights_decode_to_nothing(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, byte_level_tokenizer(), {}, config={"vocab_size": 1000})
    tokenizer = from_folder(folder)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.token_bytes(999) == b""
    for wrong in (-1, 1000):
        with pytest.raises(InvalidRequest, match="out of range"):
            tokenizer.token_bytes(wrong)


def test_half_of_a_surrogate_pair_is_refused_as_a_request(byte_level_folder: Path) -> None:
    for tokenizer in (byte_tokenizer(), from_folder(byte_level_folder)):
        with pytest.raises(InvalidRequest, match="surrogate"):
            tokenizer.encode("ab\ud83d")


def test_invalid_bytes_decode_to_replacement_marks() -> None:
    assert byte_tokenizer().decode([0x61, 0xF0, 0x9F, 0x62]) == "a\ufffdb"


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    with pytest.raises(WeightsError, match=r"tokenizer\.json is damaged"):
        from_folder(tmp_path)
    save_folder(tmp_path, byte_level_tokenizer(), {})
    for name, content in (("tokenizer_config.json", "[1]"), ("generation_config.json", "{,}"), ("config.json", "<html>")):
        before = (tmp_path / name).read_text() if (tmp_path / name).exists() else "{}"
        (tmp_path / name).write_text(content)
        with pytest.raises(WeightsError, match=name):
            from_folder(tmp_path)
        (tmp_path / name).write_text(before)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(WeightsError, match="WordPiece"):
        from_folder(tmp_path)


def test_fingerprints_tell_vocabularies_and_rules_apart(tmp_path: Path, byte_level_folder: Path) -> None:
    prints = {from_folder(byte_level_folder).fingerprint(), byte_tokenizer().fingerprint()}
    same = save_folder(tmp_path, byte_level_tokenizer(bos=True), {"bos_token": "<|im_start|>"})
    prints.add(from_folder(same).fingerprint())
    assert len(prints) == 3
    assert from_folder(byte_level_folder).fingerprint() in prints
    assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in prints)


def test_threads_that_parse_and_threads_that_do_not_never_mix(byte_level_folder: Path) -> None:
    tokenizer = from_folder(byte_level_folder)
    text = "x<|im_start|>" * 50
    wanted = {special: tokenizer.encode(text, special=special) for special in (True, False)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda special: (special, tokenizer.encode(text, special=special)), [True, False] * 200))
    assert all(ids == wanted[special] for special, ids in found)
