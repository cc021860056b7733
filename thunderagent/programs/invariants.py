"""The truths that hold after every event. Tests check them after each one; they cost O(everything)."""

from __future__ import annotations

from collections import Counter
from math import inf, isclose

from thunderagent.programs.decisions import Reason
from thunderagent.programs.families import family_of
from thunderagent.programs.lifecycle import Phase, Status
from thunderagent.programs.prefixes import PrefixTree
from thunderagent.programs.program import Program
from thunderagent.programs.replica import Replica
from thunderagent.programs.scheduler import Scheduler


class _Story:
    """A program and what happened to it, put into words only where a truth does not hold: most of a check's time."""

    __slots__ = ("_program",)

    def __init__(self, program: Program) -> None:
        self._program = program

    def __str__(self) -> str:
        return "\n".join(map(str, (self._program, *self._program.story())))


def check(scheduler: Scheduler) -> None:
    """Raise `AssertionError` with the program's story where a truth does not hold."""
    for program in scheduler.table:
        _check_program(scheduler, program)
    for replica in scheduler.replicas.values():
        _check_replica(scheduler, replica)
    waiting = [turn for program in scheduler.table if program.status is Status.PAUSED for turn in program.held.values()]
    assert scheduler.ledger.waiting_count == len(waiting) + len(scheduler.anonymous_held), "waiting turns miscounted"
    leaving = [turn for program in scheduler.table if program.marked for turn in program.held.values()]
    impatient_count = sum(turn.deadline_s < inf for turn in (*waiting, *leaving))
    assert len(scheduler.impatient) == impatient_count, "impatient turns miscounted"
    children = [program for program in scheduler.table if program.parent_id]
    assert bool(scheduler.families) == bool(children), "families miscounted"
    if scheduler.granting_replicas:
        assert scheduler.impatient.first_due(scheduler.now_s) is None, "a turn is held for longer than its client waits"
    for child in children:
        _check_child(scheduler, child)
    tenants = Counter(program.tenant for program in scheduler.table)
    assert all(scheduler.table.count_of(tenant) == count for tenant, count in tenants.items()), "programs miscounted"
    assert tenants[scheduler.table.largest_tenant()] == max(tenants.values(), default=0), "the largest is another"
    active = [program for program in scheduler.table if program.status is Status.ACTIVE]
    assert scheduler.active_count == len(active), "active programs miscounted"
    admitted_count = sum(program.admitted for program in scheduler.table)
    assert scheduler.admitted_count == admitted_count, "admitted programs miscounted"
    if scheduler.tenants is not None:
        _check_tenants(scheduler, active)
    at_tools = [program for program in scheduler.table if program.tool_runs]
    assert all(program.phase is Phase.ACTING for program in at_tools), "a tool runs while a turn is with us"
    assert scheduler.knowledge.tools_running_count == len(at_tools), "running tools miscounted"
    known = set(scheduler.replicas)
    assert set(scheduler.ledger.accounts) >= known, "a replica without an account"
    assert set(scheduler.changed_replicas) <= known, "a replica that was removed is to be balanced"
    assert {replica.replica_id for replica in scheduler.open_replicas} <= known, "a removed replica is open"
    placed = {turn.account_id for turn in scheduler.turns.values()} - {None}
    assert placed <= known, f"turns in flight on replicas that are not there: {placed - known}"
    granting = [replica for replica in scheduler.replicas.values() if replica.grants]
    assert list(scheduler.granting_replicas) == granting, "who grants is stale"
    for turn in scheduler.anonymous_held.values():
        pinned = scheduler.replicas.get(turn.pinned_replica_id or "")
        may_run = bool(granting) if pinned is None else not pinned.suspended_for
        assert not may_run, "an anonymous turn is held though a replica is usable"


def _check_tenants(scheduler: Scheduler, active: list[Program]) -> None:
    assert scheduler.tenants is not None
    waiting = [*scheduler.queue.waiting()]
    seen = {tenant.name: tenant for tenant in scheduler.tenants}
    least_token_s = scheduler.tenants.least_token_s
    kept = [tenant for tenant in seen.values() if not tenant.busy and tenant.level_token_s <= least_token_s]
    assert not kept, f"tenants are kept that have and want nothing, and had no more than others: {kept}"
    for name in {program.tenant for program in (*active, *waiting)} | set(seen):
        claim_tokens = sum(program.claim_tokens for program in active if program.tenant == name)
        waiting_count = sum(program.tenant == name for program in waiting)
        tenant = seen.get(name)
        assert (tenant.claim_tokens if tenant else 0) == claim_tokens, f"claims of tenant {name!r} differ"
        assert (tenant.waiting_count if tenant else 0) == waiting_count, f"who waits of tenant {name!r} differs"


def _check_child(scheduler: Scheduler, child: Program) -> None:
    parent = scheduler.table.get(child.parent_id)
    if child.held and child.status is Status.PAUSED:
        story = _Story(child)
        family = family_of(child)
        assert child in scheduler.families.held_children(family), f"not among its parent's children\n{story}"
        waits_for_room = parent is None or parent.tenant != child.tenant or family in scheduler.families.overdrawn
        if scheduler.granting_replicas and parent is not None and not waits_for_room:
            alone = scheduler.tenants is None or not scheduler.families.active_count(family)
            assert parent.status is not Status.ACTIVE or not alone, f"held, though its parent has a claim\n{story}"


