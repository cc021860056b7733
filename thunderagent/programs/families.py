"""Programs that other programs wait for: a parent and its children, which are its sub-agents under ids of their own."""

from __future__ import annotations

from collections.abc import Iterable

from thunderagent.programs.lifecycle import Status
from thunderagent.programs.program import Program

Family = tuple[str, str]
"""A tenant, and the id of the parent: who names the program of another tenant is no child of it."""


def family_of(program: Program) -> Family:
    """Return the family that a program with a parent is a child of."""
    return program.tenant, program.parent_id


class Families:
    """Live programs that named a parent, by that parent, whether it lives or not."""

    __slots__ = ("_active_counts", "_children", "overdrawn")

    def __init__(self) -> None:
        """Begin with no family."""
        self._children: dict[Family, dict[str, Program]] = {}
        self._active_counts: dict[Family, int] = {}
        self.overdrawn: dict[Family, None] = {}
        """With a child that is held because more would be claimed than may be: looked at again at each tick."""

    def __len__(self) -> int:
        return len(self._children)

    def join(self, program: Program, parent_id: str) -> None:
        """Make a program that has none the child of `parent_id`; nobody is its own parent."""
        if parent_id and parent_id != program.program_id:
            program.parent_id = parent_id
            self._children.setdefault(family_of(program), {})[program.program_id] = program

    def leave(self, program: Program) -> None:
        """Forget a program that ended."""
        siblings = self._children.get(family_of(program))
        if siblings is not None:
            del siblings[program.program_id]
            if not siblings:
                del self._children[family_of(program)]

    def claims(self, program: Program, *, more: bool) -> bool:
        """Note that a child got a claim, or lost it; say whether now none of its siblings has one."""
        family = family_of(program)
        active_count = self._active_counts.get(family, 0) + (1 if more else -1)
        if active_count:
            self._active_counts[family] = active_count
            return False
        del self._active_counts[family]
        return True

    def active_count(self, family: Family) -> int:
        """Return how many children hold a claim."""
        return self._active_counts.get(family, 0)

    def held_children(self, family: Family) -> list[Program]:
        """Return the children whose turns are held, in the order in which they came."""
        children = self._children.get(family)
        return [child for child in children.values() if child.held] if children is not None else []

    def first_held_child(self, family: Family) -> Program | None:
        """Return the child that came first of those whose turns are held and that hold no claim."""
        children = self._children.get(family, {})
        return next((child for child in children.values() if child.held and child.status is Status.PAUSED), None)

    def all(self) -> Iterable[Family]:
        """Return all families, whether the parent lives or not."""
        return self._children
