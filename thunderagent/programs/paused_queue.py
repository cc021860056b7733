"""The one global queue of programs that wait to be restored, on whichever replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cmp_to_key
from heapq import merge
from itertools import islice
from typing import Any

from thunderagent.programs.lifecycle import Phase
from thunderagent.programs.program import Program
from thunderagent.programs.ranked_set import Rank, RankedSet
from thunderagent.programs.tenants import FairSet, Tenants


class PausedQueue:
    """Paused programs by phase, each phase in the order in which the policy would restore.

    A program's own priority comes before what the policy says. A program that the idle limit paused is not in here
    until a turn of it arrives. One with a turn that is not admitted yet waits `outside`, in the order of the admission
    policy; one that a route binds to a replica waits for that one alone, where the policy does not see it (`bound`),
    and one whose tool runs and that is to go to a certain replica with its next turn is not in here until then.

    All that wait for room are in one order, wherever they stand: nobody takes the room of a replica for which somebody
    waits that goes before it (`first_bound_before`), bound there or not, newcomers among them; and who is bound goes
    after those that may go anywhere and come before it (`comes_before_all_waiting`). Of equal ranks goes first who
    waits for longer. So whoever waits is passed only by those that its policy would have go first anyway.
    """

    __slots__ = (
        "_bound_at",
        "_outside_rank",
        "_place_of",
        "_rank",
        "_tenants",
        "acting",
        "bound",
        "outside",
        "reasoning",
    )

    def __init__(
        self,
        rank: Callable[[Program], Rank],
        outside_rank: Callable[[Program], Rank] | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        """Begin empty; `rank` is the policy's: lower is restored sooner. `outside_rank` is that of admission.

        With `tenants` both are only among the programs of each, and the tenant that had least goes first.
        """
        self._rank = rank
        self._outside_rank = outside_rank or rank
        self._tenants = tenants
        self.reasoning: RankedSet[Program] | FairSet = RankedSet() if tenants is None else FairSet(tenants)
        self.acting: RankedSet[Program] = RankedSet()
        self.outside: RankedSet[Program] | FairSet = RankedSet() if tenants is None else FairSet(tenants)
        self.bound: dict[str, RankedSet[Program] | FairSet] = {}
        """Programs with a turn that wait for one replica, by its id; no set is empty."""
        self._bound_at: dict[Program, str] = {}
        self._place_of: dict[Program, RankedSet[Program] | FairSet] = {}
        """The one set that a program is in."""

    def __len__(self) -> int:
        return len(self.reasoning) + len(self.acting) + len(self.outside) + len(self._bound_at)

    def __repr__(self) -> str:
        bound = f", {len(self._bound_at)} bound" if self._bound_at else ""
        outside = f"{len(self.outside)} outside"
        return f"<PausedQueue: {len(self.reasoning)} reasoning, {len(self.acting)} acting, {outside}{bound}>"

    def __iter__(self) -> Iterator[Program]:
        """Yield reasoning programs, bound ones, those outside, then acting ones, each by rank. Costs O(n log n)."""
        yield from self.waiting()
        yield from self.acting

    @property
    def waiting_count(self) -> int:
        """Programs with a turn: those that may be restored, and those outside."""
        return self.for_room_count + len(self.outside)

    def waiting(self) -> Iterator[Program]:
        """Yield programs with a turn in order, those outside last. For reports: O(n log n)."""
        yield from self.for_room()
        yield from self.outside

    @property
    def bound_count(self) -> int:
        """Programs with a turn that wait for one replica alone."""
        return len(self._bound_at)

    @property
    def for_room_count(self) -> int:
        """Programs with a turn that wait for room, anywhere or on one replica."""
        return len(self.reasoning) + len(self._bound_at)

    def for_room(self) -> Iterator[Program]:
        """Yield those with a turn that wait for room, those that may go anywhere first."""
        yield from self.reasoning
        for bound in self.bound.values():
            yield from bound

    def first_waiting(self, count: int) -> list[Program]:
        """Return the first `count` of all with a turn in the order in which they may go, those outside last."""
        sets = (self.reasoning, *self.bound.values())
        first = list(islice(merge(*(each.lowest(count) for each in sets), key=self._by_order), count))
        return first + self.outside.lowest(count - len(first))

    def ahead_count(self, program: Program) -> int:
        """Return how many go before a program with a turn, where it waits. Costs O(n log n): for reports."""
        bound = self.bound.get(self._bound_at.get(program, ""))
        return list(bound if bound is not None else (*self.reasoning, *self.outside)).index(program)

    def put(self, program: Program) -> None:
        """Put a paused program in its place, or in a new one after its phase or size changed."""
        self.remove(program)
        if program.phase is Phase.REASONING:
            if not program.admitted:
                place = self.outside
            elif program.bound_to is not None:
                self._bound_at[program] = program.bound_to
                place = self._set_at(program.bound_to)
            else:
                place = self.reasoning
        elif program.admitted and program.bound_to is None and program.destination is None:
            place = self.acting
        else:
            return
        self._place_of[program] = place
        self._rank_in(place, program)

    def _set_at(self, replica_id: str) -> RankedSet[Program] | FairSet:
        if replica_id not in self.bound:
            self.bound[replica_id] = RankedSet() if self._tenants is None else FairSet(self._tenants, replica_id)
        return self.bound[replica_id]

    def rank_anew(self, program: Program) -> None:
        """Put a program that is in here in its place again, because its priority changed."""
        place = self._place_of.get(program)
        if place is not None:
            self._rank_in(place, program)

    def _rank_in(self, place: RankedSet[Program] | FairSet, program: Program) -> None:
        rank = self._outside_rank if place is self.outside else self._rank
        place.add(program, (program.priority, rank(program)))

    def _order(self, program: Program) -> tuple[int, Rank]:
        return program.priority, self._rank(program)

    def remove(self, program: Program) -> None:
        """Take a program out if it is in."""
        place = self._place_of.pop(program, None)
        if place is None:
            return
        place.discard(program)
        replica_id = self._bound_at.pop(program, None)
        if replica_id is not None and not place:
            del self.bound[replica_id]

    def comes_before_all_waiting(self, program: Program) -> bool:
        """Say whether a program with a turn would stand at the head of those that have one and may go anywhere.

        One that is bound would have to stand at the head of those that are bound to the same replica, too.
        """
        if program.bound_to is not None:
            first = self.reasoning.first()
            if first is not None and self._goes_before(first, program):
                return False
            return self.first_bound_before(program, program.bound_to) is None
        if isinstance(self.reasoning, FairSet):
            return self.reasoning.comes_first(program, self._order)
        first = self.reasoning.first()
        return first is None or first is program or self._order(program) < self._order(first)

    def first_bound_before(self, program: Program, replica_id: str) -> Program | None:
        """Return the first of those that wait for a replica alone, if it goes before a program; None if nobody does.

        Before one whose tool runs go all that have a turn.
        """
        bound = self.bound.get(replica_id)
        first = None if bound is None else bound.first()
        if first is None or first is program:
            return None
        return first if program.phase is Phase.ACTING or self._goes_before(first, program) else None

    def first_bound(self, replica_ids: Iterable[str]) -> Program | None:
        """Return who goes first of those that wait for one of these replicas alone."""
        heads = [bound.first() for replica_id in replica_ids if (bound := self.bound.get(replica_id)) is not None]
        return min((head for head in heads if head is not None), key=self._by_order, default=None)

    @property
    def _by_order(self) -> Callable[[Program], Any]:
        return cmp_to_key(lambda one, other: -1 if self._goes_before(one, other) else 1)

    def _goes_before(self, one: Program, other: Program) -> bool:
        """Say which of two with a turn goes first, wherever they wait."""
        if self._tenants is not None and one.tenant != other.tenant:
            one_token_s, other_token_s = map(self._tenants.level_token_s, (one.tenant, other.tenant))
            if one_token_s != other_token_s:
                return one_token_s < other_token_s
            return _came(one) < _came(other)
        return (self._order(one), _came(one)) < (self._order(other), _came(other))


def _came(program: Program) -> tuple[float, int]:
    return program.waiting_since_s, next(iter(program.held))
