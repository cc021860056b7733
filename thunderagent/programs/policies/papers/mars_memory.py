"""Memory as the admission of MARS sees it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from thunderagent.programs.policy import View

WAITING_COUNT = 32
"""How many admitted programs that wait for memory are checked for what they will take."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV caches of all replicas. `budget_tokens` is available to a program that is let in now."""

    capacity_tokens: float
    claimed_tokens: float
    used_ratio: float
    budget_tokens: float

    @classmethod
    def of(cls, view: View, target_ratio: float) -> Memory:
        """Look at all replicas; one of unknown capacity has room for everyone."""
        capacity_tokens = claimed_tokens = used_tokens = 0.0
        room_tokens = 0.0 if view.replicas else inf
        for replica in view.replicas:
            account = replica.account
            limit_tokens = account.limit_tokens
            if limit_tokens == inf:
                return cls(inf, account.demand_tokens, account.kv_used_ratio, inf)
            replica_tokens = max(account.demand_tokens, account.kv_used_ratio * limit_tokens)
            capacity_tokens += limit_tokens
            claimed_tokens += account.demand_tokens
            used_tokens += replica_tokens
            room_tokens = max(room_tokens, target_ratio * limit_tokens - replica_tokens)
        waiting = list(view.first_waiting_few(WAITING_COUNT))
        for replica in view.replicas:
            waiting += view.first_waiting_for(replica, WAITING_COUNT)
        room_tokens -= sum(program.claim_tokens for program in waiting) / max(1, len(view.replicas))
        used_ratio = used_tokens / capacity_tokens if capacity_tokens else 0.0
        return cls(capacity_tokens, claimed_tokens, used_ratio, max(0.0, room_tokens))
