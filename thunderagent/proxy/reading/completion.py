"""What an engine answered, read so that it can be found again at the beginning of the next prompt."""

from __future__ import annotations

from thunderagent.proxy.reading.dialects.base import UNREADABLE, Completion, Dialect
from thunderagent.proxy.reading.dialects.sse import data_of, events_in
from thunderagent.proxy.reading.usage import decoded

MAX_KEPT_CHARS = 4 * 2**20
"""A streamed answer that says more is not kept."""


class Completions:
    """Follow a whole answer or a stream of events for what it says. What cannot be read says nothing."""

    __slots__ = ("_over_limit", "_reader", "ended")

    def __init__(self, dialect: Dialect) -> None:
        """Begin before the first byte of an answer in this API."""
        self._reader = dialect.completions()
        self._over_limit = False
        self.ended = False
        """Whether a stream said its last event."""

    def read_answer(self, body: bytes, content_encoding: str | None) -> None:
        """Take in a whole answer."""
        plain = decoded(body, content_encoding)
        if not plain:
            return
        try:
            self._reader.read_answer(plain)
        except UNREADABLE:
            return

    def read_events(self, whole: bytes) -> None:
        """Take in whole events of a stream, as `StreamUsage` finds them."""
        for event in events_in(whole):
            if self._over_limit:
                return
            data = data_of(event)
            if data == b"[DONE]":
                self.ended = True
                continue
            try:
                self.ended = self._reader.read_event(data) or self.ended
            except UNREADABLE:
                continue
            self._over_limit = self._reader.kept_chars > MAX_KEPT_CHARS

    def choices(self) -> list[Completion]:
        """Return the choices in their order."""
        return [] if self._over_limit else self._reader.choices()
