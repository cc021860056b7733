"""A scheduler's side of its links: which gateway has which turns, and who is to be told what.

Theory of operation
===================
Pure: it is told what came and what was decided, and says what is to be sent. Whoever grants leases (`Grants`) knows
turns by numbers of its own, in the order in which they came; here each is mapped to its gateway and that one's number.

A gateway is the truth about its own turns. At the beginning of each link it tells all of them, and what is told is
compared with what is known of it:

- a turn that runs, or ended, of which nothing is known was granted by another scheduler, or by the gateway itself: it
  is *adopted*, and its end, if it has one, counted;
- one that is held here and runs there is adopted too; one that was granted here and is held there is told its lease
  once more; one that ended there ends here;
- one that is known here, and was not told, is over.

A turn's end is counted once. Its number is kept until the gateway has heard the acknowledgement, which is known by the
number of the last frame that it heard, so that an end which is told again is acknowledged again and not counted.

Of two schedulers the one with the higher epoch leads. Without a store a scheduler takes its epoch from its gateways:
one more than the highest that any of them has seen of another leader. With one it has its epoch from there; a gateway
that has seen a higher one is not let in, and `on_higher` hears of it. A turn is acknowledged once it was written: what
is counted is told to `on_counted`, and `written` has it acknowledged.
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
"""Gateways are told the epoch above so many bits of a generation: what another scheduler counted is another."""

FORGET_S = 3600.0
"""A gateway that has had no link for so long is forgotten, and which of its ends were counted."""

EPOCH_JUMP = 2**24
"""No epoch is so far above the own one: that would be a new leader each second for half a year."""


class Gateways:
    """All gateways. What is decided of their turns is told here, and goes out by `frame`."""

    def __init__(self, grants: Grants, leader_id: int, on_news: Callable[[Gateway], None] = lambda _: None) -> None:
        """Begin with no gateway, and in no epoch; `leader_id` is of this run of the scheduler.

        `on_news` is called when there is something to send to a gateway.
        """
        self.epoch = 0
        self.leader_id = leader_id
        self.all: dict[str, Gateway] = {}
        """By their ids, the last run of each."""
        self.adopted_count = self.again_count = 0
        """Turns that were adopted, and ends that were told again after they had been counted."""
        self.on_counted: Callable[[Gateway, int], None] | None = None
        """Hears of each turn that was counted, and says later that it was `written`; None: there is no store."""
        self.on_higher: Callable[[int], None] | None = None
        """Hears of a higher epoch than this; None: this scheduler takes its epoch from its gateways."""
        self.on_polled: Callable[[Gateway, Polled], None] = lambda _gateway, _word: None
        """Hears what a gateway found at a replica that it polls."""
        self._tried_again = TriedAgain()
        self.trips = Trips(self.all, grants.tripped)
        self._grants = grants
        self._on_news = on_news
        self._served: dict[str, set[str]] = {}
        """Which gateways carried turns of a program."""
        self._by_own_id: dict[int, tuple[Gateway, int]] = {}

    def __repr__(self) -> str:
        return f"<Gateways, epoch {self.epoch}: {len(self.all)}, {len(self._by_own_id)} turns>"

    @property
    def turns_count(self) -> int:
        """Turns of all gateways that are held or run."""
        return len(self._by_own_id)

    # --- links

    def linked(self, hello: Hello) -> Gateway:
        """Begin a link of a gateway. Raises `BadFrameError` if it has a later one already, or knows a higher epoch."""
        self._check_jump(hello.highest_epoch)
        is_ours = hello.leader_id == self.leader_id
        is_higher = hello.highest_epoch > self.epoch or (hello.highest_epoch == self.epoch and not is_ours)
        if is_higher and self.on_higher is not None:
            self.on_higher(hello.highest_epoch)
            raise BadFrameError(f"{hello.gateway_id} knows of epoch {hello.highest_epoch}, this is {self.epoch}")
        gateway = self.all.get(hello.gateway_id)
        if gateway is not None and gateway.boot_id != hello.boot_id:
            self.lose(gateway)  # its sockets went with its process
            gateway = None
        if gateway is None:
            gateway = self.all[hello.gateway_id] = Gateway(hello.gateway_id, hello.boot_id)
        gateway.linked(hello.link_number)
        if is_higher:
            self.leads_in(hello.highest_epoch + 1)
        else:
            self.say(gateway, Lead(self.leader_id))
        return gateway

    def deposed(self, epoch: int) -> None:
        """Hear of a higher epoch from a gateway that follows another one. Raises `BadFrameError` if none is so high."""
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
        """Know a gateway of another scheduler, and which of its turns that one has counted."""
        gateway = self.all[gateway_id] = Gateway(gateway_id, boot_id)
        gateway.counted = dict.fromkeys(counted_ids, 0)
        gateway.lost_since_s = now_s

    def unlinked(self, gateway: Gateway, link_number: int, now_s: float) -> None:
        """End a link; the gateway's turns stay until it is lost. One that has a later link is not concerned."""
        if gateway.link_number == link_number:
            gateway.is_linked, gateway.lost_since_s = False, now_s
            self.trips.went()

    def lose_silent(self, now_s: float, limit_s: float) -> list[Gateway]:
        """Take the turns of gateways for over that have had no link for `limit_s`; return which."""
        lost = [each for each in self.all.values() if each.lost_since_s is not None]
        lost = [each for each in lost if each.turns or each.tripped_ids]
        lost = [each for each in lost if now_s - (each.lost_since_s or 0.0) >= limit_s]
        for gateway in lost:
            self.lose(gateway)
        for gateway in list(self.all.values()):
            if gateway.lost_since_s is not None and now_s - gateway.lost_since_s >= max(limit_s, FORGET_S):
                del self.all[gateway.gateway_id]
        return lost

    def lose(self, gateway: Gateway) -> None:
        """Take all turns of a gateway for over; should it come again, it tells them."""
        for turn_id in list(gateway.turns):
            self._over(gateway, turn_id)
        self.trips.are(gateway, ())

    def _saw(self, gateway: Gateway, digest: Digest | Polled) -> None:
        if isinstance(digest, Polled):
            self.on_polled(gateway, digest)
        elif digest.seen == "tripped":
            self.trips.are(gateway, gateway.tripped_ids | {digest.replica_id})
        elif digest.seen == "tried":
            self.trips.are(gateway, gateway.tripped_ids - {digest.replica_id})
        else:
            self._grants.seen(digest)

    def _over(self, gateway: Gateway, turn_id: int) -> None:
        """End a turn of which its gateway will say nothing more; what others get for it may have ended it by now."""
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
        """Return what is to be sent to a gateway now."""
        return gateway.frame(self.epoch)

    def say(self, gateway: Gateway, message: Message) -> None:
        """Tell a gateway something, if it has a link."""
        if gateway.is_linked:
            gateway.outbox.append(message)
            self._on_news(gateway)

    def say_to_all(self, message: Message) -> None:
        """Tell all gateways something."""
        for gateway in self.all.values():
            self.say(gateway, message)

    # --- what gateways say

    def take(self, gateway: Gateway, frame: Frame) -> None:
        """Take in what came by a gateway's link, but for its `Hello`.

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
                pass  # the first message of the link, which is heard before
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
        """Have another gateway end an earlier attempt, and `ask` wait for that; False if no other one has it."""
        of = self._by_own_id.get(earlier_id)
        if of is None or of[0] is gateway or not of[0].is_linked:
            return False
        self._tried_again.waits(ask, earlier_id)
        self._grants.tried_again(earlier_id)
        self.say(of[0], Revoke(of[1], ask.program_id or ""))
        self.held(ask.turn_id)
        return True

    def _left(self, own_id: int) -> None:
        if not self._tried_again.left(own_id):
            self._grants.left(own_id)

    def _is_over(self, own_id: int) -> None:
        """Ask for what waited until a turn is over; call it once whoever grants knows that."""
        for ask in self._tried_again.over(own_id):
            self._goes_on(replace(ask, supersedes_id=own_id))

    def _goes_on(self, ask: TurnAsk) -> None:
        if ask.turn_id in self._by_own_id:
            self._grants.asked(ask.turn_id, ask)

    def look(self) -> None:
        """Look for turns that wait for an earlier attempt which does not end; call it now and then."""
        for ask in self._tried_again.late():
            self._goes_on(ask)

    def _ended(self, gateway: Gateway, end: TurnEnd, running: Running | None = None) -> None:
        """Count how a turn ended, once, and acknowledge it."""
        turn_id = end.turn_id
        if turn_id in gateway.counted:
            self.again_count += 1
        elif turn_id in gateway.turns or running is not None:
            if running is not None:
                self._runs(gateway, running)
            own_id, lease = gateway.turns[turn_id].own_id, gateway.turns[turn_id].lease
            self._drop(gateway, turn_id)
            if end.outcome != "finished":
                gateway.lost(turn_id, own_id)
            if lease is None:  # it ran by no leave that was heard of
                self._left(own_id)
            else:
                self._grants.ended(own_id, end)
            self._is_over(own_id)
        gateway.counted[turn_id] = 0
        if self.on_counted is not None:
            self.on_counted(gateway, turn_id)
        else:
            self.written(gateway.gateway_id, turn_id)

    def written(self, gateway_id: str, turn_id: int) -> None:
        """Acknowledge a turn that was counted; nothing happens if its gateway is gone, or knows it."""
        gateway = self.all.get(gateway_id)
        if gateway is not None and turn_id in gateway.counted:
            gateway.uncounted_ids.append(turn_id)
            self._on_news(gateway)

    def _runs(self, gateway: Gateway, running: Running) -> None:
        """Have a turn run where its gateway says that it does."""
        turn_id, lease = running.ask.turn_id, running.lease
        known = gateway.turns.get(turn_id)
        if known is not None and known.lease is not None and known.lease.replica_id == lease.replica_id:
            return
        if known is not None:
            self._over(gateway, turn_id)
        turn = self._new(gateway, turn_id)
        self._tried_again.comes(replace(running.ask, turn_id=turn.own_id))
        turn.lease = lease
        self.adopted_count += 1
        self._serves(gateway, lease)
        self._grants.adopted(turn.own_id, running)

    def _told(self, gateway: Gateway, turns: Turns) -> None:
        """Compare what a gateway has with what is known of it."""
        for running in turns.running:
            gateway.told_ids.add(running.ask.turn_id)
            if running.end is not None:
                self._ended(gateway, running.end, running)
            else:
                self._runs(gateway, running)
        for ask in turns.held:
            gateway.told_ids.add(ask.turn_id)
            self._asked(gateway, ask)
        for card in turns.cards:
            self._served.setdefault(card.program_id, set()).add(gateway.gateway_id)
            self._grants.card(card)

    def _all_told(self, gateway: Gateway) -> None:
        """End what the gateway no longer has."""
        for turn_id in [each for each in gateway.turns if each not in gateway.told_ids]:
            self._over(gateway, turn_id)
        gateway.all_told()

    # --- what is decided; nothing happens for turns that are over

    def granted(self, own_id: int, lease: Lease) -> bool:
        """Tell a gateway of a lease; False if its turn is over."""
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
        """Return the word with the generation as the core has it; of another epoch's whichever lives is meant."""
        if word.generation is None:
            return word
        is_ours = word.generation >> GENERATION_BITS == self.epoch
        return replace(word, generation=word.generation & ((1 << GENERATION_BITS) - 1) if is_ours else None)

    def program_ended(self, program_id: str) -> None:
        """Tell those who carried turns of a program that it ended."""
        for gateway_id in self._served.pop(program_id, ()):
            if gateway_id in self.all:
                self.say(self.all[gateway_id], Gone(program_id))

    def held(self, own_id: int) -> None:
        """Tell a gateway that a turn is held."""
        if (of := self._by_own_id.get(own_id)) is not None:
            self.say(of[0], Hold(of[1]))

    def refused(self, own_id: int, code: str, message: str, retry_after_s: int | None = None) -> None:
        """Tell a gateway that there will be no lease."""
        if (of := self._by_own_id.get(own_id)) is not None:
            gateway, turn_id = of
            self._drop(gateway, turn_id)
            self.say(gateway, Refusal(turn_id, code, message, retry_after_s))
            self._is_over(own_id)

    def is_known(self, own_id: int) -> bool:
        """Say whether a turn is held or runs."""
        return own_id in self._by_own_id
