"""Streaming clients against any OpenAI-compatible server, as a process of its own: raw sockets, no library in the way."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from _lines import answer_lines
from _steps import percentile

WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour
""".split()  # noqa: SIM905
PATIENCE_S = 300.0


def text(seed: str, n_words: int) -> str:
    """The same words for the same seed."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(n_words))


@dataclass
class Answer:
    """What one client saw. Times in seconds of a monotonic clock."""

    asked: float
    stamps: list[float] = field(default_factory=list)  # of each event with text
    tokens: int = 0  # as the server counts them; 0: it does not
    prompt_tokens: int = 0


async def body_lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body's lines as they come."""
    rest = b""
    while True:
        if chunked:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            piece = await reader.readexactly(size) if size else b""
            await reader.readline()
        else:
            piece = await reader.read(65536)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


async def exchange(url: str, body: dict[str, Any] | None) -> tuple[int, AsyncIterator[bytes], asyncio.StreamWriter]:
    """One request on a connection of its own: status, lines of the body, and the writer to close."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port or 80)
    sent = json.dumps(body).encode() if body is not None else b""
    head = f"{'GET' if body is None else 'POST'} {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
    head += f"Authorization: Bearer none\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        chunked |= line.startswith(b"transfer-encoding:") and b"chunked" in line
    return status, body_lines(reader, chunked), writer


async def model_name(base: str) -> str:
    _, lines, writer = await exchange(f"{base}/models", None)
    listed = json.loads(b"\n".join([line async for line in lines]))
    writer.close()
    return str(listed["data"][0]["id"])


async def ask(base: str, route: str, body: dict[str, Any]) -> Answer:
    """One streamed answer.

    Raises:
        RuntimeError: any other status than 200, or no text.
    """
    answer = Answer(time.perf_counter())
    status, lines, writer = await exchange(f"{base}/{route}", body)
    if status != 200:
        said = b"\n".join([line async for line in lines])
        raise RuntimeError(f"{base} answered {status}: {said[:400].decode(errors='replace')}")
    async for line in lines:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if usage := event.get("usage"):
            answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in event.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                answer.stamps.append(time.perf_counter())
    writer.close()
    if not answer.stamps:
        raise RuntimeError(f"{base} answered without any text")
    return answer


def request(route: str, model: str, system: str, user: str, new: int) -> dict[str, Any]:
    """Greedy, to the last token. `completions`: every server gets the same bytes; `chat/completions`: its own template."""
    body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    if route == "completions":
        return body | {"prompt": f"{system}\nUser: {user}\nAssistant:".strip()}
    messages = [{"role": "system", "content": system}] if system else []
    return body | {"messages": [*messages, {"role": "user", "content": user}]}


def summary(answers: list[Answer]) -> dict[str, float]:
    """What many clients saw together."""
    began, ended = min(a.asked for a in answers), max(a.stamps[-1] for a in answers)
    gaps = [after - before for a in answers for before, after in pairwise(a.stamps)]
    tokens = sum(a.tokens or len(a.stamps) for a in answers)
    return {
        "tok_s": tokens / (ended - began),
        "ttft_ms": sum(a.stamps[0] - a.asked for a in answers) / len(answers) * 1000,
        "p50_ms": percentile(gaps, 0.5) * 1000 if gaps else 0.0,
        "p95_ms": percentile(gaps, 0.95) * 1000 if gaps else 0.0,
        "wall_s": ended - began,
        "prompt_tokens": sum(a.prompt_tokens for a in answers) / len(answers),
        "tokens": tokens,
    }


def system_text(prefix: str, n_words: int, salt: str) -> str:
    """`prefix`: none, shared (the same for everybody, always) or unique."""
    seed = {"none": None, "shared": "shared", "unique": f"{salt}/unique"}[prefix]
    return text(seed, n_words) if seed else ""


async def load(base: str, route: str, clients: int, prefix: str, prefix_words: int, new: int, salt: str) -> dict[str, float]:
    """`clients` requests at once, each with words of its own after the prefix."""
    model = await model_name(base)

    def body(i: int) -> dict[str, Any]:
        own = f"{salt}/{i}"
        return request(route, model, system_text(prefix, prefix_words, own), "Write about " + text(own, 24), new)

    async with asyncio.timeout(PATIENCE_S):
        return summary(list(await asyncio.gather(*(ask(base, route, body(i)) for i in range(clients)))))


async def words_for(base: str, route: str, tokens: int) -> int:
    """How many words this server's tokenizer makes `tokens` of."""
    model = await model_name(base)
    counts = []
    for n in (50, 150):
        answer = await ask(base, route, request(route, model, text("probe", n), "Hello", 2))
        if not answer.prompt_tokens:
            raise RuntimeError(f"{base} does not tell how many tokens a prompt has (stream_options.include_usage)")
        counts.append(answer.prompt_tokens)
    return round(tokens * 100 / (counts[1] - counts[0]))


if __name__ == "__main__":
    verbs = {
        "load": lambda **given: asyncio.run(load(**given)),
        "words_for": lambda **given: asyncio.run(words_for(**given)),
    }
    answer_lines(lambda: verbs, dict)
