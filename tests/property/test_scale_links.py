"""Gateways, links that lose, double and delay frames, and schedulers that restart, in virtual time."""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest

from thunderagent.errors import BadFrameError
from thunderagent.leases import Lease, TurnAsk, TurnEnd
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.messages import (
    Card,
    Digest,
    Frame,
    Hello,
    Progress,
    Refusal,
    Released,
    Revoke,
    Running,
    decode,
    encode,
)
from thunderagent.scale.scheduler.gateway import Gateway
from thunderagent.scale.scheduler.gateways import Gateways

SEEDS_COUNT = int(os.environ.get("SCALE_SEEDS", "60"))
CAPACITY_COUNT = 4
LOST_AFTER_S = 5.0
TURNS_COUNT = 40


class Time:
    """The virtual clock and its schedule."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_s + delay_s, next(self._numbers), do))

    def run(self, until_s: float) -> None:
        while self._agenda and self._agenda[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._agenda)
            do()
        self.now_s = until_s


class Ledger:
    """A scheduler's core: a limit of concurrent turns, first come, first served; ended turns are counted."""

    def __init__(self) -> None:
        self.ids = count(1)
        self.gateways = Gateways(self, leader_id=random.getrandbits(30))
        self.waiting: deque[int] = deque()
        self.asks: dict[int, TurnAsk] = {}
        self.in_flight: set[int] = set()
        self.over_ids: set[int] = set()
        self.usage: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        self.tripped_ids: set[str] = set()

    def new_turn_id(self) -> int:
        return next(self.ids)

    def asked(self, turn_id: int, ask: TurnAsk) -> None:
        self.waiting.append(turn_id)
        self.asks[turn_id] = ask
        self.gateways.held(turn_id)
        self.grant()

    def grant(self) -> None:
        while self.waiting and len(self.in_flight) < CAPACITY_COUNT:
            turn_id = self.waiting.popleft()
            ask = self.asks.pop(turn_id)
            self.in_flight.add(turn_id)
            if ask.role == "refuse":
                self.in_flight.discard(turn_id)
                self.gateways.refused(turn_id, "no_replica", "no")
            else:
                lease = Lease(turn_id, ask.program_id, 1, "r0", "", None, "fits", 0.0)
                assert self.gateways.granted(turn_id, lease), "granted to nobody"

    def adopted(self, turn_id: int, running: Running) -> None:
        assert turn_id not in self.in_flight
        self.in_flight.add(turn_id)

    def progressed(self, turn_id: int, progress: Progress) -> None:
        assert turn_id in self.in_flight, "progress of a turn without a lease"

    def ended(self, turn_id: int, end: TurnEnd) -> None:
        self.over_ids.add(turn_id)
        assert turn_id in self.in_flight, "a lease came back that was not given"
        self.in_flight.discard(turn_id)
        if end.outcome == "finished":
            self.usage[end.program_id or ""] += end.output_tokens or 0
            self.counted[end.program_id or ""] += 1
        self.grant()

    def left(self, turn_id: int) -> None:
        self.over_ids.add(turn_id)
        self.waiting.remove(turn_id)
        del self.asks[turn_id]

    def tried_again(self, turn_id: int) -> None:
        assert turn_id not in self.over_ids, "a turn that is over is ended once more"

    def released(self, word: Released) -> None:
        pass

    def card(self, card: Card) -> None:
        pass

    def seen(self, digest: Digest) -> None:
        pass

    def tripped(self, replica_id: str, *, tripped: bool) -> None:
        (self.tripped_ids.add if tripped else self.tripped_ids.discard)(replica_id)

    def recovered(self, replica_id: str) -> None: ...


@dataclass
class Link:
    """One connection: frames arrive in order, each after some time, until it is cut; then the rest is lost."""

    number: int
    is_cut: bool = False
    last_s: dict[str, float] = field(default_factory=dict)
    at_scheduler: Gateway | None = None


