"""The log: lines in the declared form, written by a thread that nobody waits for."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest
import structlog

from astrai_runtime import log


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Whatever a test configures is gone after it."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers = list(root.handlers)
    yield
    log.flush()
    structlog.configure(**before)
    root.handlers = handlers


def test_a_line_is_one_json_object_with_its_part_and_level() -> None:
    out = io.StringIO()
    log.configure("INFO", "json", out)
    log.get("server").info("request_answered", status=200)
    log.get("server").debug("too_quiet")
    assert log.flush()
    (line,) = out.getvalue().splitlines()
    said = json.loads(line)
    assert (said["event"], said["part"], said["level"], said["status"]) == ("request_answered", "server", "info", 200)
    assert said["timestamp"].endswith("Z")


def test_warnings_of_libraries_take_the_same_form_and_chatter_is_off() -> None:
    out = io.StringIO()
    log.configure("INFO", "json", out)
    log.configure("INFO", "json", out)  # the second call replaces the first
    logging.getLogger("some.library").warning("disk %s is full", "C")
    logging.getLogger("some.library").info("chatter")
    assert log.flush()
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["message"] == "disk C is full"
    assert json.loads(line)["part"] == "some.library"


def test_a_stalled_reader_stalls_nobody_and_what_is_lost_is_counted() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        sink = log.Sink(file, max_waiting=10)
        for _ in range(100):  # far more than a pipe holds, and nobody reads
            sink.write("x" * 100_000)
        assert sink.dropped >= 80
        assert not sink.drain(0.0)
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.extend(iter(lambda: os.read(reader, 1 << 20), b"")))
        thread.start()
        sink.close()
        assert sink.drain(10)
    thread.join(10)
    os.close(reader)
    assert len(b"".join(received)) == (100 - sink.dropped) * 100_000


def test_a_reader_that_is_gone_is_survived() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError), os.fdopen(writer, "w", encoding="utf-8") as file:  # noqa: PT012
        sink = log.Sink(file)
        sink.write("nobody reads this\n")
        assert sink.drain(10)
        assert sink.dropped == 1
        sink.close()
        sink.write("nor this\n")
        assert sink.dropped == 2


def test_dropped_lines_are_nothing_without_a_configured_log() -> None:
    structlog.reset_defaults()
    assert log.dropped() == 0
    assert log.flush()
