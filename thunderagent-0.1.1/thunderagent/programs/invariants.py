"""The invariants after every event. Tests check them after each one; they cost O(everything)."""

from __future__ import annotations

from collections import Counter
from math import inf, isclose

from thunderagent.programs.messages import Reason
from thunderagent.programs.rules.families import family_of
from thunderagent.programs.rules.routes import serving
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.paused_queue import QueuePlace
from thunderagent.programs.state.prefixes import PrefixTree
from thunderagent.programs.state.program import Kind, Phase, Place, Program
from thunderagent.programs.state.ranked_set import RankedSet
from thunderagent.programs.state.replica import Replica


class _Story:
    """A program's story, rendered only if an invariant is broken: rendering is most of a check's time."""

    __slots__ = ("_program",)

    def __init__(self, program: Program) -> None:
        self._program = program

    def __str__(self) -> str:
        return "\n".join(map(str, (self._program, *self._program.story())))


def check(scheduler: Scheduler) -> None:
    """Raise `AssertionError` with the program's story if an invariant is broken."""
    book = scheduler.book
    programs = list(book.programs.values())
    for program in programs:
        _check_program(scheduler, program)
    check_sums(scheduler)
    for replica in book.replicas.values():
        _check_replica(scheduler, replica)
    for place in _places(book):
        if isinstance(place, QueuePlace):
            there = {program for program in programs if program.place is place}
            assert set(place.order) == there, f"the order misses some: {place!r}"
            assert there or place.kind is not Kind.WAITING or place.replica_id is None, f"nobody waits: {place!r}"
    waiting = [turn for program in programs if not program.place.active for turn in program.held.values()]
    leaving = [turn for program in programs if program.marked for turn in program.held.values()]
    assert book.ledger.waiting_count == len(waiting) + len(book.anonymous_held), "waiting turns miscounted"
    with_deadline_count = sum(turn.deadline_s < inf for turn in (*waiting, *leaving))
    assert len(scheduler.deadlines) == with_deadline_count, "turns with a deadline miscounted"
    if book.granting_replicas:
        assert scheduler.deadlines.first_due(book.now_s) is None, "a turn is held for longer than its client waits"
    children = [program for program in programs if program.parent_id]
    assert bool(scheduler.families) == bool(children), "families miscounted"
    for child in children:
        _check_child(scheduler, child)
    tenants = Counter(program.tenant for program in programs)
    limits = scheduler.limits
    assert all(limits.count_of(tenant) == count for tenant, count in tenants.items()), "programs miscounted"
    assert tenants[limits.largest_tenant] == max(tenants.values(), default=0), "the largest is another"
    if scheduler.tenants is not None:
        _check_tenants(scheduler)
    at_tools = [program for program in programs if program.tool_runs]
    assert all(program.phase is Phase.ACTING for program in at_tools), "a tool runs while a turn is with us"
    assert scheduler.knowledge.tools_running_count == len(at_tools), "running tools miscounted"
    _check_replicas_known(book)


def check_sums(scheduler: Scheduler) -> None:
    """Raise `AssertionError` if a sum differs from its parts, also within an event, whenever a policy is asked."""
    book = scheduler.book
    programs = list(book.programs.values())
    for place in _places(book):
        there_tokens = [program.claim_tokens for program in programs if program.place is place]
        assert place.count == len(there_tokens), f"programs miscounted: {place!r}"
        assert place.tokens == sum(there_tokens), f"sum differs: {place!r}"
    for replica in book.replicas.values():
        _check_account(scheduler, replica)
    assert book.active_count == sum(program.place.active for program in programs), "active programs miscounted"
    assert book.admitted_count == sum(program.admitted for program in programs), "admitted programs miscounted"
    if scheduler.tenants is not None:
        claims: Counter[str] = Counter()
        for program in programs:
            claims[program.tenant] += program.claim_tokens if program.place.claims else 0
        kept = {tenant.name: tenant.claim_tokens for tenant in scheduler.tenants if tenant.claim_tokens}
        assert kept == dict(+claims), f"claims of tenants differ: {kept}, {claims}"


def _places(book: Book) -> list[Place]:
    queue = book.queue
    of_all = [book.announced, book.dismissed, book.idle, book.destined, queue.resting, queue.waiting, queue.unadmitted]
    of_replicas = [
        place
        for each in book.replicas.values()
        for place in (each.asking, each.working, each.leaving, each.stalled, each.acting)
    ]
    return [*of_all, book.asking, *queue.routed.values(), *of_replicas]


