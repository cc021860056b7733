"""The tokens of simulated programs, without the tokens.

Theory of operation
-------------------
A context of 200,000 tokens is two ranges of numbers: the prefix that it shares with others, and what is its own. No
number is used twice, so two contexts agree exactly where they share a prefix, as real contexts do. An engine looks at
block keys only (`blocks.py`); a context keeps the chain of them, and each block of it is hashed once, when it is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from thunderagent.simulator.blocks import ROOT_HASH, hash_blocks

RUN_TOKENS = 1 << 32
"""Numbers set apart for one context, or one prefix."""


class ContextTokens(Sequence[int]):
    """The token ids of a context as they are now: O(1) to make, and only what is looked at is counted out."""

    __slots__ = ("_own", "_prefix")

    def __init__(self, prefix: range, own: range) -> None:
        self._prefix = prefix
        self._own = own

    def __len__(self) -> int:
        return len(self._prefix) + len(self._own)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._at(positions)
        return [self._at(position) for position in positions]

    def __iter__(self) -> Iterator[int]:
        yield from self._prefix
        yield from self._own

    def _at(self, position: int) -> int:
        shared_tokens = len(self._prefix)
        return self._prefix[position] if position < shared_tokens else self._own[position - shared_tokens]


class Context:
    """One program's growing context, with the keys of its full blocks."""

    __slots__ = ("_block_size", "_own_start", "_own_tokens", "_prefix", "hashes")

    def __init__(self, prefix: range, prefix_hashes: Sequence[int], own_start: int, block_size: int) -> None:
        self._prefix = prefix
        self._own_start = own_start
        self._own_tokens = 0
        self._block_size = block_size
        self.hashes = list(prefix_hashes)
        """Keys of the full blocks, in order; only ever appended to."""

    def __len__(self) -> int:
        return len(self._prefix) + self._own_tokens

    @property
    def shared_blocks_count(self) -> int:
        """Return how many of the full blocks hold nothing but the shared prefix."""
        return len(self._prefix) // self._block_size

    def tokens(self) -> ContextTokens:
        """Return all token ids as they are now."""
        return ContextTokens(self._prefix, range(self._own_start, self._own_start + self._own_tokens))

    def following(self, count: int) -> range:
        """Return the `count` token ids that come next: an answer, before it is generated."""
        start = self._own_start + self._own_tokens
        return range(start, start + count)

    def append(self, count: int) -> None:
        """Grow by that many tokens. Costs O(blocks that become full)."""
        self._own_tokens += count
        hashed_tokens = len(self.hashes) * self._block_size
        if len(self) - hashed_tokens < self._block_size:
            return
        shared_tokens = len(self._prefix)
        own = range(self._own_start + max(0, hashed_tokens - shared_tokens), self._own_start + self._own_tokens)
        new: Sequence[int] = own if hashed_tokens >= shared_tokens else [*self._prefix[hashed_tokens:], *own]
        parent = self.hashes[-1] if self.hashes else ROOT_HASH
        self.hashes += hash_blocks(new, self._block_size, parent=parent)


class TokenSpace:
    """Hand out numbers to contexts and shared prefixes, in the order in which they are asked for."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._run_count = 0
        self._prefixes: dict[tuple[str, int], tuple[range, list[int]]] = {}
        self._prefix_starts: dict[str, int] = {}

    def open(self, shared_prefix_id: str = "", shared_prefix_tokens: int = 0) -> Context:
        """Return a new context that holds its shared prefix only. Costs O(1) besides the first with that prefix."""
        prefix, hashes = self._prefix(shared_prefix_id, shared_prefix_tokens) if shared_prefix_id else (range(0), [])
        return Context(prefix, hashes, self._next_start(), self._block_size)

    def _prefix(self, prefix_id: str, tokens: int) -> tuple[range, list[int]]:
        known = self._prefixes.get((prefix_id, tokens))
        if known is None:
            if prefix_id not in self._prefix_starts:
                self._prefix_starts[prefix_id] = self._next_start()
            start = self._prefix_starts[prefix_id]
            prefix = range(start, start + tokens)
            known = self._prefixes[prefix_id, tokens] = prefix, hash_blocks(prefix, self._block_size)
        return known

    def _next_start(self) -> int:
        self._run_count += 1
        return self._run_count * RUN_TOKENS
