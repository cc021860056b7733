"""Removes a member from a JSON object, or adds one, by splicing its bytes: nothing else is touched.

The scanner jumps from one structural character or string to the next by a regular expression. It is only used on bodies
that were checked to be JSON, and only if there is something to change.
"""

# compiled: a program's id is cut out of each turn's body

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from thunderagent.proxy.reading.json_cost import SLICE_BYTES, end_of_text, others_run

_SHORT_STRING = rb'"[^"\\]{0,4096}+(?:\\.[^"\\]{0,4096}+){0,4096}+"'
_AT_DEPTH = re.compile(rb'["{}\[\],:]')
_DEEPER = re.compile(rb'["{}\[\]]')
_SCALAR_VALUE = re.compile(rb"\s*+:\s*+(?:" + _SHORT_STRING + rb"|-?[0-9]++)\s*+(?:(?P<comma>,)|(?=}))", re.DOTALL)
_ESCAPE = b"\\u00"
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
_SPACE = re.compile(rb"\s*+")
MAX_KEY_BYTES = 4096
"""A longer key is none of ours."""

COPIED_BYTES = 64 * 1024
"""Copying so much twice is cheaper than a view of it."""

SHORT_GAP_BYTES = 64
"""Members are seldom further apart."""

_INCLUDE_USAGE = b'"stream_options":{"include_usage":true}'


class Member(NamedTuple):
    """The position of an object's member: offsets of its key's first byte and past its value's last byte."""

    key: str
    start: int
    value_start: int
    end: int


def members(body: bytes, opening: int) -> Iterator[Member]:
    """Yield the members of the object whose `{` is at `opening`, skipping nested values."""
    depth, at = 0, opening
    key, key_start, value_start = "", -1, -1
    last_end = opening + 1
    while True:
        others_run()
        token = (_AT_DEPTH if depth <= 1 else _DEEPER).search(body, at, at + SLICE_BYTES)
        if token is None:
            at += SLICE_BYTES
            if at >= len(body):
                raise ValueError(f"no object at {opening}, or it has no end after {last_end}")
            continue
        first, start, at = token[0], token.start(), token.end()
        if first == b'"':
            at = end_of_text(body, at)
            if depth == 1 and value_start < 0:
                key, key_start = _key(body[start : min(at, start + MAX_KEY_BYTES)]), start
        elif first in b"{[":
            depth += 1
        elif depth == 1 and first == b":":
            value_start = at
        elif depth == 1 and first in b",}":
            if value_start >= 0:
                yield Member(key, key_start, *_without_space(body, value_start, start))
            key_start = value_start = -1
            last_end = start
            if first == b"}":
                return
        elif first in b"}]":
            depth -= 1


