"""Tick by tick: readers that are slow or gone, cancelling, deadlines, priorities, and what an observer hears."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from astrai_runtime.batch import Batch
from astrai_runtime.errors import (
    Busy,
    DeadlineExpired,
)
from astrai_runtime.event import Failed, Finished
from astrai_runtime.stream import END, FAILED, TIMED_OUT
from tests.asking import SOON, Gate, outcome_of, text_of
from tests.provider.reading import Rig, expected, make_kv, prompt


@pytest.mark.parametrize("moment", ["inbox", "waiting", "prefill", "decode"])
def test_r01_cancelled_request_frees_everything(moment: str) -> None:
    # The ring is smaller than the answer: nobody finishes before the test has acted.
    small = {"stream_bytes": 16}
    with Rig(engine=small, max_batch_size=1, max_batch_tokens=4, max_prompt_tokens_per_tick=4) as rig:
        gate = Gate(rig)
        running = rig.engine.submit(prompt("first", 200))
        assert gate.entered.wait(SOON)
        if moment == "inbox":
            victim = rig.engine.submit(prompt("second", 200))
            victim.cancel()
            gate.open.set()
            text_of(running)
        elif moment == "waiting":
            victim = rig.engine.submit(prompt("second", 200))
            gate.open.set()
            running.read(1, SOON)
            victim.cancel()
            running.cancel()
        else:
            victim = running
            if moment == "prefill":
                running.cancel()
            gate.open.set()
            if moment == "decode":
                running.read(1, SOON)
                running.cancel()
        outcome = outcome_of(victim)
        assert isinstance(outcome, Finished)
        assert outcome.reason == "cancelled"
        assert text_of(rig.engine.submit(prompt("next", 3))) == expected(list(b"next"), 3)
        assert rig.engine.counters().cancelled == (2 if moment == "waiting" else 1)


def test_r04_slow_reader_pauses_only_itself_and_loses_nothing() -> None:
    with Rig(engine={"stream_bytes": 64}) as rig:
        slow = rig.engine.submit(prompt("slow", 200))
        quick = [rig.engine.submit(prompt(f"quick{i}", 200)) for i in range(3)]
        for i, stream in enumerate(quick):
            assert text_of(stream) == expected(list(f"quick{i}".encode()), 200)
        assert slow.outcome is None
        assert slow.room == 0
        assert text_of(slow) == expected(list(b"slow"), 200)


def test_slow_readers_slots_go_to_others_and_its_answer_is_still_whole() -> None:
    with Rig(make_kv(n_tokens=128), engine={"stream_bytes": 32}) as rig:
        slow = rig.engine.submit(prompt("slow", 80))
        others = [rig.engine.submit(prompt(f"other{i}", 90)) for i in range(3)]
        for i, stream in enumerate(others):
            assert text_of(stream) == expected(list(f"other{i}".encode()), 90)
        assert text_of(slow) == expected(list(b"slow"), 80)


def test_finished_answer_keeps_its_place_until_it_is_read() -> None:
    with Rig(max_batch_size=1, max_waiting=0) as rig:
        unread = rig.engine.submit(prompt("unread", 3))
        give_up = time.monotonic() + SOON
        while unread.outcome is None and time.monotonic() < give_up:
            threading.Event().wait(0.001)
        assert unread.outcome is not None
        with pytest.raises(Busy):
            rig.engine.submit(prompt("second", 3))
        assert rig.kv.stats().held == 0  # its place, not its memory
        assert text_of(unread) == expected(list(b"unread"), 3)
        assert text_of(rig.engine.submit(prompt("second", 3))) == expected(list(b"second"), 3)


def test_cancelling_a_finished_answer_gives_its_place_back() -> None:
    with Rig(max_batch_size=1, max_waiting=1) as rig:
        unread, second = rig.engine.submit(prompt("unread", 3)), rig.engine.submit(prompt("second", 3))
        give_up = time.monotonic() + SOON
        while unread.outcome is None and time.monotonic() < give_up:
            threading.Event().wait(0.001)
        unread.cancel()
        assert text_of(second) == expected(list(b"second"), 3)
        assert text_of(unread) == expected(list(b"unread"), 3)


def test_abandoned_answers_give_up_their_place_in_time() -> None:
    with Rig(max_batch_size=1, engine={"undrained_ttl_s": 0.05, "stream_bytes": 32}) as rig:
        finished = rig.engine.submit(prompt("finished", 3))
        full = rig.engine.submit(prompt("full", 100))
        assert text_of(rig.engine.submit(prompt("next", 3))) == expected(list(b"next"), 3)
        assert text_of(finished) == expected(list(b"finished"), 3)
        *deltas, failed = full.events(SOON)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, DeadlineExpired)
        assert "".join(delta.text for delta in deltas) == expected(list(b"full"), 32)


def test_deadline_ends_an_answer_with_an_error() -> None:
    with Rig() as rig:
        gate = Gate(rig)
        late = rig.engine.submit(prompt("late", 10, deadline_s=0.01))
        assert gate.entered.wait(SOON)
        threading.Event().wait(0.02)
        gate.open.set()
        assert isinstance(outcome_of(late).error, DeadlineExpired)


class Recorder:
    """An observer that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []
        self.threads: set[str] = set()

    def _note(self, name: str, value: object) -> None:
        self.told.append((name, value))
        self.threads.add(threading.current_thread().name)

    def queued(self, seconds: float) -> None:
        self._note("queued", seconds)

    def first_token(self, seconds: float) -> None:
        self._note("first_token", seconds)

    def token_gap(self, seconds: float) -> None:
        self._note("token_gap", seconds)

    def finished(self, reason: str) -> None:
        self._note("finished", reason)


