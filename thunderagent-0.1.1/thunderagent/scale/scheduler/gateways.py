"""A scheduler's side of its links: which gateway has which turns, and what each must be told.

Theory of operation
===================
Pure: it is told what arrived and what was decided, and says what to send. The granting side (`Grants`) numbers turns
itself, in order of arrival; here each number is mapped to its gateway and that one's number.

A gateway is the source of truth for its own turns. At the beginning of each link it sends all of them, and they are
compared with what is known of it:

- an unknown turn that runs, or ended, was granted by another scheduler, or by the gateway itself: it is *adopted*, and
  its end, if it has one, counted;
- one that is held here and runs there is adopted too; one that was granted here and is held there gets its lease again;
  one that ended there ends here;
- one that is known here, but was not sent, is over.

A turn's end is counted once. Its number is kept until the gateway has received the acknowledgement, which follows from
the last frame that it heard. So a repeated end is acknowledged again and not counted.

Of two schedulers the one with the higher epoch leads. Without a store a scheduler takes its epoch from its gateways:
one more than the highest that any of them has seen of another leader. With a store it has its epoch from there; a
gateway that has seen a higher one is not let in, and is reported to `on_higher`. A turn is acknowledged once it was
written: a counted turn is reported to `on_counted`, and `written` acknowledges it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, TurnAsk, TurnEnd
from thunderagent.scale.messages import (
    Digest,
    Frame,
    Gone,
    Hello,
    Hold,
    Lead,
    Left,
    Message,
    Polled,
    Progress,
    Refusal,
    Released,
    Revoke,
    Running,
    Told,
    Turns,
)
from thunderagent.scale.scheduler.gateway import Gateway, GatewayTurn, Grants
from thunderagent.scale.scheduler.tried_again import TriedAgain
from thunderagent.scale.scheduler.trips import Trips

GENERATION_BITS = 32
"""Gateways see the epoch above this many bits of a generation: another scheduler's generation is a different one."""

FORGET_S = 3600.0
"""A gateway without a link for this long is forgotten, with its counted ends."""

EPOCH_JUMP = 2**24
"""A larger jump of the epoch is impossible: that would be a new leader each second for half a year."""


