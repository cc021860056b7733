"""Data-parallel ranks behind one URL: which exist, and which lines of an exposition belong to one of them."""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_RANKS_COUNT = 1_000
"""Each is a replica of its own."""


def rank_count_of(exposition: str, label: str) -> int:
    """Return how many ranks an exposition has: those from 0 on without a gap, otherwise 0. About 2 ms for 500 KB.

    With more than `MAX_RANKS_COUNT` it is one replica. A server that knows only some of the ranks (vLLM with a load
    balancer outside) has a gap: it is one replica.
    """
    ranks = {int(rank) for rank in re.findall(rf'[{{,]{re.escape(label)}="(\d{{1,4}})"', exposition)}
    return len(ranks) if len(ranks) <= MAX_RANKS_COUNT and ranks == set(range(len(ranks))) else 0


def by_rank_of(exposition: str, label: str, ranks: Collection[int | None]) -> dict[int | None, str]:
    """Return the lines of an exposition for each of these ranks; one pass, about 1 ms for 500 KB."""
    if not any(rank is not None for rank in ranks):
        return {}
    lines: dict[int | None, list[str]] = {rank: [] for rank in ranks}
    of_rank = re.compile(rf'[{{,]{re.escape(label)}="(\d{{1,4}})"')
    for line in exposition.split("\n"):
        found = of_rank.search(line)
        if found is not None and (rank := int(found[1])) in lines:
            lines[rank].append(line)
    return {rank: "\n".join(each) for rank, each in lines.items()}
