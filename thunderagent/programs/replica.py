"""A replica as the scheduler sees it: whether it is usable, its account, and who is active there."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from thunderagent.programs.capacity import CapacityControl
from thunderagent.programs.ledger import Account
from thunderagent.programs.program import Program
from thunderagent.programs.ranked_set import RankedSet
from thunderagent.programs.residency import Residency


class Replica:
    """One running engine, or one data-parallel rank of it.

    `acting` and `reasoning` hold its active programs in the order in which the policy would pause them. A marked
    program is in neither, but in `marked`, the last to be marked first. `expiring` holds acting programs by the time
    until which they are worth holding.
    """

    __slots__ = (
        "account",
        "acting",
        "control",
        "draining",
        "expiring",
        "flushed_s",
        "let_in",
        "marked",
        "own_causes",
        "programs",
        "reasoning",
        "replica_id",
        "residency",
        "suspended_everywhere_for",
        "tells_cached",
        "tripped",
        "up",
    )

    def __init__(self, replica_id: str, account: Account, suspended_everywhere_for: Mapping[str, None]) -> None:
        """Begin with a replica that is not up yet, and see the causes for which nothing is granted on any."""
        self.replica_id = replica_id
        self.account = account
        self.up = False
        self.draining = False
        self.suspended_everywhere_for = suspended_everywhere_for
        self.own_causes: dict[str, None] = {}
        """Causes for which nothing is granted on this one alone, in the order in which they came."""
        self.flushed_s = -inf
        """When what it kept for later turns was thrown away last."""
        self.tripped = False
        self.programs: dict[str, Program] = {}
        self.let_in: set[Program] = set()
        """Of these, those that got their claims whether there was room or not."""
        self.acting: RankedSet[Program] = RankedSet()
        self.reasoning: RankedSet[Program] = RankedSet()
        self.marked: RankedSet[Program] = RankedSet()
        self.expiring: RankedSet[Program] = RankedSet()
        self.residency = Residency()
        self.control = CapacityControl(account.updated_s)
        self.tells_cached = False
        """Whether the engine says of each turn what was cached."""

    def __repr__(self) -> str:
        account = self.account
        health = "draining" if self.draining else "tripped" if self.tripped else "up" if self.up else "down"
        if self.suspended_for:
            health += f", suspended for {', '.join(self.suspended_for)}"
        return (
            f"<Replica {self.replica_id} {health}: {account.demand_tokens}/{account.capacity_tokens} tokens, "
            f"{account.reasoning_count} reasoning, {account.acting_count} acting>"
        )

    def may_overdraw(self, claim_tokens: int, overdraft_ratio: float) -> bool:
        """Say whether one more program may be let in here whether there is room or not.

        One always may, so that nobody waits for ever; beyond that they overdraw at most so much of the limit together.
        """
        demand_tokens, limit_tokens = self.account.demand_tokens, self.account.limit_tokens
        if demand_tokens <= limit_tokens or not self.let_in:
            return True
        return demand_tokens + claim_tokens <= limit_tokens * (1.0 + overdraft_ratio)

    @property
    def suspended_for(self) -> Mapping[str, None]:
        """Causes for which nothing is granted here: on no replica, then on this one."""
        everywhere, own = self.suspended_everywhere_for, self.own_causes
        return {**everywhere, **own} if everywhere and own else everywhere or own

    @property
    def open_to_programs(self) -> bool:
        """Whether programs may get claims here: now, or when grants go on."""
        return self.up and not self.draining and not self.tripped

    @property
    def grants(self) -> bool:
        """Whether a program may get a claim here now."""
        return self.up and not self.draining and not self.tripped and not self.suspended_for
