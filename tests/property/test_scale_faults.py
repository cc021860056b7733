"""The faults of `tests/real/test_faults.py` in virtual time, each over seeds, on cells that may keep 100,000 programs.

A seed draws when its fault comes and whom it strikes. SCALE_SEEDS says how many seeds; SCALE_MANY_SEEDS of them begin
with SCALE_PROGRAMS programs that a leader before left in the log. Engines are not in it: links and stores are.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.property.test_scale_leaders import LOCK_S, SEEDS_COUNT, Carrier, Cell, Member, Store, check
from tests.property.test_scale_links import TURNS_COUNT
from thunderagent.errors import StoreError
from thunderagent.programs.messages import ProgramRecord
from thunderagent.scale.gateway.carried import CarriedTurns
from thunderagent.scale.leader.kept import At, Begins, Record, Whole, encode_record, entry_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.property.test_scale_links import Link

MANY_SEEDS_COUNT = int(os.environ.get("SCALE_MANY_SEEDS", "2"))
PROGRAMS_COUNT = int(os.environ.get("SCALE_PROGRAMS", "2000"))
AHEAD_S = {"clock ahead": 86_400.0, "clock behind": -86_400.0}
"""How far one scheduler's clock is ahead of the other's."""

HEARTBEAT_S = 3.0
"""A link that is silent for this long is given up."""


class Usage(Counter[str]):
    """The programs' usage, which tracks changes: very many programs need not be scanned."""

    def __init__(self, of: Counter[str]) -> None:
        super().__init__(of)
        self.changed: dict[str, None] = {}

    def __setitem__(self, name: str, tokens: int) -> None:
        super().__setitem__(name, tokens)
        if hasattr(self, "changed"):
            self.changed[name] = None


class Scheduler(Member):
    """A member of a cell that may have very many programs."""

    def lead(self) -> None:
        """Lead, and check that no program is older than the world, whatever clocks show."""
        assert all(record.age_s <= self.cell.time.now_s + 1e-6 for _, record in self.kept.programs(self.now_s))
        super().lead()
        assert self.ledger is not None
        self.ledger.usage = Usage(self.ledger.usage)

    def changes(self) -> list[Record]:
        """Yield the programs that changed."""
        assert self.ledger is not None
        usage = self.ledger.usage
        assert isinstance(usage, Usage)
        changed, usage.changed = usage.changed, {}
        return [At("", ProgramRecord(name, output_tokens_total=usage[name])) for name in changed]


class Gateway(Carrier):
    """A gateway that can be killed and can hang; its clients repeat unanswered requests."""

    is_dead = False
    slow_until_s = 0.0

    def die(self) -> None:
        """Lose everything, and restart empty a second later."""
        self.cut()
        self.is_dead = True
        again = [row.ask for row in self.turns.rows.values() if row.end is None]
        self.untold.update(turn_id for turn_id, row in self.turns.rows.items() if row.end is not None)
        self.turns = CarriedTurns(self.turns.gateway_id, boot_id=self.world.random.getrandbits(30))
        self.epochs = []

        def back() -> None:
            self.is_dead = False
            for ask in again:
                self.started.pop(ask.turn_id, None)  # its upstream was closed with the process
                self.turns.asked(ask, self.world.time.now_s)
            self.flush()

        self.world.time.after(1.0, back)

    def ask(self, turn_id: int) -> None:
        """Ask, and repeat if the gateway is down."""
        if self.is_dead:
            self.world.time.after(0.25, lambda: self.ask(turn_id))
        else:
            super().ask(turn_id)

    def run(self, turn_id: int) -> None:
        """Run a turn; this process must live until its end."""
        self.started[turn_id] += 1
        self.turns.progressed(turn_id)
        turns = self.turns
        later_s = self.world.random.expovariate(2.0)
        self.world.time.after(later_s, lambda: self.finish(turn_id) if self.turns is turns else None)

    def connect(self) -> None:
        """Look for the leader, while the gateway lives."""
        if self.is_dead:
            self.world.time.after(0.2, self.connect)
        else:
            super().connect()

    def send(self, link: Link, way: str, data: bytes) -> None:
        """Send; messages to a slow reader queue up."""
        if way == "down" and self.world.time.now_s < self.slow_until_s:
            link.last_s[way] = max(link.last_s.get(way, 0.0), self.world.time.now_s) + 0.2
        super().send(link, way, data)

    def silence(self, ways: tuple[str, ...], for_s: float) -> None:
        """Let nothing arrive for a while; a link that is silent for long is given up, and there is no other."""
        if self.link is None or self.at is None:
            return
        world, link, member = self.world, self.link, self.at
        for way in ways:
            link.last_s[way] = max(link.last_s.get(way, 0.0), world.time.now_s + for_s)
        if for_s > HEARTBEAT_S:
            world.cuts.add((self, member))
            world.time.after(HEARTBEAT_S, lambda: self.cut() if self.link is link else None)
            world.time.after(for_s, lambda: world.cuts.discard((self, member)))


