"""Where log lines go, and how they look."""

# ruff: noqa: PLC0415 - imported when it is asked for, as all commands are

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from io import StringIO
from typing import Any, TextIO


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
        from thunderagent.log_lines import escaped, without_controls

        def plain_traceback(file: TextIO, exc_info: Any) -> None:  # the default shows variables, so keys, too
            text = StringIO()
            structlog.dev.plain_traceback(text, exc_info)
            file.write("\n".join(map(escaped, text.getvalue().split("\n"))))

        processors = [
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            without_controls,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain_traceback),
        ]
        factory = structlog.WriteLoggerFactory(file=_NeverFails(sys.stderr))  # type: ignore[arg-type]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )


class _NeverFails:
    """A text stream whose lines are dropped while they cannot be written: a log ends nothing."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Write a text, or drop it."""
        with suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        with suppress(OSError, ValueError):
            self._file.flush()
