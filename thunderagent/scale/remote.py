"""Leases of a scheduler elsewhere: what a gateway has in place of a runtime.

Theory of operation
===================
`RemoteRuntime` is to the proxy what `Runtime` is where both are one process: it gives leases, hears how turns go, and
has the replicas as they were pushed last. What it is asked it answers by what it carried itself; what happens to
replicas and programs elsewhere it tells its observers as the events that the core would have heard.

Turns that wait while there is no scheduler go on waiting. Once there has been none for `patience_s` they *fail open*:
each runs on the replica where its program was last, or one that follows from its name, as long as fewer than
`fail_open_turns_count` run there from here. When a scheduler is back it is told of them, as of all that runs.

The socket is `dialling.py`'s.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from time import monotonic

import structlog

from thunderagent.errors import ShuttingDownError, ThunderAgentError, UnknownModelError
from thunderagent.leases import FAIL_OPEN, UNBOUNDED, Lease, OpenLease, ReplicaMap, TurnAsk, TurnEnd
from thunderagent.programs.model.decisions import Decision, Reason, Release
from thunderagent.programs.model.events import Event, ProgramReleased
from thunderagent.programs.model.fleet_events import ReplicaDown, ReplicaDraining, ReplicaRemoved, ReplicaUp
from thunderagent.scale.carried import CarriedTurns
from thunderagent.scale.messages import (
    Digest,
    Frame,
    Gone,
    Hold,
    Lead,
    Message,
    Refusal,
    RemoteReplica,
    Replicas,
)

log = structlog.get_logger("thunderagent.scale")

KNOWN_COUNT = 100_000
"""So many programs are known here, the last that had a turn."""


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How a gateway does without a scheduler."""

    patience_s: float = 30.0
    """For so long turns wait for a scheduler to come back."""
    fail_open_turns_count: int = 64
    """Then so many run on each replica."""
    grace_s: float = 30.0
    """How long a shutdown waits for turns in flight."""


class _Known:
    """A program that this gateway carried turns of."""

    __slots__ = ("generation", "replica_id", "tenant")

    def __init__(self, replica_id: str, tenant: str, generation: int) -> None:
        self.replica_id = replica_id
        self.tenant = tenant
        self.generation = generation


Answer = Lease | None
"""None is a turn that is held."""

Observer = Callable[[Event, Sequence[Decision]], None]


