"""Whose turn it is when nobody says so: a prompt that begins with a program's last prompt and its answer is its next.

Theory of operation
===================
A prompt is put into a canonical row of bytes: messages one after the other, each without what clients change when they
send an answer back; or a text; or token ids. A turn that names no program opens a new one, and when its answer is
whole, the row of its prompt *and that answer* is remembered as the program's. The next turn whose row begins with a
remembered one belongs to that program, the longest one counts. First prompts hold no answer of anybody's, so the
samples of one RL prompt are as many programs, and the answers tell them apart. Where even those are the same, each next
turn gets one of the programs that wait for it.

How is the longest beginning found in one pass? A digest is taken every `STRIDE_BYTES`. A remembered row is filed under
its last such digest, so a prompt looks there at each of its own, and what follows up to the row's end is compared by
digest.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Self
from uuid import uuid4

import msgspec
from msgspec import Raw

from thunderagent.proxy.completion import UNREADABLE, Completion
from thunderagent.proxy.identity import TurnRequest

STRIDE_BYTES = 1024
DIGEST_BYTES = 16
MAX_ROWS = 100_000
"""Rows that are remembered; the one longest not used goes first. About 600 bytes each."""

SOURCE = "inferred"


class _Fields(msgspec.Struct):
    model: Raw = Raw()
    cache_salt: Raw = Raw()
    system: Raw = Raw()
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Fields).decode
_encode = msgspec.json.Encoder(order="sorted").encode


MAX_WAITING_IDS = 1024
"""A client that repeats itself, and gets the same answer, opens program after program whose next turn never comes."""


@dataclass(slots=True)
class _Row:
    """A remembered row: where it is filed, and whose it is."""

    stride_digest: bytes
    size_bytes: int
    digest: bytes
    waiting_ids: deque[str] = field(default_factory=partial(deque, maxlen=MAX_WAITING_IDS))
    """Programs whose next turn may begin so, and did not come yet; the oldest are given up."""
    last_id: str = ""


class Chain:
    """The digests of a row of bytes that grows at its end."""

    __slots__ = ("_hash", "kind", "size_bytes", "stride_digest")

    def __init__(self, kind: str, salt: bytes) -> None:
        """Begin an empty row; rows of another kind or salt never begin alike."""
        self.kind = kind
        self._hash = blake2b(kind.encode() + b"\0" + salt, digest_size=DIGEST_BYTES)
        self.size_bytes = 0
        self.stride_digest = self._hash.digest()

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.kind, other._hash = self.kind, self._hash.copy()
        other.size_bytes, other.stride_digest = self.size_bytes, self.stride_digest
        return other

    def digest(self) -> bytes:
        """Return the digest of all so far."""
        return self._hash.digest()

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes, which end at the next stride or before."""
        self._hash.update(data)
        self.size_bytes += len(data)
        if self.size_bytes % STRIDE_BYTES == 0 and data:
            self.stride_digest = self._hash.digest()

    def extend(self, data: bytes) -> None:
        """Add bytes."""
        view, start = memoryview(data), 0
        while start < len(view):
            end = start + STRIDE_BYTES - self.size_bytes % STRIDE_BYTES
            self.feed(view[start:end])
            start = end


