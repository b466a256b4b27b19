"""A live service with one place, under clients that leave, crowd, abort and forget to read."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.protocols.sse import events
from tests.server.conftest import PATHS

ROOT = Path(__file__).resolve().parent.parent.parent
Serve = Callable[..., Any]
SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
# Most of the context: seconds of work.
LONG = SHORT | {"max_tokens": 1900}
SLOW_PROMPT = LONG | {"messages": [{"role": "user", "content": "x" * 1500}], "max_tokens": 400}


class Service:
    """`astrai-deploy +recipe=tiny` with one place and two that may wait."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    def until(self, holds: Callable[[dict[str, float]], bool], seconds: float = 20) -> dict[str, float]:
        deadline = time.monotonic() + seconds
        while not holds(found := self.metrics()):
            assert time.monotonic() < deadline, found
        return found

    def until_idle(self) -> dict[str, float]:
        return self.until(lambda seen: seen["astrai_running"] + seen["astrai_waiting"] + seen["astrai_kv_slots held"] == 0)

    def send(self, body: dict[str, Any]) -> socket.socket:
        """A request whose answer nobody has read yet."""
        data = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=20)
        client.sendall(f"POST {PATHS['openai']} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        return client


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ASTR", "HF_"))}
    environment |= {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", "OMP_NUM_THREADS": "1"}
    choices = ["+recipe=tiny", "server.port=0", "run.log_format=json"]
    choices += ["scheduler.max_batch_size=1", "scheduler.max_waiting=2", "scheduler.max_prompt_tokens_per_tick=16"]
    log = home / "stderr"
    with log.open("w") as errors:
        command = [sys.executable, "-m", "astrai_deploy.cli", "serve", *choices]
        process = subprocess.Popen(command, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), log.read_text()
        made = Service(line)
        yield made
        made.http.close()
        process.terminate()
        assert process.wait(20) == 0, log.read_text()


def close(client: socket.socket, how: str) -> None:
    if how == "rst":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_r01_a_client_that_went_away_gives_its_place_back(service: Service, how: str, stream: bool, phase: str) -> None:
    before = service.until_idle()
    holder = service.send(LONG) if phase == "waiting" else None
    if holder is not None:
        service.until(lambda seen: seen["astrai_running"] == 1)
    gone = service.send((SLOW_PROMPT if phase == "prefill" else LONG) | {"stream": stream})
    counted = before["astrai_requests_total"] + (2 if holder else 1)
    generated = before["astrai_generated_tokens_total"]
    service.until(
        lambda seen: (
            seen["astrai_requests_total"] == counted
            and (phase != "decode" or seen["astrai_generated_tokens_total"] > generated + 3)
            and (phase != "waiting" or seen["astrai_waiting"] == 1)
        )
    )
    close(gone, how)
    if holder is not None:
        service.until(lambda seen: seen["astrai_waiting"] == 0)
        close(holder, how)
    reply = service.http.post(PATHS["openai"], json=SHORT)
    assert reply.json()["usage"]["completion_tokens"] == 3
    after = service.until_idle()
    assert after["astrai_cancelled_total"] - before["astrai_cancelled_total"] == (2 if holder else 1)
    # Far fewer than the 1,900 that were asked for.
    assert after["astrai_generated_tokens_total"] - generated < 1500


def test_r03_overload_is_refused_at_once_and_the_rest_is_served_in_order(service: Service) -> None:
    service.until_idle()
    ended: list[tuple[int, int]] = []

    def ask(index: int) -> tuple[int, float, httpx.Response]:
        path = PATHS["openai"] if index % 2 else PATHS["anthropic"]
        body = {key: value for key, value in SHORT.items() if index % 2 or key != "ignore_eos"} | {"max_tokens": 200}
        began = time.monotonic()
        reply = httpx.post(f"{service.url}{path}", json=body, timeout=60)
        ended.append((index, reply.status_code))
        return index, time.monotonic() - began, reply

    first = service.send(LONG)
    service.until(lambda seen: seen["astrai_running"] == 1)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(ask, index) for index in range(9)]
        service.until(lambda seen: seen["astrai_waiting"] == 2)
        while sum(one.done() for one in asked) < 7:
            time.sleep(0.01)
        close(first, "fin")
        answers = [one.result() for one in asked]
    served = [reply for _, _, reply in answers if reply.status_code == 200]
    refused = [(took, reply) for _, took, reply in answers if reply.status_code != 200]
    assert (len(served), len(refused)) == (2, 7)
    for _, reply in refused:
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        error = reply.json()["error"]
        assert error.get("code") == "busy" or error["type"] == "overloaded_error"
    # Nobody who was refused waited for an answer of the others: all were told before the first place was free again.
    assert [status for _, status in ended[:7]] == [503] * 7


def test_r03_the_sdk_s_own_retry_then_succeeds(service: Service) -> None:
    service.until_idle()
    full = [service.send(LONG) for _ in range(3)]
    service.until(lambda seen: seen["astrai_running"] + seen["astrai_waiting"] == 3)
    refused = service.metrics()["astrai_refused_total"]
    with (
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=5) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = pool.submit(client.chat.completions.create, **ask)
        service.until(lambda seen: seen["astrai_refused_total"] > refused)
        for one in full:
            close(one, "fin")
        assert answer.result(30).usage.completion_tokens <= 3


def test_the_running_scheduler_is_tuned_by_an_admin(service: Service) -> None:
    for value in (64, 16):
        reply = service.http.patch("/admin/scheduler", json={"max_prompt_tokens_per_tick": value})
        assert (reply.status_code, reply.json()) == (200, {"max_prompt_tokens_per_tick": value})
    before = service.until_idle()["astrai_ticks_total"]
    body = SHORT | {"messages": [{"role": "user", "content": "y" * 300}], "max_tokens": 1}
    assert service.http.post(PATHS["openai"], json=body).status_code == 200
    assert service.until_idle()["astrai_ticks_total"] - before >= 300 // 16
    for wrong in ({}, {"max_prompt_tokens_per_tick": 0}, {"max_prompt_tokens_per_tick": "a"}, {"max_batch_size": 9}, []):
        reply = service.http.patch("/admin/scheduler", json=wrong)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), wrong
    assert service.http.patch("/admin/scheduler", content=b"{").json()["error"]["type"] == "invalid_request_error"
    assert service.http.patch("/admin/scheduler", content=b"x" * 9999).status_code == 413


