"""Server-sent events: split a stream into them, read the data of one, write one."""

# compiled: each event of a stream passes here

from __future__ import annotations

import re
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding an engine's bytes may raise; unreadable data is ignored."""

_EVENT_ENDS: Final[tuple[bytes, ...]] = (b"\n\n", b"\n\r\n", b"\r\r")
_SEAM_BYTES: Final = 2
"""One less than the longest end: it may lie across two pieces."""
LARGE_EVENT_BYTES: Final = 2**18
_BLANK_LINE: Final = re.compile(rb"\n\r?\n|\r\r")


def end_of_last_event(data: bytes) -> int:
    """Return the offset past the last blank line, 0 if there is none."""
    if data.endswith(b"\n\n"):  # as most pieces do
        return len(data)
    return max((at + len(end) for end in _EVENT_ENDS if (at := data.rfind(end)) >= 0), default=0)


def completed(begun: bytearray, piece: bytes) -> bytes:
    """Return the events of a stream that are whole with its next piece; `begun` keeps the one that is not.

    It grows in place, however many pieces an event comes in: an event of megabytes costs what it is long.
    """
    if not begun:
        end = end_of_last_event(piece)
        begun += piece[end:]
        return piece[:end]
    seen = bytes(begun[-_SEAM_BYTES:]) + piece
    begun += piece
    end = end_of_last_event(seen)
    if not end:
        return b""
    whole_bytes = len(begun) - (len(seen) - end)
    with memoryview(begun) as view:
        whole = bytes(view[:whole_bytes])
    del begun[:whole_bytes]
    return whole


def events_in(whole: bytes) -> list[bytes]:
    """Return whole events, each with its blank line; a surplus line break may be the last."""
    events: list[bytes] = []
    start, has_returns = 0, whole.find(b"\r") >= 0  # `in` with bytes makes an exception on its way
    while start < len(whole):
        if has_returns:
            blank_line = _BLANK_LINE.search(whole, start)
            end = blank_line.end() if blank_line is not None else len(whole)
        else:  # as engines write them: several times faster
            end = whole.find(b"\n\n", start) + 2
            end = end if end > 1 else len(whole)
        events.append(whole[start:end])
        start = end
    return events


def data_of(event: bytes) -> bytes:
    """Return the data of an event."""
    if len(event) > LARGE_EVENT_BYTES:
        return _data_of_large(event)
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2 and event.find(b"\r") < 0:
        return event[5:].strip()  # one line, as engines write them
    return b"\n".join([line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")])


def _data_of_large(event: bytes) -> bytes:
    """Return the same, with one copy in memory instead of three.

    A pattern for lines would keep the interpreter from all else, on any thread, for 10 ns a byte.
    """
    parts = []
    size, start, feed, back = len(event), 0, -1, -1
    while (at := event.find(b"data:", start)) >= 0:
        start = at + 5
        if at and event[at - 1] not in b"\r\n":
            continue
        if feed < start:
            feed = event.find(b"\n", start) % (size + 1)  # of none: the size
        if back < start:
            back = event.find(b"\r", start) % (size + 1)
        end = min(feed, back)
        while start < end and event[start] in b" \t":
            start += 1
        parts.append(event[start:end].strip())
    return b"\n".join(parts)


def server_sent(data: bytes, *, kind: str = "", event_id: str = "") -> bytes:
    """Return one event; `data` has no line break."""
    lines = []
    if event_id:
        lines.append(f"id: {event_id}\n")
    if kind:
        lines.append(f"event: {kind}\n")
    return "".join(lines).encode() + b"data: " + data + b"\n\n"
