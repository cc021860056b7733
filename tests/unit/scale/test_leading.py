"""A scheduler with a failing store: it writes everything again, and leaves no lock behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from tests.unit.scale.test_links import Unwatched
from thunderagent.errors import FencedError, StoreError
from thunderagent.programs.messages import ProgramOpened, ProgramReleased, ReplicaUp
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.commands import CALL, OBSERVED
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.runtime import Runtime
from thunderagent.runtime.learned_state import LearnedState
from thunderagent.scale.leader.candidacy import Candidacy
from thunderagent.scale.leader.kept import Kept, decode
from thunderagent.scale.leader.leading import Leading
from thunderagent.scale.leader.store import Seen, Store
from thunderagent.scale.scheduler.links import Links

LOCK_S = 0.03
"""The period of renewals, short so that tests do not wait."""


class MemoryStore:
    """A store that does as told, or fails where a test says so. Its lock does not expire."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.epoch = 0
        self.log: list[bytes] = []
        self.is_away = self.loses_the_answer_of_take = self.fails_for_standby = self.has_another = False
        self.renews_as = 0
        """The answer to the next renewal, if it is not 0."""
        self.on_take = asyncio.Event()
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.loses_entries = False
        """Whether the next append finds a log of another time."""
        self.on_append = asyncio.Event()
        self.may_append = asyncio.Event()
        self.may_append.set()
        self.while_appending: Callable[[], None] = lambda: None
        self.may_look = asyncio.Event()
        self.may_look.set()
        self.renewals_count = 0

    def _answer(self) -> None:
        if self.is_away:
            raise StoreError("away")

    async def look(self, after: str) -> Seen:
        if self.owner:
            await self.may_look.wait()
        self._answer()
        entries = [(str(number), data) for number, data in enumerate(self.log, 1) if number > int(after)]
        return Seen(self.owner, self.epoch, entries, has_more=False)

    async def take(self, owner: str, expected: str, least_epoch: int) -> int:
        self._answer()
        if self.owner not in (None, "", expected):
            return 0
        self.owner, self.epoch = owner, max(self.epoch, least_epoch) + 1
        self.on_take.set()
        await self.may_take.wait()
        if self.loses_the_answer_of_take:
            self.loses_the_answer_of_take = False
            raise StoreError("it did as told, and nobody heard so")
        return self.epoch

    async def renew(self, owner: str, epoch: int) -> int:
        self._answer()
        self.renewals_count += 1
        if self.owner != owner:
            return 0
        self.epoch = max(self.epoch, epoch)
        answer, self.renews_as = self.renews_as or 1, 0
        return answer

    async def append(self, owner: str, epoch: int, data: bytes) -> str:
        self.on_append.set()
        await self.may_append.wait()
        self._answer()
        if epoch < self.epoch:
            raise FencedError("its epoch is over")
        if self.loses_entries:
            self.log, self.loses_entries = [], False
            raise StoreError("it lost what was written last")
        self.while_appending()
        self.log.append(data)
        return str(len(self.log))

    async def position(self) -> str:
        self._answer()
        return str(len(self.log)) if self.log else ""

    async def trim(self, where: str) -> None: ...

    async def give_up(self, owner: str) -> None:
        self._answer()
        if self.owner == owner:
            self.owner = ""

    async def stand_by(self, owner: str) -> None: ...

    async def has_standby(self, owner: str) -> bool:
        if self.fails_for_standby:
            raise StoreError("it does not say")
        return self.has_another

    async def warnings(self) -> list[str]:
        return []

    async def close(self) -> None: ...


