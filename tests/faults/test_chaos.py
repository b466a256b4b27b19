"""Everything breaks at random, under pressure: whoever gets an answer gets the right one, and everyone gets an end."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from astrai_runtime import engine as engine_module
from astrai_runtime.batch import Batch
from astrai_runtime.event import Delta, Failed, Finished
from tests.provider.reading import Rig, expected, make_kv, prompt

SOON = 30.0
KV_OPERATIONS = ("reserve", "reuse", "next_page", "extend", "record", "release", "place", "stats")


class Killed(BaseException):
    """Ends the engine thread."""


class Chaos:
    """Makes calls raise, one in `odds`, before or after they did their work, until it is told to stop."""

    def __init__(self, seed: int, odds: int) -> None:
        self.dice = random.Random(seed)
        self.odds = odds
        self.raised = 0

    def strikes(self) -> bool:
        struck = self.odds > 0 and self.dice.randrange(self.odds) == 0
        self.raised += struck
        return struck

    def wrap(self, owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def faulty(*args: Any, **options: Any) -> Any:
            if self.strikes():
                raise RuntimeError(f"{name} failed before")
            result = work(*args, **options)
            if self.strikes():
                raise RuntimeError(f"{name} failed after")
            return result

        setattr(owner, name, faulty)


@pytest.mark.parametrize("deadly", [False, True])
@pytest.mark.parametrize("seed", range(int(os.environ.get("CHAOS_SEEDS", "4"))))  # `just faults` asks for more
def test_random_faults_under_pressure_change_no_answer_and_leave_nothing(
    seed: int, deadly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "WITHIN_S", 0.0)  # it may die as often as it likes
    chaos = Chaos(seed, odds=150)
    rig = Rig(make_kv(n_tokens=160), engine={"stream_bytes": 16}, max_batch_size=6, max_waiting=100)
    for name in KV_OPERATIONS:
        chaos.wrap(rig.kv, name)
    for stage in rig.engine.sampler.stages:
        chaos.wrap(stage, "apply")

    def before(batch: Batch) -> None:
        if chaos.strikes():
            raise Killed if deadly and chaos.dice.random() < 0.3 else MemoryError

    rig.provider.before = before
    dice = random.Random(seed)
    with rig:
        asked, streams = [], []
        for _ in range(60):
            tokens = [dice.randrange(65, 70) for _ in range(dice.randint(1, 40))]
            asked.append((tokens, dice.randint(1, 25)))
        for tokens, count in asked:
            with rig.engine._lock:
                assert rig.engine._flight.answered.wait_for(lambda: rig.engine.ready, SOON)
                streams.append(rig.engine.submit(prompt(tokens, count)))
        right = 0
        for (tokens, count), stream in zip(asked, streams, strict=True):
            *deltas, outcome = stream.events(SOON)
            text = "".join(delta.text for delta in deltas if isinstance(delta, Delta))
            assert expected(tokens, count).startswith(text)
            if isinstance(outcome, Finished):
                assert text == expected(tokens, count)
                right += 1
            else:
                assert isinstance(outcome, Failed)
                assert "failed" in str(outcome.error)
        chaos.odds = 0
        rig.deaths = rig.engine.restarts
        assert chaos.raised > 0
        assert right > 0 or deadly  # a death fails everybody at once
        assert (rig.deaths > 0) <= deadly
