"""What an engine answered: its usage, the tool that it calls, and what it said.

A whole answer is decoded once for usage and tool, if it may call one at all. What it said is only read where a program
may be found again by it, at the beginning of its next prompt.
"""

from __future__ import annotations

import zlib

import msgspec

from thunderagent.proxy.reading.dialects.base import NO_USAGE, Completion, Dialect, KeepId, Usage
from thunderagent.proxy.reading.sse import UNREADABLE, data_of, events_in
from thunderagent.proxy.reading.tool_calls import Calls, may_call
from thunderagent.proxy.reading.usage import decompressor

_decode_calls = msgspec.json.Decoder(Calls).decode

MAX_KEPT_CHARS = 4 * 2**20
"""A streamed answer that says more is not kept."""


def read_answer(dialect: Dialect, body: bytes, content_encoding: str | None, keep_id: KeepId) -> tuple[Usage, str]:
    """Return the usage of a whole answer, and the key of what it calls. What cannot be read says nothing.

    Cost: one decoding that builds only these, after a few searches for what may be a call.
    """
    plain = decoded(body, content_encoding)
    if not plain:
        return NO_USAGE, ""
    if not may_call(plain):
        return _usage_of(dialect, plain, keep_id), ""
    try:
        return dialect.read_calling(plain, keep_id)
    except UNREADABLE:  # one of them is odd; the other may be read by itself
        return _usage_of(dialect, plain, keep_id), _tool_of(plain)


def _usage_of(dialect: Dialect, plain: bytes, keep_id: KeepId) -> Usage:
    try:
        return dialect.read_answer(plain, keep_id)
    except UNREADABLE:
        return NO_USAGE


def _tool_of(plain: bytes) -> str:
    try:
        return _decode_calls(plain).key()
    except UNREADABLE:
        return ""


def decoded(body: bytes, content_encoding: str | None) -> bytes | None:
    """Return a body without its content encoding; None for an encoding other than gzip and deflate, or a broken one."""
    if content_encoding is None:
        return body
    decompress = decompressor(content_encoding)
    if decompress is None:
        return None
    try:
        return decompress(body)
    except zlib.error:
        return None


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
