"""What a scheduler knows of one gateway, and the interface that grants its requests."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, TurnAsk, TurnEnd
from thunderagent.scale.messages import Card, Digest, Frame, Message, Ok, Progress, Released, Running

LOST_IDS_COUNT = 1000
"""How many turns without an answer are remembered per gateway, for the attempt that replaces one."""


class Grants(Protocol):
    """Grants leases. Turns are named by the numbers that it gives."""

    def new_turn_id(self) -> int:
        """Return a number that no turn had before."""

    def asked(self, turn_id: int, ask: TurnAsk) -> None:
        """Add a turn that wants a lease; later report `granted`, `refused` or `held`."""

    def adopted(self, turn_id: int, running: Running) -> None:
        """Add a turn that already runs."""

    def progressed(self, turn_id: int, progress: Progress) -> None:
        """Record the progress of a turn."""

    def ended(self, turn_id: int, end: TurnEnd) -> None:
        """Record the end of a granted or adopted turn."""

    def left(self, turn_id: int) -> None:
        """Record that nobody waits for a turn any more."""

    def tried_again(self, turn_id: int) -> None:
        """Record that a turn will end because its client retried it."""

    def released(self, word: Released) -> None:
        """Record that a program ended."""

    def card(self, card: Card) -> None:
        """Record where a program was last."""

    def seen(self, digest: Digest) -> None:
        """Record that a replica refused a gateway's connection, or failed its turn."""

    def tripped(self, replica_id: str, *, tripped: bool) -> None:
        """Record that a replica fails turn after turn, or may be tried; may be repeated."""

    def recovered(self, replica_id: str) -> None:
        """Record that a replica that was tried has answered well; may be repeated."""


class GatewayTurn:
    """One turn of a gateway."""

    __slots__ = ("lease", "own_id")

    def __init__(self, own_id: int) -> None:
        """Create a held turn."""
        self.own_id = own_id
        self.lease: Lease | None = None
        """As sent; None while the turn is held."""


class Gateway:
    """One run of a gateway, and its turns."""

    def __init__(self, gateway_id: str, boot_id: int) -> None:
        """Start without turns and without a link."""
        self.gateway_id = gateway_id
        self.boot_id = boot_id
        self.link_number = 0
        self.is_linked = False
        self.is_told = False
        """Whether it has sent all that it has, on this link."""
        self.cards_are_known = False
        """Whether it has sent all that it has since it followed another scheduler: its cards bring nothing new."""
        self.lost_since_s: float | None = None
        """Since when it has no link."""
        self.turns: dict[int, GatewayTurn] = {}
        """By its own numbers."""
        self.counted: dict[int, None] = {}
        """Turns whose ends were counted, until it has heard so."""
        self.outbox: list[Message] = []
        self.uncounted_ids: list[int] = []
        """Turns to acknowledge in the next frame."""
        self.number = 0
        self.heard = 0
        self.told_ids: set[int] = set()
        self.tripped_ids: set[str] = set()
        self.failing_ids: set[str] = set()
        """Those, and others that were tripped and have not recovered."""
        """Replicas that fail it turn after turn."""
        self._acknowledged: deque[tuple[int, int]] = deque()
        """Frames of this link that acknowledged turns, and these turns, in order."""
        self._lost_ids: dict[int, int] = {}

    # --- its link

    def linked(self, link_number: int, *, followed_us: bool) -> None:
        """Begin a link. Raises `BadFrameError` if there already is a later one."""
        if link_number <= self.link_number:
            raise BadFrameError(f"{self} has a later link than {link_number}")
        self.link_number, self.is_linked, self.is_told = link_number, True, False
        self.lost_since_s = None
        self.cards_are_known &= followed_us
        self.number, self.heard = 0, 0
        self.told_ids = set()
        self.outbox, self.uncounted_ids = [], []
        self._acknowledged.clear()

    def hears(self, frame: Frame) -> bool:
        """Return whether a received frame is new. Raises `BadFrameError` if one is missing."""
        if frame.number <= self.heard:
            return False
        if frame.number != self.heard + 1:
            raise BadFrameError(f"frame {frame.number} of {self} came after frame {self.heard}")
        self.heard = frame.number
        acknowledged = self._acknowledged
        while self.is_told and acknowledged and acknowledged[0][0] <= frame.heard:
            self.counted.pop(acknowledged.popleft()[1], None)
        return True

    def all_told(self) -> None:
        """Note that it has sent all that it has; forget ends that it knows to be counted."""
        self.counted = dict.fromkeys(each for each in self.counted if each in self.told_ids)
        self.told_ids = set()
        self.is_told = self.cards_are_known = True

    def frame(self, epoch: int) -> Frame:
        """Return the next frame for it."""
        messages, self.outbox = self.outbox, []
        self.number += 1
        if self.uncounted_ids:
            messages.append(Ok(tuple(self.uncounted_ids)))
            self._acknowledged.extend((self.number, turn_id) for turn_id in self.uncounted_ids)
            self.uncounted_ids = []
        return Frame(self.number, self.heard, epoch, messages)

    # --- its turns

    def own_id(self, turn_id: int) -> int | None:
        """Return the scheduler's number of a turn, including one that recently ended without an answer."""
        turn = self.turns.get(turn_id)
        return turn.own_id if turn is not None else self._lost_ids.get(turn_id)

    def lost(self, turn_id: int, own_id: int) -> None:
        """Remember a turn without an answer."""
        self._lost_ids[turn_id] = own_id
        if len(self._lost_ids) > LOST_IDS_COUNT:
            del self._lost_ids[next(iter(self._lost_ids))]

    def __repr__(self) -> str:
        where = f"link {self.link_number}" if self.is_linked else "no link"
        return f"<Gateway {self.gateway_id}: {len(self.turns)} turns, {where}>"

    @property
    def has_news(self) -> bool:
        """Return whether there is something to send to it."""
        return self.is_linked and bool(self.outbox or self.uncounted_ids)
