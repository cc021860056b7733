"""Levels, quanta and service: where a request stands in the order. Pure.

The multi-level feedback queue of "MARS" (arXiv 2604.26963, section 4.3), with the numbers of the authors' preview code.
Level 0 is served first.
"""

from __future__ import annotations

import math

LEVEL_FACTOR = 4
"""Each level reaches to this many times the tokens of the one before."""


def level_of(tokens: float, first_level_tokens: float = 2048, level_count: int = 4) -> int:
    """Return the level of this many tokens, from 0."""
    level, reach_tokens = 0, first_level_tokens
    while level < level_count - 1 and tokens > reach_tokens:
        level += 1
        reach_tokens *= LEVEL_FACTOR
    return level


def effective_level(level: int, feedback_level: int, unserved_s: float, promote_s: float) -> int:
    """Return the level after feedback, promoted by the time without service."""
    return max(0, max(level, feedback_level) - int(max(0.0, unserved_s) / promote_s))


def quantum_tokens(budget_tokens: int, level: int) -> int:
    """Return the most tokens of a prompt in an iteration: the budget, halved for each level."""
    return max(1, budget_tokens >> level)


def shrunk_tokens(wanted_tokens: int, fitting_tokens: int, floor_tokens: int) -> int:
    """Return a chunk, halved until it fits, but not below the floor."""
    tokens = wanted_tokens
    while tokens > floor_tokens and tokens > fitting_tokens:
        tokens = max(floor_tokens, tokens // 2)
    return tokens


class Service:
    """What an engine computed for a program lately, in tokens: forgotten with a time constant."""

    __slots__ = ("_at_s", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_s = 0.0

    def add(self, tokens: int, now_s: float, window_s: float) -> None:
        """Count tokens."""
        self._tokens = self.tokens(now_s, window_s) + tokens
        self._at_s = now_s

    def tokens(self, now_s: float, window_s: float) -> float:
        """Return what is not forgotten."""
        return self._tokens * math.exp(-max(0.0, now_s - self._at_s) / window_s) if self._tokens else 0.0
