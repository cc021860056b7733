"""vLLM's messages about its KV pool, and their payloads (`vllm/distributed/kv_events.py`; 0.32).

A message has three frames: a topic, a sequence number of 8 bytes (big-endian, from 0 at each start of the engine), and
a batch in msgpack: `[unix time, [event, ...], data-parallel rank]`. An event is a map with the key `type`; in earlier
versions, an array of the type and the same fields in order. Unknown fields and kinds are skipped; those that a version
does not have yet count as unknown.

An answer to a replay request has an empty frame before the same three; in some versions there is no topic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

MAX_MESSAGE_BYTES: Final = 8 * 2**20
"""An engine writes what one of its steps stored and removed: some hundred kilobytes."""

MAX_PARTS_COUNT: Final = 2**16
"""Events of a batch, and blocks of an event."""

BlockHash = int | bytes
"""Of a block and all before it: a 64-bit number, or all bytes, depending on VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""


class KvMessageError(ValueError):
    """An engine's message about its KV pool is unreadable; only the subscriber sees this error."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of one chain, each of `block_tokens` tokens, are there now; at least one.

    `parent_hash` is the block before the first, None at the beginning of a prompt. `program_id` is the session that the
    request named (`X-Session-ID`, or `session_id` in the body), None if it named none.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    block_tokens: int
    program_id: str | None = None
    group_id: int = 0


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """A copy of each of these blocks is gone."""

    block_hashes: tuple[BlockHash, ...]
    group_id: int = 0


@dataclass(frozen=True, slots=True)
class PoolCleared:
    """The pool is empty."""


KvEvent = BlocksStored | BlocksRemoved | PoolCleared


class KvMessage(NamedTuple):
    """One batch as sent."""

    sequence_id: int
    payload: bytes

    @property
    def is_end(self) -> bool:
        """Whether it only marks the end of a replay: the number is -1."""
        return self.sequence_id < 0


_POOL_MEDIA: Final = {None, "GPU"}  # the pool itself, whatever its medium; others are offload targets
_POOL_LOCALITIES: Final = {None, "LOCAL"}
_HIT_BY_ALL_BEFORE: Final = ("full_attention", "mla_attention", "unknown")  # sink_full_attention too
# The order of fields if an event is an array.
_STORED_FIELDS: Final = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership"),
    "session_id",
)
_REMOVED_FIELDS: Final = ("type", "block_hashes", "medium", "group_idx", "locality", "ownership")
_SKIPPED_FIELDS: Final = {"token_ids", "extra_keys"}


NO_HASHES: Final = msgspec.Raw(b"\x90")


class _WireEvent(msgspec.Struct):
    """The fields of all kinds of events that matter; all others are skipped, not built."""

    kind: str = msgspec.field(name="type")
    raw_hashes: msgspec.Raw = msgspec.field(name="block_hashes", default=NO_HASHES)
    parent_hash: BlockHash | None = msgspec.field(name="parent_block_hash", default=None)
    block_tokens: int = msgspec.field(name="block_size", default=0)
    medium: str | None = None
    group_id: int | None = msgspec.field(name="group_idx", default=None)
    attention: str | None = msgspec.field(name="kv_cache_spec_kind", default=None)
    locality: str | None = None
    program_id: str | None = msgspec.field(name="session_id", default=None)


_decode_hashes = msgspec.msgpack.Decoder(tuple[BlockHash, ...]).decode
_decode_batch = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_map = msgspec.msgpack.Decoder(_WireEvent).decode
_decode_kind = msgspec.msgpack.Decoder(str).decode


def read_message(frames: list[bytes]) -> KvMessage:
    """Read the frames of a message, or of one of a replay. Raises `KvMessageError`."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise KvMessageError(f"{len(frames)} frames, of which none is a sequence number where it should be")
    return KvMessage(int.from_bytes(frames[-2], "big", signed=True), frames[-1])


def read_events(payload: bytes) -> Iterator[KvEvent]:
    """Read a batch: the pool's events, in order, one after the other; nothing of other media. Raises `KvMessageError`.

    More than are asked for are not built: a byte of a message may be an object of many.
    """
    try:
        _check_size(payload)
        _, raw_events, *_ = _decode_batch(payload)
        _check_size(memoryview(raw_events))
        for raw in _decode_batch(raw_events):
            event = _read_event(bytes(raw))
            if event is not None:
                yield event
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KvMessageError(f"no batch of events: {error}") from error


def _check_size(array: bytes | memoryview) -> None:
    """Raise `KvMessageError` for an array of more than `MAX_PARTS_COUNT` parts, by its first bytes."""
    first = bytes(array[:5])
    if first[:1] == b"\xdd" and int.from_bytes(first[1:], "big") > MAX_PARTS_COUNT:
        raise KvMessageError(f"an array of more than {MAX_PARTS_COUNT} parts")


def _read_event(raw: bytes) -> KvEvent | None:
    wire = _decode_map(raw) if _is_map(raw) else _read_array(raw)
    if wire is None or wire.medium not in _POOL_MEDIA or wire.locality not in _POOL_LOCALITIES:
        return None
    if wire.kind == "AllBlocksCleared":
        return PoolCleared()
    if wire.kind == "BlockRemoved":
        return BlocksRemoved(_hashes(wire.raw_hashes), wire.group_id or 0)
    if wire.kind != "BlockStored" or not _is_followed(wire.attention):
        return None
    block_hashes = _hashes(wire.raw_hashes)
    if not block_hashes:
        return None
    if wire.block_tokens <= 0:
        raise KvMessageError(f"blocks of {wire.block_tokens} tokens")
    return BlocksStored(
        block_hashes=block_hashes,
        parent_hash=wire.parent_hash,
        block_tokens=wire.block_tokens,
        program_id=_program_id(wire.program_id),
        group_id=wire.group_id or 0,
    )


def _hashes(raw: msgspec.Raw) -> tuple[BlockHash, ...]:
    _check_size(memoryview(raw))
    return _decode_hashes(raw)


def _is_map(raw: bytes) -> bool:
    return 0x80 <= raw[0] <= 0x8F or raw[0] in {0xDE, 0xDF}


def _read_array(raw: bytes) -> _WireEvent | None:
    """Read an event of an older version; None if its kind is unknown."""
    values = _decode_batch(raw)
    if not values:
        raise KvMessageError("an event without a kind")
    kind = _decode_kind(values[0])
    names = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS, "AllBlocksCleared": ("type",)}.get(kind)
    if names is None:
        return None
    # Versions may end, or order, the later fields differently, so implausible values are dropped.
    fields: dict[str, Any] = {
        name: value if name == "block_hashes" else msgspec.msgpack.decode(value)
        for name, value in zip(names, values, strict=False)
        if name not in _SKIPPED_FIELDS
    }
    try:
        return msgspec.convert(fields, _WireEvent)
    except msgspec.ValidationError:
        return msgspec.convert({name: fields[name] for name in names[:7] if name in fields}, _WireEvent)


def _is_followed(attention: str | None) -> bool:
    """Return whether a hit needs all blocks before: not if only a window, or only a state, is kept."""
    return attention is None or attention.endswith(_HIT_BY_ALL_BEFORE)


def _program_id(text: str | None) -> str | None:
    """Return the id as sent: a server reads the bytes of a header as Latin-1, but a program id is UTF-8."""
    if text is None or text.isascii():
        return text or None
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:  # it came in the body, unchanged
        return text
