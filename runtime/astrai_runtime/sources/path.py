"""A model that lies on this disk already: a folder or a .gguf file of the user's own. Never changed, never copied."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Literal

from pydantic import Field

from astrai_runtime.errors import SourceError
from astrai_runtime.part import PartConfig
from astrai_runtime.sources.base import Located, Progress, Source, silent


class PathConfig(PartConfig):
    """`path`: a model folder (config.json, tokenizer.json, *.safetensors) or a .gguf file; `~` is the home folder."""

    kind: Literal["path"]
    path: str = Field(min_length=1)


class PathSource(Source):
    Config = PathConfig

    def __init__(self, config: PathConfig) -> None:
        super().__init__(config)
        self._path = config.path

    def locate(self, *, cache: FilePath, offline: bool, fetch: bool, progress: Progress = silent) -> Located:
        path = FilePath(self._path).expanduser()
        if not path.is_absolute():
            path = FilePath.cwd() / path
        if not path.exists():
            raise SourceError(f"no model at {path}; model.source.path must name a model folder or a .gguf file")
        return Located(path, str(path))


PART = PathSource
