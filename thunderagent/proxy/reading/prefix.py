"""Where a prompt may begin like others: digests of its first messages, or of its first bytes.

Programs that share a system prompt, tools or a task have the same bytes up to some place, and an engine keeps what
they share only once. A chain of cuts tells the core about it without telling it the text: equal digests mean equal
prompts up to there. Cuts lie at 1, 2, 3, 4, 6, 8, 12, ... steps, so that a chain stays short however long the prompt
is, and what two prompts share is known to at least two thirds. What lies between is not parsed: messages are hashed as
they were sent.
"""

# compiled: it is asked of each turn

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from thunderagent.programs.model.events import PrefixCut
from thunderagent.proxy.reading.body_fields import PromptFields, begins_with
from thunderagent.proxy.reading.media import media_of
from thunderagent.proxy.reading.outline import Outline

if TYPE_CHECKING:
    from hashlib import _Hash

STEPS: Final = (1, *chain.from_iterable((2**exponent, 3 * 2 ** (exponent - 1)) for exponent in range(1, 32)))
"""1, 2, 3, 4, 6, 8, 12, 16, 24, ...: after so many messages, or half kibibytes of a text, a prompt is cut."""

TEXT_STEP_BYTES: Final = 512
MIN_TEXT_BYTES: Final = 1024
"""Where a prompt that is no list of messages is cut first."""

MAX_HASHED_BYTES: Final = 4 * 2**20
"""Beyond it a prompt is not cut: there stand images rather than what is shared, and hashing takes its time."""

LARGE_PIECE_BYTES: Final = 16 * 1024
KNOWN_COUNT: Final = 4096
"""So many digests of what ends with a larger piece are kept, each with half a kilobyte."""

_TEXT_CUTS_BYTES: Final = tuple(
    size_bytes for step in STEPS if MIN_TEXT_BYTES <= (size_bytes := step * TEXT_STEP_BYTES) <= MAX_HASHED_BYTES
)
_TOKEN_IDS: Final = re.compile(rb"\[[\s\[]*[0-9]")
_decode_list = msgspec.json.Decoder(list[Raw]).decode
Piece = bytes | memoryview
"""Also what msgspec calls bytes, which is none to a compiled function."""

_known: dict[tuple[bytes, int, int], _Hash] = {}
"""Digests by those before them, and by the size and the hash of the piece between."""
_sha1 = partial(hashlib.sha1, usedforsecurity=False)
"""The quickest that the standard library has, and of 63 bits no other can be more."""


def prefix_of(
    fields: PromptFields, outline: Outline | None = None, *, has_media: bool = False
) -> tuple[PrefixCut, ...]:
    """Return the chain of cuts of a prompt: (digest, size in bytes), both of all up to the cut.

    The model (LoRA names are model names) and the cache salt separate prompts from the start. Sizes are shares of the
    body's size, without media. Empty if the prompt is too short or of no known shape. `outline` holds token ids that
    the fields only have a placeholder for. Cost: one pass over the prompt.
    """
    if fields.messages or fields.input:
        return _cuts_of_messages(fields, has_media=has_media)
    token_ids = fields.input_ids or fields.prompt_token_ids or fields.token_ids
    text: Piece = fields.prompt or fields.text or token_ids
    if outline is not None and outline.is_placeholder(text):
        text = outline.token_ids
    return _cuts_of_text(fields, text) if len(text) >= MIN_TEXT_BYTES else ()


def _cuts_of_messages(fields: PromptFields, *, has_media: bool) -> tuple[PrefixCut, ...]:
    """Cut after messages; tools come before the first, and a system prompt beside the messages is the first."""
    try:
        messages = _messages(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    digest = _begun(fields, b"messages")
    digest.update(fields.tools)
    size_bytes, media_bytes = len(fields.tools), 0
    cuts, start, count = [], 0, len(messages)
    for end in STEPS:
        if end > count:
            break
        is_one = end - start == 1
        size_bytes += len(messages[start]) if is_one else sum(map(len, messages[start:end]))
        if size_bytes > MAX_HASHED_BYTES:
            break
        piece: Piece = messages[start]
        if not is_one:
            piece = b"".join(messages[start:end])
        digest = _followed(digest, piece)
        if has_media:
            media_bytes += media_of(bytes(piece)).size_bytes
        cuts.append((_number(digest), size_bytes - media_bytes))
        start = end
    return tuple(cuts)


def _messages(fields: PromptFields) -> Sequence[Raw]:
    """Return what follows the tools; raises as msgspec does if it is neither a list nor a text."""
    system = fields.system or fields.instructions
    items = fields.messages or ([fields.input] if begins_with(fields.input, b'"') else _decode_list(fields.input))
    return [system, *items] if system else items


def _cuts_of_text(fields: PromptFields, text: Piece) -> tuple[PrefixCut, ...]:
    """Cut a text, or a list of token ids as it is written, at certain bytes; several prompts in one are left alone."""
    if not begins_with(text, b'"') and not _is_list_of_numbers(text):
        return ()
    digest = _begun(fields, b"text")
    view = memoryview(text)
    cuts, start = [], 0
    for end in _TEXT_CUTS_BYTES:
        if end > len(text):
            break
        digest = _followed(digest, view[start:end])
        cuts.append((_number(digest), end))
        start = end
    return tuple(cuts)


def _begun(fields: PromptFields, kind: bytes) -> _Hash:
    """Begin a digest with what separates prompts from the start. It is the same in every process."""
    return _sha1(b"\0".join((kind, fields.model, fields.cache_salt, b"")))


def _followed(digest: _Hash, piece: Piece) -> _Hash:
    """Return the digest of what was hashed so far and a piece behind it.

    A program sends again what it sent before, so most large pieces were hashed after the same already. Which these are
    a quicker hash tells, whose key only this process has: nobody can make one piece look like another.
    """
    if len(piece) < LARGE_PIECE_BYTES:
        digest.update(piece)
        return digest
    place = digest.digest(), len(piece), hash(bytes(piece))
    if (known := _known.get(place)) is not None:
        return known.copy()
    digest.update(piece)
    if len(_known) >= KNOWN_COUNT:
        _known.clear()
    _known[place] = digest.copy()
    return digest


def _number(digest: _Hash) -> int:
    """Return what was hashed so far as a number of 63 bits, which every reader of JSON takes."""
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def _is_list_of_numbers(value: Piece) -> bool:
    return bytes(memoryview(value)[:16]).removeprefix(b"[").lstrip()[:1].isdigit()


def holds_token_ids(value: Raw) -> bool:
    """Say whether a value is a list of token ids, or one of such lists, as far as its beginning tells."""
    return _TOKEN_IDS.match(value) is not None
