"""Messages between gateways and schedulers, and their encoding: frames of msgpack.

Theory of operation
===================
A frame is what one side had to say since its last one: `[number, heard, epoch, [message, ...]]`. Frames of a link are
numbered from 1, so missing and repeated ones are noticed; `heard` is the number of the last frame from the other side.
A scheduler's frames contain its epoch, and a gateway ignores frames of past epochs.

A message is an array, its kind first. Both sides may have different versions: **fields are only added**, at the end,
with a default. A field that an older side does not send has its default; further fields of a newer one are not read; an
unknown kind is counted and dropped. `TurnAsk`, `TurnEnd` and `Lease` are the structs that a single process passes by
reference (`leases/`). Times are durations, because two processes share no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from thunderagent.backends.asking import MAX_POLL_BYTES, Found, Watch
from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, ReplicaState, TurnAsk, TurnEnd

T = TypeVar("T")

VERSION = 1
PATH = "/internal/lease"
PROTOCOL = "thunderagent.lease.v1"
"""The websocket's subprotocol."""

CHUNK_COUNT = 200
CHUNK_BYTES = 4 * 2**20
"""How many turns or programs are repeated in one message at most, and its largest size, unless one alone is larger."""

MAX_EPOCH = 2**31
"""Limit of epochs and link numbers, so that a generation with the epoch above it fits into 64 bits."""

Bounded = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]


# --- from a gateway


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a link. The gateway's turns follow in `Turns`, then a `Told`."""

    gateway_id: str
    boot_id: int
    """Of this run of the gateway: each run numbers its turns from the start."""
    link_number: Bounded
    """Number of the link in this run: a later one ends all earlier ones."""
    highest_epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCH)] = 0
    leader_id: int = 0
    """The leader in that epoch, from `Lead`."""
    version: int = VERSION
    polls: bool = False
    """Whether it can poll a share of the replicas."""


class Running(Struct, frozen=True, array_like=True):
    """A turn that runs, or ran: its ask, and where it runs."""

    ask: TurnAsk
    lease: Lease
    started: bool = False
    output_tokens: int = 0
    end: TurnEnd | None = None
    """Its end, if nobody has acknowledged that yet."""
    unverified: bool = False


class Card(Struct, frozen=True, array_like=True):
    """A program whose turns a gateway carried, none of them now: where its cache is, and how large."""

    program_id: str
    replica_id: str
    tokens: int
    tenant: str = ""
    group_id: str = ""
    parent_id: str = ""
    program_class: str = ""


class Turns(Struct, frozen=True, array_like=True, tag="turns"):
    """A gateway's turns at the beginning of a link, in as many messages as needed, ended ones first."""

    running: tuple[Running, ...] = ()
    held: tuple[TurnAsk, ...] = ()
    cards: tuple[Card, ...] = ()


class Told(Struct, frozen=True, array_like=True, tag="told"):
    """All of a gateway's turns were sent: any others that it had are over."""

    tripped_ids: tuple[str, ...] = ()
    """All replicas that fail it turn after turn."""


class Left(Struct, frozen=True, array_like=True, tag="abandon", gc=False):
    """The client of a held turn left."""

    turn_id: int


class Progress(Struct, frozen=True, array_like=True, tag="progress", gc=False):
    """The progress of a turn with a lease: its first byte arrived, or the approximate tokens so far."""

    turn_id: int
    output_tokens: int = 0
    unverified: bool = False


class Released(Struct, frozen=True, array_like=True, tag="released", gc=False):
    """A client's report that its program ended; answered with `Gone`."""

    program_id: str
    generation: int | None = None
    outcome: str = ""


class Digest(Struct, frozen=True, array_like=True, tag="replica", gc=False):
    """A gateway's report on a replica: it `refused` a connection, `failed` a turn, is `tripped`, or may be `tried`.

    Until it has `recovered`, by the good end of a turn, it is failing.
    `pressed 1.5` says that it is full, and should be granted nothing for 1.5 s.
    """

    replica_id: str
    seen: str


class Polled(Struct, frozen=True, array_like=True, tag="polled"):
    """A gateway's result for a URL of its share, or for one that it was asked to look at."""

    number: int
    """As numbered by the link's scheduler."""
    found: Found


class Deposed(Struct, frozen=True, array_like=True, tag="deposed", gc=False):
    """The only message of a link to a scheduler of a past epoch: another one leads in this one."""

    epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCH)]


# --- from a scheduler


