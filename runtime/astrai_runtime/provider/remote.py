"""Another service computes: one that speaks OpenAI's HTTP API, at an address that only the configuration can name.

Chat template, sampling, stop rules and end of text are that service's; what a caller asks for is passed on, and what the
service refuses is refused. Its errors, its usage and its finish reasons are passed back. Nothing is cut in silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, NonNegativeFloat, PositiveFloat, PositiveInt, SecretStr

from astrai_runtime.errors import AstraiError, InvalidRequest, Unsupported, UpstreamError
from astrai_runtime.event import Event
from astrai_runtime.part import PartConfig
from astrai_runtime.provider import _upstream
from astrai_runtime.provider._chunks import Reading, streamed
from astrai_runtime.provider._upstream import Upstream
from astrai_runtime.provider.base import Materials, ProviderPart, TextProvider, Vectors
from astrai_runtime.request import Message, Prompt, SamplingParams, Turn

CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
ALWAYS = ("temperature", "top_p")  # every service has them, with defaults of its own: ours are declared, so they are said
TEXT_FIELDS = ("prompt", "text", "content")  # services agree on the route's name, not on its field's
Path = Literal["/chat/completions", "/completions"]


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"must be an http or https address such as http://127.0.0.1:8000/v1, not '{url}'")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("may hold no user name, password, query or fragment; the key goes into api_key")
    return url.rstrip("/")


def _header_safe(key: SecretStr | None) -> SecretStr | None:
    if key is not None and not (key.get_secret_value().isascii() and key.get_secret_value().isprintable()):
        raise ValueError("must be printable ASCII: it travels in a header")
    return key


class RemoteConfig(PartConfig):
    kind: Literal["remote"]
    url: Annotated[str, AfterValidator(_address)]  # of the API: what comes before /chat/completions
    model: str | None  # its name there; null: model.name
    api_key: Annotated[SecretStr | None, AfterValidator(_header_safe)]
    check: bool  # ask it for its models before anything is served
    tokenize: Literal["auto", "never"]  # auto: count prompts with its /tokenize where it has one
    limit_field: Literal["max_tokens", "max_completion_tokens"]  # which name of the token limit it knows
    connect_s: PositiveFloat
    read_s: PositiveFloat  # silence after which it is given up
    retry_wait_s: NonNegativeFloat  # before the one retry, unless it says itself how long
    max_frame_bytes: PositiveInt  # of one event in a stream
    max_response_bytes: PositiveInt


class RemoteProvider(ProviderPart):
    """The operations over HTTP. `complete` runs on one event loop; the others block and are safe from any thread."""

    Config: ClassVar[type[RemoteConfig]] = RemoteConfig
    needs_weights = False
    answers = "text"

    def __init__(self, config: RemoteConfig, name: str, sampling: Sequence[str]) -> None:
        key = config.api_key
        self._config = config
        self._name = config.model or name
        self._sampling = tuple(dict.fromkeys((*ALWAYS, *sampling)))
        self._upstream = Upstream(
            url=config.url,
            headers={"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
            timeout=httpx.Timeout(config.read_s, connect=config.connect_s),
            tls=httpx.create_ssl_context(trust_env=False),
        )
        self._root = config.url.removesuffix("/v1")  # where services put the routes that are not OpenAI's
        self._client = httpx.Client(**self._upstream.options())
        self._text_field: str | None = None  # what its /tokenize calls a text; None: it does not tokenize for us

    @classmethod
    def open(cls, config: RemoteConfig, materials: Materials) -> TextProvider:
        declared = materials.info
        remote = cls(config, declared.name, materials.sampling)
        try:
            card = remote.check() if config.check else {}
            counts = config.tokenize == "auto" and remote.counts()
        except AstraiError:
            remote.close()
            raise
        told = next((card[field] for field in CONTEXT_FIELDS if isinstance(card.get(field), int)), 0)
        context = min(filter(None, (declared.context, told)), default=0)
        return TextProvider(
            info=replace(declared, architecture="remote", n_parameters=0, vocab_size=0, context=context),
            complete=remote.complete,
            close=remote.close,
            tokenize=remote.tokenize if counts else None,
            embed=remote.embed,
        )

    # -- before serving ------------------------------------------------------------------------------------------

    def check(self) -> Mapping[str, Any]:
        """What the service says about the model.

        Raises:
            UpstreamError: it cannot be reached, refuses the key, has no such model, or speaks another API.
        """
        found = self._call("GET", f"{self._config.url}/models")
        listed = found.get("data")
        if not isinstance(listed, list):
            raise UpstreamError(f"the service at {self._config.url} lists no models: is it an OpenAI-compatible API?")
        cards = [card for card in listed if isinstance(card, dict)]
        for card in cards:
            if card.get("id") == self._name:
                return card
        there = ", ".join(str(card.get("id")) for card in cards[:20]) or "none"
        raise UpstreamError(
            f"the service at {self._config.url} has no model '{self._name}'; it has: {there}; set provider.model"
        )

    def counts(self) -> bool:
        """True when the service tokenizes for us, texts and conversations; finds out how it wants to be asked."""
        talk = self._tokens({"messages": [{"role": "user", "content": "a"}]})
        self._text_field = next((name for name in TEXT_FIELDS if talk and self._tokens({name: "a"})), None)
        return self._text_field is not None

    def _tokens(self, asked: Mapping[str, Any]) -> tuple[int, ...]:
        try:
            return self._tokenized(asked)
        except (InvalidRequest, UpstreamError):
            return ()

    def _tokenized(self, asked: Mapping[str, Any]) -> tuple[int, ...]:
        found = self._call("POST", f"{self._root}/tokenize", {"model": self._name, **asked}, maybe=True).get("tokens")
        return tuple(map(int, found)) if isinstance(found, list) else ()

    # -- operations ----------------------------------------------------------------------------------------------

    def tokenize(self, turn: Turn) -> tuple[int, ...] | None:
        """The token ids of a turn's prompt; None when the service cannot say.

        Raises:
            AstraiError: the service refuses the messages, or fails.
        """
        if turn.token_ids is not None:
            return turn.token_ids
        if self._text_field is None:
            return None
        if turn.text is not None:
            return self._tokenized({self._text_field: turn.text})
        return self._tokenized({"messages": messages_of(turn.messages)})

    def embed(self, texts: Sequence[str]) -> Vectors:
        """One vector for each text.

        Raises:
            Unsupported: the service has no embeddings. AstraiError: it fails.
        """
        body = {"model": self._name, "input": list(texts), "encoding_format": "float"}
        found = self._call("POST", f"{self._config.url}/embeddings", body, maybe=True)
        if not found:
            raise Unsupported(f"the service at {self._config.url} has no embeddings")
        try:
            rows = {int(entry["index"]): tuple(map(float, entry["embedding"])) for entry in found["data"]}
            vectors = tuple(rows[index] for index in range(len(texts)))
            return Vectors(vectors, int((found.get("usage") or {}).get("prompt_tokens") or 0))
        except (KeyError, TypeError, ValueError) as error:
            raise UpstreamError(f"the service at {self._config.url} sent embeddings of an unknown shape") from error

    async def complete(self, prompt: Prompt) -> AsyncGenerator[Event, None]:
        """One answer as it comes. Closing early closes the connection, and with it the work behind it.

        Raises:
            AstraiError: what the service refused, how it failed, or that it is too slow or says too much.
        """
        path, body = self.request(prompt)
        url, limit = self._config.url, self._config.max_response_bytes
        try:
            # A client of its own: a connection that was cancelled half-way can never serve anybody else.
            async with httpx.AsyncClient(**self._upstream.options()) as client:
                response = await self._begin(client, f"{url}{path}", body)
                pieces = _upstream.bounded_async(response, limit, url)
                async with aclosing(response), aclosing(pieces):
                    if "event-stream" in response.headers.get("content-type", ""):
                        async with aclosing(streamed(pieces, self._config.max_frame_bytes, url)) as events:
                            async for event in events:
                                yield event
                        return
                    whole, reading = b"".join([piece async for piece in pieces]), Reading(url)
                    for event in reading.feed(_upstream.parsed(whole, url)):
                        yield event
                    yield reading.end()
        except httpx.HTTPError as error:
            raise _upstream.failure(error, url) from error

    def close(self) -> None:
        """Closes the connections. Safe to call twice."""
        self._client.close()

    # -- requests ------------------------------------------------------------------------------------------------

    def request(self, prompt: Prompt) -> tuple[Path, dict[str, Any]]:
        """Route and body that ask the service for this answer."""
        turn, limits = prompt.turn, prompt.limits
        assert turn is not None, "a relayed prompt carries its turn"
        body: dict[str, Any] = {"model": self._name, "stream": True, "stream_options": {"include_usage": True}}
        values = {name: value_of(prompt.sampling, name) for name in self._sampling if name != "logit_bias"}
        body |= {name: value for name, value in values.items() if value is not None}
        if prompt.sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in prompt.sampling.logit_bias}
        if prompt.sampling.seed is not None:
            body["seed"] = prompt.sampling.seed
        if limits.max_tokens is not None:
            body[self._config.limit_field] = limits.max_tokens
        if limits.stop:
            body["stop"] = list(limits.stop)
        if limits.ignore_eos:
            body["ignore_eos"] = True
        if turn.cache_salt:
            body["cache_salt"] = turn.cache_salt  # a caller's wish for privacy is passed on, or refused there
        if turn.text is not None or turn.token_ids is not None:
            body["prompt"] = turn.text if turn.text is not None else list(turn.token_ids or ())
            if prompt.top_logprobs is not None:
                body["logprobs"] = prompt.top_logprobs
            if self._config.limit_field in body:
                body["max_tokens"] = body.pop(self._config.limit_field)  # this route has had one name for it for ever
            return "/completions", body
        body["messages"] = messages_of(turn.messages)
        if prompt.top_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": prompt.top_logprobs}
        return "/chat/completions", body

    async def _begin(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> httpx.Response:
        """The response once its head is there and good; at most one more try before any byte was delivered."""
        for attempt in range(2):
            response = await client.send(client.build_request("POST", url, json=body), stream=True)
            if response.is_success:
                return response
            async with aclosing(response):
                if attempt == 0 and response.status_code in _upstream.RETRIED:
                    await asyncio.sleep(self._pause(response))
                    continue
                pieces = _upstream.bounded_async(response, _upstream.MAX_ERROR_BYTES, self._config.url)
                said = b"".join([piece async for piece in pieces])
            raise _upstream.refusal(response.status_code, said, response.headers, self._config.url)
        raise AssertionError("the second try returns or raises")

    def _call(self, method: str, url: str, body: Any = None, *, maybe: bool = False) -> Mapping[str, Any]:
        """A JSON answer; one retry. With `maybe` a route that is not there answers {}."""
        limit = self._config.max_response_bytes
        for attempt in range(2):
            try:
                with self._client.stream(method, url, json=body) as response:
                    if attempt == 0 and response.status_code in _upstream.RETRIED:
                        time.sleep(self._pause(response))
                        continue
                    if maybe and response.status_code in _upstream.ABSENT:
                        return {}
                    size = limit if response.is_success else _upstream.MAX_ERROR_BYTES
                    said = b"".join(_upstream.bounded(response, size, self._config.url))
            except httpx.HTTPError as error:
                raise _upstream.failure(error, self._config.url) from error
            if response.is_success:
                return _upstream.parsed(said, self._config.url)
            raise _upstream.refusal(response.status_code, said, response.headers, self._config.url)
        raise AssertionError("the second try returns or raises")

    def _pause(self, response: httpx.Response) -> float:
        return min(_upstream.retry_after(response.headers, self._config.retry_wait_s), self._config.read_s)


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the API has them."""
    return [{"role": each.role, "content": each.content, **each.extra} for each in messages]


def value_of(sampling: SamplingParams, name: str) -> float | None:
    """A sampling field, or a further knob that somebody set."""
    value: float | None = sampling.extra.get(name, getattr(sampling, name, None))
    return int(value) if value is not None and float(value).is_integer() else value


PART = RemoteProvider
