"""A gateway's side of a link: the turns that it carries, of which it is the truth.

Theory of operation
===================
Pure: it is told what happens and what came, and says what is to be sent; whoever owns it has the socket and the clock.

Each turn that was asked for has a row, until its lease was refused, its client left while it was held, or its end was
acknowledged. A row outlives links and schedulers: at the beginning of each link all rows are told again, those that
ended first, so that a scheduler that knows nothing knows all of them, and one that knew them counts nothing twice. So
nothing is kept back for being sent again while there is no link: the rows are that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, TurnAsk, TurnEnd
from thunderagent.scale.messages import (
    CHUNK_BYTES,
    CHUNK_COUNT,
    Card,
    Digest,
    Frame,
    FromGateway,
    Gone,
    Hello,
    Lead,
    Left,
    Message,
    Ok,
    Polled,
    Progress,
    Refusal,
    Released,
    Running,
    Told,
    Turns,
    bytes_of,
)

T = TypeVar("T", bound=Struct)

CARDS_COUNT = 100_000
"""So many programs are remembered that have no turn here, the last that had one."""

UNHEARD_COUNT = 100_000
"""So many turns that ended are kept for a scheduler to hear of, while there is none, and so many ends of programs."""

FRAME_COUNT = 1000
"""So many messages go out in a frame at most."""


class Row:
    """One turn."""

    __slots__ = ("ask", "asked_s", "end", "lease", "output_tokens", "started", "unverified")

    def __init__(self, ask: TurnAsk, asked_s: float) -> None:
        """Begin held."""
        self.ask = ask
        self.asked_s = asked_s
        self.lease: Lease | None = None
        self.started = False
        self.output_tokens = 0
        self.unverified = False
        self.end: TurnEnd | None = None


class CarriedTurns:
    """The rows of a gateway, and what it has to say."""

    def __init__(self, gateway_id: str, boot_id: int) -> None:
        """Begin with no turn and no link."""
        self.gateway_id = gateway_id
        self.boot_id = boot_id
        self.rows: dict[int, Row] = {}
        self.cards: dict[str, Card] = {}
        """Where programs were last that this gateway carried turns of, the one that had none for longest first."""
        self.epoch = 0
        """The highest that was heard of."""
        self.is_linked = False
        self.is_led = False
        """Whether the scheduler at the other end of the link said that it leads."""
        self.stale_frames_count = 0
        """Frames of epochs that were over."""
        self.unheard_count = 0
        """Turns whose ends no scheduler will hear of."""
        self.link_number = 0
        self.polls = False
        """Whether this gateway polls the share that a scheduler gives it."""
        self._leader_id = 0
        self._released: dict[str, Released] = {}
        self._outbox: list[Message] = []
        self._told: Iterator[Message] = iter(())
        """What is to be told before that, at the beginning of a link."""
        self._next_told: Message | None = None
        self._number = self._heard = 0
        self._ended_count = 0

    def __repr__(self) -> str:
        held_count = sum(row.lease is None for row in self.rows.values())
        return f"<CarriedTurns of {self.gateway_id}: {len(self.rows)}, {held_count} held, epoch {self.epoch}>"

    # --- what happens to turns

    def asked(self, ask: TurnAsk, now_s: float) -> None:
        """Take in a turn that wants a lease."""
        self.rows[ask.turn_id] = Row(ask, now_s)
        self._say(ask)

    def left(self, turn_id: int) -> None:
        """Forget a turn that has no lease: no program waits for it any more."""
        if self.rows.pop(turn_id, None) is not None:
            self._say(Left(turn_id))

    def granted_here(self, turn_id: int, lease: Lease) -> None:
        """Take in that a turn runs by this gateway's own leave, because there is no scheduler."""
        self.rows[turn_id].lease = lease

    def progressed(self, turn_id: int, output_tokens: int = 0, *, unverified: bool = False) -> None:
        """Take in how a turn goes, as `Progress` says it."""
        row = self.rows.get(turn_id)
        if row is None or row.end is not None:
            return
        row.started |= not unverified
        row.unverified |= unverified
        row.output_tokens = max(row.output_tokens, output_tokens)
        self._say(Progress(turn_id, output_tokens, unverified))

    def ended(self, end: TurnEnd) -> None:
        """Take in how a turn ended; its row stays until a scheduler has counted it."""
        row = self.rows.get(end.turn_id)
        if row is None or row.end is not None:
            return
        row.end = end
        self._ended_count += 1
        self._note_card(row, end)
        self._say(end)
        if self._ended_count > UNHEARD_COUNT:
            oldest = next(turn_id for turn_id, each in self.rows.items() if each.end is not None)
            self._forget(oldest)
            self.unheard_count += 1

    def released(self, program_id: str, generation: int | None, outcome: str) -> None:
        """Take in a client's word that its program ended."""
        self.cards.pop(program_id, None)
        self._released[program_id] = word = Released(program_id, generation, outcome)
        if len(self._released) > UNHEARD_COUNT:
            del self._released[next(iter(self._released))]
        self._say(word)

    def seen(self, digest: Digest | Polled) -> None:
        """Pass on what was seen of a replica, or found by a poll; it is not said again."""
        self._say(digest)

    def _note_card(self, row: Row, end: TurnEnd) -> None:
        ask, lease = row.ask, row.lease
        if ask.program_id is None or lease is None or end.outcome != "finished":
            return
        self.cards.pop(ask.program_id, None)
        self.cards[ask.program_id] = Card(
            ask.program_id,
            lease.replica_id,
            (end.prompt_tokens or 0) + (end.output_tokens or 0),
            ask.tenant,
            ask.group_id,
            ask.parent_id,
            ask.program_class,
        )
        if len(self.cards) > CARDS_COUNT:
            del self.cards[next(iter(self.cards))]

    def _forget(self, turn_id: int) -> None:
        row = self.rows.pop(turn_id, None)
        if row is not None and row.end is not None:
            self._ended_count -= 1

    # --- links

    def linked(self, now_s: float, tripped_ids: Collection[str] = ()) -> None:
        """Begin a link: say who this is, and tell all that it has; `tripped_ids` are the replicas that fail it."""
        self.is_linked, self.is_led = True, False
        self.link_number += 1
        self._number = self._heard = 0
        hello = Hello(self.gateway_id, self.boot_id, self.link_number, self.epoch, self._leader_id, polls=self.polls)
        self._told, self._next_told = self._all_turns(now_s), hello
        self._outbox = [*self._released.values(), Told(tuple(tripped_ids))]

    def unlinked(self) -> None:
        """End a link; what was not sent is told at the beginning of the next."""
        self.is_linked = self.is_led = False
        self._outbox, self._told, self._next_told = [], iter(()), None

    def _all_turns(self, now_s: float) -> Iterator[Message]:
        """Say which turns there are now; each is made into a message when its turn to be sent comes."""
        rows = self.rows.values()
        ended = [row for row in rows if row.end is not None]
        running = [row for row in rows if row.lease is not None and row.end is None]
        held = [row for row in rows if row.lease is None]
        return chain(
            (Turns(running=chunk) for chunk in _chunks(map(_running, ended))),
            (Turns(running=chunk) for chunk in _chunks(map(_running, running))),
            (Turns(held=chunk) for chunk in _chunks(_aged(row, now_s) for row in held)),
            (Turns(cards=chunk) for chunk in _chunks(list(self.cards.values()))),
        )

    def _say(self, message: FromGateway) -> None:
        if self.is_linked:
            self._outbox.append(message)

    @property
    def has_news(self) -> bool:
        """Whether there is something to send."""
        return self._next_told is not None or bool(self._outbox)

    def frame(self) -> Frame:
        """Return what is to be sent now; there is more as long as there `has_news`.

        Turns that are told again end a frame, so that no frame is too large, however much there is to tell. What
        happens meanwhile is said after all that.
        """
        messages: list[Message] = []
        while self._next_told is not None and not (messages and type(messages[-1]) is Turns):
            messages.append(self._next_told)
            self._next_told = next(self._told, None)
        if not messages:
            messages, self._outbox = self._outbox[:FRAME_COUNT], self._outbox[FRAME_COUNT:]
        self._number += 1
        return Frame(self._number, self._heard, self.epoch, messages)

    def take(self, frame: Frame) -> list[Message]:
        """Take in what came by the link, and return what of it is news.

        Raises `BadFrameError` if a frame is missing: then the link is of no more use.
        """
        if frame.number <= self._heard:
            return []
        if frame.number != self._heard + 1:
            raise BadFrameError(f"frame {frame.number} came after frame {self._heard}")
        self._heard = frame.number
        if frame.epoch < self.epoch:
            self.stale_frames_count += 1
            return []
        self.epoch = frame.epoch
        return [message for message in frame.messages if self._take(message)]

    def _take(self, message: Message) -> bool:
        """Take in one message; say whether it changes anything."""
        if type(message) is Lease:
            row = self.rows.get(message.turn_id)
            if row is None or row.lease is not None:
                return False  # its client left, or it is told once more
            row.lease = message
            if message.program_id is not None:
                self.cards.pop(message.program_id, None)
        elif type(message) is Ok:
            for turn_id in message.turn_ids:
                self._forget(turn_id)
        elif type(message) is Refusal:
            row = self.rows.get(message.turn_id)
            if row is None or row.lease is not None:
                return False
            del self.rows[message.turn_id]
        elif type(message) is Gone:
            self._released.pop(message.program_id, None)
            self.cards.pop(message.program_id, None)
        elif type(message) is Lead:
            self.is_led, self._leader_id = True, message.leader_id
        return True


def _running(row: Row) -> Running:
    assert row.lease is not None, "it has a lease"
    ask = row.ask if row.end is None else replace(row.ask, prefix=(), media=())
    return Running(ask, row.lease, row.started, row.output_tokens, row.end, row.unverified)


def _aged(row: Row, now_s: float) -> TurnAsk:
    """Return what a turn that waited for a while asks for now."""
    held_s = now_s - row.asked_s
    patience_s = None if row.ask.patience_s is None else max(0.0, row.ask.patience_s - held_s)
    return replace(row.ask, waited_s=(row.ask.waited_s or 0.0) + held_s, patience_s=patience_s, supersedes_id=None)


def _chunks(each: Iterable[T]) -> Iterator[tuple[T, ...]]:
    chunk: list[T] = []
    chunk_bytes = 0
    for one in each:
        one_bytes = bytes_of(one)
        if chunk and (len(chunk) == CHUNK_COUNT or chunk_bytes + one_bytes > CHUNK_BYTES):
            yield tuple(chunk)
            chunk, chunk_bytes = [], 0
        chunk.append(one)
        chunk_bytes += one_bytes
    if chunk:
        yield tuple(chunk)
