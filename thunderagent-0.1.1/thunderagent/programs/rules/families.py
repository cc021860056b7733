"""Programs that other programs wait for: a parent and its children, which are its sub-agents with ids of their own."""

from __future__ import annotations

from math import inf

from thunderagent.programs.messages import Reason
from thunderagent.programs.rules import Verbs
from thunderagent.programs.state.program import Program

Family = tuple[str, str]
"""A tenant, and the id of the parent: naming another tenant's program makes no child of it."""


def family_of(program: Program) -> Family:
    """Return the family that a program with a parent is a child of."""
    return program.tenant, program.parent_id


class Families:
    """Live programs that named a parent, by that parent, whether it lives or not."""

    __slots__ = ("_active_counts", "_one_each", "_to_settle", "children", "due_s", "overdrawn")

    def __init__(self, *, one_each: bool = False) -> None:
        """Start without families; `one_each` lets in one child of each parent at a time, because its siblings can wait.

        It is for tenants with shares: otherwise one that makes children without end would take everything.
        """
        self._one_each = one_each
        self._to_settle: list[Family] = []
        """Families whose parent got a claim, or whose child lost one, in this event."""
        self.due_s = inf
        """Before all time while there are any of them."""
        self.children: dict[Family, dict[str, Program]] = {}
        self._active_counts: dict[Family, int] = {}
        self.overdrawn: dict[Family, None] = {}
        """Families with a child held because the limit would be exceeded: checked again at each tick."""

    def __len__(self) -> int:
        return len(self.children)

    def join(self, program: Program, parent_id: str) -> None:
        """Make a program without a parent the child of `parent_id`; no program is its own parent."""
        if parent_id and parent_id != program.program_id:
            program.parent_id = parent_id
            self.children.setdefault(family_of(program), {})[program.program_id] = program

    def leave(self, program: Program) -> None:
        """Forget an ended program."""
        siblings = self.children.get(family_of(program))
        if siblings is not None:
            del siblings[program.program_id]
            if not siblings:
                del self.children[family_of(program)]

    def got_claim(self, program: Program) -> None:
        """Note that a program is active: its children may be let in."""
        if program.parent_id:
            family = family_of(program)
            self._active_counts[family] = self._active_counts.get(family, 0) + 1
        if self.children:
            self._look_at((program.tenant, program.program_id))

    def lost_claim(self, program: Program) -> None:
        """Note that a program is no longer active; if only one child may be in at a time, the next may come."""
        if not program.parent_id:
            return
        family = family_of(program)
        active_count = self._active_counts[family] - 1
        if active_count:
            self._active_counts[family] = active_count
            return
        del self._active_counts[family]
        if self._one_each:
            self._look_at(family)

    def _look_at(self, *families: Family) -> None:
        self._to_settle.extend(families)
        self.due_s = -inf

    def look_again(self) -> None:
        """Check all children again that are held because the limit would be exceeded."""
        self._look_at(*self.overdrawn)
        self.overdrawn.clear()

    def look_at_all(self) -> None:
        """Check all families: replicas changed."""
        self._look_at(*self.children)

    def may_enter(self, program: Program) -> bool:
        """Return whether a child may be let in beside its siblings."""
        return not self._one_each or not self.active_count(family_of(program))

    def settle(self, verbs: Verbs) -> None:
        """Let in children whose turns are held although their parent holds a claim now, and their children."""
        while self._to_settle:
            family = self._to_settle.pop()
            for child in self._first_held(family):
                waits = not child.place.active and verbs.parent_claims(child)
                if not (waits and verbs.book.granting_replicas):
                    continue
                if not verbs.restore_beyond_limit(child, Reason.PARENT):
                    self.overdrawn[family] = None
        self.due_s = inf

    def _first_held(self, family: Family) -> list[Program]:
        """Return the children of a family to check."""
        held = self.held_children(family)
        return [child for child in held if not child.place.active][:1] if self._one_each else held

    def active_count(self, family: Family) -> int:
        """Return how many children hold a claim."""
        return self._active_counts.get(family, 0)

    def done_children(self, program: Program) -> list[Program]:
        """Return the children that a program waited for, if it goes on: nothing says that they do, too.

        A child whose tool runs, or that said when it is back, may work beside its parent.
        """
        children = self.children.get((program.tenant, program.program_id))
        if children is None:
            return []
        return [
            child
            for child in children.values()
            if child.turn_count and not (child.in_flight or child.held or child.lost or child.tool or child.hint)
        ]

    def held_children(self, family: Family) -> list[Program]:
        """Return the children whose turns are held, in order of arrival."""
        children = self.children.get(family)
        return [child for child in children.values() if child.held] if children is not None else []
