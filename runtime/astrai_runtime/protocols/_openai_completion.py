"""Text completions: the reply, the stream, and log-probabilities in this route's own shape.

API: https://platform.openai.com/docs/api-reference/completions/object
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from astrai_runtime.event import Delta, Event, TokenLogprob, Usage
from astrai_runtime.protocols import _errors
from astrai_runtime.protocols._openai_replies import LOWEST, error_body, reason, usage_body, usages_of
from astrai_runtime.protocols._sse import DONE, frame
from astrai_runtime.protocols.base import Completion, Exchange


def new_id() -> str:
    return f"cmpl-{secrets.token_hex(16)}"


def body(exchange: Exchange, completions: Sequence[Completion]) -> dict[str, Any]:
    """The whole answer. No completion of it failed."""
    choices = [
        {
            "index": done.index,
            "text": exchange.echo(done.index) + done.text,
            "logprobs": LogprobWriter(exchange, done.index).write(done.logprobs),
            "finish_reason": reason(done.outcome),
        }
        for done in completions
    ]
    return {**_head(exchange), "choices": choices, "usage": usage_body(exchange, usages_of(completions))}


async def frames(exchange: Exchange, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[bytes]:
    """Echoes if they were asked for, text, one finish chunk a choice, usage if it was asked for, `[DONE]`."""
    head = _head(exchange)
    tail = {"usage": None} if exchange.turn.include_usage else {}
    writers = [LogprobWriter(exchange, index) for index in range(exchange.n_choices)]

    def chunk(index: int, text: str, logprobs: Any, ended: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ended}
        return frame({**head, "choices": [choice], **tail})

    for index in range(exchange.n_choices):
        if exchange.echo(index):
            yield chunk(index, exchange.echo(index), None, None)
    usages: dict[int, Usage] = {}
    async for index, event in events:
        if isinstance(event, Delta):
            yield chunk(index, event.text, writers[index].write(event.logprobs), None)
            continue
        if (error := _errors.error_of(event)) is not None:
            yield frame(error_body(error))
            yield DONE
            return
        usages[index] = event.usage
        yield chunk(index, "", None, reason(event))
    if exchange.turn.include_usage:
        yield frame({**head, "choices": [], "usage": usage_body(exchange, usages)})
    yield DONE


def _head(exchange: Exchange) -> dict[str, Any]:
    model = exchange.turn.model or exchange.served.model.name
    return {"id": exchange.id, "object": "text_completion", "created": exchange.created, "model": model}


class LogprobWriter:
    """One choice's log-probabilities, piece after piece: offsets are in characters of the choice's text, echo included."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._limit = exchange.turn.top_logprobs
        self._offset = len(exchange.echo(index))
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, records: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """None when nobody asked. The chosen token is always among `top_logprobs`, beside as many as were asked for."""
        if self._limit is None:
            return None
        offsets = []
        for record in records:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(record.data))
        return {
            "tokens": [_spelled(record.data) for record in records],
            "token_logprobs": [max(record.logprob, LOWEST) for record in records],
            "top_logprobs": [_top(record, self._limit) for record in records],
            "text_offset": offsets,
        }


def _top(record: TokenLogprob, limit: int) -> dict[str, float]:
    best: dict[str, float] = {}
    for one in (*record.top[:limit], record):
        best.setdefault(_spelled(one.data), max(one.logprob, LOWEST))
    return best


def _spelled(data: bytes) -> str:
    """A token as text; one that is no whole characters as `bytes:` and its bytes in hexadecimal, like the public API."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
