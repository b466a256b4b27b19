"""Streams byte for byte: every dialect's frames against the files in golden/, and through two SSE readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from astrai_runtime.errors import ProviderError
from astrai_runtime.event import Delta, Failed, Usage
from tests.protocols.sse import events

GOLDEN = Path(__file__).parent / "golden"
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "openai_plain": ("openai", "openai", "plain", {}),
    "openai_usage": ("openai", "openai", "length", {"stream_options": {"include_usage": True}}),
    "openai_two": ("openai", "openai", "two", {"n": 2, "stream_options": {"include_usage": True}}),
    "openai_logprobs": ("openai", "openai", "logprobs", {"logprobs": True, "top_logprobs": 2}),
    "openai_failed": ("openai", "openai", "failed", {}),
    "openai_astrai_plain": ("openai", "astrai", "plain", {}),
    "openai_astrai_failed": ("openai", "astrai", "failed", {}),
    "completion_plain": ("completion", "openai", "plain", {}),
    "completion_usage": ("completion", "openai", "length", {"stream_options": {"include_usage": True}}),
    "completion_two": ("completion", "openai", "two", {"n": 2, "echo": True, "stream_options": {"include_usage": True}}),
    "completion_logprobs": ("completion", "openai", "logprobs", {"logprobs": 2}),
    "completion_failed": ("completion", "openai", "failed", {}),
    "anthropic_plain": ("anthropic", "anthropic", "plain", {}),
    "anthropic_cached": ("anthropic", "anthropic", "length", {"cache_control": {"type": "ephemeral"}}),
    "anthropic_stopped": ("anthropic", "anthropic", "stopped", {"stop_sequences": ["END"]}),
    "anthropic_empty": ("anthropic", "anthropic", "empty", {}),
    "anthropic_failed": ("anthropic", "anthropic", "failed", {}),
    "anthropic_astrai_plain": ("anthropic", "astrai", "plain", {}),
    "anthropic_astrai_failed": ("anthropic", "astrai", "failed", {}),
}
FAILED = [(0, Delta("Hel")), (0, Failed(ProviderError("the logits are not finite"), Usage(5, 1, 0)))]


@pytest.fixture
def stream(speak: Callable[..., Any], scripts: dict[str, Any]) -> Callable[[str], bytes]:
    def run(case: str) -> bytes:
        kind, dialect, script, more = CASES[case]
        asked = USER
        if kind == "completion":
            asked = {"prompt": "Once upon", "max_tokens": 8, "stream": True}
            speaker = speak("openai", dialect, route=1, echoes=("Once upon",) if "echo" in more else ())
        else:
            speaker = speak(kind, dialect)
        made: bytes = speaker.stream(speaker.read(asked | more), {**scripts, "failed": FAILED}[script])
        return made

    return run


@pytest.mark.parametrize("case", CASES)
def test_stream_equals_its_golden_file(case: str, stream: Callable[[str], bytes]) -> None:
    assert stream(case) == (GOLDEN / f"{case}.sse").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_two_readers_see_the_same_events(case: str, stream: Callable[[str], bytes]) -> None:
    sent = stream(case)
    second = [(item.event or "message", item.data) for item in SSEDecoder().iter_bytes(iter([sent]))]
    assert [(item.event, item.data) for item in events(sent)] == second
    for item in events(sent):
        assert item.data == "[DONE]" or item.json is not None


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("anthropic") and "failed" not in case])
def test_every_choice_finishes_exactly_once_on_its_last_chunk(case: str, stream: Callable[[str], bytes]) -> None:
    last: dict[int, str | None] = {}
    for item in events(stream(case))[:-1]:
        for choice in item.json.get("choices", []):
            assert "finish_reason" in choice
            assert last.get(choice["index"]) is None, "a chunk came after the finish"
            last[choice["index"]] = choice["finish_reason"]
    assert last
    assert None not in last.values()


def test_golden_folder_holds_no_stale_file() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sse")} == set(CASES)


def test_seed_document_frames_have_the_seed_keys_in_order(stream: Callable[[str], bytes]) -> None:
    """The frames of AstrAI's guide, key by key."""
    role, text, *_, finish, usage, done = events(stream("openai_astrai_plain"))
    assert list(role.json) == ["id", "object", "created", "model", "choices"]
    assert role.json["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]
    assert (text.json["created"], role.json["created"], finish.json["created"]) == (0, 1717000000, 1717000000)
    assert json.loads(usage.data) == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert done.data == "[DONE]"
