"""Bodies that come packed, as signed-in Codex sends them: unpacked up to the bound of their path, or refused.

No engine reads a packed body: what cannot be unpacked here would be an error there, whose words say nothing of it.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Final

from thunderagent.errors import BodyTooLargeError, RequestError, UnreadableEncodingError

MAX_LAYERS_COUNT: Final = 2
"""How many encodings one body may have; more are for nobody but who wants to waste time."""

MAX_PARTS_COUNT: Final = 1024
"""How many parts one encoding may have: those who pack in parallel make one of 64 KiB or more."""

PIECE_BYTES: Final = 2**20
FED_BYTES: Final = 2**16
"""How much is unpacked in a step, and how much of the packed body is given to it at once: what it leaves is copied."""

Unpacking = Generator[int, None, bytes]

_WAYS: dict[str, Callable[[], Any]] = {
    "gzip": partial(zlib.decompressobj, zlib.MAX_WBITS | 16),
    "x-gzip": partial(zlib.decompressobj, zlib.MAX_WBITS | 16),
    "deflate": zlib.decompressobj,
}
_BROKEN: tuple[type[Exception], ...] = (zlib.error,)
for _name in ("compression.zstd", "backports.zstd"):  # Python 3.14 has it; before, an optional package
    try:
        _zstd = importlib.import_module(_name)
    except ImportError:
        continue
    _WAYS["zstd"] = _zstd.ZstdDecompressor
    _BROKEN = (zlib.error, _zstd.ZstdError)
    break


def ways_of(encodings: str) -> list[str]:
    """Return the encodings of a body, the last one first. Raises `UnreadableEncodingError` with the remedy."""
    names = [name.strip().lower() for name in encodings.split(",")]
    ways = [name for name in reversed(names) if name not in ("", "identity")]
    if "zstd" in ways and "zstd" not in _WAYS:
        raise UnreadableEncodingError(
            "the body is packed by zstd, which this proxy cannot read: install thunderagent[zstd] where it runs, "
            "or send the body as gzip or plain"
        )
    unknown = [way for way in ways if way not in _WAYS]
    if unknown:
        readable = ", ".join(sorted(_WAYS.keys() - {"x-gzip"}))
        raise UnreadableEncodingError(
            f"the body is packed by {unknown[0][:40]!r}, and this proxy reads {readable}: send one of these, or plain"
        )
    if len(ways) > MAX_LAYERS_COUNT:
        raise UnreadableEncodingError(f"the body is packed {len(ways)} times: {MAX_LAYERS_COUNT} at most are unpacked")
    return ways


def unpacking(body: bytes, ways: list[str], max_bytes: int) -> Unpacking:
    """Remove a body's encodings: yield how many bytes more are kept, again and again, and return what it is then.

    A step makes at most `PIECE_BYTES`. Raises `BodyTooLargeError` beyond the bound, `RequestError` if it is broken.
    """
    for way in ways:
        pieces: list[bytes] = []
        for piece in _pieces(body, way, max_bytes):
            pieces.append(piece)
            yield len(piece)
        body = b"".join(pieces)
    return body


def go_on(steps: Unpacking) -> tuple[int, bytes | None]:
    """Take steps; return how many bytes more are kept, and the body if that was the end."""
    more_bytes = 0
    while more_bytes < PIECE_BYTES:
        try:
            more_bytes += next(steps)
        except StopIteration as end:
            return more_bytes, end.value
    return more_bytes, None


def _pieces(body: bytes, way: str, max_bytes: int) -> Iterator[bytes]:
    """Remove one encoding; parts that follow one another are one body."""
    make = _WAYS[way]
    if way == "deflate" and not _has_zlib_head(body):
        make = partial(zlib.decompressobj, -zlib.MAX_WBITS)  # as some clients understand the word
    view, fed_bytes, left_bytes, parts_count = memoryview(body), 0, max_bytes, 0
    while fed_bytes < len(view):
        parts_count += 1
        if parts_count > MAX_PARTS_COUNT:
            raise RequestError(f"the body is {way} in more than {MAX_PARTS_COUNT:,} parts")
        part, rest = make(), b""
        while not part.eof:
            if not rest:
                rest = bytes(view[fed_bytes : fed_bytes + FED_BYTES])
                fed_bytes += len(rest)
            try:
                piece = part.decompress(rest, min(PIECE_BYTES, left_bytes + 1))
            except _BROKEN as error:
                raise RequestError(f"the body is not {way}: {error}") from error
            rest = getattr(part, "unconsumed_tail", b"")  # zstd keeps what it has not read
            left_bytes -= len(piece)
            if left_bytes < 0:
                raise BodyTooLargeError(f"the body is larger than the limit of this path, {max_bytes} bytes, unpacked")
            if piece:
                yield piece
            elif not part.eof and not rest and fed_bytes >= len(view):
                raise RequestError(f"the body is not {way}: it has no end")
        fed_bytes -= len(part.unused_data)


def _has_zlib_head(body: bytes) -> bool:
    return len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0  # RFC 1950, 2.2
