"""How many tokens a replica really holds: its reported capacity, corrected by what is lost and what is not.

Theory of operation
===================
A program that keeps its claim should find its history cached at its next turn. If parts are gone, more was let in than
fits: because the reported capacity is wrong, because blocks of ended programs stay longer than those of programs whose
tools run, or because programs grew. If nothing is lost while others wait, there may be room for more.

So the used part of the reported capacity goes down fast, in proportion to what was lost. It goes up slowly, and not
before the memory was full once. Between two steps every program must have had its turns. What a program may have lost
before a step down is not counted after it: otherwise each overshoot is followed by a slump of hours.

Each turn's usage tells what was lost, if the engine says what was cached.

**Counters.** Other engines only count how many prompt tokens they found cached, and a poll reads that count. It says
nothing of single turns, it is read late, and now and then it is not read at all. So counts and turns are compared over
a window of several polls. A turn is in the window only if the engine certainly looked it up in it: it was granted after
the window's first reading arrived, and its first token was seen before the last reading was requested. What the engine
found for any other turn only adds to the count. So a loss that the window shows is a loss. A loss that it does not show
may still exist: before more is tried, what others may have found is subtracted. Beyond what the engine reports, which
is mostly right, such a loss is taken back at once, and steps up are small from then on. A window that shows neither
goes on.

**Idleness.** A correction that believes noise must undo itself. If an engine has no turn while turns wait for room, its
memory is reserved for nothing: then what was taken from the capacity comes back, in proportion to that time.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple

from thunderagent.programs.messages import CapacityRecord
from thunderagent.programs.state.program import TurnEnded

LOWEST_RATIO: Final = 0.2
LOWEST_COUNTED_RATIO: Final = 0.5
"""The same limit if only counters tell: they say less."""

HIGHEST_RATIO: Final = 3.0

LOSS_SLACK_RATIO: Final = 0.10
"""Part of the expected cache that may be lost without a reaction: ends of blocks, and programs that were edited."""

EXCEEDED_SLACK_RATIO: Final = 0.5
"""The same where claims may exceed the memory: the engine gives parts of it up."""

STEP_DOWN_RATIO: Final = 0.5
"""Part of the loss that is taken from the capacity at once."""

LARGEST_STEP_RATIO: Final = 0.25
"""The largest single step down of the capacity."""

STEP_UP_RATIO: Final = 0.004
"""The first step up, when others wait and nothing is lost; each further step is twice as large."""

LARGEST_STEP_UP_RATIO: Final = 0.05
"""The largest single step up."""

CEILING_RATIO: Final = 0.95
"""Beyond this ratio of the capacity at which much was last lost, steps up are small."""

NEAR_CEILING_STEP_RATIO: Final = 0.0005

BLOCK_TOKENS: Final = 64
"""An engine caches whole blocks: a turn may miss this much of a block without a loss."""

WINDOW_S: Final = 5.0
"""Least time between two steps."""

WINDOW_TURNS_COUNT: Final = 20
"""Least number of turns with data between two steps: a single turn's loss says little."""

WINDOW_TURNS_RATIO: Final = 2.0
"""And this many for each active program: before, most have not noticed the last step."""

LOSS_FREE_RATIO: Final = 0.005
"""A loss below this ratio lets more be tried."""

BEYOND_SLACK_RATIO: Final = 0.02
"""Beyond the reported capacity a possible loss above this ratio is taken back, if only counters tell."""

LONGEST_WINDOW_RATIO: Final = 4.0
"""A window of counters that shows nothing lasts at most for this many times the turns that it needs."""

IDLE_SLACK_RATIO: Final = 0.02
"""Ratio of time for which an engine may be idle while turns wait: all its programs may be at their tools."""

IDLE_STEP_RATIO: Final = 2.0
"""Ratio of the idle time beyond the slack that comes back at once, but no more than goes down at once."""


class _SeenTurn(NamedTuple):
    """A turn that an engine has begun; `other_tokens` may be cached though its program had kept nothing."""

    seen_s: float
    granted_s: float
    expected_tokens: int
    other_tokens: int


MOST_SEEN_COUNT: Final = 10_000
"""If an engine's counters stay away for long, its oldest turns are forgotten."""


