"""Structured logs to standard error: key/value events in the past tense, JSON for programs or colours for people."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections import deque
from typing import IO, Literal

import structlog

Logger = structlog.stdlib.BoundLogger
MAX_WAITING = 10_000  # lines that may wait for a slow reader of the log; more are dropped and counted
CLOSE_S = 2.0  # in which the last lines must be out when the process ends


class Sink:
    """A file object that never waits: a thread of its own writes, so that a stalled terminal or pipe stalls nobody."""

    def __init__(self, file: IO[str], max_waiting: int = MAX_WAITING) -> None:
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


_current: Sink | None = None  # the process has one log


def configure(level: str = "INFO", form: Literal["console", "json"] = "console", file: IO[str] | None = None) -> None:
    """Sets up structlog for this process, writing to `file` (standard error). Safe to call twice; the last call wins."""
    global _current  # structlog's own configuration is the process's, too
    file = file or sys.stderr
    if _current is None:
        atexit.register(close)
    else:
        _current.close()
    _current = Sink(file)
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
        logger_factory=structlog.WriteLoggerFactory(file=_current),  # type: ignore[arg-type]  it only writes and flushes
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, _Libraries)]:
        root.removeHandler(handler)
    root.addHandler(_Libraries(logging.WARNING))


def close() -> None:
    """Writes what waits. For the end of the process."""
    if _current is not None:
        _current.close()


def dropped() -> int:
    """Lines that were lost since `configure`, because their reader was slow or gone."""
    return 0 if _current is None else _current.dropped


def get(name: str) -> Logger:
    """A logger that names its part of the program in every event."""
    logger: Logger = structlog.get_logger(part=name)
    return logger