class Gateways:
    """All gateways. Decisions on their turns are reported here, and sent by `frame`."""

    def __init__(self, grants: Grants, leader_id: int, on_news: Callable[[Gateway], None] = lambda _: None) -> None:
        """Start without gateways, and in no epoch; `leader_id` is of this run of the scheduler.

        `on_news` is called when there is something to send to a gateway.
        """
        self.epoch = 0
        self.leader_id = leader_id
        self.all: dict[str, Gateway] = {}
        """By id, the last run of each."""
        self.on_counted: Callable[[Gateway, int], None] | None = None
        """Called with each counted turn, and later calls `written`; None: there is no store."""
        self.on_higher: Callable[[int], None] | None = None
        """Called with a higher epoch than this; None: this scheduler takes its epoch from its gateways."""
        self.on_polled: Callable[[Gateway, Polled], None] = lambda _gateway, _word: None
        """Called with a gateway's result for a replica that it polls."""
        self._tried_again = TriedAgain()
        self.trips = Trips(self.all, grants.tripped, grants.recovered)
        self._grants = grants
        self._on_news = on_news
        self._served: dict[str, set[str]] = {}
        """Which gateways carried turns of a program."""
        self._by_own_id: dict[int, tuple[Gateway, int]] = {}

    def __repr__(self) -> str:
        return f"<Gateways, epoch {self.epoch}: {len(self.all)}, {len(self._by_own_id)} turns>"

    @property
    def turns_count(self) -> int:
        """Number of turns of all gateways that are held or run."""
        return len(self._by_own_id)

    # --- links

    def linked(self, hello: Hello) -> Gateway:
        """Begin a link of a gateway. Raises `BadFrameError` if it already has a later one, or knows a higher epoch."""
        self._check_jump(hello.highest_epoch)
        is_ours = hello.leader_id == self.leader_id
        is_higher = hello.highest_epoch > self.epoch or (hello.highest_epoch == self.epoch and not is_ours)
        if is_higher and self.on_higher is not None:
            self.on_higher(hello.highest_epoch)
            raise BadFrameError(f"{hello.gateway_id} knows of epoch {hello.highest_epoch}, this is {self.epoch}")
        gateway = self.all.get(hello.gateway_id)
        if gateway is not None and gateway.boot_id != hello.boot_id:
            self.lose(gateway)  # its sockets ended with its process
            gateway = None
        if gateway is None:
            gateway = self.all[hello.gateway_id] = Gateway(hello.gateway_id, hello.boot_id)
        gateway.linked(hello.link_number, followed_us=is_ours)
        if is_higher:
            self.leads_in(hello.highest_epoch + 1)
        else:
            self.say(gateway, Lead(self.leader_id))
        return gateway

    def deposed(self, epoch: int) -> None:
        """Handle a higher epoch from a gateway that follows another scheduler. Raises `BadFrameError` if impossible."""
        self._check_jump(epoch)
        if self.on_higher is not None and epoch >= self.epoch:
            self.on_higher(epoch)

    def _check_jump(self, epoch: int) -> None:
        if epoch - self.epoch > EPOCH_JUMP:
            raise BadFrameError(f"no scheduler can lead in epoch {epoch}, this is {self.epoch}")

    def leads_in(self, epoch: int) -> None:
        """Begin an epoch, and tell all gateways."""
        self.epoch = epoch
        for gateway in self.all.values():
            self.say(gateway, Lead(self.leader_id))

    def knows(self, gateway_id: str, boot_id: int, counted_ids: Iterable[int], now_s: float) -> None:
        """Register another scheduler's gateway, with the turns that were counted there."""
        gateway = self.all[gateway_id] = Gateway(gateway_id, boot_id)
        gateway.counted = dict.fromkeys(counted_ids)
        gateway.lost_since_s = now_s

    def unlinked(self, gateway: Gateway, link_number: int, now_s: float) -> None:
        """End a link; the gateway's turns stay until it is lost. Does nothing if it has a later link."""
        if gateway.link_number == link_number:
            gateway.is_linked, gateway.lost_since_s = False, now_s
            self.trips.went()

    def lose_silent(self, now_s: float, limit_s: float) -> list[Gateway]:
        """End the turns of gateways without a link for `limit_s`; return these gateways."""
        lost = [each for each in self.all.values() if each.lost_since_s is not None]
        lost = [each for each in lost if each.turns or each.failing_ids]
        lost = [each for each in lost if now_s - (each.lost_since_s or 0.0) >= limit_s]
        for gateway in lost:
            self.lose(gateway)
        for gateway in list(self.all.values()):
            if gateway.lost_since_s is not None and now_s - gateway.lost_since_s >= max(limit_s, FORGET_S):
                del self.all[gateway.gateway_id]
        return lost

    def lose(self, gateway: Gateway) -> None:
        """End all turns of a gateway; if it comes again, it reports them."""
        for turn_id in list(gateway.turns):
            self._over(gateway, turn_id)
        self.trips.are(gateway, ())

    def _saw(self, gateway: Gateway, digest: Digest | Polled) -> None:
        if isinstance(digest, Polled):
            self.on_polled(gateway, digest)
        elif digest.seen == "tripped":
            self.trips.tripped(gateway, digest.replica_id)
        elif digest.seen == "tried":
            self.trips.tried(gateway, digest.replica_id)
        elif digest.seen == "recovered":
            self.trips.recovered(gateway, digest.replica_id)
        else:
            self._grants.seen(digest)

    def _over(self, gateway: Gateway, turn_id: int) -> None:
        """End a turn of which its gateway reports nothing more; others that get its room may have ended it by now."""
        turn = gateway.turns.get(turn_id)
        if turn is None:
            return
        own_id, lease = turn.own_id, turn.lease
        self._drop(gateway, turn_id)
        gateway.lost(turn_id, own_id)
        if lease is None:
            self._left(own_id)
        else:
            self._grants.ended(own_id, TurnEnd(own_id, lease.program_id, lease.generation, "abandoned"))
        self._is_over(own_id)

    def frame(self, gateway: Gateway) -> Frame:
        """Return the next frame for a gateway."""
        return gateway.frame(self.epoch)

    def say(self, gateway: Gateway, message: Message) -> None:
        """Send a message to a gateway, if it has a link."""
        if gateway.is_linked:
            gateway.outbox.append(message)
            self._on_news(gateway)

    def say_to_all(self, message: Message) -> None:
        """Send a message to all gateways."""
        for gateway in self.all.values():
            self.say(gateway, message)

    # --- what gateways say

    def take(self, gateway: Gateway, frame: Frame) -> None:
        """Process a gateway's frame, except its `Hello`.

        Raises `BadFrameError` if a frame is missing, or a message is not a gateway's.
        """
        if gateway.hears(frame):
            for message in frame.messages:
                self._take(gateway, message)

    def _take(self, gateway: Gateway, message: Message) -> None:
        match message:
            case TurnAsk():
                self._asked(gateway, message)
            case TurnEnd():
                self._ended(gateway, message)
            case Progress():
                turn = gateway.turns.get(message.turn_id)
                if turn is not None and turn.lease is not None:
                    self._grants.progressed(turn.own_id, message)
            case Left():
                if message.turn_id in gateway.turns:
                    self._over(gateway, message.turn_id)
            case Released():
                self._grants.released(self._of_ours(message))
                self.say(gateway, Gone(message.program_id))
            case Digest() | Polled():
                self._saw(gateway, message)
            case Turns():
                self._told(gateway, message)
            case Told():
                self._all_told(gateway)
                self.trips.are(gateway, message.tripped_ids)
            case Hello():
                pass  # the first message of the link, which is processed before
            case _:
                raise BadFrameError(f"{gateway} sent a message that only schedulers send: {type(message).__name__}")

    def _new(self, gateway: Gateway, turn_id: int) -> GatewayTurn:
        turn = gateway.turns[turn_id] = GatewayTurn(self._grants.new_turn_id())
        self._by_own_id[turn.own_id] = gateway, turn_id
        return turn

    def _drop(self, gateway: Gateway, turn_id: int) -> None:
        del self._by_own_id[gateway.turns.pop(turn_id).own_id]

    def _asked(self, gateway: Gateway, ask: TurnAsk) -> None:
        known = gateway.turns.get(ask.turn_id)
        if known is None:
            earlier_id = None if ask.supersedes_id is None else gateway.own_id(ask.supersedes_id)
            own_id = self._new(gateway, ask.turn_id).own_id
            asked = replace(ask, turn_id=own_id, supersedes_id=earlier_id)
            elsewhere_id = self._tried_again.comes(asked)
            if elsewhere_id is None or not self._revokes(elsewhere_id, asked, gateway):
                self._grants.asked(own_id, asked)
        elif known.lease is not None:  # its grant was lost with the link
            self.say(gateway, known.lease)

    def _revokes(self, earlier_id: int, ask: TurnAsk, gateway: Gateway) -> bool:
        """Tell another gateway to end an earlier attempt, and let `ask` wait for that; return False if none can."""
        of = self._by_own_id.get(earlier_id)
        if of is None or of[0] is gateway:
            return False
        self._tried_again.revoked_ids.add(earlier_id)
        self._revoke_if_tried_again(*of, ask.program_id)
        if not of[0].is_linked:
            return False
        self._tried_again.waits(ask, earlier_id)
        self.held(ask.turn_id)
        return True

    def _revoke_if_tried_again(self, gateway: Gateway, turn_id: int, program_id: str | None) -> None:
        """Tell a gateway to end a turn, if another attempt replaces it; a lost link may have lost that."""
        turn = gateway.turns.get(turn_id)
        if turn is not None and turn.own_id in self._tried_again.revoked_ids:
            self._grants.tried_again(turn.own_id)
            self.say(gateway, Revoke(turn_id, program_id or ""))

    def abort(self, own_id: int, program_id: str, code: str) -> bool:
        """Tell the gateway of a turn of a program to end it with that error; return False if none carries it."""
        of = self._by_own_id.get(own_id)
        if of is not None:
            self.say(of[0], Revoke(of[1], program_id, code))
        return of is not None

    def _left(self, own_id: int) -> None:
        if not self._tried_again.left(own_id):
            self._grants.left(own_id)

    def _is_over(self, own_id: int) -> None:
        """Request what waited for the end of a turn; call it once the granting side knows that."""
        for ask in self._tried_again.over(own_id):
            self._goes_on(replace(ask, supersedes_id=own_id))

    def _goes_on(self, ask: TurnAsk) -> None:
        if ask.turn_id in self._by_own_id:
            self._grants.asked(ask.turn_id, ask)

    def look(self) -> None:
        """Find turns that wait for an earlier attempt which does not end; call it now and then."""
        for ask in self._tried_again.late():
            self._goes_on(ask)

    def _ended(self, gateway: Gateway, end: TurnEnd, running: Running | None = None) -> None:
        """Count a turn's end, once, and acknowledge it."""
        turn_id = end.turn_id
        if turn_id not in gateway.counted and (turn_id in gateway.turns or running is not None):
            if running is not None:
                self._runs(gateway, running)
            own_id, lease = gateway.turns[turn_id].own_id, gateway.turns[turn_id].lease
            self._drop(gateway, turn_id)
            if end.outcome != "finished":
                gateway.lost(turn_id, own_id)
            if lease is None:  # it ran without a known grant
                self._left(own_id)
            else:
                self._grants.ended(own_id, end)
            self._is_over(own_id)
        gateway.counted[turn_id] = None
        if self.on_counted is not None:
            self.on_counted(gateway, turn_id)
        else:
            self.written(gateway.gateway_id, turn_id)

    def written(self, gateway_id: str, turn_id: int) -> None:
        """Acknowledge a counted turn; does nothing if its gateway is gone, or knows it."""
        gateway = self.all.get(gateway_id)
        if gateway is not None and turn_id in gateway.counted:
            gateway.uncounted_ids.append(turn_id)
            self._on_news(gateway)

    def _runs(self, gateway: Gateway, running: Running) -> None:
        """Run a turn where its gateway says that it runs."""
        turn_id, lease = running.ask.turn_id, running.lease
        known = gateway.turns.get(turn_id)
        if known is not None and known.lease is not None and known.lease.replica_id == lease.replica_id:
            return
        if known is not None:
            self._over(gateway, turn_id)
        turn = self._new(gateway, turn_id)
        self._tried_again.comes(replace(running.ask, turn_id=turn.own_id))
        turn.lease = lease
        self._serves(gateway, lease)
        self._grants.adopted(turn.own_id, running)

    def _told(self, gateway: Gateway, turns: Turns) -> None:
        """Compare a gateway's turns with what is known of it."""
        for running in turns.running:
            gateway.told_ids.add(running.ask.turn_id)
            if running.end is not None:
                self._ended(gateway, running.end, running)
            else:
                self._runs(gateway, running)
                self._revoke_if_tried_again(gateway, running.ask.turn_id, running.ask.program_id)
        for ask in turns.held:
            gateway.told_ids.add(ask.turn_id)
            self._asked(gateway, ask)
            self._revoke_if_tried_again(gateway, ask.turn_id, ask.program_id)
        for card in turns.cards:
            if gateway.cards_are_known and card.program_id not in self._served:
                self.say(gateway, Gone(card.program_id))  # it ended while there was no link to say so
                continue
            self._served.setdefault(card.program_id, set()).add(gateway.gateway_id)
            self._grants.card(card)

    def _all_told(self, gateway: Gateway) -> None:
        """End turns that the gateway no longer has."""
        for turn_id in [each for each in gateway.turns if each not in gateway.told_ids]:
            self._over(gateway, turn_id)
        gateway.all_told()

    # --- what is decided; nothing happens for turns that are over

    def granted(self, own_id: int, lease: Lease) -> bool:
        """Send a lease to a gateway; return False if its turn is over."""
        of = self._by_own_id.get(own_id)
        if of is None:
            return False
        gateway, turn_id = of
        turn = gateway.turns[turn_id]
        turn.lease = replace(lease, turn_id=turn_id, generation=self.epoch << GENERATION_BITS | lease.generation)
        self._serves(gateway, lease)
        self.say(gateway, turn.lease)
        return True

    def _serves(self, gateway: Gateway, lease: Lease) -> None:
        if lease.program_id is not None:
            self._served.setdefault(lease.program_id, set()).add(gateway.gateway_id)

    def _of_ours(self, word: Released) -> Released:
        """Convert the generation to the core's; one of another epoch means the live one."""
        if word.generation is None:
            return word
        is_ours = word.generation >> GENERATION_BITS == self.epoch
        return replace(word, generation=word.generation & ((1 << GENERATION_BITS) - 1) if is_ours else None)

    def program_ended(self, program_id: str) -> None:
        """Tell the gateways that carried turns of a program that it ended."""
        for gateway_id in self._served.pop(program_id, ()):
            if gateway_id in self.all:
                self.say(self.all[gateway_id], Gone(program_id))

    def held(self, own_id: int) -> None:
        """Tell a gateway that a turn is held."""
        if (of := self._by_own_id.get(own_id)) is not None:
            self.say(of[0], Hold(of[1]))

    def refused(self, own_id: int, code: str, message: str, retry_after_s: int | None = None) -> None:
        """Tell a gateway that a turn gets no lease."""
        if (of := self._by_own_id.get(own_id)) is not None:
            gateway, turn_id = of
            self._drop(gateway, turn_id)
            self.say(gateway, Refusal(turn_id, code, message, retry_after_s))
            self._is_over(own_id)

    def is_known(self, own_id: int) -> bool:
        """Return whether a turn is held or runs."""
        return own_id in self._by_own_id
