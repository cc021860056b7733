"""Close frames among the frames of an engine."""

from __future__ import annotations

from random import Random

import pytest

from thunderagent.proxy.wire.websockets import GOING_AWAY, Frames, close_frame


def frame(rng: Random, opcode: int = 2) -> bytes:
    """Return a frame of some size; some frames are masked."""
    size = rng.choice((0, 1, 125, 126, 300, 65_535, 65_536, 70_000))
    masked = rng.choice((0x00, 0x80))
    if size < 126:
        length = bytes((masked | size,))
    else:
        width = 2 if size < 65_536 else 8
        length = bytes((masked | (126 if width == 2 else 127),)) + size.to_bytes(width, "big")
    return bytes((0x80 | opcode,)) + length + (b"mask" if masked else b"") + rng.randbytes(size)


@pytest.mark.parametrize("seed", range(40))
def test_gaps_between_frames_are_found_however_the_bytes_are_cut(seed: int) -> None:
    """No false gap is found, the first one in each piece is, and so is a gap right there."""
    rng = Random(seed)
    frames = [frame(rng) for _ in range(rng.randrange(1, 8))]
    stream, gaps = b"".join(frames), {0}
    for each in frames:
        gaps.add(max(gaps) + len(each))
    followed, at = Frames(), 0
    while at < len(stream):
        piece = stream[at : at + rng.choice((1, 2, 3, 7, 1000, 100_000))]
        first = min((gap - at for gap in gaps if at <= gap <= at + len(piece)), default=-1)
        assert followed.feed(piece) == first
        at += len(piece)
        assert followed.is_between == (at in gaps)
    assert not followed.is_closed


def test_after_a_close_frame_of_the_engine_comes_none_of_ours() -> None:
    followed = Frames()
    followed.feed(frame(Random(1)) + close_frame(1000, "bye")[:1])
    assert not followed.is_closed
    followed.feed(close_frame(1000, "bye")[1:])
    assert followed.is_closed
    assert followed.is_between


def test_a_close_frame_says_its_code_and_why() -> None:
    """RFC 6455, 5.5.1 defines it; a server masks nothing."""
    assert close_frame(GOING_AWAY, "bye") == b"\x88\x05\x03\xe9bye"
