"""A name for each request, on every reply (`x-request-id`) and in every log line about it."""

from __future__ import annotations

import secrets
from typing import Any

_KEY = "request_id"


def request_id(scope: Any) -> str:
    """The request's name; made at the first call. The Anthropic SDK reads `request-id`, the OpenAI SDK `x-request-id`."""
    name: str = scope["state"].setdefault(_KEY, f"req_{secrets.token_hex(12)}")
    return name
