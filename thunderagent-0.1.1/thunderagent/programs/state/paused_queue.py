"""The one global queue of programs that wait to be restored on any replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cmp_to_key
from heapq import merge
from itertools import islice
from math import inf
from typing import Any, Protocol

from thunderagent.programs.state.program import Kind, Place, Program
from thunderagent.programs.state.ranked_set import Order, Rank, RankedSet

RankOf = Callable[[Program], Rank]


class WaitingSet(Protocol):
    """An order of programs: by rank, or by what their tenants had."""

    def __len__(self) -> int: ...

    def __contains__(self, program: Program, /) -> bool: ...

    def __iter__(self) -> Iterator[Program]: ...

    def add(self, program: Program, rank: Order, /) -> None:
        """Add a program, or rank it anew."""

    def discard(self, program: Program, /) -> None:
        """Remove a program if it is in."""

    def pair_ranks(self) -> None:
        """Put a number before each rank from now on: 0 for all programs that are in."""

    def first(self) -> Program | None:
        """Return the first program."""

    def lowest(self, count: int, /) -> list[Program]:
        """Return the first `count`."""


class TenantShares(Protocol):
    """What tenants with shares had; it comes before any rank."""

    def claims(self, name: str, tokens: int, /) -> None:
        """Record that a tenant claims more tokens, or fewer if negative."""

    def level_token_s(self, name: str, /) -> float:
        """Return what a tenant counts as having had."""

    def waiting_set(self, replica_id: str | None) -> WaitingSet:
        """Create an order of programs that wait for one replica, or for any."""


class QueuePlace(Place):
    """An ordered place of programs without a claim: by rank, and first by priority once any program has one."""

    __slots__ = ("_rank_of", "_some_have_priority", "occupied_s", "occupied_since_s", "order")

    def __init__(
        self,
        kind: Kind,
        rank_of: RankOf,
        order: WaitingSet,
        replica_id: str | None = None,
        *,
        admitted: bool = True,
    ) -> None:
        """Create an empty place."""
        super().__init__(kind, replica_id, admitted=admitted)
        self._rank_of = rank_of
        self._some_have_priority = False
        self.order = order
        self.occupied_s = self.occupied_since_s = 0.0
        """Seconds in which programs were there, until it was last empty; and since when some are, if any."""

    def _order_of(self, program: Program) -> Order:
        is_first = program.priority != 0 or program.urgent_until_s < inf
        if is_first and not self._some_have_priority:
            self._some_have_priority = True
            self.order.pair_ranks()
        return _order(program, self._rank_of) if self._some_have_priority else self._rank_of(program)

    def enter(self, program: Program, now_s: float) -> None:
        """Add a program."""
        if not self.count:
            self.occupied_since_s = now_s
        self.count += 1
        self.tokens += program.claim_tokens
        self.order.add(program, self._order_of(program))

    def leave(self, program: Program, now_s: float) -> None:
        """Remove a program."""
        self.count -= 1
        if not self.count:
            self.occupied_s += now_s - self.occupied_since_s
        self.tokens -= program.claim_tokens
        self.order.discard(program)

    def rank(self, program: Program) -> None:
        """Move a program to the position of its rank."""
        self.order.add(program, self._order_of(program))


class RestingPlace(QueuePlace):
    """Programs that were paused while their tools ran: many may come at once."""

    __slots__ = ("_ranked",)

    def __init__(self, rank_of: RankOf) -> None:
        """Create an empty place."""
        self._ranked: RankedSet[Program] = RankedSet()
        super().__init__(Kind.RESTING, rank_of, self._ranked)

    def enter_all(self, programs: Sequence[Program], now_s: float) -> None:
        """Add several programs, in their order."""
        if not self.count:
            self.occupied_since_s = now_s
        super().enter_all(programs, now_s)
        if self._some_have_priority or sum([program.priority != 0 for program in programs]):
            for program in programs:
                self.rank(program)
        else:
            self._ranked.add_all(programs, [self._rank_of(program) for program in programs])


class PausedQueue:
    """Paused programs by place, each place in the policy's restore order.

    A program's own priority comes before the policy's rank; within a priority, those that would miss their deadlines
    come first. A program that is not admitted yet waits in the admission's order (`unadmitted`). A program that a route
    sends to one replica waits for that one alone, and the policy does not see it there (`routed`).

    All programs that wait for room are in one order, wherever they stand. Nobody, newcomers included, takes room of a
    replica while a program that comes earlier waits for it (`first_routed_before`), routed or not. A routed program
    comes after those that may go anywhere and rank before it (`comes_before_all_waiting`). Of equal ranks, the one that
    waits longest comes first. So a waiting program is passed only by those that its policy would put first anyway.
    """

    __slots__ = ("_rank", "_shares", "resting", "routed", "unadmitted", "waiting")

    def __init__(self, rank: RankOf, unadmitted_rank: RankOf | None = None, shares: TenantShares | None = None) -> None:
        """Create an empty queue; `rank` is the policy's (lower is restored sooner), `unadmitted_rank` the admission's.

        With `shares`, both rank only within a tenant, and the tenant that had least comes first.
        """
        self._rank = rank
        self._shares = shares
        self.waiting = QueuePlace(Kind.WAITING, rank, self._new_order(None))
        self.resting = RestingPlace(rank)
        self.unadmitted = QueuePlace(
            Kind.UNADMITTED, unadmitted_rank or rank, self._new_order(None), admitted=unadmitted_rank is None
        )
        self.routed: dict[str, QueuePlace] = {}
        """Places of programs with a turn that wait for one replica, by its id."""

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
        """Number of programs with a turn: waiting for room, or not admitted."""
        return self.for_room_count + self.unadmitted.count

    @property
    def routed_count(self) -> int:
        """Number of programs with a turn that wait for one replica alone."""
        return sum(place.count for place in self.routed.values()) if self.routed else 0

    @property
    def for_room_count(self) -> int:
        """Number of programs with a turn that wait for room, anywhere or on one replica."""
        return self.waiting.count + self.routed_count

    def with_turns(self) -> Iterator[Program]:
        """Yield programs with a turn in order, unadmitted ones last. For reports: O(n log n)."""
        yield from self.for_room()
        yield from self.unadmitted.order

    def for_room(self) -> Iterator[Program]:
        """Yield programs with a turn that wait for room, first those that may go anywhere."""
        yield from self.waiting.order
        for place in self.routed.values():
            yield from place.order

    def first_waiting(self, count: int) -> list[Program]:
        """Return the first `count` programs with a turn in order, unadmitted ones last."""
        orders = (self.waiting.order, *(place.order for place in self.routed.values()))
        first = list(islice(merge(*(each.lowest(count) for each in orders), key=self._by_order), count))
        return first + self.unadmitted.order.lowest(count - len(first))

    def ahead_count(self, program: Program) -> int:
        """Return how many programs stand before one with a turn. Costs O(n log n): for reports."""
        routed = program.place.kind is Kind.WAITING and program.routed_to in self.routed
        if routed:
            return list(self.routed[program.routed_to or ""].order).index(program)
        return [*self.waiting.order, *self.unadmitted.order].index(program)

    def place_at(self, replica_id: str) -> QueuePlace:
        """Return the place of programs that wait for one replica."""
        place = self.routed.get(replica_id)
        if place is None:
            place = QueuePlace(Kind.WAITING, self._rank, self._new_order(replica_id), replica_id)
            self.routed[replica_id] = place
        return place

    def tidy(self, place: Place) -> None:
        """Drop the place of programs that wait for one replica, once it is empty."""
        if place.kind is Kind.WAITING and place.replica_id is not None and not place.count:
            del self.routed[place.replica_id]

    def _by(self, program: Program) -> tuple[float, Rank]:
        return _order(program, self._rank)

    def comes_before_all_waiting(self, program: Program) -> bool:
        """Return whether a program with a turn would come before all waiting programs that may go anywhere.

        A routed program must also come before all that wait for the same replica.
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
        """Return the first program that waits for this replica alone, if it comes before `program`; None otherwise.

        Every program with a turn comes before one whose tool runs.
        """
        place = self.routed.get(replica_id)
        first = None if place is None else place.order.first()
        if first is None or first is program:
            return None
        return first if not program.held or self._goes_before(first, program) else None

    def first_routed(self, replica_ids: Iterable[str]) -> Program | None:
        """Return the first program of those that wait for one of these replicas alone."""
        heads = [place.order.first() for replica_id in replica_ids if (place := self.routed.get(replica_id))]
        return min((head for head in heads if head is not None), key=self._by_order, default=None)

    @property
    def _by_order(self) -> Callable[[Program], Any]:
        return cmp_to_key(lambda one, other: -1 if self._goes_before(one, other) else 1)

    def _goes_before(self, one: Program, other: Program) -> bool:
        """Return whether `one` comes before `other`, both with a turn, wherever they wait."""
        if self._shares is not None and one.tenant != other.tenant:
            one_token_s, other_token_s = map(self._shares.level_token_s, (one.tenant, other.tenant))
            if one_token_s != other_token_s:
                return one_token_s < other_token_s
            return _came(one) < _came(other)
        return (self._by(one), _came(one)) < (self._by(other), _came(other))


def _order(program: Program, rank_of: RankOf) -> tuple[float, Rank]:
    """Return the order of a program: by priority, then urgent ones by deadline, then by rank."""
    if program.urgent_until_s < inf:
        return program.priority - 0.5, program.urgent_until_s
    return program.priority, rank_of(program)


def _came(program: Program) -> tuple[float, int]:
    return program.waiting_since_s, next(iter(program.held))
