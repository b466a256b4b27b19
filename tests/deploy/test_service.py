"""The service as a process: it says where it listens, answers, drains on a signal, and exits with the right code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

Launch = Callable[..., "subprocess.Popen[str]"]
# A scripted model that takes 10 ms a token and never ends by itself: what runs is still running when a signal arrives.
STEADY = ("+recipe=mock", "provider.mode=infinite", "provider.delay_ms=10", "server.port=0")
LONG = {"messages": [{"role": "user", "content": "Tell me everything."}], "max_tokens": 300}


def url_of(process: subprocess.Popen[str]) -> str:
    """Waits for the one line that the service writes to standard output."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line.startswith("http://127.0.0.1:"), (line, process.stderr and process.stderr.read())
    return line


def wait_for_drain(url: str) -> None:
    """Returns when the service says that it is not ready any more; its drain goes on while a stream runs."""
    with httpx.Client(base_url=url) as client:
        while client.get("/ready").status_code != 503:
            pass


@contextmanager
def running_stream(url: str) -> Iterator[tuple[httpx.Client, Iterator[str]]]:
    """A long streamed answer whose first frame has arrived."""
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as reply,
    ):
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        yield client, lines


def test_the_service_answers_and_ends_with_0_on_sigterm(launch: Launch) -> None:
    process = launch("+recipe=tiny", "server.port=0")
    url = url_of(process)
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "model_loaded": True}
    assert httpx.get(f"{url}/ready").status_code == 200
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said
    assert "curl -s http://127.0.0.1:" in said
    assert "kernels.isa" in said  # the plan is part of what the terminal says


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(launch: Launch) -> None:
    process = launch("serve", *STEADY, "server.drain_s=60")
    url = url_of(process)
    with running_stream(url) as (_, lines):
        process.send_signal(signal.SIGTERM)
        wait_for_drain(url)
        refused = httpx.post(f"{url}/v1/chat/completions", json=LONG)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace('": "', '":"')
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event(launch: Launch) -> None:
    process = launch(*STEADY, "server.drain_s=0")
    url = url_of(process)
    with running_stream(url) as (_, lines):
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert '"error"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_second_interrupt_stops_at_once(launch: Launch) -> None:
    process = launch(*STEADY, "server.drain_s=600")
    url = url_of(process)
    with running_stream(url):
        process.send_signal(signal.SIGINT)
        wait_for_drain(url)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
    assert process.returncode == 130


@contextmanager
def asked(url: str, body: dict[str, object]) -> Iterator[socket.socket]:
    """A request whose answer nobody has read yet."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as client:
        client.sendall(head.encode() + data)
        yield client


def answer_of(client: socket.socket) -> str:
    return b"".join(iter(lambda: client.recv(65536), b"")).decode()


@pytest.mark.parametrize("drain_s", [60, 0.2])
def test_r06_sigterm_ends_live_streams_with_a_word_and_sends_the_queue_away(launch: Launch, drain_s: float) -> None:
    process = launch(*STEADY, f"server.drain_s={drain_s}", "scheduler.max_batch_size=2", "run.log_format=json")
    url = url_of(process)
    with ExitStack() as open_ones:
        live = [open_ones.enter_context(running_stream(url))[1] for _ in range(2)]
        queued = [open_ones.enter_context(asked(url, {**LONG, "stream": stream})) for stream in (True, False)]
        while httpx.get(f"{url}/stats").json()["waiting_queue"] < 2:
            pass
        process.send_signal(signal.SIGTERM)
        for client in queued:  # not after the live ones: at once
            said = answer_of(client)
            assert said.startswith("HTTP/1.1 503 "), said
            assert "\r\nretry-after: " in said
            assert '"not_ready"' in said
        if drain_s > 1:
            refused = httpx.post(f"{url}/v1/chat/completions", json=LONG)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
        for lines in live:
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert ('"finish_reason"' in rest[-2]) == (drain_s > 1), rest[-2]
            assert ('"error"' in rest[-2]) == (drain_s < 1)
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0, log
    drained = [json.loads(line) for line in log.splitlines() if '"drained"' in line]
    assert [entry["complete"] for entry in drained] == [drain_s > 1]


def test_r06_a_second_sigterm_ends_everything_at_once(launch: Launch) -> None:
    process = launch(*STEADY, "server.drain_s=600", "scheduler.max_batch_size=2")
    url = url_of(process)
    with running_stream(url), running_stream(url), asked(url, LONG) as queued:
        process.send_signal(signal.SIGTERM)
        assert answer_of(queued).startswith("HTTP/1.1 503 ")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
    assert process.returncode in (143, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["machine=h100"], 2, "serving runs on this machine: use machine=auto"),
        (["kv.n_tokens=400000000000"], 3, "kv.n_tokens"),
        (["kv.page_sise=8"], 2, "did you mean 'page_size'?"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_listens(
    launch: Launch, arguments: list[str], code: int, said: str
) -> None:
    process = launch("+recipe=tiny", "server.port=0", *arguments)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert said in " ".join(err.split())
    assert out == ""


def test_a_taken_port_is_said_in_one_line(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = launch("+recipe=tiny", f"server.port={taken.getsockname()[1]}")
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "choose another server.port" in err
    assert "Traceback" not in err


def test_a_load_that_fails_is_said_in_one_line(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    process = launch("+recipe=remote", f"provider.url=http://127.0.0.1:{port}/v1", "model.name=x", "server.port=0")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "cannot be reached" in err.splitlines()[-1]
    assert "Traceback" not in err