def _check_replicas_known(book: Book) -> None:
    known = set(book.replicas)
    assert set(book.ledger.accounts) >= known, "a replica without an account"
    assert set(book.changed_replicas) <= known, "a replica that was removed is to be balanced"
    assert {replica.replica_id for replica in book.open_replicas} <= known, "a removed replica is open"
    placed = {turn.account_id for turn in book.turns.values()} - {None}
    assert placed <= known, f"turns in flight on replicas that are not there: {placed - known}"
    granting = [replica for replica in book.replicas.values() if replica.grants]
    assert book.granting_replicas == granting, "who grants is stale"
    for turn in book.anonymous_held.values():
        pinned = book.replicas.get(turn.pinned_replica_id or "")
        may_run = bool(serving(granting, turn.served_by)) if pinned is None else not pinned.suspended_for
        assert not may_run, "an anonymous turn is held though a replica is usable"


def _check_tenants(scheduler: Scheduler) -> None:
    assert scheduler.tenants is not None
    waiting = [*scheduler.queue.with_turns()]
    seen = {tenant.name: tenant for tenant in scheduler.tenants}
    least_token_s = scheduler.tenants.least_token_s
    kept = [tenant for tenant in seen.values() if not tenant.busy and tenant.level_token_s <= least_token_s]
    assert not kept, f"tenants are kept that have and want nothing, and had no more than others: {kept}"
    for name in {program.tenant for program in waiting} | set(seen):
        waiting_count = sum(program.tenant == name for program in waiting)
        tenant = seen.get(name)
        assert (tenant.waiting_count if tenant else 0) == waiting_count, f"who waits of tenant {name!r} differs"


def _check_child(scheduler: Scheduler, child: Program) -> None:
    parent = scheduler.programs.get(child.parent_id)
    if child.held and not child.place.active:
        story = _Story(child)
        family = family_of(child)
        assert child in scheduler.families.held_children(family), f"not among its parent's children\n{story}"
        waits_for_room = parent is None or parent.tenant != child.tenant or family in scheduler.families.overdrawn
        if scheduler.book.granting_replicas and parent is not None and not waits_for_room:
            alone = scheduler.tenants is None or not scheduler.families.active_count(family)
            assert not (parent.place.active and alone), f"held, though its parent has a claim\n{story}"


def _check_program(scheduler: Scheduler, program: Program) -> None:
    story = _Story(program)
    book, place = scheduler.book, program.place
    homes = [replica.replica_id for replica in book.replicas.values() if program.program_id in replica.programs]
    assert place.kind not in (Kind.ASKING, Kind.ENDED), f"between two events at {place!r}\n{story}"
    with_us = bool(program.held or program.in_flight)
    assert (program.phase is Phase.REASONING) == with_us, f"phase and turns disagree\n{story}"
    claim_tokens = program.measure_claim() + program.reserve_tokens
    assert program.claim_tokens == claim_tokens, f"claim is stale\n{story}"
    assert program.turn_count >= len(program.in_flight), f"turns miscounted\n{story}"
    assert bool(program.leaves_for) == (place.kind is Kind.LEAVING), (
        f"leaves, or not, for {program.leaves_for}\n{story}"
    )
    assert not program.hint_keeps or (program.hint is not None and place.kind is Kind.ACTING), (
        f"a hint keeps what it may not\n{story}"
    )
    if place.active:
        replica = book.replicas[program.replica_id or ""]
        assert homes == [program.replica_id] == [place.replica_id], f"active on {homes}\n{story}"
        assert replica.up, f"active on a replica that is down\n{story}"
        assert (place.kind is Kind.STALLED) == bool(program.held and not program.marked), f"stalled, or not\n{story}"
        assert place.kind is not Kind.STALLED or replica.suspended_for, f"active, but a turn is held\n{story}"
        assert program.marked or replica.open_to_programs, f"does not leave\n{story}"
        assert program.in_flight or not program.marked, f"should have left\n{story}"
        on_its_way = Reason.MOVED in program.leaves_for
        assert (program.destination is not None) == on_its_way, f"on its way, or not, though marked so\n{story}"
        assert not on_its_way or scheduler.core.routing.is_open(program.destination[0]), f"to nowhere\n{story}"  # type: ignore[index]
    else:
        assert not homes, f"paused, but active on {homes}\n{story}"
        assert not program.in_flight, f"paused with a turn in flight\n{story}"
        assert place is book.paused_place(program), f"in the wrong place\n{story}"
    _check_route(scheduler, program, story)
    for turn in program.in_flight.values():
        assert turn.account_id == program.replica_id, f"a turn in flight elsewhere\n{story}"
    for turn in (*program.held.values(), *program.lost.values()):
        assert turn.account_id is None, f"a held or lost turn on a replica\n{story}"


