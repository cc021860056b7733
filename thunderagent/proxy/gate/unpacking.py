"""Bodies that come packed, as signed-in Codex sends them: unpacked up to the bound of their path, or refused.

No engine reads a packed body: what cannot be unpacked here would be an error there, whose words say nothing of it.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from thunderagent.errors import BodyTooLargeError, RequestError, UnreadableEncodingError

MAX_LAYERS_COUNT: Final = 2
"""How many encodings one body may have; more are for nobody but who wants to waste time."""

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


def unpacked(body: bytes, ways: list[str], max_bytes: int) -> bytes:
    """Return a body without its encodings. Raises `BodyTooLargeError` beyond the bound, `RequestError` if broken."""
    for way in ways:
        body = _unpacked(body, way, max_bytes)
    return body


def _unpacked(body: bytes, way: str, max_bytes: int) -> bytes:
    """Remove one encoding; parts that follow one another are one body."""
    make = _WAYS[way]
    if way == "deflate" and not _has_zlib_head(body):
        make = partial(zlib.decompressobj, -zlib.MAX_WBITS)  # as some clients understand the word
    pieces: list[bytes] = []
    left_bytes = max_bytes
    while body:
        unpacking = make()
        try:
            piece = unpacking.decompress(body, left_bytes + 1)
        except _BROKEN as error:
            raise RequestError(f"the body is not {way}: {error}") from error
        left_bytes -= len(piece)
        if left_bytes < 0:
            raise BodyTooLargeError(f"the body is larger than the limit of this path, {max_bytes} bytes, unpacked")
        if not unpacking.eof:
            raise RequestError(f"the body is not {way}: it has no end")
        pieces.append(piece)
        if not piece and len(pieces) > 1:
            break  # empty parts without end
        body = unpacking.unused_data
    return b"".join(pieces)


def _has_zlib_head(body: bytes) -> bool:
    return len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0  # RFC 1950, 2.2