class Member:
    """A scheduler with a store."""

    def __init__(self, store: MemoryStore, leads_by: Store | None, led_in: int) -> None:
        self.store = store
        self.runtime = Runtime(Scheduler(Cap(n=1)))
        links = self.links = Links(self.runtime, Replicas(self.runtime, []), Unwatched(), gateway_lost_s=5.0)
        learned = LearnedState(None, self.runtime)
        candidacy = Candidacy(LOCK_S, led_in)
        self.leading = Leading(leads_by or store, self.runtime, links, learned, candidacy, url="")
        self.running: asyncio.Task[None]

    def opens(self, program_id: str) -> None:
        self.runtime.dispatch(ProgramOpened(self.runtime.now_s(), program_id))

    def has_replicas(self, *replica_ids: str) -> None:
        for replica_id in replica_ids:
            self.runtime.dispatch(ReplicaUp(self.runtime.now_s(), replica_id, 1000))

    async def until_written(self, *program_ids: str, since_count: int = 0) -> None:
        """Wait until the log, from an entry on, has exactly these programs."""
        while True:
            kept = Kept()
            for data in self.store.log[since_count:]:
                kept.take(decode(data), 0.0)
            if {record.program_id for _, record in kept.programs(0.0)} == set(program_ids):
                return
            await asyncio.sleep(0)

    async def writes_for_long(self, program_id: str) -> None:
        """Begin a program, whose entry is on its way until `may_append` is set."""
        self.store.may_append.clear()
        self.store.on_append.clear()
        self.opens(program_id)
        await self.store.on_append.wait()

    async def until_renewed(self) -> None:
        """Wait until the lock was renewed twice, so that one renewal ran completely."""
        wanted_count = self.store.renewals_count + 2
        while self.store.renewals_count < wanted_count:
            await asyncio.sleep(0)


@asynccontextmanager
async def running(store: MemoryStore, leads_by: Store | None = None, led_in: int = 0) -> AsyncIterator[Member]:
    """Run one; its lock is in the same store, unless `leads_by` has it."""
    member = Member(store, leads_by, led_in)
    async with asyncio.timeout(30):
        member.running = asyncio.create_task(member.leading.run())
        yield member
        member.running.cancel()
        await asyncio.wait([member.running])


async def until_leading(member: Member, *program_ids: str) -> None:
    """Wait until it leads, then begin these programs, and wait until they are in the log."""
    while member.leading.took_over_s is None:
        await asyncio.sleep(0)
    for program_id in program_ids:
        member.opens(program_id)
    if program_ids:
        await member.until_written(*program_ids)


async def test_a_store_that_was_away_is_told_all_again() -> None:
    """It may have returned with older data, without reporting that."""
    store = MemoryStore()
    async with running(store) as member:
        member.opens("p")
        await until_leading(member)
        await member.until_written("p")
        store.is_away = True
        while member.leading.store_answers:
            await asyncio.sleep(0)
        store.log, store.is_away = [], False
        await member.until_written("p")


async def test_a_store_that_lost_its_epoch_is_told_all_again_if_it_does_not_say_who_stands_by() -> None:
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member, "p")
        store.fails_for_standby = True
        await member.until_renewed()
        store.log, store.renews_as = [], 2
        await member.until_written("p")


async def test_an_epoch_that_was_lost_is_made_up_for_and_all_is_told_again() -> None:
    """A gateway is the first to know about it."""
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member, "p")
        store.log, store.renews_as = [], 2
        member.leading._heard_higher(7)
        await member.until_written("p")
        assert store.epoch == member.leading.epoch == 8


@asynccontextmanager
async def led_and_followed(store: MemoryStore) -> AsyncIterator[tuple[Member, Member]]:
    """Yield a leader with one program, and a standby that knows of it."""
    async with running(store) as first:
        await until_leading(first, "p")
        async with running(store) as second:
            while second.leading.kept.programs_count != 1:
                await asyncio.sleep(0)
            yield first, second


async def test_after_a_takeover_without_losses_the_counts_are_whole() -> None:
    store = MemoryStore()
    async with led_and_followed(store) as (first, second):
        await first.leading.give_up()
        await until_leading(second)
        assert not second.leading.report().counts_may_miss


@pytest.mark.parametrize("lost", ["all", "the last entry"])
async def test_a_takeover_from_a_store_that_lost_data_says_that_counts_may_miss_turns(lost: str) -> None:
    """So does the next one, and it is in the log."""
    store = MemoryStore()
    async with led_and_followed(store) as (first, second):
        first.leading._end()  # as if killed
        store.log = [] if lost == "all" else store.log[:-1]
        store.epoch, store.owner = (0, None) if lost == "all" else (store.epoch, "")
        with capture_logs() as logs:
            await until_leading(second)
        assert second.leading.report().counts_may_miss
        assert [each["epoch"] for each in logs if each["event"] == "counts_may_miss_turns"] == [second.leading.epoch]
        second.opens("q")
        await second.until_written("p", "q")
        async with running(store) as third:
            await second.leading.give_up()
            await until_leading(third)
            assert third.leading.report().counts_may_miss


