"""The ring between the engine and one reader: nothing lost, nothing overwritten, every way of reading and of leaving."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from astrai_runtime.errors import DeadlineExpired, ProviderError, WrongState
from astrai_runtime.event import Delta, Failed, Finished, TokenLogprob, Usage
from astrai_runtime.stream import END, FAILED, MAX_NOTES, TIMED_OUT, Stream

SOON = 20.0
DONE = Finished("stop", Usage(1, 2))


def failed() -> Failed:
    return Failed(ProviderError("broken"), Usage())


class RingMachine(RuleBasedStateMachine):
    """The ring against a plain queue of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream(7)
        self.queue: deque[int] = deque()

    @rule(data=st.binary(max_size=12))
    def put(self, data: bytes) -> None:
        taken = self.stream.put(data)
        assert taken == min(len(data), 7 - len(self.queue))
        self.queue.extend(data[:taken])

    @rule(limit=st.one_of(st.none(), st.integers(1, 9)))
    def read(self, limit: int | None) -> None:
        if not self.queue:
            with pytest.raises(DeadlineExpired):
                self.stream.read(limit, timeout=0)
            return
        data = self.stream.read(limit, timeout=0)
        assert list(data) == [self.queue.popleft() for _ in range(len(data))]
        assert len(data) == limit or not self.queue

    @invariant()
    def room_is_what_put_would_take(self) -> None:
        assert self.stream.room == 7 - len(self.queue)


RingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_ring_equals_a_queue = RingMachine.TestCase


def test_ten_kilobytes_pass_a_small_ring_unchanged() -> None:
    made_room = threading.Event()
    stream = Stream(64, on_change=made_room.set)
    data = random.Random(1).randbytes(10_000)

    def produce() -> None:
        sent = 0
        while sent < len(data):
            made_room.clear()
            taken = stream.put(data[sent : sent + 100])
            sent += taken
            if not taken:
                assert made_room.wait(SOON)
        stream.finish(DONE)

    thread = threading.Thread(target=produce)
    thread.start()
    pieces = []
    while piece := stream.read(17, SOON):
        pieces.append(piece)
    thread.join()
    assert b"".join(pieces) == data
    assert stream.drained


def test_stream_is_drained_only_when_the_end_was_seen() -> None:
    stream = Stream(16)
    stream.put(b"abc")
    stream.finish(DONE)
    assert stream.read(3) == b"abc"
    assert not stream.drained
    assert stream.read(3) == b""
    assert stream.drained


def test_first_outcome_wins_and_bytes_before_it_stay_readable() -> None:
    stream = Stream(16)
    stream.put(b"abc")
    stream.finish(failed())
    stream.finish(DONE)
    assert stream.read() == b"abc"
    with pytest.raises(ProviderError, match="broken"):
        stream.read()


def test_raw_reads_return_counts_and_codes() -> None:
    buffer = bytearray(4)
    stream = Stream(16)
    assert stream.read_raw(buffer) == TIMED_OUT
    stream.put(b"abcdef")
    assert (stream.read_raw(buffer), bytes(buffer)) == (4, b"abcd")
    assert stream.read_raw(buffer) == 2
    stream.finish(DONE)
    assert stream.read_raw(buffer) == END
    broken = Stream(16)
    broken.finish(failed())
    assert broken.read_raw(buffer) == FAILED


def test_failure_by_a_deadline_is_no_time_out_of_the_reader() -> None:
    stream = Stream(16)
    stream.put(b"abc")
    stream.finish(Failed(DeadlineExpired("the answer took too long"), Usage()))
    assert stream.read_raw(bytearray(4), timeout=0.0) == 3
    assert stream.read_raw(bytearray(4), timeout=0.0) == FAILED
    assert stream.drained


def test_a_reader_ignores_nothing_before_there_is_something_to_read() -> None:
    stream = Stream(16)
    began = stream.ignored_since
    stream.put(b"a")
    offered = stream.ignored_since
    assert offered > began
    stream.put(b"b")
    assert stream.ignored_since == offered
    stream.read()
    read = stream.ignored_since
    assert read > offered
    stream.finish(DONE)
    assert stream.ignored_since > read


@pytest.mark.parametrize("way", ["read", "raw", "events", "reader", "async"])
def test_every_way_of_reading_gives_the_same_bytes_and_the_same_end(way: str) -> None:
    stream, text = Stream(64), "aé漢🎈, and the rest"
    stream.put(text.encode())
    stream.finish(DONE)
    got = b""
    if way == "read":
        while piece := stream.read(3, SOON):
            got += piece
    elif way == "raw":
        buffer = bytearray(3)
        while (count := stream.read_raw(buffer, SOON)) != END:
            got += buffer[:count]
    elif way == "events":
        *deltas, outcome = stream.events(SOON)
        got = "".join(delta.text for delta in deltas).encode()
        assert outcome is DONE
    elif way == "reader":
        with stream.reader(lambda: None) as reader:
            *deltas, outcome = reader.poll()
        got = "".join(delta.text for delta in deltas).encode()
        assert outcome is DONE
    else:

        async def collect() -> list:
            return [event async for event in stream.events_async()]

        *deltas, outcome = asyncio.run(collect())
        got = "".join(delta.text for delta in deltas).encode()
        assert outcome is DONE
    assert got.decode() == text
    assert stream.drained


