"""A request's body: read up to a bound and within a time, then parsed as strict JSON of bounded depth."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from astrai_runtime.errors import CapacityExceeded, DeadlineExpired, InvalidRequest

Receive = Callable[[], Awaitable[Any]]
# A client that is still sending does not read: what it sends too much is thrown away up to here, so that it sees the answer.
DISCARD_BYTES = 16 * 1024 * 1024


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


class InvalidJson(InvalidRequest):
    code = "json_invalid"


async def read_body(receive: Receive, limit: int, announced: int | None, within_s: float) -> bytes:
    """The whole body, within so many seconds. `announced` is its Content-Length, if there is one.

    Raises:
        CapacityExceeded: more than `limit` bytes. DeadlineExpired: it took too long. ClientGone.
    """
    too_large = CapacityExceeded(f"the body holds more than {limit} bytes; raise server.max_body_bytes or send less")
    if announced is not None and announced > limit + DISCARD_BYTES:
        raise too_large
    data = bytearray()
    size = 0
    try:
        async with asyncio.timeout(within_s):
            more = True
            while more and size <= limit + DISCARD_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                size += len(piece)
                if size <= limit:
                    data += piece
                more = message.get("more_body", False)
    except TimeoutError:
        raise DeadlineExpired(f"the body did not arrive within {within_s:g} seconds") from None
    if size > limit:
        raise too_large
    return bytes(data)


def parse(body: bytes, max_depth: int) -> Any:
    """The body as JSON: UTF-8, no NaN or Infinity, no number beyond a double, at most `max_depth` levels deep.

    Raises:
        InvalidJson: what is wrong, and where.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate is no text
    except RecursionError:
        raise InvalidJson(f"the JSON is nested more than {max_depth} levels deep") from None
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is no UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise InvalidJson("the JSON holds half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise InvalidJson(f"the body is no JSON: {error}") from None
    _check_depth(value, max_depth)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:30]} is too large")
    return number


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth):
        level = [
            child
            for holder in level
            if isinstance(holder, list | dict)
            for child in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(child, list | dict)
        ]
        if not level:
            return
    raise InvalidJson(f"the JSON is nested more than {max_depth} levels deep")
