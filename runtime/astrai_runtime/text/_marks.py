"""Keeps text that spells a control token apart from the control tokens that a template writes.

Such text is replaced by single private-use characters before the template runs, and so are the ends of texts that a
neighbour could complete to a control token. What the template prints is then cut at its real control tokens, and the
characters in between become the original text again, encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

_FIRST, _LAST = 0xF0000, 0xFFFFD  # supplementary private use area A
_EDGES = {"content", "name"}  # of a message: also texts from the middle of a control token are hidden
_NO_SIDES: Mapping[int, tuple[bool, bool]] = MappingProxyType({})
# White space as tokenizers know it (Unicode's White_Space)
_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


class ControlTexts:
    """Finds the texts of control tokens, leftmost and longest first.

    Vocabularies have up to thousands of them, so candidates are looked up by first character and length; an
    alternation of them all would try each one at each place.

    Args:
        special_tokens: text -> id.
        swallows: id -> whether the token takes the white space before and after it, as in `Tokenizer.swallows`.
    """

    def __init__(self, special_tokens: Mapping[str, int], swallows: Mapping[int, tuple[bool, bool]] = _NO_SIDES) -> None:
        self._ids = {text: token_id for text, token_id in special_tokens.items() if text}
        self._swallows = swallows
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._starts = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]") if lengths else None

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, token id) of every occurrence that does not overlap an earlier one."""
        if self._starts is None:
            return
        end = 0
        for match in self._starts.finditer(text):
            start = match.start()
            if start < end:
                continue
            for length in self._lengths[text[start]]:
                token_id = self._ids.get(text[start : start + length])
                if token_id is not None:
                    end = start + length
                    yield start, end, token_id
                    break

    def cut(self, text: str) -> Iterator[int | str]:
        """The text as ids and, between them, what is no control token, without the white space that they swallow."""
        last, after = 0, False
        for start, end, token_id in self.find(text):
            before, follows = self._swallows.get(token_id, (False, False))
            yield _trimmed(text[last:start], left=after, right=before)
            yield token_id
            last, after = end, follows
        yield _trimmed(text[last:], left=after, right=False)

    def open_end(self, text: str) -> str:
        """The longest end of `text` with which a control token begins; white space may follow it."""
        return self._longest(text.rstrip(), self._beginnings, from_end=True)

    def open_start(self, text: str) -> str:
        """The longest beginning of `text` with which a control token ends; white space may precede it."""
        return self._longest(text.lstrip(), self._endings, from_end=False)

    def is_inside(self, text: str) -> bool:
        """Whether a control token holds the whole of `text`."""
        text = text.strip()
        return 0 < len(text) < self._longest_text and any(text in control for control in self._ids)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:at] for text in self._ids for at in range(1, len(text)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(text[at:] for text in self._ids for at in range(1, len(text)))

    @cached_property
    def _longest_text(self) -> int:
        return max(map(len, self._ids), default=0)

    def _longest(self, text: str, parts: frozenset[str], *, from_end: bool) -> str:
        for size in range(min(self._longest_text - 1, len(text)), 0, -1):
            part = text[-size:] if from_end else text[:size]
            if part in parts:
                return part
        return ""


class Marks:
    """The replacements of one conversation.

    A template that cuts a text in its middle and joins the pieces could still make a control token of them.

    Args:
        controls: finds control tokens.
        messages: the conversation.
        others: every further value that the template will see from outside.
        source: the template, whose own private-use characters are not taken.
    """

    def __init__(
        self, controls: ControlTexts, messages: Sequence[Mapping[str, Any]], source: str, others: Sequence[Any] = ()
    ) -> None:
        self._controls = controls
        self._mark_of: dict[str, str] = {}
        texts = [*_strings(list(messages)), *_strings(list(others))]
        hidden = {part for text in texts for part, is_hidden in self._parts(text, whole=False) if is_hidden}
        for message in messages:
            edges = (message[key] for key in _EDGES & message.keys() if isinstance(message[key], str))
            hidden.update(part for text in edges for part, is_hidden in self._parts(text, whole=True) if is_hidden)
        if hidden:
            taken = set(source).union(*texts)
            free = (chr(code) for code in range(_FIRST, _LAST + 1) if chr(code) not in taken)
            self._mark_of = {part: next(free) for part in sorted(hidden)}
        self._restore = str.maketrans({mark: part for part, mark in self._mark_of.items()})

    @property
    def used(self) -> bool:
        return bool(self._mark_of)

    def hide_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation for the template. Roles, of which there are a few known ones, stay what they are."""
        return [
            {
                key: item
                if key == "role"
                else self._hide_text(item, whole=True)
                if key in _EDGES and isinstance(item, str)
                else self.hide(item)
                for key, item in message.items()
            }
            for message in messages
        ]

    def hide(self, value: Any) -> Any:
        """A copy with everything that must not become a control token replaced, at any depth and in keys too."""
        if not self.used:
            return value
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self._hide_text(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def split(self, text: str) -> Iterator[int | str]:
        """Rendered text as the ids of real control tokens and, between them, plain text with the originals restored."""
        for part in self._controls.cut(text):
            yield part if isinstance(part, int) else part.translate(self._restore)

    def _hide_text(self, text: str, *, whole: bool = False) -> str:
        if not self.used:
            return text
        return "".join(self._mark_of[part] if is_hidden else part for part, is_hidden in self._parts(text, whole=whole))

    def _parts(self, text: str, *, whole: bool) -> Iterator[tuple[str, bool]]:
        """`text` in pieces, each with whether it is to be hidden. `whole`: also when a control token holds all of it."""
        controls, last = self._controls, 0
        spelled = list(controls.find(text))
        opening = len(text) - len(text.lstrip())
        if whole and not spelled and controls.is_inside(text):
            closing = len(text.rstrip())
            yield from ((text[:opening], False), (text[opening:closing], True), (text[closing:], False))
            return
        start = controls.open_start(text)
        if start and not (spelled and spelled[0][0] < opening + len(start)):
            last = opening + len(start)
            yield from ((text[:opening], False), (start, True))
        for begin, end, _ in spelled:
            yield text[last:begin], False
            yield text[begin:end], True
            last = end
        rest = text[last:]
        end_part = controls.open_end(rest)
        at = rest.rindex(end_part) if end_part else len(rest)
        yield rest[:at], False
        if end_part:
            yield end_part, True
            yield rest[at + len(end_part) :], False


def _trimmed(text: str, *, left: bool, right: bool) -> str:
    text = text.lstrip(_SPACE) if left else text
    return text.rstrip(_SPACE) if right else text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