class _Window:
    """Counters between two readings, for an engine that does not report cached tokens per turn."""

    __slots__ = ("_from_s", "_read_s", "_seen", "expected_tokens", "hit_tokens", "other_tokens", "turn_count")

    def __init__(self) -> None:
        self._seen: deque[_SeenTurn] = deque(maxlen=MOST_SEEN_COUNT)
        self._read_s = -inf
        self._from_s = inf
        """When the first reading arrived; nothing counts before."""
        self.turn_count = self.expected_tokens = self.hit_tokens = self.other_tokens = 0

    def begin(self) -> None:
        """Start a new window at the last reading."""
        self._from_s = self._read_s
        self.turn_count = self.expected_tokens = self.hit_tokens = self.other_tokens = 0

    def add(self, turn: _SeenTurn) -> None:
        if self._read_s > -inf:  # what came before the first reading does not count
            self._seen.append(turn)

    def read(self, hit_tokens: int | None, asked_s: float, now_s: float) -> None:
        """Add a reading; None means that the engine's count restarted."""
        first = hit_tokens is None or self._read_s == -inf
        self._read_s = now_s
        if first:
            self._seen.clear()
            self.begin()
            return
        self.hit_tokens += hit_tokens or 0
        while self._seen and self._seen[0].seen_s <= asked_s:
            turn = self._seen.popleft()
            if turn.granted_s > self._from_s:
                self.turn_count += 1
                self.expected_tokens += turn.expected_tokens
                self.other_tokens += turn.other_tokens
            else:
                self.other_tokens += turn.expected_tokens + turn.other_tokens

    def clear(self) -> None:
        self._seen.clear()
        self.begin()

    @property
    def lost_tokens(self) -> int:
        """Return the certain loss."""
        return max(0, self.expected_tokens - self.hit_tokens - BLOCK_TOKENS * self.turn_count)

    @property
    def lost_at_most_tokens(self) -> int:
        """Return the possible loss: others may have found some of what was found."""
        hit_tokens = self.hit_tokens - self.other_tokens
        return max(0, self.expected_tokens - hit_tokens - BLOCK_TOKENS * self.turn_count)