def _check_program(scheduler: Scheduler, program: Program) -> None:
    story = _Story(program)
    homes = [r.replica_id for r in scheduler.replicas.values() if program.program_id in r.programs]
    queued = program in scheduler.queue.reasoning, program in scheduler.queue.acting
    outside = program.status is Status.PAUSED and program.phase is Phase.REASONING and not program.admitted
    assert (program in scheduler.queue.outside) == outside, f"outside, or not, though it is not so\n{story}"
    with_us = bool(program.held or program.in_flight)
    assert (program.phase is Phase.REASONING) == with_us, f"phase and turns disagree\n{story}"
    assert program.status is not Status.TERMINATED, f"terminated, but in the table\n{story}"
    claim_tokens = program.measure_claim() + program.reserve_tokens
    assert program.claim_tokens == claim_tokens, f"claim is stale\n{story}"
    assert program.turn_count >= len(program.in_flight), f"turns miscounted\n{story}"
    if program.status is Status.ACTIVE:
        assert homes == [program.replica_id], f"active on {homes}\n{story}"
        assert program.admitted, f"active, but not admitted\n{story}"
        assert scheduler.replicas[homes[0]].up, f"active on a replica that is down\n{story}"
        suspended_for = scheduler.replicas[homes[0]].suspended_for
        assert not program.held or program.marked or suspended_for, f"active, but a turn is held\n{story}"
        assert program.marked or scheduler.replicas[homes[0]].open_to_programs, f"does not leave\n{story}"
        assert program.in_flight or not program.marked, f"should have left\n{story}"
        assert queued == (False, False), f"active, but in the queue\n{story}"
    else:
        assert not homes, f"paused, but active on {homes}\n{story}"
        assert not program.in_flight, f"paused with a turn in flight\n{story}"
        assert not program.marked, f"paused and marked\n{story}"
        reasoning = program.phase is Phase.REASONING
        anywhere = program.admitted and program.bound_to is None
        in_queue = reasoning and anywhere, not (reasoning or program.idle or program.destination) and anywhere
        assert queued == in_queue, f"in the wrong queue\n{story}"
    waits_at = [replica_id for replica_id, bound in scheduler.queue.bound.items() if program in bound]
    is_bound = program.status is Status.PAUSED and program.held and program.admitted and program.bound_to is not None
    assert waits_at == ([program.bound_to] if is_bound else []), f"waits for the wrong replica\n{story}"
    route = program.route
    assert route is None or program in route.programs, f"not among those of its route\n{story}"
    if program.status is Status.PAUSED and not program.announced:
        assert route is scheduler.control.routes.of(program), f"its route is another one\n{story}"
    if program.bound_to is not None:
        assert route is not None, f"bound without a route\n{story}"
        assert route.names(program.bound_to), f"bound against its route\n{story}"
        assert scheduler.replicas[program.bound_to].open_to_programs, f"bound to a replica that is closed\n{story}"
    if program.status is Status.ACTIVE:
        on_its_way = Reason.MOVED in program.leaves_for
        assert (program.destination is not None) == on_its_way, f"on its way, or not, though marked so\n{story}"
        assert not on_its_way or scheduler.control.destination_is_open(program), f"on its way to nowhere\n{story}"
    for turn in program.in_flight.values():
        assert turn.account_id == program.replica_id, f"a turn in flight elsewhere\n{story}"
    for turn in (*program.held.values(), *program.lost.values()):
        assert turn.account_id is None, f"a held or lost turn on a replica\n{story}"


def _check_replica(scheduler: Scheduler, replica: Replica) -> None:
    account, programs = replica.account, list(replica.programs.values())
    reasoning = [program for program in programs if program.phase is Phase.REASONING]
    acting = [program for program in programs if program.phase is Phase.ACTING]
    turns = [turn for turn in scheduler.turns.values() if turn.account_id == replica.replica_id]
    assert replica.up or not turns, f"a turn in flight on a replica that is down: {replica!r}"
    assert replica.up or not programs, f"a program on a replica that is down: {replica!r}"
    assert account.turn_count == len(turns), f"turns miscounted: {replica!r}"
    assert account.reasoning_count == len(reasoning), f"reasoning programs miscounted: {replica!r}"
    assert account.acting_count == len(acting), f"acting programs miscounted: {replica!r}"
    assert account.reasoning_tokens == sum(p.claim_tokens for p in reasoning), f"sum differs: {replica!r}"
    assert account.acting_tokens == sum(p.claim_tokens for p in acting), f"sum differs: {replica!r}"
    assert account.marked_tokens == sum(p.claim_tokens for p in reasoning if p.marked), f"sum differs: {replica!r}"
    assert account.usable == replica.grants, f"stale: {replica!r}"
    assert account.other_tokens == sum(t.claim_tokens for t in turns if t.program is None), f"sum differs: {replica!r}"
    assert set(replica.acting) == set(acting), f"pause order misses some: {replica!r}"
    assert set(replica.reasoning) == {p for p in reasoning if not p.marked}, f"mark order misses some: {replica!r}"
    to_unmark = {p for p in reasoning if p.marked_by_policy}
    assert set(replica.marked) == to_unmark, f"marked programs differ: {replica!r}"
    assert set(replica.expiring) <= set(acting), f"who does not act expires: {replica!r}"
    assert account.shared_tokens == _shared_tokens(scheduler, replica), f"shared tokens differ: {replica!r}"
    now_s = scheduler.now_s
    weighed_tokens = sum(p.claim_tokens * account.acting.weight(now_s - p.acting_since_s) for p in acting)
    assert isclose(account.acting.at(now_s), weighed_tokens, rel_tol=1e-6, abs_tol=1e-3), f"decayed sum: {replica!r}"


def _shared_tokens(scheduler: Scheduler, replica: Replica) -> int:
    """Count what is claimed more than once there, chain by chain."""
    tree = PrefixTree()
    chains = [branch.prefix for program in replica.programs.values() for branch in program.branches.values()]
    return sum(tree.enter(scheduler.shares.tree.sized(chain), replica.replica_id) for chain in chains)
