"""How many tokens a replica really holds: what it says of itself, corrected by what is lost and by what is not.

Theory of operation
===================
A program that keeps its claim should find its history cached at its next turn. If parts of it are gone, more was let in
than fits: because the capacity was told wrong, because blocks of programs that ended lie there longer than those of
programs whose tools run, or because programs grew. If nothing is lost while others wait, there may be room for more.

So the part of the told capacity that is used goes down fast, in proportion to what was lost, and up slowly, and not
before the memory was once full. Between two steps every program must have had its turns, and what a program may have
lost before a step down is not counted after it: else each overshoot is followed by a slump that lasts for hours.

What was lost is told by the usage of each turn, where the engine says what was cached, and else by the prefix-cache
counters between two polls.
"""

from __future__ import annotations

LOWEST_RATIO = 0.2
HIGHEST_RATIO = 3.0

LOSS_SLACK_RATIO = 0.10
"""Part of what should be cached that may be lost without a reaction: ends of blocks, and programs that were edited."""

STEP_DOWN_RATIO = 0.5
"""Of the part that was lost, so much goes from the capacity at once."""

LARGEST_STEP_RATIO = 0.25
"""The capacity goes down by at most that at once."""

STEP_UP_RATIO = 0.004
"""While others wait and nothing is lost the capacity goes up: by that at first, and each time by twice as much."""

LARGEST_STEP_UP_RATIO = 0.05
"""But never by more than that at once."""

CEILING_RATIO = 0.95
"""Nearer than that to where much was lost the last time, the capacity goes up slowly."""

NEAR_CEILING_STEP_RATIO = 0.0005

BLOCK_TOKENS = 64
"""An engine caches whole blocks: a turn may miss so much of a block without having lost any."""

WINDOW_S = 5.0
"""Time between two steps, at least."""

WINDOW_TURNS_COUNT = 20
"""Turns that tell between two steps, at least: what a single one lost says little."""

WINDOW_TURNS_RATIO = 2.0
"""And so many of each active program: before, most have not noticed the last step."""

LOSS_FREE_RATIO = 0.005
"""So little is lost that more may be tried."""


class CapacityControl:
    """The part of the told capacity of one replica that may be claimed."""

    __slots__ = (
        "_ceiling_ratio",
        "_down_s",
        "_expected_tokens",
        "_granted_count",
        "_lost_tokens",
        "_step_s",
        "_turn_count",
        "_turns_expected_tokens",
        "_up_ratio",
        "computed_tokens",
        "ratio",
    )

    def __init__(self, now_s: float) -> None:
        """Begin by believing what is told."""
        self.ratio = 1.0
        self.computed_tokens = 0
        """Put into its memory so far: before it was once full, that nothing is lost says nothing."""
        self._step_s = now_s
        self._down_s = 0.0
        self._turn_count = 0
        self._granted_count = 0
        self._ceiling_ratio = HIGHEST_RATIO
        self._up_ratio = STEP_UP_RATIO
        self._expected_tokens = 0.0
        self._lost_tokens = 0.0
        self._turns_expected_tokens = 0

    def turn_granted(self, expected_tokens: int) -> None:
        """Note that a turn was sent of which so many tokens should be cached there."""
        self._turns_expected_tokens += expected_tokens
        self._granted_count += 1

    def computed(self, tokens: int) -> None:
        """Note that so many tokens were put into its memory."""
        self.computed_tokens += tokens

    def turn_ended(self, expected_tokens: int, cached_tokens: int, kept_since_s: float) -> None:
        """Note what was cached of a turn of a program that had kept its claim since then.

        What may have been lost before the last step down is not counted again.
        """
        if not expected_tokens or kept_since_s < self._down_s:
            return
        self._turn_count += 1
        self._expected_tokens += expected_tokens
        self._lost_tokens += max(0, expected_tokens - cached_tokens - BLOCK_TOKENS)

    def polled(self, hit_tokens: int) -> None:
        """Note how many prompt tokens were cached in all since the poll before."""
        expected_tokens, self._turns_expected_tokens = self._turns_expected_tokens, 0
        self._turn_count += self._granted_count
        self._granted_count = 0
        self._expected_tokens += expected_tokens
        self._lost_tokens += max(0, expected_tokens - hit_tokens)

    def preempted(self, tokens: int) -> None:
        """Note that running requests lost so many tokens."""
        self._expected_tokens += tokens
        self._lost_tokens += tokens

    def step(self, now_s: float, *, active_count: int, wanted: bool) -> bool:
        """Correct the ratio if it is time; say whether it changed.

        `wanted`: others wait, what may be claimed is, and the memory was once full.
        """
        turns_count = max(WINDOW_TURNS_COUNT, WINDOW_TURNS_RATIO * active_count)
        if now_s - self._step_s < WINDOW_S or self._turn_count < turns_count:
            return False
        before = self.ratio
        lost_ratio = self._lost_tokens / self._expected_tokens if self._expected_tokens else 0.0
        if lost_ratio > LOSS_SLACK_RATIO:
            down_ratio = min(LARGEST_STEP_RATIO, STEP_DOWN_RATIO * lost_ratio)
            self._up_ratio = STEP_UP_RATIO
            self._ceiling_ratio = CEILING_RATIO * before
            self.ratio = max(LOWEST_RATIO, self.ratio * (1.0 - down_ratio))
            self._down_s = now_s
        elif wanted and self._expected_tokens and lost_ratio < LOSS_FREE_RATIO:
            up_ratio = self._up_ratio if self.ratio < self._ceiling_ratio else NEAR_CEILING_STEP_RATIO
            self.ratio = min(HIGHEST_RATIO, self.ratio * (1.0 + up_ratio))
            self._up_ratio = min(LARGEST_STEP_UP_RATIO, 2 * self._up_ratio)
        else:
            self._up_ratio = STEP_UP_RATIO
        self._step_s = now_s
        self._turn_count = 0
        self._expected_tokens = self._lost_tokens = 0.0
        return self.ratio != before
