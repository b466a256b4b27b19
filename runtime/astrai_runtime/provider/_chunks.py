"""From the bytes of an OpenAI-compatible answer, streamed or whole, to events."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping, Sequence
from typing import Any

from astrai_runtime.errors import UpstreamError
from astrai_runtime.event import Delta, Event, Finished, FinishReason, TokenLogprob, Usage
from astrai_runtime.provider._upstream import in_band, parsed

REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
NO_TOKEN = -1  # the id of a token of which only the text is known
LOGPROB_FLOOR = -9999.0
DONE = "[DONE]"
BYTES = "bytes:\\x"


async def frames(pieces: AsyncIterable[bytes], limit: int, url: str) -> AsyncGenerator[str, None]:
    """The data of each server-sent event, joined from its `data:` lines; comments and other fields are skipped.

    Raises:
        UpstreamError: an event is longer than `limit` bytes.
    """
    rest = bytearray()
    data: list[str] = []
    size = 0
    async for piece in pieces:
        rest += piece
        *lines, tail = rest.split(b"\n") if b"\n" in piece else (rest,)
        for line in lines:
            size += len(line)
            if size > limit:
                break
            text = line.rstrip(b"\r").decode("utf-8", errors="replace")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text:
                if data:
                    yield "\n".join(data)
                data, size = [], 0
        rest = tail
        if size + len(rest) > limit:
            raise UpstreamError(f"the service at {url} sent an event larger than provider.max_frame_bytes={limit}")
    if data:
        yield "\n".join(data)


class Reading:
    """What one answer has said so far. `feed` takes its JSON objects; `end` closes it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._reason: str | None = None
        self._stopped_by: str | None = None
        self._usage = Usage()

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """The text of one chunk, or of a whole answer.

        Raises:
            UpstreamError: it is an error, or has another shape than the API's.
        """
        if chunk.get("error"):
            raise in_band(chunk["error"], self._url)
        try:
            self._count(chunk.get("usage"))
            for choice in chunk.get("choices") or ():
                yield from self._choice(choice)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UpstreamError(f"the service at {self._url} sent a chunk of an unknown shape: {error!r}") from error

    def end(self) -> Finished:
        """The outcome.

        Raises:
            UpstreamError: the answer stopped without a finish reason, or with one that means that text is missing.
        """
        if self._reason is None:
            raise UpstreamError(f"the service at {self._url} ended its answer without a finish reason")
        if self._reason not in REASONS:
            raise UpstreamError(f"the service at {self._url} ended its answer for a reason of its own: '{self._reason}'")
        return Finished(REASONS[self._reason], self._usage, self._stopped_by)

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        said = choice.get("delta") or choice.get("message") or {}
        text = str(said.get("content") or said.get("refusal") or choice.get("text") or "")
        text.encode()  # half of a surrogate pair, which JSON can spell, is no text
        logprobs = _logprobs(choice.get("logprobs") or {})
        if text or logprobs:
            yield Delta(text, logprobs)
        if choice.get("finish_reason") is not None:
            self._reason = str(choice["finish_reason"])
            stopped = choice.get("stop_reason")
            self._stopped_by = stopped if isinstance(stopped, str) else None

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._usage = Usage(int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0), int(cached))


async def streamed(pieces: AsyncIterable[bytes], max_frame_bytes: int, url: str) -> AsyncGenerator[Event, None]:
    """The events of a streamed answer.

    Raises:
        UpstreamError: as `frames`, `Reading.feed` and `Reading.end`.
    """
    reading = Reading(url)
    async for data in frames(pieces, max_frame_bytes, url):
        if data.strip() == DONE:
            break
        for event in reading.feed(parsed(data, url)):
            yield event
    yield reading.end()


def _logprobs(found: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities in the chat form (`content`) or the completion form (`tokens`, `token_logprobs`)."""
    if found.get("content"):
        return tuple(_entry(entry) for entry in found["content"])
    tokens: Sequence[str] = found.get("tokens") or ()
    values = found.get("token_logprobs") or ()
    tops = found.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(NO_TOKEN, _spelled(token), _number(value), _ranked(top))
        for token, value, top in zip(tokens, values, tops, strict=True)
    )


def _entry(entry: Mapping[str, Any]) -> TokenLogprob:
    raw = entry.get("bytes")
    data = bytes(raw) if raw is not None else str(entry["token"]).encode()
    top = tuple(_entry(other) for other in entry.get("top_logprobs") or ())
    return TokenLogprob(NO_TOKEN, data, _number(entry["logprob"]), top)


def _ranked(top: Mapping[str, float] | None) -> tuple[TokenLogprob, ...]:
    ranked = sorted((top or {}).items(), key=lambda pair: -pair[1])
    return tuple(TokenLogprob(NO_TOKEN, _spelled(token), _number(value)) for token, value in ranked)


def _spelled(token: str) -> bytes:
    """A token's bytes; the completion form writes what is no whole character as `bytes:\\xe2\\x80`."""
    if token.startswith(BYTES):
        with contextlib.suppress(ValueError):
            return bytes.fromhex(token.removeprefix(BYTES[:-2]).replace("\\x", ""))
    return token.encode()


def _number(value: float | None) -> float:
    return LOGPROB_FLOOR if value is None or not math.isfinite(value) else max(float(value), LOGPROB_FLOOR)
