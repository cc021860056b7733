"""What an operator or a global policy may do to programs and replicas, and how the scheduler carries it out.

Theory of operation
===================
The primitives are those of Nalar ("Nalar: An agent serving framework", arXiv 2601.05109, Table 2). Where the paper says
session, agent instance and agent type, here stand program, replica and a scope of programs (`routes.Scope`).

- **route**: programs of a scope go to these replicas, by their weights. It narrows what a policy is asked to choose
  from; a program that must wait does so in a queue of that replica, which the policy does not see: whenever there may
  be room, the policy is asked for the first of each such queue, and then balances for all others. While it waits nobody
  that comes after it gets the room of that replica (`PausedQueue`), or only for a bounded time (`breakeven`).
- **set_priority**: a number that comes before whatever the policy says, lower first, in the paused queue and in
  engines; with a replica, in that engine alone.
- **migrate**: a pause and then a restore elsewhere, whether there is room or not. A program with a turn in flight is
  marked, and restored there when that ends; one that has no claim and no turn goes there with its next one.
- **kill**: a program ends at once. A replica drains and ends: that is for who started it, as is to **provision** one.

Control has two levels (section 4). An event of an operator, or a global policy that is asked once in a period what
should be changed (`GlobalPolicy` in `policies/parts.py`), only sets routes and priorities and moves programs; every
turn is then placed and ordered as it comes, by the scheduler and its policy, without asking again. What it is told in a
period is bounded (`NEWLY_WAITING_COUNT`), so that no event waits for long until it has decided.

Each primitive has a reason why it cannot be done (`why_not_...`), empty if it can: the view refuses by it, and the
admin API says it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from thunderagent.programs.decisions import EndReplica, Provision, Reason, SetPriority, SetRoute
from thunderagent.programs.events import (
    MigrationAsked,
    PrioritySet,
    ProgramKilled,
    ProvisionAsked,
    ReplicaKilled,
    RouteSet,
)
from thunderagent.programs.lifecycle import Status
from thunderagent.programs.policies.base import Moment
from thunderagent.programs.policies.parts import GlobalPolicy, next_due_s
from thunderagent.programs.policies.several import Several
from thunderagent.programs.routes import Routes, Scope, Targets, is_for

if TYPE_CHECKING:
    from thunderagent.programs.program import Program
    from thunderagent.programs.replica import Replica
    from thunderagent.programs.scheduler import Scheduler

MOST_PRIORITY = 1_000_000
"""Priorities are from minus this to this."""

NOT_THERE = "there is no "
"""How a reason begins that names a program or a replica which is not known."""

NEWLY_WAITING_COUNT = 8192
"""Of so many programs that began to wait a global policy hears in one period at most; of the others in the next ones.

No event is handled while it decides, so it is not to look at a burst in one go. A second's turns are fewer."""

PRIORITY_STEP = 2**32
"""By so much one step of a program's priority outdoes what a policy gives engines, in the numbers that they get."""


