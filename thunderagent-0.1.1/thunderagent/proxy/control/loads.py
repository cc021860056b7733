"""How many turns run and wait, in SGLang's terms: trainers poll until it is zero before they change the weights."""

from __future__ import annotations

from collections import ChainMap, Counter
from datetime import UTC, datetime
from typing import Any

from thunderagent.runtime import Runtime


def load_of(runtime: Runtime, replica_ids: list[str]) -> dict[str, Any]:
    """Report on replicas in the shape of SGLang's `/v1/loads`, each as a rank; held turns count as waiting.

    A held turn counts where its program was last. Those that were nowhere yet form a rank without a replica if all
    replicas are asked for (`load_of` of one includes them, too). Cost: O(turns).
    """
    pools = runtime.pools
    anonymous_held = ChainMap(*(scheduler.book.anonymous_held for scheduler in pools.schedulers))
    held_counts: Counter[str | None] = Counter()
    for turn in pools.turns.values():
        if turn.program is not None and turn.turn_id in turn.program.held:
            held_counts[turn.program.replica_id] += 1
        elif turn.turn_id in anonymous_held:
            held_counts[turn.pinned_replica_id] += 1
    elsewhere_count = sum(count for home, count in held_counts.items() if home not in pools.replicas)
    loads: list[dict[str, Any]] = []
    for replica_id in replica_ids:
        account = pools.of_replica(replica_id).scheduler.ledger.accounts.get(replica_id)
        running_count = account.turn_count if account is not None else 0
        tokens = account.demand_tokens if account is not None else 0
        capacity_tokens = account.capacity_tokens if account is not None else None
        waiting_count = held_counts[replica_id]
        if len(replica_ids) == 1:
            waiting_count += elsewhere_count
        loads.append(_load(len(loads), replica_id, running_count, waiting_count, tokens, capacity_tokens))
    if len(replica_ids) != 1 and elsewhere_count:
        loads.append(_load(len(loads), None, 0, elsewhere_count, 0, None))
    running_count = sum(load["num_running_reqs"] for load in loads)
    waiting_count = sum(load["num_waiting_reqs"] for load in loads)
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "dp_rank_count": len(loads),
        "loads": loads,
        "aggregate": {
            "total_running_reqs": running_count,
            "total_waiting_reqs": waiting_count,
            "total_reqs": running_count + waiting_count,
        },
    }


def _load(
    rank: int,
    replica_id: str | None,
    running_count: int,
    waiting_count: int,
    used_tokens: int,
    capacity_tokens: int | None,
) -> dict[str, Any]:
    return {
        "dp_rank": rank,
        "replica_id": replica_id,
        "num_running_reqs": running_count,
        "num_waiting_reqs": waiting_count,
        "num_total_reqs": running_count + waiting_count,
        "num_used_tokens": used_tokens,
        "max_total_num_tokens": capacity_tokens,
        "token_usage": round(used_tokens / capacity_tokens, 4) if capacity_tokens else 0.0,
    }