def test_observer_is_told_every_latency_on_the_engine_thread() -> None:
    with Rig() as rig:
        rig.engine.observe = recorder = Recorder()
        text_of(rig.engine.submit(prompt("abc", 4)))
    assert [name for name, _ in recorder.told] == ["queued", "first_token", *["token_gap"] * 3, "finished"]
    assert recorder.told[-1] == ("finished", "length")
    assert all(value >= 0 for _, value in recorder.told[:-1])
    assert recorder.threads == {"engine-reader"}


def test_observer_that_raises_is_unhooked_and_hurts_nobody() -> None:
    with Rig() as rig:
        rig.engine.observe = recorder = Recorder()
        recorder.first_token = lambda seconds: 1 / 0
        assert text_of(rig.engine.submit(prompt("abc", 4))) == expected(list(b"abc"), 4)
        assert rig.engine.observe is not recorder


def test_cancel_from_many_threads_at_once_ends_a_request_once() -> None:
    with Rig(engine={"stream_bytes": 16}) as rig:
        stream = rig.engine.submit(prompt("abc", 200))
        stream.read(1, SOON)
        threads = [threading.Thread(target=stream.cancel) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcome_of(stream).reason == "cancelled"
        assert rig.engine.counters().cancelled == 1


def test_cancel_during_the_prompt_takes_effect_within_one_tick() -> None:
    with Rig(max_batch_tokens=8, max_prompt_tokens_per_tick=4) as rig:
        seen: list[int] = []

        def before(batch: Batch) -> None:
            seen.append(batch.n_tokens)
            if len(seen) == 3:
                stream.cancel()

        rig.provider.before = before
        gate = threading.Event()
        rig.provider.after = lambda batch, logits: gate.wait(SOON)
        stream = rig.engine.submit(prompt([65] * 100, 5))
        gate.set()
        assert outcome_of(stream).reason == "cancelled"
        assert seen == [4, 4, 4]
        assert rig.kv.stats().held == 0


def test_full_ring_and_cancel_end_as_cancelled_with_the_rest_readable() -> None:
    with Rig(engine={"stream_bytes": 8}) as rig:
        stream = rig.engine.submit(prompt("abc", 200))
        give_up = time.monotonic() + SOON
        while stream.room and time.monotonic() < give_up:
            threading.Event().wait(0.001)
        stream.cancel()
        data = stream.read(5, SOON) + stream.read(5, SOON)
        assert data.decode() == expected(list(b"abc"), 8)
        assert stream.read(5, SOON) == b""
        assert stream.outcome.reason == "cancelled"


def test_deadline_holds_while_waiting_in_the_prompt_and_in_the_answer() -> None:
    with Rig(engine={"stream_bytes": 16}, max_batch_size=1) as rig:
        endless = rig.engine.submit(prompt("endless", 200, deadline_s=0.1))
        waiting = rig.engine.submit(prompt("waiting", 3, deadline_s=0.05))
        assert isinstance(outcome_of(waiting).error, DeadlineExpired)
        assert isinstance(outcome_of(endless).error, DeadlineExpired)
        assert rig.engine.counters().expired == 2
        assert text_of(rig.engine.submit(prompt("next", 3))) == expected(list(b"next"), 3)


def test_busy_says_to_come_back_after_about_one_answer() -> None:
    with Rig(max_batch_size=1, max_waiting=0) as rig:
        rig.engine._flight.answer_s = 7.5
        gate = Gate(rig)
        running = rig.engine.submit(prompt("abc", 3))
        with pytest.raises(Busy) as busy:
            rig.engine.submit(prompt("more", 3))
        assert busy.value.retry_after_s == 7.5
        rig.engine._flight.answer_s = 700.0
        with pytest.raises(Busy) as busy:
            rig.engine.submit(prompt("more", 3))
        assert busy.value.retry_after_s == 60.0
        gate.open.set()
        text_of(running)
        assert rig.engine._flight.answer_s != 700.0


def test_priority_decides_who_gets_the_next_place() -> None:
    with Rig(max_batch_size=1) as rig:
        gate = Gate(rig)
        order: list[str] = []
        running = rig.engine.submit(prompt("running", 2))
        assert gate.entered.wait(SOON)
        streams = {}
        for name, priority in (("low", -1), ("normal", 0), ("high", 3)):
            asked = prompt(name, 2)
            streams[name] = rig.engine.submit(replace(asked, limits=replace(asked.limits, priority=priority)))
        gate.open.set()
        for stream in (running, streams["high"], streams["normal"], streams["low"]):
            text_of(stream)
        for batch in rig.provider.batches:
            name = bytes(batch.chunks[0].sequence.prompt.token_ids).decode()
            order += [name] if name not in order else []
        assert order == ["running", "high", "normal", "low"]


def test_nine_thousand_byte_token_passes_a_ring_of_256_bytes() -> None:
    with Rig(engine={"stream_bytes": 256}) as rig:
        rig.engine.provider.tokenizer.token_bytes = lambda token_id: bytes([token_id]) * 9000
        stream = rig.engine.submit(prompt("abc", 2))
        data = bytearray()
        while piece := stream.read(100, SOON):
            data += piece
        assert data.decode() == "".join(letter * 9000 for letter in expected(list(b"abc"), 2))


def test_ten_kilobyte_answer_passes_a_ring_of_64_bytes_to_a_polling_reader() -> None:
    with Rig(engine={"stream_bytes": 64}) as rig:
        rig.engine.provider.tokenizer.token_bytes = lambda token_id: bytes([token_id]) * 100
        told = threading.Event()
        stream = rig.engine.submit(prompt("abc", 100))
        buffer, data = bytearray(64), bytearray()
        give_up = time.monotonic() + SOON
        while (count := stream.read_raw(buffer, timeout=0.0)) != END and time.monotonic() < give_up:
            assert count > 0 or count == TIMED_OUT
            data += buffer[: max(count, 0)]
            told.wait(0.0001)
        assert data.decode() == "".join(letter * 100 for letter in expected(list(b"abc"), 100))


def test_reader_that_waits_before_the_answer_begins_gets_all_of_it() -> None:
    with Rig() as rig:
        gate = Gate(rig)
        stream = rig.engine.submit(prompt("abc", 5))
        assert gate.entered.wait(SOON)
        got: list[str] = []
        reader = threading.Thread(target=lambda: got.append(text_of(stream)))
        reader.start()
        give_up = time.monotonic() + SOON
        while not stream._reading and time.monotonic() < give_up:
            threading.Event().wait(0.001)
        gate.open.set()
        reader.join(SOON)
        assert got == [expected(list(b"abc"), 5)]


def test_raw_stream_that_nobody_reads_expires_and_a_null_time_to_live_never_does() -> None:
    with Rig(max_batch_size=1, engine={"stream_bytes": 8, "undrained_ttl_s": 0.05}) as rig:
        raw = rig.engine.submit(prompt("raw", 100))
        assert text_of(rig.engine.submit(prompt("next", 3))) == expected(list(b"next"), 3)
        buffer = bytearray(64)
        assert raw.read_raw(buffer) == 8
        assert raw.read_raw(buffer) == FAILED
        assert rig.engine.counters().abandoned == 1
    with Rig(engine={"stream_bytes": 8, "undrained_ttl_s": None}) as rig:
        raw = rig.engine.submit(prompt("raw", 100))
        assert rig.engine._loop.patience() is None
        assert text_of(raw) == expected(list(b"raw"), 100)
