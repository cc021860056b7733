"""Two schedulers with a store, and gateways that find the one that leads: crashes, pauses and cuts in virtual time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from tests.property.test_scale_links import TURNS_COUNT, Client, Ledger, Link, Time, World
from thunderagent.errors import BadFrameError, FencedError, StoreError
from thunderagent.programs.messages import ProgramRecord
from thunderagent.scale.leader.candidacy import Candidacy
from thunderagent.scale.leader.journal import Journal
from thunderagent.scale.leader.kept import At, Counted, Kept, Linked, Record, Sums, decode
from thunderagent.scale.messages import decode as decode_frame
from thunderagent.scale.messages import encode as encode_frame
from thunderagent.scale.scheduler.gateway import Gateway

SEEDS_COUNT = int(os.environ.get("SCALE_SEEDS", "60"))
LOCK_S = 2.0
STEP_S = 0.05
LOST_AFTER_S = 5.0
END_S = 120.0


class Store:
    """A store that acts as the scripts on Redis, with its own clock; some answers get lost."""

    def __init__(self, world: Cell) -> None:
        self.world = world
        self.owner: str | None = None
        self.ends_s = 0.0
        self.epoch = 0
        self.log: list[tuple[int, bytes]] = []
        self.numbers = count(1)
        self.away: set[str] = set()
        """The schedulers that it does not answer."""

    def _answer(self, name: str) -> None:
        if name in self.away:
            raise StoreError("away")
        if self.owner and self.world.time.now_s >= self.ends_s:
            self.owner = None

    def take(self, name: str, owner: str, expected: str, least_epoch: int) -> int:
        self._answer(name)
        if self.owner not in (None, "", expected):
            return 0
        self.epoch = max(self.epoch, least_epoch) + 1
        self.owner, self.ends_s = owner, self.world.time.now_s + LOCK_S
        return self.epoch

    def renew(self, name: str, owner: str, epoch: int) -> int:
        self._answer(name)
        if self.owner != owner and (self.owner is not None or self.epoch > epoch):
            return 0
        known = self.epoch
        self.owner, self.ends_s, self.epoch = owner, self.world.time.now_s + LOCK_S, max(known, epoch)
        return 1 if known >= epoch else 2

    def append(self, name: str, owner: str, epoch: int, data: bytes) -> int:
        self._answer(name)
        if not self.epoch:
            raise StoreError("it lost its epoch")
        if self.epoch != epoch or self.owner not in (None, "", owner):
            raise FencedError("over")
        self.log.append((next(self.numbers), data))
        if self.world.random.random() < 0.02:
            raise StoreError("it did as told, and nobody heard so")
        return self.log[-1][0]

    def lose_all(self) -> None:
        self.owner, self.epoch, self.log = None, 0, []


class Member:
    """A scheduler's process. It mirrors `Leading`, on the parts that are real: lock, log, journal, gateways."""

    ahead_s = 0.0
    """How far its clock is ahead of the world's."""

    def __init__(self, cell: Cell, name: str) -> None:
        self.cell = cell
        self.name = name
        self.paused_until_s = 0.0
        self.is_dead = False
        self.begin()
        self.every(STEP_S, self.step)
        self.every(LOCK_S / 3, self.renew)

    @property
    def now_s(self) -> float:
        """What its clock says."""
        return self.cell.time.now_s + self.ahead_s

    def begin(self) -> None:
        """Stand by."""
        self.role, self.epoch, self.at = "standby", 0, 0
        self.owner = f"{self.name}-{self.cell.random.getrandbits(30)}"
        self.kept, self.candidacy = Kept(), Candidacy(LOCK_S)
        self.ledger: Ledger | None = None
        self.journal: Journal | None = None

    def every(self, period_s: float, do: Callable[[], None]) -> None:
        def again() -> None:
            if self.is_dead:
                return
            if (wait_s := self.paused_until_s - self.cell.time.now_s) > 0:
                self.cell.time.after(wait_s, again)
                return
            do()
            self.cell.time.after(period_s, again)

        self.cell.time.after(0.0, again)

    def step(self) -> None:
        try:
            if self.role == "leader":
                self.write()
            else:
                self.look()
        except FencedError:
            self.step_down()
        except StoreError:
            self.candidacy.failed()

    # --- standing by

    def read(self) -> None:
        store = self.cell.store
        store._answer(self.name)
        for number, data in store.log:
            if number > self.at:
                self.at = number
                self.kept.take(decode(data), self.now_s)

    def look(self) -> None:
        self.read()
        store, now_s = self.cell.store, self.now_s
        dead = next((each.owner for each in self.cell.dead if each.owner == store.owner), None)
        if dead is not None:
            self.candidacy.died(dead)
        expected = self.candidacy.may_take(store.owner, store.epoch, now_s)
        if expected is not None and (epoch := store.take(self.name, self.owner, expected, self.kept.epoch)):
            self.epoch = epoch
            self.read()
            self.lead()

    def lead(self) -> None:
        self.role = "leader"
        self.ledger = ledger = Ledger()
        for _, record in self.kept.programs(self.now_s):
            ledger.usage[record.program_id] = record.output_tokens_total
        ledger.counted.update(self.kept.sums.outcome_counts)
        gateways = ledger.gateways
        for gateway_id, gateway in self.kept.gateways.items():
            gateways.knows(gateway_id, gateway.boot_id, gateway.counted, self.cell.time.now_s)
        gateways.leads_in(self.epoch)
        self.journal = Journal(
            self.epoch, changes=self.changes, everything=self.everything, sums=lambda: Sums(dict(ledger.counted))
        )
        self.told = Counter[str]()
        gateways.on_counted, gateways.on_higher = self.counted, self.heard_higher

    # --- leading

    def renew(self) -> None:
        if self.role != "leader":
            return
        try:
            kept = self.cell.store.renew(self.name, self.owner, self.epoch)
        except StoreError:
            return
        if not kept:
            self.step_down()
        elif kept == 2 and self.journal is not None:
            self.journal.tell_all()

    def heard_higher(self, epoch: int) -> None:
        try:
            kept = self.cell.store.renew(self.name, self.owner, self.epoch)
            if kept == 2 and self.journal is not None:
                self.journal.tell_all()
            kept = kept and self.cell.store.renew(self.name, self.owner, epoch + 1)
        except StoreError:
            kept = 0
        if not kept or self.journal is None or self.ledger is None:
            self.step_down()
            return
        self.epoch = self.journal.epoch = epoch + 1
        self.ledger.gateways.leads_in(self.epoch)

    def step_down(self) -> None:
        for client in self.cell.clients:
            if client.at is self:
                client.cut()
        self.begin()

    def counted(self, gateway: Gateway, turn_id: int) -> None:
        if self.journal is not None and self.ledger is not None:
            for turn in self.journal.counted(gateway.gateway_id, turn_id):
                self.ledger.gateways.written(*turn)

    def changes(self) -> list[Record]:
        assert self.ledger is not None
        changed = {name: tokens for name, tokens in self.ledger.usage.items() if self.told[name] != tokens}
        self.told.update(Counter(changed) - self.told)
        return [At("", ProgramRecord(name, output_tokens_total=tokens)) for name, tokens in changed.items()]

    def everything(self) -> list[Record]:
        assert self.ledger is not None
        records: list[Record] = []
        for gateway in self.ledger.gateways.all.values():
            records += [
                Linked(gateway.gateway_id, gateway.boot_id),
                Counted(gateway.gateway_id, tuple(gateway.counted)),
            ]
        self.told = Counter(self.ledger.usage)
        return [*records, *(At("", ProgramRecord(name, output_tokens_total=n)) for name, n in self.told.items())]

    def write(self) -> None:
        assert self.journal is not None
        assert self.ledger is not None
        while (entry := self.journal.entry(self.now_s)) is not None:
            where = self.cell.store.append(self.name, self.owner, self.epoch, entry)
            for turn in self.journal.was_written(str(where)):
                self.ledger.gateways.written(*turn)
            if (first := self.journal.tells_from) is not None:
                self.cell.store.log = [each for each in self.cell.store.log if each[0] >= int(first)]
                self.journal.tells_from = None
            if not self.journal.has_more:
                break
        self.cell.flush(self)

    def look_for_lost(self) -> None:
        if self.ledger is not None:
            self.ledger.gateways.lose_silent(self.cell.time.now_s, LOST_AFTER_S)


