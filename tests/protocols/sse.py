"""A strict reader of server-sent events, after https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServerEvent:
    event: str
    data: str

    @property
    def json(self) -> Any:
        """The data as strict JSON."""

        def refuse(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        return json.loads(self.data, parse_constant=refuse)


def events(stream: bytes) -> list[ServerEvent]:
    """Every event of a whole stream. Beyond the specification, an event that lacks its blank line is an error."""
    text = stream.decode("utf-8")
    assert "\r" not in text
    assert text.endswith("\n\n"), "the last event lacks its blank line"
    found: list[ServerEvent] = []
    name, data = "", None
    for line in text.split("\n"):
        if line == "":
            if data is not None:
                found.append(ServerEvent(name or "message", data))
            name, data = "", None
            continue
        if line.startswith(":"):
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data = value if data is None else f"{data}\n{value}"
        else:
            raise AssertionError(f"unknown field {field!r}")
    return found
