"""Sampling inside the engine: what one request asks for concerns no other, however they are scheduled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from astrai_runtime.errors import InvalidRequest
from astrai_runtime.request import Prompt, SamplingParams
from astrai_runtime.stream import Stream
from tests.provider.reading import GREEDY, VOCABULARY, Rig, expected, make_kv, prompt

SOON = 20.0
SEEDED = SamplingParams(temperature=1.0, seed=3)
ASKED = {
    "greedy": GREEDY,
    "top_k": replace(SEEDED, top_k=2),
    "forced": replace(GREEDY, logit_bias=((66, 100.0),)),
    "penalties": replace(SEEDED, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2),
    "typical_p": replace(SEEDED, extra={"typical_p": 0.5}),
    "mirostat": replace(SEEDED, extra={"mirostat": 2, "mirostat_tau": 2.0}),
}


def asked(name: str, **fields: Any) -> Prompt:
    return prompt(f"{name:10s}", 40, ASKED[name], **fields)


def text_of(stream: Stream) -> str:
    return "".join(event.text for event in list(stream.events(SOON))[:-1])


def answers(names: list[str], *, pool: int = 2048) -> tuple[dict[str, str], int]:
    with Rig(make_kv(n_tokens=pool)) as rig:
        streams = {name: rig.engine.submit(asked(name)) for name in names}
        return {name: text_of(stream) for name, stream in streams.items()}, rig.engine.counters().preemptions


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    return {name: answers([name])[0][name] for name in ASKED}


def test_s08_requests_of_every_kind_are_answered_as_if_they_were_alone(alone: dict[str, str]) -> None:
    together, _ = answers(list(ASKED))
    assert together == alone
    assert together["greedy"] == expected(list(b"greedy    "), 40)
    assert together["forced"] == "B" * 40
    assert len(set(together.values())) == len(ASKED)


def test_preemption_forgets_nothing_that_a_sampler_remembers(alone: dict[str, str]) -> None:
    squeezed, preemptions = answers(list(ASKED), pool=112)
    assert preemptions > 0
    assert squeezed == alone


BAD_BIASES = [
    *(((-1, 1.0),), ((VOCABULARY, 1.0),), ((999_999, 1.0),), ((65, 101.0),), ((65, math.nan),)),
    tuple((token, -100.0) for token in range(VOCABULARY)),
]


def test_s05_a_bias_that_cannot_be_honoured_is_refused_and_disturbs_nobody(alone: dict[str, str]) -> None:
    with Rig() as rig:
        running = rig.engine.submit(asked("mirostat"))
        for bias in BAD_BIASES:
            with pytest.raises(InvalidRequest) as caught:
                rig.engine.submit(prompt("bad", 4, replace(GREEDY, logit_bias=bias)))
            assert caught.value.param == "/logit_bias"
        assert text_of(running) == alone["mirostat"]
        assert text_of(rig.engine.submit(prompt("next", 4))) == expected(list(b"next"), 4)


@pytest.mark.parametrize("extra", [{"mirostat": 1}, {"mirostat": 2.5}, {"typical_p": -0.1}, {"mirostat_eta": math.nan}])
def test_knobs_out_of_range_are_refused_by_name(extra: dict[str, float]) -> None:
    with Rig() as rig, pytest.raises(InvalidRequest) as caught:
        rig.engine.submit(prompt("bad", 4, replace(SEEDED, extra=extra)))
    assert caught.value.param == f"/{next(iter(extra))}"
