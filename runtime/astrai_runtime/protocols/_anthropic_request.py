"""The body of POST /v1/messages, and how it becomes a Turn.

API: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from astrai_runtime.errors import InvalidRequest
from astrai_runtime.protocols._fields import Body, Content, Strict, check_model, read_stops, read_text, refuse_fields
from astrai_runtime.protocols._sampling import read_sampling
from astrai_runtime.protocols.base import Served
from astrai_runtime.request import Limits, Message, Turn

# Fields of the public API that would change the answer, with the values that ask for nothing (null always does).
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
    "output_config": ({},),
    "output_format": (),
    "inference_geo": (),
    "speed": ("standard",),
    "diagnostics": (),
}


class AnthropicMessage(Strict):
    """One message: text, or text blocks. A last message of role `assistant` is continued."""

    role: Literal["user", "assistant"]
    content: Content


class MessagesRequest(Body):
    """A message request of the public API. Null means "not said"."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Content | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    cache_control: dict[str, Any] | None = None  # caching is automatic; with this, usage tells what came from the cache
    # Accepted without effect: they describe the caller, not the answer.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class CountRequest(MessagesRequest):
    """A message request whose tokens are only counted: it needs no limit."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None  # type: ignore[assignment]  # optional here


class SeedMessagesRequest(MessagesRequest):
    """The seed's variant: a default token limit, and the wider temperature."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None  # type: ignore[assignment]  # optional, with a default here
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None


FIELDS = {*MessagesRequest.model_fields, *AnthropicMessage.model_fields, *UNSUPPORTED}


def read(body: MessagesRequest, served: Served, *, any_model: bool) -> Sequence[Turn]:
    """The neutral form of a validated body, alone in its list. `any_model`: the name is only echoed, as the seed does.

    Raises:
        InvalidRequest, Unsupported, ModelNotFound: with the field's JSON pointer.
    """
    if not any_model:
        check_model(body.model, served)
    knobs = refuse_fields(body, UNSUPPORTED, served)
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k} | knobs
    messages = _merged(body.messages)
    if messages[-1].role == "assistant" and len(messages) == 1:
        raise InvalidRequest("an answer to continue needs a user message before it", param="/messages/0/role")
    if body.system is not None:
        messages.insert(0, Message("system", read_text(body.system, "/system")))
    turn = Turn(
        sampling=read_sampling(given, served),
        limits=Limits(
            max_tokens=body.max_tokens,
            stop=read_stops(body.stop_sequences, "/stop_sequences"),
            default_max_tokens=served.max_tokens,
        ),
        messages=tuple(messages),
        model=body.model,
        stream=bool(body.stream),
        prefill=messages[-1].role == "assistant",
        tell_cached=_asks_for_caching(body),
    )
    return [turn]


def _merged(given: Sequence[AnthropicMessage]) -> list[Message]:
    """Neighbours of one role are one turn, as in the public API; a line break comes between their texts."""
    merged: list[Message] = []
    for index, message in enumerate(given):
        text = read_text(message.content, f"/messages/{index}/content")
        if merged and merged[-1].role == message.role:
            text = f"{merged.pop().content}\n{text}"
        merged.append(Message(message.role, text))
    return merged


def _asks_for_caching(body: MessagesRequest) -> bool:
    """A `cache_control` of the whole request or of any block."""
    contents = [body.system, *(message.content for message in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return body.cache_control is not None or any((block.model_extra or {}).get("cache_control") for block in blocks)
