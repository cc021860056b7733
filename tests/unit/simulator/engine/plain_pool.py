"""A pool of KV blocks without runs: the reference for the pool with runs, block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class PlainPool:
    """A pool that keeps each block separately, as vLLM's does."""

    def __init__(self, block_count: int) -> None:
        self._reference_counts = [0] * block_count
        self._hashes: list[int | None] = [None] * block_count
        self._block_by_hash: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(block_count))

    def __repr__(self) -> str:
        return f"<PlainPool {self.used_count} used, {self.free_count} free>"

    @property
    def free_count(self) -> int:
        """Return the number of unreferenced blocks."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Return the number of referenced blocks."""
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

    def allocate(self, count: int) -> list[int]:
        """Take a number of free blocks, those that were freed first; their contents are lost."""
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
        reference_counts, free = self._reference_counts, self._free
        for block in blocks:
            if reference_counts[block] == 0:
                del free[block]
            reference_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Release references; blocks without other references become free, to be taken in this order.

        A block without a key has no value: it is taken before all others (vLLM's `BlockPool.free_blocks`).
        """
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
        """Make the free blocks with these keys the next to be taken, the last of them first."""
        for key in keys:
            block = self._block_by_hash.get(key)
            if block is not None and block in self._free:
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: int) -> None:
        """Publish a full block under its key, unless another block has it."""
        if key not in self._block_by_hash and self._hashes[block] is None:
            self._block_by_hash[key] = block
            self._hashes[block] = key

    def reset(self) -> bool:
        """Forget the contents of all blocks; refuse, as vLLM does, while any is referenced."""
        if self.used_count:
            return False
        self._block_by_hash.clear()
        self._hashes = [None] * len(self._hashes)
        return True