def _check_route(scheduler: Scheduler, program: Program, story: _Story) -> None:
    route, place = program.route, program.place
    assert route is None or program in route.programs, f"not among those of its route\n{story}"
    if not place.active and place is not scheduler.book.announced:
        assert route is scheduler.core.routing.routes.of(program), f"its route is another one\n{story}"
    if program.routed_to is not None:
        served_by, is_open = program.served_by, scheduler.core.routing.is_open
        assert route is not None or served_by is not None, f"routed without a route\n{story}"
        assert served_by is not None or (route and route.names(program.routed_to)), f"against its route\n{story}"
        assert served_by is None or served_by.names(program.routed_to), f"its model is not there\n{story}"
        others = served_by is None or any(is_open(each) for each, _ in served_by.targets)
        assert is_open(program.routed_to) or not others, f"routed to a replica that is closed\n{story}"
    if program.served_by is not None:
        assert program in program.served_by.programs, f"not among those of its model\n{story}"
        assert program.routed_to is not None, f"its model is not served everywhere, and it may go anywhere\n{story}"


def _check_replica(scheduler: Scheduler, replica: Replica) -> None:
    programs = list(replica.programs.values())
    turns = [turn for turn in scheduler.turns.values() if turn.account_id == replica.replica_id]
    assert replica.up or not turns, f"a turn in flight on a replica that is down: {replica!r}"
    assert replica.up or not programs, f"a program on a replica that is down: {replica!r}"
    assert replica.account.usable == replica.grants, f"stale: {replica!r}"
    acting = {program for program in programs if program.place is replica.acting}
    assert _holds(replica.acting.kept, acting), f"pause order misses some: {replica!r}"
    working = {program for program in programs if program.place is replica.working}
    assert _holds(replica.working.kept, working), f"mark order misses some: {replica!r}"
    by_policy = {program for program in programs if program.marked_by_policy}
    assert _holds(replica.leaving.kept, by_policy), f"marked programs differ: {replica!r}"
    expiring = {program for program in acting if program.hold_until_s < inf}
    assert _holds(replica.acting.kept_expiring, expiring), f"who expires differs: {replica!r}"


def _check_account(scheduler: Scheduler, replica: Replica) -> None:
    account = replica.account
    programs = [program for program in replica.programs.values() if program.place.claims]
    turns = [turn for turn in scheduler.turns.values() if turn.account_id == replica.replica_id]
    assert account.turn_count == len(turns), f"turns miscounted: {replica!r}"
    assert account.active_count == len(programs), f"programs miscounted: {replica!r}"
    assert account.other_tokens == sum(t.claim_tokens for t in turns if t.program is None), f"sum differs: {replica!r}"
    assert account.shared_tokens == _shared_tokens(scheduler, replica), f"shared tokens differ: {replica!r}"
    claimed_tokens = sum(program.claim_tokens for program in programs) + account.other_tokens
    assert account.demand_tokens == claimed_tokens - account.shared_tokens, f"sum differs: {replica!r}"
    assert account.growth_tokens == sum(program.growth_tokens for program in programs), f"growth differs: {replica!r}"
    acting = [program for program in programs if program.place is replica.acting]
    hint_tokens = sum(program.claim_tokens for program in acting if program.hint_keeps)
    assert replica.acting.hint_tokens == hint_tokens, f"what hints keep differs: {replica!r}"
    if account.decayed is not None:
        now_s, decayed = scheduler.now_s, account.decayed
        weighed_tokens = sum(p.claim_tokens * decayed.weight(now_s - p.acting_since_s) for p in acting)
        assert isclose(decayed.at(now_s), weighed_tokens, rel_tol=1e-6, abs_tol=1e-3), f"decayed sum: {replica!r}"


def _holds(order: RankedSet[Program] | None, programs: set[Program]) -> bool:
    """Return whether an order holds exactly these programs; an order that is not kept holds none wrongly."""
    return order is None or set(order) == programs


def _shared_tokens(scheduler: Scheduler, replica: Replica) -> int:
    """Count what is claimed more than once there, chain by chain."""
    tree = PrefixTree()
    chains = [branch.prefix for program in replica.programs.values() for branch in program.branches.values()]
    return sum(tree.enter(scheduler.book.prefixes.tree.sized(chain), replica.replica_id) for chain in chains)
