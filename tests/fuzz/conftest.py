"""One small live service for every fuzz test, how many examples each tries, and what no answer may ever be.

FUZZ_EXAMPLES=2000 tries more, and other ones at each run; without it the same few are tried every time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.live import serving

LONGER = os.environ.get("FUZZ_EXAMPLES")
EXAMPLES = int(LONGER or 60)
TIMEOUT_S = 30.0  # a longer wait is a hang
BODY_BYTES = 20_000
few = settings(
    max_examples=EXAMPLES,
    derandomize=LONGER is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
fewer = settings(few, max_examples=max(EXAMPLES // 6, 1))  # for strategies that are slow to draw from


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service with short answers, small bodies and a small context, so that every limit is near."""
    with serving(
        "model.context=128",
        "protocols.openai.max_tokens=4",
        "protocols.anthropic.max_tokens=4",
        f"server.max_body_bytes={BODY_BYTES}",
        "scheduler.max_waiting=4",
        "kv.n_tokens=512",
        "run.log_level=ERROR",
    ) as address:
        yield address


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(autouse=True)
def still_alive(http: httpx.Client) -> Iterator[None]:
    """After every test the service answers a plain question, and nothing is left running."""
    yield
    ask = {"messages": [{"role": "user", "content": "still there?"}], "max_tokens": 2, "ignore_eos": True}
    reply = http.post("/v1/chat/completions", json=ask)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 2


def check(reply: httpx.Response) -> None:
    """No server error (503 is one that says so and when to come back), and errors are JSON with a message."""
    if reply.status_code == 503:
        assert reply.headers["retry-after"], reply.text
        return
    assert reply.status_code < 500, (reply.status_code, reply.text, reply.request.content[:2000])
    if reply.status_code >= 400 and reply.request.method != "HEAD":
        assert reply.json(), reply.text
    if "text/event-stream" in reply.headers.get("content-type", ""):
        # A healthy model ends every stream that it began. (In what it says, quotes are escaped.)
        assert "event: error" not in reply.text.splitlines(), (reply.text, reply.request.content[:2000])
        assert '{"error":' not in reply.text, (reply.text, reply.request.content[:2000])