class RemoteRuntime:
    """Asks a scheduler elsewhere. All methods belong to one event loop."""

    def __init__(
        self,
        turns: CarriedTurns,
        settings: RemoteSettings,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Carry `turns`."""
        self.turns = turns
        self.settings = settings
        self.replicas = ReplicaMap()
        self.now_s = clock
        self.all_told = asyncio.Event()
        """Set while there is no turn of which the scheduler of the link has something to hear, or no link."""
        self.all_told.set()
        self.news = asyncio.Event()
        """Set when there is something to send."""
        self.outcome_counts: Counter[str] = Counter()
        """Turns by how they ended."""
        self.prompt_tokens_total = self.output_tokens_total = self.cached_tokens_total = 0
        """Of finished turns, as far as engines said their usage."""
        self.fail_open_count = 0
        self.leases_count = 0
        self.closing = False
        self.on_replicas: Callable[[Sequence[RemoteReplica], Sequence[str]], None] = lambda _changed, _gone: None
        """Hears first of replicas that changed, and of those that are gone."""
        self._turn_ids = count(1)
        self._waiters: dict[int, asyncio.Future[Answer]] = {}
        self._refusals: dict[int, Refusal] = {}
        self._held: dict[int, TurnAsk] = {}
        """Turns that are known to be held, in their order."""
        self._known: dict[str, _Known] = {}
        self._counts: Counter[str] = Counter()
        """Turns in flight from here, by replica."""
        self._models: dict[str, tuple[str, ...]] = {}
        self._tripped: set[str] = set()
        self._alone_since_s: float | None = clock()
        self._observers: list[tuple[Observer, frozenset[type]]] = []
        self._no_lease_left = asyncio.Event()
        self._no_lease_left.set()

    def __repr__(self) -> str:
        return f"<RemoteRuntime: {self.leases_count} leases, {self.held_count} held, {self.turns!r}>"

    @property
    def held_count(self) -> int:
        """Turns that wait for a lease."""
        return len(self._waiters)

    @property
    def fails_open(self) -> bool:
        """Whether there has been no scheduler for so long that turns run without."""
        since_s = self._alone_since_s
        return since_s is not None and self.now_s() - since_s >= self.settings.patience_s

    def new_turn_id(self) -> int:
        """Return an id that no turn of this gateway had before."""
        return next(self._turn_ids)

    # --- leases

    async def lease(self, ask: TurnAsk, while_held: AbstractContextManager[object] = UNBOUNDED) -> OpenLease:
        """Wait for leave to run one turn; see `LeaseSource`."""
        if self.closing:
            raise ShuttingDownError("the proxy is shutting down")
        turn_id = ask.turn_id
        self.all_told.clear()
        self.turns.asked(ask, self.now_s())
        self.news.set()
        try:
            lease = await self._answer(turn_id) if self.turns.is_led else None
            if lease is None:
                lease = await self._wait(ask, while_held)
        except BaseException as error:
            self._give_up(turn_id, error)
            raise
        finally:
            self._waiters.pop(turn_id, None)
            self._refusals.pop(turn_id, None)
        self._begins(ask, lease)
        return OpenLease(self, lease)

    async def _answer(self, turn_id: int) -> Answer:
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiters[turn_id] = waiter
        return await waiter

    async def _wait(self, ask: TurnAsk, while_held: AbstractContextManager[object]) -> Lease:
        """Wait as one that is held: for the scheduler, for another one, or for leave to run without."""
        row = self.turns.rows[ask.turn_id]
        self._held[ask.turn_id] = ask
        try:
            with while_held:
                self._fail_open()
                while row.lease is None:
                    if (refusal := self._refusals.get(ask.turn_id)) is not None:
                        raise error_of(refusal)
                    await self._answer(ask.turn_id)
                return row.lease
        finally:
            self._held.pop(ask.turn_id, None)

    def _give_up(self, turn_id: int, error: BaseException) -> None:
        """Say that nobody waits for a turn any more; its lease may have come in the same moment."""
        self.outcome_counts["abandoned" if isinstance(error, asyncio.CancelledError) else "rejected"] += 1
        row = self.turns.rows.get(turn_id)
        if row is not None and row.lease is not None:
            self.turns.ended(TurnEnd(turn_id, row.ask.program_id, row.lease.generation, "abandoned"))
        else:
            self.turns.left(turn_id)
        self.news.set()

    def _begins(self, ask: TurnAsk, lease: Lease) -> None:
        self.leases_count += 1
        self._no_lease_left.clear()
        self._counts[lease.replica_id] += 1
        if ask.program_id is not None:
            self._known.pop(ask.program_id, None)
            self._known[ask.program_id] = _Known(lease.replica_id, ask.tenant, lease.generation)
            if len(self._known) > KNOWN_COUNT:
                del self._known[next(iter(self._known))]

    # --- without a scheduler

    def look(self) -> None:
        """Let turns run without a scheduler, if there has been none for long; call it now and then."""
        self._fail_open()

    def _fail_open(self) -> None:
        if not self._held or not self.fails_open:
            return
        for turn_id, ask in list(self._held.items()):
            replica_id = self._where(ask)
            row = self.turns.rows.get(turn_id)
            if replica_id is None or row is None or row.lease is not None:
                continue
            state = self.replicas.states[replica_id]
            known = self._known.get(ask.program_id or "")
            generation = known.generation if known is not None else 0
            held_s = self.now_s() - row.asked_s
            lease = Lease(turn_id, ask.program_id, generation, replica_id, state.url, None, FAIL_OPEN, held_s)
            self.turns.granted_here(turn_id, lease)
            self.fail_open_count += 1
            self._tell(turn_id, lease)

    def _where(self, ask: TurnAsk) -> str | None:
        """Return where a turn may run without a scheduler; None if nowhere now."""
        able = set(self.replicas.open_ids) - self._tripped or set(self.replicas.open_ids)
        if ask.model and self.replicas.has_pools:
            able &= set(self._serving(ask.model))
        able = able - {ask.avoid_replica_id or ""} or able
        chosen = ask.pinned_replica_id or ask.wanted_replica_id
        if chosen is not None and (ask.pinned_replica_id is not None or chosen in able):
            able &= {chosen}
        coming = Counter(
            row.lease.replica_id
            for turn_id in self._waiters
            if (row := self.turns.rows.get(turn_id)) is not None and row.lease is not None
        )
        limit_count = self.settings.fail_open_turns_count
        able = {each for each in able if self._counts[each] + coming[each] < limit_count}
        home_id = self.home_of(ask.program_id or "")
        if home_id in able:
            return home_id
        name = ask.program_id or f"\0{ask.turn_id}"
        return max(able, key=lambda each: blake2b(f"{name}\0{each}".encode(), digest_size=8).digest(), default=None)

    # --- links

    def linked(self) -> None:
        """Begin a link, with all that is to be told."""
        self.turns.linked(self.now_s())
        if self.turns.rows:
            self.all_told.clear()
        self.news.set()

    def unlinked(self) -> None:
        """End a link: whoever waits for an answer is held."""
        if self._alone_since_s is None:
            self._alone_since_s = self.now_s()
        self.turns.unlinked()
        self.all_told.set()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)

    def take(self, frame: Frame) -> None:
        """Take in what came by the link. Raises `BadFrameError`."""
        for message in self.turns.take(frame):
            self._take(message)
        if not self.turns.rows:
            self.all_told.set()
        if self.turns.has_news:
            self.news.set()

    def _take(self, message: Message) -> None:
        match message:
            case Lease():
                self._tell(message.turn_id, message)
            case Hold():
                self._tell(message.turn_id, None)
            case Refusal():
                waiter = self._waiters.get(message.turn_id)
                if waiter is not None and not waiter.done():
                    waiter.set_exception(error_of(message))
                elif waiter is not None:  # it hears just now that it is held
                    self._refusals[message.turn_id] = message
            case Lead():
                if self._alone_since_s is not None:
                    log.info("scheduler_leads", epoch=self.turns.epoch, alone_s=self.now_s() - self._alone_since_s)
                self._alone_since_s = None
            case Replicas():
                self._take_replicas(message)
            case Gone():
                self._program_gone(message.program_id)
            case _:
                pass  # acknowledgements are the table's

    def _tell(self, turn_id: int, answer: Answer) -> None:
        waiter = self._waiters.get(turn_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _take_replicas(self, message: Replicas) -> None:
        removed_ids = message.removed_ids
        if message.is_whole:
            said = {each.state.replica_id for each in message.changed}
            removed_ids = tuple(each for each in self.replicas.states if each not in said)
        events = [self._event_of(each) for each in message.changed]
        self.on_replicas(message.changed, removed_ids)
        self.replicas.names_models, self.replicas.has_pools = message.names_models, message.has_pools
        for each in message.changed:
            self._models[each.state.replica_id] = each.models
        for replica_id in removed_ids:
            self._models.pop(replica_id, None)
        self.replicas.push((each.state for each in message.changed), removed_ids)
        for event in [*events, *(ReplicaRemoved(self.now_s(), each) for each in removed_ids)]:
            if event is not None:
                self._observed(event)

    def _event_of(self, replica: RemoteReplica) -> Event | None:
        """Return what the core would have heard of a replica that is as it is told now."""
        state, now_s = replica.state, self.now_s()
        before = self.replicas.get(state.replica_id)
        if not state.is_up:
            return ReplicaDown(now_s, state.replica_id) if before is not None and before.is_up else None
        if before is not None and before.is_open and not state.is_open:
            return ReplicaDraining(now_s, state.replica_id)
        return ReplicaUp(now_s, state.replica_id, state.capacity_tokens)

    def _program_gone(self, program_id: str) -> None:
        known = self._known.pop(program_id, None)
        if known is not None:
            generation = known.generation
            gone = Release(program_id, generation, Reason.RELEASED)
            self._observed(ProgramReleased(self.now_s(), program_id, generation), [gone])

    # --- what the proxy asks; see `FleetSource`

    def home_of(self, program_id: str, model: str = "") -> str | None:
        """Return the replica that a program was on when this gateway carried its last turn, if that is up."""
        known = self._known.get(program_id)
        home_id = known.replica_id if known is not None else None
        if model and self.replicas.has_pools and home_id not in self._serving(model):
            return None
        return home_id if self.replicas.is_up(home_id) else None

    def tenant_of(self, program_id: str) -> str | None:
        """Return whose a program is that this gateway carried turns of."""
        known = self._known.get(program_id)
        return known.tenant if known is not None else None

    def lives(self, program_id: str, generation: int) -> bool:
        """Say whether nothing was heard of the end of this incarnation of a program."""
        known = self._known.get(program_id)
        return known is not None and known.generation == generation

    def turns_count(self, replica_id: str) -> int:
        """Return how many turns have leases on a replica, from here."""
        return self._counts[replica_id]

    def ids_serving(self, model: str) -> Collection[str]:
        """Return the replicas that list a model. Raises `UnknownModelError`."""
        serving = self._serving(model)
        if not serving:
            raise UnknownModelError(f"the model {model[:100]!r} is not served here")
        return serving

    def _serving(self, model: str) -> list[str]:
        return [replica_id for replica_id, models in self._models.items() if model in models]

    def release(self, program_id: str, generation: int | None = None, outcome: str = "") -> bool:
        """Have the scheduler end a program; False if this gateway carried no turn of it."""
        known = program_id in self._known
        self.turns.released(program_id, generation, outcome)
        self.news.set()
        return known

    def observe(self, observer: Observer, *about: type) -> Callable[[], None]:
        """Have `observer` called with what happens to replicas and programs, if it is about that."""
        entry = observer, frozenset(about)
        self._observers.append(entry)
        return lambda: self._observers.remove(entry) if entry in self._observers else None

    def _observed(self, event: Event, decisions: Sequence[Decision] = ()) -> None:
        kinds = {type(event), *map(type, decisions)}
        for observer, about in list(self._observers):
            if not about or about & kinds:
                observer(event, decisions)

    def replica_at(self, replica_id: str, url: str) -> None:
        """Hear what it was told itself."""

    def replica_removed(self, replica_id: str) -> None:
        """Hear that a replica is gone, of which it was told itself."""
        self._tripped.discard(replica_id)

    def replica_tripped(self, replica_id: str, *, tripped: bool) -> None:
        """Tell the scheduler that a replica fails turn after turn, or may be tried again."""
        (self._tripped.add if tripped else self._tripped.discard)(replica_id)
        self._seen(replica_id, "tripped" if tripped else "tried")

    def suspect(self, replica_id: str) -> None:
        """Have the scheduler look at a replica, because a request just failed there."""
        self._seen(replica_id, "failed")

    def refused(self, replica_id: str) -> None:
        """Have the scheduler take a replica for down, because it refused a connection."""
        self._seen(replica_id, "refused")

    def _seen(self, replica_id: str, what: str) -> None:
        self.turns.seen(Digest(replica_id, what))
        self.news.set()

    # --- what becomes of a turn with a lease; see `LeaseKeeper`

    def unverified(self, turn_id: int) -> None:
        """Hear that only a stranger will tell how a turn goes."""
        self.turns.progressed(turn_id, unverified=True)
        self.news.set()

    def started(self, turn_id: int) -> None:
        """Hear that the first byte of an answer came."""
        self.turns.progressed(turn_id)
        self.news.set()

    def progressed(self, turn_id: int, output_tokens: int) -> None:
        """Hear about how many tokens were generated so far."""
        self.turns.progressed(turn_id, output_tokens)
        self.news.set()

    def ended(self, end: TurnEnd) -> None:
        """Take a lease back, and tell the scheduler."""
        row = self.turns.rows.get(end.turn_id)
        assert row is not None, f"turn {end.turn_id} ends that was not asked for"
        assert row.lease is not None, f"turn {end.turn_id} ends without a lease"
        replica_id = row.lease.replica_id
        self._counts[replica_id] -= 1
        self.leases_count -= 1
        self.outcome_counts[end.outcome] += 1
        if end.outcome == "finished":
            self.prompt_tokens_total += end.prompt_tokens or 0
            self.output_tokens_total += end.output_tokens or 0
            self.cached_tokens_total += end.cached_tokens or 0
        self.turns.ended(end)
        self.news.set()
        if not self.leases_count:
            self._no_lease_left.set()
        self._fail_open()

    async def close(self) -> None:
        """Ask for nothing more, refuse who waits, let turns in flight end up to the grace period."""
        self.closing = True
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(ShuttingDownError("the proxy is shutting down; the turn was not forwarded"))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self.settings.grace_s):
                await self._no_lease_left.wait()
        except TimeoutError:
            log.warning("grace_period_over", leases_count=self.leases_count, grace_s=self.settings.grace_s)


def error_of(refusal: Refusal) -> ThunderAgentError:
    """Return the error that a scheduler tells of."""
    error = _ERRORS.get(refusal.code, ThunderAgentError)(refusal.message)
    error.retry_after_s = refusal.retry_after_s
    return error


def _all_errors(of: type[ThunderAgentError]) -> dict[str, type[ThunderAgentError]]:
    found = {of.code: of}
    for each in of.__subclasses__():
        if each.__init__ is ThunderAgentError.__init__:
            found = {**_all_errors(each), **found}
    return found


_ERRORS = _all_errors(ThunderAgentError)
"""Those that are made of their message alone, by their codes."""
