"""Bodies that come packed: as one that is not, or refused within the bound."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from thunderagent.errors import BodyTooLargeError, RequestError, UnreadableEncodingError
from thunderagent.proxy.gate import unpacking
from thunderagent.proxy.gate.unpacking import unpacked, ways_of

BODY = b'{"messages":[]}' * 100


def zipped(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)  # cases are named by it, the same in each process


def raw_deflate(body: bytes) -> bytes:
    packing = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packing.compress(body) + packing.flush()


@pytest.mark.parametrize(
    ("encodings", "packed"),
    [
        ("gzip", zipped(BODY)),
        ("X-GZip", zipped(BODY[:10]) + zipped(BODY[10:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("deflate, gzip", zipped(zlib.compress(BODY))),
        ("identity", BODY),
    ],
)
def test_a_packed_body_is_unpacked(encodings: str, packed: bytes) -> None:
    ways = ways_of(encodings)
    assert unpacked(packed, ways, len(BODY)) == BODY
    if ways:
        with pytest.raises(BodyTooLargeError):
            unpacked(packed, ways, len(BODY) - 1)


def test_zstd_without_its_library_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine reads it either."""
    monkeypatch.delitem(unpacking._WAYS, "zstd", raising=False)
    for encodings in ("zstd", "gzip, ZSTD"):
        with pytest.raises(UnreadableEncodingError, match=r"thunderagent\[zstd\]"):
            unpacking.ways_of(encodings)


def test_zstd_is_unpacked_where_its_library_is() -> None:
    zstd = pytest.importorskip("backports.zstd")
    ways = ways_of("zstd")
    assert unpacked(zstd.compress(BODY), ways, len(BODY)) == BODY
    with pytest.raises(BodyTooLargeError):
        unpacked(zstd.compress(BODY), ways, len(BODY) - 1)
    with pytest.raises(RequestError):
        unpacked(zstd.compress(BODY)[:-1], ways, len(BODY))
    with pytest.raises(RequestError):
        unpacked(BODY, ways, len(BODY))


@pytest.mark.parametrize("packed", [BODY, zipped(BODY)[:-1], zipped(BODY) + b"x"])
def test_a_broken_body_is_refused(packed: bytes) -> None:
    with pytest.raises(RequestError, match="not gzip"):
        unpacked(packed, ["gzip"], 2 * len(BODY))


@pytest.mark.parametrize("encodings", ["br", "gzip, br", "gzip, gzip, gzip", "rot13"])
def test_unknown_coding_is_refused_with_the_known_ones(encodings: str) -> None:
    """No engine reads it: it would say that the body is no JSON."""
    with pytest.raises(UnreadableEncodingError, match=r"deflate, gzip|2 at most"):
        ways_of(encodings)


def test_a_bomb_takes_no_more_than_the_bound() -> None:
    bomb = zipped(bytes(64 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            unpacked(bomb, ["gzip"], 2**20)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
