"""Data-parallel ranks behind one URL: which exist, and which lines of an exposition belong to one of them."""

from __future__ import annotations

import re


def rank_count_of(exposition: str, label: str) -> int:
    """Return how many ranks an exposition has: those from 0 on without a gap, otherwise 0. About 2 ms for 500 KB.

    A server that knows only some of the ranks (vLLM with a load balancer outside) has a gap: it is one replica.
    """
    ranks = {int(rank) for rank in re.findall(rf'[{{,]{re.escape(label)}="(\d{{1,4}})"', exposition)}
    return len(ranks) if ranks == set(range(len(ranks))) else 0


def of_rank(exposition: str, label: str, rank: int) -> str:
    """Return the lines of an exposition for one rank. About 0.5 ms for 500 KB."""
    first, later = f'{{{label}="{rank}"', f',{label}="{rank}"'
    return "\n".join(line for line in exposition.split("\n") if first in line or later in line)
