"""Puts the field `priority` into the body of a turn."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

REFUSAL: Final = re.compile(rb"(?i)priority scheduling is not enabled|using priority is disabled")
"""Texts of engines without priorities, in answer to a turn with one."""

PRIORITY_HEADER: Final = "X-Vllm-Priority"
"""The header that vLLM reads if a body has no such field."""

_ABSENT: Final = Raw()


class _Shape(msgspec.Struct):
    priority: Raw = _ABSENT


_decode_shape = msgspec.json.Decoder(_Shape).decode


def with_priority(body: bytes, priority: int) -> bytes:
    """Return a JSON object with the field at its front; unchanged if it has one, is empty, or is no object.

    One pass that builds nothing: 1 ms per MB.
    """
    try:
        shape = _decode_shape(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    opening = body.index(b"{") + 1
    if bytes(shape.priority) or body[opening:].lstrip()[:1] == b"}":
        return body
    return b"".join((body[:opening], b'"priority":%d,' % priority, memoryview(body)[opening:]))
