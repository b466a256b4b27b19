"""One OpenAI-compatible service over HTTP: its address, its key, bounded answers, and what its errors mean to callers."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from astrai_runtime.errors import (
    AstraiError,
    Busy,
    CapacityExceeded,
    ContextLengthExceeded,
    InvalidRequest,
    UpstreamError,
    UpstreamTimeout,
)

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
TIMED_OUT = frozenset({408, 504})
ABSENT = frozenset({404, 405, 501})  # what a service says of a route that it does not have
MAX_ERROR_BYTES = 64 * 1024
SHOWN = 300  # characters of its message that an error repeats


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where it is and how long it may take. `headers` carry the key: they are in no log and in no error."""

    url: str  # ends without a slash; the API's routes lie below it
    headers: Mapping[str, str]
    timeout: httpx.Timeout
    tls: ssl.SSLContext  # made once: reading the root certificates takes longer than a request

    def options(self) -> dict[str, Any]:
        """Arguments of an httpx client that goes nowhere but to this service.

        No redirects, and nothing from the environment: a proxy or a .netrc that was not declared is not used.
        """
        plain = {"accept-encoding": "identity", **self.headers}
        bounds = {"timeout": self.timeout, "follow_redirects": False, "trust_env": False}
        return {"headers": plain, "verify": self.tls, **bounds}


class TooLongForUpstream(ContextLengthExceeded):
    """The other service counted the tokens; its own words say how many."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        AstraiError.__init__(self, message, param=param)
        self.needed = self.limit = 0


def refusal(status: int, body: bytes, headers: Mapping[str, str], url: str) -> AstraiError:
    """What an answer other than 2xx means here. A refused key is this deployment's fault, not the caller's."""
    said, code, param = _said(body)
    told = f"the service at {url} answered {status}{f': {said}' if said else ''}"
    match status:
        case 400 | 422 if code == "context_length_exceeded":
            return TooLongForUpstream(said or told, param=param)
        case 400 | 422:
            return InvalidRequest(said or told, param=param)
        case 401 | 403:
            return UpstreamError(f"{told}; check provider.api_key, the key that this deployment shows it")
        case 413:
            return CapacityExceeded(told)
        case 429 | 503:
            return Busy(told, retry_after_s=retry_after(headers, 1.0))
        case 408 | 504:
            return UpstreamTimeout(told)
        case 301 | 302 | 303 | 307 | 308:
            return UpstreamError(f"{told}; it points elsewhere, and only the declared provider.url is contacted")
    return UpstreamError(told)


def failure(error: httpx.HTTPError, url: str) -> AstraiError:
    """What a connection's end means here."""
    if isinstance(error, httpx.TimeoutException):
        what = "connect" if isinstance(error, httpx.ConnectTimeout) else "go on"
        return UpstreamTimeout(f"the service at {url} did not {what} in time")
    if isinstance(error, httpx.ConnectError):
        return UpstreamError(f"the service at {url} cannot be reached: {error}")
    return UpstreamError(f"the connection to the service at {url} broke: {error or type(error).__name__}")


def in_band(error: Any, url: str) -> AstraiError:
    """An error that arrives inside an answer that began well."""
    said, code, _ = _said(json.dumps({"error": error}).encode())
    told = f"the service at {url} gave up: {said or 'it did not say why'}"
    if code in {"deadline_expired", "upstream_timeout"}:
        return UpstreamTimeout(told)
    return UpstreamError(told)


def retry_after(headers: Mapping[str, str], default: float) -> float:
    """Seconds that an answer asks us to wait; dates are not read."""
    text = headers.get("retry-after", "")
    return min(float(text), 3600.0) if text.isascii() and text.isdigit() else default


def bounded(response: httpx.Response, limit: int, url: str) -> Generator[bytes, None, None]:
    """The body in pieces. Raises UpstreamError once it is longer than `limit`: it is never cut in silence."""
    _plain(response, url)
    left = limit
    for piece in response.iter_raw():
        left -= len(piece)
        if left < 0:
            raise oversize(limit, url)
        yield piece


async def bounded_async(response: httpx.Response, limit: int, url: str) -> AsyncGenerator[bytes, None]:
    """`bounded` for an event loop."""
    _plain(response, url)
    left = limit
    async for piece in response.aiter_raw():
        left -= len(piece)
        if left < 0:
            raise oversize(limit, url)
        yield piece


def oversize(limit: int, url: str) -> UpstreamError:
    return UpstreamError(f"the answer of the service at {url} is larger than provider.max_response_bytes={limit}")


def parsed(body: bytes | str, url: str) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        UpstreamError: it is none.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UpstreamError(f"the service at {url} answered with something that is no JSON object")
    return found


def _plain(response: httpx.Response, url: str) -> None:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":  # a few kilobytes could unpack to gigabytes
        raise UpstreamError(f"the service at {url} sent '{encoding}' although it was asked for plain bytes")


def _said(body: bytes) -> tuple[str, str | None, str | None]:
    """An error's message, code and parameter, in the envelopes that services use; the message is shortened."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", errors="replace").strip()[:SHOWN], None, None
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return str(error)[:SHOWN], None, None
    message = error.get("message") or error.get("detail") or ""
    code, param = error.get("code"), error.get("param")
    return str(message)[:SHOWN], code if isinstance(code, str) else None, param if isinstance(param, str) else None
