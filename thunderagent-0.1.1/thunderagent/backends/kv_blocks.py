"""Which blocks are in an engine's KV pool, and how much of each program they are: an index without clock and socket.

Theory of operation
===================
A block's hash covers all tokens before it, so blocks form trees: a root is the beginning of a prompt, and programs with
the same beginning share it. A block can be hit only if every block before it is there too. Then it is *reachable*, and
knows its depth: the tokens from the root up to its end. A block with an unknown past (it was stored before we listened)
is not reachable, and its program has no figure: not known is not zero.

A program that stores a block used all blocks before it, so one pointer says what a program has: the end of its chain.
When a block goes, the ends of chains at or behind it retreat to the block before. Engines evict the tails of chains
first, so that is one step. A program has several chains if it asked side questions or runs sub-agents; its figure
counts each block once, and a block that programs share counts for each of them.

A pool may hold the same block twice; it is gone when its last copy is. A report of blocks that were *hit* looks like a
report of blocks stored (vLLM sends them for requests with `kv_cache_report_mode` "full"). A report that repeats a chain
from its root on, while the root is there, is taken for a hit and adds no copies.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Final

from thunderagent.backends.kv_messages import BlockHash, BlocksRemoved, BlocksStored, KvEvent

MAX_BLOCKS: Final = 1_000_000
"""A pool that seems to hold more was not followed correctly: the caller then starts a new index."""
MAX_PROGRAMS: Final = 50_000
"""Ended programs leave shared blocks behind; beyond this number, those longest without a new block are forgotten."""
MAX_WALK_BLOCKS: Final = 50_000
"""How many blocks behind one that comes or goes out of order are looked at; engines evict the ends of chains first."""
MAX_CHAINS: Final = 8
"""Ends of chains kept per program; the one longest without a new block is dropped first."""
_NEAR_BLOCKS: Final = 8
"""How far before new blocks their chain's old end is searched. A leftover end costs time, not tokens."""


class WalkError(ValueError):
    """A report concerns more blocks than are followed; only the subscriber sees this error."""


class _Block:
    """A stored block; `depth_tokens` None is not reachable. Only reachable blocks are ends of chains."""

    __slots__ = ("block_hash", "copies_count", "depth_tokens", "own_tokens", "parent_hash", "programs")

    def __init__(self, block_hash: BlockHash, parent_hash: BlockHash | None, own_tokens: int) -> None:
        self.block_hash = block_hash
        self.parent_hash = parent_hash
        self.own_tokens = own_tokens
        self.depth_tokens: int | None = None
        self.copies_count = 1
        self.programs: set[str] | None = None


