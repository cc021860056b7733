"""Bodies that come packed: as one that is not, or refused within the bound."""

from __future__ import annotations

import asyncio
import gzip
import random
import tracemalloc
import zlib
from time import process_time

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from prometheus_client import CollectorRegistry

from thunderagent.errors import BodyTooLargeError, RequestError, TooManyHeldError, UnreadableEncodingError
from thunderagent.proxy.gate import guard, unpacking
from thunderagent.proxy.gate.held import HeldLimits, HeldTurns, KeptBody
from thunderagent.proxy.gate.unpacking import MAX_PARTS_COUNT, PIECE_BYTES, go_on, ways_of

BODY = b'{"messages":[]}' * 100


def unpacked(packed: bytes, ways: list[str], max_bytes: int) -> bytes:
    """Take all steps, each of which makes no more than a piece and what may begin in it."""
    steps = unpacking.unpacking(packed, ways, max_bytes)
    while True:
        more_bytes, body = go_on(steps)
        assert more_bytes <= 2 * PIECE_BYTES
        if body is not None:
            return body


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


def test_many_small_parts_are_refused_at_once() -> None:
    """Each of them once copied all that came after it: eight megabytes took a minute of a processor."""
    parts = zipped(b"a") * 100_000
    began_s = process_time()
    with pytest.raises(RequestError, match=r"gzip in more than 1,024 parts"):
        unpacked(parts, ["gzip"], 2**26)
    assert process_time() - began_s < 2
    in_parts = b"".join(zipped(BODY) for _ in range(MAX_PARTS_COUNT))
    assert unpacked(in_parts, ["gzip"], 2**26) == BODY * MAX_PARTS_COUNT


def test_large_bodies_are_unpacked_in_pieces() -> None:
    """Whatever they hold: what is packed well, and what is not."""
    for body in (bytes(5 * PIECE_BYTES + 7), random.Random(1).randbytes(3 * PIECE_BYTES + 7)):
        for packed, way in ((zipped(body), "gzip"), (zlib.compress(body), "deflate"), (raw_deflate(body), "deflate")):
            steps, sizes, plain = unpacking.unpacking(packed, [way], 2**26), [], None
            while plain is None:
                more_bytes, plain = go_on(steps)
                sizes.append(more_bytes)
            assert plain == body
            assert sum(sizes) == len(body)
            assert max(sizes) < 2 * PIECE_BYTES


async def test_what_is_unpacked_counts_as_it_comes() -> None:
    """So many bombs at once take no more memory than is meant for bodies; nothing stays counted."""
    held = HeldTurns(HeldLimits(body_bytes=8 * PIECE_BYTES), CollectorRegistry())
    headers = CIMultiDictProxy(CIMultiDict({"Content-Encoding": "gzip"}))

    async def unpack(size_bytes: int) -> tuple[str, int]:
        kept = KeptBody(held)
        try:
            plain = await guard._unpacked(headers, zipped(bytes(size_bytes)), kept, 2**26)
        except TooManyHeldError:
            return "refused", 0
        finally:
            kept.release()
        return "unpacked", len(plain)

    answers = await asyncio.gather(*(unpack(6 * PIECE_BYTES) for _ in range(4)))
    assert [each[0] for each in answers].count("refused") in (2, 3)
    assert await unpack(2 * PIECE_BYTES) == ("unpacked", 2 * PIECE_BYTES)
    assert repr(held) == "<HeldTurns: 0 turns, 0 bytes>"


def test_a_bomb_takes_no_more_than_the_bound() -> None:
    bomb = zipped(bytes(64 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            unpacked(bomb, ["gzip"], 2**20)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
