"""The cost of a prefix that an engine's pool lost: loading it from a tier behind the pool, or computing it again.

Theory of operation
===================
An engine may have a tier behind its pool: host memory or a disk, to which evicted blocks go. A context that left the
pool is then mostly loaded, which is far cheaper than computing it. So losing a token costs

    found · restore + (1 - found) · prefill

seconds: `found` is the part of the pool's losses that the tier still had, `restore` the time to load a token.

Both are learned from turns that come back to the engine that ran the previous turn. The engine should have part of
their context in its pool (`state/replica.py`); whatever else its usage calls cached came from the tier. The time to the
first token, less the prefill of what was not cached, was loading, or waiting for others: a low quantile is near the
truth, as for prefill itself. If an engine's usage does not say what was cached, only its counters tell how much was
found. They tell too little, because they count new tokens among the lookups. The price of loading then stays unknown,
and a loss costs what it costs without a tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from thunderagent.programs.learned.histogram import TOKEN_S_EDGES, LogHistogram, check_range
from thunderagent.programs.learned.sizes import FEW_TOKENS, MANY_TOKENS
from thunderagent.programs.messages import TierRecord
from thunderagent.programs.state.program import TurnEnded

LOW_RATIO: Final = 0.25
"""Ratio of turns that waited least for others."""

ENOUGH_TURNS_COUNT: Final = 8
"""Turns to see before a loss is priced with a tier."""

FORGETTING_RATIO: Final = 0.98
"""Weight of a turn relative to that of the next one: a tier may fill within minutes."""

UNSEEN_REPLICAS_COUNT: Final = 256
"""How many absent replicas keep what was learned of them."""


class TierPrice:
    """Learns what one replica's tier holds, and what it costs to load it."""

    __slots__ = ("_found_tokens", "_missing_tokens", "_restore_s", "found_ratio", "restore_token_s")

    def __init__(self) -> None:
        """Start with a tier of which nothing is known."""
        self._restore_s = LogHistogram(TOKEN_S_EDGES)
        self._missing_tokens = self._found_tokens = 0.0
        self.found_ratio = 0.0
        """Ratio of the pool's losses that the tier had; 0 until a turn showed it."""
        self.restore_token_s = inf
        """Seconds to load a token; infinite until enough turns showed it."""

    def found(self, missing_tokens: int, found_tokens: int) -> None:
        """Learn how much of a pool's loss was found behind it."""
        self._missing_tokens = self._missing_tokens * FORGETTING_RATIO + missing_tokens
        self._found_tokens = self._found_tokens * FORGETTING_RATIO + found_tokens
        self._measure()

    def loaded(self, loading_s: float, tokens: int) -> None:
        """Learn the time to the first token, less prefill, of a turn that loaded this many tokens."""
        if tokens >= MANY_TOKENS:
            self._restore_s.add(max(0.0, loading_s) / tokens)
            self._measure()

    def lost_token_s(self, prefill_token_s: float) -> float:
        """Return the cost of regaining a token that the pool lost: never more than that of computing it."""
        restore_token_s = min(self.restore_token_s, prefill_token_s)
        return prefill_token_s + self.found_ratio * (restore_token_s - prefill_token_s)

    def export(self, replica_id: str) -> TierRecord:
        """Return its content."""
        return TierRecord(replica_id, self._restore_s.export(), self._missing_tokens, self._found_tokens)

    def adopt(self, record: TierRecord) -> None:
        """Adopt what another process learned. Raises ValueError for impossible values."""
        check_range("missing tokens", record.missing_tokens, (0.0, inf))
        check_range("found tokens", record.found_tokens, (0.0, record.missing_tokens))
        self._restore_s.adopt(record.restore)
        self._missing_tokens, self._found_tokens = record.missing_tokens, record.found_tokens
        self._measure()

    def _measure(self) -> None:
        if self._missing_tokens:
            self.found_ratio = self._found_tokens / self._missing_tokens
        if self._restore_s.total >= ENOUGH_TURNS_COUNT:
            self.restore_token_s = self._restore_s.quantile(LOW_RATIO, inf)


