"""A model card of the hub from nothing: `fetch` and `serve` download what is missing, and offline says what that is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.sources.standin import REPO, REVISION, Hub, serving_hub

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hub(tiny_checkpoints: Mapping[str, Path]) -> Iterator[Hub]:
    """A hub that has one random Qwen3 with its tokenizer and chat template."""
    with serving_hub() as running:
        running.files = {file.name: file.read_bytes() for file in tiny_checkpoints["qwen3"].iterdir() if file.is_file()}
        yield running


def card(hub: Hub) -> list[str]:
    """The shipped Qwen3 card, but for where it comes from."""
    files = "{" + ",".join(f"{name}: null" for name in hub.files) + "}"
    source = f"{{kind: hub, repo: {REPO}, revision: '{REVISION}', files: {files}, endpoint: '{hub.address}'}}"
    return ["+recipe=tiny", "model=qwen3_0_6b", f"model.source={source}"]


def test_serve_downloads_a_missing_model_and_answers(hub: Hub, launch: Launch) -> None:
    process = launch(*card(hub), "server.port=0")
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://"), process.stderr and process.stderr.read()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert {path.rpartition("/")[2] for path, _ in hub.gets()} == set(hub.files)


def test_fetch_then_offline_needs_no_hub(hub: Hub, launch: Launch) -> None:
    fetched = launch("fetch", *card(hub))
    _, err = fetched.communicate(timeout=60)
    assert fetched.returncode == 0, err
    hub.refusal = (503, None)
    asked = len(hub.requests)
    planned = launch("plan", *card(hub), "run.offline=true")
    out, err = planned.communicate(timeout=60)
    assert planned.returncode == 0, err
    assert "qwen3" in out
    assert len(hub.requests) == asked


def test_offline_says_what_is_missing_where_it_looked_and_what_gets_it(hub: Hub, launch: Launch) -> None:
    process = launch("serve", *card(hub), "run.offline=true", "server.port=0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    said = err.splitlines()[-1]
    assert "config.json" in said
    assert REVISION in said
    assert "astrai-deploy fetch" in said
    assert hub.requests == []
