"""A leading scheduler writes what the next one needs, in batches, off the path of turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from thunderagent.errors import StoreError
from thunderagent.programs.handlers.programs import record_of
from thunderagent.programs.messages import Event, GrantsContinued, GrantsSuspended, RouteSet, SetRoute
from thunderagent.programs.pools import Pool
from thunderagent.programs.state.program import Program
from thunderagent.proxy.fleet.commands import CALL, OBSERVED
from thunderagent.runtime import Runtime
from thunderagent.runtime.learned_state import LearnedState, encode_state
from thunderagent.scale.leader.journal import Journal
from thunderagent.scale.leader.kept import At, Counted, Ended, Learned, Linked, Lost, Operated, Record, Sums
from thunderagent.scale.leader.store import Store
from thunderagent.scale.scheduler.gateway import Gateway
from thunderagent.scale.scheduler.links import Links

BATCH_S = 0.001
"""Least time between the begins of two writes: changes in between are gathered.

A write takes a tenth of a millisecond of the loop, however much it gathers: so the log takes at most a tenth of a core.
"""

RETRY_S = 0.1
LEARNED_S = 5.0
"""How often learned knowledge is written, if a turn ended: a crash loses no more of it."""

LAGS_COUNT = 10_000


class Writing:
    """Gathers changes in a `Journal`, and writes them into the store. All methods belong to one event loop."""

    def __init__(
        self,
        store: Store,
        owner: str,
        runtime: Runtime,
        links: Links,
        learned: LearnedState,
        went: Callable[[StoreError | None], None],
    ) -> None:
        """Write nothing yet, later as `owner` of the lock. `went` takes each write's result; None is success."""
        self.lags_s: deque[float] = deque(maxlen=LAGS_COUNT)
        """Delay of the last entries, from their first change until they were written."""
        self.forgone_count = 0
        """Number of turns that were acknowledged and not written."""
        self.counts_may_miss = False
        """Whether the sums may lack turns of an earlier leader."""
        self._store = store
        self._owner = owner
        self._runtime = runtime
        self._links = links
        self._learned = learned
        self._went = went
        self._journal: Journal | None = None
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()
        self._learned_content = b""
        self._names: list[str] = []
        """The pools' names in what was written: a pool has none until a replica lists one."""
        self._stops: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<Writing {self._journal!r}>"

    def begin(self, epoch: int, learned_content: bytes) -> None:
        """Write everything, and from now on what changes."""
        self._learned_content = learned_content
        self._journal = Journal(epoch, changes=self._changes, everything=self._everything, sums=self._sums)
        pools = self._runtime.pools.all
        self._names = [pool.name for pool in pools]
        for pool in pools:
            pool.scheduler.book.changed_programs = {}
        self._links.gateways.on_counted = self._counted
        kinds = RouteSet, SetRoute, GrantsSuspended, GrantsContinued
        observe = self._runtime.observe
        self._stops = [observe(self._observed), observe(self._operated, *kinds)]
        self._news.set()

    async def go_on_in(self, epoch: int) -> int:
        """Renew the lock in a higher epoch, and write in it from now on. Raises `StoreError`; see `Store.renew`."""
        async with self._lock:  # an entry on its way would be of an epoch that is over
            kept = await self._store.renew(self._owner, epoch)
            if kept and self._journal is not None:
                self._journal.epoch = epoch
            return kept

    def tell_all(self) -> None:
        """Write everything again: the store has lost it."""
        if self._journal is not None:
            self._journal.tell_all()
            self._news.set()

    def end(self) -> None:
        """Stop gathering; turns counted from now on are not acknowledged."""
        self._journal = None
        for stop in self._stops:
            stop()

    async def finish(self) -> None:
        """Write all that was gathered so far, and end. Raises `StoreError`."""
        journal = self._journal
        self.end()
        if journal is None:
            return
        while journal.has_more:
            await self._write_entry(journal)
        await self._write_entry(journal)  # later changes belong to the next leader

    # --- what is gathered

    def linked(self, gateway_id: str, boot_id: int) -> None:
        """Record that a gateway is there."""
        if self._journal is not None:
            self._journal.linked(gateway_id, boot_id)
            self._news.set()

    def lost(self, gateway_id: str) -> None:
        """Record that a gateway is gone."""
        if self._journal is not None:
            self._journal.lost(gateway_id)
            self._news.set()

    def _counted(self, gateway: Gateway, turn_id: int) -> None:
        if self._journal is None:
            return
        self._news.set()
        forgone = self._journal.counted(gateway.gateway_id, turn_id)
        self.forgone_count += len(forgone)
        for turn in forgone:
            self._links.gateways.written(*turn)

    def _observed(self, event: Event, decisions: object) -> None:  # noqa: ARG002 - an observer's signature
        self._news.set()

    def _operated(self, event: Event, decisions: object) -> None:  # noqa: ARG002 - an observer's signature
        if self._journal is not None:
            self._journal.operated(operated_of(self._runtime))

    def _sums(self) -> Sums:
        runtime = self._runtime
        tokens = runtime.prompt_tokens_total, runtime.output_tokens_total, runtime.cached_tokens_total
        return Sums(dict(runtime.outcome_counts), *tokens, self.counts_may_miss)

    def _changes(self) -> Iterator[Record]:
        """Yield the programs that changed, each in its state when taken."""
        pools = list(self._runtime.pools.all)
        before, self._names = self._names, [pool.name for pool in pools]
        if self._names != before and self._journal is not None:
            self._journal.tell_all()  # programs under a name that is gone would never end there
        for pool in pools:
            book = pool.scheduler.book
            changed, book.changed_programs = book.changed_programs, {}
            if changed is None:  # a pool that nobody recorded yet
                changed = dict[str, Program | None](book.programs)
            for program_id, program in changed.items():
                if program is None or program.place is book.ended:
                    yield Ended(pool.name, program_id)
                else:
                    yield At(pool.name, record_of(program, book))

    def _everything(self) -> Iterator[Record]:
        """Yield everything; programs each in their state when taken."""
        for gateway in list(self._links.gateways.all.values()):
            yield Linked(gateway.gateway_id, gateway.boot_id)
            if gateway.counted:
                yield Counted(gateway.gateway_id, tuple(gateway.counted))
            if not gateway.is_linked and not gateway.turns:
                yield Lost(gateway.gateway_id)
        if self._learned_content:
            yield Learned(self._learned_content)
        yield operated_of(self._runtime)
        for pool in list(self._runtime.pools.all):
            yield from self._programs_of(pool)

    def _programs_of(self, pool: Pool) -> Iterator[Record]:
        book = pool.scheduler.book
        for program in list(book.programs.values()):
            if program.place is not book.ended:
                yield At(pool.name, record_of(program, book))

    # --- what is written

    async def run(self) -> None:
        """Write what is gathered until cancelled."""
        now_s, next_s = self._runtime.now_s, 0.0
        while True:
            await self._news.wait()
            began_s = now_s()
            await asyncio.sleep(max(0.0, next_s - began_s))  # at least what this iteration of the loop brings
            next_s = now_s() + BATCH_S
            self._news.clear()
            while (journal := self._journal) is not None:
                try:
                    has_written = await self._write_entry(journal)
                except StoreError as error:
                    self._went(error)
                    await asyncio.sleep(RETRY_S)
                    continue
                if has_written:
                    self._went(None)
                    self.lags_s.append(now_s() - began_s)
                if not journal.has_more:
                    break
                began_s = now_s()

    async def _write_entry(self, journal: Journal) -> bool:
        """Write what is gathered, and acknowledge it; return False if there is nothing. Raises `StoreError`."""
        async with self._lock:
            entry = journal.entry(self._runtime.now_s())
            if entry is None:
                return False
            where = await self._store.append(self._owner, journal.epoch, entry)
            for turn in journal.was_written(where):
                self._links.gateways.written(*turn)
            if journal.tells_from is not None:
                first, journal.tells_from = journal.tells_from, None
                with suppress(StoreError):
                    await self._store.trim(first)
            return True

    async def note_learned(self) -> None:
        """Write learned knowledge now and then, until cancelled."""
        written_count = -1
        while True:
            await asyncio.sleep(LEARNED_S)
            turns_count, journal = self._runtime.outcome_counts.total(), self._journal
            if turns_count != written_count and journal is not None:
                written_count = turns_count
                self._learned_content = await asyncio.to_thread(encode_state, self._learned.records())
                journal.learned(self._learned_content)  # it may have ended meanwhile
                self._news.set()


def operated_of(runtime: Runtime) -> Operated:
    """Return routes and suspensions, except those of a running call or that engines report again."""
    routes: dict[tuple[str, str], dict[str, float]] = {}
    causes: dict[tuple[str | None, str], None] = {}
    for scheduler in runtime.pools.schedulers:
        for scope, name, route in scheduler.core.routing.routes:
            routes.setdefault((scope.value, name), {}).update(route.targets)
        causes.update({(None, cause): None for cause in scheduler.book.suspended_for})
        for replica_id, replica in scheduler.book.replicas.items():
            causes.update({(replica_id, cause): None for cause in replica.own_causes})
    lasting = [each for each in causes if each[1] != OBSERVED and not each[1].startswith(CALL)]
    return Operated(tuple((*whose, targets) for whose, targets in routes.items()), tuple(lasting))
