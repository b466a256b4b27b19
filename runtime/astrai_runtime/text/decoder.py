"""Token ids to the bytes that may be shown, with stop strings held back and cut out byte by byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from astrai_runtime.errors import InvalidRequest
from astrai_runtime.text.tokenizer import Tokenizer


class TextDecoder:
    """The detokenizer of one generation.

    The first stop string to be completed wins, whatever the tokens' borders; of two that are completed by the same
    byte, the longer one. Nothing of it is returned, and nothing after it. At most `len(longest stop) - 1` bytes are
    held back. What is returned may end inside a UTF-8 character: the stream's reader assembles characters. One token
    costs time proportional to its own bytes (Aho and Corasick 1975).

    Args:
        tokenizer: spells the tokens.
        stop: strings that end the text.
        trim_leading_space: drops one space at the very beginning of the output, before stop strings are looked for.

    Raises:
        InvalidRequest: a stop string is empty or cannot be spelled in UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, trim_leading_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._trim = trim_leading_space
        self._stops = _StopMachine(stop) if stop else None
        self._node = 0  # the machine's state: how much of which stop string the text ends with
        self._held = bytearray()
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> bytes:
        """The bytes that this token makes certain; b"" once a stop string was completed.

        Raises:
            InvalidRequest: no such token id.
        """
        if self.stopped_by is not None:
            return b""
        data = self._tokenizer.token_bytes(token_id)
        if self._trim and data:
            self._trim = False
            data = data.removeprefix(b" ")
        return data if self._stops is None else self._scan(self._stops, data)

    def finish(self) -> bytes:
        """What was held back, once no more tokens will come. Safe to call twice."""
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def _scan(self, stops: _StopMachine, data: bytes) -> bytes:
        node = self._node
        for count, byte in enumerate(data, 1):
            node = stops.step(node, byte)
            found = stops.found[node]
            if found is not None:
                text = bytes(self._held) + data[:count]
                self._held.clear()
                self.stopped_by = found
                return text[: len(text) - len(found.encode("utf-8"))]
        self._node = node
        self._held += data
        certain = len(self._held) - stops.depth[node]
        shown = bytes(self._held[:certain])
        del self._held[:certain]
        return shown


class _StopMachine:
    """A trie of the stop strings' bytes with failure links. Node 0 is the root."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._fail = [0]
        self.depth = [0]  # bytes of a stop string that the text ends with in this state
        self.found: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._add(stop)
        self._link()

    def step(self, node: int, byte: int) -> int:
        """The state after one more byte."""
        while (following := self._next[node].get(byte)) is None:
            if node == 0:
                return 0
            node = self._fail[node]
        return following

    def _add(self, stop: str) -> None:
        if not stop:
            raise InvalidRequest("a stop string must not be empty")
        try:
            data = stop.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the stop string {stop!a} holds half of a surrogate pair") from error
        node = 0
        for byte in data:
            if byte not in self._next[node]:
                self._next[node][byte] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.found.append(None)
            node = self._next[node][byte]
        self.found[node] = stop

    def _link(self) -> None:
        """Breadth first, so that a node's failure link is known before its children's."""
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            if self.found[node] is None:
                self.found[node] = self.found[self._fail[node]]
            for byte, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], byte)
                waiting.append(child)
