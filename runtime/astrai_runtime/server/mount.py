"""One route for each endpoint of a protocol: read, neutralise, prepare, submit, then answer at once or as a stream."""

# No `from __future__ import annotations` here: Litestar reads the annotations of handlers made inside functions.

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from pydantic import BaseModel, ValidationError

from astrai_runtime.agents.base import Agent
from astrai_runtime.event import Failed
from astrai_runtime.protocols.base import Endpoint, Exchange, Lookup, Protocol, Reply, Served
from astrai_runtime.provider.base import ModelInfo
from astrai_runtime.request import Prompt, SamplingParams, Turn
from astrai_runtime.sampling.base import Knob
from astrai_runtime.server._body import ClientGone, InvalidJson, Receive, parse, read_body
from astrai_runtime.server._first import FirstEvent
from astrai_runtime.server._generate import discard, gather, merge, submit_choices
from astrai_runtime.server._record import record_of
from astrai_runtime.server._replies import EventStream, JsonAnswer
from astrai_runtime.server._streams import StreamPlaces
from astrai_runtime.server._workers import Workers
from astrai_runtime.server.config import ServerConfig
from astrai_runtime.server.state import ServerState

PROTOCOL = "protocol"  # the handler option that names whose envelope an error gets
Voice = Callable[[Mapping[str, Any]], Protocol]  # the protocol in which a request without one of its own is answered


@dataclass(frozen=True)
class Declared:
    """What of the configuration the routes obey. `fields`: sampling fields of the pipeline that are no knobs."""

    server: ServerConfig
    defaults: SamplingParams
    knobs: tuple[Knob, ...]
    fields: tuple[str, ...]

    def served(self, model: ModelInfo, max_tokens: int) -> Served:
        """What a protocol may know, with its own default of an answer's tokens."""
        return Served(model, self.defaults, self.knobs, max_tokens, self.server.max_choices, self.fields)


def mount(
    protocol: Protocol,
    endpoint: Endpoint,
    max_tokens: int,
    declared: Declared,
    state: ServerState,
    workers: Workers,
    places: StreamPlaces,
) -> HTTPRouteHandler:
    """The Litestar handler of one endpoint. Errors leave it as AstraiError; the application gives them their envelope."""

    @post(endpoint.path, opt={PROTOCOL: protocol}, status_code=200)
    async def generate(request: Request[Any, Any, Any]) -> ASGIApp:
        engine, agent = state.require()
        record, bounds = record_of(request.scope), declared.server
        announced = _content_length(request.headers)
        body = await read_body(request.receive, bounds.max_body_bytes, announced, bounds.body_s)
        served = declared.served(engine.info, max_tokens)
        gone = asyncio.create_task(_disconnect(request.receive))
        with ExitStack() as cleanup:
            cleanup.callback(gone.cancel)
            cleanup.enter_context(state.one_answer())
            job = partial(_prepare, protocol, endpoint, body, served, agent, bounds.max_json_depth)
            read = await _unless_gone(workers.run(job), gone)
            name = record.request_id
            if isinstance(read, Reply):
                return JsonAnswer(protocol.signed(read, name))
            exchange = Exchange(
                id=endpoint.new_id(),
                created=int(time.time()),
                served=served,
                turn=read.turn,
                prompt_tokens=sum(len(prompt.token_ids) for prompt in read.prompts),
                n_prompts=len(read.prompts),
                echoes=read.echoes,
                request_id=name,
            )
            record.stream, record.prompt_tokens = read.turn.stream, exchange.prompt_tokens
            if read.turn.stream:
                cleanup.enter_context(places.one(record.key or _address(request.scope)))
            record.streams = streams = submit_choices(engine, read.prompts, read.turn.n)
            cleanup.callback(discard, streams)
            if not read.turn.stream:
                completions = await _unless_gone(gather(streams), gone)
                failed = next((done.outcome for done in completions if isinstance(done.outcome, Failed)), None)
                reply = protocol.error(failed.error) if failed else endpoint.reply(exchange, completions)
                return JsonAnswer(reply if reply.status < 400 else protocol.signed(reply, name))
            first = FirstEvent(merge(streams))
            try:
                refusal = await first.refusal(bounds.ping_s, gone)
            except ClientGone:
                await first.aclose()
                raise
            if refusal is not None:
                await first.aclose()
                return JsonAnswer(protocol.signed(protocol.error(refusal), name))
            events = first.pairs()
            frames = endpoint.frames(exchange, events)
            later = cleanup.pop_all()

            async def close() -> None:
                with later:
                    if isinstance(frames, AsyncGenerator):
                        await frames.aclose()
                    await events.aclose()
                    await first.aclose()

            return EventStream(frames, gone, close, bounds.ping_s, endpoint.ping, name)

    return generate


