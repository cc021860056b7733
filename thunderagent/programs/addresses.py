"""Which pools hear of an event when there are several, and what each is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from thunderagent.programs.messages import TurnAsk
from thunderagent.programs.model.events import (
    Event,
    ProgramCrowdedOut,
    ProgramJudged,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    TurnAdopted,
)
from thunderagent.programs.model.fleet_events import ModelAsked, ProvisionAsked, RouteSet, TurnLimited

if TYPE_CHECKING:
    from thunderagent.programs.pool import Pool
    from thunderagent.programs.pools import Addressed, Pools


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
