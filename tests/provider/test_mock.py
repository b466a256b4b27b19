"""The scripted provider through the real engine: what it says, that it says the same everywhere, and how it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from astrai_deploy.build import open_engine
from astrai_runtime.engine import Engine
from astrai_runtime.errors import AstraiError, ProviderError
from astrai_runtime.event import Failed, Finished
from astrai_runtime.kv.base import KVMode
from astrai_runtime.provider.base import ModelInfo, Provider
from astrai_runtime.provider.mock import MockConfig, MockProvider
from astrai_runtime.request import Limits, Prompt, SamplingParams
from astrai_runtime.sampling._pipeline import Sampler
from tests.provider.reading import GREEDY, make_kv, make_scheduler, prompt

SCRIPT = "Grüße, 🌉!"
DECLARED: dict[str, Any] = {
    "kind": "mock",
    "mode": "script",
    "replies": [{"when": None, "say": SCRIPT}],
    "tool_call": {"name": "f", "arguments": {"x": [1, {"y": "é}"}]}},
    "sharpness": 30.0,
    "delay_ms": 0,
    "check_kv": True,
    "faults": [],
}


class Plans:
    """As much of `Materials` as the mock asks for."""

    template = "auto"
    device = "cpu"
    sampling = ()
    phases = {"prefill": "torch_native", "decode": "torch_native"}  # noqa: RUF012

    def __init__(self, kv: KVMode) -> None:
        self._kv = kv
        self.info = ModelInfo("mock", "mock", 0, 0, kv.shape.context, 0)

    def kv(self) -> KVMode:
        return self._kv

    def text(self) -> Any:
        raise AssertionError("the mock reads no files")

    decoder = backends = text


def unattached(**options: Any) -> KVMode:
    """A KV mode that still waits for its storage."""
    kv = make_kv(**options)
    return type(kv)(kv.config, kv.shape)


@contextmanager
def mocking(kv: KVMode | None = None, scheduler: dict[str, int] | None = None, **changes: Any) -> Iterator[Engine]:
    provider: Provider = MockProvider.open(MockConfig.model_validate(DECLARED | changes), Plans(kv or unattached()))
    engine = Engine(provider, make_scheduler(provider.kv, **(scheduler or {})), Sampler([], 258), defaults=GREEDY)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        provider.kv.check_integrity([])


def test_script_is_said_and_then_it_ends() -> None:
    with mocking() as engine:
        assert engine.generate("anything") == SCRIPT
        outcome = list(engine.submit(prompt("x", max_tokens=None)).events(10))[-1]
        assert isinstance(outcome, Finished)
        assert (outcome.reason, outcome.usage.completion_tokens) == ("stop", len(SCRIPT.encode()) + 1)
        assert engine.generate("x", max_tokens=3) == "Gr\ufffd"
        assert engine.generate("x", stop=", ") == "Grüße"


def test_reply_is_chosen_by_what_was_said_last() -> None:
    replies = [{"when": "weather", "say": "Rain."}, {"when": "time", "say": "Noon."}, {"when": None, "say": "What?"}]
    with mocking(replies=replies) as engine:
        assert engine.generate("the weather?") == "Rain."
        assert engine.generate("the weather? and the time?") == "Noon."
        assert engine.generate("the time? and the weather?") == "Rain."
        assert engine.generate("hello") == "What?"


def test_free_replies_take_turns_within_a_conversation() -> None:
    with mocking(replies=[{"when": None, "say": "One."}, {"when": None, "say": "Two."}]) as engine:
        assert [engine.generate("a"), engine.generate("a")] == ["One.", "One."]
        assert engine.generate("a One. b") == "Two."
        assert engine.generate("a One. b Two. c") == "One."


def test_tool_call_is_written_as_json() -> None:
    with mocking(mode="tool_call") as engine:
        said = engine.generate("x")
        assert said == '<tool_call>\n{"name": "f", "arguments": {"x": [1, {"y": "é}"}]}}\n</tool_call>'


def test_infinite_mode_ends_by_the_limit_alone() -> None:
    with mocking(mode="infinite", replies=[{"when": None, "say": "ab"}]) as engine:
        assert engine.generate("x", max_tokens=7) == "abababa"
        outcome = list(engine.submit(prompt("x", max_tokens=None)).events(10))[-1]
        assert isinstance(outcome, Finished)
        assert (outcome.reason, outcome.usage.completion_tokens) == ("length", 255)


def test_echo_says_what_the_model_was_given() -> None:
    with mocking(mode="echo") as engine:
        assert engine.generate("what I said: é") == "what I said: é"


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_neighbours_preemption_and_shared_pages_change_nothing(kind: str) -> None:
    options = {"kind": kind, "rows": 4, "context": 128, "n_tokens": 160, "page_size": 4}
    with mocking(unattached(**options), {"max_batch_size": 4, "max_batch_tokens": 8}, mode="echo") as engine:
        texts = [f"the same beginning of {'some' * (i % 3)} prompts {i}" for i in range(12)]
        assert engine.generate(texts) == texts


def test_pool_that_mixes_up_its_tokens_is_noticed() -> None:
    with mocking() as engine:
        kv = engine.provider.kv
        place = kv.place

        def damaged(batch: Any) -> Any:
            view = place(batch)
            if batch.positions[-1] > 8:
                view.k_buffer[0, view.req_to_token[view.req_pool_indices[0], 2].long()] += 1
            return view

        kv.place = damaged  # type: ignore[method-assign]
        with pytest.raises(ProviderError, match="lost or mixed up"):
            engine.generate("hello")


@pytest.mark.parametrize("how", ["error", "memory", "nan"])
@pytest.mark.parametrize("after", [0, 3])
def test_declared_fault_fails_its_request_and_no_other(how: str, after: int) -> None:
    with mocking(faults=[{"when": "fail me", "after": after, "how": how}]) as engine:
        streams = [engine.submit(prompt(text, max_tokens=None)) for text in ("a", "please fail me", "b")]
        ends = [list(answer.events(10)) for answer in streams]
        outcome = ends[1][-1]
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, AstraiError)
        assert outcome.usage.completion_tokens == after
        for end in (ends[0], ends[2]):
            assert isinstance(end[-1], Finished)
            assert "".join(event.text for event in end[:-1]) == SCRIPT  # type: ignore[union-attr]


def test_low_sharpness_lets_samples_stray_and_greedy_ones_not() -> None:
    with mocking(sharpness=1.0) as engine:
        warm = {engine.submit(seeded(seed)).read(timeout=10) for seed in range(4)}
        assert len(warm) > 1
        assert engine.submit(seeded(1)).read(timeout=10) == engine.submit(seeded(1)).read(timeout=10)
        assert engine.generate("x") == SCRIPT


def seeded(seed: int) -> Prompt:
    return Prompt(tuple(b"x"), SamplingParams(seed=seed), Limits(max_tokens=1))


def test_logits_leave_no_token_out() -> None:
    with mocking() as engine:
        kv = engine.provider.kv
        assert kv.stats().held == 0
    mock = MockProvider(MockConfig.model_validate(DECLARED | {"check_kv": False}), make_kv())
    from tests.provider.test_local import batch

    logits = mock.run(batch(make_kv(), 3))
    assert logits.shape == (1, 258)
    assert torch.isfinite(logits).all()
    assert int(logits.argmax()) == ord("G")


def test_delay_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("astrai_runtime.provider.mock.time.sleep", waited.append)
    with mocking(delay_ms=2.5) as engine:
        engine.generate("x", max_tokens=3)
    assert waited == [0.0025] * 3


def test_script_without_a_free_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="when: null"):
        MockConfig.model_validate(DECLARED | {"replies": [{"when": "a", "say": "b"}]})


def test_two_processes_say_the_same_bytes() -> None:
    ask = "[engine.generate(['a', 'bb'], seed=5, temperature=1, max_tokens=20), engine.generate('c', temperature=0)]"
    code = (
        "from astrai_deploy.build import open_engine\n"
        f"with open_engine('+recipe=mock', 'provider.sharpness=1') as engine: print({ask})"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    with open_engine("+recipe=mock", "provider.sharpness=1") as engine:
        here = [engine.generate(["a", "bb"], seed=5, temperature=1, max_tokens=20), engine.generate("c", temperature=0)]
    assert there == f"{here}\n"
    assert here[1] == "This answer is a script: no model was asked."
