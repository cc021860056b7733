"""Tokens as engines spell them, and packed.

As *text* each token is a number in decimal with a comma after it: `12,7,`. Engines spell them so, and a number has one
spelling only: so texts are compared instead of tokens, and of a long prompt only what is new is ever read.

*Packed*, tokens are 32-bit integers, log probabilities 32-bit floats, both little-endian. In a record their bytes are
in planes: first all lowest bytes, then all second ones, and so on. The upper planes of tokens are almost constant, so a
packed record has about 2.3 bytes for a token and 3.4 for a log probability, whatever the text.
"""

# compiled: the tokens of each recorded turn pass here

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Final

import msgspec

UNREADABLE: Any = (msgspec.DecodeError, OverflowError)
"""What tokens that are none may raise."""

_SWAPS: Final = sys.byteorder != "little"
_SPACES: Final = (b" ", b"\n", b"\r", b"\t")
_read_ids: Any = msgspec.json.Decoder(list[int]).decode


def text_of_list(listed: bytes) -> bytes:
    """Return the tokens of a list in JSON as text. If it has spaces and is none, raises one of `UNREADABLE`."""
    for space in _SPACES:
        if listed.find(space) >= 0:  # `in` with bytes makes an exception on its way
            return text_of_ids(_read_ids(listed))
    return listed[1:-1] + b"," if len(listed) > 2 else b""


def text_of_ids(ids: Iterable[int]) -> bytes:
    """Return tokens as text."""
    return b"".join([b"%d," % each for each in ids])


def packed_text(text: bytes) -> bytes:
    """Return the tokens of a text, packed. Raises one of `UNREADABLE` if it has anything else."""
    return token_bytes(_read_ids(b"[%b]" % text[:-1])) if text else b""


def common_text(one: bytes, other: bytes) -> int:
    """Return how many bytes of whole tokens two texts have in common at their beginning.

    Cost: O(log n) comparisons, n bytes.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one.rfind(b",", 0, low) + 1


def end_of_tokens(text: bytes, count: int) -> int:
    """Return how many bytes the first `count` tokens of a text take."""
    end = 0
    for _ in range(count):
        end = text.index(b",", end) + 1
    return end


def token_bytes(ids: Iterable[int]) -> bytes:
    """Return token ids as bytes. Raises `OverflowError` for one that does not fit, `TypeError` for no integer."""
    values = array("i", ids)
    if _SWAPS:
        values.byteswap()
    return values.tobytes()


def token_ids(tokens: bytes) -> list[int]:
    """Return the ids of tokens."""
    values = array("i", tokens)
    if _SWAPS:
        values.byteswap()
    return values.tolist()


def logprob_bytes(logprobs: Iterable[float]) -> bytes:
    """Return log probabilities as bytes: engines compute them in no more than 32 bits."""
    values = array("f", logprobs)
    if _SWAPS:
        values.byteswap()
    return values.tobytes()


def logprob_values(packed: bytes) -> list[float]:
    """Return log probabilities as numbers."""
    values = array("f", packed)
    if _SWAPS:
        values.byteswap()
    return values.tolist()


def in_planes(packed: bytes) -> bytes:
    """Return the bytes of 32-bit values plane by plane."""
    return packed[0::4] + packed[1::4] + packed[2::4] + packed[3::4]


def from_planes(planes: bytes) -> bytes:
    """Return the bytes of 32-bit values one after the other."""
    count = len(planes) // 4
    packed = bytearray(len(planes))
    for at in range(4):
        packed[at::4] = planes[at * count : (at + 1) * count]
    return bytes(packed)
