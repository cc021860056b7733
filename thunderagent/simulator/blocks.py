"""Keep the blocks of a KV pool: who references each, what it holds, and which goes next.

Theory of operation
-------------------
A block holds `block_size` consecutive tokens of one context. A full block has a key, `hash(key of the block before it,
its tokens)`, so that a key stands for the whole prefix up to there. A block is *referenced* by the requests that run on
it, or it is *free*; free is not empty: it keeps its key, and can be found again by it (a prefix-cache hit) until an
allocation takes it: those without a key first, then the block freed longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT_HASH = 0  # stands before the first block of every context


def hash_blocks(token_ids: Sequence[int], block_size: int, *, parent: int = ROOT_HASH) -> list[int]:
    """Return the keys of the full blocks of a context, or of its continuation behind the block with key `parent`.

    A key is the hash of a tuple of integers, which Python does not randomise: 64 bits, the same in every process.
    """
    keys: list[int] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash((parent, *token_ids[start : start + block_size]))
        keys.append(parent)
    return keys


class BlockPool:
    """Keep the blocks: who references each, what a full one holds, and which free one goes next."""

    def __init__(self, block_count: int) -> None:
        self._reference_counts = [0] * block_count
        self._hashes: list[int | None] = [None] * block_count
        self._block_by_hash: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(block_count))
        self.version = 0
        """Changes whenever references are taken or given back, and when its owner says that more can be shared."""

    def __repr__(self) -> str:
        return f"<BlockPool {self.used_count} used, {self.free_count} free, {len(self._block_by_hash)} cached>"

    @property
    def free_count(self) -> int:
        """Return how many blocks nobody references."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Return how many blocks somebody references."""
        return len(self._reference_counts) - len(self._free)

    def find(self, hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest leading run of keys that are cached."""
        found: list[int] = []
        block_by_hash = self._block_by_hash
        for key in hashes:
            block = block_by_hash.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def offers_no_more(self, version: int, missing_key: int) -> bool:
        """Say whether a context that did not fit at `version`, and lacked the block `missing_key`, cannot fit yet."""
        return version == self.version and missing_key not in self._block_by_hash

    def count_free(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free now."""
        reference_counts = self._reference_counts
        return sum([reference_counts[block] == 0 for block in blocks])  # a list: half the time of a generator

    def allocate(self, count: int) -> list[int]:
        """Take that many free blocks, the longest freed first; what they held is lost."""
        assert count <= self.free_count, self
        blocks: list[int] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            key = self._hashes[block]
            if key is not None:
                del self._block_by_hash[key]
                self._hashes[block] = None
            self._reference_counts[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take a reference to each of these blocks, which `find` returned."""
        self.version += 1
        reference_counts, free = self._reference_counts, self._free
        for block in blocks:
            if reference_counts[block] == 0:
                del free[block]
            reference_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give references back; blocks that nobody else holds become free, to be taken in this order.

        One without a key is worth nothing to anybody: it is taken before all others (vLLM's `BlockPool.free_blocks`).
        """
        self.version += 1
        reference_counts, free, hashes = self._reference_counts, self._free, self._hashes
        keyless = []
        for block in blocks:
            count = reference_counts[block] = reference_counts[block] - 1
            assert count >= 0, (block, self)
            if count == 0:
                free[block] = None
                if hashes[block] is None:
                    keyless.append(block)
        for block in reversed(keyless):
            free.move_to_end(block, last=False)

    def expire(self, keys: Iterable[int]) -> None:
        """Have the free blocks with these keys taken first, the last of them before all others."""
        for key in keys:
            block = self._block_by_hash.get(key)
            if block is not None and block in self._free:
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: int) -> None:
        """Let a full block be found by its key, unless another block already is."""
        if key not in self._block_by_hash and self._hashes[block] is None:
            self._block_by_hash[key] = block
            self._hashes[block] = key

    def reset(self) -> bool:
        """Forget what every block holds; refuse, as vLLM does, while any is referenced."""
        if self.used_count:
            return False
        self._block_by_hash.clear()
        self._hashes = [None] * len(self._hashes)
        return True

    def check_invariants(self, references: Iterable[int]) -> None:
        """Assert that each block is free xor referenced, as often as it appears in `references`, and keys agree."""
        expected = [0] * len(self._reference_counts)
        for block in references:
            expected[block] += 1
        assert expected == self._reference_counts, "reference counts differ from the requests' blocks"
        assert set(self._free) == {block for block, count in enumerate(expected) if count == 0}, "free list"
        keys = {key: block for block, key in enumerate(self._hashes) if key is not None}
        assert keys == self._block_by_hash, "keys and blocks disagree"
