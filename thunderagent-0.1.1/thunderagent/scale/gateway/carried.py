"""A gateway's side of a link: the turns that it carries, for which it is the source of truth.

Theory of operation
===================
Pure: it is told what happens and what arrived, and says what to send; its owner has the socket and the clock.

Each requested turn has a row until its lease was refused, its client left while it was held, or its end was
acknowledged. A row outlives links and schedulers. At the beginning of each link all rows are sent again, ended ones
first. So a scheduler that knows nothing learns all of them, and one that knew them counts nothing twice. Beside the
rows only the ends of programs are kept while there is no link. They are sent before held turns: such a turn may be the
first of a new run of its program.
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
"""How many programs without a turn here are remembered, the most recent ones."""

UNHEARD_COUNT = 100_000
"""How many ended turns, and program ends, are kept for a scheduler while there is none."""

FRAME_COUNT = 1000
"""The most messages per frame."""


class Row:
    """One turn."""

    __slots__ = ("ask", "asked_s", "end", "lease", "output_tokens", "started", "unverified")

    def __init__(self, ask: TurnAsk, asked_s: float) -> None:
        """Create a held turn."""
        self.ask = ask
        self.asked_s = asked_s
        self.lease: Lease | None = None
        self.started = False
        self.output_tokens = 0
        self.unverified = False
        self.end: TurnEnd | None = None


class CarriedTurns:
    """The rows of a gateway, and what it has to send."""

    def __init__(self, gateway_id: str, boot_id: int) -> None:
        """Start without turns and without a link."""
        self.gateway_id = gateway_id
        self.boot_id = boot_id
        self.rows: dict[int, Row] = {}
        self.cards: dict[str, Card] = {}
        """Where the programs whose turns this gateway carried were last, the least recent first."""
        self.epoch = 0
        """The highest epoch heard of."""
        self.is_linked = False
        self.is_led = False
        """Whether the scheduler at the other end of the link said that it leads."""
        self.stale_frames_count = 0
        """Number of frames from past epochs."""
        self.unheard_count = 0
        """Number of turns whose ends no scheduler will hear of."""
        self.link_number = 0
        self.polls = False
        """Whether this gateway polls the share that a scheduler assigns."""
        self._leader_id = 0
        self._released: dict[str, Released] = {}
        self._outbox: list[Message] = []
        self._told: Iterator[Message] = iter(())
        """What to send before that, at the beginning of a link."""
        self._next_told: Message | None = None
        self._number = self._heard = 0
        self._ended_count = 0

    def __repr__(self) -> str:
        held_count = sum(row.lease is None for row in self.rows.values())
        return f"<CarriedTurns of {self.gateway_id}: {len(self.rows)}, {held_count} held, epoch {self.epoch}>"

    # --- what happens to turns

    def asked(self, ask: TurnAsk, now_s: float) -> None:
        """Add a turn that wants a lease."""
        self.rows[ask.turn_id] = Row(ask, now_s)
        self._say(ask)

    def left(self, turn_id: int) -> None:
        """Forget a turn without a lease: its client no longer waits."""
        if self.rows.pop(turn_id, None) is not None:
            self._say(Left(turn_id))

    def granted_here(self, turn_id: int, lease: Lease) -> None:
        """Record that a turn runs on this gateway's own authority, because there is no scheduler."""
        self.rows[turn_id].lease = lease

    def progressed(self, turn_id: int, output_tokens: int = 0, *, unverified: bool = False) -> None:
        """Record the progress of a turn, as in `Progress`."""
        row = self.rows.get(turn_id)
        if row is None or row.end is not None:
            return
        row.started |= not unverified
        row.unverified |= unverified
        row.output_tokens = max(row.output_tokens, output_tokens)
        self._say(Progress(turn_id, output_tokens, unverified))

    def ended(self, end: TurnEnd) -> None:
        """Record the end of a turn; its row stays until a scheduler has counted it."""
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
        """Record a client's report that its program ended."""
        self.cards.pop(program_id, None)
        self._released[program_id] = word = Released(program_id, generation, outcome)
        if len(self._released) > UNHEARD_COUNT:
            del self._released[next(iter(self._released))]
        self._say(word)

    def seen(self, digest: Digest | Polled) -> None:
        """Pass on what was seen of a replica, or found by a poll; it is not sent again."""
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
        """Begin a link: identify this gateway, and send everything; `tripped_ids` are replicas that fail it."""
        self.is_linked, self.is_led = True, False
        self.link_number += 1
        self._number = self._heard = 0
        hello = Hello(self.gateway_id, self.boot_id, self.link_number, self.epoch, self._leader_id, polls=self.polls)
        self._told, self._next_told = self._all_turns(now_s), hello
        self._outbox = [Told(tuple(tripped_ids))]

    def unlinked(self) -> None:
        """End a link; what was not sent is sent at the beginning of the next."""
        self.is_linked = self.is_led = False
        self._outbox, self._told, self._next_told = [], iter(()), None

    def _all_turns(self, now_s: float) -> Iterator[Message]:
        """Yield the current turns, and ends of programs; each becomes a message only when it is sent."""
        rows = self.rows.values()
        ended = [row for row in rows if row.end is not None]
        running = [row for row in rows if row.lease is not None and row.end is None]
        held = [row for row in rows if row.lease is None]
        return chain(
            (Turns(running=chunk) for chunk in _chunks(map(_running, ended))),
            (Turns(running=chunk) for chunk in _chunks(map(_running, running))),
            list(self._released.values()),
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
        """Return the next frame to send; there is more while `has_news`.

        Repeated turns end a frame, so that no frame is too large, however much there is to send. Changes in the
        meantime are sent after all that.
        """
        messages: list[Message] = []
        while self._next_told is not None and len(messages) < FRAME_COUNT:
            if messages and type(messages[-1]) is Turns:
                break
            messages.append(self._next_told)
            self._next_told = next(self._told, None)
        if not messages:
            messages, self._outbox = self._outbox[:FRAME_COUNT], self._outbox[FRAME_COUNT:]
        self._number += 1
        return Frame(self._number, self._heard, self.epoch, messages)

    def take(self, frame: Frame) -> list[Message]:
        """Process a received frame, and return its new messages.

        Raises `BadFrameError` if a frame is missing: then the link is unusable.
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
        """Process one message; return whether it changes anything."""
        if type(message) is Lease:
            row = self.rows.get(message.turn_id)
            if row is None or row.lease is not None:
                return False  # its client left, or it is sent again
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
    """Return the ask of a turn that has waited for a while."""
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
