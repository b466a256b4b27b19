"""A name for each request, on every reply (`x-request-id`) and in every log line about it."""

from __future__ import annotations

import secrets
from typing import Any

_KEY = "request_id"


def request_id(scope: Any) -> str:
    """The request's name; made at the first call."""
    name: str = scope["state"].setdefault(_KEY, f"req_{secrets.token_hex(12)}")
    return name


async def add_request_id(message: Any, scope: Any) -> None:
    """A Litestar `before_send` hook. The Anthropic SDK reads `request-id`, the OpenAI SDK `x-request-id`."""
    if message["type"] == "http.response.start" and scope["type"] == "http":
        name = request_id(scope).encode()
        message["headers"] = [*message["headers"], (b"x-request-id", name), (b"request-id", name)]
