"""What the decoder shows is the text before the first completed stop string, however tokens cut it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astrai_runtime.errors import InvalidRequest
from astrai_runtime.text._bytes import EOS, byte_tokenizer
from astrai_runtime.text.decoder import TextDecoder
from astrai_runtime.text.tokenizer import Tokenizer


class _Pieces:
    """A vocabulary of given byte strings."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)

    def encode(self, text: str, *, special: bool, start: bool) -> list[int]:
        return [self.pieces.index(text.encode())]

    def spell(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def tokens_of(pieces: Sequence[bytes]) -> Tokenizer:
    return Tokenizer(_Pieces(pieces), bos_id=None, eos_ids=(), special_tokens={}, fingerprint="")


def decoded(
    pieces: Sequence[bytes], stop: Sequence[str] = (), *, trim: bool = False
) -> tuple[bytes, str | None, list[bytes]]:
    """The whole output, what stopped it, and each push."""
    decoder = TextDecoder(tokens_of(pieces), stop, trim_leading_space=trim)
    pushes = [decoder.push(at) for at in range(len(pieces))]
    return b"".join(pushes) + decoder.finish(), decoder.stopped_by, pushes


def by_whole_text(data: bytes, stop: Sequence[str]) -> tuple[bytes, str | None]:
    """The reference: the first end of any stop string, of those the longest."""
    ends = [
        (data.find(word.encode()) + len(word.encode()), -len(word.encode()), word) for word in stop if word.encode() in data
    ]
    if not ends:
        return data, None
    end, _, word = min(ends)
    return data[: end - len(word.encode())], word


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    borders = [0, *sorted({place % (len(data) + 1) for place in at}), len(data)]
    return [data[first:last] for first, last in itertools.pairwise(borders)]


@given(
    st.text("abé", max_size=30),
    st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 100), max_size=12),
    st.booleans(),
)
def test_any_cut_shows_what_the_whole_text_would(text: str, stop: list[str], at: list[int], trim: bool) -> None:
    data = (" " if trim else "").encode() + text.encode()
    shown, stopped, pushes = decoded(cut(data, at), stop, trim=trim)
    assert (shown, stopped) == by_whole_text(text.encode(), stop)
    held = 0
    longest = max((len(word.encode()) for word in stop), default=1)
    for piece, push in zip(cut(data, at), pushes, strict=True):
        held += len(piece) - len(push)
        if stopped is None:
            assert held - int(trim) <= longest - 1


@pytest.mark.parametrize("stop", [["</end>"], ["</end>", "QQ", "é", "</en"], ["ha</end", "a</end>"], ["日本"], ["本"]])
def test_h15_a_stop_string_cut_at_every_byte_never_leaks(stop: list[str]) -> None:
    data = "alpha</end>beta 日本語 done".encode()
    wanted = by_whole_text(data, stop)
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            pieces = [data[:first], data[first:second], data[second:]]
            shown, stopped, _ = decoded(pieces, stop)
            assert (shown, stopped) == wanted


def test_h15_of_a_stop_string_and_its_prefix_the_shorter_completes_first() -> None:
    assert decoded([b"xab", b"cd"], ["abcd", "ab"])[:2] == (b"x", "ab")
    assert decoded([b"x", b"abc"], ["bc", "abc"])[:2] == (b"x", "abc")


def test_after_a_stop_string_nothing_is_shown() -> None:
    decoder = TextDecoder(tokens_of([b"one STOP two", b" three"]), ["STOP"])
    assert decoder.push(0) == b"one "
    assert decoder.stopped_by == "STOP"
    assert decoder.push(1) == b""
    assert decoder.finish() == b""


def test_what_is_held_back_is_shown_at_the_end_once() -> None:
    decoder = TextDecoder(tokens_of([b"wait</e"]), ["</end>"])
    assert decoder.push(0) == b"wait"
    assert decoder.finish() == b"</e"
    assert decoder.finish() == b""
    assert decoder.stopped_by is None


def test_h21_empty_stop_strings_are_refused_and_no_stop_strings_change_nothing() -> None:
    for stop in ([""], ["", "X"]):
        with pytest.raises(InvalidRequest, match="empty"):
            TextDecoder(byte_tokenizer(), stop)
    assert decoded([b"ab", b"c"], [])[0] == b"abc"
    with pytest.raises(InvalidRequest, match="surrogate"):
        TextDecoder(byte_tokenizer(), ["\ud83d"])


def test_only_one_leading_space_of_the_whole_output_is_trimmed() -> None:
    assert decoded([b"", b"  a", b" b"], trim=True)[0] == b" a b"
    assert decoded([b" ", b" b"], trim=True)[0] == b" b"
    assert decoded([b"a", b" b"], trim=True)[0] == b"a b"


def test_t03_characters_cut_by_the_end_are_flushed_as_they_are() -> None:
    emoji = "\U0001f600".encode()
    for count in (1, 2, 3):
        decoder = TextDecoder(byte_tokenizer(), ["stop"])
        shown = b"".join(decoder.push(byte) for byte in emoji[:count]) + decoder.finish()
        assert shown == emoji[:count]
    decoder = TextDecoder(byte_tokenizer(), ["stop"])
    assert b"".join(decoder.push(0x80) for _ in range(200)) == b"\x80" * 200


def test_t01_one_byte_per_token_joins_to_the_text() -> None:
    text = "e\u0301 \u00e9 \u65e5\u672c \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea"
    decoder = TextDecoder(byte_tokenizer(), ["\U0001f1eb"])  # shares its first bytes with the flag
    assert b"".join(map(decoder.push, text.encode())) + decoder.finish() == text.encode()


def test_t03_work_per_token_does_not_grow_with_the_length() -> None:
    """Every state visit is counted; the worst stop strings for a naive search are nearly matched all the time."""
    decoder = TextDecoder(byte_tokenizer(), ["a" * 50 + "b", "a" * 30 + "c"])
    assert decoder._stops is not None
    visits = 0

    class Counted(list[dict[int, int]]):
        def __getitem__(self, at: object) -> dict[int, int]:  # type: ignore[override]
            nonlocal visits
            visits += 1
            return super().__getitem__(at)  # type: ignore[call-overload, no-any-return]

    decoder._stops._next = Counted(decoder._stops._next)
    costs = []
    for _ in range(2000):
        before = visits
        decoder.push(ord("a"))
        costs.append(visits - before)
    assert sum(costs[-100:]) <= 3 * 100
    assert sum(costs) <= 2 * 2000 + 60


def test_control_tokens_show_nothing_and_unknown_ids_are_refused() -> None:
    decoder = TextDecoder(byte_tokenizer())
    assert decoder.push(EOS) == b""
    with pytest.raises(InvalidRequest, match="258"):
        decoder.push(258)
