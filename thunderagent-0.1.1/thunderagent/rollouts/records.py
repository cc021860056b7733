"""What a rollout consists of, and how it is packed."""

# interpreted: msgspec reads the types of its structs, which a compiled class does not keep

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from thunderagent.rollouts.tokens import from_planes

SCHEMA: Final = 1
"""The version of the format; readers refuse others."""

OWN_SHARES_COUNT: Final = 64
"""Tenants with a share, and files, of their own; all further ones have one together: a client may name any number."""

OTHERS: Final = "\x00others"
"""The name of those; no tenant has it, since names have no control characters."""

Link = Literal["root", "extends", "drift", "rewritten", "unknown"]
"""How a turn's prompt relates to earlier tokens of its program; see `lineage.py`."""

Missing = Literal["", "no_ids", "no_logprobs", "unreadable", "too_large", "not_askable"]
"""Why a record lacks tokens, or log probabilities; empty if it lacks none."""


def share_name(tenant: str, shares: Collection[str]) -> str:
    """Return whose share a tenant's rollouts count for, if these have any now."""
    return tenant if tenant in shares or len(shares) < OWN_SHARES_COUNT else OTHERS


class Span(Struct, array_like=True, frozen=True):
    """Output tokens that weights of one version made, from `start` to before `end`."""

    version: str
    start: int
    end: int


class Output(Struct, array_like=True):
    """One choice of an answer. `ids` and `logprobs` are in planes; the latter are empty if there are none."""

    ids: bytes
    logprobs: bytes = b""
    finish: str = ""
    """The engine's reason for its end; empty if it did not end."""
    spans: list[Span] = []

    @property
    def tokens(self) -> bytes:
        """The tokens."""
        return from_planes(self.ids)


class Turn(Struct, kw_only=True, array_like=True):
    """One attempt of a client at one turn, once it has ended. New fields come last: packed, they have no names."""

    seq: int
    """Counts the program's records from 0, in the order in which they ended."""
    turn_id: int = 0
    request_id: str = ""
    path: str = ""
    model: str = ""
    streams: bool = False
    branch_id: str = ""
    replica_id: str = ""
    link: Link = "unknown"
    parent: int = -1
    """The record whose tokens its prompt begins with; -1 if there is none."""
    parent_choice: int = 0
    shared_tokens: int = 0
    """How many tokens of its parent's prompt and output its prompt begins with."""
    prompt_tokens: int = 0
    prompt_new: bytes = b""
    """The prompt's tokens after those, in planes."""
    outputs: list[Output] = []
    missing: Missing = ""
    weights_before: str = ""
    """Version of the weights that the replica had when the turn was granted; empty if unknown."""
    weights_after: str = ""
    changes_before: int = 0
    """The number of these weights, which rises with each change: equal on replicas with the same ones."""
    changes_after: int = 0
    outcome: str = ""
    verdict: str = "ok"
    cause: str = ""
    status: int = 0
    kept: bool = True
    """Whether its client got the whole answer, and did not send the turn again meanwhile."""
    tries_count: int = 0
    reason: str = ""
    """Why it was granted."""
    began_at: float = 0.0
    """When it arrived, in seconds since 1970."""
    held_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int | None = None
    salt: str = ""
    """What its engine was told to separate its cache by; empty if nothing."""
    prefix: str = ""
    """What became of its prompt if it was to be exact, as `reading/exact_prefix.py` says; empty if it was not."""


class Rollout(Struct, kw_only=True, omit_defaults=True):
    """What is said of all turns of a program together."""

    program_id: str
    generation: int
    schema: int = SCHEMA
    seq: int = 0
    """Counts ended rollouts from 1, in the order in which they ended; 0 while it lives."""
    tenant: str = ""
    group_id: str = ""
    parent_id: str = ""
    program_class: str = ""
    ended: bool = False
    outcome: str = ""
    """What its client said became of it."""
    verdict: str = "ok"
    cause: str = ""
    turns_count: int = 0
    granted_count: int = 0
    """Turns that an engine got; each must have a record."""
    complete: bool = True
    """Whether each of these has its tokens, and its log probabilities if they were asked for."""
    prompt_tokens: int = 0
    """Sum of the prompts of all turns."""
    output_tokens: int = 0
    links: dict[str, int] = {}
    """How many turns have each link."""
    held_s: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0
    weights_first: str = ""
    weights_last: str = ""
    lag_count: int = 0
    """The most changes of weights between the program's first turn and the end of any."""

    @property
    def mask_sample(self) -> bool:
        """Whether it must not be trained on: tokens are missing, or the infrastructure or the trainer cut it."""
        return not self.complete or self.verdict in ("infrastructure_failed", "aborted_by_trainer")