class FaultyStore(Store):
    """A store that executes commands, but some of its answers are lost."""

    def __init__(self, world: Cell) -> None:
        super().__init__(world)
        self.deaf: set[str] = set()

    def _heard(self, name: str) -> None:
        if name in self.deaf:
            raise StoreError("it did as told, and nobody heard so")

    def take(self, name: str, owner: str, expected: str, least_epoch: int) -> int:
        """Take the lock; a scheduler that misses the answer still holds it, until it expires."""
        epoch = super().take(name, owner, expected, least_epoch)
        self._heard(name)
        return epoch

    def renew(self, name: str, owner: str, epoch: int) -> int:
        """Keep the lock."""
        kept = super().renew(name, owner, epoch)
        self._heard(name)
        return kept

    def append(self, name: str, owner: str, epoch: int, data: bytes) -> int:
        """Write an entry; it may be written again and again."""
        where = super().append(name, owner, epoch, data)
        self._heard(name)
        return where


class FaultyCell(Cell):
    """A cell with one fault, some seconds after its begin."""

    store: FaultyStore
    clients: list[Gateway]  # type: ignore[assignment]

    def __init__(self, name: str, seed: int, kept_count: int) -> None:
        self.members: list[Member] = []
        super().__init__(seed)
        self.store = FaultyStore(self)
        self.members[1].ahead_s = AHEAD_S.get(name, 0.0)
        self.keep(kept_count)
        for client in self.clients:
            for turn_id in range(1, TURNS_COUNT + 1):
                self.time.after(self.random.uniform(0, 30), partial(client.ask, turn_id))
        self.time.after(self.random.uniform(5, 25), partial(FAULTS[name], self))

    def new_member(self, name: str) -> Member:
        member = Scheduler(self, name)
        member.ahead_s = self.members[1].ahead_s if name == "b" and self.members else 0.0
        return member

    def new_client(self, gateway_id: str) -> Carrier:
        return Gateway(self, gateway_id)

    def keep(self, count: int) -> None:
        """Let an earlier leader leave programs in the log."""
        records: list[Record] = [At("", ProgramRecord(f"kept-{n}", output_tokens_total=7)) for n in range(count)]
        records = [Begins(), *records, Whole()]
        self.store.epoch = 1
        for first in range(0, len(records), 500):
            parts = [encode_record(each) for each in records[first : first + 500]]
            self.store.log.append((next(self.store.numbers), entry_of(1, 0.0, parts)))

    @property
    def leader(self) -> int:
        """The number of the leader; any scheduler, if there is none."""
        found = [n for n, each in enumerate(self.members) if each.role == "leader" and not each.is_dead]
        return max(found, key=lambda n: self.members[n].epoch, default=self.random.randrange(2))

    # --- what fails

    def kill_both(self) -> None:
        for number in range(2):
            self.kill(number, 1.0)

    def kill_leader_without_store(self) -> None:
        self.cut_from_store(("a", "b"), 4.0)
        self.kill(self.leader, 1.0)

    def kill_gateway(self) -> None:
        self.random.choice(self.clients).die()

    def kill_leader_and_gateway(self) -> None:
        self.kill_gateway()
        self.kill(self.leader, 1.0)

    def kill_in_resync(self) -> None:
        """Kill the leader, and the next one as soon as it leads."""
        first = self.leader
        self.kill(first, 2.0)

        def next_one() -> None:
            if self.members[1 - first].role == "leader":
                self.time.after(self.random.uniform(0.0, 0.2), lambda: self.kill(1 - first, 1.0))
            else:
                self.time.after(0.01, next_one)

        next_one()

    def kill_in_snapshot(self) -> None:
        """Kill the leader while it writes everything again."""
        self.store.epoch = 0
        self.time.after(self.random.uniform(0.0, LOCK_S), lambda: self.kill(self.leader, 1.0))

    def kill_twice(self) -> None:
        self.kill(self.leader, 0.1)
        self.time.after(LOCK_S / 4, lambda: self.kill(self.leader, 0.1))

    def silence(self, *ways: str, for_s: float) -> None:
        """Cut the leader and its gateways off from each other, in one or both directions."""
        for client in self.clients:
            client.silence(ways, for_s)

    def pause_gateway(self, for_s: float) -> None:
        self.random.choice(self.clients).silence(("up", "down"), for_s)

    def deafen(self, for_s: float) -> None:
        """Make the leader lose the store's answers."""
        name = self.members[self.leader].name
        self.store.deaf.add(name)
        self.time.after(for_s, lambda: self.store.deaf.discard(name))

    def mistake(self) -> None:
        """Make the standby believe that the leader's process is dead, which it is not."""
        if self.store.owner:
            self.members[1 - self.leader].candidacy.died(self.store.owner)

    def hand_to_and_fro(self) -> None:
        """Make each of the two schedulers, whose clocks are far apart, take over from the other."""
        self.kill(self.leader, 1.0)
        self.time.after(3 * LOCK_S, lambda: self.kill(self.leader, 1.0))

    def lose_all_with_leaders(self) -> None:
        self.lose_data()
        self.kill_both()

    def come_back_older(self) -> None:
        """Make the store lose the last half of its data, and the lock."""
        store = self.store
        store.log = store.log[: len(store.log) // 2]
        store.owner, store.epoch = None, max(0, store.epoch - self.random.randrange(2))

    def lose_epoch(self) -> None:
        self.store.epoch = 0

    def trim(self) -> None:
        """Have everything written again and the log trimmed before that, while the standby hangs; kill the leader."""
        self.pause(1 - self.leader, 2 * LOCK_S)
        self.store.epoch = 0
        self.time.after(3 * LOCK_S, lambda: self.kill(self.leader, 1.0))

    def burst(self) -> None:
        """Send as many extra turns at once as all others together: the arrivals of 30 s, which take 15."""
        for client in self.clients:
            client.turns_count = 2 * TURNS_COUNT
            for turn_id in range(TURNS_COUNT + 1, client.turns_count + 1):
                client.ask(turn_id)

    def slow_reader(self) -> None:
        """Make one gateway read slowly, and kill the leader meanwhile."""
        self.random.choice(self.clients).slow_until_s = self.time.now_s + 10.0
        self.time.after(2.0, lambda: self.kill(self.leader, 1.0))


FAULTS: dict[str, Callable[[FaultyCell], None]] = {
    "crash leader": lambda cell: cell.kill(cell.leader, 1.0),
    "crash standby": lambda cell: cell.kill(1 - cell.leader, 1.0),
    "crash gateway": FaultyCell.kill_gateway,
    "crash store": lambda cell: cell.cut_from_store(("a", "b"), 4.0),
    "crash both schedulers": FaultyCell.kill_both,
    "crash leader and store": FaultyCell.kill_leader_without_store,
    "crash leader and gateway": FaultyCell.kill_leader_and_gateway,
    "crash in resync": FaultyCell.kill_in_resync,
    "crash in snapshot": FaultyCell.kill_in_snapshot,
    "crash twice within a lock": FaultyCell.kill_twice,
    **{f"pause leader {s:g} s": partial(lambda cell, s: cell.pause(cell.leader, s), s=s) for s in (0.5, 2.0, 10.0)},
    **{f"pause standby {s:g} s": partial(lambda cell, s: cell.pause(1 - cell.leader, s), s=s) for s in (2.0, 10.0)},
    **{f"pause gateway {s:g} s": partial(FaultyCell.pause_gateway, for_s=s) for s in (0.5, 2.0, 10.0)},
    **{
        f"partition leader-store {s:g} s": partial(
            lambda cell, s: cell.cut_from_store((cell.members[cell.leader].name,), s), s=s
        )
        for s in (1.0, 5.0, 30.0)
    },
    **{f"partition leader deaf to store {s:g} s": partial(FaultyCell.deafen, for_s=s) for s in (1.0, 5.0)},
    **{
        f"partition leader-gateways {' and '.join(ways)} {s:g} s": partial(
            lambda cell, ways, s: cell.silence(*ways, for_s=s), ways=ways, s=s
        )
        for ways in (("up", "down"), ("up",), ("down",))
        for s in (1.0, 5.0, 30.0)
    },
    "partition standby wrong about the leader": FaultyCell.mistake,
    "clock ahead": FaultyCell.hand_to_and_fro,
    "clock behind": FaultyCell.hand_to_and_fro,
    "data lost": FaultyCell.lose_data,
    "data lost and both schedulers": FaultyCell.lose_all_with_leaders,
    "data older": FaultyCell.come_back_older,
    "data epoch deleted": FaultyCell.lose_epoch,
    "data log trimmed past the standby": FaultyCell.trim,
    "load burst": FaultyCell.burst,
    "load slow reader": FaultyCell.slow_reader,
}


@pytest.mark.parametrize("seed", range(SEEDS_COUNT))
def test_a_fault_loses_leaks_and_doubles_nothing(seed: int) -> None:
    """One fault after another, in turn with the seeds."""
    name = list(FAULTS)[seed % len(FAULTS)]
    kept_count = PROGRAMS_COUNT if seed < MANY_SEEDS_COUNT else 0
    cell = FaultyCell(name, seed, kept_count)
    ledger = check(cell)
    if not cell.lost_data:
        kept = sum(each.startswith("kept-") for each in ledger.usage)
        assert kept == kept_count, f"{name}: {kept} of {kept_count} programs are known"
