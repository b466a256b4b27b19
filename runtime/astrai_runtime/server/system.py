"""Routes about the service itself: health, readiness, counts, models, and the OpenAPI document."""

# No `from __future__ import annotations` here: Litestar reads the annotations of handlers made inside functions.

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from astrai_runtime.errors import ModelNotFound, NotReady
from astrai_runtime.protocols._errors import shown
from astrai_runtime.protocols.base import Endpoint, Lookup
from astrai_runtime.server._auth import PUBLIC
from astrai_runtime.server._openapi import document
from astrai_runtime.server.mount import Voice
from astrai_runtime.server.state import ServerState

STATS = ("total_tasks", "total_tokens", "active_tasks", "waiting_queue")


def system_routes(
    state: ServerState, voice: Voice, endpoints: Sequence[Endpoint | Lookup], *, keyed: bool
) -> list[HTTPRouteHandler]:
    """The handlers. `voice` chooses the protocol in which a request without one of its own is answered."""

    @get("/health", opt={PUBLIC: True})
    async def health() -> Response[dict[str, Any]]:
        return Response({"status": "ok", "model_loaded": state.engine is not None})

    @get("/ready")
    async def ready() -> Response[dict[str, Any]]:
        try:
            state.require()
        except NotReady as error:
            headers = {"retry-after": f"{error.retry_after_s:.0f}"}
            return Response({"status": state.phase, "reason": error.message}, status_code=503, headers=headers)
        return Response({"status": "ready"})

    @get("/stats")
    async def stats() -> Response[dict[str, Any]]:
        counted = {} if state.engine is None else state.engine.get_stats()
        return Response({**dict.fromkeys(STATS, 0), **counted})

    def listed(request: Request[Any, Any, Any]) -> Mapping[str, Any]:
        engine, _ = state.require()
        return voice(request.scope).models([engine.info])

    @get("/v1/models")
    async def models(request: Request[Any, Any, Any]) -> Response[Mapping[str, Any]]:
        return Response(listed(request))

    @get("/v1/models/{model:path}")
    async def model(request: Request[Any, Any, Any]) -> Response[Mapping[str, Any]]:
        # As it was written: the router has tidied its own copy, and 'tiny/' is no name of 'tiny'.
        name = unquote(request.scope["raw_path"].decode("latin-1")).partition("/v1/models/")[2]
        data: Sequence[Mapping[str, Any]] = listed(request)["data"]
        for entry in data:
            if entry["id"] == name:
                return Response(entry)
        there = ", ".join(entry["id"] for entry in data)
        raise ModelNotFound(f"no model named '{shown(name)}'; this deployment serves: {there}", param="model")

    @get(["/openapi.json", "/schema"])
    async def openapi() -> Response[dict[str, Any]]:
        return Response(document(endpoints, keyed=keyed))

    return [health, ready, stats, models, model, openapi]
