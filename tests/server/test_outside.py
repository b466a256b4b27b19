"""Nothing that a request names is opened or fetched: model names that look like paths, images that look like addresses."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import PATHS

Serve = Callable[..., Any]
SENTINEL = "sentinel-of-the-test"
FILE_EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink")
REACHING = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")


class Watch:
    """Notes what this process opens and connects to. An audit hook cannot be taken out again, so there is one."""

    def __init__(self) -> None:
        self.seen: list[str] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.seen is None:
            return
        if event in FILE_EVENTS and arguments:
            self.seen.append(f"{event} {arguments[0]}")
        elif event in REACHING and threading.current_thread() is not threading.main_thread():  # where the test's client is
            self.seen.append(f"{event} {arguments[1:]}")

    @contextlib.contextmanager
    def during(self) -> Iterator[list[str]]:
        self.seen = seen = []
        try:
            yield seen
        finally:
            self.seen = None


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def names_of(folder: Path) -> list[str]:
    """Ways to name a file that exists, and the same ways to name one that does not."""
    there = str(folder / SENTINEL)
    return [
        f"../{SENTINEL}",
        f"a/../../{SENTINEL}",
        there,
        f"/{there}",
        f"{there}-missing",
        f"link/{SENTINEL}",
        "..",
        ".",
        "./",
        "a/",
        "tiny/",
        "tiny/../tiny",
        "tiny\0",
        f"\0{there}",
        "x" * 300,
        "\u2024\u2024/x",
        "..\u2215x",
        "..\uff0fx",
        "..\\x",
        "C:\\x",
        "~/x",
        "file:///etc/passwd",
        "%2e%2e/x",
        "..%2fx",
        "tiny\n",
        "ТINY",
        "${oc.env:HOME}",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, and a link that leads to it."""
    (tmp_path / SENTINEL).write_text("of no one's business")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link").symlink_to(tmp_path)
    return tmp_path


def get(live: Any, target: str) -> tuple[int, bytes]:
    """Asks for exactly this: other clients tidy dots and slashes away."""
    client = http.client.HTTPConnection("127.0.0.1", live.server.port, timeout=10)
    client.putrequest("GET", target)
    client.endheaders()
    reply = client.getresponse()
    status, body = reply.status, reply.read()
    client.close()
    return status, body


def _said(text: str, name: str) -> str:
    """The message without the name that it repeats."""
    return text.split("'")[0] + text.rsplit("'", 1)[-1]


def test_r08_names_in_addresses_open_nothing_and_all_sound_alike(serve: Serve, folder: Path, watch: Watch) -> None:
    live = serve()
    live.http.get("/v1/models/warm")  # whatever is imported late is imported now
    said = set()
    for name in names_of(folder):
        encoded = "".join(f"%{byte:02X}" for byte in name.encode())
        for written in (encoded, encoded.replace("%2F", "/").replace("%2E", ".")):
            with watch.during() as seen:
                status, body = get(live, f"/v1/models/{written}")
            assert status in (400, 404), (name, body)
            assert not [one for one in seen if SENTINEL in one or "models" in one or ".." in one], (name, seen)
            error = json.loads(body)["error"]
            if error["code"] == "model_not_found":
                said.add(_said(error["message"], name))
                assert len(error["message"]) < 200
    assert len(said) == 1


def test_r08_names_in_bodies_open_nothing_and_all_sound_alike(serve: Serve, folder: Path, watch: Watch) -> None:
    live = serve()
    live.chat(model="warm")
    live.message(model="warm")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    for ask in (live.chat, live.message):
        said = set()
        for name in names_of(folder):
            with watch.during() as seen:
                reply = ask(model=name)
            assert reply.status_code in (400, 404), (name, reply.text)
            assert not [one for one in seen if SENTINEL in one or ".." in one], (name, seen)
            if reply.status_code == 404:
                said.add(_said(reply.json()["error"]["message"], name))
        assert len(said) == 1
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
    assert live.engine.plays == []


def image(kind: str, url: str) -> dict[str, Any]:
    if kind == "openai":
        return {"type": "image_url", "image_url": {"url": url}}
    if url.startswith("data:"):
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}
    return {"type": "image", "source": {"type": "url", "url": url}}


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_r09_images_are_refused_and_nothing_is_fetched(serve: Serve, watch: Watch, tmp_path: Path) -> None:
    live = serve()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        port = listener.getsockname()[1]
        addresses = [
            f"http://127.0.0.1:{port}/x.png",
            f"http://[::1]:{port}/x.png",
            f"http://0.0.0.0:{port}/x.png",
            f"http://2130706433:{port}/x.png",
            f"http://0x7f.1:{port}/x.png",
            f"http://localhost:{port}/x.png",
            f"http://user:pass@127.0.0.1:{port}/x.png",
            f"//127.0.0.1:{port}/x.png",
            f"ftp://127.0.0.1:{port}/x.png",
            "http://169.254.169.254/latest/meta-data/",
            "http://localtest.example/x.png",
            f"file://{tmp_path}/{SENTINEL}",
            f"/{tmp_path}/{SENTINEL}",
            PIXEL,
        ]
        for kind, path in PATHS.items():
            for url in addresses:
                parts = [{"type": "text", "text": "hi"}, image(kind, url)]
                for role in ("user", "assistant"):
                    body = {
                        "max_tokens": 8,
                        "messages": [{"role": "user", "content": "hi"}, {"role": role, "content": parts}],
                    }
                    with watch.during() as seen:
                        reply = live.http.post(path, json=body)
                    assert reply.status_code == 400, (kind, url)
                    assert "image" in reply.text or "type" in reply.text
                    assert not [one for one in seen if "socket." in one or SENTINEL in one], seen
        with pytest.raises(BlockingIOError):
            listener.accept()  # nobody ever connected
    assert live.engine.plays == []