async def test_an_epoch_beyond_reason_is_said_and_does_not_count() -> None:
    store = MemoryStore()
    async with led_and_followed(store):
        with capture_logs() as logs:
            store.epoch = 10**9
            while not logs:
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)  # it looks several times
        said = [each["what"] for each in logs if each["event"] == "store_damaged"]
        assert said == ["the epoch is 1000000000 after 1: not counted"]


async def test_an_entry_on_its_way_is_written_before_its_leader_goes_to_a_higher_epoch() -> None:
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member, "p")
        await member.writes_for_long("q")
        member.leading._heard_higher(7)
        await member.until_renewed()
        store.may_append.set()
        while member.leading.epoch != 8:
            await asyncio.sleep(0)
        await member.until_written("p", "q")
        assert member.leading.role == "leader"


async def test_a_lock_that_was_taken_without_an_answer_is_taken_again_at_once() -> None:
    store = MemoryStore()
    store.loses_the_answer_of_take = True
    async with running(store) as member:
        await until_leading(member)
        assert (store.owner, member.leading.epoch) == (member.leading.owner, 2)


async def test_candidate_leaving_while_it_takes_the_lock_leaves_no_lock_behind() -> None:
    store = MemoryStore()
    store.may_take.clear()
    async with running(store) as member:
        await store.on_take.wait()
        leaving = asyncio.create_task(member.leading.give_up())
        await asyncio.sleep(0)
        assert store.owner == member.leading.owner
        store.may_take.set()
        await leaving
        assert (store.owner, member.leading.role, member.leading.took_over_s) == ("", "over", None)


async def test_leaving_leader_does_not_touch_the_lock_of_another() -> None:
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member)
        async with running(store) as other:
            await other.leading.give_up()
            assert (store.owner, other.leading.role) == (member.leading.owner, "over")


@pytest.mark.parametrize("ends_by", ["no other", "another epoch"])
async def test_leader_that_gave_the_lock_up_lets_another_take_it_first(
    ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thunderagent.scale.leader.leading.LOOK_S", 0)
    store = MemoryStore()
    store.owner, store.epoch, store.has_another = "", 4, True
    async with running(store, led_in=4) as member:
        for _ in range(50):
            await asyncio.sleep(0)
        assert (store.owner, member.leading.role) == ("", "standby")
        if ends_by == "no other":
            store.has_another = False
        else:  # the other one led, and gave up as well
            store.epoch = 5
        await until_leading(member)


async def test_leader_that_gives_the_lock_up_does_not_ask_again_while_gateways_leave() -> None:
    """A renewal would find an empty lock, and end that time; with a Lease it would take it again."""
    store = MemoryStore()
    store.has_another = True
    async with running(store) as member:
        await until_leading(member)
        await member.until_renewed()
        leaves = asyncio.Event()
        member.links.until_left = leaves.wait
        giving_up = asyncio.create_task(member.leading.give_up())
        while store.owner:
            await asyncio.sleep(0)
        renewals_count = store.renewals_count
        await asyncio.sleep(3 * LOCK_S)
        assert (store.renewals_count, member.leading.role, giving_up.done()) == (renewals_count, "leader", False)
        leaves.set()
        await giving_up
        assert (store.owner, member.leading.role) == ("", "over")


async def test_candidate_that_never_led_takes_the_lock_at_once() -> None:
    store = MemoryStore()
    store.owner, store.has_another = "", True
    async with running(store) as member:
        await until_leading(member)


async def test_a_store_that_lost_entries_between_two_commands_is_told_all_again() -> None:
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member, "p")
        store.loses_entries = True
        member.opens("q")
        await member.until_written("p", "q")


