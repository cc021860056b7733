"""Passes operators' requests to the scheduler of the right pool."""

from __future__ import annotations

from collections.abc import Callable

from thunderagent.errors import NotFoundError, OperationRefusedError
from thunderagent.programs.messages import (
    MigrationAsked,
    PrioritySet,
    ProgramKilled,
    ProvisionAsked,
    ReplicaKilled,
    RouteSet,
    Targets,
)
from thunderagent.programs.pools import Pool, Pools
from thunderagent.programs.transitions import NOT_THERE, Operations
from thunderagent.runtime.writer import Writer


class Operator:
    """Operators' requests; each raises `OperationRefusedError` or `NotFoundError`, with the reason, if impossible."""

    def __init__(self, pools: Pools, writer: Writer, clock: Callable[[], float]) -> None:
        """Send to the schedulers of `pools` through `writer`."""
        self._pools = pools
        self._tell = writer.dispatch
        self._now_s = clock

    def set_route(self, scope: str, name: str, targets: Targets) -> None:
        """Send the programs of a scope to replicas, by weight; to any, if none is named."""
        _refuse(self._why_not_route(scope, name, targets))
        self._tell(RouteSet(self._now_s(), scope, name, targets))

    def set_priority(self, program_id: str, priority: int, replica_id: str | None = None) -> None:
        """Give a program a priority, lower first; with a `replica_id`, in that engine alone."""
        _refuse(self._operations_of(program_id, replica_id).why_not_priority(program_id, priority, replica_id))
        self._tell(PrioritySet(self._now_s(), program_id, priority, replica_id))

    def migrate(self, program_id: str, replica_id: str) -> None:
        """Move a program to another replica: now, or when its turns in flight end."""
        _refuse(self._operations_of(program_id, replica_id).why_not_migrate(program_id, replica_id))
        self._tell(MigrationAsked(self._now_s(), program_id, replica_id))

    def kill(self, program_id: str) -> None:
        """End a program; its held turns are rejected."""
        _refuse(self._operations_of(program_id).why_not_kill(program_id))
        self._tell(ProgramKilled(self._now_s(), program_id))

    def kill_replica(self, replica_id: str) -> None:
        """Make a replica drain and end, by an observer of decisions."""
        _refuse(self._operations_of(replica_id=replica_id).why_not_kill_replica(replica_id))
        self._tell(ReplicaKilled(self._now_s(), replica_id))

    def provision(self) -> None:
        """Start one more replica, by an observer of decisions."""
        self._tell(ProvisionAsked(self._now_s()))

    def _operations_of(self, program_id: str = "", replica_id: str | None = None) -> Operations:
        """Return the operations that know a replica or a program."""
        pools = self._pools
        homes = pools.of_program(program_id)
        pool = pools.of_replica(replica_id) if replica_id is not None else homes[0] if homes else pools.all[0]
        return pool.scheduler.operations

    def _why_not_route(self, scope: str, name: str, targets: Targets) -> str:
        """Return why a route cannot be set; each pool is asked about its own replicas."""
        if not targets:
            return self._operations_of(name).why_not_route(scope, name, targets)
        by_pool: dict[Pool, list[tuple[str, float]]] = {}
        for target in targets:
            by_pool.setdefault(self._pools.of_replica(target[0]), []).append(target)
        whys = (pool.scheduler.operations.why_not_route(scope, name, tuple(own)) for pool, own in by_pool.items())
        return next(filter(None, whys), "")


def _refuse(why: str) -> None:
    if why:
        raise OperationRefusedError(why) if not why.startswith(NOT_THERE) else NotFoundError(why)
