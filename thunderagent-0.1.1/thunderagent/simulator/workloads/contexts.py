"""The tokens of simulated programs, without the tokens.

Theory of operation
-------------------
A context of 200,000 tokens is two ranges of numbers: the prefix that it shares with others, and what is its own. No
number is used twice, so two contexts agree exactly where they share a prefix, as real contexts do. An engine looks at
block keys only (`blocks.py`), and a context has some without hashing: a number of the range that the block's last token
is of. Two contexts have the same key where they are the same up to there, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

RUN_TOKENS = (1 << 32) + 15_485_863
"""Numbers set apart for one context, or one prefix. No power of two: so their keys spread in dictionaries."""


class ContextTokens(Sequence[int]):
    """The token ids of a context at this moment: O(1) to create, and evaluated only as needed."""

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

    __slots__ = ("_block_size", "_own_start", "_own_tokens", "_prefix", "keys")

    def __init__(self, prefix: range, prefix_keys: Sequence[int], own_start: int, block_size: int) -> None:
        self._prefix = prefix
        self._own_start = own_start
        self._own_tokens = 0
        self._block_size = block_size
        self.keys = list(prefix_keys)
        """Keys of the full blocks, in order; only appended to."""

    def __len__(self) -> int:
        return len(self._prefix) + self._own_tokens

    @property
    def shared_blocks_count(self) -> int:
        """Return how many of the full blocks contain only the shared prefix."""
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
        self.keys += self._keys_from(self._own_start, len(self))

    def keys_with(self, answer: range) -> list[int]:
        """Return the keys of the full blocks of the context followed by an answer, its own or another's."""
        return [*self.keys, *self._keys_from(answer.start // RUN_TOKENS * RUN_TOKENS, len(self) + len(answer))]

    def _keys_from(self, start: int, tokens: int) -> range:
        """Return the keys of the blocks that become full up to so many tokens, out of the numbers from `start` on."""
        return range(start + len(self.keys), start + tokens // self._block_size)


class TokenSpace:
    """Hands out numbers to contexts and shared prefixes, in order of request."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._run_count = 0
        self._prefixes: dict[tuple[str, int], tuple[range, range]] = {}
        self._prefix_starts: dict[str, int] = {}

    def open(self, shared_prefix_id: str = "", shared_prefix_tokens: int = 0) -> Context:
        """Return a new context that holds only its shared prefix. Costs O(1) except for the first with that prefix."""
        none = range(0)
        prefix, keys = self._prefix(shared_prefix_id, shared_prefix_tokens) if shared_prefix_id else (none, none)
        return Context(prefix, keys, self._next_start(), self._block_size)

    def _prefix(self, prefix_id: str, tokens: int) -> tuple[range, range]:
        known = self._prefixes.get((prefix_id, tokens))
        if known is None:
            if prefix_id not in self._prefix_starts:
                self._prefix_starts[prefix_id] = self._next_start()
            start = self._prefix_starts[prefix_id]
            prefix, keys = range(start, start + tokens), range(start, start + tokens // self._block_size)
            known = self._prefixes[prefix_id, tokens] = prefix, keys
        return known

    def _next_start(self) -> int:
        self._run_count += 1
        return self._run_count * RUN_TOKENS
