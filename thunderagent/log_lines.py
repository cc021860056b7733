"""The log as JSON lines, written by a thread: a reader that is slow, or stands still, stops nobody.

Those of a twentieth of a second go out together: a busy proxy ends many turns in that time, and to wake the thread for
the line of each costs more than all else about it. Nothing waits for longer; what warns, or is worse, goes out at once
with all before it. While nobody reads, lines wait up to a limit; what comes beyond that is counted, and told once there
is room again.

A line that comes with every turn is a struct, and passes by structlog: the thread renders those of a moment in one
call.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Condition, Event, RLock, Thread
from typing import BinaryIO

import msgspec
import structlog

LINGER_S = 0.05
"""For so long a line may wait for others."""

MAX_WAITING_BYTES = 16 * 2**20
STRUCT_BYTES = 512
"""A struct that waits to be rendered counts as so much."""

CLOSE_S = 2.0
"""How long the end of the process waits for what is left to be read."""


class Line(msgspec.Struct, kw_only=True, gc=False):
    """A line with fields of its own, which a subclass has."""

    event: str
    level: str = "info"
    timestamp: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))


class TurnLine(Line):
    """The canonical line of a turn."""

    program_id: str | None
    replica_id: str | None
    outcome: str
    status: int | None
    reason: str | None
    held_s: float
    duration_s: float
    tries_count: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    tool: str
    request_id: str


class LineLogger:
    """What structlog hands its lines to. Any thread may, and none waits."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        linger_s: float = LINGER_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        wants_info: bool = True,
    ) -> None:
        """Write to `file`; what is left is written when the process ends."""
        self._file = file
        self.wants_info = wants_info
        """Whether the log's level takes lines that tell of nothing bad."""
        self._linger_s = linger_s
        self._max_waiting_bytes = max_waiting_bytes
        self._lines: list[bytes | Line] = []
        self._waiting_bytes = 0
        self._lost_count = 0
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._is_urgent = Event()
        self._is_writing = False
        self._thread: Thread | None = None
        atexit.register(self.flush, CLOSE_S)

    def __repr__(self) -> str:
        return f"<LineLogger: {len(self._lines)} lines to be written>"

    def info(self, line: bytes | Line) -> None:
        """Take a line that may wait for others."""
        size_bytes = len(line) if isinstance(line, bytes) else STRUCT_BYTES
        with self._lock:
            if self._waiting_bytes + size_bytes > self._max_waiting_bytes:
                self._lost_count += 1
                return
            self._waiting_bytes += size_bytes
            self._lines.append(line)
            if len(self._lines) > 1:
                return  # the thread knows
            if self._thread is None:
                self._thread = Thread(target=self._write, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    debug = msg = info

    def warning(self, line: bytes) -> None:
        """Take a line that goes out at once."""
        self.info(line)
        self._is_urgent.set()

    error = critical = warning

    def flush(self, within_s: float | None = None) -> bool:
        """Wait until all lines so far are written, or the time is over; say whether they are."""
        self._is_urgent.set()
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, within_s)

    def _write(self) -> None:
        """Write what there is, again and again. A file that cannot be written to any more takes nothing."""
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
            self._is_urgent.wait(self._linger_s)
            with self._changed:
                self._is_urgent.clear()
                lines, self._lines, self._waiting_bytes = self._lines, [], 0
                lost_count, self._lost_count = self._lost_count, 0
                self._is_writing = True
            if lost_count:
                lines.append(_line_of_lost(lost_count))
            try:
                self._file.write(_rendered(lines))
                self._file.flush()
            except (OSError, ValueError):  # whoever read it is gone, or it was closed
                continue


def _rendered(lines: list[bytes | Line]) -> bytes:
    """Return lines as they are written, in their order. Cost: one call for all of them that are structs."""
    return _encoder.encode_lines([msgspec.Raw(line) if isinstance(line, bytes) else line for line in lines])


_encoder = msgspec.json.Encoder()


def line_writer(logger: structlog.typing.FilteringBoundLogger) -> Callable[[Line], None]:
    """Return what writes lines of one kind for a logger: past structlog where its lines are JSON, else by it."""
    bound = logger.bind()
    lines = getattr(bound, "_logger", None)
    if isinstance(lines, LineLogger):
        return lines.info if lines.wants_info else lambda _: None

    def write(line: Line) -> None:
        fields = msgspec.structs.asdict(line)
        for name in ("level", "timestamp"):
            del fields[name]
        bound.info(**fields)

    return write


def _line_of_lost(lost_count: int) -> bytes:
    event = {"event": "log_lines_lost", "lost_count": lost_count, "why": "nobody read the log for too long"}
    return json_line(None, "warning", event)


def json_line(logger: object, method: str, event: structlog.typing.EventDict) -> bytes:
    """Render a line in one step: every turn writes one, and each further processor would cost it a microsecond."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    event["level"] = method
    event["timestamp"] = datetime.now(UTC)
    return msgspec.json.encode(event)
