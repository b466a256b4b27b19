"""A bounded ring of bytes between the engine thread (producer) and one reader (consumer).

Nothing unread is ever overwritten: a full ring pauses its own sequence and no other. The reader pulls on its own clock,
from a thread (`read`, `read_raw`, `events`) or an event loop (`events_async`); waiting is by condition, never by polling.
A stream is drained when its bytes are read *and* its end was seen: only then may its slot be used again.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from types import TracebackType

from astrai_runtime import log
from astrai_runtime.errors import DeadlineExpired, WrongState
from astrai_runtime.event import Delta, Event, Failed, Outcome, TokenLogprob

MAX_NOTES = 4096  # log-probability records waiting for the reader; a full queue pauses the sequence like a full ring
END, TIMED_OUT, FAILED = 0, -4, -6  # `read_raw` results that are not byte counts (control-plane codes)


class Stream:
    """One generation's output. One producer, one consumer; `cancel` may be called from any thread.

    Args:
        capacity: bytes that may wait for the reader.
        on_change: called without the lock when the reader made room or cancelled: wakes the engine.
    """

    def __init__(self, capacity: int = 65536, *, on_change: Callable[[], None] | None = None) -> None:
        if capacity < 2:
            raise ValueError(f"a stream needs room for at least 2 bytes, not {capacity}")
        self.capacity = capacity
        self._ring = bytearray(capacity)
        self._written = 0  # bytes ever put; only the producer advances it
        self._read = 0  # bytes ever taken; only the consumer advances it
        self._notes: deque[tuple[int, TokenLogprob]] = deque()
        self._outcome: Outcome | None = None
        self._end_seen = False
        self._cancelled = False
        self._reading = False
        self._changed = threading.Condition()
        self._listener: Callable[[], object] | None = None
        self._on_change = on_change
        self.created_at = time.monotonic()
        self.first_at: float | None = None  # when the first bytes were put
        self.last_read_at = self.created_at  # when the reader last took something
        self._offered_at = self.created_at  # when there was last something new for a reader who had everything

    # -- producer ------------------------------------------------------------------------------------------------

    def put(self, data: bytes | bytearray | memoryview) -> int:
        """Copies as much of `data` as there is room for. Never blocks. Returns how many bytes were taken."""
        view = memoryview(data)
        with self._changed:
            count = min(len(view), self.capacity - (self._written - self._read))
            if count and self._written == self._read:
                self._offered_at = time.monotonic()
                self.first_at = self.first_at or self._offered_at
            start = self._written % self.capacity
            first = min(count, self.capacity - start)
            self._ring[start : start + first] = view[:first]
            self._ring[: count - first] = view[first:count]
            self._written += count
            if count:
                self._notify()
        return count

    def note(self, logprob: TokenLogprob) -> None:
        """Attaches a log-probability to the bytes put so far."""
        with self._changed:
            self._notes.append((self._written, logprob))
            self._notify()

    @property
    def ignored_since(self) -> float:
        """When the reader last took something, or could have after it had taken everything (monotonic seconds)."""
        return max(self.last_read_at, self._offered_at)

    @property
    def room(self) -> int:
        """Bytes that `put` would take now; 0 while too many log-probabilities wait. The producer's, and without the lock.

        Meanwhile the reader can only make more room.
        """
        return 0 if len(self._notes) >= MAX_NOTES else self.capacity - (self._written - self._read)

    def finish(self, outcome: Outcome) -> None:
        """Closes the producer's side. Bytes already put stay readable. A second call changes nothing."""
        with self._changed:
            if self._outcome is None:
                self._outcome = outcome
                if self._written == self._read:
                    self._offered_at = time.monotonic()
                self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._listener is not None:
            try:
                self._listener()
            except Exception as error:  # noqa: BLE001  a reader that cannot be told must not hurt the engine thread
                log.get("stream").error("listener_failed", error=repr(error))
                self._listener = None
                self._cancelled = True

    # -- any thread ----------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Asks the engine to stop at its next tick. Bytes already put stay readable. Safe to call twice.

        After the end it changes no outcome, but still says that nobody waits for the rest: the place may be used again.
        """
        with self._changed:
            if self._cancelled:
                return
            self._cancelled = True
        if self._on_change is not None:
            self._on_change()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called, before or after the end."""
        return self._cancelled

    @property
    def outcome(self) -> Outcome | None:
        """How the generation ended, None while it runs. Unread bytes may remain."""
        return self._outcome

    @property
    def drained(self) -> bool:
        """True once every byte was read and the reader saw the end, or the output was discarded."""
        return self._end_seen

    def discard(self) -> None:
        """Drops unread output for good: the abandoned stream of a client that is gone. Cancels if still running."""
        with self._changed:
            self._cancelled = self._cancelled or self._outcome is None
            self._read = self._written
            self._notes.clear()
            self._end_seen = True
        if self._on_change is not None:
            self._on_change()

    # -- consumer ------------------------------------------------------------------------------------------------

    def read(self, max_bytes: int | None = None, timeout: float | None = None) -> bytes:
        """The next bytes, at most `max_bytes`; b"" at the end. May end inside a UTF-8 character.

        Raises:
            DeadlineExpired: nothing arrived within `timeout` seconds.
            AstraiError: the generation failed and every byte before the failure was read.
            WrongState: another reader is already waiting on this stream.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"a read takes at least 1 byte, not {max_bytes}")
        data, outcome = self._read_some(max_bytes, timeout)
        if not data and isinstance(outcome, Failed):
            raise outcome.error
        return data

    def _read_some(self, max_bytes: int | None, timeout: float | None) -> tuple[bytes, Outcome | None]:
        deadline = self._deadline(timeout)
        with self._one_reader():
            data, outcome = b"", None
            while not data and outcome is None:
                data, _, outcome = self._take(max_bytes, deadline)
        return data, outcome

    def read_raw(self, buffer: bytearray | memoryview, timeout: float | None = 0.0) -> int:
        """Fills a caller-owned buffer. Positive: bytes read; 0: end of stream; negative: TIMED_OUT or FAILED.

        Raises:
            WrongState: another reader is already waiting on this stream.
        """
        view = memoryview(buffer)
        try:
            data, outcome = self._read_some(len(view), timeout)
        except DeadlineExpired:
            return TIMED_OUT
        if not data and isinstance(outcome, Failed):
            return FAILED
        view[: len(data)] = data
        return len(data)

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Deltas of whole characters, then the outcome. `timeout` bounds each wait.

        Raises:
            DeadlineExpired, WrongState: as `read`.
        """
        decode = _EventDecoder()
        with self._one_reader():
            while True:
                data, notes, outcome = self._take(None, self._deadline(timeout))
                yield from decode(data, notes, outcome)
                if outcome is not None:
                    return

    def reader(self, on_ready: Callable[[], object]) -> EventReader:
        """`events` for a reader of several streams, who must not wait on one of them.

        `on_ready` is called from the producer's thread, under the stream's lock, whenever there is something to poll:
        it must return at once (`threading.Event.set`).

        Raises:
            WrongState: this stream is being read already.
        """
        return EventReader(self, on_ready)

    async def events_async(self) -> AsyncGenerator[Event, None]:
        """`events` for an event loop. Closing the iterator early cancels the generation and drops its output."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(ready.set)
            except RuntimeError:  # the loop was closed under its reader, who can never come back
                self._cancelled = True

        with EventReader(self, wake) as reader:
            while not reader.ended:
                ready.clear()
                events = reader.poll()
                if not events and not reader.ended:
                    await ready.wait()
                for event in events:
                    yield event

    def _one_reader(self) -> _Reading:
        with self._changed:
            if self._reading:
                raise WrongState("this stream already has a reader; one stream has one consumer")
            self._reading = True
        return _Reading(self)

    @staticmethod
    def _deadline(timeout: float | None) -> float | None:
        return None if timeout is None else time.monotonic() + timeout

    def _take(self, max_bytes: int | None, deadline: float | None) -> tuple[bytes, list[TokenLogprob], Outcome | None]:
        """Waits until there is something to take. The outcome comes with or after the last bytes."""
        while True:
            taken = self._take_now(max_bytes)
            if taken is not None:
                return taken
            with self._changed:
                if self._written == self._read and self._outcome is None and not self._notes:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise DeadlineExpired("nothing arrived on this stream in time")
                    self._changed.wait(left)

    def _take_now(self, max_bytes: int | None) -> tuple[bytes, list[TokenLogprob], Outcome | None] | None:
        with self._changed:
            waiting = self._written - self._read
            was_full = waiting == self.capacity or len(self._notes) >= MAX_NOTES
            count = waiting if max_bytes is None else min(waiting, max_bytes)
            start = self._read % self.capacity
            first = min(count, self.capacity - start)
            data = bytes(self._ring[start : start + first]) + bytes(self._ring[: count - first])
            self._read += count
            if count:
                self.last_read_at = time.monotonic()
            notes = []
            while self._notes and self._notes[0][0] <= self._read:
                notes.append(self._notes.popleft()[1])
            outcome = self._outcome if self._written == self._read else None
            if outcome is not None:
                if count == 0 or max_bytes is None:
                    self._end_seen = True
                else:
                    outcome = None  # a bounded read reports the end with its next, empty result
            nothing = not data and not notes and outcome is None
        if nothing:
            return None
        if (was_full or self._end_seen) and self._on_change is not None:
            self._on_change()
        return data, notes, outcome


class _Reading:
    """Marks the stream as being read for the length of a `with` block."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        with self._stream._changed:
            self._stream._reading = False


class EventReader:
    """A stream's events without waiting. Leaving the `with` block before the end cancels and drops the rest."""

    def __init__(self, stream: Stream, on_ready: Callable[[], object]) -> None:
        self._stream = stream
        self._decode = _EventDecoder()
        self._mark = stream._one_reader()
        self.ended = False  # the outcome was among the polled events
        with stream._changed:
            stream._listener = on_ready

    def poll(self) -> list[Event]:
        """What has arrived since the last poll, the outcome last; [] when nothing has."""
        taken = None if self.ended else self._stream._take_now(None)
        if taken is None:
            return []
        self.ended = taken[2] is not None
        return list(self._decode(*taken))

    def close(self) -> None:
        """Ends the reading. Safe to call twice."""
        with self._stream._changed:
            self._stream._listener = None
        if not self.ended:
            self.ended = True
            self._stream.discard()
        self._mark.__exit__()

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _EventDecoder:
    """Bytes to whole characters; a character cut by the end becomes U+FFFD once."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, data: bytes, notes: list[TokenLogprob], outcome: Outcome | None) -> Iterator[Event]:
        text = self._utf8.decode(data, final=outcome is not None)
        if text or notes:
            yield Delta(text, tuple(notes))
        if outcome is not None:
            yield outcome
