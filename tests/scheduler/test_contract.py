"""What every scheduler promises, for every file of scheduler/."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from astrai_runtime import part
from astrai_runtime.scheduler.base import Scheduler
from tests.provider.reading import make_kv
from tests.scheduler.test_continuous import end, sequence, step

CONF = Path(__file__).resolve().parent.parent.parent / "conf" / "scheduler"


@pytest.fixture(params=part.names("scheduler"))
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    """As its YAML declares it."""
    made = part.load("scheduler", request.param)
    config = made.Config(**yaml.safe_load((CONF / f"{request.param}.yaml").read_text()))
    built: Scheduler = made(config, make_kv())
    return built


def test_every_sequence_is_served_to_its_end(scheduler) -> None:
    sequences = [sequence(length) for length in (1, 40, 7, 90, 3, 3, 3, 3, 3, 3)]
    for one in sequences:
        scheduler.add(one)
    for _ in range(100):
        step(scheduler)
        for one in sequences:
            if one.n_generated == 4 and one.outcome is None:
                end(scheduler, one)
    assert all(one.n_generated == 4 for one in sequences)
    assert scheduler.kv.stats().held == 0


def test_steps_stay_under_their_cap_with_one_chunk_a_sequence(scheduler) -> None:
    for length in (200, 200, 200, 50):
        scheduler.add(sequence(length))
    for _ in range(20):
        scheduler.admit()
        batch = scheduler.next_batch()
        assert batch is not None
        assert batch.n_tokens <= scheduler.config.max_batch_tokens
        assert len({chunk.sequence.id for chunk in batch.chunks}) == len(batch.chunks)
        scheduler.complete(batch)
        for one in batch.sampled:
            one.tokens.append(65)


def test_nothing_to_do_is_none(scheduler) -> None:
    scheduler.admit()
    assert scheduler.next_batch() is None
