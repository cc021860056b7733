"""What gateways and schedulers say to each other, and how it is written: frames of msgpack.

Theory of operation
===================
A frame is what one side had to say since its last one: `[number, heard, epoch, [message, ...]]`. Frames of a link are
numbered from 1, so that one that is missing or comes twice is seen; `heard` is the number of the last frame that came
from the other side. A scheduler's frames bear its epoch, and a gateway does not hear frames of an epoch that is over.

A message is an array, its kind first. Both sides may be of different versions: **fields are only added**, at the end,
with a default. What an older side does not send is the default; what a newer one sends beyond is not read; a kind that
is not known is counted and dropped. `TurnAsk`, `TurnEnd` and `Lease` are the very structs that are passed by reference
where both sides are one process (`leases.py`). Times are lengths, because two processes share no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from thunderagent.backends.asking import Found, Watch
from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, ReplicaState, TurnAsk, TurnEnd

T = TypeVar("T")

VERSION = 1
PATH = "/internal/lease"
PROTOCOL = "thunderagent.lease.v1"
"""The websocket's subprotocol."""

CHUNK_COUNT = 200
CHUNK_BYTES = 4 * 2**20
"""So many turns or programs are told again in one message at most, and so large is it, unless one alone is larger."""

MAX_EPOCH = 2**31
"""No epoch or number of a link is higher, so that a generation with the epoch above it fits into 64 bits."""

Bounded = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]


# --- from a gateway


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a link. The gateway's turns follow in `Turns`, then a `Told`."""

    gateway_id: str
    boot_id: int
    """Of this run of the gateway: its turns are numbered anew with each."""
    link_number: Bounded
    """Which link of this run it is: with a later one, all earlier ones are over."""
    highest_epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCH)] = 0
    leader_id: int = 0
    """Who led it in that epoch, as `Lead` said."""
    version: int = VERSION
    polls: bool = False
    """Whether it can poll a share of the replicas."""


class Running(Struct, frozen=True, array_like=True):
    """A turn that runs, or ran: as it was asked for, and where it runs."""

    ask: TurnAsk
    lease: Lease
    started: bool = False
    output_tokens: int = 0
    end: TurnEnd | None = None
    """How it ended, which nobody acknowledged yet."""
    unverified: bool = False


class Card(Struct, frozen=True, array_like=True):
    """A program that a gateway carried turns of, none of which is with it now: where its cache is, how large."""

    program_id: str
    replica_id: str
    tokens: int
    tenant: str = ""
    group_id: str = ""
    parent_id: str = ""
    program_class: str = ""


class Turns(Struct, frozen=True, array_like=True, tag="turns"):
    """What a gateway has at the beginning of a link, in as many messages as it takes: those that ended first."""

    running: tuple[Running, ...] = ()
    held: tuple[TurnAsk, ...] = ()
    cards: tuple[Card, ...] = ()


class Told(Struct, frozen=True, array_like=True, tag="told"):
    """All of a gateway's turns were told: others that it had are over."""

    tripped_ids: tuple[str, ...] = ()
    """The replicas that fail it turn after turn: all of them."""


class Left(Struct, frozen=True, array_like=True, tag="abandon", gc=False):
    """The client of a held turn left."""

    turn_id: int


class Progress(Struct, frozen=True, array_like=True, tag="progress", gc=False):
    """How a turn with a lease goes: its first byte came, or about so many tokens were generated so far."""

    turn_id: int
    output_tokens: int = 0
    unverified: bool = False


class Released(Struct, frozen=True, array_like=True, tag="released", gc=False):
    """A client's word that its program ended; answered with `Gone`."""

    program_id: str
    generation: int | None = None
    outcome: str = ""


class Digest(Struct, frozen=True, array_like=True, tag="replica", gc=False):
    """What a gateway saw of a replica: it `refused` a connection, `failed` a turn, is `tripped`, or may be `tried`."""

    replica_id: str
    seen: str


