"""What the HTTP server under us has to log: without what the client sent, which may hold its key."""

from __future__ import annotations

import logging

import structlog
from aiohttp.http_exceptions import HttpProcessingError

log = structlog.get_logger("thunderagent.http")


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):  # its text repeats the line that is wrong
            log.info("request_is_not_http", why=type(error).__name__)
        else:
            log.error("http_server_error", what=record.getMessage(), exc_info=error)


def server_logger() -> logging.Logger:
    """Return a logger for aiohttp's server, whose own would print tracebacks with bytes of requests."""
    logger = logging.getLogger("thunderagent.http")
    logger.handlers = [_Handler()]
    logger.propagate = False
    return logger
