"""No files at all: a config.json written in YAML, and weights drawn from a seed. For trying things out and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from astrai_runtime.part import PartConfig
from astrai_runtime.sources.base import Located, Progress, Source, silent


class RandomConfig(PartConfig):
    """`config`: what config.json would say; `seed`: of the weights."""

    kind: Literal["random"]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    config: dict[str, Any] = Field(min_length=1)


class RandomSource(Source):
    Config = RandomConfig

    def __init__(self, config: RandomConfig) -> None:
        super().__init__(config)
        self._seed = config.seed

    def locate(self, *, cache: Path, offline: bool, fetch: bool, progress: Progress = silent) -> Located:
        return Located(None, f"random weights, seed {self._seed}")


PART = RandomSource
