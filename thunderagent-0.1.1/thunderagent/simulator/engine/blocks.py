"""Manages the blocks of a KV pool: who references each, what it holds, and which goes next.

Theory of operation
-------------------
A block holds `block_size` consecutive tokens of one context. A full block has a key, `hash(key of the block before it,
its tokens)`, so a key stands for the whole prefix up to there. A block is *referenced* by the requests that run on it,
or it is *free*. Free is not empty: it keeps its key, and can be found again by it (a prefix-cache hit) until an
allocation takes it: those without a key first, then the block freed longest ago.

A context of 200,000 tokens is 12,500 blocks, which are found, taken and freed together. So the pool keeps *runs*:
consecutive blocks of one context with the same holders. The last block of a free run goes first, because its request
returned it tail first. A run is split where a context leaves it, and grows while only one request holds it. Blocks
without a key cannot be distinguished: they are counted. So a turn costs its runs, of which a program has a few, and the
blocks that are computed for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from thunderagent.simulator.engine.tier import Tier

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


class Run:
    """Consecutive blocks of one context, by their keys; or, where it has none, `blank_count` blocks that hold nothing.

    A free run stands in the pool's ring, between the one that goes before it and the one that goes after it.
    """

    __slots__ = ("after", "before", "blank_count", "holders", "keys")

    def __init__(self, keys: list[int], blank_count: int = 0) -> None:
        self.keys = keys
        self.blank_count = blank_count
        self.holders: set[Holding] = set()
        self.before = self.after = self

    def unlink(self) -> None:
        """Remove it from its ring."""
        self.before.after, self.after.before = self.after, self.before

    def link_before(self, other: Run) -> None:
        """Insert it right before another one of a ring."""
        before = other.before
        self.before, self.after = before, other
        before.after = other.before = self


class Holding:
    """The blocks that one request references: `count` in all, of which `blank_count` cannot be found by a key."""

    __slots__ = ("blank_count", "count", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []  # in the order of the context
        self.count = self.blank_count = 0


class BlockPool:
    """Manages the blocks: who references each, what a full one holds, and which free one goes next."""

    def __init__(self, block_count: int, tier: Tier | None = None) -> None:
        self._block_count = self.free_count = block_count
        self._tier = tier  # keeps what is evicted here
        self._run_by_key: dict[int, Run] = {}
        self._ring = Run([])  # the next to go comes after it, the last to go before it
        Run([], block_count).link_before(self._ring)
        self.lost_count = 0
        """How many full blocks lost their content to others."""
        self.version = 0
        """Changes whenever references are taken or returned, and when its owner says that more can be shared."""

    def __repr__(self) -> str:
        return f"<BlockPool {self.used_count} used, {self.free_count} free, {len(self._run_by_key)} cached>"

    @property
    def used_count(self) -> int:
        """Return how many blocks somebody references."""
        return self._block_count - self.free_count

    def find(self, hashes: Sequence[int], limit_count: int) -> list[Run]:
        """Return the runs of the longest leading part of `limit_count` keys that is cached."""
        found: list[Run] = []
        position = 0
        while position < limit_count:
            run = self._run_by_key.get(hashes[position])
            if run is None:
                break
            count = _common_count(run.keys, hashes, position, limit_count)
            if count < len(run.keys):
                self._split(run, count)
            found.append(run)
            position += count
        return found

    def offers_no_more(self, version: int, missing_key: int) -> bool:
        """Return whether a context that did not fit at `version`, and lacked block `missing_key`, cannot fit yet."""
        return version == self.version and missing_key not in self._run_by_key

    def allocate(self, count: int, holding: Holding | None = None) -> Holding:
        """Give a request, or a new one, `count` free blocks, the longest freed first; their content is lost."""
        assert count <= self.free_count, self
        holding = holding or Holding()
        self.free_count -= count
        holding.count += count
        holding.blank_count += count
        run_by_key = self._run_by_key
        cached_count = len(run_by_key)
        while count:
            run = self._ring.after
            keys = run.keys
            if run.blank_count:
                taken = min(count, run.blank_count)
                run.blank_count -= taken
            elif count == 1:  # as for most tokens
                taken = 1
                key = keys.pop()
                del run_by_key[key]
                if self._tier is not None:
                    self._tier.store(key)
            else:
                taken = min(count, len(keys))
                lost = keys[-taken:]
                for key in lost:
                    del run_by_key[key]
                del keys[-taken:]
                if self._tier is not None:
                    for key in reversed(lost):
                        self._tier.store(key)
            if not (keys or run.blank_count):
                run.unlink()
            count -= taken
        self.lost_count += cached_count - len(run_by_key)
        return holding

    def acquire(self, holding: Holding, runs: Iterable[Run]) -> None:
        """Give a request without blocks a reference to the blocks of these runs, which `find` returned."""
        self.version += 1
        for run in runs:
            if not run.holders:
                run.unlink()
                self.free_count -= len(run.keys)
            run.holders.add(holding)
            holding.runs.append(run)
            holding.count += len(run.keys)

    def release(self, holding: Holding) -> None:
        """Release all references of a request; blocks without other holders become free: its tail goes first.

        A block without a key is worthless: it is taken before all others (vLLM's `BlockPool.free_blocks`).
        """
        self.version += 1
        ring = self._ring
        for run in reversed(holding.runs):
            run.holders.remove(holding)
            if not run.holders:
                run.link_before(ring)
                self.free_count += len(run.keys)
        if holding.blank_count:
            first = ring.after
            if not first.blank_count:
                first = Run([])
                first.link_before(ring.after)
            first.blank_count += holding.blank_count
            self.free_count += holding.blank_count
        holding.runs = []
        holding.count = holding.blank_count = 0

    def expire(self, keys: Sequence[int]) -> None:
        """Take the free blocks with these keys first, the last of them before all others."""
        position = 0
        while position < len(keys):
            run = self._run_by_key.get(keys[position])
            if run is None or run.holders:
                position += 1
                continue
            begin = end = run.keys.index(keys[position])
            while end < len(run.keys) and position < len(keys) and run.keys[end] == keys[position]:
                end += 1
                position += 1
            self._move_first(run, begin, end)

    def publish(self, holding: Holding, keys: Sequence[int], parent: int) -> None:
        """Make blocks of a request that became full findable by their keys; `parent` is the key before the first.

        A block cannot be found if another has the same key.
        """
        run_by_key = self._run_by_key
        if len(keys) == 1 or not run_by_key.keys().isdisjoint(keys):
            for key in keys:
                self.publish_one(holding, key, parent)
                parent = key
        else:
            run = _last_run(holding, parent)
            holding.blank_count -= len(keys)
            run.keys += keys
            run_by_key.update(dict.fromkeys(keys, run))

    def publish_one(self, holding: Holding, key: int, parent: int) -> None:
        """Do as `publish` for a single block."""
        if key not in self._run_by_key:
            run = self._run_by_key[key] = _last_run(holding, parent)
            holding.blank_count -= 1
            run.keys.append(key)

    def reset(self) -> bool:
        """Forget what every block holds; refuse, as vLLM does, while any is referenced."""
        if self.used_count:
            return False
        self._run_by_key.clear()
        self._ring = Run([])
        Run([], self._block_count).link_before(self._ring)
        return True

    def check_invariants(self, holdings: Sequence[Holding]) -> None:
        """Assert that each run is either free or held, by its holders, and that keys and counts agree."""
        held = {run for holding in holdings for run in holding.runs}
        free = list(self._free_runs())
        for run in held:
            assert run.keys, "a held run is empty"
            assert run.holders == {holding for holding in holdings if run in holding.runs}, "holders disagree"
        assert not any(run.holders for run in free), "held and free"
        assert all(bool(run.keys) != bool(run.blank_count) for run in free), "a free run is both or none"
        keys = {key: run for run in (*held, *free) for key in run.keys}
        assert keys == self._run_by_key, "keys and runs disagree"
        assert len(keys) == sum(len(run.keys) for run in (*held, *free)), "a key is in two places"
        for holding in holdings:
            assert holding.count == holding.blank_count + sum(len(run.keys) for run in holding.runs), (
                "count of a holding"
            )
        assert self.free_count == sum(len(run.keys) + run.blank_count for run in free), "count of free blocks"
        used_count = sum(len(run.keys) for run in held) + sum(holding.blank_count for holding in holdings)
        assert used_count == self.used_count, "count of used blocks"

    def _free_runs(self) -> Iterator[Run]:
        run = self._ring.after
        while run is not self._ring:
            yield run
            run = run.after

    def _split(self, run: Run, count: int) -> Run:
        """Leave a run its first `count` blocks; return the run of the others, with the same holders or before it."""
        tail = Run(run.keys[count:])
        del run.keys[count:]
        self._run_by_key.update(dict.fromkeys(tail.keys, tail))
        if run.holders:
            tail.holders = set(run.holders)
            for holding in run.holders:
                holding.runs.insert(holding.runs.index(run) + 1, tail)
        else:
            tail.link_before(run)
        return tail

    def _move_first(self, run: Run, begin: int, end: int) -> None:
        """Take the blocks of a part of a free run before all others."""
        if end < len(run.keys):
            self._split(run, end)
        if begin:
            run = self._split(run, begin)
        run.unlink()
        run.link_before(self._ring.after)


def _last_run(holding: Holding, parent: int) -> Run:
    """Return the run of a request that ends with the block `parent` and is its alone, or a new one."""
    run = holding.runs[-1] if holding.runs else None
    if run is None or len(run.holders) > 1 or run.keys[-1] != parent:
        run = Run([])
        run.holders.add(holding)
        holding.runs.append(run)
    return run


def count_free(runs: Iterable[Run]) -> int:
    """Return how many blocks of these runs are free."""
    return sum([len(run.keys) for run in runs if not run.holders])


def _common_count(keys: Sequence[int], hashes: Sequence[int], position: int, limit_count: int) -> int:
    """Return how many keys a run, found by its first one, has in common with those of a context from `position` on.

    A key stands for all before it: so the last of equal length says it, and else it is searched by halves.
    """
    equal, different = 1, min(len(keys), limit_count - position) + 1
    if keys[different - 2] == hashes[position + different - 2]:
        return different - 1
    while different - equal > 1:
        middle = (equal + different) // 2
        if keys[middle - 1] == hashes[position + middle - 1]:
            equal = middle
        else:
            different = middle
    return equal
