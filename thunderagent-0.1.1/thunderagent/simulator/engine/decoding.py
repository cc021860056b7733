"""Steps requests that only generate all together: an iteration costs its changes, not its number of requests.

Theory of operation
-------------------
A decoding request gets one token in each iteration, and only three other things happen to it, all known beforehand:
every `block_size` iterations it needs a block, in the iteration before that one of its blocks is full, and after a
fixed number of iterations it is finished. So the batch counts its iterations, and stores for each member how many
tokens it has more than that count. The members that need a block, and those whose block is full, are those of one
*phase*: the count modulo `block_size`.

The batch is the leading part of what runs, in the order of admission, and takes part in an iteration as a whole or not
at all: if blocks are short, the engine dissolves it and serves each member separately.
"""

from __future__ import annotations

from thunderagent.simulator.engine.blocks import BlockPool
from thunderagent.simulator.engine.records import EngineSequence


class DecodeBatch:
    """The requests that decode together."""

    def __init__(self, block_size: int) -> None:
        self.count = 0
        """How many members there are."""
        self._block_size = block_size
        self._iteration_count = 0
        self._extra_tokens: dict[EngineSequence, int] = {}  # per member: its known tokens, less the iterations
        self.context_tokens = 0
        """How many tokens the members know together."""
        self._filling: list[list[EngineSequence]] = [
            [] for _ in range(block_size)
        ]  # by the phase in which a block is full
        self._ending: dict[
            int, list[EngineSequence]
        ] = {}  # by the count of iterations after which they have all their tokens
        self._request_ids: tuple[str, ...] | None = ()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Return the members, in order of joining."""
        if self._request_ids is None:
            self._request_ids = tuple([sequence.request.request_id for sequence in self._extra_tokens])
        return self._request_ids

    @property
    def missing_count(self) -> int:
        """Return how many blocks the next iteration needs."""
        return len(self._filling[(self._iteration_count - 1) % self._block_size])

    def known_tokens(self, sequence: EngineSequence) -> int:
        """Return how many tokens a request knows now, as a member or not."""
        extra_tokens = self._extra_tokens.get(sequence)
        return sequence.known_tokens if extra_tokens is None else self._iteration_count + extra_tokens

    def join(self, sequence: EngineSequence) -> None:
        """Add a decoding request whose full blocks are all published."""
        extra_tokens = self._extra_tokens[sequence] = sequence.known_tokens - self._iteration_count
        self.context_tokens += sequence.known_tokens
        self._filling[-extra_tokens % self._block_size].append(sequence)
        self._ending.setdefault(sequence.end_tokens - extra_tokens, []).append(sequence)
        self._request_ids = None
        self.count += 1

    def dissolve(self) -> None:
        """Release all members."""
        for sequence in self._extra_tokens:
            self._write_down(sequence)
        self._extra_tokens.clear()
        self.context_tokens = self.count = 0
        for filling in self._filling:
            filling.clear()
        self._ending.clear()
        self._request_ids = ()

    def allocate(self, pool: BlockPool) -> None:
        """Give a block to each member that needs one for its next token."""
        for sequence in self._filling[(self._iteration_count - 1) % self._block_size]:
            pool.allocate(1, sequence.blocks)

    def publish(self, pool: BlockPool) -> None:
        """Make the blocks findable that the next iteration fills."""
        for sequence in self._filling[self._iteration_count % self._block_size]:
            sequence.publish(pool, self.known_tokens(sequence) // self._block_size)

    def fills(self, key: int) -> bool:
        """Return whether the next iteration fills the block with that key."""
        filling = self._filling[self._iteration_count % self._block_size]
        return any(each.keys[self.known_tokens(each) // self._block_size - 1] == key for each in filling)

    def step_alone(self, pool: BlockPool) -> bool:
        """Do an iteration in which no member ends or needs a block; otherwise return False and do nothing."""
        count, block_size = self._iteration_count, self._block_size
        if count + 1 in self._ending:
            return False
        needing = self._filling[(count - 1) % block_size]
        if needing:
            if len(needing) > pool.free_count:
                return False
            for sequence in needing:
                pool.allocate(1, sequence.blocks)
        for sequence in self._filling[count % block_size]:
            sequence.publish(pool, (count + self._extra_tokens[sequence]) // block_size)
        self._iteration_count = count + 1
        self.context_tokens += self.count
        return True

    def step(self) -> list[EngineSequence]:
        """Give each member a token; remove and return those that have all theirs."""
        self._iteration_count += 1
        self.context_tokens += self.count
        ended = self._ending.pop(self._iteration_count, None)
        if ended is None:
            return []
        for sequence in ended:
            self._write_down(sequence)
            extra_tokens = self._extra_tokens.pop(sequence)
            self.context_tokens -= sequence.known_tokens
            self._filling[-extra_tokens % self._block_size].remove(sequence)
        self.count -= len(ended)
        self._request_ids = None
        return ended

    def _write_down(self, sequence: EngineSequence) -> None:
        sequence.known_tokens = self.known_tokens(sequence)
        sequence.computed_tokens = sequence.known_tokens - 1
