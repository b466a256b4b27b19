"""The values in a GGUF header: a cursor over its bytes, and long arrays that are decoded when first looked at."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._pieces import Pieces

MAX_TEXT = 16 * 2**20  # bytes of one string; chat templates have some 10 kB
MAX_STRINGS = 4_000_000  # strings in one array; vocabularies have up to some 300 000
MAX_NESTING = 4  # arrays in arrays
LONG = 256  # elements from which an array is lazy

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TEXT, _ARRAY = 8, 9
# Number of a value type -> struct format of one value.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class LazyArray(Sequence[Any]):
    """An array of numbers or strings in the file. Decoded as a whole, once, when an element is first asked for."""

    def __init__(self, file: Pieces, key: str, kind: int, count: int, start: int, stop: int) -> None:
        self._file, self._key, self._kind, self._count = file, key, kind, count
        self._start, self._stop = start, stop
        self._values: Sequence[Any] | None = None

    def _decoded(self) -> Sequence[Any]:
        if self._values is None:
            with self._file.view(self._start, self._stop) as raw:
                self._values = self._strings(raw) if self._kind == _TEXT else self._numbers(raw)
        return self._values

    def _numbers(self, raw: memoryview) -> Sequence[Any]:
        return struct.unpack(f"<{self._count}{_NUMBERS[self._kind]}", raw)

    def _strings(self, raw: memoryview) -> Sequence[Any]:
        data = bytes(raw)
        at, values, length_at = 0, [], _U64.unpack_from
        try:
            for _ in range(self._count):
                begin = at + 8
                at = begin + length_at(data, at)[0]
                values.append(data[begin:at].decode())
        except UnicodeDecodeError as error:
            raise WeightsError(
                f"{self._file.paths[0]}: element {len(values)} of '{self._key}' is not UTF-8; the file is damaged"
            ) from error
        return values

    def packed_texts(self) -> bytes:
        """Strings as the file holds them: of each its length (8 bytes, little-endian) and its UTF-8, unchecked.

        Raises:
            WeightsError: the array holds numbers.
        """
        if self._kind != _TEXT:
            raise WeightsError(f"{self._file.paths[0]}: '{self._key}' must be a list of texts; it holds numbers")
        with self._file.view(self._start, self._stop) as raw:
            return bytes(raw)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._decoded())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # a sequence compared by value, like a list

    def __repr__(self) -> str:
        return f"<{self._count} values of '{self._key}'>"


class Cursor:
    """Reads forward through the header, which lies in the first piece. Every length is checked before it is used."""

    def __init__(self, file: Pieces) -> None:
        self.file, self.path = file, file.paths[0]
        self.at = 0
        self._buffer = file.maps[0]
        self._size = len(self._buffer)

    def error(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: {what}")

    def peek(self, n: int) -> bytes:
        return self._buffer[self.at : self.at + n]

    def _skip(self, n: int, what: str) -> int:
        """Moves over `n` bytes and returns where they begin."""
        begin = self.at
        if n > self._size - begin:
            raise self.error(
                f"the header is cut off or damaged: {what} would need {n} bytes at byte {begin} of {self._size}"
            )
        self.at = begin + n
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self._buffer, self._skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self._buffer, self._skip(8, what))[0])

    def text(self, what: str, limit: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.error(f"{what} would be {length} bytes long, more than {limit}; the file is damaged")
        begin = self._skip(length, what)
        try:
            return self._buffer[begin : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8; the file is damaged") from error

    def name(self, what: str, limit: int) -> str:
        """A text that is not empty and can stand in an error message of one line."""
        name = self.text(what, limit)
        if not name or not name.isprintable():
            raise self.error(f"{what} is {name!r:.80}; the header is damaged")
        return name

    def value(self, key: str) -> Any:
        """The value of a metadata key: number, bool, string, list, or LazyArray."""
        return self._value(key, self.u32(f"the type of '{key}'"), 0)

    def _value(self, key: str, kind: int, depth: int) -> Any:
        if kind == _TEXT:
            return self.text(f"the value of '{key}'", MAX_TEXT)
        if kind == _ARRAY:
            return self._array(key, depth + 1)
        if kind not in _NUMBERS:
            raise self.error(f"the value of '{key}' has the unknown type number {kind}")
        code = "<" + _NUMBERS[kind]
        return struct.unpack_from(code, self._buffer, self._skip(struct.calcsize(code), f"the value of '{key}'"))[0]

    def _array(self, key: str, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise self.error(f"the value of '{key}' is nested deeper than {MAX_NESTING} arrays")
        kind, count = self.u32(f"the element type of '{key}'"), self.u64(f"the length of '{key}'")
        what = f"the {count} elements of '{key}'"
        if kind in _NUMBERS:
            begin = self._skip(count * struct.calcsize("<" + _NUMBERS[kind]), what)
        elif kind == _TEXT:
            begin = self._strings(count, what)
        elif kind == _ARRAY:
            if count > LONG:
                raise self.error(f"'{key}' would hold {count} arrays, more than {LONG}; the file is damaged")
            return [self._array(key, depth + 1) for _ in range(count)]
        else:
            raise self.error(f"the elements of '{key}' have the unknown type number {kind}")
        array = LazyArray(self.file, key, kind, count, begin, self.at)
        return array if count >= LONG else list(array)

    def _strings(self, count: int, what: str) -> int:
        """Steps over `count` strings without making any, and returns where the first one begins."""
        if count > MAX_STRINGS or count * 8 > self._size - self.at:
            raise self.error(f"{what} cannot fit into the file; it is cut off or damaged")
        begin = at = self.at
        buffer, length_at = self._buffer, _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + length_at(buffer, at)[0]
        except (struct.error, OverflowError) as error:
            raise self.error(f"{what} run past the end of the file; it is cut off or damaged") from error
        self._skip(at - begin, what)
        return begin