class Carrier(Client):
    """A gateway with the addresses of both schedulers."""

    world: Cell
    at: Member | None = None
    turns_count = TURNS_COUNT

    def connect(self) -> None:
        """Follow any leader with a higher epoch than known so far; tell outdated ones that they are over. Repeat."""
        self.world.time.after(0.2, self.connect)
        now_s = self.world.time.now_s
        for member in self.world.members:
            cannot = member.is_dead or member.paused_until_s > now_s or (self, member) in self.world.cuts
            if cannot or member.role != "leader" or member is self.at:
                continue
            if member.epoch > self.turns.epoch or (self.link is None and member.epoch == self.turns.epoch):
                self.cut()
                self.turns.linked(now_s)
                self.link, self.at = Link(self.turns.link_number), member
                self.flush()
            elif member.epoch < self.turns.epoch:
                member.heard_higher(self.turns.epoch)

    def cut(self) -> None:
        link, member, self.link, self.at = self.link, self.at, None, None
        if link is None or member is None:
            return
        link.is_cut = True
        self.turns.unlinked()
        ledger, gateway = member.ledger, link.at_scheduler
        if ledger is not None and gateway is not None:
            delay_s = self.world.random.choice([0.0, 2.0])
            self.world.time.after(
                delay_s, lambda: ledger.gateways.unlinked(gateway, link.number, self.world.time.now_s)
            )

    def arrives(self, link: Link, way: str, data: bytes) -> None:
        member = self.world.by_link.setdefault(id(link), (link, self.at))[1]
        if member is None or (link.is_cut and (way == "down" or self.world.random.random() < 0.5)):
            return
        if way == "up" and (wait_s := member.paused_until_s - self.world.time.now_s) > 0:
            self.world.time.after(wait_s, lambda: self.arrives(link, way, data))
            return
        frame, _ = decode_frame(data)
        try:
            if way == "down":
                self.hear(frame)
            elif member.is_dead or member.ledger is None or not self.is_heard(member.ledger, link, frame):
                return
            elif frame.number == 1 and member.journal is not None:
                member.journal.linked(self.turns.gateway_id, self.turns.boot_id)
        except BadFrameError:
            if self.link is link:
                self.cut()
            return
        self.world.flush(member)


