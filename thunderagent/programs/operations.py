"""The operations: what an operator or a global policy may do to programs and replicas.

Theory of operation
===================
They are the primitives of Nalar ("Nalar: An agent serving framework", arXiv 2601.05109, Table 2). The paper's session,
agent instance and agent type are here program, replica and a scope of programs (`routes.Scope`).

- **route**: programs of a scope go to these replicas, by weight. It narrows the policy's choice (`rules/routes.py`).
- **set_priority**: a number that comes before the policy's rank, lower first, in the paused queue and in engines; with
  a replica, in that engine alone.
- **migrate**: a pause and then a restore elsewhere, regardless of room. A program with a turn in flight is marked, and
  restored there when that ends; one without claim and turn goes there with its next turn.
- **kill**: a program ends at once. A replica drains and ends: whoever started it does that, and also **provision**.

There are two levels (section 4). An operator's event, or a global policy that is asked periodically what should be
changed (`verbs/global_policy.py`), only sets routes and priorities and moves programs. The scheduler and its policy
then place and order every turn as it arrives, without asking again.

Each operation can say why it is impossible (`why_not_...`), empty if it is possible: the view refuses by it, and the
admin API reports it.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

from thunderagent.programs.book.replica import Replica
from thunderagent.programs.core import Core
from thunderagent.programs.model.advice.routes import Scope, Targets
from thunderagent.programs.model.decisions import EndReplica, Provision, Reason, SetPriority
from thunderagent.programs.model.program import Program

MOST_PRIORITY: Final = 1_000_000
"""Priorities are from minus this to this."""

NOT_THERE: Final = "there is no "
"""How a reason begins that names an unknown program or replica."""


class Operations:
    """Routes, priorities, moves and ends of one scheduler."""

    __slots__ = ("_book", "_core")

    def __init__(self, core: Core) -> None:
        """Carry operations out by `core`."""
        self._core = core
        self._book = core.book

    # --- route ------------------------------------------------------------------------------------------------------

    def why_not_route(self, scope: str, name: str, targets: Targets) -> str:
        """Return why a route cannot be set."""
        if scope not in set(Scope):
            return f"a route is for one of {', '.join(Scope)}, not {scope!r}"
        if bool(name) == (scope == Scope.ALL):
            return "a route for all has no name" if name else f"a route for a {scope} names it"
        if scope == Scope.PROGRAM and self._book.programs.get(name) is None:
            return f"there is no live program {name!r}"
        replica_ids = [replica_id for replica_id, _ in targets]
        if unknown := [replica_id for replica_id in replica_ids if replica_id not in self._book.replicas]:
            return f"there is no replica {unknown[0]!r}"
        if len(set(replica_ids)) < len(replica_ids):
            return "a route names a replica twice"
        if not all(weight > 0 and isfinite(weight) for _, weight in targets):
            return "a weight is a number over 0"
        return ""

    def set_route(self, scope: Scope, name: str, targets: Targets, reason: Reason) -> None:
        """Send programs of a scope to replicas: waiting ones now, the others with their next turn."""
        self._changed()
        self._core.routing.set_route(self._core, scope, name, targets, reason)

    # --- priority ---------------------------------------------------------------------------------------------------

    def why_not_priority(self, program_id: str, priority: int, replica_id: str | None) -> str:
        """Return why a program cannot get a priority."""
        if self._book.programs.get(program_id) is None:
            return f"there is no live program {program_id!r}"
        if replica_id is not None and replica_id not in self._book.replicas:
            return f"there is no replica {replica_id!r}"
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY or priority % 1:
            return f"a priority is a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        return ""

    def set_priority(self, program: Program, priority: int, replica_id: str | None, reason: Reason) -> None:
        """Give a program a priority; do nothing if it has that already."""
        if replica_id is None:
            if program.priority == priority:
                return
            program.priority = priority
            if not program.place.active:
                program.place.rank(program)
        else:
            program.priority_by_replica = {**(program.priority_by_replica or {}), replica_id: priority}
        self._changed()
        self._book.decisions.append(SetPriority(program.program_id, priority, replica_id, reason))

    # --- migrate ----------------------------------------------------------------------------------------------------

    def why_not_migrate(self, program_id: str, replica_id: str) -> str:
        """Return why a program cannot go to a replica."""
        program = self._book.programs.get(program_id)
        if program is None:
            return f"there is no live program {program_id!r}"
        replica = self._book.replicas.get(replica_id)
        if replica is None:
            return f"there is no replica {replica_id!r}"
        if not replica.grants:
            return f"replica {replica_id} takes no programs now"
        if not program.admitted:
            return f"program {program_id!r} is not admitted yet"
        if program.place.active and program.replica_id == replica_id:
            return f"program {program_id!r} is on {replica_id} already"
        if program.destination is not None and program.destination[0] == replica_id:
            return f"program {program_id!r} is on its way to {replica_id} already"
        if program.routed_to is not None and program.route is not None and not program.route.names(replica_id):
            return f"program {program_id!r} has a route that does not lead to {replica_id}"
        if program.served_by is not None and not program.served_by.names(replica_id):
            return f"program {program_id!r} asks for a model that {replica_id} does not serve"
        wanted = self._core.placing.wanted_by(program)
        if wanted is not None and wanted is not replica:
            return f"a turn of program {program_id!r} goes on from what {wanted.replica_id} alone has"
        return ""

    def migrate(self, program: Program, replica: Replica, reason: Reason) -> None:
        """Move a program: now, when its turns in flight end, or when its next one arrives."""
        core = self._core
        self._changed()
        if program.routed_to is not None:
            program.routed_to = replica.replica_id
        if program.place.active and program.in_flight:
            program.destination = (replica.replica_id, reason)
            core.mark(program, reason, cause=Reason.MOVED)
        elif program.place.active:
            core.pause(program, reason)
            core.restore(program, replica, reason)
        elif program.held:
            core.restore(program, replica, reason)
        else:
            program.destination = (replica.replica_id, reason)
            self._book.rank_anew(program)

    # --- kill and provision -----------------------------------------------------------------------------------------

    def why_not_kill(self, program_id: str) -> str:
        """Return why a program cannot be ended."""
        return "" if self._book.programs.get(program_id) is not None else f"there is no live program {program_id!r}"

    def kill(self, program: Program) -> None:
        """End a program."""
        self._changed()
        self._core.end(program, Reason.KILLED)

    def why_not_kill_replica(self, replica_id: str) -> str:
        """Return why a replica cannot be ended."""
        return "" if replica_id in self._book.replicas else f"there is no replica {replica_id!r}"

    def kill_replica(self, replica_id: str, reason: Reason) -> None:
        """Make a replica drain and end."""
        self._changed()
        self._book.decisions.append(EndReplica(replica_id, reason))

    def provision(self, reason: Reason) -> None:
        """Ask for one more replica."""
        self._changed()
        self._book.decisions.append(Provision(reason))

    def _changed(self) -> None:
        self._core.global_policies.changes_count += 1