class TierPrices:
    """The prices of all replicas with a tier; the others are unknown here, and cause no work."""

    __slots__ = ("_known", "by_replica")

    def __init__(self) -> None:
        """Start without a tier anywhere."""
        self.by_replica: dict[str, TierPrice] = {}
        self._known: dict[str, TierRecord] = {}
        """Of replicas not heard of since this was adopted."""

    def polled(self, replica_id: str, query_tokens: int, hit_tokens: int, *, tells_cached: bool) -> bool:
        """Learn from a replica's counters, unless its turns tell more; return whether its tier is new."""
        price = self.by_replica.get(replica_id)
        is_new = price is None
        if price is None:
            price = self.by_replica[replica_id] = TierPrice()
            if (known := self._known.pop(replica_id, None)) is not None:
                price.adopt(known)
        if query_tokens and not tells_cached:
            price.found(query_tokens, min(query_tokens, hit_tokens))
        return is_new

    def replica_removed(self, replica_id: str) -> None:
        """Forget a replica."""
        self.by_replica.pop(replica_id, None)

    def lost_token_s(self, replica_id: str | None, prefill_token_s: float) -> float:
        """Return what it costs a replica to regain a token that its pool lost."""
        price = self.by_replica.get(replica_id or "")
        return prefill_token_s if price is None else price.lost_token_s(prefill_token_s)

    def loading_s(self, ended: TurnEnded) -> float:
        """Return how long a turn took to load from the tier; an estimate if the amount is unknown."""
        price = self.by_replica.get(ended.turn.account_id or "")
        if price is None or ended.branch is None or price.restore_token_s == inf:
            return 0.0
        return price.restore_token_s * _loaded_tokens(price, ended)

    def turn_ended(self, ended: TurnEnded, answered_s: float, prefill_token_s: float) -> int | None:
        """Learn from a turn with a branch, whose first token came `answered_s` after its grant.

        Return how many tokens it loaded; None if it may have, and nobody knows how many.
        """
        branch, replica_id = ended.branch, ended.turn.account_id
        assert branch is not None
        was_here, branch.served_by = branch.served_by == replica_id, replica_id
        price = self.by_replica.get(replica_id or "")
        if price is None:
            return 0
        missing_tokens, _ = _split(ended)
        if ended.cached_tokens is None or not was_here or missing_tokens < MANY_TOKENS:
            return 0 if missing_tokens < FEW_TOKENS else None
        loaded_tokens = _loaded_tokens(price, ended)
        price.found(missing_tokens, loaded_tokens)
        price.loaded(answered_s - (ended.prompt_tokens - ended.cached_tokens) * prefill_token_s, loaded_tokens)
        return loaded_tokens

    def export(self) -> tuple[TierRecord, ...]:
        """Return what was learned of all."""
        unseen = list(self._known.values())[-UNSEEN_REPLICAS_COUNT:]
        return (*unseen, *[price.export(replica_id) for replica_id, price in self.by_replica.items()])

    def adopt(self, records: Sequence[TierRecord]) -> None:
        """Adopt what another process learned. Raises ValueError for impossible values."""
        for record in records:
            price = self.by_replica.get(record.replica_id)
            (TierPrice() if price is None else price).adopt(record)
            if price is None:
                self._known[record.replica_id] = record


def _split(ended: TurnEnded) -> tuple[int, int]:
    """Return how much of a turn's context its replica's pool had lost, and how much it should still have."""
    pool_tokens = max(ended.turn.resident_tokens, ended.turn.kept_tokens)
    return max(0, ended.known_tokens - pool_tokens), pool_tokens


def _loaded_tokens(price: TierPrice, ended: TurnEnded) -> int:
    """Return how much of a turn came from the tier; an estimate if nobody said what was cached."""
    missing_tokens, pool_tokens = _split(ended)
    if ended.cached_tokens is None:
        return int(price.found_ratio * missing_tokens)
    return max(0, min(missing_tokens, ended.cached_tokens - pool_tokens))
