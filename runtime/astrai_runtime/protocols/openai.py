"""OpenAI chat and text completions: JSON, chunks and errors as the SDKs read them; `astrai` is the seed's dialect."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from astrai_runtime.errors import AstraiError
from astrai_runtime.event import Delta, Event, TokenLogprob, Usage
from astrai_runtime.part import PartConfig
from astrai_runtime.protocols import _errors, _openai_completion, _openai_completion_request, _openai_request
from astrai_runtime.protocols._openai_completion_request import CompletionRequest
from astrai_runtime.protocols._openai_replies import (
    LOWEST,
    counts,
    error_body,
    first_error,
    reason,
    usage_body,
    usages_of,
)
from astrai_runtime.protocols._openai_request import ChatRequest
from astrai_runtime.protocols._sse import DONE, frame
from astrai_runtime.protocols.base import Completion, Endpoint, Exchange, Protocol, Reply

if TYPE_CHECKING:
    from astrai_runtime.provider.base import ModelInfo

FIELDS = _openai_request.FIELDS | _openai_completion_request.FIELDS


class OpenAIProtocol(Protocol):
    """`dialect: openai` is the public API; `dialect: astrai` has the seed's frames and its 422/503 bodies."""

    class Config(PartConfig):
        kind: Literal["openai"]
        dialect: Literal["openai", "astrai"]
        path: Annotated[str, Field(pattern=r"^/[\w./-]*$")]
        completions_path: Annotated[str, Field(pattern=r"^/[\w./-]*$")]  # the seed has no such route
        max_tokens: PositiveInt  # tokens of an answer whose request does not say

    def __init__(self, config: Config) -> None:
        self.config = config
        self._seed = config.dialect == "astrai"

    def endpoints(self) -> Sequence[Endpoint]:
        read = partial(_openai_request.read, any_model=self._seed)
        frames = self._seed_frames if self._seed else self._frames
        reply = self._seed_reply if self._seed else self._reply
        chat = Endpoint(self.config.path, ChatRequest, _new_id, read, reply, frames)
        if self._seed:
            return [chat]
        text = Endpoint(
            self.config.completions_path,
            CompletionRequest,
            _openai_completion.new_id,
            _openai_completion_request.read,
            self._text_reply,
            _openai_completion.frames,
        )
        return [chat, text]

    # -- one body ------------------------------------------------------------------------------------------------

    def _reply(self, exchange: Exchange, completions: Sequence[Completion]) -> Reply:
        if (error := first_error(completions)) is not None:
            return self.error(error)
        choices = [
            {
                "index": done.index,
                "message": {"role": "assistant", "content": done.text, "refusal": None},
                "logprobs": _logprobs(exchange, done.logprobs),
                "finish_reason": reason(done.outcome),
            }
            for done in completions
        ]
        usage = usage_body(exchange, usages_of(completions))
        return Reply(200, {**self._envelope(exchange, "chat.completion"), "choices": choices, "usage": usage})

    def _text_reply(self, exchange: Exchange, completions: Sequence[Completion]) -> Reply:
        if (error := first_error(completions)) is not None:
            return self.error(error)
        return Reply(200, _openai_completion.body(exchange, completions))

    def _seed_reply(self, exchange: Exchange, completions: Sequence[Completion]) -> Reply:
        if (error := first_error(completions)) is not None:
            return self.error(error)
        choices = [
            {
                "index": done.index,
                "message": {"role": "assistant", "content": done.text},
                **_said_logprobs(exchange, done.logprobs),
                "finish_reason": reason(done.outcome),
            }
            for done in completions
        ]
        usage = counts(exchange, usages_of(completions))
        return Reply(200, {**self._envelope(exchange, "chat.completion"), "choices": choices, "usage": usage})

    # -- streams -------------------------------------------------------------------------------------------------

    async def _frames(self, exchange: Exchange, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[bytes]:
        """A role chunk for each choice, text, one finish chunk for each, usage if it was asked for, `[DONE]`."""
        head = self._envelope(exchange, "chat.completion.chunk")
        tail = {"usage": None} if exchange.turn.include_usage else {}

        def chunk(index: int, delta: Mapping[str, Any], logprobs: Any, reason: str | None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return frame({**head, "choices": [choice], **tail})

        for index in range(exchange.n_choices):
            yield chunk(index, {"role": "assistant", "content": ""}, None, None)
        usages: dict[int, Usage] = {}
        async for index, event in events:
            if isinstance(event, Delta):
                yield chunk(index, {"content": event.text}, _logprobs(exchange, event.logprobs), None)
                continue
            if (error := _errors.error_of(event)) is not None:
                yield frame(error_body(error))
                yield DONE
                return
            usages[index] = event.usage
            yield chunk(index, {}, None, reason(event))
        if exchange.turn.include_usage:
            yield frame({**head, "choices": [], "usage": usage_body(exchange, usages)})
        yield DONE

    async def _seed_frames(self, exchange: Exchange, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[bytes]:
        """The seed's frames: text chunks carry `created` 0, a bare usage object comes before `[DONE]`."""
        head = self._envelope(exchange, "chat.completion.chunk")

        def chunk(index: int, delta: Mapping[str, Any], reason: str | None, created: int, logprobs: Any = None) -> bytes:
            more = {} if logprobs is None else {"logprobs": logprobs}
            choice = {"index": index, "delta": delta, **more, "finish_reason": reason}
            return frame({**head, "created": created, "choices": [choice]})

        for index in range(exchange.n_choices):
            yield chunk(index, {"role": "assistant"}, None, exchange.created)
        usages: dict[int, Usage] = {}
        async for index, event in events:
            if isinstance(event, Delta):
                yield chunk(index, {"content": event.text}, None, 0, _logprobs(exchange, event.logprobs))
                continue
            if (error := _errors.error_of(event)) is not None:
                yield frame(_errors.seed_body(error))
                yield DONE
                return
            usages[index] = event.usage
            yield chunk(index, {}, reason(event), exchange.created)
        yield frame(counts(exchange, usages))
        yield DONE

    def _envelope(self, exchange: Exchange, kind: str) -> dict[str, Any]:
        fallback = "astrai" if self._seed else exchange.served.model.name
        model = exchange.turn.model or fallback
        return {"id": exchange.id, "object": kind, "created": exchange.created, "model": model}

    # -- errors and models ---------------------------------------------------------------------------------------

    def error(self, error: AstraiError) -> Reply:
        if self._seed:
            return Reply(_errors.seed_status(error), _errors.seed_body(error), _errors.headers(error))
        return Reply(_errors.wire(error).status, error_body(error), _errors.headers(error))

    def invalid(self, errors: Sequence[Mapping[str, Any]]) -> Reply:
        if self._seed:
            return Reply(422, {"detail": _errors.detail_of(errors)})
        found = _errors.complain(errors, FIELDS)
        kind = "invalid_request_error"
        return Reply(400, {"error": {"message": found.message, "type": kind, "param": found.param, "code": found.code}})

    def models(self, served: Sequence[ModelInfo]) -> Mapping[str, Any]:
        data = [{"id": m.name, "object": "model", "created": m.created, "owned_by": "astrai-deploy"} for m in served]
        return {"object": "list", "data": data}


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(16)}"


def _entry(record: TokenLogprob) -> dict[str, Any]:
    token = record.data.decode("utf-8", errors="replace")
    return {"token": token, "logprob": max(record.logprob, LOWEST), "bytes": list(record.data)}


def _logprobs(exchange: Exchange, records: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if exchange.turn.top_logprobs is None:
        return None
    limit = exchange.turn.top_logprobs
    content = [{**_entry(record), "top_logprobs": [_entry(top) for top in record.top[:limit]]} for record in records]
    return {"content": content, "refusal": None}


def _said_logprobs(exchange: Exchange, records: Sequence[TokenLogprob]) -> dict[str, Any]:
    logprobs = _logprobs(exchange, records)
    return {} if logprobs is None else {"logprobs": logprobs}


PART = OpenAIProtocol
