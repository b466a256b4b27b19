"""The body of POST /v1/chat/completions, and how it becomes a Turn.

API: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from astrai_runtime.errors import InvalidRequest, Unsupported
from astrai_runtime.protocols._errors import shown
from astrai_runtime.protocols._fields import Content, Strict, read_text
from astrai_runtime.protocols._openai_fields import GenerationRequest, StreamOptions, read_shared
from astrai_runtime.protocols.base import Served
from astrai_runtime.request import Message, Role, Turn

# Fields of the public API that would change the answer, with the values that ask for nothing (null always does).
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
ROLES: Mapping[str, Role] = {"developer": "system"}
_FOR_TEMPLATES = ("name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")


class ChatMessage(Strict):
    """One message. An assistant's content may be null or absent; `annotations` of a replayed answer has no effect."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class ResponseFormat(Strict):
    type: str
    json_schema: Any = None


class ChatRequest(GenerationRequest):
    """A chat request. Null means "not said": the declared default holds."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    # Accepted without effect: they describe the caller, not the answer.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


FIELDS = {*ChatRequest.model_fields, *ChatMessage.model_fields, *StreamOptions.model_fields, *UNSUPPORTED}


def read(body: ChatRequest, served: Served, *, any_model: bool) -> Sequence[Turn]:
    """The neutral form of a validated body, alone in its list.

    Raises:
        InvalidRequest, Unsupported, ModelNotFound: with the field's JSON pointer.
    """
    shared = read_shared(
        body,
        served,
        UNSUPPORTED,
        any_model=any_model,
        max_tokens=_max_tokens(body),
        default_max_tokens=served.max_tokens,
    )
    if body.response_format is not None and body.response_format.type != "text":
        raise Unsupported(
            f"response_format '{shown(body.response_format.type)}' is not supported by this deployment; use 'text'",
            param="/response_format/type",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="/top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    return [dataclasses.replace(shared, messages=read_messages(body.messages), top_logprobs=top)]


def read_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The neutral form of a conversation.

    Raises:
        InvalidRequest, Unsupported: with the JSON pointer of what cannot be read.
    """
    return tuple(_message(message, f"/messages/{index}") for index, message in enumerate(messages))


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) are two names of one limit; send one of them",
            param="/max_completion_tokens",
        )
    return old if new is None else new


def _message(message: ChatMessage, place: str) -> Message:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise Unsupported(f"'{name}' in a message is not supported by this deployment", param=f"{place}/{name}")
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"a message of role '{message.role}' needs a content", param=f"{place}/content")
    extra = {name: getattr(message, name) for name in _FOR_TEMPLATES if getattr(message, name) not in (None, [])}
    role: Role = ROLES.get(message.role, message.role)  # type: ignore[arg-type]  # a Literal minus 'developer' is a Role
    return Message(role, read_text(message.content, f"{place}/content"), extra)
