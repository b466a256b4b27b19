"""Who may call a route: /health anyone, the others whoever has a key, admin routes whoever has an admin key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from astrai_runtime.errors import Forbidden, Unauthorized
from astrai_runtime.server._keys import Caller, Keyring
from astrai_runtime.server._record import Record, record_of
from astrai_runtime.server.config import is_loopback

PUBLIC = "public"  # the handler option that needs no key
ADMIN = "admin"  # the handler option that needs an admin key or, where none is declared, a client on this machine
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")


class KeyCheck:
    """ASGI middleware. A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Admin keys open every route.

    Raises:
        Unauthorized: no key was sent, or a wrong one. Forbidden: the key, or the place it came from, opens other routes
            but not this one. The application's exception handler gives both the protocol's envelope.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, origins: Collection[str]) -> None:
        self.app = app
        self._keys, self._origins = keys, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.HTTP:
            options = scope["route_handler"].opt
            self._check_page(scope)
            if not options.get(PUBLIC):
                self._check(scope, dict(scope["headers"]), record_of(scope), admin=bool(options.get(ADMIN)))
        await self.app(scope, receive, send)

    def _check_page(self, scope: Any) -> None:
        """Without keys, any web page could make a browser on this machine post to it: unread, but computed."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or self._keys.asks or scope["method"] in SAFE_METHODS:
            return
        own = origin.partition("://")[2] == headers.get(b"host", b"").decode("latin-1") and not _rebound(headers)
        if not (own or origin in self._origins or "*" in self._origins):
            raise Forbidden("web pages of other origins may not call this service; list them in server.cors_origins")

    def _check(self, scope: Scope, headers: dict[bytes, bytes], record: Record, *, admin: bool) -> None:
        needed = self._keys.asks or (admin and self._keys.asks_admins)
        caller = self._caller(headers, needed=needed)
        record.key = caller.id
        if not admin or caller.admin:
            return
        if self._keys.asks_admins:
            raise Forbidden("this key opens no admin routes; send one of server.admin_keys")
        client = scope.get("client")
        if client is None or not is_loopback(client[0]) or any(name in headers for name in FORWARDED) or _rebound(headers):
            raise Forbidden(
                "without server.admin_keys, admin routes answer only this machine's own clients; declare one and send it"
            )

    def _caller(self, headers: dict[bytes, bytes], *, needed: bool) -> Caller:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        caller = self._keys.find(given) if given else None
        if caller is None and needed:
            if not given:
                raise Unauthorized("this service asks for an API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
            raise Unauthorized("the API key is wrong")
        return caller or Caller(None)


def _rebound(headers: dict[bytes, bytes]) -> bool:
    """The page of a stranger whose name was made to point at this machine: its browser still says the name."""
    host = headers.get(b"host", b"").decode("latin-1")
    name = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return bool(name) and not is_loopback(name)
