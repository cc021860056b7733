"""A large body without its token ids: the rest is read and spliced in microseconds.

A prompt of a hundred thousand token ids is megabytes of digits that do not tell whose turn it is. So the digits of one
list are set aside, the rest is read and edited like any other body, and then they are put back, byte for byte. A search
finds the list. Searches also check that it holds only characters of a list of numbers, so its end is certain. Whether
its numbers are valid is the engine's to judge.

What still takes long to read is read on a thread, so that other turns go on meanwhile.
"""

# compiled: it is asked of each turn

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Self, TypeVar

from thunderagent.proxy.reading.json_cost import others_run

MIN_BODY_BYTES: Final = 64 * 1024
"""A smaller body is read directly."""

_PLACEHOLDER: Final = b"[7046029254386353131]"
"""Replaces the list; a body that contains it already is read directly."""

_OPENING: Final = re.compile(rb"\s*:\s*\[")


class Outline(NamedTuple):
    """`text` is the body with a placeholder for `token_ids`, a whole list with its brackets; empty if there is none."""

    text: bytes
    token_ids: bytes = b""

    @classmethod
    def of(cls, body: bytes, fields: Sequence[str]) -> Self:
        """Set aside the list in the first of `fields` that holds a large one."""
        if len(body) < MIN_BODY_BYTES:
            return cls(body)
        for field in fields:
            others_run()
            key = b'"%s"' % field.encode()
            at = body.find(key)
            opening = _OPENING.match(body, at + len(key)) if at >= 0 else None
            if opening is None:
                continue
            start = opening.end() - 1
            end = body.find(b"]", start) + 1
            if end - start < MIN_BODY_BYTES // 2:
                continue
            if any(body.find(other, start + 1, end) >= 0 for other in (b"[", b"{", b'"')):
                continue
            text = body[:start] + _PLACEHOLDER + body[end:]
            if text.count(_PLACEHOLDER) == 1:
                return cls(text, body[start:end])
        return cls(body)

    def filled(self, text: bytes) -> bytes:
        """Return `text`, the outline or its edited form, with the list back in place."""
        if not self.token_ids:
            return text
        before, _, after = text.partition(_PLACEHOLDER)
        return b"".join((before, self.token_ids, after))

    def is_placeholder(self, value: bytes | memoryview) -> bool:
        """Return whether a value of the outline, which may be a `Raw`, is the placeholder."""
        return bool(self.token_ids) and bytes(value) == _PLACEHOLDER


# --- on a thread

Read = TypeVar("Read")

LARGE_BODY_BYTES: Final = 512 * 1024
"""A larger body is read on a thread."""


async def read_aside(read: Callable[[], Read], size_bytes: int) -> Read:
    """Call `read`, on a thread if a body of this size needs one. It must change nothing that others see."""
    return await asyncio.to_thread(read) if size_bytes > LARGE_BODY_BYTES else read()