class Cell(World):
    """Gateways, two schedulers and a store; what fails when is drawn from the seed."""

    def __init__(self, seed: int) -> None:
        self.clients: list[Carrier] = []
        super().__init__(seed)
        self.time = Time()
        self.by_link: dict[int, tuple[Link, Member | None]] = {}
        self.cuts: set[tuple[Carrier, Member]] = set()
        self.dead: list[Member] = []
        self.lost_data = False
        self.store = Store(self)
        self.members = [self.new_member("a"), self.new_member("b")]
        self.clients = [self.new_client(f"g{number}") for number in range(3)]

    def new_member(self, name: str) -> Member:
        return Member(self, name)

    def new_client(self, gateway_id: str) -> Carrier:
        return Carrier(self, gateway_id)

    def flush(self, member: Member | None = None) -> None:
        for each in self.clients:
            gateway = each.link.at_scheduler if each.link is not None else None
            ledger = each.at.ledger if each.at is not None else None
            known = ledger is not None and gateway in ledger.gateways.all.values()
            if known and ledger is not None and each.link is not None and gateway is not None and gateway.has_news:
                each.send(each.link, "down", encode_frame(ledger.gateways.frame(gateway)))

    # --- what fails

    def kill(self, number: int, for_s: float) -> None:
        member = self.members[number]
        if member.is_dead:
            return
        member.is_dead = True
        self.dead.append(member)
        for client in self.clients:
            if client.at is member:
                client.cut()
        self.time.after(for_s, lambda: self.members.__setitem__(number, self.new_member(member.name)))

    def pause(self, number: int, for_s: float) -> None:
        self.members[number].paused_until_s = self.time.now_s + for_s

    def cut_from_store(self, names: tuple[str, ...], for_s: float) -> None:
        self.store.away.update(names)
        self.time.after(for_s, lambda: self.store.away.difference_update(names))

    def cut_links(self, number: int, for_s: float) -> None:
        member = self.members[number]
        pairs = {(client, member) for client in self.clients if self.random.random() < 0.7}
        self.cuts |= pairs
        for client in self.clients:
            if (client, client.at) in pairs:
                client.cut()
        self.time.after(for_s, lambda: self.cuts.difference_update(pairs))

    def lose_data(self) -> None:
        self.lost_data = True
        self.store.lose_all()