class Control:
    """Routes, priorities and moves, of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Begin with nothing said."""
        self._scheduler = scheduler
        policy: GlobalPolicy | Several | None = getattr(scheduler.policy, "control", None)
        self.policy_name = None if policy is None else policy.name
        """The word for the global policy; None without one."""
        policies = policy.policies if isinstance(policy, Several) else (policy,) if policy is not None else ()
        self._asked = [_Asked(each) for each in policies]
        self._changes_count = 0
        self.routes = Routes()
        self._open: set[str] = set()
        self.newly_waiting: Sequence[Program] = ()
        """Of whom a global policy hears, while it is asked."""

    def __repr__(self) -> str:
        return f"<Control: {len(self.routes)} routes, policy {self.policy_name}>"

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return what takes in each event of an operator."""
        return {
            RouteSet: self._route_set,
            PrioritySet: self._priority_set,
            MigrationAsked: self._migration_asked,
            ProgramKilled: self._program_killed,
            ReplicaKilled: self._replica_killed,
            ProvisionAsked: self._provision_asked,
        }

    @property
    def untold_count(self) -> int:
        """Programs of which a global policy is still to hear that they began to wait; some may wait no longer."""
        return max((len(asked.untold) for asked in self._asked), default=0)

    def decide(self) -> bool:
        """Ask the global policies whose time has come; return whether they changed anything."""
        now_s, before_count = self._scheduler.now_s, self._changes_count
        for asked in self._asked:
            if now_s >= asked.due_s:
                asked.due_s = next_due_s(asked.due_s, now_s, asked.policy.period_s)
                self.newly_waiting = asked.take_untold()
                asked.policy.decide(self._scheduler.view)
                self.newly_waiting = ()
        return self._changes_count != before_count

    def begins_to_wait(self, program: Program) -> None:
        """Note that a program's turn is held, for global policies to hear."""
        for asked in self._asked:
            asked.untold[program] = None

    def program_ended(self, program: Program) -> None:
        """Forget a program."""
        for asked in self._asked:
            asked.untold.pop(program, None)
        self.routes.program_ended(program)

    # --- route ------------------------------------------------------------------------------------------------------

    def why_not_route(self, scope: str, name: str, targets: Targets) -> str:
        """Say why a route cannot be set."""
        if scope not in set(Scope):
            return f"a route is for one of {', '.join(Scope)}, not {scope!r}"
        if bool(name) == (scope == Scope.ALL):
            return "a route for all has no name" if name else f"a route for a {scope} names it"
        if scope == Scope.PROGRAM and self._scheduler.table.get(name) is None:
            return f"there is no live program {name!r}"
        replica_ids = [replica_id for replica_id, _ in targets]
        if unknown := [replica_id for replica_id in replica_ids if replica_id not in self._scheduler.replicas]:
            return f"there is no replica {unknown[0]!r}"
        if len(set(replica_ids)) < len(replica_ids):
            return "a route names a replica twice"
        if not all(weight > 0 and isfinite(weight) for _, weight in targets):
            return "a weight is a number over 0"
        return ""

    def set_route(self, scope: Scope, name: str, targets: Targets, reason: Reason) -> None:
        """Send programs of a scope to replicas: those that wait now, the others with their next turn.

        Cost: O(programs of the route), or of all where there was none.
        """
        before = self.routes.set(scope, name, targets)
        self._changed()
        self._scheduler.decide(SetRoute(scope.value, name, targets, reason))
        table = self._scheduler.table
        meant = before.programs if before is not None else [each for each in table if is_for(scope, name, each)]
        for program in list(meant):
            self._bind_anew(program, keeps=program.status is Status.ACTIVE)

    def bind(self, program: Program) -> None:
        """Bind a program to a replica of its route, if it has one: to its own, if that is among them."""
        route = self.routes.take(program)
        if route is None:
            program.bound_to = None
            return
        for replica_id in (program.bound_to, program.replica_id):
            if replica_id is not None and route.names(replica_id) and self._is_open(replica_id):
                program.bound_to = replica_id
                return
        program.bound_to = route.next(self._is_open)

    def _bind_anew(self, program: Program, *, keeps: bool) -> None:
        """Bind a program after its route or replicas changed; unless it `keeps` what it has, it may go elsewhere."""
        before = program.bound_to
        if not keeps:
            program.bound_to = None
        self.bind(program)
        if program.bound_to != before and program.status is Status.PAUSED:
            self._scheduler.rank_anew(program)
            self._scheduler.settle_hold_reason(program)
            if program.bound_to is not None:
                self._scheduler.changed_replicas[program.bound_to] = self._scheduler.replicas[program.bound_to]

    def _is_open(self, replica_id: str) -> bool:
        replica = self._scheduler.replicas.get(replica_id)
        return replica is not None and replica.open_to_programs

    def replicas_changed(self) -> None:
        """Bind programs anew that a route sends to replicas that opened or closed."""
        now_open = {replica.replica_id for replica in self._scheduler.open_replicas}
        changed, self._open = now_open ^ self._open, now_open
        for route in self.routes.naming(changed) if self.routes else ():
            for program in list(route.programs):
                self._bind_anew(program, keeps=True)

    def let_in(self, moment: Moment, changed: Collection[str]) -> None:
        """Ask the policy about the first of those that wait for one replica, where there may be room.

        Who goes first of all is asked about first: room may be something that all replicas share, as places are.
        """
        scheduler = self._scheduler
        everywhere = moment is not Moment.TURN_ENDED or scheduler.place_is_free
        asked = {
            replica.replica_id: replica
            for replica in scheduler.granting_replicas
            if replica.replica_id in scheduler.queue.bound and (everywhere or replica.replica_id in changed)
        }
        while (program := scheduler.queue.first_bound(asked)) is not None:
            replica = asked[program.bound_to or ""]
            placement = scheduler.policy.place(scheduler.view, program, [replica])
            if placement.replica is None:
                program.hold_reason = placement.reason
                del asked[replica.replica_id]
            else:
                scheduler.restore(program, replica, placement.reason)

    # --- priority ---------------------------------------------------------------------------------------------------

    def why_not_priority(self, program_id: str, priority: int, replica_id: str | None) -> str:
        """Say why a program cannot get a priority."""
        if self._scheduler.table.get(program_id) is None:
            return f"there is no live program {program_id!r}"
        if replica_id is not None and replica_id not in self._scheduler.replicas:
            return f"there is no replica {replica_id!r}"
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY or priority % 1:
            return f"a priority is a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        return ""

    def set_priority(self, program: Program, priority: int, replica_id: str | None, reason: Reason) -> None:
        """Give a program a priority; nothing happens if it has it."""
        if replica_id is None:
            if program.priority == priority:
                return
            program.priority = priority
            if program.status is Status.PAUSED:
                self._scheduler.queue.rank_anew(program)
        else:
            program.priority_by_replica = {**(program.priority_by_replica or {}), replica_id: priority}
        self._changed()
        self._scheduler.decide(SetPriority(program.program_id, priority, replica_id, reason))

    # --- migrate ----------------------------------------------------------------------------------------------------

    def why_not_migrate(self, program_id: str, replica_id: str) -> str:
        """Say why a program cannot go to a replica."""
        program = self._scheduler.table.get(program_id)
        if program is None:
            return f"there is no live program {program_id!r}"
        replica = self._scheduler.replicas.get(replica_id)
        if replica is None:
            return f"there is no replica {replica_id!r}"
        if not replica.grants:
            return f"replica {replica_id} takes no programs now"
        if not program.admitted:
            return f"program {program_id!r} is not admitted yet"
        if program.status is Status.ACTIVE and program.replica_id == replica_id:
            return f"program {program_id!r} is on {replica_id} already"
        if program.destination is not None and program.destination[0] == replica_id:
            return f"program {program_id!r} is on its way to {replica_id} already"
        if program.bound_to is not None and program.route is not None and not program.route.names(replica_id):
            return f"program {program_id!r} has a route that does not lead to {replica_id}"
        return ""

    def migrate(self, program: Program, replica: Replica, reason: Reason) -> None:
        """Move a program: now, when its turns in flight have ended, or when its next one comes."""
        scheduler = self._scheduler
        self._changed()
        if program.bound_to is not None:
            program.bound_to = replica.replica_id
        if program.status is Status.ACTIVE and program.in_flight:
            program.destination = (replica.replica_id, reason)
            scheduler.mark(program, reason, cause=Reason.MOVED)
        elif program.status is Status.ACTIVE:
            scheduler.pause(program, reason)
            scheduler.restore(program, replica, reason)
        elif program.held:
            scheduler.restore(program, replica, reason)
        else:
            program.destination = (replica.replica_id, reason)
            scheduler.rank_anew(program)

    def take_destination(self, program: Program) -> tuple[Replica | None, Reason]:
        """Return where a program is to go to, if it still can; it is on its way no longer."""
        if program.destination is None:
            return None, Reason.CONTROL
        (replica_id, reason), program.destination = program.destination, None
        replica = self._scheduler.replicas.get(replica_id)
        return (replica if replica is not None and replica.grants else None), reason

    def destination_is_open(self, program: Program) -> bool:
        """Say whether a program is on its way to a replica that takes programs, now or when grants go on."""
        return program.destination is not None and self._is_open(program.destination[0])

    # --- kill and provision -----------------------------------------------------------------------------------------

    def why_not_kill(self, program_id: str) -> str:
        """Say why a program cannot be ended."""
        return "" if self._scheduler.table.get(program_id) is not None else f"there is no live program {program_id!r}"

    def kill(self, program: Program) -> None:
        """End a program."""
        self._changed()
        self._scheduler.terminate(program, Reason.KILLED)

    def why_not_kill_replica(self, replica_id: str) -> str:
        """Say why a replica cannot be ended."""
        return "" if replica_id in self._scheduler.replicas else f"there is no replica {replica_id!r}"

    def kill_replica(self, replica_id: str, reason: Reason) -> None:
        """Have a replica drain and end."""
        self._changed()
        self._scheduler.decide(EndReplica(replica_id, reason))

    def provision(self, reason: Reason) -> None:
        """Have one more replica started."""
        self._changed()
        self._scheduler.decide(Provision(reason))

    def _changed(self) -> None:
        self._changes_count += 1

    # --- an operator's events ---------------------------------------------------------------------------------------

    def _route_set(self, event: RouteSet) -> None:
        if not self.why_not_route(event.scope, event.name, event.targets):
            self.set_route(Scope(event.scope), event.name, event.targets, Reason.OPERATOR)
            self._scheduler.balance(Moment.TICK)

    def _priority_set(self, event: PrioritySet) -> None:
        program = self._scheduler.table.get(event.program_id)
        if program is not None and not self.why_not_priority(event.program_id, event.priority, event.replica_id):
            self.set_priority(program, event.priority, event.replica_id, Reason.OPERATOR)
            self._scheduler.balance(Moment.TICK)

    def _migration_asked(self, event: MigrationAsked) -> None:
        program = self._scheduler.table.get(event.program_id)
        if program is not None and not self.why_not_migrate(event.program_id, event.replica_id):
            self.migrate(program, self._scheduler.replicas[event.replica_id], Reason.OPERATOR)
            self._scheduler.balance(Moment.TICK)

    def _program_killed(self, event: ProgramKilled) -> None:
        program = self._scheduler.table.get(event.program_id)
        if program is not None:
            self.kill(program)
            self._scheduler.balance(Moment.PROGRAM_ENDED)

    def _replica_killed(self, event: ReplicaKilled) -> None:
        if not self.why_not_kill_replica(event.replica_id):
            self.kill_replica(event.replica_id, Reason.OPERATOR)

    def _provision_asked(self, event: ProvisionAsked) -> None:  # noqa: ARG002 - its time was taken in already
        self.provision(Reason.OPERATOR)