def _without_space(body: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the range without the white space at its ends; nothing is copied but that."""
    while (begun := _SPACE.match(body, start, min(end, start + SLICE_BYTES))) is not None and begun.end() > start:
        start = begun.end()
        others_run()
    while end > start and body[end - 1 : end].isspace():
        part = body[max(start, end - SLICE_BYTES) : end]
        end -= len(part) - len(part.rstrip())
        others_run()
    return start, end


def remove_member(body: bytes, path: tuple[str, ...]) -> bytes:
    """Return `body` without the member at `path` (every occurrence of it), and without its comma.

    The member must exist. Its key is searched for first: a body of megabytes is scanned only in odd cases.
    """
    key = b'"%s"' % path[-1].encode()
    at = body.find(key)
    if at >= 0 and body.find(key, at + 1) < 0 and (body.find(b"\\") < 0 or not _may_escape_keys(body)):
        value = _SCALAR_VALUE.match(body, at + len(key))
        gap = body[max(0, at - SHORT_GAP_BYTES) : at]
        before = gap.rstrip()
        if value is not None and before:
            before_end = at - len(gap) + len(before)
            if before[-1:] == b"{":
                return _replaced(body, before_end, value.end())
            if before[-1:] == b",":
                return _replaced(body, before_end - 1, value.end(), value[1] or b"")
    opening = body.index(b"{")
    for name in path[:-1]:
        member = _last(body, opening, name)
        assert member is not None, "the member must be there"
        opening = member.value_start
    return _without(body, members(body, opening), path[-1])


def set_value(body: bytes, key: str, value: bytes) -> bytes:
    """Return `body` with another value for a member, which must exist; of two with that key the last counts."""
    name = b'"%s"' % key.encode()
    at = body.find(name)
    if at >= 0 and body.find(name, at + 1) < 0 and not _may_escape_keys(body):
        old = _SCALAR_VALUE.match(body, at + len(name))
        before_end = _without_space(body, 0, at)[1]
        if old is not None and body[before_end - 1 : before_end] in (b"{", b","):
            return _replaced(body, at + len(name), old.end(), b":" + value + (old["comma"] or b""))
    member = _last(body, body.index(b"{"), key)
    assert member is not None, "the member must be there"
    return _replaced(body, member.value_start, member.end, value)


def value_of(body: bytes, key: str) -> bytes | None:
    """Return the bytes of a member's value; None if there is none. Raises `ValueError` if the object has no end."""
    if body.find(b'"%s"' % key.encode()) < 0 and not _may_escape_keys(body):
        return None
    member = _last(body, body.index(b"{"), key)
    return None if member is None else body[member.value_start : member.end]


def put_value(body: bytes, key: str, value: bytes) -> bytes:
    """Return `body` with this value for a member, which may exist. Raises `ValueError` as `has_member`."""
    if has_member(body, key):
        return set_value(body, key, value)
    begin = body.index(b"{") + 1
    comma = b"" if body[begin : begin + SLICE_BYTES].lstrip()[:1] == b"}" else b","
    return _replaced(body, begin, begin, b'"%s":%s%s' % (key.encode(), value, comma))


def has_member(body: bytes, key: str) -> bool:
    """Return whether the object in `body` has a member with this key. Raises `ValueError` if it has no end."""
    if body.find(b'"%s"' % key.encode()) < 0 and not _may_escape_keys(body):
        return False
    return _last(body, body.index(b"{"), key) is not None


def is_spelt_as_json(body: bytes) -> bool:
    """Return whether a body has only what JSON has, in any order: text in double quotes, with JSON's escapes.

    Python's `NaN` and `Infinity` count. Then a key is where `members` finds one, for every reader that takes all JSON.
    Cost: one pass in bounded steps, so that other threads may run between them.
    """
    at, size = 0, len(body)
    while at < size:
        end = _end_of(_PARTS, body, at)
        if end == at and (body[at : at + 1] != b'"' or (end := _end_of_string(body, at + 1)) < 0):
            return False
        at = end
    return True


_CHARACTERS = rb'(?:[^"\\]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,1000}+'
_CHARACTERS_OF_STRING = re.compile(_CHARACTERS, re.DOTALL)
_PARTS = re.compile(
    rb"(?:[\s{}\[\],:0-9+\-.eE]++|true|false|null|NaN|Infinity|" + b'"' + _CHARACTERS + b'"' + rb"){0,1000}+", re.DOTALL
)
"""Bounded, because a match remembers each repetition."""


def _end_of(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    others_run()
    found = pattern.match(body, at, at + SLICE_BYTES)
    return found.end() if found is not None else at


def _end_of_string(body: bytes, at: int) -> int:
    """Return the offset past a string's closing quote, -1 if it has none; `at` is within it."""
    while True:
        end = _end_of(_CHARACTERS_OF_STRING, body, at)
        if body[end : end + 1] == b'"':
            return end + 1
        if end == at:
            return -1
        at = end


def _without(body: bytes, found: Iterable[Member], key: str) -> bytes:
    """Return `body` without an object's members with a certain key. Cost: one pass, however many there are.

    A member goes with the comma after it, or, if it is the last, with the one before it.
    """
    kept, view = bytearray(), memoryview(body)
    begin = kept_end = left_out_from = None
    copied = end = 0
    for member in found:
        begin = member.start if begin is None else begin
        if member.key != key:
            if left_out_from is not None:
                kept += view[copied:left_out_from]
                copied, left_out_from = member.start, None
            kept_end = member.end
        elif left_out_from is None:
            left_out_from = member.start
        end = member.end
    if kept_end is None:
        return _replaced(body, begin or 0, _without_space(body, end, len(body))[0])
    if left_out_from is None:
        return b"".join((kept, view[copied:]))
    return b"".join((kept, view[copied:kept_end], view[end:]))


def _replaced(body: bytes, start: int, end: int, value: bytes = b"") -> bytes:
    """Return `body` with other bytes in a range. Nothing else of a large one is copied on the way."""
    if len(body) <= COPIED_BYTES:
        return body[:start] + value + body[end:]
    view = memoryview(body)
    return b"".join((view[:start], value, view[end:]))


def set_include_usage(body: bytes, stream_options: object) -> bytes:
    """Return `body` with `stream_options.include_usage` true; `stream_options` is the current value, or None."""
    opening = body.index(b"{")
    if stream_options is None and body.find(b'"stream_options"') < 0 and not _may_escape_keys(body):
        return _replaced(body, opening + 1, opening + 1, _INCLUDE_USAGE + b",")
    member = _last(body, opening, "stream_options")
    if member is not None:
        options = dict(stream_options) if isinstance(stream_options, dict) else {}
        if options.pop("continuous_usage_stats", None):
            options["continuous_usage_stats"] = False  # it had no effect without usage
        # msgspec does not write what only Python's parser reads, such as half of a surrogate pair
        value = json.dumps({**options, "include_usage": True}, separators=(",", ":")).encode()
        return _replaced(body, member.value_start, member.end, value)
    return _replaced(body, opening + 1, opening + 1, _INCLUDE_USAGE + b",")


def _may_escape_keys(body: bytes) -> bool:
    """Return whether an ASCII letter may be escaped: then a key may be spelt differently."""
    at = body.find(_ESCAPE)
    while 0 <= at < len(body):
        if _ESCAPED_LETTER.search(body, at, at + SLICE_BYTES + len(_ESCAPE)) is not None:
            return True
        others_run()
        at += SLICE_BYTES
    return False


def _key(token: bytes) -> str:
    """Return a key as text; an invalid one matches nothing."""
    try:
        key: str = msgspec.json.decode(token)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return key


def _last(body: bytes, opening: int, key: str) -> Member | None:
    """Return the member with a key, if there is one: of duplicates parsers take the last."""
    found = None
    for member in members(body, opening):
        if member.key == key:
            found = member
    return found
