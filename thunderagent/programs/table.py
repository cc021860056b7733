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
    back, and no memory is kept for ids that are gone. Each tenant's programs are counted, and those whose tools run
    stand in an order of their own: so that one tenant that opens too many forgets its own.
    """

    __slots__ = ("_acting", "_acting_of", "_by_count", "_counts", "_generation", "_programs", "acting_with_limit")

    def __init__(self) -> None:
        """Begin empty."""
        self._programs: dict[str, Program] = {}
        self._acting: OrderedDict[Program, None] = OrderedDict()
        self._acting_of: dict[str, OrderedDict[Program, None]] = {}
        self._counts: dict[str, int] = {}
        self._by_count: RankedSet[str] = RankedSet()
        """Tenants, the one with most programs first."""
        self.acting_with_limit: RankedSet[Program] = RankedSet()
        self._generation = 0

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def get(self, program_id: str) -> Program | None:
        """Return the live program of that id, or None."""
        return self._programs.get(program_id)

    def count_of(self, tenant: str) -> int:
        """Return how many programs a tenant has."""
        return self._counts.get(tenant, 0)

    def largest_tenant(self) -> str:
        """Return the tenant that has most programs."""
        return self._by_count.first() or ""

    def open(self, program_id: str, now_s: float, tenant: str = "") -> Program:
        """Open a new incarnation of an id that has no live program."""
        assert program_id not in self._programs
        self._generation += 1
        program = Program(program_id, self._generation, now_s)
        program.tenant = tenant
        self._programs[program_id] = program
        self._count(tenant, 1)
        return program

    def remove(self, program: Program) -> None:
        """Drop a program that was terminated."""
        del self._programs[program.program_id]
        self.acting_ends(program)
        self._count(program.tenant, -1)

    def name_tenant(self, program: Program, tenant: str) -> None:
        """Let a program be a tenant's of which nobody had said whose it is."""
        acts = program in self._acting
        self.acting_ends(program)
        self._count(program.tenant, -1)
        program.tenant = tenant
        self._count(tenant, 1)
        if acts:
            self.acting_begins(program)

    def acting_begins(self, program: Program) -> None:
        """Note that a program's tool runs, and that it was heard of now."""
        for acting in (self._acting, self._acting_of.setdefault(program.tenant, OrderedDict())):
            acting[program] = None
            acting.move_to_end(program)

    def acting_ends(self, program: Program) -> None:
        """Note that a turn of the program is with us again."""
        if program in self._acting:
            del self._acting[program]
            del self._acting_of[program.tenant][program]
        self.acting_with_limit.discard(program)

    def longest_acting(self, tenant: str | None = None) -> Program | None:
        """Return the program, of one tenant or of all, whose tool runs and that was not heard of for longest."""
        return next(iter(self._acting if tenant is None else self._acting_of.get(tenant, ())), None)

    def _count(self, tenant: str, more_count: int) -> None:
        count = self._counts.get(tenant, 0) + more_count
        if count:
            self._counts[tenant] = count
            self._by_count.add(tenant, -count)
        else:
            del self._counts[tenant]
            self._acting_of.pop(tenant, None)
            self._by_count.discard(tenant)

    def acting_longer(self, than_s: float) -> list[Program]:
        """Return the programs whose tools run and that were heard of last before that time. Cost: O(these)."""
        return list(takewhile(lambda program: program.limits_since_s < than_s, self._acting))