class KvBlocks:
    """Indexes one pool by its engine's reports. Each block costs O(1), a block out of order its subtree."""

    def __init__(self) -> None:
        """Start empty."""
        self._blocks: dict[BlockHash, _Block] = {}
        self._children: dict[BlockHash, set[_Block]] = {}
        self._chains: OrderedDict[str, list[_Block]] = OrderedDict()
        """Ends of chains by program, the newest last; programs in order of their last new block."""
        self._emptied: dict[str, None] = {}
        """Programs that have nothing here since the pool was cleared, until that is taken."""
        self._changed: dict[str, None] = {}
        self.walked_count = 0
        """How many blocks were looked at because others came or went out of order."""
        self._reported_tokens: dict[str, int] = {}
        self._group_id: int | None = None
        self._walk_count = 0

    def __repr__(self) -> str:
        return f"<KvBlocks {len(self._blocks)} blocks, {len(self._chains)} programs>"

    @property
    def blocks_count(self) -> int:
        """Return how many different blocks are there."""
        return len(self._blocks)

    def apply(self, event: KvEvent) -> None:
        """Apply an event of the pool. Raises `WalkError` for one that concerns too many blocks, and is useless then.

        Of a model's groups of layers only the first is followed.
        """
        if type(event) is BlocksStored:
            if self._group_id is None:
                self._group_id = event.group_id
            if event.group_id == self._group_id:
                self._store(event)
        elif type(event) is BlocksRemoved:
            if event.group_id == self._group_id:
                for block_hash in event.block_hashes:
                    self._remove(block_hash)
        else:
            self.clear()

    def clear(self) -> None:
        """Note that the pool is empty."""
        if not self._blocks:  # an engine may say so again and again
            return
        gone = dict.fromkeys(self._chains)
        self._changed.update(gone)
        self._emptied.update(gone)
        self._chains, self._blocks, self._children = OrderedDict(), {}, {}
        while len(self._emptied) > MAX_PROGRAMS:
            self._drop_program(next(iter(self._emptied)))

    def resident_tokens(self, program_id: str) -> int | None:
        """Return how many tokens of a program are there; None is unknown. O(1) for a program with one chain."""
        chain_ends = self._chains.get(program_id)
        if chain_ends is None:
            return 0 if program_id in self._emptied else None
        if len(chain_ends) == 1:
            return chain_ends[0].depth_tokens
        return self._union_tokens(chain_ends)

    def take_changes(self, limit_count: int) -> list[tuple[str, int]]:
        """Return programs whose figure changed since it was last taken, with the new one.

        Checks at most `limit_count` programs; `has_changes` says whether there are more.
        """
        changes = []
        for program_id in list(islice(self._changed, limit_count)):
            del self._changed[program_id]
            tokens = self.resident_tokens(program_id)
            if tokens is not None and tokens != self._reported_tokens.get(program_id, 0):
                changes.append((program_id, tokens))
                self._reported_tokens[program_id] = tokens
            if not tokens:
                self._drop_program(program_id)
        return changes

    @property
    def has_changes(self) -> bool:
        """Return whether there are programs for `take_changes` to check."""
        return bool(self._changed)

    # --- blocks that come -------------------------------------------------------------------------------------------

    def _store(self, event: BlocksStored) -> None:
        is_hit = event.parent_hash is None and event.block_hashes[0] in self._blocks
        parent_hash = event.parent_hash
        for block_hash in event.block_hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                self._add(_Block(block_hash, parent_hash, event.block_tokens))
            elif not is_hit:
                block.copies_count += 1
            parent_hash = block_hash
        if event.program_id is not None:
            self._extend(event.program_id, event)

    def _add(self, block: _Block) -> None:
        self._blocks[block.block_hash] = block
        if block.parent_hash is None:
            self._reach(block, 0)
            return
        self._children.setdefault(block.parent_hash, set()).add(block)
        parent = self._parent(block)
        if parent is not None and parent.depth_tokens is not None:
            self._reach(block, parent.depth_tokens)

    def _reach(self, block: _Block, before_tokens: int) -> None:
        """Give a block its depth, and all blocks that are reachable through it."""
        block.depth_tokens = before_tokens + block.own_tokens
        reached = [block]
        while reached:
            parent = reached.pop()
            assert parent.depth_tokens is not None
            for child in self._children.get(parent.block_hash, ()):
                if child.depth_tokens is None:
                    child.depth_tokens = parent.depth_tokens + child.own_tokens
                    reached.append(child)
            self._walk(parent, block)

    def _extend(self, program_id: str, event: BlocksStored) -> None:
        """End a chain of a program at new blocks, instead of at the block that they continue."""
        end = self._blocks[event.block_hashes[-1]]
        if end.depth_tokens is None:
            self._drop_program(program_id)
            return
        self._emptied.pop(program_id, None)
        chain_ends = self._chains.pop(program_id, [])
        self._chains[program_id] = chain_ends
        self._changed[program_id] = None
        passed = {*event.block_hashes, *self._some_before(event.parent_hash)}
        for old_end in [each for each in chain_ends if each.block_hash in passed]:
            self._take_end(program_id, chain_ends, old_end)
        self._put_end(program_id, chain_ends, end)
        if len(chain_ends) > MAX_CHAINS:
            self._take_end(program_id, chain_ends, chain_ends[0])
        if len(self._chains) > MAX_PROGRAMS:
            self._drop_program(next(iter(self._chains)))

    def _some_before(self, block_hash: BlockHash | None) -> list[BlockHash]:
        """Return a block and some before it, as far as they are there."""
        before: list[BlockHash] = []
        while block_hash is not None and block_hash in self._blocks and len(before) < _NEAR_BLOCKS:
            before.append(block_hash)
            block_hash = self._blocks[block_hash].parent_hash
        return before

    # --- blocks that go ---------------------------------------------------------------------------------------------

    def _remove(self, block_hash: BlockHash) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            return
        block.copies_count -= 1
        if block.copies_count:
            return
        del self._blocks[block_hash]
        if block.parent_hash is not None:
            siblings = self._children[block.parent_hash]
            siblings.discard(block)
            if not siblings:
                del self._children[block.parent_hash]
        if block.depth_tokens is not None:
            self._retreat(block)

    def _retreat(self, gone: _Block) -> None:
        """Move chains that end at a removed block, or behind it, to the one before; what is behind is lost."""
        parent = self._parent(gone)
        lost = [gone]
        while lost:
            block = lost.pop()
            block.depth_tokens = None
            self._walk(block, gone)
            for program_id in tuple(block.programs or ()):
                chain_ends = self._chains[program_id]
                self._take_end(program_id, chain_ends, block)
                if parent is not None:
                    self._put_end(program_id, chain_ends, parent)
                self._changed[program_id] = None
            lost.extend(child for child in self._children.get(block.block_hash, ()) if child.depth_tokens is not None)

    def _walk(self, block: _Block, first: _Block) -> None:
        """Count a block that is looked at because of another one. Raises `WalkError` beyond the bound."""
        if block is first:
            self._walk_count = 0
            return
        self._walk_count += 1
        self.walked_count += 1
        if self._walk_count > MAX_WALK_BLOCKS:
            raise WalkError(f"more than {MAX_WALK_BLOCKS} blocks are behind one that came or went out of order")

    def _drop_program(self, program_id: str) -> None:
        """Forget a program; its blocks stay."""
        for end in tuple(self._chains.get(program_id, ())):
            self._take_end(program_id, self._chains[program_id], end)
        self._chains.pop(program_id, None)
        self._emptied.pop(program_id, None)
        self._changed.pop(program_id, None)
        self._reported_tokens.pop(program_id, None)

    # --- ends of chains ---------------------------------------------------------------------------------------------

    def _put_end(self, program_id: str, chain_ends: list[_Block], end: _Block) -> None:
        if end not in chain_ends:
            chain_ends.append(end)
            end.programs = end.programs or set()
            end.programs.add(program_id)

    def _take_end(self, program_id: str, chain_ends: list[_Block], end: _Block) -> None:
        chain_ends.remove(end)
        assert end.programs is not None
        end.programs.discard(program_id)
        if not end.programs:
            end.programs = None

    def _parent(self, block: _Block) -> _Block | None:
        return None if block.parent_hash is None else self._blocks.get(block.parent_hash)

    def _union_tokens(self, chain_ends: list[_Block]) -> int:
        """Count the tokens of several chains, shared ones once; of very long ones the longest. O(blocks of all)."""
        seen: set[_Block] = set()
        for end in chain_ends:
            block: _Block | None = end
            while block is not None and block not in seen:
                seen.add(block)
                block = self._parent(block)
                if len(seen) > MAX_WALK_BLOCKS:
                    return max(each.depth_tokens or 0 for each in chain_ends)
        return sum(block.own_tokens for block in seen)
