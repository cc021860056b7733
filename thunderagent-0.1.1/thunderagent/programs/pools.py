"""Pools: replicas that serve the same models, each pool with a scheduler of its own.

Theory of operation
===================
A turn can only run where its model is served. So replicas are in one *pool* if their lists of models share a name. LoRA
adapters count, because they share their engine's memory. Each pool has a whole `Scheduler`: queue, ledger, learned
knowledge, break-even and capacity are its own, and what one pool waits for never holds up another. A program with turns
in several pools is a program of the same id in each of them; its release ends it in all.

With one pool events go straight to its scheduler, and not through this class. With several, `handle` gives each event
to the pools that it is about. A program that is forgotten in one pool, but lives in another, did not end: nobody is
told.

**Where a replica goes.** When it comes up, it joins the pool with which it shares a name; if it shares none, a pool
without replicas and programs, or a new one. It stays there until it is removed, or comes up with a list that has
nothing in common with its pool. If a list connects two live pools, they merge as soon as one of them has no program:
until then the replica serves the names of its own pool. So no turn is ever taken from where it waits. A replica that
lists nothing is assumed to serve what its pool does, which is the first one, and that pool takes models that nobody
lists. Each scheduler is told which names only some of its replicas list: a route of their turns (`rules/routes.py`).

**Limits over all.** Programs are counted over all pools, once for each pool that they live in. If a pool has nobody to
forget for a newcomer, another pool forgets somebody.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from msgspec import structs

from thunderagent.programs.messages import (
    Decision,
    Event,
    GrantsSuspended,
    ModelAsked,
    ModelServed,
    ProgramCrowdedOut,
    ProgramJudged,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    ProvisionAsked,
    Release,
    ReplicaDraining,
    ReplicaRemoved,
    ReplicaTripped,
    ReplicaUp,
    RouteSet,
    Tick,
    TurnAdopted,
    TurnAsk,
    TurnLimited,
)
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.program import Program, Turn
from thunderagent.programs.state.replica import Replica

Listener = Callable[[Any], None]


class Pool:
    """Some replicas, the names that they list, and their scheduler."""

    __slots__ = ("listed", "name", "partly", "pool_id", "scheduler")

    def __init__(self, scheduler: Scheduler, pool_id: int) -> None:
        """Create a pool without replicas; no other pool ever has its id."""
        self.pool_id = pool_id
        self.name = ""
        """The first name that was listed there; empty until then."""
        self.scheduler = scheduler
        self.listed: dict[str, tuple[str, ...]] = {}
        """What each of its replicas lists."""
        self.partly: dict[str, tuple[str, ...]] = {}
        """For names that only some of its replicas serve, such as LoRA adapters: which ones do."""

    def __repr__(self) -> str:
        return f"<Pool {self.name!r}: {len(self.listed)} replicas, {self.scheduler!r}>"

    @property
    def models(self) -> tuple[str, ...]:
        """Every name that one of its replicas lists, each once."""
        return tuple(dict.fromkeys(name for names in self.listed.values() for name in names))

    @property
    def may_serve_any(self) -> bool:
        """Whether one of its replicas lists nothing."""
        return not all(self.listed.values())

    @property
    def is_idle(self) -> bool:
        """Whether no program lives there and no turn is on its way."""
        return not self.scheduler.programs and not self.scheduler.turns

    def serve_anew(self) -> list[ModelServed]:
        """Find out which names only some of its replicas serve; return what its scheduler must hear of that.

        A name that nobody lists any more, but a program asked for, stays with the replicas that had it: it may be
        loaded again. Cost: O(names of all replicas), times the replicas that list nothing.
        """
        before, self.partly = self.partly, {}
        having: dict[str, list[str]] = {}
        for each, names in self.listed.items():
            for name in dict.fromkeys(names):
                having.setdefault(name, []).append(each)
        any_name = [each for each, names in self.listed.items() if not names]
        order = {each: number for number, each in enumerate(self.listed)}
        for name in dict.fromkeys((*having, *before)):
            ids = having.get(name, [])
            if any_name:
                ids = sorted((*ids, *any_name), key=order.__getitem__)
            route = self.scheduler.core.routing.routes.by_model.get(name)  # None until its scheduler has heard of it
            if not ids and route is not None and route.programs:
                ids = [each for each in before[name] if each in self.listed]
            if 0 < len(ids) < len(self.listed):
                self.partly[name] = tuple(ids)
        now_s, partly = self.scheduler.now_s, self.partly
        changed = [name for name in {**before, **partly} if before.get(name) != partly.get(name)]
        return [ModelServed(now_s, name, partly.get(name, ())) for name in changed]


Addressed = tuple[Pool, Event]
Handled = tuple[Pool, Event, list[Decision]]


class Pools:
    """Which replica and which model is in which pool, and their sums. The first pool always exists."""

    __slots__ = (
        "_by_model",
        "_ids",
        "_listeners",
        "_make",
        "_of_replica",
        "_overlap",
        "_to_come",
        "all",
        "handled",
        "programs",
        "replicas",
        "several",
        "some_partly",
        "to_tell",
        "turns",
    )

    def __init__(self, first: Scheduler, make: Callable[[], Scheduler] | None = None) -> None:
        """Start with one pool; `make` returns a scheduler for each further one. None: there are no further ones."""
        self._make = make
        self._ids = count()
        self.all: list[Pool] = [Pool(first, next(self._ids))]
        self.several = False
        self.some_partly = False
        """Whether there is a model that only some replicas of its pool serve."""
        self.programs: Mapping[str, Program] = first.programs
        """Programs of all pools; a program that lives in several is that of the first of them."""
        self.turns: Mapping[int, Turn] = first.turns
        self.replicas: Mapping[str, Replica] = first.replicas
        self.handled: list[Handled] = []
        """What each pool heard on the last event, and what it decided."""
        self._by_model: dict[str, Pool] = {}
        self._of_replica: dict[str, Pool] = {}
        self._to_come: dict[int, Pool] = {}
        self.to_tell: list[Addressed] = []
        """Events that some pools must hear before the next one."""
        self._overlap = False
        """Whether two pools list the same name."""
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        return f"<Pools {', '.join(repr(pool.name) for pool in self.all)}>"

    # --- what is where ----------------------------------------------------------------------------------------------

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """The schedulers of all pools."""
        return [pool.scheduler for pool in self.all]

    @property
    def models(self) -> tuple[str, ...]:
        """Every listed name, each once."""
        return tuple(self._by_model)

    def of_model(self, model: str) -> Pool | None:
        """Return the pool that serves a model; unknown models go to the pool of a replica that lists nothing.

        SGLang also accepts an adapter as `model:adapter`.
        """
        pool = self._by_model.get(model) or self._by_model.get(model.rpartition(":")[0])
        return pool if pool is not None else next((pool for pool in self.all if pool.may_serve_any), None)

    def partly_name(self, model: str) -> str:
        """Return the name by which only some replicas of its pool serve a model; empty if all or none do."""
        name = model if model in self._by_model else model.rpartition(":")[2]
        pool = self._by_model.get(name)
        return name if pool is not None and name in pool.partly else ""

    def of_replica(self, replica_id: str | None) -> Pool:
        """Return the pool of a replica; the first one for an unknown replica."""
        pool = self._of_replica.get(replica_id or "")
        return pool or next((pool for pool in self.all if replica_id in pool.scheduler.replicas), self.all[0])

    def of_program(self, program_id: str) -> list[Pool]:
        """Return the pools that a program lives in."""
        return [pool for pool in self.all if program_id in pool.scheduler.programs]

    def incarnations(self, program_id: str) -> list[Program]:
        """Return a program's incarnation in each pool that it lives in."""
        return [program for pool in self.all if (program := pool.scheduler.programs.get(program_id)) is not None]

    @property
    def may_be_several(self) -> bool:
        """Whether replicas that list other models get a pool of their own."""
        return self._make is not None

    def listing_of(self, replica_id: str) -> tuple[str, ...] | None:
        """Return what a replica lists; None if it is in no pool yet."""
        pool = self._of_replica.get(replica_id)
        return pool.listed[replica_id] if pool is not None else None

    # --- what replicas list -----------------------------------------------------------------------------------------

    def listed(self, replica_id: str, models: tuple[str, ...]) -> None:
        """Record what a replica lists; one without a pool, or that listed nothing until now, gets a pool by that."""
        pool = self._of_replica.get(replica_id)
        before = pool.listed[replica_id] if pool is not None else ()
        if pool is not None:
            pool.listed[replica_id] = models
        if pool is None or (not before and self.is_strange(replica_id)):
            self._place(replica_id, models)
        self._index()

    def _place(self, replica_id: str, models: tuple[str, ...]) -> None:
        """Put a replica into a pool, and tell the schedulers if another one knows it, even if only that it is down."""
        known_by = self.of_replica(replica_id)
        known_by.listed.pop(replica_id, None)
        pool = self._of_replica[replica_id] = self._find(models) or self._empty_or_new()
        pool.listed[replica_id] = models
        replica = known_by.scheduler.replicas.get(replica_id)
        if replica is not None and known_by is not pool:
            now_s = known_by.scheduler.now_s
            self.to_tell.append((known_by, ReplicaRemoved(now_s, replica_id)))
            self.to_tell.extend((pool, event) for event in _as_it_is(replica, now_s))

    def is_strange(self, replica_id: str) -> bool:
        """Return whether a replica lists nothing that others of its pool list: its engine now serves something else."""
        pool = self._of_replica.get(replica_id)
        if pool is None or self._make is None or len(pool.listed) < 2:
            return False
        names = pool.listed[replica_id]
        others = {name for each_id, each in pool.listed.items() if each_id != replica_id for name in each}
        return bool(names) and bool(others) and others.isdisjoint(names)

    def forget(self, replica_id: str) -> None:
        """Forget a replica's pool, and its list, which its pool keeps serving as long as a program lives there."""
        pool = self._of_replica.pop(replica_id, None)
        if pool is not None:
            del pool.listed[replica_id]
            self._index()

    def _find(self, models: tuple[str, ...]) -> Pool | None:
        """Return the pool where a replica with such a list belongs, if there is one."""
        if self._make is None or not models:
            return self.all[0]
        named = next((pool for name in models if (pool := self._by_model.get(name)) is not None), None)
        only_unnamed = not self.several and not self.all[0].models
        return self.all[0] if named is None and only_unnamed else named

    def _empty_or_new(self) -> Pool:
        for pool in self.all:
            if not pool.listed and (pool.is_idle or not self.several):
                pool.name = ""
                return pool
        assert self._make is not None
        first, pool = self.all[0].scheduler, Pool(self._make(), next(self._ids))
        self.all.append(pool)
        for listener in self._listeners:
            pool.scheduler.listen(listener)
        self.to_tell.extend((pool, GrantsSuspended(first.now_s, cause)) for cause in first.book.suspended_for)
        self._see_all()
        return pool

    def _see_all(self) -> None:
        """Update what is read of all pools."""
        schedulers = self.schedulers
        self.several = len(schedulers) > 1
        first = schedulers[0]
        share(schedulers)
        if not self.several:
            self.programs, self.turns, self.replicas = first.programs, first.turns, first.replicas
            return
        self.programs = ChainMap(*(each.programs for each in schedulers))
        self.turns = ChainMap(*(each.turns for each in schedulers))
        self.replicas = ChainMap(*(each.replicas for each in schedulers))

    def _index(self) -> None:
        """Rebuild the index of names: each stays with its pool while that lists it, or has lost its last replica."""
        before, self._by_model = self._by_model, {}
        listed = {pool: frozenset(pool.models) for pool in self.all}
        self._overlap = False
        for pool in self.all:
            names = pool.models or [name for name, owner in before.items() if owner is pool and not pool.listed]
            if self._make is not None:
                self.to_tell.extend((pool, event) for event in pool.serve_anew())
            for name in names:
                owner = before.get(name, pool)
                self._overlap |= self._by_model.setdefault(name, owner if name in listed[owner] else pool) is not pool
            pool.name = pool.name or next(iter(names), "")
        self.some_partly = any(pool.partly for pool in self.all)

    # --- events -----------------------------------------------------------------------------------------------------

    def send(self, turn_id: int, pool: Pool) -> None:
        """Set the pool of the next arriving turn."""
        self._to_come[turn_id] = pool

    def destination(self, turn_id: int) -> Pool:
        """Return, once, the pool of an arriving turn."""
        return self._to_come.pop(turn_id, self.all[0])

    def handle(self, event: Event) -> list[Decision]:
        """Hand an event to each pool that it is about; return their decisions, the first pool's first."""
        told, self.to_tell = [*self.to_tell, *addressed(self, event)], []
        self.handled = [(pool, each, pool.scheduler.handle(each)) for pool, each in told]
        if type(event) is Tick:
            self._join_pools(event.now_s)
            self._drop_empty()
        decisions, ended_ids = list[Decision](), set[str]()
        for _, _, decided in self.handled:
            for decision in decided:
                if type(decision) is Release:  # once, and only if it lives in no other pool
                    if decision.program_id in self.programs or decision.program_id in ended_ids:
                        continue
                    ended_ids.add(decision.program_id)
                decisions.append(decision)
        return decisions

    # --- pools become one, and end ----------------------------------------------------------------------------------

    def _join_pools(self, now_s: float) -> None:
        """Merge two pools that list the same name, once one of them has no program."""
        while self._overlap and (pair := self._joinable()) is not None:
            into, gone = pair
            for replica_id, names in list(gone.listed.items()):
                replica = gone.scheduler.replicas.get(replica_id)
                told = [] if replica is None else _as_it_is(replica, now_s)
                removed = ReplicaRemoved(now_s, replica_id)
                self.handled.append((gone, removed, gone.scheduler.handle(removed)))
                self._of_replica[replica_id] = into
                into.listed[replica_id] = names
                del gone.listed[replica_id]
                self.handled.extend((into, event, into.scheduler.handle(event)) for event in told)
            self._by_model = {name: pool for name, pool in self._by_model.items() if pool is not gone}
            self._index()

    def _joinable(self) -> tuple[Pool, Pool] | None:
        """Return two pools with a common name, of which the second has no program."""
        for number, pool in enumerate(self.all):
            for other in self.all[number + 1 :]:
                if not set(pool.models).isdisjoint(other.models) and (pool.is_idle or other.is_idle):
                    return (pool, other) if other.is_idle else (other, pool)
        return None

    def _drop_empty(self) -> None:
        """Drop pools without replicas and programs, except the first."""
        kept = [pool for pool in self.all if pool is self.all[0] or pool.listed or not pool.is_idle]
        if len(kept) < len(self.all):
            self.all = kept
            self._by_model = {name: pool for name, pool in self._by_model.items() if pool in kept}
            self._see_all()
            self._index()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with each signal of every pool; return a function that ends that."""
        self._listeners.append(listener)
        ends = [pool.scheduler.listen(listener) for pool in self.all]

        def stop() -> None:
            self._listeners.remove(listener)
            for end in ends:
                end()

        return stop


def share(schedulers: Sequence[Scheduler]) -> None:
    """Share across pools what belongs to all: generations, the number of programs that may live, verdicts."""
    for scheduler in schedulers:
        scheduler.knowledge.judge_record = schedulers[0].knowledge.judge_record
        scheduler.book.generations = schedulers[0].book.generations
        scheduler.limits.peers = tuple(each.limits for each in schedulers if each is not scheduler)


def _as_it_is(replica: Replica, now_s: float) -> list[Event]:
    """Return what a scheduler must hear of a replica that another one has had."""
    replica_id = replica.replica_id
    told: list[Event] = [GrantsSuspended(now_s, cause, replica_id) for cause in replica.own_causes]
    if replica.up:
        told.insert(0, ReplicaUp(now_s, replica_id, replica.account.capacity_tokens))
    if replica.draining:
        told.append(ReplicaDraining(now_s, replica_id))
    if replica.tripped:
        told.append(ReplicaTripped(now_s, replica_id))
    return told


def addressed(pools: Pools, event: Event) -> Sequence[Addressed]:
    """Return which pools hear of an event, and what each is told."""
    if (told_of := _TOLD.get(type(event))) is not None:
        return told_of(pools, event)
    if (turn_id := getattr(event, "turn_id", None)) is not None:
        pool = next((pool for pool in pools.all if turn_id in pool.scheduler.turns), pools.all[0])
        return [(pool, event)]
    if (replica_id := getattr(event, "replica_id", None)) is not None:
        return [(pools.of_replica(replica_id), event)]
    program_id = getattr(event, "program_id", None)
    told = pools.all if program_id is None else pools.of_program(program_id) or pools.all[:1]
    return [(pool, event) for pool in told]


def _arrival(pools: Pools, event: TurnAsk) -> Sequence[Addressed]:
    """Route a turn to its pool. A program that begins there keeps its tenant and group from the other pools."""
    if event.pinned_replica_id is not None:
        return [(pools.of_replica(event.pinned_replica_id), event)]
    pool, program_id = pools.destination(event.turn_id), event.program_id
    if program_id is None or program_id in pool.scheduler.programs:
        return [(pool, event)]
    hopeless = next((each for each in pools.all if program_id in each.scheduler.refused_ids), None)
    if hopeless is not None:
        return [(hopeless, event)]
    for known in pools.incarnations(program_id):
        event = structs.replace(
            event,
            tenant=event.tenant or known.tenant,
            group_id=event.group_id or (known.group.group_id if known.group is not None else ""),
            parent_id=event.parent_id or known.parent_id,
            program_class=event.program_class or known.program_class,
        )
    leaving = [
        (other, ProgramReleased(event.now_s, program_id))
        for other in pools.of_program(program_id)
        if other.scheduler.programs[program_id].place is other.scheduler.book.announced
    ]
    return [*_making_room(pools, pool, event), (pool, event), *leaving]


def _opening(pools: Pools, event: ProgramOpened) -> Sequence[Addressed]:
    """Announce a program in the first pool: nobody knows yet which models it will ask for."""
    if homes := pools.of_program(event.program_id):
        return [(homes[0], event)]
    return [*_making_room(pools, pools.all[0], event), (pools.all[0], event)]


def _making_room(pools: Pools, pool: Pool, event: TurnAsk | ProgramOpened) -> Sequence[Addressed]:
    """Make another pool forget a program if the total is at its limit and this pool has none to forget."""
    limits = pool.scheduler.limits
    if not limits.is_full(event.tenant, opens=True) or limits.whom_to_forget(event.tenant) is not None:
        return []
    others = [each for each in pools.all if each.scheduler.limits.whom_to_forget(event.tenant) is not None]
    largest = max(others, key=lambda each: len(each.scheduler.programs), default=None)
    return [] if largest is None else [(largest, ProgramCrowdedOut(event.now_s, event.tenant))]


def _release(pools: Pools, event: ProgramReleased) -> Sequence[Addressed]:
    """End a program in all pools, if the meant generation lives in one of them."""
    generations = [program.generation for program in pools.incarnations(event.program_id)]
    if event.generation is not None and event.generation not in generations:
        return [(pools.all[0], event)]
    hopeless = [pool for pool in pools.all if event.program_id in pool.scheduler.refused_ids]
    told = list(dict.fromkeys([*pools.of_program(event.program_id), *hopeless])) or pools.all[:1]
    outcomes = [event.outcome, *[""] * (len(told) - 1)]  # it counts once
    return [
        (pool, ProgramReleased(event.now_s, event.program_id, None, outcome))
        for pool, outcome in zip(told, outcomes, strict=True)
    ]


def _release_together(pools: Pools, event: ProgramsReleased) -> Sequence[Addressed]:
    """End programs in the pools that know any of them, be it only as hopeless."""
    return [
        (pool, event)
        for pool in pools.all
        if any(each in pool.scheduler.programs or each in pool.scheduler.refused_ids for each in event.program_ids)
    ]


def _judged(pools: Pools, event: ProgramJudged) -> Sequence[Addressed]:
    """Tell every pool of a program what a judge said of it."""
    programs = [(pool, pool.scheduler.programs[event.program_id]) for pool in pools.of_program(event.program_id)]
    if all(program.generation != event.generation for _, program in programs):
        return []
    return [(pool, replace(event, generation=program.generation)) for pool, program in programs]


def _route(pools: Pools, event: RouteSet) -> Sequence[Addressed]:
    """Tell each pool its own replicas of a route; without any, that a route it has there, or every route, ends."""
    told: list[Addressed] = []
    for pool in pools.all:
        own = tuple(target for target in event.targets if pools.of_replica(target[0]) is pool)
        routes = pool.scheduler.core.routing.routes
        if own or not event.targets or any((scope, name) == (event.scope, event.name) for scope, name, _ in routes):
            told.append((pool, replace(event, targets=own)))
    return told


def _provision(pools: Pools, event: ProvisionAsked) -> Sequence[Addressed]:
    return [(pools.all[0], event)]


_TOLD: dict[type[Any], Callable[[Pools, Any], Sequence[Addressed]]] = {
    TurnAsk: _arrival,
    TurnAdopted: lambda pools, event: [(pools.of_replica(event.replica_id), event)],
    ProgramOpened: _opening,
    ProgramReleased: _release,
    ProgramsReleased: _release_together,
    ProgramJudged: _judged,
    RouteSet: _route,
    ProvisionAsked: _provision,
    TurnLimited: lambda pools, event: [(pool, event) for pool in pools.all],
    ModelAsked: lambda pools, event: [(pools.of_model(event.model) or pools.all[0], event)],
}
"""Events that need more than the turn, replica or program they name to be addressed."""
