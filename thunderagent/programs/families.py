"""Programs that other programs wait for: a parent and its children, which are its sub-agents under ids of their own."""

from __future__ import annotations

from collections.abc import Iterable

from thunderagent.programs.lifecycle import Status
from thunderagent.programs.program import Program


class Families:
    """Live programs that named a parent, by that parent's id, whether a program of that id lives or not."""

    __slots__ = ("_active_counts", "_children")

    def __init__(self) -> None:
        """Begin with no family."""
        self._children: dict[str, dict[str, Program]] = {}
        self._active_counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._children)

    def join(self, program: Program, parent_id: str) -> None:
        """Make a program that has none the child of `parent_id`; nobody is its own parent."""
        if parent_id and parent_id != program.program_id:
            program.parent_id = parent_id
            self._children.setdefault(parent_id, {})[program.program_id] = program

    def leave(self, program: Program) -> None:
        """Forget a program that ended."""
        siblings = self._children.get(program.parent_id)
        if siblings is not None:
            del siblings[program.program_id]
            if not siblings:
                del self._children[program.parent_id]

    def claims(self, program: Program, *, more: bool) -> bool:
        """Note that a child got a claim, or lost it; say whether now none of its siblings has one."""
        active_count = self._active_counts.get(program.parent_id, 0) + (1 if more else -1)
        if active_count:
            self._active_counts[program.parent_id] = active_count
            return False
        del self._active_counts[program.parent_id]
        return True

    def active_count(self, parent_id: str) -> int:
        """Return how many children hold a claim."""
        return self._active_counts.get(parent_id, 0)

    def held_children(self, parent_id: str) -> list[Program]:
        """Return the children whose turns are held, in the order in which they came."""
        children = self._children.get(parent_id)
        return [child for child in children.values() if child.held] if children is not None else []

    def first_held_child(self, parent_id: str) -> Program | None:
        """Return the child that came first of those whose turns are held and that hold no claim."""
        children = self._children.get(parent_id, {})
        return next((child for child in children.values() if child.held and child.status is Status.PAUSED), None)

    def parents(self) -> Iterable[str]:
        """Return the ids of all parents, live or not."""
        return self._children
