"""The newcomer's path with the real model: `astrai-deploy +recipe=chat_paged`, then curl and the official SDKs."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from anthropic import Anthropic
from openai import OpenAI

Launched = Callable[[Path], AbstractContextManager[Callable[..., "subprocess.Popen[str]"]]]
pytestmark = pytest.mark.demo

BRIDGE = {"role": "user", "content": "What is a bridge?"}


@pytest.fixture(scope="module")
def service(demo_package: None, launched: Launched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of the running demo service, and the `curl` line that it printed."""
    with launched(tmp_path_factory.mktemp("home")) as start:
        process = start("+recipe=chat_paged", "server.port=0")
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr.read()
        line = next(line for line in iter(process.stderr.readline, "") if "curl -s" in line)
        yield url, line.strip()


def test_the_printed_curl_line_gets_a_sensible_answer(service: tuple[str, str]) -> None:
    _, line = service
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)["choices"][0]
    assert "structure" in answer["message"]["content"]
    assert answer["finish_reason"] == "stop"


def test_a_second_question_is_about_the_first_answer(service: tuple[str, str]) -> None:
    client = OpenAI(base_url=f"{service[0]}/v1", api_key="unused", timeout=60)
    first = client.chat.completions.create(model="gemma3-270m", messages=[BRIDGE], temperature=0)
    said = first.choices[0].message.content
    second = client.chat.completions.create(
        model="gemma3-270m",
        messages=[BRIDGE, {"role": "assistant", "content": said}, {"role": "user", "content": "What does it connect?"}],
        temperature=0,
        max_tokens=40,
    )
    assert second.choices[0].message.content
    assert "connect" in second.choices[0].message.content.lower() or "point" in second.choices[0].message.content.lower()
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_both_sdks_stream_the_same_greedy_answer(service: tuple[str, str]) -> None:
    openai = OpenAI(base_url=f"{service[0]}/v1", api_key="unused", timeout=60)
    chunks = openai.chat.completions.create(model="gemma3-270m", messages=[BRIDGE], temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    anthropic = Anthropic(base_url=service[0], api_key="unused", timeout=60)
    with anthropic.messages.stream(
        model="gemma3-270m", messages=[BRIDGE], max_tokens=64, extra_body={"temperature": 0}
    ) as stream:
        assert stream.get_final_text() == text
        assert stream.get_final_message().stop_reason == "end_turn"  # by the model card's own stop string
    assert "structure" in text
