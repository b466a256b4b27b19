"""The `server` group: where it listens, who may call, and how much it takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt, SecretStr

from astrai_runtime.part import Config


class ServerConfig(Config):
    """HTTP settings."""

    host: str  # loopback unless told otherwise
    port: Annotated[int, Field(ge=0, le=65535)]  # 0: any free one, printed at start
    api_keys: tuple[SecretStr, ...]  # when given, every route but /health asks for one
    max_body_bytes: PositiveInt
    max_choices: PositiveInt  # largest `n` of a request
    drain_s: NonNegativeFloat  # seconds that running requests get after SIGTERM
    stream_bytes: Annotated[int, Field(ge=256)]  # unread output that one stream may hold
    ping_s: NonNegativeFloat  # seconds between keep-alive comments of a silent stream; 0 is off
    workers: PositiveInt  # threads that tokenize and render
