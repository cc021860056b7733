"""A tier behind a KV pool: host memory, or a disk, that keeps the blocks which the pool evicts.

Theory of operation
-------------------
Evicted blocks are copied here. What a prompt needs and the pool lacks is copied back instead of computed: it costs
`restore_token_s` per token, in the iteration that admits the request, which waits for it as a forward pass of LMCache's
connector does by default. (vLLM's own offloading and SGLang's HiCache overlap a part of it with others' work; then it
costs less than stated here, which is a matter of the price.) Writing costs nothing: it is not waited for.

It keeps its copy of restored blocks. It evicts the least recently used first, of each context the tail first, because
the pool gave it up in that order.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tier:
    """The keys of its blocks, the next to go first."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Tier {len(self._keys)} of {self.block_count} blocks>"

    def store(self, key: int) -> None:
        """Store a block as most recently used; the least recently used goes if there is no room."""
        keys = self._keys
        if key in keys:
            keys.move_to_end(key)
            return
        if len(keys) >= self.block_count:
            keys.popitem(last=False)
        keys[key] = None

    def find(self, keys: Sequence[int], begin: int, limit_count: int) -> int:
        """Return how many keys it holds without a gap, from `begin` on and before `limit_count`."""
        held, position = self._keys, begin
        while position < limit_count and keys[position] in held:
            position += 1
        return position - begin

    def use(self, keys: Sequence[int]) -> None:
        """Note that blocks of it are copied back: the tail of their context stays the first to go."""
        for key in reversed(keys):
            self.store(key)
