"""The parts of a body that are no text: found by their marks, and sized by their first bytes."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from typing import Any

import pytest

from thunderagent.proxy.reading.body_fields import media_in, read_fields
from thunderagent.proxy.reading.media import NO_MEDIA, UNKNOWN_IMAGE_TOKENS, image_size, media_of, qwen_tokens


def png(width: int, height: int, size_bytes: int = 3000) -> bytes:
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return head + bytes(size_bytes - len(head))


def jpeg(width: int, height: int, remark_bytes: int = 2000) -> bytes:
    remark = b"\xff\xe1" + (remark_bytes + 2).to_bytes(2, "big") + bytes(remark_bytes)
    frame = b"\xff\xc2\x00\x11\x08" + height.to_bytes(2, "big") + width.to_bytes(2, "big") + bytes(10)
    return b"\xff\xd8" + remark + frame


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + width.to_bytes(2, "little") + height.to_bytes(2, "little") + bytes(100)


def webp(width: int, height: int, form: bytes) -> bytes:
    head = b"RIFF\x00\x00\x00\x00WEBP" + form + bytes(4)
    if form == b"VP8X":
        return head + bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    if form == b"VP8L":
        return head + b"/" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little") + bytes(9)
    return head + bytes(6) + width.to_bytes(2, "little") + height.to_bytes(2, "little")


@pytest.mark.parametrize(
    "picture",
    [png(1280, 720), gif(1280, 720), jpeg(1280, 720), *(webp(1280, 720, form) for form in (b"VP8X", b"VP8L", b"VP8 "))],
)
def test_the_size_of_a_picture_is_read_from_its_first_bytes(picture: bytes) -> None:
    """This holds for each format; if the bytes are cut off before it, or are altered, the size is unknown."""
    assert image_size(picture) == (1280, 720)
    assert image_size(picture[:8]) is None
    assert image_size(b"x" + picture) is None


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((1280, 720), 46 * 26),
        ((28, 28), 4),
        ((1, 1), 4),
        ((56, 56), 4),
        ((100_000, 100_000), 128 * 128),
        ((8, 80_000), 2857),
    ],
)
def test_an_image_is_as_many_patches_as_qwen_makes_of_it(size: tuple[int, int], tokens: int) -> None:
    """It is first resized to whole patches within the limits of pixels."""
    assert qwen_tokens(*size) == tokens


def url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{b64encode(data).decode()}"


PICTURE = png(1280, 720)
DATA = b64encode(PICTURE).decode()
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
TOKENS = 46 * 26


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": url(PICTURE)}},
        {"type": "image_url", "image_url": {"detail": "high", "url": url(PICTURE)}},
        {"type": "input_image", "image_url": url(PICTURE)},
        {"type": "image", "source": SOURCE},
        {"type": "image", "source": dict(reversed(SOURCE.items()))},
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_images_are_found_as_each_api_has_them(part: dict[str, Any], separators: tuple[str, str]) -> None:
    """Chat completions, responses, messages: its bytes are those of its data; its class is model and size."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, part, part]}]
    body = json.dumps({"model": "qwen", "messages": messages}, separators=separators).encode()
    found = media_of(body, b'"qwen"')
    assert found == (2 * len(DATA), ((f"qwen image {TOKENS.bit_length()}", 2 * TOKENS),))


def test_audio_files_and_images_elsewhere_are_found() -> None:
    """They are found by size; data that the engine must fetch is guessed."""
    sound, paper = b64encode(bytes(64_000)).decode(), b64encode(b"%PDF" + bytes(3200)).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{paper}", "filename": "a"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": paper}},
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
        {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}},
        {"type": "video_url", "video_url": {"url": url(bytes(4096), "video/mp4")}},
    ]
    size_bytes, media = media_of(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    kinds = {name.split()[0]: tokens for name, tokens in media}
    assert kinds == {"audio": 100, "file": 200, "image": 2 * UNKNOWN_IMAGE_TOKENS, "video": 2}
    assert size_bytes == len(sound) + 2 * len(paper) + len(b64encode(bytes(4096)))


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64,AAAA",
        '{"image_url": {"url": "data:image/png;base64,AAAA"}}',
        '{"type": "base64", "data": "AAAA"}',
        '"input_audio": {"data": "AAAA"}',
        "base64 image_url",
    ],
)
def test_a_text_that_holds_a_mark_is_text(text: str) -> None:
    """The quotes of a text are escaped: text cannot make a claim smaller."""
    assert media_of(json.dumps({"messages": [{"role": "user", "content": text}]}).encode()) == NO_MEDIA


@pytest.mark.parametrize(
    "body",
    [
        b'{"url":"data:image/png;base64,' * 50_000,
        b'"type":"base64"' * 100_000,
        b'{"type":"base64"' * 100_000,
        b'"input_audio":{' * 100_000,
        b'"image_url":{"url":"https:' * 50_000,
        b'"image_url":{"a":"' * 100_000,
        b'"type":"base64","data":"' * 60_000 + b"}",
    ],
)
def test_the_cost_is_linear_whatever_the_body(body: bytes) -> None:
    """Twice the length takes about twice the time, not four times."""

    def cost_s(text: bytes) -> float:
        begun_s = time.process_time()
        media_of(text)
        return time.process_time() - begun_s

    assert min(cost_s(body * 2) for _ in range(3)) <= 3.2 * min(cost_s(body) for _ in range(3)) + 0.02


def test_a_mark_that_never_ends_is_no_mark() -> None:
    """A media type has at most 64 letters: the search goes back no further than that and a few parameters."""
    assert media_of(b'{"x":"base64","url":"data:' + b"a" * 2000 + b';base64,AAAA"}') == NO_MEDIA


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
QUOTED = 'print({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})'


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"content": [IMAGE], "role": "user"}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "assistant", "reasoning_content": "\\", "content": [IMAGE]}]},
        {"messages": [], "multi_modal_data": IMAGE},
        {"messages": None, "input": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": QUOTED}, {"role": "user", "content": None}]},
        {"prompt": QUOTED * 100},
        {"input": QUOTED * 100, "instructions": QUOTED},
    ],
)
def test_all_media_are_found_where_they_may_stand(body: dict[str, Any]) -> None:
    """The result is as if every byte had been read; media that is only quoted in a text is none."""
    sent = json.dumps({"model": "qwen", **body}).encode()
    fields = read_fields(sent)
    assert fields is not None
    assert media_in(sent, fields) == media_of(sent, b'"qwen"')
