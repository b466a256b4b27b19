"""The body of POST /v1/completions, and how each of its prompts becomes a Turn.

API: https://platform.openai.com/docs/api-reference/completions/create
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from astrai_runtime.errors import InvalidRequest, Unsupported
from astrai_runtime.protocols._openai_fields import GenerationRequest, StreamOptions, read_shared
from astrai_runtime.protocols.base import Served
from astrai_runtime.request import Turn

MAX_TOKENS = 16  # the public API's answer length when a request does not say

# Fields of the public API that would change the answer, with the values that ask for nothing (null always does).
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"suffix": ("",)}


def _kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "(text)"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else ""
    return "(lists)" if isinstance(first, list) else "(ids)" if isinstance(first, int) else "(texts)"


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[str], Field(min_length=1), Tag("(texts)")]
    | Annotated[Ids, Tag("(ids)")]
    | Annotated[list[Ids], Field(min_length=1), Tag("(lists)")],
    Discriminator(
        _kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of strings, a list of token ids or a list of such lists",
    ),
]


class CompletionRequest(GenerationRequest):
    """A text completion request. Null means "not said": the declared default holds."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


FIELDS = {*CompletionRequest.model_fields, *StreamOptions.model_fields, *UNSUPPORTED}


def read(body: CompletionRequest, served: Served) -> Sequence[Turn]:
    """One turn for each prompt.

    Raises:
        InvalidRequest, Unsupported, ModelNotFound: with the field's JSON pointer.
    """
    prompts = _prompts(body.prompt)
    shared = read_shared(
        body,
        served,
        UNSUPPORTED,
        any_model=False,
        max_tokens=body.max_tokens,
        default_max_tokens=MAX_TOKENS,
        n_prompts=len(prompts),
    )
    if body.best_of is not None and body.best_of != shared.n:
        raise Unsupported(
            f"'best_of' ({body.best_of}) other than 'n' ({shared.n}) is not supported by this deployment; leave it out",
            param="/best_of",
        )
    if body.echo and body.logprobs is not None:
        raise Unsupported(
            "'echo' with 'logprobs' is not supported by this deployment: a prompt's tokens have no log-probabilities here",
            param="/logprobs",
        )
    shared = dataclasses.replace(shared, top_logprobs=body.logprobs, echo=bool(body.echo))
    for index, prompt in enumerate(prompts):
        _check_ids(prompt, served, "/prompt" if len(prompts) == 1 else f"/prompt/{index}")
    return [
        dataclasses.replace(shared, text=prompt)
        if isinstance(prompt, str)
        else dataclasses.replace(shared, token_ids=tuple(prompt))
        for prompt in prompts
    ]


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    ids = [one for one in given if isinstance(one, int)]
    return [ids] if ids else [one for one in given if not isinstance(one, int)]


def _check_ids(prompt: str | list[int], served: Served, place: str) -> None:
    size = served.model.vocab_size  # 0: nobody knows it here
    wrong = [] if isinstance(prompt, str) or not size else [token for token in prompt if token >= size]
    if wrong:
        raise InvalidRequest(f"token {wrong[0]} does not exist; this model's tokens are 0 to {size - 1}", param=place)
