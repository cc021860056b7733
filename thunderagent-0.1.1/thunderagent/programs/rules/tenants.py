"""Fair shares between tenants: waiting programs are ordered by what their tenant had, then by the policy's rank.

Theory of operation
===================
Tenants share memory over time. A tenant's *service* is the sum of its programs' claims in token-seconds, which is the
cost of the paper (arXiv 2602.13692, section 4.1). Its *level* is the service that it had while anybody waited, divided
by its weight: memory that nobody waits for takes nothing from others. If programs of several tenants wait, those of the
tenant with the lowest level come first (least attained service); the policy's own order counts among the programs of
one tenant.

The *least level* is the lowest of the tenants that wait and could be served: it only grows, and stands still while
there is no such tenant. A tenant that begins to wait starts at least there, so nobody can save up for a burst, neither
by being away nor by being small. A tenant that waits for a replica without grants neither falls behind the others nor
holds them back. A tenant that had more and left is remembered until the least level caught up: leaving resets nothing.

Levels are updated at each change of a claim, and grow evenly between. So a level that was looked up is never too high
later: the order of waiting tenants is a heap of such levels, of which only the top is looked up again (`FairSet`).
Finding the first costs O(log waiting tenants), amortised.

Jain's index measures fairness, over the service per unit of weight and of time in which a tenant had to wait: 1 if all
had the same, 1/n if one of n had it all. A tenant that never had to wait had what it wanted.

A program whose parent holds a claim is let in at once, because its parent may wait for it. With shares that applies to
one child of each parent at a time: otherwise a tenant that makes children without end would take everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Final

from thunderagent.programs.rules import Verbs
from thunderagent.programs.state.program import Program
from thunderagent.programs.state.ranked_set import Order, RankedSet

REMEMBERED_COUNT: Final = 10_000
"""How many tenants are remembered that left with more than others; the one with least more is forgotten first."""

_FIELDS = (
    "claim_tokens",
    "contended_s",
    "contended_token_s",
    "level_token_s",
    "levelled_s",
    "name",
    "service_token_s",
    "updated_s",
    "waiting_count",
    "weight_ratio",
)


class Tenant:
    """What a tenant has had."""

    __slots__ = _FIELDS

    def __init__(self, name: str, weight_ratio: float, level_token_s: float) -> None:
        """Start at that level."""
        self.name = name
        self.weight_ratio = weight_ratio
        self.level_token_s = level_token_s
        """Service by weight that it counts as having had: the order's key."""
        self.levelled_s = 0.0
        """Until when that is counted, on the clock of waiting."""
        self.claim_tokens = 0
        self.waiting_count = 0
        """Number of its programs that wait for a claim or for admission."""
        self.service_token_s = 0.0
        self.contended_s = 0.0
        """Time in which one of them waited, and what it had in it."""
        self.contended_token_s = 0.0
        self.updated_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether it has or wants anything."""
        return bool(self.claim_tokens or self.waiting_count)

    def level_at(self, waited_s: float) -> float:
        """Return its level at a time on the clock of waiting."""
        return self.level_token_s + self.claim_tokens * (waited_s - self.levelled_s) / self.weight_ratio

    def as_of(self, now_s: float, waited_s: float) -> Tenant:
        """Return an up-to-date copy."""
        tenant = Tenant(self.name, self.weight_ratio, self.level_token_s)
        for each in _FIELDS:
            setattr(tenant, each, getattr(self, each))
        tenant.accrue(now_s, waited_s)
        return tenant

    def accrue(self, now_s: float, waited_s: float) -> None:
        """Count what it had until now."""
        self.level_token_s = self.level_at(waited_s)
        self.levelled_s = waited_s
        passed_s = now_s - self.updated_s
        self.updated_s = now_s
        token_s = self.claim_tokens * passed_s
        self.service_token_s += token_s
        if self.waiting_count:
            self.contended_s += passed_s
            self.contended_token_s += token_s


class Tenants:
    """All tenants that have or want something, and those that had more than others."""

    def __init__(self, weight_ratios: Mapping[str, float]) -> None:
        """Use these weights for the named tenants, and 1 for all others."""
        self._weight_ratios = weight_ratios
        self.due_s = 0.0  # always
        self._tenants: dict[str, Tenant] = {}
        self._ahead: RankedSet[str] = RankedSet()
        """Tenants that have and want nothing, but had more than others, by level."""
        self._left: dict[str, None] = {}
        """Tenants that have and want nothing since this event began: perhaps only briefly, between two bookings."""
        self._waited_before: dict[str, None] = {}
        """Tenants that no longer wait since this event began: perhaps only briefly, too."""
        self._waiting: dict[FairSet, None] = {}
        """Where programs wait."""
        self._granting_ids: frozenset[str] = frozenset()
        self._least_token_s = 0.0
        self._contended = False
        """Whether somebody waits who could be served."""
        self._waited_s = 0.0
        """The clock of waiting: time in which that was so."""
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        """Yield all as of the last event."""
        return self.as_of(self._now_s)

    def as_of(self, now_s: float) -> Iterator[Tenant]:
        """Yield copies of all as of a time after the last event. For reports."""
        for tenant in self._tenants.values():
            yield tenant.as_of(max(now_s, self._now_s), self._waited_s)

    @property
    def least_token_s(self) -> float:
        """The least level, as of the begin of this event."""
        return self._least_token_s

    def advance(self, now_s: float) -> None:
        """Begin an event: advance the time, and update the least level. Cost: O(replicas waited for)."""
        if self._contended:
            self._waited_s += now_s - self._now_s
        self._now_s = now_s
        levels = [waiting.least_token_s() for waiting in self._waiting if self._may_be_served(waiting)]
        self._least_token_s = max(self._least_token_s, min(levels, default=0.0))

    def set_granting(self, replica_ids: Iterable[str]) -> None:
        """Record which replicas grant. Tenants that waited for one that grants again start to wait anew."""
        before = [waiting for waiting in self._waiting if self._may_be_served(waiting)]
        self._granting_ids = frozenset(replica_ids)
        for waiting in self._waiting:
            if self._may_be_served(waiting) and waiting not in before:
                for name in waiting.by_tenant:
                    self._raise_to_least(self._tenants[name])

    def waiting_set(self, replica_id: str | None) -> FairSet:
        """Create an order of programs that wait for one replica, or for any."""
        return FairSet(self, replica_id)

    def claims(self, name: str, tokens: int) -> None:
        """Record that a tenant claims more tokens, or fewer if negative."""
        if tokens:
            tenant = self._get(name)
            tenant.claim_tokens += tokens
            if not tenant.busy:
                self._left[name] = None

    def waits(self, name: str, program_count: int) -> None:
        """Record that more of a tenant's programs wait, or fewer if negative."""
        tenant = self._get(name)
        if not tenant.waiting_count and name not in self._waited_before:
            self._raise_to_least(tenant)
        tenant.waiting_count += program_count
        if not tenant.waiting_count:
            self._waited_before[name] = None
        if not tenant.busy:
            self._left[name] = None

    def begin_waiting(self, waiting: FairSet) -> None:
        """Record that the first program waits there."""
        self._waiting[waiting] = None

    def end_waiting(self, waiting: FairSet) -> None:
        """Record that nobody waits there any more."""
        del self._waiting[waiting]

    def settle(self, verbs: Verbs) -> None:  # noqa: ARG002 - nobody is let in for it
        """Forget tenants that left and that the least level has caught up with."""
        for name in self._left:
            tenant = self._tenants[name]
            if not tenant.busy:
                self._ahead.add(name, tenant.level_token_s)
        self._left.clear()
        self._waited_before.clear()
        while (lowest := self._ahead.first()) is not None:
            ahead = self._tenants[lowest].level_token_s > self._least_token_s
            if ahead and len(self._ahead) <= REMEMBERED_COUNT:
                break
            self._ahead.discard(lowest)
            del self._tenants[lowest]
        self._contended = any(map(self._may_be_served, self._waiting))

    def level_token_s(self, name: str) -> float:
        """Return what a tenant counts as having had until now, or would if it began to wait."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return self._least_token_s
        level_token_s = tenant.level_at(self._waited_s)
        if tenant.waiting_count or name in self._waited_before:
            return level_token_s
        return max(level_token_s, self._least_token_s)

    def jain_ratio(self) -> float | None:
        """Return Jain's index of the tenants that had to wait; None if there are fewer than two."""
        shares = [
            tenant.contended_token_s / tenant.contended_s / tenant.weight_ratio for tenant in self if tenant.contended_s
        ]
        squares = sum(share * share for share in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else None

    def _may_be_served(self, waiting: FairSet) -> bool:
        if waiting.replica_id is None:
            return bool(self._granting_ids)
        return waiting.replica_id in self._granting_ids

    def _get(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weight_ratios.get(name, 1.0), self._least_token_s)
            tenant.levelled_s, tenant.updated_s = self._waited_s, self._now_s
        else:
            tenant.accrue(self._now_s, self._waited_s)
            self._ahead.discard(name)
        return tenant

    def _raise_to_least(self, tenant: Tenant) -> None:
        """Raise a tenant that begins to wait to the least level, if it had less."""
        tenant.accrue(self._now_s, self._waited_s)
        tenant.level_token_s = max(tenant.level_token_s, self._least_token_s)


class FairSet:
    """Programs by their tenants' level, and within a tenant by rank: a `RankedSet` for several tenants.

    `replica_id` is the replica that they wait for; None if they may go anywhere. Tenants are in a heap by their last
    looked-up level, and of equal ones by arrival.
    """

    def __init__(self, tenants: Tenants, replica_id: str | None = None) -> None:
        """Create an empty set."""
        self.replica_id = replica_id
        self._tenants = tenants
        self.by_tenant: dict[str, RankedSet[Program]] = {}
        self._tenant_of: dict[Program, str] = {}
        self._order: RankedSet[str] = RankedSet()
        self._rank_of: dict[str, tuple[float, int]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, program: Program) -> bool:
        return program in self._tenant_of

    def __iter__(self) -> Iterator[Program]:
        """Yield one of each tenant in turn, as they would go if all were equally large. O(programs log programs)."""
        queues = [iter(self.by_tenant[name]) for name in self._first_tenants(len(self.by_tenant))]
        while queues:
            left = []
            for queue in queues:
                program = next(queue, None)
                if program is not None:
                    yield program
                    left.append(queue)
            queues = left

    def least_token_s(self) -> float:
        """Return the lowest level in the set, which must not be empty."""
        return self._rank_of[self._first_tenants(1)[0]][0]

    def add(self, program: Program, rank: Order) -> None:
        """Add `program`, or rank it anew."""
        if program not in self._tenant_of:
            if not self._tenant_of:
                self._tenants.begin_waiting(self)
            self._tenant_of[program] = program.tenant
            self._tenants.waits(program.tenant, 1)
        name = self._tenant_of[program]
        if name not in self.by_tenant:
            self.by_tenant[name] = RankedSet()
            self._rank_tenant(name, (self._tenants.level_token_s(name), next(self._numbers)))
        self.by_tenant[name].add(program, rank)

    def pair_ranks(self) -> None:
        """Put a number before each rank from now on: 0 for all current members."""
        for members in self.by_tenant.values():
            members.pair_ranks()

    def discard(self, program: Program) -> None:
        """Remove `program` if it is in."""
        name = self._tenant_of.pop(program, None)
        if name is not None:
            members = self.by_tenant[name]
            members.discard(program)
            if not members:
                del self.by_tenant[name], self._rank_of[name]
                self._order.discard(name)
            self._tenants.waits(name, -1)
            if not self._tenant_of:
                self._tenants.end_waiting(self)

    def first(self) -> Program | None:
        """Return the first program of the tenant with the lowest level, or None."""
        names = self._first_tenants(1)
        return self.by_tenant[names[0]].first() if names else None

    def lowest(self, count: int) -> list[Program]:
        """Return the first `count`, one of each tenant in turn. Cost: O(count · tenants among them · log programs)."""
        names = self._first_tenants(count)
        most_of_one = count - len(names) + 1  # each of the others has at least one
        queues = [self.by_tenant[name].lowest(most_of_one) for name in names]
        longest = max(map(len, queues), default=0)
        in_turn = [queue[place] for place in range(longest) for queue in queues if place < len(queue)]
        return in_turn[:count]

    def _first_tenants(self, count: int) -> list[str]:
        """Return the `count` tenants with the lowest levels; the lookups do not change the order."""
        while True:
            names = self._order.lowest(count)
            if not sum(map(self._grew, names)):
                return names

    def _grew(self, name: str) -> bool:
        """Look a tenant's level up; if it grew, rank it anew and return True."""
        level_token_s, (before_token_s, number) = self._tenants.level_token_s(name), self._rank_of[name]
        if level_token_s > before_token_s:
            self._rank_tenant(name, (level_token_s, number))
        return level_token_s > before_token_s

    def _rank_tenant(self, name: str, rank: tuple[float, int]) -> None:
        self._rank_of[name] = rank
        self._order.add(name, rank)
