"""One route for each endpoint of a protocol: read, neutralise, prepare, submit, then answer at once or as a stream."""

# No `from __future__ import annotations` here: Litestar reads the annotations of handlers made inside functions.

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from pydantic import ValidationError

from astrai_runtime.agents.base import Agent
from astrai_runtime.event import Failed
from astrai_runtime.protocols.base import Endpoint, Exchange, Protocol, Reply, Served
from astrai_runtime.request import Prompt, SamplingParams, Turn
from astrai_runtime.sampling.base import Knob
from astrai_runtime.server._body import ClientGone, InvalidJson, Receive, parse, read_body
from astrai_runtime.server._generate import discard, gather, merge, submit_choices
from astrai_runtime.server._replies import EventStream, JsonAnswer
from astrai_runtime.server._request_id import request_id
from astrai_runtime.server._workers import Workers
from astrai_runtime.server.config import ServerConfig
from astrai_runtime.server.state import ServerState

PROTOCOL = "protocol"  # the handler option that names whose envelope an error gets


@dataclass(frozen=True)
class Declared:
    """What of the configuration the routes obey. `fields`: sampling fields of the pipeline that are no knobs."""

    server: ServerConfig
    defaults: SamplingParams
    knobs: tuple[Knob, ...]
    fields: tuple[str, ...]


def mount(
    protocol: Protocol, endpoint: Endpoint, max_tokens: int, declared: Declared, state: ServerState, workers: Workers
) -> HTTPRouteHandler:
    """The Litestar handler of one endpoint. Errors leave it as AstraiError; the application gives them their envelope."""

    @post(endpoint.path, opt={PROTOCOL: protocol}, status_code=200)
    async def generate(request: Request[Any, Any, Any]) -> ASGIApp:
        engine, agent = state.require()
        limit = declared.server.max_body_bytes
        body = await read_body(request.receive, limit, _content_length(request.headers))
        served = Served(
            engine.info, declared.defaults, declared.knobs, max_tokens, declared.server.max_choices, declared.fields
        )
        gone = asyncio.create_task(_disconnect(request.receive))
        with ExitStack() as cleanup:
            cleanup.callback(gone.cancel)
            cleanup.enter_context(state.one_answer())
            read = await _unless_gone(workers.run(lambda: _prepare(protocol, endpoint, body, served, agent)), gone)
            if isinstance(read, Reply):
                return JsonAnswer(read)
            turn, prompt = read
            exchange = Exchange(endpoint.new_id(), int(time.time()), served, turn, len(prompt.token_ids))
            streams = submit_choices(engine, prompt, turn.n)
            cleanup.callback(discard, streams)
            if not turn.stream:
                completions = await _unless_gone(gather(streams), gone)
                failed = next((done.outcome for done in completions if isinstance(done.outcome, Failed)), None)
                return JsonAnswer(protocol.error(failed.error) if failed else endpoint.reply(exchange, completions))
            events = merge(streams)
            frames = endpoint.frames(exchange, events)
            later = cleanup.pop_all()

            async def close() -> None:
                with later:
                    for generator in (frames, events):
                        if isinstance(generator, AsyncGenerator):
                            await generator.aclose()

            return EventStream(frames, gone, close, declared.server.ping_s, request_id(request.scope))

    return generate


def _prepare(
    protocol: Protocol, endpoint: Endpoint, body: bytes, served: Served, agent: Agent
) -> tuple[Turn, Prompt] | Reply:
    """Runs in a worker: JSON, validation, neutralising, chat template, tokens. A Reply refuses the body."""
    try:
        request = endpoint.request.model_validate(parse(body))
    except InvalidJson as error:
        found: Sequence[Mapping[str, Any]] = [{"type": error.code, "loc": (), "msg": error.message}]
        return protocol.invalid(found)
    except ValidationError as error:
        return protocol.invalid(error.errors(include_url=False, include_context=False, include_input=False))
    turn = endpoint.read(request, served)
    return turn, agent.prepare(turn)


def _content_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if text.isdigit() and len(text) < 20 else None


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has gone. Only for use after the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(work: Any, gone: asyncio.Task[None]) -> Any:
    """The work's result; when the client goes first the work is cancelled.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