def test_events_are_whole_characters_then_the_outcome() -> None:
    stream = Stream(64)
    for byte in "aé漢🎈".encode():
        stream.put(bytes([byte]))
    stream.put("é".encode()[:1])
    stream.finish(DONE)
    events = list(stream.events(SOON))
    assert "".join(event.text for event in events[:-1]) == "aé漢🎈\ufffd"
    assert events[-1] is DONE


def test_character_that_arrives_in_two_pieces_is_one_character() -> None:
    stream = Stream(64)
    iterator = stream.events(SOON)
    first, second = "é".encode()[:1], "é".encode()[1:]
    stream.put(b"a" + first)
    assert next(iterator) == Delta("a")
    stream.put(second)
    assert next(iterator) == Delta("é")
    stream.finish(DONE)
    assert list(iterator) == [DONE]


def test_log_probabilities_come_with_the_bytes_they_follow() -> None:
    stream = Stream(64)
    notes = [TokenLogprob(i, b"x", -0.5) for i in range(2)]
    stream.put(b"ab")
    stream.note(notes[0])
    stream.note(notes[1])
    assert next(stream.events(SOON)) == Delta("ab", tuple(notes))


def test_log_probability_without_bytes_wakes_a_waiting_reader() -> None:
    stream = Stream(64)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(next(stream.events(SOON))))
    thread.start()
    note = TokenLogprob(1, b"", -0.5)
    stream.note(note)
    thread.join(SOON)
    assert seen == [Delta("", (note,))]


def test_too_many_waiting_log_probabilities_leave_no_room() -> None:
    stream = Stream(64)
    for _ in range(MAX_NOTES):
        stream.note(TokenLogprob(1, b"", -0.5))
    assert stream.room == 0
    next(stream.events(SOON))
    assert stream.room == 64


def test_reader_that_makes_room_or_leaves_wakes_the_engine() -> None:
    calls: list[str] = []
    stream = Stream(2, on_change=lambda: calls.append("change"))
    stream.put(b"ab")
    stream.read(1)
    assert len(calls) == 1
    stream.cancel()
    stream.cancel()
    assert len(calls) == 2
    stream.finish(Finished("cancelled", Usage()))
    stream.discard()
    assert len(calls) == 3
    assert stream.drained


def test_cancelled_stream_keeps_what_was_put() -> None:
    stream = Stream(16)
    stream.put(b"abc")
    stream.cancel()
    assert stream.cancelled
    assert stream.read() == b"abc"


def test_cancel_after_the_end_changes_no_outcome_but_is_seen() -> None:
    told = threading.Event()
    stream = Stream(16, on_change=told.set)
    stream.put(b"abc")
    stream.finish(DONE)
    stream.cancel()
    assert stream.cancelled
    assert told.is_set()
    assert stream.outcome is DONE
    assert stream.read() == b"abc"


def test_second_reader_is_refused() -> None:
    stream = Stream(16)
    with stream.reader(lambda: None):
        with pytest.raises(WrongState, match="one consumer"):
            stream.read(timeout=0)
        stream.put(b"a")
    assert stream.cancelled


def test_reader_of_several_streams_is_told_and_polls() -> None:
    told = threading.Event()
    streams = [Stream(16), Stream(16)]
    readers = [stream.reader(told.set) for stream in streams]
    assert [reader.poll() for reader in readers] == [[], []]
    streams[1].put(b"x")
    assert told.is_set()
    assert [reader.poll() for reader in readers] == [[], [Delta("x")]]
    streams[1].finish(DONE)
    assert readers[1].poll() == [DONE]
    assert readers[1].ended
    for reader in readers:
        reader.close()
        reader.close()
    assert streams[0].cancelled
    assert not streams[1].cancelled


def test_async_reader_gets_everything_from_another_thread() -> None:
    stream = Stream(8)

    def produce() -> None:
        for piece in (b"one ", b"two ", b"three"):
            assert stream.put(piece) == len(piece)
            while stream.room < 8:
                threading.Event().wait(0.001)
        stream.finish(DONE)

    async def consume() -> list:
        thread = threading.Thread(target=produce)
        thread.start()
        events = [event async for event in stream.events_async()]
        thread.join()
        return events

    *deltas, outcome = asyncio.run(consume())
    assert "".join(delta.text for delta in deltas) == "one two three"
    assert outcome is DONE


def test_leaving_an_async_reader_cancels_and_drops() -> None:
    stream = Stream(64)

    async def leave() -> None:
        events = stream.events_async()
        stream.put(b"abc")
        assert await anext(events) == Delta("abc")
        await events.aclose()

    asyncio.run(leave())
    assert stream.cancelled
    assert stream.drained


def test_closed_event_loop_never_hurts_the_producer() -> None:
    stream = Stream(64)
    loop = asyncio.new_event_loop()
    events = stream.events_async()

    async def begin() -> None:
        stream.put(b"a")
        await anext(events)

    loop.run_until_complete(begin())
    loop.close()
    stream.put(b"b")
    assert stream.cancelled


def test_listener_that_raises_is_unhooked_and_its_stream_cancelled() -> None:
    stream = Stream(64)
    reader = stream.reader(lambda: 1 / 0)
    assert stream.put(b"abc") == 3
    assert stream.put(b"def") == 3
    assert stream.cancelled
    assert reader.poll() == [Delta("abcdef")]
    reader.close()


def test_limits_of_the_arguments() -> None:
    with pytest.raises(ValueError, match="at least 2 bytes"):
        Stream(1)
    with pytest.raises(ValueError, match="at least 1 byte"):
        Stream(2).read(0)