def a_cell(seed: int) -> Cell:
    """A cell in which much goes wrong within 35 seconds."""
    cell = Cell(seed)
    draw = cell.random
    for client in cell.clients:
        for turn_id in range(1, TURNS_COUNT + 1):
            cell.time.after(draw.uniform(0, 30), partial(client.ask, turn_id))
        for _ in range(draw.randrange(3)):
            cell.time.after(draw.uniform(0, 35), client.cut)
        if draw.random() < 0.3:
            cell.time.after(draw.uniform(5, 35), client.fail_open)
    for _ in range(draw.randrange(1, 7)):
        number, for_s = draw.randrange(2), draw.choice([0.5, 3.0, 10.0])
        faults: list[Callable[[], None]] = [
            partial(cell.kill, number, for_s),
            partial(cell.kill, number, for_s),
            partial(cell.pause, number, for_s),
            partial(cell.cut_from_store, draw.choice([("a",), ("b",), ("a", "b")]), for_s),
            partial(cell.cut_links, number, for_s),
        ]
        if draw.random() < 0.1:
            faults = [cell.lose_data]
        cell.time.after(draw.uniform(1, 35), draw.choice(faults))
    return cell


@pytest.mark.parametrize("seed", range(SEEDS_COUNT))
def test_cell_loses_leaks_and_double_counts_nothing_whoever_leads(seed: int) -> None:
    """Each turn starts once and is counted once, over all epochs; the log has the last leader's knowledge."""
    check(a_cell(seed))


def check(cell: Cell) -> Ledger:
    """Run a cell to its end, and check its invariants; return the leader's ledger."""
    for tick in range(int(4 * END_S)):
        cell.time.run(tick / 4)
        for member in cell.members:
            member.look_for_lost()
        cell.flush()
    leaders = [member for member in cell.members if member.role == "leader"]
    assert len(leaders) == 1, f"{len(leaders)} lead"
    ledger = leaders[0].ledger
    assert ledger is not None
    for client in cell.clients:
        check_answers(client)
        check_counts(client, ledger, cell)
    assert not ledger.in_flight, "leases are leaked"
    assert not ledger.waiting, "turns are held for nobody"
    check_log(cell, ledger)
    return ledger


def check_answers(client: Carrier) -> None:
    """Check that every turn of a gateway got one answer."""
    assert not client.turns.rows, f"rows are left: {client.turns.rows}"
    assert all(number == 1 for number in client.started.values()), "a turn was started twice"
    assert client.finished | client.refused | client.abandoned == set(range(1, client.turns_count + 1)), (
        "a turn got no answer"
    )
    assert client.epochs == sorted(client.epochs), "an epoch fell"


def check_counts(client: Carrier, ledger: Ledger, cell: Cell) -> None:
    """Check that each turn that finished was counted once, and no other."""
    for turn_id in range(1, client.turns_count + 1):
        name = f"{client.turns.gateway_id}-{turn_id}"
        counted = ledger.counted[name]
        assert ledger.usage[name] == 7 * counted, f"what {name} used is not what was counted"
        least_count = int(turn_id in client.finished and turn_id not in client.untold and not cell.lost_data)
        assert least_count <= counted <= int(turn_id in client.finished), f"{name} was counted {counted} times"


def check_log(cell: Cell, ledger: Ledger) -> None:
    """Check that a new reader of the log has the leader's state."""
    kept = Kept()
    for _, data in cell.store.log:
        kept.take(decode(data), 0.0)
    assert kept.sums.outcome_counts == dict(ledger.counted)
    usage = {record.program_id: record.output_tokens_total for _, record in kept.programs(0.0)}
    assert usage == dict(ledger.usage)


def test_the_faults_do_happen() -> None:
    """Over the seeds leaders change."""
    epochs_count = 0
    for seed in range(30):
        cell = a_cell(seed)
        cell.time.run(END_S)
        epochs_count += cell.store.epoch
    assert epochs_count > 45
