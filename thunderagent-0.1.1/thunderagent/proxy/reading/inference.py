"""Infers the program of a turn that names none: its prompt begins with the program's last prompt and answer.

Theory of operation
===================
A prompt is converted to a canonical row of bytes: messages one after the other, each without what clients change when
they send an answer back; or a text; or token ids. A turn that names no program opens a new one. When its answer is
complete, the row of its prompt *and that answer* is remembered as the program's. The next turn whose row begins with a
remembered one belongs to that program; the longest one counts. First prompts contain no answer, so the samples of one
RL prompt are separate programs, and the answers tell them apart. If even those are the same, each next turn gets one of
the programs that wait for it.

A *bucket* (`prompt_cache_key`) says that its turns have something in common, not that they are of one program. So it
only separates rows. A program that opens in a bucket gets its name as its id, if no other program has that now: the one
agent of a bucket keeps a name that it knows.

A turn that ended without an answer may come again, perhaps while its first attempt still runs. The same prompt then
gets the same program.

How is the longest beginning found in one pass? A digest is taken every `STRIDE_BYTES`. A remembered row is filed under
its last such digest, so a prompt looks there at each of its own, and the rest of the row is compared by digest.

`prompt_of` does the reading and the hashing, and knows nothing of programs, so it may run on a thread. The memory is
read and changed only on the event loop, by `named` when a turn has been read and by `answered` before the end of its
answer is relayed: nobody can send the next turn before that.
"""

# interpreted: few turns need it, and the time is that of digests

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec import Raw

from thunderagent.proxy.reading.dialects.base import Completion, Dialect, written_ids
from thunderagent.proxy.reading.dialects.structs import PromptFields
from thunderagent.proxy.reading.identity import TurnRequest
from thunderagent.proxy.reading.json_cost import is_cheap
from thunderagent.proxy.reading.outline import Outline
from thunderagent.proxy.reading.sse import UNREADABLE

STRIDE_BYTES = 1024
DIGEST_BYTES = 16
MAX_ROWS = 100_000
"""How many rows are remembered; the least recently used goes first. About 600 bytes each."""

SOURCE = "inferred"