class Inference:
    """Remembers how the next prompt of each program that nobody named begins."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        """Begin with nothing remembered."""
        self._max_rows = max_rows
        self._rows: OrderedDict[tuple[int, bytes], _Row] = OrderedDict()
        self._by_stride: dict[bytes, dict[int, int]] = {}
        """Under each digest of a stride, how many rows end how many bytes from the beginning."""

    def __len__(self) -> int:
        return len(self._rows)

    def named(self, turn: TurnRequest) -> tuple[TurnRequest, Chain | None]:
        """Return a turn that names no program with the one it belongs to, and what `answered` wants to know.

        A prompt of no known shape stays anonymous. Cost: one pass over the body that builds the messages or ids, about
        5 ms for 2 MB.
        """
        begun = _row_of(turn.body)
        if begun is None:
            return turn, None
        chain, data = begun
        row = self._longest_beginning(chain, data)
        if row is None:
            program_id = f"{SOURCE}-{uuid4().hex}"
        else:
            if row.waiting_ids:
                row.last_id = row.waiting_ids.popleft()
            program_id = row.last_id
        return turn._replace(program_id=program_id, source=SOURCE), chain

    def answered(self, program_id: str, chain: Chain, choices: Sequence[Completion]) -> None:
        """Remember a program's prompt with each of the answers to it."""
        for choice in choices:
            answer = _row_of_answer(choice, chain.kind)
            if answer:
                longer = copy(chain)
                longer.extend(answer)
                self._remember(program_id, longer)

    def _longest_beginning(self, chain: Chain, data: bytes) -> _Row | None:
        """Grow `chain` by `data`, and return the longest remembered row on the way."""
        view, start, found = memoryview(data), 0, None
        while True:
            rest = view[start : start + STRIDE_BYTES]
            for size_bytes in self._by_stride.get(chain.stride_digest, ()):
                if size_bytes <= start + len(rest):
                    longer = copy(chain)
                    longer.feed(rest[: size_bytes - start])
                    row = self._rows.get((size_bytes, longer.digest()))
                    if row is not None and (found is None or size_bytes > found.size_bytes):
                        found = row
            if not rest:
                break
            chain.feed(rest)
            start += len(rest)
            if len(rest) < STRIDE_BYTES:
                break
        if found is not None:
            self._rows.move_to_end((found.size_bytes, found.digest))
        return found

    def _remember(self, program_id: str, chain: Chain) -> None:
        key = chain.size_bytes, chain.digest()
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(chain.stride_digest, *key)
            sizes = self._by_stride.setdefault(chain.stride_digest, {})
            sizes[chain.size_bytes] = sizes.get(chain.size_bytes, 0) + 1
            if len(self._rows) > self._max_rows:
                self._forget_oldest()
        self._rows.move_to_end(key)
        if program_id not in row.waiting_ids:
            row.waiting_ids.append(program_id)

    def _forget_oldest(self) -> None:
        _, row = self._rows.popitem(last=False)
        sizes = self._by_stride[row.stride_digest]
        sizes[row.size_bytes] -= 1
        if not sizes[row.size_bytes]:
            del sizes[row.size_bytes]
        if not sizes:
            del self._by_stride[row.stride_digest]


def _row_of(body: bytes) -> tuple[Chain, bytes] | None:
    """Return the beginning of a body's row and what follows there; None if it has no prompt that is understood."""
    try:
        fields = _decode(body)
        salt = b"\0".join((fields.model, fields.cache_salt, fields.system))
        if fields.messages:
            return Chain("messages", salt), b"".join(map(_canonical, fields.messages))
        ids = fields.input_ids or fields.prompt_token_ids or fields.token_ids
        prompt = fields.prompt or fields.text or ids
        if isinstance(prompt, str):
            return Chain("text", salt), prompt.encode()
        return (Chain("ids", salt), array("I", prompt).tobytes()) if prompt else None
    except (*UNREADABLE, UnicodeEncodeError, OverflowError, TypeError):
        return None


def _row_of_answer(choice: Completion, kind: str) -> bytes:
    """Return an answer as it stands in the row of the next prompt; empty if the engine did not say it in that form."""
    try:
        if kind == "ids":
            return array("I", choice.token_ids).tobytes()
        if kind == "messages":
            return _canonical(choice.message()) if choice.has_message else b""
        return b"" if choice.has_message else "".join(choice.text).encode()
    except (UnicodeEncodeError, OverflowError, TypeError, *UNREADABLE):
        return b""


def _canonical(message: dict[str, Any]) -> bytes:
    """Return a message without what clients add, leave out or write in another way when they send it back."""
    calls = message.get("tool_calls")
    said = (
        message.get("role"),
        _text_of(message.get("content")),
        [_call(call) for call in calls] if isinstance(calls, list) else [],
        message.get("tool_call_id"),
        message.get("name"),
    )
    return _encode(said) + b"\n"


def _text_of(content: object) -> object:
    """Return a content as one text where it is made of texts; nothing and no text are the same."""
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            return content
        content = "".join(text for text in texts if text is not None)
    return content.strip() if isinstance(content, str) else content


def _call(call: object) -> object:
    """Return a tool's call: its id, its name, and its arguments, which are JSON as a rule, in one spelling."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except UNREADABLE:
            arguments = arguments.strip()
    return [call.get("id"), function.get("name"), arguments]