async def test_operator_settings_are_passed_to_the_next_leader() -> None:
    store = MemoryStore()
    async with running(store) as member:
        member.has_replicas("r", "s")
        await until_leading(member)
        member.opens("p")
        runtime = member.runtime
        runtime.operator.set_route("group", "g", (("r", 2.0), ("s", 1.0)))
        runtime.operator.set_route("tenant", "t", (("s", 1.0),))
        runtime.operator.set_route("tenant", "t", ())
        for cause in ("sleep", OBSERVED, CALL, f"{CALL} to one"):
            runtime.suspend_grants(cause, "r")
        runtime.suspend_grants("weight_sync")
        runtime.suspend_grants("pause", "s")
        runtime.continue_grants("pause", "s")
        await member.until_written("p")
        await member.leading.give_up()
    async with running(store) as member:
        member.has_replicas("r")  # the other one is no longer there
        await until_leading(member)
        scheduler = member.runtime.scheduler
        found = [(scope, name, route.targets) for scope, name, route in scheduler.core.routing.routes]
        assert found == [("group", "g", (("r", 2.0),))]
        assert dict(scheduler.replicas["r"].own_causes) == {"sleep": None}
        assert dict(scheduler.book.suspended_for) == {"weight_sync": None}


async def test_candidate_leaving_during_a_takeover_gives_the_lock_up_and_lets_nobody_in() -> None:
    store = MemoryStore()
    store.may_look.clear()
    async with running(store) as member:
        while member.leading.role != "leader":
            await asyncio.sleep(0)
        await member.leading.give_up()
        assert store.owner == ""
        store.may_look.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert member.leading.took_over_s is None
        assert not store.log


async def test_leaving_leader_gives_the_lock_up_although_its_last_write_fails() -> None:
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member, "p")
        await member.writes_for_long("q")
        await member.leading.give_up()
        assert store.owner == ""


async def test_leaving_leader_writes_what_there_is_without_waiting_for_calm() -> None:
    """Gateways are still served: something changes with each entry."""
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member)
        member.opens("first")
        await member.until_written("first")
        before_count, names = len(store.log), iter(f"p{number}" for number in range(100))
        store.while_appending = lambda: member.opens(next(names))
        member.opens("last")
        await member.leading.writing.finish()
        assert len(store.log) == before_count + 1
        await member.until_written("last", since_count=before_count)


async def test_leader_that_ends_while_it_encodes_what_it_learned_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there would end the whole process, which then never stands by again."""
    encodes, may_encode = threading.Event(), threading.Event()

    def encode(records: object) -> bytes:
        encodes.set()
        may_encode.wait(30)
        return b"learned"

    monkeypatch.setattr("thunderagent.scale.leader.writing.LEARNED_S", 0.001)
    monkeypatch.setattr("thunderagent.scale.leader.writing.encode_state", encode)
    async with running(MemoryStore()) as member:
        await until_leading(member)
        while not encodes.is_set():
            await asyncio.sleep(0)
        writing = member.leading.writing
        await writing.finish()
        may_encode.set()
        while writing._learned_content != b"learned":
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not member.running.done()


async def test_ids_alone_stay_of_programs_that_ended_while_the_store_was_away() -> None:
    store = MemoryStore()
    async with running(store) as member:
        await until_leading(member, "p")
        store.is_away = True
        while member.leading.store_answers:
            await asyncio.sleep(0)
        store.may_append.clear()
        member.opens("q")
        for name in ("p", "q"):
            member.runtime.dispatch(ProgramReleased(member.runtime.now_s(), name))
        changed = member.runtime.scheduler.book.changed_programs
        assert changed == {"p": None, "q": None}
        store.is_away = False
        store.may_append.set()
        await member.until_written()


async def test_a_program_that_came_before_its_pool_had_a_name_ends_in_the_log_too() -> None:
    store = MemoryStore()
    async with running(store) as member:
        member.has_replicas("r")
        await until_leading(member)
        for name in ("p", "q"):
            member.opens(name)
        await member.until_written("p", "q")
        member.runtime.pools.listed("r", ("a model",))
        member.runtime.dispatch(ProgramReleased(member.runtime.now_s(), "p"))
        await member.until_written("q")
