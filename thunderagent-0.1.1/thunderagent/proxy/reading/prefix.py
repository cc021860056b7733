"""Where a prompt may share a prefix with others: digests of its first messages, or of its first bytes.

Programs that share a system prompt, tools or a task have the same bytes up to some place, and an engine keeps shared
parts only once. A chain of cuts tells the core about it without the text: equal digests mean equal prompts up to there.
Cuts are at 1, 2, 3, 4, 6, 8, 12, ... steps, so a chain stays short however long the prompt is, and at least two thirds
of what two prompts share is known. What lies between is not parsed: messages are hashed as sent.
"""

# compiled: it is asked of each turn

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from thunderagent.programs.messages import PrefixCut
from thunderagent.proxy.reading.body_fields import begins_with
from thunderagent.proxy.reading.dialects.structs import PromptFields
from thunderagent.proxy.reading.json_cost import list_of
from thunderagent.proxy.reading.media import media_of
from thunderagent.proxy.reading.outline import Outline

if TYPE_CHECKING:
    from hashlib import _Hash

STEPS: Final = (1, *chain.from_iterable((2**exponent, 3 * 2 ** (exponent - 1)) for exponent in range(1, 32)))
"""1, 2, 3, 4, 6, 8, 12, 16, 24, ...: a prompt is cut after this many messages, or half kibibytes of a text."""

TEXT_STEP_BYTES: Final = 512
MIN_TEXT_BYTES: Final = 1024
"""The first cut of a prompt that is not a list of messages."""

MAX_HASHED_BYTES: Final = 4 * 2**20
"""Beyond it a prompt is not cut: there are images rather than shared parts, and hashing takes time."""

LARGE_PIECE_BYTES: Final = 16 * 1024
KNOWN_COUNT: Final = 4096
"""How many digests of large pieces are cached, half a kilobyte each."""

_TEXT_CUTS_BYTES: Final = tuple(
    size_bytes for step in STEPS if MIN_TEXT_BYTES <= (size_bytes := step * TEXT_STEP_BYTES) <= MAX_HASHED_BYTES
)
_ATTRIBUTION: Final = re.compile(rb'\s*\[\s*\{(?:\s*"type"\s*:\s*"text"\s*,)?\s*"text"\s*:\s*"x-[a-z0-9-]+-header:')
"""A system prompt whose first block says which client and which task sent it: engines leave that block out."""
_TOKEN_IDS: Final = re.compile(rb"\[[\s\[]*[0-9]")
Piece = bytes | memoryview
"""Also msgspec's own bytes type, which a compiled function does not accept as bytes."""

_known: dict[tuple[bytes, int, int], _Hash] = {}
"""Digests by the previous digest, and by the size and the hash of the piece between."""
_EMPTY: Final = hashlib.sha1(usedforsecurity=False)
"""The fastest hash of the standard library; for 63 bits no other is better. To copy one is quicker than to make one."""


def prefix_of(
    fields: PromptFields, outline: Outline | None = None, *, has_media: bool = False
) -> tuple[PrefixCut, ...]:
    """Return the chain of cuts of a prompt: (digest, size in bytes), both of everything up to the cut.

    A digest has 63 bits: every JSON parser accepts such a number.

    The model (LoRA names are model names) and the cache salt separate prompts from the start. Sizes are shares of the
    body's size, without media. Empty if the prompt is too short or of unknown shape. `outline` holds token ids for
    which the fields only have a placeholder. Cost: one pass over the prompt.
    """
    if fields.messages or fields.input:
        return _cuts_of_messages(fields, has_media=has_media)
    token_ids = fields.input_ids or fields.prompt_token_ids or fields.token_ids
    text: Piece = fields.prompt or fields.text or token_ids
    if outline is not None and outline.is_placeholder(text):
        text = outline.token_ids
    return _cuts_of_text(fields, text) if len(text) >= MIN_TEXT_BYTES else ()


def _cuts_of_messages(fields: PromptFields, *, has_media: bool) -> tuple[PrefixCut, ...]:
    """Cut after messages; tools come before the first, and a separate system prompt counts as the first."""
    messages: Sequence[Raw] = fields.messages or ()
    if not messages or fields.system or fields.instructions:
        try:
            messages = _messages(fields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ()
    digest = _begun(fields, b"messages", fields.tools)
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
        if len(piece) < LARGE_PIECE_BYTES:
            digest.update(piece)
        else:
            digest = _followed(digest, piece)
        if has_media:
            media_bytes += media_of(bytes(piece)).size_bytes
        cuts.append((int.from_bytes(digest.digest()[:8], "big") >> 1, size_bytes - media_bytes))
        start = end
    return tuple(cuts)


def _messages(fields: PromptFields) -> Sequence[Raw]:
    """Return what follows the tools; raises like msgspec if it is neither a list nor a text."""
    system = fields.system or fields.instructions
    if system and _ATTRIBUTION.match(system) is not None:
        system = Raw(b"[" + b",".join(map(bytes, (list_of(system) or [])[1:])) + b"]")
    items = fields.messages or ([fields.input] if begins_with(fields.input, b'"') else list_of(fields.input)) or []
    return [system, *items] if system else items


def _cuts_of_text(fields: PromptFields, text: Piece) -> tuple[PrefixCut, ...]:
    """Cut a text, or a list of token ids as written, at certain bytes; several prompts in one are left alone."""
    if not begins_with(text, b'"') and not _is_list_of_numbers(text):
        return ()
    digest = _begun(fields, b"text")
    view = memoryview(text)
    cuts, start = [], 0
    for end in _TEXT_CUTS_BYTES:
        if end > len(text):
            break
        if end - start < LARGE_PIECE_BYTES:
            digest.update(view[start:end])
        else:
            digest = _followed(digest, view[start:end])
        cuts.append((int.from_bytes(digest.digest()[:8], "big") >> 1, end))
        start = end
    return tuple(cuts)


def _begun(fields: PromptFields, kind: bytes, first: Piece = b"") -> _Hash:
    """Start a digest with what separates prompts from the start, then `first`. It is the same in every process."""
    digest = _EMPTY.copy()
    digest.update(b"\0".join((kind, fields.model, fields.cache_salt, first)))
    return digest


def _followed(digest: _Hash, piece: Piece) -> _Hash:
    """Return the digest of what was hashed so far followed by a large piece.

    A program sends its history again, so most large pieces were hashed after the same digest already. A faster hash
    recognises them. Only this process has its key, so nobody can make one piece look like another.
    """
    place = digest.digest(), len(piece), hash(bytes(piece))
    if (known := _known.get(place)) is not None:
        return known.copy()
    digest.update(piece)
    if len(_known) >= KNOWN_COUNT:
        _known.clear()
    _known[place] = digest.copy()
    return digest


def _is_list_of_numbers(value: Piece) -> bool:
    return bytes(memoryview(value)[:16]).removeprefix(b"[").lstrip()[:1].isdigit()


def holds_token_ids(value: Raw) -> bool:
    """Return whether a value is a list of token ids, or one of such lists, judging by its beginning."""
    return _TOKEN_IDS.match(value) is not None