class World:
    """Gateways with clients, their links, and the scheduler of the moment."""

    def __init__(self, seed: int, *, is_calm: bool = False) -> None:
        self.random = random.Random(seed)
        self.is_calm = is_calm
        """Whether no frame is lost."""
        self.time = Time()
        self.ledger: Ledger | None = Ledger()
        self.past: list[Ledger] = []
        self.beside_each_other: list[str] = []
        """Turns of which two attempts ran at once."""
        self.gateways = [Client(self, f"g{number}") for number in range(3)]

    def kill_scheduler(self, for_s: float) -> None:
        if self.ledger is None:
            return
        self.past.append(self.ledger)
        self.ledger = None
        for each in self.gateways:
            each.cut()
        self.time.after(for_s, self.start_scheduler)

    def start_scheduler(self) -> None:
        self.ledger = Ledger()

    def flush(self) -> None:
        """Send gateways their scheduler's messages."""
        for each in self.gateways:
            gateway = each.link.at_scheduler if each.link is not None else None
            if self.ledger is not None and each.link is not None and gateway is not None and gateway.has_news:
                each.send(each.link, "down", encode(self.ledger.gateways.frame(gateway)))


class Client:
    """A gateway, and the clients that come to it."""

    def __init__(self, world: World, gateway_id: str) -> None:
        self.world = world
        self.turns = CarriedTurns(gateway_id, boot_id=world.random.getrandbits(30))
        self.link: Link | None = None
        self.started: Counter[int] = Counter()
        self.refused: set[int] = set()
        self.abandoned: set[int] = set()
        self.finished: set[int] = set()
        self.untold: set[int] = set()
        """Turns that began without a lease while a link began: their scheduler may learn only of their ends."""
        self.epochs: list[int] = []
        self.asked_ids: set[int] = set()
        world.time.after(0.0, self.connect)

    # --- its clients

    def ask(self, turn_id: int, attempt_key: str = "") -> None:
        role = "refuse" if self.world.random.random() < 0.1 else ""
        self.asked_ids.add(turn_id)
        program_id = f"{self.turns.gateway_id}-{turn_id}"
        asked = TurnAsk(turn_id=turn_id, program_id=program_id, role=role, attempt_key=attempt_key)
        self.turns.asked(asked, self.world.time.now_s)
        self.flush()
        if self.world.random.random() < 0.15:
            self.world.time.after(self.world.random.expovariate(1.0), lambda: self.give_up(turn_id))

    def give_up(self, turn_id: int) -> None:
        row = self.turns.rows.get(turn_id)
        if row is None or row.end is not None:
            return
        self.abandoned.add(turn_id)
        if row.lease is None:
            self.turns.left(turn_id)
        else:
            self.turns.ended(TurnEnd(turn_id, row.lease.program_id, 1, "abandoned"))
        self.flush()

    def run(self, turn_id: int) -> None:
        self.started[turn_id] += 1
        if key := self.turns.rows[turn_id].ask.attempt_key:
            rows = [row for each in self.world.gateways for row in each.turns.rows.values()]
            if sum(row.ask.attempt_key == key and row.lease is not None and row.end is None for row in rows) > 1:
                self.world.beside_each_other.append(key)
        self.turns.progressed(turn_id)
        self.world.time.after(self.world.random.expovariate(2.0), lambda: self.finish(turn_id))

    def finish(self, turn_id: int) -> None:
        row = self.turns.rows.get(turn_id)
        if row is None or row.end is not None:
            return
        self.finished.add(turn_id)
        self.turns.ended(TurnEnd(turn_id, f"{self.turns.gateway_id}-{turn_id}", 1, "finished", 5, 7))
        self.flush()

    def fail_open(self) -> None:
        """Run held turns without a lease; even between a link's begin and its lead, where a gateway must not do so."""
        if self.turns.is_led:
            return
        for turn_id, row in list(self.turns.rows.items()):
            if row.lease is None and row.ask.role != "refuse":
                lease = Lease(turn_id, row.ask.program_id, 0, "r1", "", None, "fail_open", 0.0)
                self.turns.granted_here(turn_id, lease)
                self.run(turn_id)
                if self.turns.is_linked:
                    self.untold.add(turn_id)

    # --- its link

    def connect(self) -> None:
        if self.link is not None:
            return
        if self.world.ledger is None:
            self.world.time.after(0.3, self.connect)
            return
        self.turns.linked(self.world.time.now_s)
        self.link = Link(self.turns.link_number)
        self.flush()
        if self.turns.link_number > 1 and self.world.random.random() < 0.2:
            self.fail_open()

    def cut(self) -> None:
        link, self.link = self.link, None
        if link is None:
            return
        link.is_cut = True
        self.turns.unlinked()
        ledger = self.world.ledger
        if ledger is not None and link.at_scheduler is not None:
            # the other side may notice much later, or only by the next link
            number, gateway = link.number, link.at_scheduler
            self.world.time.after(
                self.world.random.choice([0.0, 2.0]),
                lambda: ledger.gateways.unlinked(gateway, number, self.world.time.now_s),
            )
        self.world.time.after(self.world.random.choice([0.01, 0.5, 8.0]), self.connect)

    def flush(self) -> None:
        while self.link is not None and self.turns.has_news:
            self.send(self.link, "up", encode(self.turns.frame()))
            if self.world.random.random() < 0.3:  # other tasks run before everything is reported
                self.world.time.after(self.world.random.expovariate(20.0), self.flush)
                return

    def send(self, link: Link, way: str, data: bytes) -> None:
        """Send a frame: sometimes twice, sometimes not at all; then its connection does not last."""
        chance = 1.0 if self.world.is_calm else self.world.random.random()
        if chance < 0.005:
            self.world.time.after(self.world.random.uniform(0, 6), lambda: self.cut() if self.link is link else None)
        for _ in range(0 if chance < 0.005 else 2 if chance < 0.02 else 1):
            arrives_s = max(link.last_s.get(way, 0.0), self.world.time.now_s + self.world.random.expovariate(50.0))
            link.last_s[way] = arrives_s
            self.world.time.after(arrives_s - self.world.time.now_s, lambda: self.arrives(link, way, data))

    def arrives(self, link: Link, way: str, data: bytes) -> None:
        ledger = self.world.ledger
        if ledger is None or (link.is_cut and (way == "down" or self.world.random.random() < 0.5)):
            return
        frame, dropped_count = decode(data)
        assert not dropped_count
        try:
            if way == "down":
                self.hear(frame)
            elif not self.is_heard(ledger, link, frame):
                return
        except BadFrameError:
            self.cut()
            return
        self.world.flush()

    def hear(self, frame: Frame) -> None:
        for message in self.turns.take(frame):
            if isinstance(message, Lease):
                self.run(message.turn_id)
            elif isinstance(message, Refusal):
                self.refused.add(message.turn_id)
            elif isinstance(message, Revoke):
                self.give_up(message.turn_id)
        self.epochs.append(self.turns.epoch)
        self.flush()

    def is_heard(self, ledger: Ledger, link: Link, frame: Frame) -> bool:
        """Pass a frame to the scheduler; return False if its link is over."""
        if link.at_scheduler is None:
            hello = frame.messages[0]
            if link.is_cut or not isinstance(hello, Hello):
                return False
            link.at_scheduler = ledger.gateways.linked(hello)
        gateway = link.at_scheduler
        is_known = gateway in ledger.gateways.all.values() and gateway.is_linked
        if not is_known or gateway.link_number != link.number:
            return False  # its reader has ended
        ledger.gateways.take(gateway, frame)
        return True


