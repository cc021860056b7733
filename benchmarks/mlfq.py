"""An agent-centric engine scheduler: levels, quanta, chunks that shrink, and the order of eviction.

Theory of operation
-------------------
The changes of MARS ("MARS: Efficient, Adaptive Co-Scheduling for Heterogeneous Agentic Systems", arXiv 2604.26963) to
vLLM, with the numbers of the authors' preview code (Afterglow231/MARS_preview): an engine with `discipline=Mlfq`. The
simulator's `engine.py` explains how vLLM decides.

**Levels.** In each iteration running requests are ordered by level, then by when they were last served. A request's
level is that of the tokens of its prompt that are still to be computed, but no lower number than its feedback: one
level down each time it used a whole quantum and is not through, until it generates. A request that was not served for
`PROMOTE_S` rises by one level for each such time.

**Quanta.** A prompt gets at most the quantum of its level in an iteration, so that a prompt of 100,000 tokens does not
block others. One that is alone in the engine blocks nobody and gets the whole budget, which is this project's
addition. Generating is not bounded.

**Shrinking.** A chunk that does not fit in the free blocks is halved until it does, down to one block; only then is a
request preempted: the lowest level first, of equals the one that holds most blocks, then the newest. Generating
requests go last. A preempted request goes to the front of the queue.

**Retaining** blocks for a program's next turn is done by the engine itself (`engines_retain` of a scenario).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from thunderagent.programs.policies.papers.mars_priority import level_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thunderagent.simulator.engine.records import EngineSequence

QUANTA_TOKENS = (2048, 1024, 512, 256)
"""Token limit of a prompt in an iteration, by level."""

LOWEST_LEVEL = len(QUANTA_TOKENS) - 1

PROMOTE_S = 30.0
"""A request that was not served for this long rises by a level."""

FRONT_PRIORITY = -(1 << 60)
"""The rank of a preempted request: before all others that wait."""


def effective_level(remaining_tokens: float, feedback_level: int, unserved_s: float) -> int:
    """Return the level of a running request, promoted by the time since it was last served."""
    level = max(feedback_level, level_of(remaining_tokens))
    return max(0, level - int(unserved_s / PROMOTE_S))


def quantum_tokens(level: int) -> int:
    """Return the token limit of a prompt at a level."""
    return QUANTA_TOKENS[level]


class Mlfq:
    """The levels of one engine's requests, and the decisions that follow from them.

    An engine whose programs have `smaller` times fewer tokens and take `faster` times less time has levels and quanta
    to match.
    """

    def __init__(self, smaller: float = 1.0, faster: float = 1.0) -> None:
        self._smaller = smaller
        self._faster = faster
        self._feedback_levels: WeakKeyDictionary[EngineSequence, int] = WeakKeyDictionary()

    def level(self, sequence: EngineSequence, now_s: float) -> int:
        """Return the level of a running request."""
        if sequence.is_decoding:
            return 0
        remaining_tokens = (sequence.known_tokens - sequence.computed_tokens) * self._smaller
        unserved_s = (now_s - sequence.served_s) * self._faster
        return effective_level(remaining_tokens, self._feedback_levels.get(sequence, 0), unserved_s)

    def in_order(self, running: Sequence[EngineSequence], now_s: float) -> Sequence[EngineSequence]:
        """Order by level, then by the time of last service, then by rank."""
        return sorted(running, key=lambda each: (self.level(each, now_s), each.served_s, each.rank))

    def most_tokens(self, sequence: EngineSequence, now_s: float) -> int:
        """Return the quantum of its level."""
        return max(1, int(quantum_tokens(self.level(sequence, now_s)) / self._smaller))

    def victim(self, running: Sequence[EngineSequence], now_s: float) -> EngineSequence:
        """Return a request of the lowest level, then with most blocks, then the newest; generating ones go last."""
        return max(
            running,
            key=lambda each: (-1 if each.is_decoding else self.level(each, now_s), each.blocks.count, each.rank[1]),
        )

    def preempted(self, sequence: EngineSequence) -> None:
        """Send the request to the front of the queue."""
        sequence.rank = (FRONT_PRIORITY, sequence.rank[1])
        self._feedback_levels.pop(sequence, None)

    def served(self, sequence: EngineSequence, tokens: int, end_s: float) -> None:
        """Lower the request by a level if its quantum was not enough."""
        if sequence.computed_tokens + tokens >= sequence.known_tokens:
            self._feedback_levels.pop(sequence, None)
        elif tokens >= self.most_tokens(sequence, end_s):
            self._feedback_levels[sequence] = min(LOWEST_LEVEL, self._feedback_levels.get(sequence, 0) + 1)
        sequence.served_s = end_s
