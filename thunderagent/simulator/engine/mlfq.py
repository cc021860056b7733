"""An agent-centric engine scheduler: levels, quanta, chunks that shrink, and who is evicted first.

Theory of operation
-------------------
What MARS ("MARS: Efficient, Adaptive Co-Scheduling for Heterogeneous Agentic Systems", arXiv 2604.26963) changes in
vLLM, with the numbers of the authors' preview code (Afterglow231/MARS_preview). `Engine` asks these functions where
`scheduling_policy` is `mlfq`; how vLLM decides is told there.

**Levels.** What runs is ordered in each iteration by its level, and in it by when it was served last. A request's level
is that of the tokens of its prompt that are still to be computed, but no lower number than its feedback: one level down
each time it was served a whole quantum and is not through, until it generates. Who was not served for `PROMOTE_S` goes
up by one level for each such time.

**Quanta.** A prompt gets at most the quantum of its level in an iteration, so that one of 100,000 tokens stands in
nobody's way; one that is alone in the engine stands in nobody's way and gets the whole budget, which is ours.
Generating is not bounded.

**Shrinking.** A chunk that does not fit in the free blocks is halved until it does, down to one block; only then is
somebody preempted: a lowest level first, of equals who holds most blocks, then the newest. Who generates goes last.
A preempted request goes to the front of the queue.

**Retaining.** A finished request may leave its blocks retained for its program's next turn: they are not free. When
blocks are short they go before anybody is preempted, those with the highest priority number first, of equals the most
blocks; and before a request at the head of the queue waits for room.
"""

from __future__ import annotations

from thunderagent.programs.policies.mars_priority import level_of

QUANTA_TOKENS = (2048, 1024, 512, 256)
"""What a prompt gets at most in an iteration, by level."""

LOWEST_LEVEL = len(QUANTA_TOKENS) - 1

PROMOTE_S = 30.0
"""Who was not served for so long goes up by a level."""

FRONT_PRIORITY = -(1 << 60)
"""Of a preempted request: before everybody else that waits."""


def effective_level(remaining_tokens: int, feedback_level: int, unserved_s: float) -> int:
    """Return the level of a request that runs, promoted by the time in which it was not served."""
    level = max(feedback_level, level_of(remaining_tokens))
    return max(0, level - int(unserved_s / PROMOTE_S))


def quantum_tokens(level: int) -> int:
    """Return what a prompt of that level gets at most."""
    return QUANTA_TOKENS[level]