_decode_fields = msgspec.json.Decoder(PromptFields).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_message = msgspec.json.Decoder(dict[str, Any]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder(order="sorted").encode


MAX_UNANSWERED = 10_000
"""How many prompts without an answer are remembered; the oldest goes first."""

MAX_WAITING_IDS = 1024
"""A client that repeats itself, and gets the same answer, opens many programs whose next turn never comes."""


@dataclass(slots=True)
class _Row:
    """A remembered row: where it is filed, and its programs."""

    stride_digest: bytes
    size_bytes: int
    waiting_ids: deque[str] = field(default_factory=partial(deque, maxlen=MAX_WAITING_IDS))
    """Programs whose next turn may begin this way, and has not come yet; the oldest are dropped."""
    last_id: str = ""


Key = tuple[int, bytes]
"""Of a row: its size in bytes, and its digest."""


class Chain(NamedTuple):
    """A row of bytes that may grow at its end: the digest of its whole strides, and the rest."""

    kind: str
    size_bytes: int
    stride_digest: bytes
    tail: bytes

    def extended(self, data: bytes) -> Chain:
        """Return the row with more bytes appended."""
        rest = self.tail + data
        digests = _stride_digests(self.stride_digest, rest)
        return Chain(self.kind, self.size_bytes + len(data), digests[-1], rest[(len(digests) - 1) * STRIDE_BYTES :])

    def key(self) -> Key:
        """Return the row's unique key."""
        return self.size_bytes, _digest(self.stride_digest, self.tail)


class Prompt(NamedTuple):
    """The row of a prompt, with its digests at each stride from the beginning."""

    kind: str
    row: bytes
    stride_digests: Sequence[bytes]

    def chain(self) -> Chain:
        """Return the row, with whole strides as digest."""
        tail = self.row[(len(self.stride_digests) - 1) * STRIDE_BYTES :]
        return Chain(self.kind, len(self.row), self.stride_digests[-1], tail)


def _digest(stride_digest: bytes, data: bytes | memoryview) -> bytes:
    return blake2b(b"".join((stride_digest, data)), digest_size=DIGEST_BYTES).digest()


def _stride_digests(first: bytes, data: bytes) -> list[bytes]:
    """Return the digest at the start of `data`, and after each whole stride of it."""
    view, digests = memoryview(data), [first]
    for start in range(0, len(data) - STRIDE_BYTES + 1, STRIDE_BYTES):
        digests.append(_digest(digests[-1], view[start : start + STRIDE_BYTES]))
    return digests


def prompt_of(body: bytes, dialect: Dialect, tenant: str = "", bucket: str = "") -> Prompt | None:
    """Return the prompt of a turn, distinct from those of other tenants and buckets; None if its shape is unknown.

    Cost: about 10 ms for 2 MB, in pieces, so that other threads can run.
    """
    try:
        outline = Outline.of(body, dialect.token_id_fields)
        if not is_cheap(outline.text):
            return None
        fields = _decode_fields(outline.text)
        kind, row = _row_of(fields, outline)
    except (*UNREADABLE, UnicodeEncodeError, TypeError):  # the last: a `type` that is a list or an object
        return None
    if not row:
        return None
    system = fields.system or fields.instructions
    salt = b"\0".join((kind.encode(), fields.model, fields.cache_salt, system, tenant.encode(), bucket.encode()))
    return Prompt(kind, row, _stride_digests(_digest(b"", salt), row))


class Inference:
    """Remembers how the next prompt of each unnamed program begins."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        """Start empty."""
        self._max_rows = max_rows
        self._rows: OrderedDict[Key, _Row] = OrderedDict()
        self._by_stride: dict[bytes, dict[int, int]] = {}
        """For each digest of a stride, how many rows end how many bytes from the beginning."""
        self._in_flight: dict[Key, list[str]] = {}
        """The programs whose turns with a prompt are in flight."""
        self._in_flight_of: Counter[str] = Counter()
        self._unanswered: OrderedDict[Key, list[str]] = OrderedDict()
        """The programs whose turns with a prompt ended without an answer."""

    def __len__(self) -> int:
        return len(self._rows)

    def named(
        self,
        turn: TurnRequest,
        prompt: Prompt,
        is_taken: Callable[[str], bool] = lambda _: False,
        *,
        is_retry: bool = False,
    ) -> TurnRequest:
        """Return an unnamed turn with its program. Cost: a lookup for each stride.

        `is_taken` says whether a live program has an id, `is_retry` that the client says so.
        """
        bucket = turn.bucket
        program_id = self._come_again(prompt.chain().key(), is_retry) or self._goes_on(prompt)
        if program_id is None:
            is_free = bucket and bucket not in self._in_flight_of and not is_taken(bucket)
            program_id = bucket if is_free else f"{SOURCE}-{uuid4().hex}"
        turn.program_id = program_id
        if program_id != bucket:
            turn.source = SOURCE
        return turn

    def began(self, key: Key, program_id: str) -> None:
        """Note that a turn of a program with this prompt is in flight."""
        self._in_flight.setdefault(key, []).append(program_id)
        self._in_flight_of[program_id] += 1

    def ended(self, key: Key, program_id: str, *, answered: bool) -> None:
        """Note that it ended; without an answer it may come again."""
        ids = self._in_flight[key]
        ids.remove(program_id)
        if not ids:
            del self._in_flight[key]
        self._in_flight_of[program_id] -= 1
        if not self._in_flight_of[program_id]:
            del self._in_flight_of[program_id]
        if answered or program_id in ids:
            return
        unanswered = self._unanswered.setdefault(key, [])
        if program_id not in unanswered and len(unanswered) < MAX_WAITING_IDS:
            unanswered.append(program_id)
        if len(self._unanswered) > MAX_UNANSWERED:
            self._unanswered.popitem(last=False)

    def answered(self, program_id: str, chain: Chain, choices: Sequence[Completion]) -> None:
        """Remember a program's prompt with each of its answers."""
        for choice in choices:
            answer = _row_of_answer(choice, chain.kind)
            if answer:
                self._remember(program_id, chain.extended(answer))

    def _come_again(self, key: Key, is_retry: bool) -> str | None:
        """Return the program whose turn with the same prompt has no answer; None if there is none, or several run."""
        ids = self._unanswered.get(key)
        if ids is not None:
            program_id = ids.pop(0)
            if not ids:
                del self._unanswered[key]
            return program_id
        in_flight = set(self._in_flight.get(key, ())) if is_retry else ()
        return next(iter(in_flight)) if len(in_flight) == 1 else None

    def _goes_on(self, prompt: Prompt) -> str | None:
        """Return the program whose last prompt and answer a prompt begins with."""
        row = self._longest_beginning(prompt)
        if row is None:
            return None
        if row.waiting_ids:
            row.last_id = row.waiting_ids.popleft()
        return row.last_id

    def _longest_beginning(self, prompt: Prompt) -> _Row | None:
        """Return the longest remembered row that a prompt begins with."""
        view = memoryview(prompt.row)
        for index in reversed(range(len(prompt.stride_digests))):
            digest = prompt.stride_digests[index]
            sizes = self._by_stride.get(digest)
            if sizes is None:
                continue
            start = index * STRIDE_BYTES
            for size_bytes in sorted(sizes, reverse=True):
                key = size_bytes, _digest(digest, view[start:size_bytes])
                if size_bytes <= len(view) and key in self._rows:
                    self._rows.move_to_end(key)
                    return self._rows[key]
        return None

    def _remember(self, program_id: str, chain: Chain) -> None:
        key = chain.key()
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(chain.stride_digest, chain.size_bytes)
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


def _row_of(fields: PromptFields, outline: Outline) -> tuple[str, bytes]:
    """Return the kind of a prompt and its row; empty if it is neither messages nor one text nor one list of ids."""
    if fields.messages is not None:
        return "messages", _row_of_messages(fields.messages)
    if _is_there(fields.input):
        if bytes(memoryview(fields.input)[:1]) == b'"':
            return "messages", _canonical({"role": "user", "content": _decode_text(fields.input)})
        return "messages", _row_of_messages(_decode_list(fields.input))
    prompts = (fields.prompt, fields.text, fields.input_ids, fields.prompt_token_ids, fields.token_ids)
    prompt = next((bytes(prompt) for prompt in prompts if _is_there(prompt)), b"")
    if prompt.startswith(b'"'):
        return "text", _decode_text(prompt).encode()
    return "ids", written_ids(outline.token_ids if outline.is_placeholder(prompt) else prompt)


def _row_of_messages(messages: Sequence[Raw]) -> bytes:
    """Return messages as a row, one after the other, so that no step takes long."""
    return b"".join(_canonical(_decode_message(message)) for message in messages)


def _is_there(value: Raw) -> bool:
    return bytes(memoryview(value)[:4]) not in (b"", b"null")


def _row_of_answer(choice: Completion, kind: str) -> bytes:
    """Return an answer as it appears in the next prompt's row; empty if the engine did not send that form."""
    try:
        if kind == "ids":
            return choice.token_ids
        if kind == "messages":
            return b"".join(map(_canonical, choice.messages))
        return choice.text.encode()
    except (UnicodeEncodeError, TypeError, *UNREADABLE):
        return b""


_SERVERS_OWN = frozenset({"id", "status", "cache_control"})
"""Fields of items that a client omits, or moves with each turn."""

_TEXTS = frozenset({"text", "input_text", "output_text"})
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_content"})
_THOUGHT_TAGS = ("think", "thinking", "thought", "reasoning")
"""Thoughts as parts, and in a text, where the template may have begun it, so that only its end is there.

Some clients send them back, others do not; items of the type `reasoning` come back in part."""


def _canonical(message: dict[str, Any]) -> bytes:
    """Return a message, or an item, without what clients add, omit or reformat when they send it."""
    kind = message.get("type", "message")
    if kind == "reasoning":
        return b""
    if kind != "message":
        item = {name: value for name, value in message.items() if name not in _SERVERS_OWN and value is not None}
        return _encode({**item, "arguments": _arguments(item.get("arguments"))}) + b"\n"
    text, calls = _content_of(message.get("content"))
    if isinstance(text, str) and "</" in text and message.get("role") == "assistant":
        text = _without_thoughts(text).strip()
    more_calls = message.get("tool_calls")
    if isinstance(more_calls, list):
        calls += map(_call, more_calls)
    return _encode((message.get("role"), text, calls, message.get("tool_call_id"), message.get("name"))) + b"\n"


def _without_thoughts(text: str) -> str:
    """Return an answer without what the model thought before it. Cost: linear."""
    for tag in _THOUGHT_TAGS:
        if (end := f"</{tag}>") not in text:
            continue
        *pieces, last = text.split(end)
        parted = [piece.partition(f"<{tag}>") for piece in pieces]
        text = "".join(before if begin or at else "" for at, (before, begin, _) in enumerate(parted)) + last
    return text


def _content_of(content: object) -> tuple[object, list[object]]:
    """Return a content as one text if it consists of texts, and its calls; None and an empty text are the same."""
    if isinstance(content, str):
        return content.strip(), []
    if not isinstance(content, list):
        return content or "", []
    kept: list[object] = []
    texts: list[str] = []  # joined at the end: appending to a text would copy it each time
    calls: list[object] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "tool_use":
            calls.append([part.get("id"), part.get("name"), _arguments(part.get("input"))])
        elif kind not in _THOUGHTS:
            other = {k: v for k, v in part.items() if k not in _SERVERS_OWN} if isinstance(part, dict) else part
            kept += ("".join(texts), other)
            texts.clear()
    text = "".join(texts)
    return ([*kept, text] if kept else text.strip()), calls


def _call(call: object) -> object:
    """Return a tool call: its id, its name, and its arguments, usually JSON, in one spelling."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: object) -> object:
    """Return the arguments of a call as their JSON value; missing ones are an empty object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except UNREADABLE:
        return arguments.strip()
