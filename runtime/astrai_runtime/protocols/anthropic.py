"""Anthropic Messages: JSON, named events and errors as the official SDKs read them; `astrai` is the seed's dialect."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from astrai_runtime.errors import AstraiError
from astrai_runtime.event import Delta, Event, Failed, Outcome, Usage
from astrai_runtime.part import PartConfig
from astrai_runtime.protocols import _anthropic_request, _errors
from astrai_runtime.protocols._anthropic_request import CountRequest, MessagesRequest, SeedMessagesRequest
from astrai_runtime.protocols._sse import DONE, PING, frame
from astrai_runtime.protocols.base import Completion, Endpoint, Exchange, Lookup, Protocol, Reply, Served

if TYPE_CHECKING:
    from astrai_runtime.agents.base import Agent
    from astrai_runtime.provider.base import ModelInfo


class AnthropicProtocol(Protocol):
    """`dialect: anthropic` is the public API; `dialect: astrai` has the seed's frames and its 422/503 bodies."""

    class Config(PartConfig):
        kind: Literal["anthropic"]
        dialect: Literal["anthropic", "astrai"]
        path: Annotated[str, Field(pattern=r"^/[\w./-]*$")]
        max_tokens: PositiveInt  # tokens of an answer whose request does not say, which only `astrai` allows

    def __init__(self, config: Config) -> None:
        self.config = config
        self._seed = config.dialect == "astrai"

    def endpoints(self) -> Sequence[Endpoint]:
        read = partial(_anthropic_request.read, any_model=self._seed)
        request = SeedMessagesRequest if self._seed else MessagesRequest
        ping = PING if self._seed else _named({"type": "ping"})
        return [Endpoint(self.config.path, request, _new_id, read, self._reply, self._frames, ping)]

    def lookups(self) -> Sequence[Lookup]:
        return [] if self._seed else [Lookup(f"{self.config.path}/count_tokens", CountRequest, _count)]

    def _reply(self, exchange: Exchange, completions: Sequence[Completion]) -> Reply:
        (done,) = completions
        if (error := _errors.error_of(done.outcome)) is not None:
            return self.error(error)
        body = {
            "id": exchange.id,
            "type": "message",
            "role": "assistant",
            "model": self._model(exchange),
            "content": [{"type": "text", "text": done.text}],
            **_ending(exchange, done.outcome),
            "usage": self._usage(exchange, done.outcome.usage),
        }
        return Reply(200, body)

    async def _frames(self, exchange: Exchange, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[bytes]:
        """One message of one text block, in the API's event order; the seed adds `[DONE]` and sends no ping."""
        yield _named({"type": "message_start", "message": self._started(exchange)})
        yield _named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        if not self._seed:
            yield _named({"type": "ping"})
        async for _, event in events:
            if isinstance(event, Delta):
                if event.text:
                    delta = {"type": "text_delta", "text": event.text}
                    yield _named({"type": "content_block_delta", "index": 0, "delta": delta})
                continue
            if (error := _errors.error_of(event)) is not None:
                body = self.signed(self.error(error), exchange.request_id).body
                yield frame(body, "error")
                break
            usage = {"output_tokens": event.usage.completion_tokens} if self._seed else self._usage(exchange, event.usage)
            yield _named({"type": "content_block_stop", "index": 0})
            yield _named({"type": "message_delta", "delta": _ending(exchange, event), "usage": usage})
            yield _named({"type": "message_stop"})
        if self._seed:
            yield DONE

    def _started(self, exchange: Exchange) -> Mapping[str, Any]:
        model = self._model(exchange)
        if self._seed:
            usage = {"input_tokens": exchange.prompt_tokens}
            return {"id": exchange.id, "model": model, "role": "assistant", "content": [], "usage": usage}
        return {
            "id": exchange.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(exchange, Usage()),
        }

    def _usage(self, exchange: Exchange, usage: Usage) -> Mapping[str, int]:
        """What came from the cache is told apart from `input_tokens` when the request asked for caching."""
        prompt = exchange.prompt_tokens or usage.prompt_tokens
        if self._seed:
            return {"input_tokens": prompt, "output_tokens": usage.completion_tokens}
        cached = usage.cached_tokens if exchange.turn.tell_cached else 0
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }

    def _model(self, exchange: Exchange) -> str:
        return exchange.turn.model or ("astrai" if self._seed else exchange.served.model.name)

    # -- errors and models ---------------------------------------------------------------------------------------

    def error(self, error: AstraiError) -> Reply:
        if self._seed:
            return Reply(_errors.seed_status(error), _errors.seed_body(error), _errors.headers(error))
        row = _errors.wire(error)
        body = _envelope(row.anthropic, error.message, error.code, _errors.pointer(error.param))
        return Reply(row.status, body, _errors.headers(error))

    def invalid(self, errors: Sequence[Mapping[str, Any]]) -> Reply:
        if self._seed:
            return Reply(422, {"detail": _errors.detail_of(errors)})
        found = _errors.complain(errors, _anthropic_request.FIELDS)
        return Reply(400, _envelope("invalid_request_error", found.message, found.code, found.param))

    def models(self, served: Sequence[ModelInfo]) -> Mapping[str, Any]:
        data = [
            {
                "type": "model",
                "id": model.name,
                "display_name": model.name,
                "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "lifecycle": "active",
                "max_input_tokens": model.context,
            }
            for model in served
        ]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}

    def signed(self, reply: Reply, request_id: str) -> Reply:
        return reply if self._seed else replace(reply, body={**reply.body, "request_id": request_id})

    def speaks(self, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers


def _count(body: CountRequest, served: Served, agent: Agent) -> Reply:
    """All tokens of the prompt: a real call's `input_tokens` and `cache_read_input_tokens` together."""
    (turn,) = _anthropic_request.read(body, served, any_model=False)
    return Reply(200, {"input_tokens": len(agent.encode(turn))})


def _new_id() -> str:
    return f"msg_{secrets.token_hex(12)}"


def _named(data: Mapping[str, Any]) -> bytes:
    return frame(data, data["type"])


def _envelope(kind: str, message: str, code: str, param: str | None) -> Mapping[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message, "code": code, "param": param}}


def _ending(exchange: Exchange, outcome: Outcome) -> dict[str, str | None]:
    """A stop string of the model card is how this model ends its turn; only the client's own are reported."""
    assert not isinstance(outcome, Failed)
    if outcome.stop_sequence in exchange.turn.limits.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": outcome.stop_sequence}
    return {"stop_reason": "max_tokens" if outcome.reason == "length" else "end_turn", "stop_sequence": None}


PART = AnthropicProtocol