class CapacityCorrection:
    """The claimable part of one replica's reported capacity."""

    __slots__ = (
        "_ceiling_ratio",
        "_down_s",
        "_expected_tokens",
        "_idle_s",
        "_idle_since_s",
        "_lost_tokens",
        "_step_s",
        "_turn_count",
        "_up_ratio",
        "_window",
        "computed_tokens",
        "ratio",
        "tells_cached",
    )

    def __init__(self, now_s: float) -> None:
        """Start by believing the report."""
        self.ratio = 1.0
        self.computed_tokens = 0
        """Tokens put into its memory so far: until it was full once, the absence of losses says nothing."""
        self._step_s = self._idle_since_s = now_s
        self._idle_s = 0.0
        self._down_s = -inf
        self.tells_cached = False
        """Whether each turn's usage tells what was lost; otherwise the engine's counters do."""
        self._turn_count = 0
        self._ceiling_ratio = HIGHEST_RATIO
        self._up_ratio = STEP_UP_RATIO
        self._expected_tokens = 0.0
        self._lost_tokens = 0.0
        self._window = _Window()

    def export(self, replica_id: str) -> CapacityRecord | None:
        """Return what was learned of a replica, if anything; whether its memory was full once is not stored."""
        if self.ratio == 1.0 and self._ceiling_ratio == HIGHEST_RATIO:
            return None
        return CapacityRecord(replica_id, self.ratio, self._ceiling_ratio)

    def adopt(self, record: CapacityRecord) -> None:
        """Adopt what another process learned. Raises ValueError for an impossible ratio."""
        if not (LOWEST_RATIO <= record.ratio <= HIGHEST_RATIO and 0 < record.ceiling_ratio <= HIGHEST_RATIO):
            raise ValueError(f"no ratios: {record.ratio}, {record.ceiling_ratio}")
        self.ratio, self._ceiling_ratio = record.ratio, record.ceiling_ratio

    def computed(self, tokens: int) -> None:
        """Note that these tokens were put into its memory."""
        self.computed_tokens += tokens

    def turn_seen(
        self, expected_tokens: int, other_tokens: int, *, granted_s: float, kept_since_s: float, now_s: float
    ) -> None:
        """Note that the engine has begun a turn: its first token arrived, or all of it. Only where counters tell.

        `expected_tokens` should be cached, because the program has kept its claim since `kept_since_s`; `other_tokens`
        may be. What may have been lost before the last step down is not expected again.
        """
        if kept_since_s < self._down_s:
            expected_tokens, other_tokens = 0, expected_tokens + other_tokens
        self._window.add(_SeenTurn(now_s, granted_s, expected_tokens, other_tokens))

    def turn_ended(self, ended: TurnEnded) -> None:
        """Note what the engine said was cached of a turn, and what was computed.

        Whatever its program had kept since its branch's last turn should be cached. What may have been lost before the
        last step down is not counted again.
        """
        if not self.tells_cached:
            self.tells_cached = True
            self._window.clear()
        turn, prompt_tokens, cached_tokens = ended.turn, ended.prompt_tokens, ended.cached_tokens or 0
        self.computed_tokens += prompt_tokens - cached_tokens + ended.output_tokens
        expected_tokens = turn.kept_tokens if turn.kept_tokens < prompt_tokens else prompt_tokens
        if not expected_tokens or turn.kept_since_s < self._down_s:
            return
        self._turn_count += 1
        self._expected_tokens += expected_tokens
        self._lost_tokens += max(0, expected_tokens - cached_tokens - BLOCK_TOKENS)

    def polled(self, hit_tokens: int | None, *, asked_s: float, now_s: float) -> None:
        """Note how many prompt tokens were cached since the previous poll; None if the engine's count restarted.

        The engine was asked at `asked_s`.
        """
        if not self.tells_cached:
            self._window.read(hit_tokens, asked_s, now_s)

    def follow_counters(self) -> None:
        """Believe the pool's counters: what turns call cached may have come from a tier behind the pool."""
        self.tells_cached = False
        self._window.clear()

    def preempted(self, tokens: int) -> None:
        """Note that running requests lost these tokens."""
        self._expected_tokens += tokens
        self._lost_tokens += tokens

    def overcommitted(self, now_s: float) -> None:
        """Note that more is let in than should fit: what is lost until now says nothing of the size."""
        self._down_s = now_s
        self._begin_anew(now_s)

    def step(
        self, now_s: float, *, active_count: int, wanted: bool, idle_s: float = 0.0, may_exceed: bool = False
    ) -> bool:
        """Correct the ratio if it is time; return whether it changed.

        `wanted`: others wait, all claimable memory is claimed, and the memory was full once. `idle_s`: total time in
        which the engine had no turn while programs waited for room. Claims `may_exceed` the memory (`holding.py`).
        """
        before = self.ratio
        if self._undo(now_s, idle_s):
            self._begin_anew(now_s)
            return self.ratio != before
        turns_count = max(WINDOW_TURNS_COUNT, WINDOW_TURNS_RATIO * active_count)
        seen_count = self._turn_count + self._window.turn_count
        if now_s - self._step_s < WINDOW_S or seen_count < turns_count:
            return False
        expected_tokens = self._expected_tokens + self._window.expected_tokens
        lost_ratio = lost_at_most_ratio = 0.0
        if expected_tokens:
            lost_ratio = (self._lost_tokens + self._window.lost_tokens) / expected_tokens
            lost_at_most_ratio = (self._lost_tokens + self._window.lost_at_most_tokens) / expected_tokens
        if lost_ratio > (EXCEEDED_SLACK_RATIO if may_exceed else LOSS_SLACK_RATIO):
            self._step_down(now_s, lost_ratio)
        elif self.ratio > 1.0 and not self.tells_cached and lost_at_most_ratio > BEYOND_SLACK_RATIO:
            self.ratio = self._ceiling_ratio = max(1.0, self.ratio * (1.0 - lost_at_most_ratio))
            self._up_ratio = STEP_UP_RATIO
        elif wanted and expected_tokens and lost_at_most_ratio < LOSS_FREE_RATIO:
            up_ratio = self._up_ratio if self.ratio < self._ceiling_ratio else NEAR_CEILING_STEP_RATIO
            self.ratio = min(HIGHEST_RATIO, self.ratio * (1.0 + up_ratio))
            self._up_ratio = min(LARGEST_STEP_UP_RATIO, 2 * self._up_ratio)
        elif self._window.turn_count and seen_count < LONGEST_WINDOW_RATIO * turns_count:
            return False
        else:
            self._up_ratio = STEP_UP_RATIO
        self._begin_anew(now_s)
        return self.ratio != before

    def _step_down(self, now_s: float, lost_ratio: float) -> None:
        down_ratio = min(LARGEST_STEP_RATIO, STEP_DOWN_RATIO * lost_ratio)
        lowest_ratio = LOWEST_RATIO if self.tells_cached else LOWEST_COUNTED_RATIO
        self._up_ratio = STEP_UP_RATIO
        self._ceiling_ratio = CEILING_RATIO * self.ratio
        self.ratio = max(lowest_ratio, self.ratio * (1.0 - down_ratio))
        self._down_s = now_s

    def _undo(self, now_s: float, idle_s: float) -> bool:
        """Give some of the taken capacity back if the engine is idle while turns wait; return whether it is."""
        elapsed_s = now_s - self._idle_since_s
        if elapsed_s < WINDOW_S:
            return False
        idle_ratio = (idle_s - self._idle_s) / elapsed_s
        self._idle_s, self._idle_since_s = idle_s, now_s
        if self.ratio >= 1.0 or idle_ratio <= IDLE_SLACK_RATIO:
            return False
        up_ratio = min(LARGEST_STEP_RATIO, IDLE_STEP_RATIO * (idle_ratio - IDLE_SLACK_RATIO))
        self.ratio = min(1.0, self.ratio * (1.0 + up_ratio))
        return True

    def _begin_anew(self, now_s: float) -> None:
        self._step_s = now_s
        self._turn_count = 0
        self._expected_tokens = self._lost_tokens = 0.0
        self._window.begin()
