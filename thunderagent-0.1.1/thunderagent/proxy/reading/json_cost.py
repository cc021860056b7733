"""What JSON costs to read: a byte of it may become an object of sixty, and no other thread runs while it is decoded.

A decoder cannot be stopped halfway. So what is large is counted first, in slices between which others run. What is
outside of texts counts; a text is cheap, but for its escapes.
"""

# interpreted: compiled code lets no other thread run between two slices

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec import Raw

from thunderagent.errors import BodyTooLargeError

SLICE_BYTES: Final = 2**20
"""How much is searched without letting others run: some 20 ms where each byte counts."""

SPLIT_BYTES: Final = 2**18
"""How much is split at quotes at a time: that takes up to 20 times its size."""

COUNTED_BYTES: Final = 4 * 2**20
"""Something smaller is read in some 20 ms, whatever it is."""

MAX_COST: Final = 2**23
"""What is read in some 50 ms: 8 million numbers or escapes, 3 million lists, or 2 million members of objects."""

MIN_LISTED_COUNT: Final = 65_536
BYTES_PER_LISTED: Final = 16
"""A list may have so many parts, or one for so many of its bytes: as an object each takes 64."""

_IN_TEXT: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_decode_list: Final = msgspec.json.Decoder(list[Raw]).decode


BYTES_PER_BUILT: Final = 64
"""The same for values of any kind."""

BYTES_PER_OBJECT: Final = 32
"""The same for objects: as a struct one takes some 100. Logprobs have one for some 70 bytes."""


def check_cost(body: bytes) -> None:
    """Raise `BodyTooLargeError` for a body of which the parts, not the bytes, are too many to be read."""
    if len(body) <= COUNTED_BYTES:
        return
    cost = _escapes_count(body)
    if _cost_of_all(body) + cost <= MAX_COST:
        return
    for structure in outside_texts(body):
        cost += _cost_of(structure, 0, len(structure))
        if cost > MAX_COST:
            raise BodyTooLargeError(
                f"the body has too many parts to be read: {MAX_COST} are the limit, where a number in a list and an "
                "escape in a text count once, a list or an object twice more, and a member of an object five times"
            )


def is_readable(answer: bytes) -> bool:
    """Return whether the lists of structs in an answer may be built: they take no more than some times its bytes."""
    if len(answer) <= MIN_LISTED_COUNT:
        return True
    try:
        check_cost(answer)
    except BodyTooLargeError:
        return False
    return _objects_count(answer) <= listed_limit_count(len(answer), BYTES_PER_OBJECT)


def is_cheap(answer: bytes) -> bool:
    """Return whether all of an answer may be built as objects: they take no more than some times its bytes."""
    if not is_readable(answer):
        return False
    limit_count = listed_limit_count(len(answer), BYTES_PER_BUILT)
    return _commas_in(answer) <= limit_count // 2 or parts_count(answer, limit_count) <= limit_count


def list_of(raw: Raw) -> list[Raw] | None:
    """Return the parts of a list as sent; None if they are too many to be objects. Raises like msgspec."""
    if len(raw) > MIN_LISTED_COUNT:
        text, limit_count = bytes(raw), listed_limit_count(len(raw), BYTES_PER_LISTED)
        if _commas_in(text) > limit_count and parts_count(text, limit_count) > limit_count:
            return None
    return _decode_list(raw)


def has_few_parts(body: bytes) -> bool:
    """Return whether each list in a body may be built as one of raw parts, whatever its texts hold."""
    if len(body) <= 2 * MIN_LISTED_COUNT:  # a part and its comma take two
        return True
    return _commas_in(body) <= listed_limit_count(len(body), BYTES_PER_LISTED)


def listed_limit_count(size_bytes: int, bytes_per_part: int) -> int:
    """Return how many parts something of that size may have to be built as objects."""
    return max(MIN_LISTED_COUNT, size_bytes // bytes_per_part)


def parts_count(text: bytes, limit_count: int) -> int:
    """Return how many values JSON has at least, at most one slice above a limit."""
    count = 0
    for structure in outside_texts(text):
        count += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        if count > limit_count:
            break
    return count


def end_of_text(body: bytes, start: int) -> int:
    """Return the offset past the quote that ends a text, whose first byte is at `start`; past the body without one."""
    at = start
    while at < len(body):
        found = _IN_TEXT.match(body, at, min(at + SLICE_BYTES, len(body)))
        assert found is not None, "it matches nothing, too"
        end = found.end()
        if body[end : end + 1] == b'"':
            return end + 1
        if end == at:  # a backslash is last
            break
        at = end
    return len(body)


def outside_texts(body: bytes) -> Iterator[bytes]:
    """Yield JSON without its texts, slice by slice."""
    at, in_text = 0, 0
    while at < len(body):
        part = body[at : at + SPLIT_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and len(part) > 1:  # what it escapes is in the next slice
            part = part[:-1]
        at += len(part)
        pieces = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(pieces[in_text::2])
        in_text = (in_text + len(pieces) - 1) % 2


def holds_any(body: bytes, words: Sequence[bytes]) -> bool:
    """Return whether a body holds one of some short words."""
    if len(body) <= COUNTED_BYTES:
        for word in words:  # noqa: SIM110 - a generator costs a call for each word
            if word in body:
                return True
        return False
    for at in range(0, len(body), COUNTED_BYTES):
        end = at + COUNTED_BYTES + 64
        for word in words:
            if body.find(word, at, end) >= 0:
                return True
    return False


def others_run() -> None:
    """Let other threads run between two searches of a large body: an interpreted call does."""


def _commas_in(body: bytes) -> int:
    """Return how many commas there are, texts included. Cost: 1 ms for 2 MB."""
    return sum([body.count(b",", at, at + COUNTED_BYTES) for at in range(0, len(body), COUNTED_BYTES)])


def _objects_count(body: bytes) -> int:
    """Return how many objects begin, those in texts included."""
    return sum([body.count(b"{", at, at + COUNTED_BYTES) for at in range(0, len(body), COUNTED_BYTES)])


def _cost_of_all(body: bytes) -> int:
    """Return a bound of the cost of a body as if its texts were none, counted until it is above the limit."""
    cost = 0
    for at in range(0, len(body), COUNTED_BYTES):
        cost += _cost_of(body, at, at + COUNTED_BYTES)
        if cost > MAX_COST:
            break
    return cost


def _cost_of(body: bytes, start: int, end: int) -> int:
    lists = body.count(b"[", start, end) + body.count(b"{", start, end)
    return body.count(b",", start, end) + 2 * lists + 4 * body.count(b":", start, end)


def _escapes_count(body: bytes) -> int:
    return sum([body.count(b"\\", at, at + COUNTED_BYTES) for at in range(0, len(body), COUNTED_BYTES)])
