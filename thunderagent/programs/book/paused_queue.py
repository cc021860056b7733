"""The one global queue of programs that wait to be restored, on whichever replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cmp_to_key
from heapq import merge
from itertools import islice
from typing import Any, Protocol

from thunderagent.programs.model.places import Kind, Place
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.ranked_set import Order, Rank, RankedSet

RankOf = Callable[[Program], Rank]


class WaitingSet(Protocol):
    """Programs in an order: by rank, or by what their tenants had."""

    def __len__(self) -> int: ...

    def __contains__(self, program: Program, /) -> bool: ...

    def __iter__(self) -> Iterator[Program]: ...

    def add(self, program: Program, rank: Order, /) -> None:
        """Put one in, or rank it anew."""

    def discard(self, program: Program, /) -> None:
        """Take one out if it is in."""

    def pair_ranks(self) -> None:
        """Have a number come before each rank from now on: 0 before the ranks of all who are in."""

    def first(self) -> Program | None:
        """Return who is first."""

    def lowest(self, count: int, /) -> list[Program]:
        """Return the first `count`."""


class TenantShares(Protocol):
    """What tenants had, where they have shares: it comes before any rank."""

    def claims(self, name: str, tokens: int, /) -> None:
        """Take in that a tenant claims so much more, or less."""

    def level_token_s(self, name: str, /) -> float:
        """Return what a tenant is taken to have had."""

    def waiting_set(self, replica_id: str | None) -> WaitingSet:
        """Make an order of programs that wait for one replica, or for any."""


class QueuePlace(Place):
    """A place of programs without a claim that stand in an order: by rank, and by priority before once one has any."""

    __slots__ = ("_rank_of", "_some_have_priority", "order")

    def __init__(
        self,
        kind: Kind,
        rank_of: RankOf,
        order: WaitingSet,
        replica_id: str | None = None,
        *,
        admitted: bool = True,
    ) -> None:
        """Make an empty one."""
        super().__init__(kind, replica_id, admitted=admitted)
        self._rank_of = rank_of
        self._some_have_priority = False
        self.order = order

    def _order_of(self, program: Program) -> Order:
        if program.priority and not self._some_have_priority:
            self._some_have_priority = True
            self.order.pair_ranks()
        rank = self._rank_of(program)
        return (program.priority, rank) if self._some_have_priority else rank

    def enter(self, program: Program, now_s: float) -> None:  # noqa: ARG002
        """Take a program in."""
        self.count += 1
        self.tokens += program.claim_tokens
        self.order.add(program, self._order_of(program))

    def leave(self, program: Program, now_s: float) -> None:  # noqa: ARG002
        """Take a program out that is here."""
        self.count -= 1
        self.tokens -= program.claim_tokens
        self.order.discard(program)

    def rank(self, program: Program) -> None:
        """Put a program that is here where its rank says."""
        self.order.add(program, self._order_of(program))


class RestingPlace(QueuePlace):
    """Where programs stand that were paused while their tools run: many may come at once."""

    __slots__ = ("_ranked",)

    def __init__(self, rank_of: RankOf) -> None:
        """Make an empty one."""
        self._ranked: RankedSet[Program] = RankedSet()
        super().__init__(Kind.RESTING, rank_of, self._ranked)

    def enter_all(self, programs: Sequence[Program], now_s: float) -> None:
        """Take several programs in, in their order."""
        super().enter_all(programs, now_s)
        if self._some_have_priority or sum([program.priority != 0 for program in programs]):
            for program in programs:
                self.rank(program)
        else:
            self._ranked.add_all(programs, [self._rank_of(program) for program in programs])


class PausedQueue:
    """Paused programs by place, in each in the order in which the policy would restore.

    A program's own priority comes before what the policy says. One that an admission has not let begin waits in the
    order of that (`unadmitted`); one that a route sends to a replica waits for that one alone, where the policy does
    not see it (`routed`).

    All that wait for room are in one order, wherever they stand: nobody takes the room of a replica for which somebody
    waits that comes before it (`first_routed_before`), routed there or not, newcomers among them; and who is routed
    comes after those that may go anywhere and come before it (`comes_before_all_waiting`). Of equal ranks comes first
    who waits for longer. So whoever waits is passed only by those that its policy would put first anyway.
    """

    __slots__ = ("_rank", "_shares", "resting", "routed", "unadmitted", "waiting")

    def __init__(self, rank: RankOf, unadmitted_rank: RankOf | None = None, shares: TenantShares | None = None) -> None:
        """Begin empty; `rank` is the policy's: lower is restored sooner. `unadmitted_rank` is that of admission.

        With `shares` both are only among the programs of each tenant, and the tenant that had least comes first.
        """
        self._rank = rank
        self._shares = shares
        self.waiting = QueuePlace(Kind.WAITING, rank, self._new_order(None))
        self.resting = RestingPlace(rank)
        self.unadmitted = QueuePlace(
            Kind.UNADMITTED, unadmitted_rank or rank, self._new_order(None), admitted=unadmitted_rank is None
        )
        self.routed: dict[str, QueuePlace] = {}
        """Where programs with a turn wait for one replica, by its id."""

    def _new_order(self, replica_id: str | None) -> WaitingSet:
        return RankedSet() if self._shares is None else self._shares.waiting_set(replica_id)

    def __len__(self) -> int:
        return self.waiting_count + self.resting.count

    def __repr__(self) -> str:
        routed = f", {self.routed_count} routed" if self.routed_count else ""
        unadmitted = f"{self.unadmitted.count} unadmitted"
        return f"<PausedQueue: {self.waiting.count} reasoning, {self.resting.count} acting, {unadmitted}{routed}>"

    def __iter__(self) -> Iterator[Program]:
        """Yield reasoning programs, routed ones, those not admitted, then acting ones, each by rank. O(n log n)."""
        yield from self.with_turns()
        yield from self.resting.order

    @property
    def waiting_count(self) -> int:
        """Programs with a turn: those that may be restored, and those not admitted."""
        return self.for_room_count + self.unadmitted.count

    @property
    def routed_count(self) -> int:
        """Programs with a turn that wait for one replica alone."""
        return sum(place.count for place in self.routed.values()) if self.routed else 0

    @property
    def for_room_count(self) -> int:
        """Programs with a turn that wait for room, anywhere or on one replica."""
        return self.waiting.count + self.routed_count

    def with_turns(self) -> Iterator[Program]:
        """Yield programs with a turn in order, those not admitted last. For reports: O(n log n)."""
        yield from self.for_room()
        yield from self.unadmitted.order

    def for_room(self) -> Iterator[Program]:
        """Yield those with a turn that wait for room, those that may go anywhere first."""
        yield from self.waiting.order
        for place in self.routed.values():
            yield from place.order

    def first_waiting(self, count: int) -> list[Program]:
        """Return the first `count` of all with a turn in their order, those not admitted last."""
        orders = (self.waiting.order, *(place.order for place in self.routed.values()))
        first = list(islice(merge(*(each.lowest(count) for each in orders), key=self._by_order), count))
        return first + self.unadmitted.order.lowest(count - len(first))

    def ahead_count(self, program: Program) -> int:
        """Return how many come before a program with a turn, where it waits. Costs O(n log n): for reports."""
        routed = program.place.kind is Kind.WAITING and program.routed_to in self.routed
        if routed:
            return list(self.routed[program.routed_to or ""].order).index(program)
        return [*self.waiting.order, *self.unadmitted.order].index(program)

    def place_at(self, replica_id: str) -> QueuePlace:
        """Return where programs wait for one replica."""
        place = self.routed.get(replica_id)
        if place is None:
            place = QueuePlace(Kind.WAITING, self._rank, self._new_order(replica_id), replica_id)
            self.routed[replica_id] = place
        return place

    def tidy(self, place: Place) -> None:
        """Forget where programs waited for one replica, once nobody does."""
        if place.kind is Kind.WAITING and place.replica_id is not None and not place.count:
            del self.routed[place.replica_id]

    def _by(self, program: Program) -> tuple[int, Rank]:
        return program.priority, self._rank(program)

    def comes_before_all_waiting(self, program: Program) -> bool:
        """Say whether a program with a turn would stand at the head of those that have one and may go anywhere.

        One that is routed would have to stand at the head of those that wait for the same replica, too.
        """
        first = self.waiting.order.first()
        if program.routed_to is not None:
            if first is not None and self._goes_before(first, program):
                return False
            return self.first_routed_before(program, program.routed_to) is None
        if first is None or first is program:
            return True
        if self._shares is not None and first.tenant != program.tenant:
            return self._shares.level_token_s(program.tenant) < self._shares.level_token_s(first.tenant)
        return self._by(program) < self._by(first)

    def first_routed_before(self, program: Program, replica_id: str) -> Program | None:
        """Return the first of those that wait for a replica alone, if it comes before a program; None if nobody does.

        Before one whose tool runs come all that have a turn.
        """
        place = self.routed.get(replica_id)
        first = None if place is None else place.order.first()
        if first is None or first is program:
            return None
        return first if not program.held or self._goes_before(first, program) else None

    def first_routed(self, replica_ids: Iterable[str]) -> Program | None:
        """Return who is first of those that wait for one of these replicas alone."""
        heads = [place.order.first() for replica_id in replica_ids if (place := self.routed.get(replica_id))]
        return min((head for head in heads if head is not None), key=self._by_order, default=None)

    @property
    def _by_order(self) -> Callable[[Program], Any]:
        return cmp_to_key(lambda one, other: -1 if self._goes_before(one, other) else 1)

    def _goes_before(self, one: Program, other: Program) -> bool:
        """Say which of two with a turn comes first, wherever they wait."""
        if self._shares is not None and one.tenant != other.tenant:
            one_token_s, other_token_s = map(self._shares.level_token_s, (one.tenant, other.tenant))
            if one_token_s != other_token_s:
                return one_token_s < other_token_s
            return _came(one) < _came(other)
        return (self._by(one), _came(one)) < (self._by(other), _came(other))


def _came(program: Program) -> tuple[float, int]:
    return program.waiting_since_s, next(iter(program.held))
