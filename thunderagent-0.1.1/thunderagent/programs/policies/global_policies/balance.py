"""`balance`: even demand over the replicas, by moving programs from the fullest to the emptiest.

Theory of operation
===================
The first of the three default policies of Nalar (arXiv 2601.05109, section 6.1) balances load by routing. Here the
local policy does that for arriving programs; this one evens out what became uneven later, because some programs grew
and others ended.

While the demand of the fullest replica exceeds that of the emptiest by more than `gap_ratio` of a replica's capacity,
an acting program moves from the one to the other. Its history is recomputed with its next turn. So at most
`moves_count` move in a period, no program twice within `rest_s`, and only one that fits and reduces the gap. The
program that the local policy would pause first is tried first. The paper gives no numbers; these are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.global_policies.room import free_tokens, size_tokens
from thunderagent.programs.policy import GlobalPolicy, ProgramView, ReplicaView, View

LOOKED_AT_COUNT = 16
"""How many programs of the fullest replica are checked whether they may move."""


@dataclass(slots=True)
class Balance(GlobalPolicy):
    """Move programs while demand is uneven."""

    gap_ratio: float = 0.25
    """Difference in demand, in parts of a capacity, above which programs move."""
    moves_count: int = 8
    """Moves in a period."""
    rest_s: float = 60.0
    """Seconds until a program moves again."""
    period_s: float = 1.0
    """Seconds between two looks."""
    name: ClassVar[str] = "balance"
    _moved_s: dict[str, float] = field(init=False, default_factory=dict, repr=False)
    """When each program was moved, oldest move first."""

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        if not (self.gap_ratio > 0 and self.moves_count >= 1 and self.rest_s >= 0 and self.period_s > 0):
            raise ConfigurationError("balance: gap_ratio, moves_count and period_s are over 0, rest_s not negative")

    def decide(self, view: View) -> None:
        """Move programs from the fullest to the emptiest replica."""
        self._forget(view.now_s)
        replicas = view.replicas
        if len(replicas) < 2:
            return
        gap_tokens = self.gap_ratio * size_tokens(replicas)
        for _ in range(self.moves_count):
            fullest = max(replicas, key=lambda replica: replica.account.demand_tokens)
            emptiest = min(replicas, key=lambda replica: replica.account.demand_tokens)
            uneven_tokens = fullest.account.demand_tokens - emptiest.account.demand_tokens
            if uneven_tokens <= gap_tokens:
                return
            under_tokens = min(uneven_tokens, free_tokens(emptiest))
            movable = self._movable(view, fullest, under_tokens)
            moved = next((each for each in movable if view.propose_migrate(each, emptiest, Reason.IMBALANCE)), None)
            if moved is None:
                return
            self._moved_s[moved.program_id] = view.now_s

    def _movable(self, view: View, replica: ReplicaView, under_tokens: float) -> Sequence[ProgramView]:
        """Return the programs that could move, in order; some may have to stay where they are."""
        first = view.first_to_pause_few(replica, LOOKED_AT_COUNT)
        return [each for each in first if 0 < each.claim_tokens < under_tokens and each.program_id not in self._moved_s]

    def _forget(self, now_s: float) -> None:
        while self._moved_s:
            program_id = next(iter(self._moved_s))
            if now_s - self._moved_s[program_id] < self.rest_s:
                return
            del self._moved_s[program_id]
