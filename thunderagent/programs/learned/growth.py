"""What the scheduler learns of running programs: growth and residence."""

from __future__ import annotations

from math import inf
from typing import Final

from thunderagent.programs.learned.histogram import MOST_TOKENS, LogHistogram, check_range, geometric_edges
from thunderagent.programs.model.records.learned import GrowthRecord, HistogramRecord
from thunderagent.programs.model.turn import TurnEnded

TOKEN_EDGES: Final = geometric_edges(8.0, 2**0.5, 36)
"""8 tokens to 1.5 million."""

RESIDENCE_EDGES_S: Final = geometric_edges(0.5, 2**0.5, 38)
"""Half a second to two days."""

TOKEN_S_EDGES: Final = geometric_edges(1e-7, 2**0.25, 110)
"""A tenth of a microsecond to 20 seconds."""

MANY_TOKENS: Final = 512
"""This many prompt tokens take much longer than the overhead of an iteration."""

FEW_TOKENS: Final = 128
"""This many take almost no time beside a generated answer."""

ENOUGH_TURNS_COUNT: Final = 8
ENOUGH_PROGRAMS_COUNT: Final = 5
"""Number of programs to see before what they tell of growth is believed."""

FORGETTING_RATIO: Final = 0.999
"""Weight of a turn relative to that of the next one."""


class Growth:
    """How many tokens a turn adds to its program's context, and how many of them it generates."""

    __slots__ = (
        "_cycle_s",
        "_grown_tokens",
        "_growths",
        "_outputs",
        "_program_count",
        "_turn_count",
        "_whole_tokens",
        "tokens_per_s",
        "whole_tokens",
    )

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._growths = LogHistogram(TOKEN_EDGES)
        self._outputs = LogHistogram(TOKEN_EDGES)
        self._program_count = 0
        self._turn_count = self._whole_tokens = 0.0
        self._grown_tokens = self._cycle_s = 0.0
        self.tokens_per_s = inf
        """How fast a program grows while it is not paused; infinite until some turns were seen."""
        self.whole_tokens = inf
        """By how much a program exceeds its first prompt, mean over its turns; infinite until some ended."""

    def turn_ended(self, ended: TurnEnded) -> None:
        """Learn what a turn added to its program, and in what time, with the tool before it."""
        program, grown_tokens = ended.turn.program, ended.grown_tokens
        cycle_s = ended.duration_s + (program.away_s if program is not None else 0.0)
        if grown_tokens is not None and grown_tokens > 0:
            self._growths.add(grown_tokens)
            self._grown_tokens = self._grown_tokens * FORGETTING_RATIO + grown_tokens
            self._cycle_s = self._cycle_s * FORGETTING_RATIO + cycle_s
            self._say_speed()
        self._outputs.add(ended.output_tokens)

    def program_ended(self, larger_tokens: int, turn_count: int) -> None:
        """Learn from an ended program: by how much it exceeded its first prompt, summed over its turns."""
        self._program_count += 1
        self._turn_count = self._turn_count * FORGETTING_RATIO**turn_count + turn_count
        self._whole_tokens = self._whole_tokens * FORGETTING_RATIO**turn_count + larger_tokens
        self._say_size()

    def _say_speed(self) -> None:
        if self._growths.total >= ENOUGH_TURNS_COUNT and self._cycle_s > 0:
            self.tokens_per_s = self._grown_tokens / self._cycle_s

    def _say_size(self) -> None:
        if self._program_count >= ENOUGH_PROGRAMS_COUNT and self._turn_count:
            self.whole_tokens = self._whole_tokens / self._turn_count

    @property
    def is_empty(self) -> bool:
        """Whether no turn was seen."""
        return not self._outputs.total

    def export(self) -> GrowthRecord:
        """Return its content."""
        return GrowthRecord(
            self._growths.export(),
            self._outputs.export(),
            self._program_count,
            self._turn_count,
            self._whole_tokens,
            self._grown_tokens,
            self._cycle_s,
        )

    def adopt(self, record: GrowthRecord) -> None:
        """Adopt another's content. Raises ValueError if it has other edges or impossible values."""
        check_range("programs", record.program_count, (0, inf))
        check_range("turns", record.turn_count, (0.0, inf))
        check_range("whole tokens", record.whole_tokens, (0.0, record.turn_count * MOST_TOKENS))
        check_range("grown tokens", record.grown_tokens, (0.0, inf))
        check_range("cycles", record.cycle_s, (0.0, inf))
        self._growths.adopt(record.growths)
        self._outputs.adopt(record.outputs)
        self._program_count, self._turn_count = record.program_count, record.turn_count
        self._whole_tokens = record.whole_tokens
        self._grown_tokens, self._cycle_s = record.grown_tokens, record.cycle_s
        self._say_speed()
        self._say_size()

    def turn_tokens(self, ratio: float, default_tokens: int) -> int:
        """Return what a turn adds at most in `ratio` of all cases, prompt and answer."""
        return int(self._growths.quantile(ratio, default_tokens))

    def output_tokens(self, ratio: float, default_tokens: int) -> int:
        """Return how many tokens a turn generates at most in `ratio` of all cases."""
        return int(self._outputs.quantile(ratio, default_tokens))


class Residences:
    """Time that programs stay: from the first turn to the end of the last one.

    The time of the release, or of being forgotten without one, does not tell how long a program took.
    """

    __slots__ = ("_seen_s", "median_s")

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._seen_s = LogHistogram(RESIDENCE_EDGES_S)
        self.median_s = inf
        """Infinite until a program ended."""

    def add(self, residence_s: float) -> None:
        """Add an ended program."""
        self._seen_s.add(residence_s)
        self.median_s = self._seen_s.quantile(0.5, inf)

    def export(self) -> HistogramRecord:
        """Return its content."""
        return self._seen_s.export()

    def adopt(self, record: HistogramRecord) -> None:
        """Adopt another's content. Raises ValueError if it has other edges or impossible values."""
        self._seen_s.adopt(record)
        self.median_s = self._seen_s.quantile(0.5, inf)
