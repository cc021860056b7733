"""A route: the replicas that programs were told to go to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from thunderagent.programs.model.program import Program

Targets = tuple[tuple[str, float], ...]
"""Replicas by their ids, each with its weight."""


class Scope(StrEnum):
    """Whose programs a route applies to, narrowest first."""

    PROGRAM = "program"
    GROUP = "group"
    CLASS = "class"
    TENANT = "tenant"
    ALL = "all"


class Route:
    """Weighted replicas, and the order in which they get programs: evenly mixed, as the weights say.

    A model's route leads to the replicas that serve it, and nowhere else.
    """

    __slots__ = ("_credits", "programs", "targets")

    def __init__(self, targets: Targets) -> None:
        """Create a route that was not used yet."""
        self.targets = targets
        self.programs: dict[Program, None] = {}
        """Programs whose narrowest route it is."""
        self._credits = dict.fromkeys((replica_id for replica_id, _ in targets), 0.0)

    def lead_to(self, replica_ids: tuple[str, ...]) -> None:
        """Lead to these replicas with equal weight from now on."""
        self.targets = tuple((replica_id, 1.0) for replica_id in replica_ids)
        self._credits = dict.fromkeys(replica_ids, 0.0)

    def __repr__(self) -> str:
        return f"<Route to {', '.join(f'{replica_id} ({weight:g})' for replica_id, weight in self.targets)}>"

    def next(self, is_open: Callable[[str], bool]) -> str | None:
        """Return the next open replica; None if none is open.

        Each gains its weight, and the richest is taken and pays the sum: nobody is ever far from its share.
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
        """Return whether a replica is one of its targets."""
        return replica_id in self._credits


def is_for(scope: Scope, name: str, program: Program) -> bool:
    """Return whether a route of that scope and name applies to a program."""
    if scope is Scope.PROGRAM:
        return program.program_id == name
    if scope is Scope.GROUP:
        return program.group_id == name
    if scope is Scope.CLASS:
        return program.program_class == name
    return scope is Scope.ALL or program.tenant == name


class RouteView(NamedTuple):
    """The replicas to which the programs of a scope go."""

    scope: str
    name: str
    targets: Mapping[str, float]
    """Replica ids with weights; they need not be open, but none was removed."""
