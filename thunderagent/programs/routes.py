"""Which replicas programs were told to go to, by an operator or a global policy.

A route is for a program, or for all of a group, of a class, of a tenant, or for everybody; the narrowest that there is
counts. It names replicas with weights. A program is bound to one of them when it is placed, those that get more
programs by their weights first, and stays with it while that replica is open: its history lies there. While no replica
of its route is open the route is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunderagent.programs.program import Program

Targets = tuple[tuple[str, float], ...]
"""Replicas by their ids, each with its weight."""


class Scope(StrEnum):
    """Whose programs a route is for, the narrowest first."""

    PROGRAM = "program"
    GROUP = "group"
    CLASS = "class"
    TENANT = "tenant"
    ALL = "all"


class Route:
    """Replicas with weights, and in which order they get programs: evenly mixed, as the weights say."""

    __slots__ = ("_credits", "programs", "targets")

    def __init__(self, targets: Targets) -> None:
        """Begin with nobody sent anywhere."""
        self.targets = targets
        self.programs: dict[Program, None] = {}
        """Whose narrowest route it is."""
        self._credits = dict.fromkeys((replica_id for replica_id, _ in targets), 0.0)

    def __repr__(self) -> str:
        return f"<Route to {', '.join(f'{replica_id} ({weight:g})' for replica_id, weight in self.targets)}>"

    def next(self, is_open: Callable[[str], bool]) -> str | None:
        """Return who of those that are open is next; None if none is.

        Each gains its weight, the richest is taken and pays the sum: nobody is far from its part at any time.
        """
        targets = [(replica_id, weight) for replica_id, weight in self.targets if is_open(replica_id)]
        if not targets:
            return None
        for replica_id, weight in targets:
            self._credits[replica_id] += weight
        chosen = max(targets, key=lambda target: self._credits[target[0]])[0]
        self._credits[chosen] -= sum(weight for _, weight in targets)
        return chosen

    def names(self, replica_id: str) -> bool:
        """Say whether a replica is one of its targets."""
        return replica_id in self._credits


class Routes:
    """All routes there are. To find a program's costs the same however many there are."""

    __slots__ = ("_by_scope", "_count")

    def __init__(self) -> None:
        """Begin without any."""
        self._by_scope: dict[Scope, dict[str, Route]] = {scope: {} for scope in Scope}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Scope, str, Route]]:
        """Yield all routes, with whom they are for."""
        for scope, routes in self._by_scope.items():
            for name, route in routes.items():
                yield scope, name, route

    def set(self, scope: Scope, name: str, targets: Targets) -> Route | None:
        """Set a route in place of the one that was there, which is returned; no targets take it back."""
        routes = self._by_scope[scope]
        before = routes.pop(name, None)
        self._count += bool(targets) - (before is not None)
        if targets:
            routes[name] = Route(targets)
        return before

    def naming(self, replica_ids: Iterable[str]) -> list[Route]:
        """Return the routes that lead to any of these replicas."""
        named = list(replica_ids)
        return [route for _, _, route in self if any(map(route.names, named))]

    def of(self, program: Program) -> Route | None:
        """Return the narrowest route that is for a program."""
        by_scope = self._by_scope
        return (
            by_scope[Scope.PROGRAM].get(program.program_id)
            or by_scope[Scope.GROUP].get(program.group_id)
            or by_scope[Scope.CLASS].get(program.program_class)
            or by_scope[Scope.TENANT].get(program.tenant)
            or by_scope[Scope.ALL].get("")
        )

    def take(self, program: Program) -> Route | None:
        """Note and return which route a program has now."""
        route = self.of(program) if self._count else None
        if route is not program.route:
            if program.route is not None:
                program.route.programs.pop(program, None)
            if route is not None:
                route.programs[program] = None
            program.route = route
        return route

    def program_ended(self, program: Program) -> None:
        """Forget a program, and a route that was for it alone."""
        if program.route is not None:
            program.route.programs.pop(program, None)
        if self._by_scope[Scope.PROGRAM]:
            self.set(Scope.PROGRAM, program.program_id, ())


def is_for(scope: Scope, name: str, program: Program) -> bool:
    """Say whether a route of that scope and name is for a program."""
    if scope is Scope.PROGRAM:
        return program.program_id == name
    if scope is Scope.GROUP:
        return program.group_id == name
    if scope is Scope.CLASS:
        return program.program_class == name
    return scope is Scope.ALL or program.tenant == name
