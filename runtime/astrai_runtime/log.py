"""Structured logs to standard error: key/value events in the past tense, JSON for programs or colours for people."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections import deque
from typing import Literal, TextIO, cast

import structlog

Logger = structlog.stdlib.BoundLogger
MAX_WAITING = 10_000  # lines that may wait for a slow reader of the log; more are dropped and counted
CLOSE_S = 2.0  # in which the last lines must be out when the process ends


class Sink:
    """A file object that never waits: a thread of its own writes, so that a stalled terminal or pipe stalls nobody."""

    def __init__(self, file: TextIO, max_waiting: int = MAX_WAITING) -> None:
        self._file = file
        self._waiting: deque[str] = deque()
        self._max = max_waiting
        self._changed = threading.Condition()
        self._writing = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def write(self, text: str) -> int:
        """Queues the text, or drops and counts it."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._max:
                self.dropped += 1
                return len(text)
            self._waiting.append(text)
            if self._thread is None:  # not before there is something to say: importing and configuring start nothing
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Does nothing: the thread flushes after what it wrote."""

    def drain(self, timeout: float) -> bool:
        """Waits until everything is written. False: `timeout` seconds passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)

    def close(self) -> None:
        """Writes what waits, within two seconds, and ends the thread. Later lines are dropped."""
        self.drain(CLOSE_S)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                lines, self._writing = "".join(self._waiting), True
                count = len(self._waiting)
                self._waiting.clear()
            try:
                self._file.write(lines)
                self._file.flush()
            except (OSError, ValueError):  # whoever read the log is gone; the service goes on
                self.dropped += count


class _Libraries(logging.Handler):
    """Warnings of the libraries that this program runs on, in its own form."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        get(record.name).log(record.levelno, "library_logged", message=record.getMessage(), error=error and repr(error))


class _ToSink:
    """structlog's logger factory: every logger writes to one sink."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def __call__(self, *args: object) -> structlog.WriteLogger:
        return structlog.WriteLogger(cast(TextIO, self.sink))  # it only writes and flushes


def configure(level: str = "INFO", form: Literal["console", "json"] = "console", file: TextIO | None = None) -> None:
    """Sets up structlog for this process, writing to `file` (standard error). Safe to call twice; the last call wins."""
    file = file or sys.stderr
    before, sink = _sink(), Sink(file)
    if before is not None:
        before.close()
    atexit.register(sink.close)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer(colors=file.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=_ToSink(sink),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, _Libraries)]:
        root.removeHandler(handler)
    root.addHandler(_Libraries(logging.WARNING))


def _sink() -> Sink | None:
    factory = structlog.get_config()["logger_factory"]
    return factory.sink if isinstance(factory, _ToSink) else None


def flush(timeout: float = CLOSE_S) -> bool:
    """Waits until every line is written. False: `timeout` seconds passed first."""
    sink = _sink()
    return sink is None or sink.drain(timeout)


def dropped() -> int:
    """Lines that were lost since `configure`, because their reader was slow or gone."""
    sink = _sink()
    return 0 if sink is None else sink.dropped


def get(name: str) -> Logger:
    """A logger that names its part of the program in every event."""
    logger: Logger = structlog.get_logger(part=name)
    return logger
