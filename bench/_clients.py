"""The crowd of the soak: clients that ask and check, read slowly, vanish, change their mind, send too much, or nonsense.

A crowd over a scripted model also asks it to fail.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import h11
from _questions import CHAT, MESSAGES, InBand, Question, Said, read_stream, read_whole
from _wire import Wire

SLOW_BYTES = 2048  # what a slow reader's kernel keeps, and what it reads at a time
ROUTES = ("/health", "/ready", "/stats", "/v1/models", "/openapi.json")
NONSENSE = (
    b"",
    b"{",
    b"[1, 2",
    b"null",
    b'"text"',
    b'{"messages": NaN}',
    b'{"messages": "\xff\xfe"}',
    b'{"messages": "\\ud800"}',
    b'{"messages": []}',
    b'{"messages": [null]}',
    b"[" * 5000,
    b'{"a":' * 5000,
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temprature": 1}',
)
FAULTS = {"fail by error": 3, "fail by nan": 0, "fail by memory": 5}  # words in a prompt -> tokens before it fails so
NO_HTTP = (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"\0" * 100 + b"\r\n\r\n")


@dataclass
class Tally:
    """What the crowd saw. `violations`: sentence -> how often; none is what the soak is for."""

    requests: int = 0
    compared: int = 0
    wrong: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)

    def violate(self, sentence: str) -> None:
        self.violations[sentence] += 1


@dataclass
class Crowd:
    """Clients over one service. `answers`: each question's right answer, taken when nobody else was there."""

    port: int
    answers: Mapping[Question, Said]
    max_body_bytes: int
    draw: random.Random
    faults: bool = False  # the model fails on requests that ask it to (see FAULTS)
    tally: Tally = field(default_factory=Tally)

    async def one(self) -> None:
        """One request of a random kind; whatever must not happen becomes a violation."""
        kinds: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("whole", 6, self.whole),
            ("streaming", 6, self.streaming),
            ("slow", 1, self.slow),
            ("vanishing", 3, self.vanishing),
            ("cancelling", 3, self.cancelling),
            ("oversize", 1, self.oversize),
            ("malformed", 2, self.malformed),
            ("no HTTP", 1, self.no_http),
            ("too long", 1, self.too_long),
            ("looking", 1, self.looking),
            ("failing", 2 if self.faults else 0, self.failing),
        ]
        name, _, act = self.draw.choices(kinds, [weight for _, weight, _ in kinds])[0]
        self.tally.requests += 1
        self.tally.kinds[name] += 1
        try:
            await act()
        except TimeoutError:
            self.tally.violate(f"{name}: no progress within the patience of a client")
        except (ConnectionError, h11.ProtocolError, InBand, ValueError, KeyError) as error:
            self.tally.violate(f"{name}: {type(error).__name__}: {error}")

    async def _status(self, wire: Wire, *expected: int) -> bool:
        """True when the answer has an expected status. 503 is allowed when it says when to come back; then False."""
        status = await wire.head()
        self.tally.statuses[status] += 1
        if status == 503 and "retry-after" in wire.headers:
            await wire.body()
            return False
        if status not in expected:
            told = (await wire.body())[:300]
            self.tally.violate(f"status {status}, not {' or '.join(map(str, expected))}: {told!r}")
            return False
        return True

    def _compare(self, question: Question, said: Said, how: str) -> None:
        self.tally.compared += 1
        right = self.answers[question]
        if said != right:
            self.tally.wrong += 1
            self.tally.violate(f"{how}: {said!r} is not {right!r} for {json.dumps(dict(question.body))}")

    def _question(self) -> Question:
        return self.draw.choice(list(self.answers))

    def _endless(self) -> bytes:
        """A request that would run to the end of the context."""
        body = {
            "messages": [{"role": "user", "content": f"{self.draw.random()} and so on"}],
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": self.draw.random() < 0.7,
        }
        return json.dumps(body).encode()

    async def whole(self) -> None:
        question = self._question()
        wire = await Wire.open(self.port)
        await wire.ask("POST", question.path, question.encoded(stream=False))
        if await self._status(wire, 200):
            self._compare(question, read_whole(question.path, json.loads(await wire.body())), "whole")
        await wire.close()

    async def streaming(self) -> None:
        question = self._question()
        wire = await Wire.open(self.port)
        await wire.ask("POST", question.path, question.encoded(stream=True))
        if await self._status(wire, 200):
            self._compare(question, await read_stream(question.path, wire), "streaming")
        await wire.close()

    async def slow(self) -> None:
        """Lets the answer wait before it reads, then reads it in small bites."""
        question = self._question()
        wire = await Wire.open(self.port, receive_bytes=SLOW_BYTES)
        await wire.ask("POST", question.path, question.encoded(stream=True))
        await asyncio.sleep(self.draw.uniform(0.2, 1.0))
        if await self._status(wire, 200):
            self._compare(question, await read_stream(question.path, wire, SLOW_BYTES), "slow")
        await wire.close()

    async def vanishing(self) -> None:
        """Resets or closes the connection: in the middle of its body, right after it, or a moment later."""
        wire = await Wire.open(self.port)
        body, path = self._endless(), self.draw.choice((CHAT, MESSAGES))
        when = self.draw.choice(("in the body", "at once", "later"))
        if when == "in the body":
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            await wire.raw(head.encode() + body[: self.draw.randrange(len(body))])
        else:
            await wire.ask("POST", path, body)
        if when == "later":
            await asyncio.sleep(self.draw.uniform(0.0, 0.3))
        if self.draw.random() < 0.5:
            wire.reset()
        else:
            await wire.close()

    async def cancelling(self) -> None:
        """Reads some events of a long answer, then has heard enough."""
        wire = await Wire.open(self.port)
        await wire.ask("POST", CHAT, json.dumps({**json.loads(self._endless()), "stream": True}).encode())
        if await self._status(wire, 200):
            left = self.draw.randint(1, 20)
            async for _ in wire.frames():
                left -= 1
                if not left:
                    break
        await wire.close()

    async def failing(self) -> None:
        """The model fails in the middle of this answer: the request must say so, whole or in its stream."""
        stream = self.draw.random() < 0.7
        words = self.draw.choice(list(FAULTS))
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": 30, "temperature": 0, "stream": stream}
        wire = await Wire.open(self.port)
        await wire.ask("POST", CHAT, json.dumps(body).encode())
        if await self._status(wire, 200 if stream else 500):
            frames = [frame async for frame in wire.frames()] if stream else [json.loads(await wire.body())]
            if not any("error" in frame for frame in frames if frame != "[DONE]"):
                self.tally.violate(f"a model that must fail did not: {frames!r}")
        await wire.close()

    async def oversize(self) -> None:
        wire = await Wire.open(self.port)
        body = json.dumps({"messages": [{"role": "user", "content": "x" * (self.max_body_bytes + 1)}]}).encode()
        await wire.ask("POST", self.draw.choice((CHAT, MESSAGES)), body)
        if await self._status(wire, 413):
            await wire.body()
        await wire.close()

    async def malformed(self) -> None:
        wire = await Wire.open(self.port)
        await wire.ask("POST", self.draw.choice((CHAT, MESSAGES)), self.draw.choice(NONSENSE))
        if await self._status(wire, 400):
            json.loads(await wire.body())
        await wire.close()

    async def no_http(self) -> None:
        wire = await Wire.open(self.port)
        await wire.raw(self.draw.choice(NO_HTTP))
        if await self._status(wire, 400):
            await wire.body()
        await wire.close()

    async def too_long(self) -> None:
        wire = await Wire.open(self.port)
        body = {"messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 4}
        await wire.ask("POST", self.draw.choice((CHAT, MESSAGES)), json.dumps(body).encode())
        if await self._status(wire, 400):
            json.loads(await wire.body())
        await wire.close()

    async def looking(self) -> None:
        wire = await Wire.open(self.port)
        await wire.ask("GET", self.draw.choice(ROUTES))
        if await self._status(wire, 200):
            json.loads(await wire.body())
        await wire.close()
