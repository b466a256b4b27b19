"""Routes for whoever runs the service: its metrics, and what may change while it runs."""

# No `from __future__ import annotations` here: Litestar reads the annotations of handlers made inside functions.

from typing import Any

from litestar import Request, Response, get, patch
from litestar.handlers import HTTPRouteHandler
from pydantic import PositiveInt, ValidationError

from astrai_runtime.errors import InvalidRequest
from astrai_runtime.part import Config
from astrai_runtime.protocols._errors import complain
from astrai_runtime.server._auth import ADMIN
from astrai_runtime.server._body import parse, read_body
from astrai_runtime.server.config import ServerConfig
from astrai_runtime.server.metrics import CONTENT_TYPE, Metrics
from astrai_runtime.server.state import ServerState

MAX_BODY_BYTES = 4096


class Tuning(Config):
    """What of the scheduler may change while it runs."""

    max_prompt_tokens_per_tick: PositiveInt


def admin_routes(config: ServerConfig, state: ServerState, metrics: Metrics) -> list[HTTPRouteHandler]:
    @get("/metrics", opt={ADMIN: True}, sync_to_thread=False)
    def scraped() -> Response[bytes]:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    @patch("/admin/scheduler", opt={ADMIN: True})
    async def tuned(request: Request[Any, Any, Any]) -> Response[dict[str, Any]]:
        body = await read_body(request.receive, min(MAX_BODY_BYTES, config.max_body_bytes), None, config.body_s)
        try:
            wanted = Tuning.model_validate(parse(body, config.max_json_depth))
        except ValidationError as error:
            said = complain(error.errors(include_url=False, include_context=False, include_input=False), Tuning.model_fields)
            raise InvalidRequest(said.message, param=said.param) from None
        engine, _ = state.require()
        engine.tune(max_prompt_tokens_per_tick=wanted.max_prompt_tokens_per_tick)
        return Response(wanted.model_dump())

    return [scraped, tuned]
