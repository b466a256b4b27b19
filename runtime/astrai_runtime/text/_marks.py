"""Keeps text that spells a control token apart from the control tokens that a template writes.

Such text is replaced by single private-use characters before the template runs. What the template prints is then cut
at its real control tokens, and the characters in between become the original text again, encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_FIRST, _LAST = 0xF0000, 0xFFFFD  # supplementary private use area A


class ControlTexts:
    """Finds the texts of control tokens, leftmost and longest first.

    Vocabularies have up to thousands of them, so candidates are looked up by first character and length; an
    alternation of them all would try each one at each place.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in special_tokens.items() if text}
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


class Marks:
    """The replacements of one conversation.

    Args:
        controls: finds control tokens.
        messages: every text that the template will see from outside.
        source: the template, whose own private-use characters are not taken.
    """

    def __init__(self, controls: ControlTexts, messages: list[dict[str, Any]], source: str) -> None:
        self._controls = controls
        texts = list(_strings(messages))
        spelled = {text[start:end] for text in texts for start, end, _ in controls.find(text)}
        self._mark_of: dict[str, str] = {}
        if spelled:
            taken = set(source).union(*texts)
            free = (chr(code) for code in range(_FIRST, _LAST + 1) if chr(code) not in taken)
            self._mark_of = {token: next(free) for token in sorted(spelled)}
        self._restore = str.maketrans({mark: token for token, mark in self._mark_of.items()})

    @property
    def used(self) -> bool:
        return bool(self._mark_of)

    def hide(self, value: Any) -> Any:
        """A copy with every spelled control token replaced, at any depth and in keys too."""
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
        last = 0
        for start, end, token_id in self._controls.find(text):
            yield text[last:start].translate(self._restore)
            yield token_id
            last = end
        yield text[last:].translate(self._restore)

    def _hide_text(self, text: str) -> str:
        parts, last = [], 0
        for start, end, _ in self._controls.find(text):
            parts += [text[last:start], self._mark_of[text[start:end]]]
            last = end
        return "".join([*parts, text[last:]])


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