def mount_lookup(
    lookup: Lookup,
    protocol: Protocol | None,
    voice: Voice,
    max_tokens: int,
    declared: Declared,
    state: ServerState,
    workers: Workers,
) -> HTTPRouteHandler:
    """The handler of a route that generates nothing: it needs no place in the engine.

    `protocol` None: errors get the envelope of the client's own protocol.
    """

    @post(lookup.path, opt={} if protocol is None else {PROTOCOL: protocol}, status_code=200)
    async def answer(request: Request[Any, Any, Any]) -> ASGIApp:
        engine, agent = state.require()
        record, bounds = record_of(request.scope), declared.server
        announced = _content_length(request.headers)
        body = await read_body(request.receive, bounds.max_body_bytes, announced, bounds.body_s)
        speaker = voice(request.scope) if protocol is None else protocol
        served = declared.served(engine.info, max_tokens)
        gone = asyncio.create_task(_disconnect(request.receive))
        try:
            with state.one_answer():
                job = partial(_look_up, speaker, lookup, body, served, agent, bounds.max_json_depth)
                reply = await _unless_gone(workers.run(job), gone)
        finally:
            gone.cancel()
        return JsonAnswer(reply if reply.status < 400 else speaker.signed(reply, record.request_id))

    return answer


@dataclass(frozen=True)
class Prepared:
    """One turn and its prompts. `turn` is the first of those that the body asks for; they differ in their prompts only."""

    turn: Turn
    prompts: Sequence[Prompt]
    echoes: tuple[str, ...]


def _validated(protocol: Protocol, model: type[BaseModel], body: bytes, max_depth: int) -> BaseModel | Reply:
    """The body as the model has it. A Reply refuses it."""
    try:
        return model.model_validate(parse(body, max_depth))
    except InvalidJson as error:
        found: Sequence[Mapping[str, Any]] = [{"type": error.code, "loc": (), "msg": error.message}]
        return protocol.invalid(found)
    except ValidationError as error:
        return protocol.invalid(error.errors(include_url=False, include_context=False, include_input=False))


def _prepare(
    protocol: Protocol, endpoint: Endpoint, body: bytes, served: Served, agent: Agent, max_depth: int
) -> Prepared | Reply:
    """Runs in a worker: JSON, validation, neutralising, chat template, tokens. A Reply refuses the body."""
    request = _validated(protocol, endpoint.request, body, max_depth)
    if isinstance(request, Reply):
        return request
    turns = endpoint.read(request, served)
    prompts = [agent.prepare(turn) for turn in turns]
    return Prepared(turns[0], prompts, tuple(_text(turn, agent) for turn in turns) if turns[0].echo else ())


def _text(turn: Turn, agent: Agent) -> str:
    if turn.text is not None:
        return turn.text
    return b"".join(agent.spell(turn.token_ids or ())).decode("utf-8", errors="replace")


def _look_up(protocol: Protocol, lookup: Lookup, body: bytes, served: Served, agent: Agent, max_depth: int) -> Reply:
    """Runs in a worker."""
    request = _validated(protocol, lookup.request, body, max_depth)
    return request if isinstance(request, Reply) else lookup.answer(request, served, agent)


def _content_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _address(scope: Any) -> str:
    client = scope.get("client")
    return "" if client is None else f"address {client[0]}"


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
