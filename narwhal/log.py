"""How the log is written: one event a line on standard error, JSON for machines or text for people.

An event is a constant `noun_past-participle`; every fact is a key. The core never logs: whoever applied an event to it
logs the decisions that came back.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import orjson
import structlog


def configure_logging(*, format: Literal["json", "console"], level: str) -> None:
    """Set structlog up for this process. Values bound to structlog's context variables appear in every line."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    threshold = logging.getLevelNamesMapping()[level.upper()]
    if format == "json":
        structlog.configure(
            processors=[
                *shared,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=orjson.dumps),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(threshold),
            logger_factory=structlog.BytesLoggerFactory(sys.stderr.buffer),
            cache_logger_on_first_use=True,
        )
        return
    structlog.configure(
        processors=[*shared, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
