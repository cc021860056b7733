"""Where log lines go, and how they look."""

# ruff: noqa: PLC0415 - imported when it is asked for, as all commands are

from __future__ import annotations

import logging
import sys
from typing import Any


def configure_logging(level: str, *, as_json: bool) -> None:
    """Send structlog's events to standard error, one line each; JSON by the fastest way that structlog has."""
    import structlog

    from thunderagent.log_lines import LineLogger, json_line

    factory: Any
    min_level = logging.getLevelNamesMapping()[level.upper()]
    if as_json:
        processors: list[Any] = [json_line]
        lines = LineLogger(sys.stderr.buffer, wants_info=min_level <= logging.INFO)
        factory = lambda *_: lines  # noqa: E731 - one for all loggers: their lines keep their order
    else:
        processors = [
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,  # the default shows variables, so keys, too
            ),
        ]
        factory = structlog.WriteLoggerFactory(file=sys.stderr)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
