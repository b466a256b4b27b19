"""API keys: every route but those marked public asks for one, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send
from pydantic import SecretStr

from astrai_runtime.errors import Unauthorized

PUBLIC = "public"  # the handler option that needs no key


class KeyCheck:
    """ASGI middleware. A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Raises:
        Unauthorized: none was sent, or a wrong one; the application's exception handler gives it the protocol's envelope.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[SecretStr]) -> None:
        self.app = app
        self._digests = [_digest(key.get_secret_value().encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.HTTP and not scope["route_handler"].opt.get(PUBLIC):
            self._check(dict(scope["headers"]))
        await self.app(scope, receive, send)

    def _check(self, headers: dict[bytes, bytes]) -> None:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not given:
            raise Unauthorized("this service asks for an API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        digest = _digest(given)
        # Every key is compared, so that the time says nothing about which one is near.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("the API key is wrong")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
