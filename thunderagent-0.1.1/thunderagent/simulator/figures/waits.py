"""How long programs waited, and whether the large ones waited longer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import StatisticsError, correlation
from typing import Self


@dataclass(slots=True)
class ProgramWait:
    """One program's waits for its leases, from its first turn's arrival to its end.

    `held_s` is the sum over its turns and `longest_hold_s` that of one turn; waits inside an engine count in neither.
    `alone_s` is its least time, on an idle engine, including its tools. `outcome` is that of its plan. `verdicts` are a
    judge's: after how many of its turns, and whether failure was predicted. `serial_id` is its number in its workload.
    """

    first_prompt_tokens: int = 0
    largest_prompt_tokens: int = 0
    held_s: float = 0.0
    longest_hold_s: float = 0.0
    alone_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""
    verdicts: list[tuple[int, bool]] = field(default_factory=list)
    serial_id: int = 0

    @property
    def residence_s(self) -> float:
        """Return the time from its first turn's arrival to its end."""
        return self.ended_s - self.started_s

    def add_turn(self, prompt_tokens: int, held_s: float) -> None:
        """Add a finished turn."""
        self.first_prompt_tokens = self.first_prompt_tokens or prompt_tokens
        self.largest_prompt_tokens = max(self.largest_prompt_tokens, prompt_tokens)
        self.held_s += held_s
        self.longest_hold_s = max(self.longest_hold_s, held_s)


@dataclass(frozen=True, slots=True)
class Waits:
    """The waits of all ended programs, and how size and wait correlate.

    Size is a program's first prompt, which does not depend on its number of turns; wait is `held_s`. `pearson` is the
    correlation of the values, `spearman` that of their ranks; None if all sizes or all waits are the same.
    """

    programs: tuple[ProgramWait, ...]
    pearson: float | None
    spearman: float | None

    @classmethod
    def of(cls, programs: Sequence[ProgramWait]) -> Self:
        """Return the waits of these programs."""
        sizes_tokens = [program.first_prompt_tokens for program in programs]
        waits_s = [program.held_s for program in programs]
        return cls(
            programs=tuple(programs),
            pearson=_correlation(sizes_tokens, waits_s),
            spearman=_correlation(_ranks(sizes_tokens), _ranks(waits_s)),
        )


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    try:
        return correlation(x, y)
    except StatisticsError:  # fewer than two values, or all the same
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order; equal ones share the mean of their places."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]
