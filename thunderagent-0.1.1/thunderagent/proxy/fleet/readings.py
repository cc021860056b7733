"""What a replica did between two of its polls."""

from __future__ import annotations

from typing import Final, NamedTuple

from thunderagent.backends.base import ReplicaReading


class Since(NamedTuple):
    """What a replica did between two readings; None is unknown. The ratio is of the tokens looked up."""

    hit_ratio: float | None
    query_tokens: int | None
    preemption_count: int | None


class TierSince(NamedTuple):
    """What a replica looked up in the tier behind its pool between two readings, and how much it found."""

    query_tokens: int
    hit_tokens: int


class WorkSince(NamedTuple):
    """What a replica's time went into between two readings."""

    computed_tokens: int
    generated_tokens: int
    iteration_count: int


RESTARTED_RATIO: Final = 0.1
"""Counters that fell to a larger part may be those of another process behind the same URL."""

NOTHING_SINCE = Since(None, None, None)


def has_totals(reading: ReplicaReading) -> bool:
    """Return whether a reading has an engine's running totals."""
    return reading.cache_query_tokens_total is not None or reading.preemptions_total is not None


def since_of(before: ReplicaReading, now: ReplicaReading) -> Since:
    """Compare two readings; all is unknown if the engine reset its totals in between."""
    queries = _growth(before.cache_query_tokens_total, now.cache_query_tokens_total)
    hits = _growth(before.cache_hit_tokens_total, now.cache_hit_tokens_total)
    preemptions = _growth(before.preemptions_total, now.preemptions_total)
    if any(growth is not None and growth < 0 for growth in (queries, hits, preemptions)):
        return NOTHING_SINCE
    hit_ratio = min(1.0, hits / queries) if queries and hits is not None else None
    return Since(hit_ratio, _rounded(queries), _rounded(preemptions))


def has_restarted(before: ReplicaReading, now: ReplicaReading) -> bool:
    """Return whether another process answers than before, which has none of its predecessor's memory.

    It began later; or, where that is not said, each counter fell to a small part, or was zero and is. Both hold only
    once if a URL has several processes, which answer by turns.
    """
    if before.started_s is not None and now.started_s is not None:
        return now.started_s > before.started_s
    pairs = [
        (was, total)
        for was, total in (
            (before.progress_total, now.progress_total),
            (before.generated_tokens_total, now.generated_tokens_total),
            (before.cache_query_tokens_total, now.cache_query_tokens_total),
            (before.preemptions_total, now.preemptions_total),
        )
        if was is not None and total is not None
    ]
    return any(was > 0 for was, _ in pairs) and all(total <= RESTARTED_RATIO * was for was, total in pairs)


def tier_since_of(before: ReplicaReading, now: ReplicaReading) -> TierSince | None:
    """Compare the tier's counts of two readings; None if there were no lookups, or totals were reset.

    An engine with totals but none of its tier had not used the tier yet; of one that was not read before nothing is
    known.
    """
    if now.tier_query_tokens_total is None or now.tier_hit_tokens_total is None or not has_totals(before):
        return None
    queries = now.tier_query_tokens_total - (before.tier_query_tokens_total or 0.0)
    hits = now.tier_hit_tokens_total - (before.tier_hit_tokens_total or 0.0)
    return TierSince(round(queries), round(min(hits, queries))) if queries > 0 and hits >= 0 else None


def work_since_of(before: ReplicaReading, now: ReplicaReading) -> WorkSince | None:
    """Compare what two readings say of an engine's work; None if it is unknown, or totals were reset."""
    computed = _growth(before.computed_tokens_total, now.computed_tokens_total)
    generated = _growth(before.generated_tokens_total, now.generated_tokens_total)
    iterations = _growth(before.iterations_total, now.iterations_total)
    if computed is None or generated is None or iterations is None or min(computed, generated, iterations) < 0:
        return None
    return WorkSince(round(computed), round(generated), round(iterations))


def _growth(before: float | None, now: float | None) -> float | None:
    return now - before if before is not None and now is not None else None


def _rounded(count: float | None) -> int | None:
    return round(count) if count is not None else None
