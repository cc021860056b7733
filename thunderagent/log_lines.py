"""The log as JSON lines: those of a hundredth of a second go out together.

A busy proxy ends many turns in that time, and a system call for the line of each costs as much as all else about it.
Nothing waits for longer; what warns, or is worse, goes out at once with all before it.
"""

from __future__ import annotations

import asyncio
import atexit
from datetime import UTC, datetime
from threading import Lock
from typing import BinaryIO

import msgspec
import structlog

LINGER_S = 0.01
"""For so long a line may wait for others."""


class LineLogger:
    """What structlog hands its lines to. Any thread may."""

    def __init__(self, file: BinaryIO) -> None:
        """Write to `file`; what is left is written when the process ends."""
        self._file = file
        self._lines: list[bytes] = []
        self._lock = Lock()
        atexit.register(self.flush)

    def __repr__(self) -> str:
        return f"<LineLogger: {len(self._lines)} lines to be written>"

    def info(self, line: bytes) -> None:
        """Take a line that may wait for others."""
        with self._lock:
            self._lines.append(line)
            if len(self._lines) > 1:
                return  # somebody sees to it
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a thread's, or no loop runs yet
            self.flush()
        else:
            loop.call_later(LINGER_S, self.flush)

    debug = msg = info

    def warning(self, line: bytes) -> None:
        """Take a line that goes out at once."""
        with self._lock:
            self._lines.append(line)
        self.flush()

    error = critical = warning

    def flush(self) -> None:
        """Write what there is."""
        with self._lock:
            if self._lines:
                lines, self._lines = self._lines, []
                self._file.write(b"\n".join(lines) + b"\n")
                self._file.flush()


def json_line(logger: object, method: str, event: structlog.typing.EventDict) -> bytes:
    """Render a line in one step: every turn writes one, and each further processor would cost it a microsecond."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    event["level"] = method
    event["timestamp"] = datetime.now(UTC)
    return msgspec.json.encode(event)
