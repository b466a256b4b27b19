"""A relaying deployment over real sockets, with a scripted service behind it: what its failures become for our clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.live import serving
from tests.protocols.sse import events
from tests.provider.upstream import Handler, Service, ended, frame, reply, said, service, stream

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BOTH = (CHAT, MESSAGES)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@dataclass
class Front:
    """Our service, and the one behind it."""

    far: Service
    http: httpx.Client

    def ask(self, path: str = CHAT, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=ASK | fields)

    def idle(self) -> bool:
        """Waits until nothing is passed on any more."""
        for _ in range(500):
            stats = self.http.get("/stats").json()
            if (stats["active_tasks"], stats["waiting_queue"]) == (0, 0):
                return True
            time.sleep(0.01)
        return False


@pytest.fixture(scope="module")
def gateway() -> Iterator[Front]:
    plain = ("provider.check=false", "provider.tokenize=never", "provider.retry_wait_s=0", "provider.read_s=5")
    with (
        service() as far,
        serving("provider=remote", f"provider.url={far.url}/v1", *plain, "provider.max_response_bytes=100000") as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield Front(far, http)


@pytest.fixture
def front(gateway: Front) -> Iterator[Front]:
    gateway.far.answers.clear()
    gateway.far.asked.clear()
    gateway.far.gone.clear()
    yield gateway
    assert gateway.idle()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("there", "here"), [(400, 400), (401, 502), (404, 502), (413, 413), (429, 503), (500, 502), (504, 504)]
)
def test_refusal_from_behind_has_its_status_before_anything_is_sent(
    front: Front, path: str, streamed: bool, there: int, here: int
) -> None:
    front.far.says(reply(there, {"error": {"message": "because of tea", "param": "messages"}}))
    answer = front.ask(path, stream=streamed)
    assert (answer.status_code, answer.headers["content-type"]) == (here, "application/json")
    assert "because of tea" in answer.json()["error"]["message"]
    assert ("retry-after" in answer.headers) == (here == 503)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ((), "without a finish reason"),
        ((frame({"error": {"message": "tea"}}),), "tea"),
        ((said("x" * 999),) * 150, "100000"),
    ],
)
def test_failure_in_the_middle_is_the_streams_last_event(
    front: Front, path: str, rest: tuple[bytes, ...], told: str
) -> None:
    front.far.says(stream(said("so far"), *rest))
    answer = front.ask(path, stream=True)
    found = [item for item in events(answer.content) if item.data != "[DONE]"]
    assert answer.status_code == 200
    assert "so far" in answer.text
    assert told in found[-1].json["error"]["message"]
    whole = front.ask(path)
    assert (whole.status_code, told in whole.json()["error"]["message"]) == (502, True)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BOTH)
def test_client_that_goes_away_takes_the_upstream_connection_along(front: Front, path: str, streamed: bool) -> None:
    def drip(handler: Handler) -> None:
        while not front.far.free.wait(0.005):
            handler.wfile.write(said("x"))

    front.far.says(stream(said("x"), then=drip))
    client = httpx.Client(base_url=front.http.base_url)
    if streamed:
        with client.stream("POST", path, json=ASK | {"stream": True}) as answer:
            assert next(answer.iter_raw())
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json=ASK, timeout=0.3)
    client.close()
    assert front.far.gone.wait(10)


def test_both_apis_stream_what_comes_from_behind(front: Front) -> None:
    front.far.says(stream(said("Grüße, "), said("🌉"), ended("length", (7, 5))))
    chat = [item.json for item in events(front.ask(stream=True, stream_options={"include_usage": True}).content)[:-1]]
    assert "".join(choice["delta"].get("content") or "" for each in chat for choice in each["choices"]) == "Grüße, 🌉"
    assert chat[-1]["usage"]["prompt_tokens"] == 7
    said_there = [item.json for item in events(front.ask(MESSAGES, stream=True).content)]
    ending = next(item for item in said_there if item["type"] == "message_delta")
    assert ending["delta"]["stop_reason"] == "max_tokens"
    assert (ending["usage"]["input_tokens"], ending["usage"]["output_tokens"]) == (7, 5)


def test_choices_are_separate_requests_with_their_seeds(front: Front) -> None:
    front.far.says(stream(said("a"), ended("stop", (7, 1))))
    usage = front.ask(n=3, seed=5).json()["usage"]
    assert sorted(asked.body["seed"] for asked in front.far.asked) == [5, 6, 7]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 3)


def test_nothing_in_a_request_chooses_where_it_goes(front: Front) -> None:
    front.far.says(stream(said("a"), ended()))
    for fields in ({"url": "http://127.0.0.1:9"}, {"base_url": "http://127.0.0.1:9"}, {"api_base": "http://127.0.0.1:9"}):
        assert front.ask(**fields).status_code == 400
    assert front.ask(model="http://127.0.0.1:9/v1").status_code == 404
    assert not front.far.asked
    front.ask()
    assert [asked.path for asked in front.far.asked] == [CHAT]