class Lead(Struct, frozen=True, array_like=True, tag="lead", gc=False):
    """This scheduler grants leases from now on, in the frame's epoch."""

    leader_id: int
    """Of this run of the scheduler."""
    cell: str = ""
    version: int = VERSION


class Hold(Struct, frozen=True, array_like=True, tag="hold", gc=False):
    """A turn is held."""

    turn_id: int


class Refusal(Struct, frozen=True, array_like=True, tag="reject", gc=False):
    """A turn gets no lease: `code` is that of an error in `ThunderAgentError`'s tree."""

    turn_id: int
    code: str
    message: str
    retry_after_s: int | None = None


class Revoke(Struct, frozen=True, array_like=True, tag="revoke", gc=False):
    """End a turn: its client retried it, and the next attempt came to another gateway.

    With a `code`, its program was ended so, and it ends with that error.
    """

    turn_id: int
    program_id: str
    code: str = ""


class Ok(Struct, frozen=True, array_like=True, tag="ok", gc=False):
    """The ends of these turns are counted."""

    turn_ids: tuple[int, ...]


class Gone(Struct, frozen=True, array_like=True, tag="gone", gc=False):
    """There is no program of that id, or no longer."""

    program_id: str


class RemoteReplica(Struct, frozen=True, array_like=True):
    """A replica, as carriers of bytes must know it."""

    state: ReplicaState
    kind: str = "auto"
    """Kind of its engine: how to send it priorities, and news of clients that left."""
    rank_id: int | None = None
    models: tuple[str, ...] = ()
    """The models it lists, if there are several pools."""


class Replicas(Struct, frozen=True, array_like=True, tag="replicas"):
    """Changes of replicas; the first one of a link lists all, and ids not in it are gone."""

    changed: tuple[RemoteReplica, ...]
    removed_ids: tuple[str, ...] = ()
    names_models: bool = False
    has_pools: bool = False
    is_whole: bool = False


class PollShare(Struct, frozen=True, array_like=True, tag="polls"):
    """All that a gateway is to poll, how often, and the limits for each answer."""

    watches: tuple[Watch, ...] = ()
    interval_s: float = 1.0
    deadline_s: float = 2.0
    max_bytes: int = MAX_POLL_BYTES


class Look(Struct, frozen=True, array_like=True, tag="look"):
    """Poll this once, now, whether it is in the share or not."""

    watch: Watch


FromGateway = Hello | Turns | Told | TurnAsk | TurnEnd | Left | Progress | Released | Digest | Polled | Deposed
FromScheduler = Lead | Lease | Hold | Refusal | Revoke | Ok | Gone | Replicas | PollShare | Look
Message = FromGateway | FromScheduler

_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Message))


class Frame(Struct, frozen=True, array_like=True):
    """Messages of one side since its last frame."""

    number: int
    heard: int
    epoch: Bounded
    messages: Sequence[Message]


class _RawFrame(Struct, frozen=True, array_like=True):
    number: int
    heard: int
    epoch: Bounded
    messages: list[Raw]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode
_decode_raw = msgspec.msgpack.Decoder(_RawFrame).decode
_decode_message: Any = msgspec.msgpack.Decoder(Message).decode
_decode_any = msgspec.msgpack.Decoder(list[Any]).decode


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    return _encode(frame)


def bytes_of(part: Struct) -> int:
    """Return how many bytes a message, or a part of one, takes in a frame."""
    return len(_encode(part))


def decode(data: bytes) -> tuple[Frame, int]:
    """Decode a frame; also return how many of its messages were of unknown kinds.

    Raises `BadFrameError`.
    """
    try:
        return _decode(data), 0
    except (msgspec.DecodeError, RecursionError):
        return _decode_known(data)


def known_of(raws: Sequence[Raw], decode_one: Callable[[Raw], T], kinds: Collection[str]) -> list[T]:
    """Decode the parts of known kinds. Raises `msgspec.DecodeError`."""
    known: list[T] = []
    for each in raws:
        try:
            known.append(decode_one(each))
        except msgspec.ValidationError:
            kind = _decode_any(each)[:1]
            if not kind or kind[0] in kinds or not isinstance(kind[0], str):
                raise
    return known


def _decode_known(data: bytes) -> tuple[Frame, int]:
    try:
        raw = _decode_raw(data)
        known: list[Message] = known_of(raw.messages, _decode_message, _KINDS)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrameError(f"not a frame: {error}") from error
    return Frame(raw.number, raw.heard, raw.epoch, known), len(raw.messages) - len(known)