class Polled(Struct, frozen=True, array_like=True, tag="polled"):
    """What a gateway found at a URL of its share, or at one that it was asked to look at."""

    number: int
    """As the scheduler of the link named it."""
    found: Found


class Deposed(Struct, frozen=True, array_like=True, tag="deposed", gc=False):
    """The only message of a link to a scheduler of an epoch that is over: another one leads in this one."""

    epoch: Annotated[int, Meta(ge=0, lt=MAX_EPOCH)]


# --- from a scheduler


class Lead(Struct, frozen=True, array_like=True, tag="lead", gc=False):
    """This scheduler grants leases from now on, in the epoch of the frame."""

    leader_id: int
    """Of this run of it."""
    cell: str = ""
    version: int = VERSION


class Hold(Struct, frozen=True, array_like=True, tag="hold", gc=False):
    """A turn is held."""

    turn_id: int


class Refusal(Struct, frozen=True, array_like=True, tag="reject", gc=False):
    """There will be no lease for a turn: `code` is of an error of `ThunderAgentError`'s tree."""

    turn_id: int
    code: str
    message: str
    retry_after_s: int | None = None


class Revoke(Struct, frozen=True, array_like=True, tag="revoke", gc=False):
    """End a turn: its client tried it again, and the next attempt came to another gateway."""

    turn_id: int
    program_id: str


class Ok(Struct, frozen=True, array_like=True, tag="ok", gc=False):
    """The ends of these turns are counted."""

    turn_ids: tuple[int, ...]


class Gone(Struct, frozen=True, array_like=True, tag="gone", gc=False):
    """There is no program of that id, or not any more."""

    program_id: str


class RemoteReplica(Struct, frozen=True, array_like=True):
    """A replica, as whoever carries bytes has to know it."""

    state: ReplicaState
    kind: str = "auto"
    """Of its engine: how it is told of priorities, and of clients that left."""
    rank_id: int | None = None
    models: tuple[str, ...] = ()
    """That it lists, where there are several pools."""


class Replicas(Struct, frozen=True, array_like=True, tag="replicas"):
    """What changed of the replicas; the first one of a link says all of them, and ids that it does not are gone."""

    changed: tuple[RemoteReplica, ...]
    removed_ids: tuple[str, ...] = ()
    names_models: bool = False
    has_pools: bool = False
    is_whole: bool = False


class PollShare(Struct, frozen=True, array_like=True, tag="polls"):
    """All that a gateway is to poll, how often, and how long each answer may take."""

    watches: tuple[Watch, ...] = ()
    interval_s: float = 1.0
    deadline_s: float = 2.0


class Look(Struct, frozen=True, array_like=True, tag="look"):
    """Poll this once, now, whether it is in the share or not."""

    watch: Watch


FromGateway = Hello | Turns | Told | TurnAsk | TurnEnd | Left | Progress | Released | Digest | Polled | Deposed
FromScheduler = Lead | Lease | Hold | Refusal | Revoke | Ok | Gone | Replicas | PollShare | Look
Message = FromGateway | FromScheduler

_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Message))


class Frame(Struct, frozen=True, array_like=True):
    """What one side had to say since its last frame."""

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
    """Return a frame as it is sent."""
    return _encode(frame)


def bytes_of(part: Struct) -> int:
    """Return how many bytes a message takes in a frame, or a part of one."""
    return len(_encode(part))


def decode(data: bytes) -> tuple[Frame, int]:
    """Return a frame that came, and how many messages in it were of kinds that nobody here knows.

    Raises `BadFrameError`.
    """
    try:
        return _decode(data), 0
    except (msgspec.DecodeError, RecursionError):
        return _decode_known(data)


def known_of(raws: Sequence[Raw], decode_one: Callable[[Raw], T], kinds: Collection[str]) -> list[T]:
    """Return what can be read of some parts, without those of other kinds. Raises `msgspec.DecodeError`."""
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