def ask_now_and_then(world: World, gateway: Client, within_s: float) -> None:
    """Make clients take turns; some retry through another gateway while the earlier attempt runs."""
    for turn_id in range(1, TURNS_COUNT + 1):
        at_s, attempt_key = world.random.uniform(0, within_s), ""
        if world.random.random() < 0.3:
            attempt_key = f"{gateway.turns.gateway_id} {turn_id}"
            others = [each for each in world.gateways if each is not gateway]
            for number, other in enumerate(world.random.sample(others, world.random.randrange(1, 3)), 1):
                again_id = number * 1000 + 100 * world.gateways.index(gateway) + turn_id
                world.time.after(at_s + world.random.expovariate(2.0), partial(other.ask, again_id, attempt_key))
        world.time.after(at_s, partial(gateway.ask, turn_id, attempt_key))


def busy_world(seed: int) -> World:
    """A world in which much will go wrong within 35 seconds."""
    world = World(seed)
    for gateway in world.gateways:
        ask_now_and_then(world, gateway, 30.0)
        for _ in range(world.random.randrange(6)):
            world.time.after(world.random.uniform(0, 35), gateway.cut)
        if world.random.random() < 0.5:
            world.time.after(world.random.uniform(5, 35), gateway.fail_open)
    for _ in range(world.random.randrange(4)):
        for_s = world.random.choice([0.1, 2.0, 10.0])
        world.time.after(world.random.uniform(0, 35), partial(world.kill_scheduler, for_s))
    return world


