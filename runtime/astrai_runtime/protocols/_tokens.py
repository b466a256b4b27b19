"""POST /tokenize and /detokenize: what this deployment makes of a text or a conversation, and of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from astrai_runtime.errors import AstraiError, InvalidRequest
from astrai_runtime.protocols._fields import Strict, check_model
from astrai_runtime.protocols._openai_request import ChatMessage, read_messages
from astrai_runtime.protocols.base import Lookup, Reply, Served
from astrai_runtime.request import Limits, SamplingParams, Turn

if TYPE_CHECKING:
    from astrai_runtime.agents.base import Agent

MAX_CHARS = 1_000_000  # of a text
MAX_IDS = 262_144  # of a list


class TokenizeRequest(Strict):
    """Exactly one of `text` (the tokenizer's own rule) and `messages` (the chat template, ready for an answer)."""

    model: str | None = None
    text: Annotated[str, Field(max_length=MAX_CHARS)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    pieces: bool | None = None  # also each token's text


class DetokenizeRequest(Strict):
    """Token ids whose text is asked for. Control tokens have none."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_IDS)]


def lookups() -> Sequence[Lookup]:
    return [Lookup("/tokenize", TokenizeRequest, tokenize), Lookup("/detokenize", DetokenizeRequest, detokenize)]


def tokenize(body: TokenizeRequest, served: Served, agent: Agent) -> Reply:
    """`tokens`, their `count`, and their `pieces` if asked: a piece that is no whole characters shows U+FFFD.

    Raises:
        InvalidRequest: not exactly one of text and messages, or the chat template refuses them.
    """
    check_model(body.model, served)
    if (body.text is None) == (body.messages is None):
        raise InvalidRequest("send exactly one of 'text' and 'messages'", param="/text")
    messages = read_messages(body.messages or [])
    ids = agent.encode(Turn(SamplingParams(), Limits(), messages=messages, text=body.text))
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids)}
    if body.pieces:
        answer["pieces"] = [piece.decode("utf-8", errors="replace") for piece in agent.spell(ids)]
    return Reply(200, answer)


def detokenize(body: DetokenizeRequest, served: Served, agent: Agent) -> Reply:
    """The `text` of the tokens' joined bytes; what is no valid UTF-8 becomes U+FFFD.

    Raises:
        InvalidRequest: no such token.
    """
    check_model(body.model, served)
    try:
        data = b"".join(agent.spell(body.tokens))
    except AstraiError as error:
        raise InvalidRequest(error.message, param="/tokens") from error
    return Reply(200, {"text": data.decode("utf-8", errors="replace")})
