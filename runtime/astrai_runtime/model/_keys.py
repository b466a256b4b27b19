"""Typed values out of config.json or GGUF metadata; what is missing or odd is an error that names key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astrai_runtime.errors import WeightsError

_REQUIRED: Any = object()


class Keys:
    """Reads one mapping. `prefix` stands before every key (GGUF: "llama."). A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Present, even when null."""
        return self._prefix + key in self._values

    def get(self, key: str) -> Any:
        """The plain value, None when absent."""
        return self._values.get(self._prefix + key)

    def count(self, key: str, default: int = _REQUIRED) -> int:
        """A positive whole number."""
        value = self._or_default(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A positive number."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def word(self, key: str, default: str = _REQUIRED) -> str:
        value = self._or_default(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a word")
        return value

    def refuse(self, key: str, why: str) -> None:
        """Fails if the key is there with a value that switches something on."""
        if self.get(key):
            raise WeightsError(f"the model's configuration says {self._prefix + key}: {self.get(key)!r}, but {why}")

    def wrong(self, key: str, value: Any, expected: str) -> WeightsError:
        return WeightsError(f"the model's configuration says {self._prefix + key}: {value!r}; it must be {expected}")

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise WeightsError(f"the model's configuration lacks {self._prefix + key}")
        return default