@pytest.mark.parametrize("seed", range(SEEDS_COUNT))
def test_no_lease_is_lost_or_leaked_and_no_usage_counted_twice(seed: int) -> None:
    """Whatever is cut, doubled, lost or restarted: a turn starts once, and each scheduler counts its end once."""
    world = busy_world(seed)
    for tick in range(600):
        world.time.run(float(tick) / 4)
        if world.ledger is not None:
            for gateway in world.ledger.gateways.lose_silent(world.time.now_s, LOST_AFTER_S):
                assert not gateway.is_linked
        world.flush()

    ledger = world.ledger
    assert ledger is not None
    for client in world.gateways:
        check(client, [*world.past, ledger])
    assert not ledger.in_flight, "leases are leaked"
    assert not ledger.waiting, "turns are held for nobody"
    assert not ledger.gateways.turns_count
    assert sum(ledger.usage.values()) == 7 * sum(ledger.counted.values())


def check(client: Client, ledgers: list[Ledger]) -> None:
    """Check that every turn of a gateway got one answer, and was counted once."""
    assert not client.turns.rows, f"rows are left: {client.turns.rows}"
    assert all(number == 1 for number in client.started.values()), "a turn was started twice"
    assert client.finished | client.refused | client.abandoned == client.asked_ids, "a turn got no answer"
    assert client.epochs == sorted(client.epochs), "an epoch fell"
    for turn_id in client.finished:
        counts = [ledger.counted[f"{client.turns.gateway_id}-{turn_id}"] for ledger in ledgers]
        is_counted = max(counts) == 1 or (turn_id in client.untold and not any(counts))
        assert is_counted, f"turn {turn_id} of {client!r} was counted {counts}"


@pytest.mark.parametrize("seed", range(SEEDS_COUNT // 4))
def test_no_two_attempts_at_a_turn_run_at_once(seed: int) -> None:
    """The gateway of the earlier one ends it, wherever the next one arrived, and only then does the next one run."""
    world = World(seed, is_calm=True)
    for gateway in world.gateways:
        ask_now_and_then(world, gateway, 15.0)
    for tick in range(200):
        world.time.run(float(tick) / 4)
        assert world.ledger is not None
        world.ledger.gateways.look()
        world.flush()
    assert not world.beside_each_other
    for client in world.gateways:
        check(client, [world.ledger])
    assert any(client.abandoned for client in world.gateways)
    assert not world.ledger.gateways.turns_count
