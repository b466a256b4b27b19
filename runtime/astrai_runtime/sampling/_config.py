"""The `sampling` group: the stages in their order, and defaults for requests that do not say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from astrai_runtime.part import Config


class SamplingConfig(Config):
    """`pipeline` names stages (files of `sampling/`); the other fields are defaults of request parameters.

    A default must be neutral unless a declared stage obeys it. `seed` null: a fresh one for every request.
    `logprobs_mode`: log-probabilities of the model's own distribution (raw), or of what the stages made of it, from
    which the token was drawn (filtered; removed tokens are at the floor, a greedy token has 0).
    """

    pipeline: tuple[str, ...]
    logprobs_mode: Literal["raw", "filtered"]
    temperature: Annotated[float, Field(ge=0, le=2)]
    top_k: Annotated[int, Field(ge=0)]  # tokens; 0 is off
    top_p: Annotated[float, Field(ge=0, le=1)]
    min_p: Annotated[float, Field(ge=0, le=1)]
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)]
    repetition_penalty: Annotated[float, Field(gt=0, le=10)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None
    extra: dict[str, float]  # knobs of further stages, by name
