"""A replica as the scheduler sees it: whether it is usable, its account, and who is active there."""

from __future__ import annotations

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
        "marked",
        "programs",
        "reasoning",
        "replica_id",
        "residency",
        "tells_cached",
        "up",
    )

    def __init__(self, replica_id: str, account: Account) -> None:
        """Begin with a replica that is not up yet."""
        self.replica_id = replica_id
        self.account = account
        self.up = False
        self.draining = False
        self.programs: dict[str, Program] = {}
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
        health = "draining" if self.draining else "up" if self.up else "down"
        return (
            f"<Replica {self.replica_id} {health}: {account.demand_tokens}/{account.capacity_tokens} tokens, "
            f"{account.reasoning_count} reasoning, {account.acting_count} acting>"
        )

    @property
    def open_to_programs(self) -> bool:
        """Whether a program may get a claim here."""
        return self.up and not self.draining
