"""The `server` group: where it listens, who may call, and how much it takes."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, SecretStr

from astrai_runtime.part import Config


def _usable(key: SecretStr) -> SecretStr:
    """A header can carry it: not empty, no spaces, no control characters. The message never repeats the key."""
    text = key.get_secret_value()
    if not text or not text.isprintable() or any(character.isspace() for character in text):
        raise ValueError("a key is one word: not empty, without spaces and control characters")
    return key


Key = Annotated[SecretStr, AfterValidator(_usable)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")]


class ServerConfig(Config):
    """HTTP settings."""

    host: str  # loopback unless told otherwise
    port: Annotated[int, Field(ge=0, le=65535)]  # 0: any free one, printed at start
    api_keys: tuple[Key, ...]  # when there is one, every route but /health asks for it
    api_key_file: str | None  # more of them: one a line, `#` starts a comment
    admin_keys: tuple[Key, ...]  # open /metrics and /admin too; without any, those answer only this machine's clients
    allow_open: bool  # true: listen beyond loopback without any key
    cors_origins: tuple[Origin, ...]  # web pages that may call from a browser; * is all
    max_connections: PositiveInt
    max_streams_per_key: PositiveInt  # answers that one key, or one address without keys, may stream at once
    max_head_bytes: Annotated[int, Field(ge=1024)]  # of a request's line and headers
    head_s: PositiveFloat  # seconds in which they must arrive
    max_body_bytes: PositiveInt
    body_s: PositiveFloat  # seconds in which a body must arrive
    max_json_depth: Annotated[int, Field(ge=8, le=500)]  # arrays and objects in each other
    write_timeout_s: PositiveFloat  # a connection whose client takes nothing for so long is closed
    idle_s: PositiveFloat  # how long a connection without a request stays open
    max_choices: PositiveInt  # largest `n` of a request
    drain_s: NonNegativeFloat  # seconds that running requests get after SIGTERM
    stream_bytes: Annotated[int, Field(ge=256)]  # unread output that one stream may hold
    ping_s: NonNegativeFloat  # seconds between keep-alive comments of a silent stream; 0 is off
    workers: PositiveInt  # threads that tokenize and render
    tracing: Literal["none", "otlp"]  # OpenTelemetry spans, one a request

    @property
    def keyed(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)


def is_loopback(address: str) -> bool:
    """Whether an address, or the name localhost, means this machine alone."""
    if address.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
