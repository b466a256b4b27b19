"""Who gets what in which tick, seen by the provider of a running engine: order, caps, fairness, determinism."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest

from astrai_runtime.batch import Batch
from astrai_runtime.errors import InvalidRequest, Unsupported
from astrai_runtime.event import Delta
from astrai_runtime.request import SamplingParams
from astrai_runtime.scheduler.base import Scheduler
from astrai_runtime.stream import Stream
from tests.provider.reading import GREEDY, Rig, make_kv, prompt

SOON = 30.0
CAP, TALKERS, LONG = 64, 3, 10_000


def text_of(stream: Stream) -> str:
    return "".join(event.text for event in stream.events(SOON) if isinstance(event, Delta))


def worst_gap(cap: int) -> int:
    """The most tokens that were computed from one token of a decoding sequence to its next, while a long prompt joined."""
    kv = make_kv(context=LONG + 200, page_size=16, n_tokens=LONG + 2000)
    with Rig(kv, max_batch_tokens=LONG + 100, max_prompt_tokens_per_tick=cap) as rig:
        joined, talking = threading.Event(), threading.Event()

        def before(batch: Batch) -> None:
            if len(batch.sampled) == TALKERS and not joined.is_set():
                talking.set()
                assert joined.wait(SOON)

        rig.provider.before = before
        talkers = [rig.engine.submit(prompt(f"talker {i}", 180)) for i in range(TALKERS)]
        assert talking.wait(SOON)
        long = rig.engine.submit(prompt([65 + i % 20 for i in range(LONG)], 1))
        joined.set()
        for stream in [*talkers, long]:
            text_of(stream)
        batches = rig.provider.batches
    computed, since, worst, shared = 0, dict[int, int](), 0, 0
    for batch in batches:
        lengths = {chunk.sequence.id: chunk.length for chunk in batch.chunks if chunk.sequence.n_prompt < LONG}
        computed += batch.n_tokens
        if len(lengths) == len(batch.chunks):
            since = {}
            continue  # the long prompt is not here
        shared += 1
        for one in lengths:
            worst = max(worst, computed - since.get(one, computed - batch.n_tokens))
            since[one] = computed
        talking_now = [one for one in since if one in lengths]
        assert len(talking_now) == TALKERS  # nobody missed this tick
    assert shared == -(-LONG // cap)
    return worst


def test_prompt_of_ten_thousand_tokens_never_costs_a_decoding_sequence_its_token() -> None:
    assert worst_gap(CAP) == CAP + TALKERS
    assert worst_gap(LONG) > CAP + TALKERS  # without the cap somebody would wait for all of it


def test_cap_changes_while_the_engine_runs_and_the_next_tick_obeys() -> None:
    with Rig(max_prompt_tokens_per_tick=16) as rig:

        def before(batch: Batch) -> None:
            if len(rig.provider.batches) == 3:
                other = threading.Thread(target=rig.engine.tune, kwargs={"max_prompt_tokens_per_tick": 5})
                other.start()
                other.join()

        rig.provider.before = before
        text_of(rig.engine.submit(prompt([65] * 63, 1)))
        assert [batch.n_tokens for batch in rig.provider.batches] == [16, 16, 16, 5, 5, 5]
        with pytest.raises(InvalidRequest, match="at least 1"):
            rig.engine.tune(max_prompt_tokens_per_tick=0)


def test_scheduler_without_such_a_cap_says_so() -> None:
    with Rig() as rig, pytest.raises(Unsupported, match="max_prompt_tokens_per_tick"):
        Scheduler.tune(rig.scheduler, max_prompt_tokens_per_tick=5)


def test_sequences_that_began_together_never_differ_by_more_than_their_prompts_ticks() -> None:
    lengths = [3, 60, 7, 90, 20, 1]
    with Rig(max_batch_tokens=32, max_prompt_tokens_per_tick=8) as rig:
        spreads, begun = [], threading.Event()

        def before(batch: Batch) -> None:
            assert begun.wait(SOON)
            alive = [chunk.sequence.n_generated for chunk in batch.chunks]
            if len(alive) == len(lengths):
                spreads.append(max(alive) - min(alive))

        rig.provider.before = before
        streams = [rig.engine.submit(prompt([65 + i] * n, 60)) for i, n in enumerate(lengths)]
        begun.set()
        for stream in streams:
            text_of(stream)
    # 26 or more of 32 tokens of each tick go to prompts while there are any, at most 8 to one of them.
    assert max(spreads) <= max(-(-sum(lengths) // 26), -(-max(lengths) // 8)) + 1


def test_every_decoding_sequence_gets_one_token_each_tick() -> None:
    with Rig() as rig:
        streams = [rig.engine.submit(prompt(f"{i}", 30)) for i in range(8)]
        for stream in streams:
            text_of(stream)
        counts = defaultdict[int, list[int]](list)
        for tick, batch in enumerate(rig.provider.batches):
            for sequence in batch.sampled:
                counts[sequence.id].append(tick)
    for ticks in counts.values():
        assert ticks == list(range(ticks[0], ticks[0] + 30))


SEEDED = SamplingParams(
    temperature=1.1, top_k=30, top_p=0.9, min_p=0.02, seed=3, presence_penalty=0.4, repetition_penalty=1.2
)
SETTINGS: list[dict[str, Any]] = [
    {"kv": {"kind": "contiguous"}, "cap": 256},
    *({"kv": {"page_size": size, "prefix_cache": cache}, "cap": 7} for size in (1, 4, 32) for cache in (False, "auto")),
    *({"kv": {"page_size": 4}, "cap": cap} for cap in (1, 16, 256)),
    {"kv": {"page_size": 4, "n_tokens": 96}, "cap": 16},  # so small that they take it from each other
]


def answers(settings: dict[str, Any], *, neighbours: int) -> list[str]:
    with Rig(make_kv(**settings["kv"]), max_batch_tokens=260, max_prompt_tokens_per_tick=settings["cap"]) as rig:
        held = threading.Event()
        rig.provider.before = lambda batch: held.wait(SOON)
        noise = [rig.engine.submit(prompt(f"noise {i}" * i, 25, SamplingParams(seed=i))) for i in range(1, neighbours + 1)]
        streams = [rig.engine.submit(prompt("the same request", 40, sampling)) for sampling in (SEEDED, GREEDY)]
        held.set()
        texts = [text_of(stream) for stream in streams]
        for stream in noise:
            text_of(stream)
        return texts


@pytest.fixture(scope="module")
def alone() -> list[str]:
    return answers({"kv": {"kind": "contiguous"}, "cap": 256}, neighbours=0)


@pytest.mark.parametrize("neighbours", [0, 5])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_seed_and_request_give_the_same_tokens_whatever_surrounds_them(
    settings: dict[str, Any], neighbours: int, alone: list[str]
) -> None:
    assert answers(settings, neighbours=neighbours) == alone


def test_other_seed_gives_other_tokens(alone: list[str]) -> None:
    with Rig() as rig:
        other = rig.engine.submit(prompt("the same request", 40, SamplingParams(temperature=1.1, seed=4)))
        assert text_of(other) != alone[0]
