"""Images, audio and files in a prompt: found by their marks and sized by their first bytes, never decoded.

A screenshot is megabytes of base64 in a body and some thousand tokens to an engine. So data in a body that is not text
to the model is separated: its bytes do not count as text, and each piece has a class and a first guess of its tokens.
Usage teaches how many tokens an engine takes for a class (`programs/learned/sizes.py`).

A mark is a member of an object, such as `"url": "data:image/png;base64,`: inside a text its quotes would be escaped, so
a text cannot hold one. After a mark the search continues behind its data, so it looks at each byte once.
"""

# compiled: it is asked of each turn

from __future__ import annotations

import re
from base64 import b64decode
from collections import Counter
from math import ceil, floor, sqrt
from typing import Final, NamedTuple

from thunderagent.programs.messages import Media
from thunderagent.proxy.reading.json_cost import SLICE_BYTES, holds_any, others_run

_MARK: Final = re.compile(
    rb'"(?:url|image_url|audio_url|video_url|file_url|file_data)"\s*:\s*"data:(?P<mime>[\w.+-]{0,64}/?)[^",]{0,120};base64,'
    rb'|"type"\s*:\s*"(?P<source>base64)"'
    rb'|"input_audio"\s*:\s*(?P<audio>\{)'
    rb'|"(?P<remote>image_url|source)"\s*:\s*(?:\{[^{}]{0,120}?"url"\s*:\s*)?"https?:'
)
_DATA: Final = re.compile(rb'"data"\s*:\s*"')
_MIME: Final = re.compile(rb'"media_type"\s*:\s*"(?P<mime>[\w.+-]{0,64}/?)')

MEDIA_WORDS: Final = [b"base64", b"input_audio", b"image_url", b'"source"']
"""Every body with a mark holds one of them."""

PATCH_PIXELS: Final = 28
MIN_IMAGE_PIXELS: Final = 56 * 56
MAX_IMAGE_PIXELS: Final = 12_845_056
"""Qwen2-VL and Qwen2.5-VL: an image is resized to whole patches of 28 x 28 within these limits, each a token
(`smart_resize` and `preprocessor_config.json` of the models)."""

UNKNOWN_IMAGE_TOKENS: Final = 1024
"""For an image that the engine must fetch."""

BYTES_PER_TOKEN: Final = {"image": 768, "audio": 640, "video": 2048, "file": 32}
"""A first guess if nothing better is known. Audio: 25 tokens per second (Qwen2-Audio), 16 kB per second."""

LARGEST_IMAGE_TOKENS: Final = MAX_IMAGE_PIXELS // PATCH_PIXELS**2
HEADER_CHARS: Final = 96 * 1024
"""How much base64 is read for the size of a picture; a JPEG may begin with long comments."""

MARK_BYTES: Final = 1024
"""A mark, and what belongs to it beside the data, is not longer."""

MAX_MODEL_CHARS: Final = 64


class MediaFound(NamedTuple):
    """The bytes of a body that are not text, and their kinds."""

    size_bytes: int
    media: Media


NO_MEDIA: Final = MediaFound(0, ())


def media_of(body: bytes, model: bytes | memoryview = b"") -> MediaFound:
    """Return what in a body is neither text nor token ids, by class: a model, a kind and a size within a factor 2.

    Cost: a search for each of a few words if there is nothing; otherwise one look at each byte.
    """
    if not holds_any(body, MEDIA_WORDS):
        return NO_MEDIA
    size_bytes, at = 0, 0
    tokens_by_class: Counter[str] = Counter()
    prefix = bytes(model)[:MAX_MODEL_CHARS].strip(b'"').decode("utf-8", "replace")
    while at < len(body):
        mark = _MARK.search(body, at, at + SLICE_BYTES + MARK_BYTES)
        if mark is None:
            at += SLICE_BYTES
            others_run()
            continue
        kind, start, end, at = _piece_at(body, mark, at)
        if not kind:
            continue
        tokens = _guess_tokens(kind, body, start, end)
        size_bytes += end - start
        tokens_by_class[f"{prefix} {kind} {tokens.bit_length()}"] += tokens
    return MediaFound(size_bytes, tuple(sorted(tokens_by_class.items())))


