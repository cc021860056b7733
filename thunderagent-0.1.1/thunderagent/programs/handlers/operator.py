"""Operators' requests: each event triggers one operation, if it is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunderagent.programs.messages import (
    MigrationAsked,
    PrioritySet,
    ProgramKilled,
    ProvisionAsked,
    Reason,
    ReplicaKilled,
    RouteSet,
    Scope,
)
from thunderagent.programs.policy import Moment
from thunderagent.programs.transitions import Core, Operations


class Operator:
    """Handles operators' requests."""

    def __init__(self, core: Core, operations: Operations) -> None:
        """Run `operations`."""
        self._core = core
        self._operations = operations

    def handlers(self) -> dict[type[Any], Callable[[Any], Moment | None]]:
        """Return the handler of each event type; it returns why a balance is due, or None."""
        return {
            RouteSet: self._route_set,
            PrioritySet: self._priority_set,
            MigrationAsked: self._migration_asked,
            ProgramKilled: self._program_killed,
            ReplicaKilled: self._replica_killed,
            ProvisionAsked: self._provision_asked,
        }

    def _route_set(self, event: RouteSet) -> Moment | None:
        if not self._operations.why_not_route(event.scope, event.name, event.targets):
            self._operations.set_route(Scope(event.scope), event.name, event.targets, Reason.OPERATOR)
            return Moment.TICK
        return None

    def _priority_set(self, event: PrioritySet) -> Moment | None:
        program = self._core.book.programs.get(event.program_id)
        why_not = self._operations.why_not_priority(event.program_id, event.priority, event.replica_id)
        if program is not None and not why_not:
            self._operations.set_priority(program, event.priority, event.replica_id, Reason.OPERATOR)
            return Moment.TICK
        return None

    def _migration_asked(self, event: MigrationAsked) -> Moment | None:
        program = self._core.book.programs.get(event.program_id)
        if program is not None and not self._operations.why_not_migrate(event.program_id, event.replica_id):
            self._operations.migrate(program, self._core.book.replicas[event.replica_id], Reason.OPERATOR)
            return Moment.TICK
        return None

    def _program_killed(self, event: ProgramKilled) -> Moment | None:
        program = self._core.book.programs.get(event.program_id)
        if program is not None:
            self._operations.kill(program)
            return Moment.PROGRAM_ENDED
        return None

    def _replica_killed(self, event: ReplicaKilled) -> None:
        if not self._operations.why_not_kill_replica(event.replica_id):
            self._operations.kill_replica(event.replica_id, Reason.OPERATOR)

    def _provision_asked(self, event: ProvisionAsked) -> None:  # noqa: ARG002 - its time was taken in already
        self._operations.provision(Reason.OPERATOR)
