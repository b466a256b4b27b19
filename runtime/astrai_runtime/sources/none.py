"""No files and no weights: the provider has the model, in this process (mock) or elsewhere (remote)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from astrai_runtime.errors import SourceError
from astrai_runtime.part import PartConfig
from astrai_runtime.sources.base import Located, Progress, Source, silent


class NoneConfig(PartConfig):
    kind: Literal["none"]


class NoSource(Source):
    """Refuses whoever needs files after all."""

    Config = NoneConfig

    def __init__(self, config: NoneConfig) -> None:
        super().__init__(config)

    def locate(self, *, cache: Path, offline: bool, fetch: bool, progress: Progress = silent) -> Located:
        raise SourceError(
            "this model has no files (model.source.kind=none), and provider=local computes with a model's own; choose "
            "provider=mock or provider=remote, or a model with files"
        )


PART = NoSource
