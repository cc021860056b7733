"""Keep the blocks of finished requests for the next turns of their programs: no vLLM does, some papers' engines do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from thunderagent.simulator.engine.blocks import BlockPool, Holding

if TYPE_CHECKING:
    from thunderagent.simulator.engine.sequences import EngineSequence


class _Retained(NamedTuple):
    """What one request left; the highest rank goes first."""

    rank: tuple[int, int, int]
    blocks: Holding


class RetainedBlocks:
    """What is retained, by the id of whom for. When blocks are short it goes before anybody is preempted.

    Of those the highest priority number goes first, of equals the most blocks, then the newest.
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
        """Return for whom something is retained."""
        return frozenset(self._by_id)

    def keep(self, sequence: EngineSequence) -> None:
        """Keep the blocks of a finished request, in place of what its program retained before."""
        self.drop(sequence.request.retain_id)
        rank = (sequence.request.priority, sequence.blocks.count, sequence.rank[1])
        self._by_id[sequence.request.retain_id] = _Retained(rank, sequence.blocks)
        sequence.blocks = Holding()
        self._pool.version += 1  # they can be evicted now, and could not before

    def drop(self, retain_id: str) -> None:
        """Retain the blocks of that id no longer; nothing if there are none."""
        retained = self._by_id.pop(retain_id, None)
        if retained is not None:
            self._pool.release(retained.blocks)

    def drop_least(self, for_whom: EngineSequence) -> None:
        """Retain the blocks of one program less; those that `for_whom` is about to use go last."""
        own_id = for_whom.request.retain_id
        self.drop(max(self._by_id, key=lambda name: (name != own_id, self._by_id[name].rank)))
