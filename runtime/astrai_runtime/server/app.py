"""The Litestar application: one route for each endpoint of each protocol, the system's routes, keys, and error envelopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from litestar import Litestar, Request, Response
from litestar.config.cors import CORSConfig
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.middleware import DefineMiddleware

from astrai_runtime import log
from astrai_runtime.errors import AstraiError, DeadlineExpired, InvalidRequest, NotFound
from astrai_runtime.protocols import _tokens
from astrai_runtime.protocols._errors import shown
from astrai_runtime.protocols.base import Endpoint, Lookup, Protocol, Reply
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling.base import Knob
from astrai_runtime.server._admin import admin_routes
from astrai_runtime.server._auth import KeyCheck
from astrai_runtime.server._body import ClientGone
from astrai_runtime.server._keys import Keyring
from astrai_runtime.server._observed import Observed
from astrai_runtime.server._request_id import request_id
from astrai_runtime.server._streams import StreamPlaces
from astrai_runtime.server._tracing import open_tracing
from astrai_runtime.server._workers import Workers
from astrai_runtime.server.config import ServerConfig
from astrai_runtime.server.metrics import Metrics
from astrai_runtime.server.mount import PROTOCOL, Declared, mount, mount_lookup
from astrai_runtime.server.state import ServerState
from astrai_runtime.server.system import system_routes


def create_app(
    config: ServerConfig,
    protocols: Mapping[str, Protocol],
    limits: Mapping[str, int],
    state: ServerState,
    defaults: SamplingParams,
    knobs: Sequence[Knob],
    fields: Sequence[str],
) -> Litestar:
    """An application over `state`, which may become ready later.

    Args:
        protocols: by instance name, in the declared order.
        limits: the declared default of an answer's tokens, by the same names.
        defaults: declared sampling; a request's fields override it.
        knobs, fields: what the declared sampling stages obey (`Stage.knobs`, `Stage.fields`).
    """
    keys, tracing, metrics = Keyring(config), open_tracing(config.tracing), Metrics(state)
    state.watch(metrics)
    workers, places = Workers(config.workers), StreamPlaces(config.max_streams_per_key)
    declared = Declared(config, defaults, tuple(knobs), tuple(fields))
    endpoints = {name: protocol.endpoints() for name, protocol in protocols.items()}
    lookups = {name: protocol.lookups() for name, protocol in protocols.items()}
    spoken = {point.path: protocols[name] for name, points in endpoints.items() for point in points}
    spoken |= {lookup.path: protocols[name] for name, several in lookups.items() for lookup in several}
    voices = Voices(protocols, spoken)
    routes = [
        mount(protocols[name], endpoint, limits[name], declared, state, workers, places)
        for name, points in endpoints.items()
        for endpoint in points
    ]
    routes += [
        mount_lookup(lookup, protocols[name], voices.of, limits[name], declared, state, workers)
        for name, several in lookups.items()
        for lookup in several
    ]
    routes += [mount_lookup(lookup, None, voices.of, 1, declared, state, workers) for lookup in _tokens.lookups()]
    every: list[Endpoint | Lookup] = [endpoint for points in endpoints.values() for endpoint in points]
    every += [lookup for several in (*lookups.values(), _tokens.lookups()) for lookup in several]
    system = system_routes(state, voices.of, every, keyed=keys.asks)
    app = Litestar(
        route_handlers=[*routes, *system, *admin_routes(config, state, metrics)],
        middleware=[DefineMiddleware(KeyCheck, keys=keys, origins=config.cors_origins)],
        exception_handlers={Exception: voices.answer},
        cors_config=_cors(config.cors_origins),
        on_shutdown=[workers.close, tracing.close],
        request_max_body_size=None,  # read_body bounds it, and lets the client see why
        openapi_config=None,
        logging_config=None,
    )
    # Outside of everything, so that what no route answers is counted too.
    app.asgi_handler = Observed(app.asgi_handler, metrics, tracing.end)
    return app


def _cors(origins: Sequence[str]) -> CORSConfig | None:
    """Which pages may call from a browser, without cookies. None: only those that this service serves, that is none."""
    shown_headers = ["x-request-id", "request-id", "retry-after"]
    return CORSConfig(allow_origins=list(origins), expose_headers=shown_headers) if origins else None


class Voices:
    """Which protocol's envelope a request's error gets: its route's, its client's, or the first one's."""

    def __init__(self, protocols: Mapping[str, Protocol], by_path: Mapping[str, Protocol]) -> None:
        self._by_path = by_path
        # A protocol that knows its clients by their headers answers only those.
        self._listening = [one for one in protocols.values() if type(one).speaks is not Protocol.speaks]
        plain = [one for one in protocols.values() if type(one).speaks is Protocol.speaks]
        self._default = next(iter([*plain, *self._listening]), None)

    def of(self, scope: Mapping[str, Any]) -> Protocol:
        """The protocol that speaks to this request's client."""
        handler = scope.get("route_handler")
        own = None if handler is None else handler.opt.get(PROTOCOL)
        own = own or self._by_path.get(scope["path"])
        if own is None:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            own = next((one for one in self._listening if one.speaks(headers)), self._default)
        assert own is not None, "the schema asks for at least one protocol"
        protocol: Protocol = own
        return protocol

    def answer(self, request: Request[Any, Any, Any], error: Exception) -> Response[Mapping[str, Any]]:
        """The reply to any exception. What nobody expected is logged under the request's id and says no more than that."""
        protocol = self.of(request.scope)
        reply = protocol.signed(self._reply(protocol, request, error), request_id(request.scope))
        return Response(reply.body, status_code=reply.status, headers=dict(reply.headers), media_type="application/json")

    @staticmethod
    def _reply(protocol: Protocol, request: Request[Any, Any, Any], error: Exception) -> Reply:
        place = f"{request.method} {shown(request.scope['path'])}"
        match error:
            case DeadlineExpired():
                return replace(protocol.error(error), status=408, headers={"connection": "close"})
            case AstraiError():
                reply = protocol.error(error)
                return replace(reply, headers={**reply.headers, "connection": "close"}) if reply.status == 413 else reply
            case ClientGone():
                return Reply(499, {})  # nobody reads it
            case NotFoundException():
                return protocol.error(NotFound(f"no route {place}; GET /openapi.json lists the routes"))
            case MethodNotAllowedException():
                allowed = (error.headers or {}).get("allow", "")
                said = protocol.error(InvalidRequest(f"{place} is not allowed; allowed: {allowed}"))
                return replace(said, status=405, headers={"allow": allowed})
            case HTTPException() if error.status_code < 500:
                return replace(protocol.error(InvalidRequest(error.detail)), status=error.status_code)
        name = request_id(request.scope)
        log.get("server").error("request_failed", request_id=name, route=place, error=repr(error), exc_info=error)
        return protocol.error(AstraiError(f"something went wrong here, not in the request; the log has it as {name}"))
