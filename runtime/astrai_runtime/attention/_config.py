"""The `attention` group: which backends may serve, in order of preference."""

from __future__ import annotations

from pydantic import Field

from astrai_runtime.part import Config


class AttentionConfig(Config):
    """`strict`: the first backend must serve every phase, or the plan fails; otherwise the next one that can is used."""

    priority: tuple[str, ...] = Field(min_length=1)
    strict: bool