class SentOutput(Struct, array_like=True):
    """One choice of an answer as its engine spelt it; see `OutputRead`."""

    number: int
    listed: bytes
    told: bytes
    text: bytes
    logprobs: list[float]
    finish: str
    spans: list[tuple[str, int, int]]


class SentTurn(Struct, array_like=True):
    """A turn on its way to the process that settles; see `Captured`."""

    turn: Turn
    has_answers: bool | None
    asks_logprobs: bool = False
    continues: bool = False
    has_captured: bool = False
    prompt: bytes | None = None
    prompt_listed: bytes = b""
    is_unreadable: bool = False
    outputs: list[SentOutput] = []


class Batch(Struct, array_like=True):
    """The next turns of one program; if it is new to the process, with all earlier records."""

    number: int
    """Of the program, for this process."""
    first_seq: int
    turns_count: int
    """Further ones are recorded without tokens."""
    is_full: bool
    """Whether there is no memory for tokens."""
    is_last: bool
    """Whether there will be no further turn."""
    is_new: bool
    blocks: list[bytes]
    frames: list[bytes]
    turns: list[Raw]
    """Each a `SentTurn`, packed."""


class SettledBatch(Struct, array_like=True):
    """What became of the turns of a batch: their records, and what they add to their rollout."""

    number: int
    frames: bytes = b""
    """The records, one after the other; a turn far beyond the limit has none."""
    lineage_bytes: int = 0
    """What the process keeps of the program."""
    turns_count: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    held_s: float = 0.0
    links: dict[str, int] = {}
    incomplete_count: int = 0
    """Turns that lack tokens of which the program has need."""
    lacks: list[tuple[str, str, str]] = []
    """Replica, path, and what is missing, of each turn that lacks anything and whose client got its answer."""
    changes_first: int = -1
    """The number of weights of the first turn that an engine got; less than 0 if none did."""
    weights_first: str = ""
    weights_last: str = ""
    """The last that is known; empty if none is."""
    changes_most: int = 0
    errors: list[str] = []
    """Why turns have no record."""


encode_sent: Final = msgspec.msgpack.Encoder().encode
decode_sent: Final = msgspec.msgpack.Decoder(SentTurn).decode
encode_batch_into: Final = msgspec.msgpack.Encoder().encode_into
decode_batch: Final = msgspec.msgpack.Decoder(Batch).decode
encode_settled: Final = msgspec.msgpack.Encoder().encode
decode_settled: Final = msgspec.msgpack.Decoder(SettledBatch).decode

_encode_turn: Final = msgspec.msgpack.Encoder().encode
_decode_turn: Final = msgspec.msgpack.Decoder(Turn).decode
_encode_rollout: Final = msgspec.msgpack.Encoder().encode
_decode_rollout: Final = msgspec.msgpack.Decoder(Rollout).decode
encode_rollout = _encode_rollout


def decode_rollout(packed: bytes) -> Rollout:
    """Read a rollout. Raises `ValueError` for another schema, or if it is unreadable."""
    found = _decode_rollout(packed)
    if found.schema != SCHEMA:
        raise ValueError(f"a rollout of schema {found.schema}; this version reads {SCHEMA}")
    return found


def frame_of(turn: Turn) -> bytes:
    """Return a turn's record with its length before it."""
    packed = _encode_turn(turn)
    return len(packed).to_bytes(4, "little") + packed


def block_of(frames: Sequence[bytes]) -> bytes:
    """Return records packed together. Cost: about 10 ns a byte, without the interpreter's lock."""
    return zlib.compress(b"".join(frames), 1)


def turns_in(blocks: Iterable[bytes], frames: Iterable[bytes] = ()) -> Iterator[Turn]:
    """Yield the turns of packed blocks, and of frames after them. Raises `ValueError` if they are broken."""
    for block in blocks:
        try:
            plain = zlib.decompress(block)
        except zlib.error as error:
            raise ValueError(f"a block of turns is broken: {error}") from error
        yield from _turns_of(plain)
    for frame in frames:
        yield from _turns_of(frame)


def _turns_of(plain: bytes) -> Iterator[Turn]:
    at, view = 0, memoryview(plain)
    while at < len(plain):
        end = at + 4 + int.from_bytes(view[at : at + 4], "little")
        yield _decode_turn(view[at + 4 : end])
        at = end