class _Asked:
    """A global policy, when it is asked next, and of whom it is still to hear."""

    __slots__ = ("due_s", "policy", "untold")

    def __init__(self, policy: GlobalPolicy) -> None:
        """Have `policy` asked at the next tick."""
        self.policy = policy
        self.due_s = -inf
        self.untold: dict[Program, None] = {}
        """Programs whose turns were held since it heard of them, if it ever did."""

    def take_untold(self) -> Sequence[Program]:
        """Take out who began to wait first and waits still, at most `NEWLY_WAITING_COUNT`."""
        told: list[Program] = []
        for program in list(self.untold):
            if len(told) == NEWLY_WAITING_COUNT:
                break
            del self.untold[program]
            if waits(program):
                told.append(program)
        return told


def waits(program: Program) -> bool:
    """Say whether a program waits to be let in, with a turn."""
    return program.status is Status.PAUSED and bool(program.held)


def engine_priority(program: Program, replica_id: str, policy_priority: int | None) -> int | None:
    """Return the number that an engine is given with a turn: a program's own priority before the policy's."""
    by_replica = program.priority_by_replica
    priority = program.priority if by_replica is None else by_replica.get(replica_id, program.priority)
    if not priority or policy_priority is None:
        return priority or policy_priority
    return priority * PRIORITY_STEP + max(-PRIORITY_STEP // 2, min(PRIORITY_STEP // 2 - 1, policy_priority))
