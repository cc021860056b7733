"""The global program table: who is who, which incarnation of an id, and whose tool has run longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from thunderagent.programs.program import Program
from thunderagent.programs.ranked_set import RankedSet


class ProgramTable:
    """Live programs by id; those whose tools run, longest first; and of these the ones that the idle limit is for.

    Generations are drawn from one counter, so that the generation of an id that was forgotten long ago never comes
    back, and no memory is kept for ids that are gone.
    """

    __slots__ = ("_acting", "_generation", "_programs", "acting_with_limit")

    def __init__(self) -> None:
        """Begin empty."""
        self._programs: dict[str, Program] = {}
        self._acting: OrderedDict[Program, None] = OrderedDict()
        self.acting_with_limit: RankedSet[Program] = RankedSet()
        self._generation = 0

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def get(self, program_id: str) -> Program | None:
        """Return the live program of that id, or None."""
        return self._programs.get(program_id)

    def open(self, program_id: str, now_s: float) -> Program:
        """Open a new incarnation of an id that has no live program."""
        assert program_id not in self._programs
        self._generation += 1
        program = Program(program_id, self._generation, now_s)
        self._programs[program_id] = program
        return program

    def remove(self, program: Program) -> None:
        """Drop a program that was terminated."""
        del self._programs[program.program_id]
        self.acting_ends(program)

    def acting_begins(self, program: Program) -> None:
        """Note that a program's tool runs, and that it was heard of now."""
        self._acting[program] = None
        self._acting.move_to_end(program)

    def acting_ends(self, program: Program) -> None:
        """Note that a turn of the program is with us again."""
        self._acting.pop(program, None)
        self.acting_with_limit.discard(program)

    def acting_longer(self, than_s: float) -> list[Program]:
        """Return the programs whose tools run and that were heard of last before that time. Cost: O(these)."""
        return list(takewhile(lambda program: program.limits_since_s < than_s, self._acting))
