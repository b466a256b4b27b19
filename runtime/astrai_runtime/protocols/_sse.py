"""Server-sent events as bytes: one complete frame a call, each ended by its blank line.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
from typing import Any

PING = b": ping\n\n"  # a comment, which every reader skips
DONE = b"data: [DONE]\n\n"  # the sentinel that ends an OpenAI stream


def encode(data: Any) -> str:
    """Compact strict JSON: characters as they are, no NaN. Never holds a line break, so it fits one `data:` line."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def frame(data: Any, event: str | None = None) -> bytes:
    """One event. `event` names it; without, clients see the default name `message`."""
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {encode(data)}\n\n".encode()
