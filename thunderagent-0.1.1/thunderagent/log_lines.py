"""The log as JSON lines, written by a thread: a slow or stuck reader stops nobody.

The lines of a twentieth of a second are written together: a busy proxy ends many turns in that time, and waking the
thread for each line costs more than everything else about it. Nothing waits for longer; warnings and worse are written
at once with everything before them. While nobody reads, lines queue up to a limit; beyond it they are counted, and the
count is logged once there is room again.

A line for every turn is a struct, and bypasses structlog: the thread renders those of a moment in one call.
"""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Condition, Event, RLock, Thread
from typing import BinaryIO

import msgspec
import structlog

LINGER_S = 0.05
"""How long a line may wait for others."""

MAX_WAITING_BYTES = 16 * 2**20
STRUCT_BYTES = 512
"""Assumed size of a struct that waits to be rendered."""

CLOSE_S = 2.0
"""How long the end of the process waits for the rest to be read."""


class Line(msgspec.Struct, kw_only=True, gc=False):
    """A line with its own fields, which a subclass has."""

    event: str
    level: str = "info"
    timestamp: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))


class TurnLine(Line):
    """The canonical line of a turn."""

    program_id: str | None
    replica_id: str | None
    outcome: str
    verdict: str
    cause: str
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
    """Takes structlog's lines. Any thread may call it, and none waits."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        linger_s: float = LINGER_S,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        wants_info: bool = True,
    ) -> None:
        """Write to `file`; the rest is written when the process ends."""
        self._file = file
        self.wants_info = wants_info
        """Whether the log's level accepts informational lines."""
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
                return  # the thread already knows
            if self._thread is None:
                self._thread = Thread(target=self._write, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    debug = msg = info

    def warning(self, line: bytes) -> None:
        """Take a line that is written at once."""
        self.info(line)
        self._is_urgent.set()

    error = critical = warning

    def flush(self, within_s: float | None = None) -> bool:
        """Wait until all lines so far are written, or the time is over; return whether they are."""
        self._is_urgent.set()
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._is_writing, within_s)

    def _write(self) -> None:
        """Write what there is, again and again. Once a write fails, the rest is dropped."""
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
            except (OSError, ValueError):  # its reader is gone, or it was closed
                continue


def _rendered(lines: list[bytes | Line]) -> bytes:
    """Return lines as written, in order. Cost: one call for all of them that are structs."""
    rendered = _encoder.encode_lines([msgspec.Raw(line) if isinstance(line, bytes) else line for line in lines])
    if b"\xc2" in rendered or b"\xe2\x80" in rendered or b"\x7f" in rendered:
        return _CONTROL.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), rendered)
    return rendered


_CONTROL = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]")
"""What JSON leaves as it is, and a terminal or a reader of lines takes for its own, in UTF-8: C1, U+2028 and U+2029."""


_encoder = msgspec.json.Encoder()


def line_writer(logger: structlog.typing.FilteringBoundLogger) -> Callable[[Line], None] | None:
    """Return a function that writes lines of one kind for a logger: bypassing structlog if its lines are JSON.

    None if the log's level leaves them out.
    """
    bound = logger.bind()
    lines = getattr(bound, "_logger", None)
    if isinstance(lines, LineLogger):
        return lines.info if lines.wants_info else None

    def write(line: Line) -> None:
        fields = msgspec.structs.asdict(line)
        for name in ("level", "timestamp"):
            del fields[name]
        bound.info(**fields)

    return write


def _line_of_lost(lost_count: int) -> bytes:
    event = {"event": "log_lines_lost", "lost_count": lost_count, "why": "nobody read the log for too long"}
    return json_line(None, "warning", event)


def escaped(text: str) -> str:
    """Return a text with escapes for what a terminal, or a reader of lines, takes for its own: controls, line ends."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def without_controls(
    logger: object,  # noqa: ARG001 - a processor's signature
    method: str,  # noqa: ARG001
    event: structlog.typing.EventDict,
) -> structlog.typing.EventDict:
    """Escape the texts of an event for a console; what is no text is shown by its `repr`, which does that."""
    return {escaped(key): escaped(value) if isinstance(value, str) else value for key, value in event.items()}


def json_line(logger: object, method: str, event: structlog.typing.EventDict) -> bytes:
    """Render a line in one step: every turn writes one, and each further processor would cost it a microsecond."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    event["level"] = method
    event["timestamp"] = datetime.now(UTC)
    try:
        return msgspec.json.encode(event)
    except UnicodeEncodeError:  # a stranger's text with half a surrogate pair
        readable = json.dumps(msgspec.to_builtins(event), ensure_ascii=False).encode(errors="replace")
        return msgspec.json.encode(json.loads(readable))  # it may have `NaN`, which is no JSON
