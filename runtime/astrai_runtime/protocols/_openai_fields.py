"""What chat and text completions have in common: the fields of both bodies, and how they are read.

API: https://platform.openai.com/docs/api-reference/completions/create
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from astrai_runtime.errors import InvalidRequest
from astrai_runtime.protocols._fields import Body, Stops, Strict, check_model, read_stops, refuse_fields
from astrai_runtime.protocols._sampling import read_sampling
from astrai_runtime.protocols.base import Served
from astrai_runtime.request import Limits, SamplingParams, Turn

KNOBS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed",
)  # fmt: skip


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: frames are not padded


class GenerationRequest(Body):
    """The shared fields. Null means "not said": the declared default holds."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None  # extension; 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None  # extension
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None  # extension
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None  # extension
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None  # extension; cached pages are shared under one salt
    user: str | None = None  # accepted without effect: it describes the caller, not the answer


def read_shared(
    body: GenerationRequest,
    served: Served,
    unsupported: Mapping[str, tuple[Any, ...]],
    *,
    any_model: bool,
    max_tokens: int | None,
    default_max_tokens: int,
    n_prompts: int = 1,
) -> Turn:
    """A turn with everything but its prompt. `any_model`: the name is only echoed, as the seed does.

    Raises:
        InvalidRequest, Unsupported, ModelNotFound: with the field's JSON pointer.
    """
    if not any_model:
        check_model(body.model, served)
    knobs = refuse_fields(body, unsupported, served)
    return Turn(
        sampling=_sampling(body, knobs, served),
        limits=Limits(
            max_tokens=max_tokens,
            stop=read_stops(body.stop, "/stop"),
            ignore_eos=bool(body.ignore_eos),
            default_max_tokens=default_max_tokens,
        ),
        model=body.model,
        stream=bool(body.stream),
        n=_n(body, served, n_prompts),
        cache_salt=body.cache_salt or "",
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )


def _sampling(body: GenerationRequest, knobs: Mapping[str, Any], served: Served) -> SamplingParams:
    return read_sampling({name: getattr(body, name) for name in KNOBS} | dict(knobs), served)


def _n(body: GenerationRequest, served: Served, n_prompts: int) -> int:
    n = 1 if body.n is None else body.n
    if n > served.max_choices:
        raise InvalidRequest(f"'n' goes from 1 to {served.max_choices} here, not {n}", param="/n")
    if n * n_prompts > served.max_choices:
        raise InvalidRequest(
            f"one request has at most {served.max_choices} choices here, not {n_prompts} prompts x {n}; "
            "send several requests, or raise server.max_choices",
            param="/prompt",
        )
    return n
