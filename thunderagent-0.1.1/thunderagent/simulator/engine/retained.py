"""Keeps the blocks of finished requests for their programs' next turns: vLLM does not, some papers' engines do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from thunderagent.simulator.engine.blocks import BlockPool, Holding

if TYPE_CHECKING:
    from thunderagent.simulator.engine.records import EngineSequence


class _Retained(NamedTuple):
    """One request's leftover; the highest rank goes first."""

    rank: tuple[int, int, int]
    blocks: Holding


class RetainedBlocks:
    """Retained blocks by id. When blocks are short they go before anybody is preempted.

    The highest priority number goes first, of equals the most blocks, then the newest.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_id: dict[str, _Retained] = {}

    @property
    def count(self) -> int:
        """Return for how many programs blocks are retained."""
        return len(self._by_id)

    @property
    def block_count(self) -> int:
        """Return how many blocks are retained."""
        return sum(each.blocks.count for each in self._by_id.values())

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """Return what is retained."""
        return tuple(each.blocks for each in self._by_id.values())

    @property
    def ids(self) -> frozenset[str]:
        """Return the ids with retained blocks."""
        return frozenset(self._by_id)

    def keep(self, sequence: EngineSequence) -> None:
        """Keep the blocks of a finished request, instead of what its program retained before."""
        self.drop(sequence.request.retain_id)
        rank = (sequence.request.priority, sequence.blocks.count, sequence.rank[1])
        self._by_id[sequence.request.retain_id] = _Retained(rank, sequence.blocks)
        sequence.blocks = Holding()
        self._pool.version += 1  # they can be evicted now, and could not before

    def drop(self, retain_id: str) -> None:
        """Stop retaining the blocks of that id, if there are any."""
        retained = self._by_id.pop(retain_id, None)
        if retained is not None:
            self._pool.release(retained.blocks)

    def drop_least(self, for_whom: EngineSequence) -> None:
        """Drop the blocks of one program; those that `for_whom` is about to use go last."""
        own_id = for_whom.request.retain_id
        self.drop(max(self._by_id, key=lambda name: (name != own_id, self._by_id[name].rank)))
