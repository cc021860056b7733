"""Two versions side by side: today's code reads version 1, and version 1 could read today's messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from thunderagent.scale.messages import FromGateway, FromScheduler, decode, encode

FRAMES: dict[str, str] = json.loads(Path(__file__).with_name("frames-1.json").read_text())
"""A frame with one message of each kind of version 1, with all fields, in hexadecimal. Never changed."""

SINCE_1 = {"deposed", "look", "polled", "polls", "revoke"}
"""Later kinds: a version that does not know them drops them."""


def fields_of(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)[3][0]


def is_begin_of(older: Any, newer: Any) -> bool:
    """Return whether an older message is the beginning of a newer one, in all its parts."""
    if isinstance(older, list) and isinstance(newer, list):
        return len(older) <= len(newer) and all(map(is_begin_of, older, newer))
    return bool(older == newer)


@pytest.mark.parametrize("kind", FRAMES)
def test_fields_are_only_added(kind: str) -> None:
    """Today's reader takes a whole older message, and writes it with the same fields first."""
    data = bytes.fromhex(FRAMES[kind])
    frame, dropped_count = decode(data)
    assert (dropped_count, len(frame.messages)) == (0, 1)
    assert is_begin_of(fields_of(data), fields_of(encode(frame)))


def test_no_kind_went_and_those_that_came_are_known_to_be_new() -> None:
    """A message of a removed kind would be dropped silently."""
    kinds = {kind.__struct_config__.tag for kind in get_args(FromGateway | FromScheduler)}
    assert kinds == set(FRAMES) | SINCE_1


@pytest.mark.parametrize("kind", FRAMES)
def test_fields_of_a_later_version_are_not_read(kind: str) -> None:
    """Version 1 would not read them either."""
    number, heard, epoch, messages = msgspec.msgpack.decode(encode(decode(bytes.fromhex(FRAMES[kind]))[0]))
    later = msgspec.msgpack.encode([number, heard, epoch, [[*messages[0], "more"], ["unheard-of", 1]], "more"])
    frame, dropped_count = decode(later)
    assert dropped_count == 1
    assert encode(frame) == encode(decode(bytes.fromhex(FRAMES[kind]))[0])