def _piece_at(body: bytes, mark: re.Match[bytes], since: int) -> tuple[str, int, int, int]:
    """Return the kind of a piece, begin and end of its data, and where to continue; no kind if it is not one.

    Everything before `since` was already read.
    """
    if mark["remote"]:
        return "image", mark.end(), mark.end(), mark.end()
    if mark["mime"] is not None:
        end = body.find(b'"', mark.end())
        end = len(body) if end < 0 else end
        return _kind_of(mark["mime"]), mark.end(), end, end
    # An object's members may be in any order: the data may be before the mark.
    opening = mark.start() if mark["audio"] else max(since, body.rfind(b"{", since, mark.start()))
    closing = body.find(b"}", mark.end())
    closing = len(body) if closing < 0 else closing
    data = _near(_DATA, body, opening, mark.end(), closing)
    if data is None:
        return "", 0, 0, closing
    end = body.find(b'"', data.end(), closing)
    end = closing if end < 0 else end
    mime = _MIME.search(body, opening, min(opening + MARK_BYTES, data.start()))
    mime = mime or _near(_MIME, body, max(opening, data.start() - MARK_BYTES), end, closing)
    kind = "audio" if mark["audio"] else _kind_of(mime["mime"] if mime is not None else b"")
    return kind, data.end(), end, closing


def _near(pattern: re.Pattern[bytes], body: bytes, first: int, second: int, end: int) -> re.Match[bytes] | None:
    """Return what is found soon after one of two places."""
    found = pattern.search(body, first, min(first + MARK_BYTES, end))
    return found if found is not None else pattern.search(body, second, min(second + MARK_BYTES, end))


def _kind_of(mime: bytes) -> str:
    kind = mime.partition(b"/")[0].decode()
    return kind if kind in BYTES_PER_TOKEN else "file"


def _guess_tokens(kind: str, body: bytes, start: int, end: int) -> int:
    """Return a first guess of the tokens of a piece of base64; at least 1."""
    if kind == "image":
        if start == end:
            return UNKNOWN_IMAGE_TOKENS
        size = image_size(_decoded(body[start : min(end, start + HEADER_CHARS)]))
        if size is not None:
            return qwen_tokens(*size)
    tokens = (end - start) * 3 // 4 // BYTES_PER_TOKEN[kind]
    return max(1, min(tokens, LARGEST_IMAGE_TOKENS) if kind == "image" else tokens)


def _decoded(chars: bytes) -> bytes:
    """Decode the whole quartets of base64; empty if they are invalid."""
    try:
        return b64decode(chars[: len(chars) // 4 * 4])
    except ValueError:
        return b""


def qwen_tokens(width: int, height: int) -> int:
    """Return how many patches of 28 x 28 an image has in Qwen2-VL and Qwen2.5-VL, after its resize."""
    columns, rows = max(1, round(width / PATCH_PIXELS)), max(1, round(height / PATCH_PIXELS))
    pixels = columns * rows * PATCH_PIXELS**2
    if pixels > MAX_IMAGE_PIXELS:
        shrink = sqrt(width * height / MAX_IMAGE_PIXELS)
        columns = max(1, floor(width / shrink / PATCH_PIXELS))
        rows = max(1, floor(height / shrink / PATCH_PIXELS))
    elif pixels < MIN_IMAGE_PIXELS:
        grow = sqrt(MIN_IMAGE_PIXELS / (width * height))
        columns, rows = ceil(width * grow / PATCH_PIXELS), ceil(height * grow / PATCH_PIXELS)
    return min(columns * rows, LARGEST_IMAGE_TOKENS)


def image_size(head: bytes) -> tuple[int, int] | None:
    """Return width and height of a picture from its first bytes (PNG, GIF, WebP, JPEG); None if unknown."""
    size: tuple[int, int] | None = None
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        size = _big(head[16:20]), _big(head[20:24])
    elif head[:6] in (b"GIF87a", b"GIF89a"):
        size = _little(head[6:8]), _little(head[8:10])
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        size = _webp_size(head)
    elif head.startswith(b"\xff\xd8"):
        size = _jpeg_size(head)
    return size if size is not None and min(size) > 0 else None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    form = head[12:16]
    if form == b"VP8X":
        return _little(head[24:27]) + 1, _little(head[27:30]) + 1
    if form == b"VP8 ":
        return _little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF
    if form == b"VP8L":
        bits = _little(head[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Walk the segments until one that begins a frame."""
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return _big(head[at + 7 : at + 9]), _big(head[at + 5 : at + 7])
        at += 2 if 0xD0 <= marker <= 0xD9 or marker == 0x01 else 2 + max(2, _big(head[at + 2 : at + 4]))
    return None


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
