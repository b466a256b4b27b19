"""The body of POST /v1/messages, and how it becomes a Turn.

API: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping
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
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    # Accepted without effect: they describe the caller, not the answer.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class SeedMessagesRequest(MessagesRequest):
    """The seed's variant: a default token limit, and the wider temperature."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None  # type: ignore[assignment]  # optional, with a default here
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None


FIELDS = {*MessagesRequest.model_fields, *AnthropicMessage.model_fields, *UNSUPPORTED}


def read(body: MessagesRequest, served: Served, *, any_model: bool) -> Turn:
    """The neutral form of a validated body. `any_model`: the name is only echoed, as the seed does.

    Raises:
        InvalidRequest, Unsupported, ModelNotFound: with the field's JSON pointer.
    """
    if not any_model:
        check_model(body.model, served)
    knobs = refuse_fields(body, UNSUPPORTED, served)
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k} | knobs
    messages = [
        Message(message.role, read_text(message.content, f"/messages/{index}/content"))
        for index, message in enumerate(body.messages)
    ]
    if messages[-1].role == "assistant" and len(messages) == 1:
        raise InvalidRequest("an answer to continue needs a user message before it", param="/messages/0/role")
    if body.system is not None:
        messages.insert(0, Message("system", read_text(body.system, "/system")))
    return Turn(
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
    )
