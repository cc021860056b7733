"""Reads an answer of another server up to a bound, packed or not: it does not decide how much memory it takes here."""

from __future__ import annotations

import zlib
from typing import Final

UNPACKED_ONLY: Final = {"Accept-Encoding": "identity"}
"""Asks for an answer as it is; one that comes packed all the same is unpacked up to the bound."""


class ExcessError(ValueError):
    """An answer is larger than its bound, or packed in a way that cannot be bounded."""


class BoundedBody:
    """Collects the pieces of a body as they were sent."""

    __slots__ = ("_body", "_max_bytes", "_packed")

    def __init__(self, max_bytes: int, content_encoding: str | None = None) -> None:
        """Take at most `max_bytes`, unpacked. Raises `ExcessError` for an encoding other than gzip and deflate."""
        self._max_bytes = max_bytes
        self._body = bytearray()
        encoding = (content_encoding or "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            raise ExcessError(f"sent the encoding {encoding[:32]!r}, which nobody asked for")
        self._packed = None if encoding == "identity" else zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)

    def add(self, piece: bytes) -> None:
        """Take the next piece. Raises `ExcessError` beyond the bound, or for what cannot be unpacked."""
        if self._packed is not None:
            try:
                piece = self._packed.decompress(piece, self._max_bytes - len(self._body) + 1)
            except zlib.error as error:
                raise ExcessError(f"sent what cannot be unpacked: {error}") from error
        if len(self._body) + len(piece) > self._max_bytes:
            raise ExcessError(f"sent more than {self._max_bytes} bytes")
        self._body += piece

    def taken(self) -> bytearray:
        """Return the whole body."""
        return self._body
