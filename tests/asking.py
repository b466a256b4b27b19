"""What the engine's tests ask of a stream, and a gate that holds the engine inside a step."""

from __future__ import annotations

import threading

from astrai_runtime.batch import Batch
from astrai_runtime.event import Delta, Failed, Finished
from astrai_runtime.stream import Stream
from tests.provider.reading import Rig

SOON = 20.0  # seconds that no healthy wait ever takes


def text_of(stream: Stream) -> str:
    return "".join(event.text for event in stream.events(SOON) if isinstance(event, Delta))


def outcome_of(stream: Stream) -> Finished | Failed:
    *_, last = stream.events(SOON)
    assert not isinstance(last, Delta)
    return last


class Gate:
    """Holds the engine thread inside a step until it is opened."""

    def __init__(self, rig: Rig) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        rig.provider.before = self

    def __call__(self, batch: Batch) -> None:
        self.entered.set()
        assert self.open.wait(SOON)
