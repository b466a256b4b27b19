"""What is wrong with a configuration, all of it at once: where, which key, why, and what would work."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from astrai_runtime.errors import AstraiError

Key = tuple[str | int, ...]  # ("kv", "page_size"); numbers index lists
REDACTED = "**********"
_SECRET = re.compile(r"(api|admin)_?key(?!_file)|secret|password|passwd|credential|token(?!s|_ids?|izer)", re.IGNORECASE)


def dotted(key: Key) -> str:
    """`protocols.openai.path`, `sampling.pipeline[1]`."""
    return ".".join(f"[{part}]" if isinstance(part, int) else part for part in key).replace(".[", "[")


def sounds_secret(key: Key) -> bool:
    """True when a key's name suggests that its value must not be printed."""
    return any(isinstance(part, str) and _SECRET.search(part) for part in key)


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a place in a file, or what was said on the command line or in the environment.

    `raw` is a scalar's text before YAML made a value of it, when it was written without quotes.
    """

    source: str  # a file as people read it, or "command line: kv.page_size=8", or "environment ASTR_BACKEND=cpu"
    line: int = 0  # 0: not a file
    column: int = 0
    raw: str | None = None

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    origin: Origin | None
    key: Key
    message: str

    def __str__(self) -> str:
        said_key = self.origin is not None and self.origin.source.startswith(f"command line: {dotted(self.key)}=")
        parts = [str(self.origin) if self.origin else "", "" if said_key else dotted(self.key), self.message]
        return ": ".join(part for part in parts if part)


class ConfigError(AstraiError):
    """The configuration is not valid; `problems` are all that was found, one line each."""

    code: ClassVar[str] = "invalid_config"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def refusal(message: str, origin: Origin | None = None, key: Key = ()) -> ConfigError:
    """A ConfigError for one problem."""
    return ConfigError([Problem(origin, key, message)])
