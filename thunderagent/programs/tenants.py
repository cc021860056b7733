"""Fair shares between tenants: who waits goes by what its tenant has had, and inside a tenant by the policy's rank.

Theory of operation
===================
What tenants share is memory over time: a tenant's *service* is the sum of its programs' claims in token-seconds, which
is the cost of the paper (arXiv 2602.13692, section 4.1), divided by its weight. Where programs of several tenants wait,
those of the one with the least service go first (least attained service); the policy's own order counts among the
programs of one tenant. A tenant that only begins to want something starts level with the one that had least of those
that are there, so that nobody can save up for a burst; one that had more and left is remembered until the others have
caught up, so that nobody can begin anew by leaving.

Service is counted by increments, at each change of a claim, and between them it grows evenly. To find the least costs
O(tenants that wait).

What tells whether this is fair is Jain's index of the service for each unit of weight and of time in which a tenant had
to wait: 1 where all had the same, 1/n where one of n had it all. A tenant that never had to wait had what it wanted.

A program whose parent holds a claim is let in at once, because its parent may wait for it. With shares that is so for
one child of each parent at a time: or else a tenant that makes children without end would take everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf

from thunderagent.programs.program import Program
from thunderagent.programs.ranked_set import Order, Rank, RankedSet


class Tenant:
    """What a tenant has had."""

    __slots__ = (
        "claim_tokens",
        "contended_s",
        "contended_token_s",
        "level_token_s",
        "name",
        "service_token_s",
        "updated_s",
        "waiting_count",
        "weight_ratio",
    )

    def __init__(self, name: str, weight_ratio: float, level_token_s: float, now_s: float) -> None:
        """Begin level with others."""
        self.name = name
        self.weight_ratio = weight_ratio
        self.level_token_s = level_token_s
        """Service by weight that it is taken to have had: what the order goes by."""
        self.claim_tokens = 0
        self.waiting_count = 0
        """Its programs that wait for a claim, or to be admitted."""
        self.service_token_s = 0.0
        self.contended_s = 0.0
        """Time in which one of them waited, and what the others had in it."""
        self.contended_token_s = 0.0
        self.updated_s = now_s

    @property
    def busy(self) -> bool:
        """Whether it has or wants anything."""
        return bool(self.claim_tokens or self.waiting_count)

    def settle(self, now_s: float) -> None:
        """Count what it had until now."""
        passed_s = now_s - self.updated_s
        if passed_s > 0:
            token_s = self.claim_tokens * passed_s
            self.service_token_s += token_s
            self.level_token_s += token_s / self.weight_ratio
            if self.waiting_count:
                self.contended_s += passed_s
                self.contended_token_s += token_s
            self.updated_s = now_s


class Tenants:
    """All tenants that have or want something, and those that had more than others."""

    def __init__(self, weight_ratios: Mapping[str, float]) -> None:
        """Weigh the named ones so, every other one 1."""
        self._weight_ratios = weight_ratios
        self._tenants: dict[str, Tenant] = {}
        self._left: dict[str, None] = {}
        """Who has and wants nothing since this event began: perhaps only for a moment, between two bookings of it."""
        self.now_s = 0.0

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        """Yield them as they are now."""
        for tenant in self._tenants.values():
            tenant.settle(self.now_s)
            yield tenant

    def claims(self, name: str, tokens: int) -> None:
        """Take in that a tenant claims so much more, or less."""
        if tokens:
            tenant = self._get(name)
            tenant.claim_tokens += tokens
            if not tenant.busy:
                self._left[name] = None

    def waits(self, name: str, program_count: int) -> None:
        """Take in that so many more of a tenant's programs wait, or less."""
        tenant = self._get(name)
        tenant.waiting_count += program_count
        if not tenant.busy:
            self._left[name] = None

    def event_ended(self) -> None:
        """Forget who left in this event, and who is level with the others by now."""
        if self._left:
            if any(name in self._tenants and not self._tenants[name].busy for name in self._left):
                self._forget_who_is_level()
            self._left.clear()

    def level_token_s(self, name: str) -> float:
        """Return what a tenant is taken to have had until now, or would be if it began to want something."""
        return self._get(name).level_token_s if name in self._tenants else self._least_level()

    def jain_ratio(self) -> float | None:
        """Return Jain's index of those that had to wait; None if there are not two of them."""
        shares = [
            tenant.contended_token_s / tenant.contended_s / tenant.weight_ratio for tenant in self if tenant.contended_s
        ]
        squares = sum(share * share for share in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else None

    def _get(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            weight_ratio = self._weight_ratios.get(name, 1.0)
            tenant = self._tenants[name] = Tenant(name, weight_ratio, self._least_level(), self.now_s)
        tenant.settle(self.now_s)
        if not tenant.busy and name not in self._left:
            tenant.level_token_s = max(tenant.level_token_s, self._least_level())
        return tenant

    def _least_level(self) -> float:
        levels = [tenant.level_token_s for tenant in self if tenant.busy]
        return min(levels, default=0.0)

    def _forget_who_is_level(self) -> None:
        """Drop who has and wants nothing, and had no more than the others."""
        least = self._least_level() if any(tenant.busy for tenant in self._tenants.values()) else inf
        for name in [name for name, each in self._tenants.items() if not each.busy and each.level_token_s <= least]:
            del self._tenants[name]


class FairSet:
    """Programs by what their tenants had, and among those of one by rank: a `RankedSet` for where there are tenants."""

    def __init__(self, tenants: Tenants) -> None:
        """Begin empty."""
        self._tenants = tenants
        self._by_tenant: dict[str, RankedSet[Program]] = {}
        self._tenant_of: dict[Program, str] = {}

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, program: Program) -> bool:
        return program in self._tenant_of

    def __iter__(self) -> Iterator[Program]:
        """Yield one of each tenant in turn, as they would go if all were equally large. O(programs log programs)."""
        queues = [iter(self._by_tenant[name]) for name in self._in_order()]
        while queues:
            left = []
            for queue in queues:
                program = next(queue, None)
                if program is not None:
                    yield program
                    left.append(queue)
            queues = left

    def add(self, program: Program, rank: Order) -> None:
        """Put `program` in, or rank it anew."""
        if program not in self._tenant_of:
            self._tenant_of[program] = program.tenant
            self._tenants.waits(program.tenant, 1)
        self._by_tenant.setdefault(self._tenant_of[program], RankedSet()).add(program, rank)

    def discard(self, program: Program) -> None:
        """Take `program` out if it is in."""
        name = self._tenant_of.pop(program, None)
        if name is not None:
            members = self._by_tenant[name]
            members.discard(program)
            if not members:
                del self._by_tenant[name]
            self._tenants.waits(name, -1)

    def first(self) -> Program | None:
        """Return the first program of the tenant that had least, or None."""
        if not self._by_tenant:
            return None
        return self._by_tenant[min(self._by_tenant, key=self._tenants.level_token_s)].first()

    def lowest(self, count: int) -> list[Program]:
        """Return the first `count`, one of each tenant in turn."""
        queues = [self._by_tenant[name].lowest(count) for name in self._in_order()]
        longest = max(map(len, queues), default=0)
        in_turn = [queue[place] for place in range(longest) for queue in queues if place < len(queue)]
        return in_turn[:count]

    def comes_first(self, program: Program, order: Callable[[Program], tuple[int, Rank]]) -> bool:
        """Say whether a program would be the first."""
        first = self.first()
        if first is None or first is program:
            return True
        if first.tenant == program.tenant:
            return order(program) < order(first)
        return self._tenants.level_token_s(program.tenant) < self._tenants.level_token_s(first.tenant)

    def _in_order(self) -> Iterable[str]:
        return sorted(self._by_tenant, key=self._tenants.level_token_s)