def test_r02_nothing_is_left_behind_by_many_requests(service: Service) -> None:
    def some(count: int) -> dict[str, float]:
        for index in range(count):
            if index % 4 == 0:
                client = service.send(LONG | {"stream": index % 8 == 0})
                if index % 8 == 0:
                    client.recv(200)
                close(client, "rst" if index % 3 else "fin")
            elif index % 4 == 1:
                assert service.http.post(PATHS["openai"], json={"messages": []}).status_code == 400
            else:
                body = SHORT | {"stream": index % 4 == 3, "max_tokens": 2}
                while service.http.post(PATHS["openai"], json=body).status_code == 503:
                    pass  # an aborted one still holds a place for a moment
        return service.until_idle()

    before = some(100)
    after = some(200)
    assert after["process_resident_memory_bytes"] < 1.05 * before["process_resident_memory_bytes"]
    after = service.until(lambda seen: seen["process_open_fds"] <= before["process_open_fds"] + 2)
    assert after["astrai_http_requests_in_progress"] == 1
    assert after["astrai_kv_slots held"] == 0
    counted = [after[f"astrai_{name}_total"] for name in ("finished", "cancelled", "failed")]
    assert after["astrai_requests_total"] == sum(counted)


def test_r04_a_slow_reader_pauses_only_itself_and_misses_nothing(serve: Serve) -> None:
    live = serve()
    text = "".join(f"<{number}>" for number in range(1_000_000))  # more than the kernel's buffers hold
    data, done = memoryview(text.encode()), 0

    def many(play: Any) -> None:
        nonlocal done
        while done < len(data):
            done += (taken := play.stream.put(data[done : done + 4096]))
            if not taken:
                play.changed.wait(10)
                play.changed.clear()
        play.end("length")

    live.engine.script = many
    body = json.dumps(SHORT | {"stream": True}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", live.server.port))
        slow.settimeout(20)
        slow.sendall(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % (PATHS["openai"].encode(), len(body)) + body)
        before = -1
        while done == 0 or done != before:  # until nothing moves any more
            before = done
            time.sleep(0.1)
        assert done < len(data)
        live.engine.script = lambda play: (play.say("quick"), play.end())
        for _ in range(5):
            assert "quick" in live.chat(stream=True).text
        assert done == before
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = bytearray()
        while piece := slow.recv(1 << 20):
            received += piece
    frames = events(bytes(received).partition(b"\r\n\r\n")[2])
    assert "".join(one.json["choices"][0]["delta"].get("content", "") for one in frames[:-1]) == text


def test_each_token_is_sent_when_it_is_there_in_one_piece(serve: Serve) -> None:
    live = serve()
    read = threading.Semaphore(0)

    def careful(play: Any) -> None:
        for number in range(20):
            play.say(f"<{number}>")
            assert read.acquire(timeout=10)  # the next one comes only after this one was seen
        play.end()

    live.engine.script = careful
    pieces = []
    with live.http.stream("POST", PATHS["openai"], json=SHORT | {"stream": True}) as reply:
        for piece in reply.iter_raw():
            pieces.append(piece)
            if b"<" in piece:
                read.release()
    assert sum(b"<" in piece for piece in pieces) == 20
    assert all(piece.endswith(b"\n\n") for piece in pieces)
