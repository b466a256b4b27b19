"""Structured logs to standard error: key/value events in the past tense, JSON for programs or colours for people."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

Logger = structlog.stdlib.BoundLogger


def configure(level: str = "INFO", form: Literal["console", "json"] = "console") -> None:
    """Sets up structlog for this process. Safe to call twice; the last call wins."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


def get(name: str) -> Logger:
    """A logger that names its part of the program in every event."""
    logger: Logger = structlog.get_logger(part=name)
    return logger
