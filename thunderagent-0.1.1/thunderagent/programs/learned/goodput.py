"""Goodput: turns and programs that took at most a few times their time alone (MARS, arXiv 2604.26963).

A turn's ideal time assumes an idle engine with all of its program's history cached: the time to prefill the new part of
the prompt, and to generate the answer, each at the speed seen where turns waited least for others. A program's ideal
time is that of its turns, and of its tools as long as they took. A program ends with its last turn; turns that ran side
by side count one after the other. A server can only learn these speeds, and on an engine that is never idle it learns
them too slow: goodput then looks better than it is, but for all policies alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from thunderagent.programs.learned.histogram import TOKEN_S_EDGES, LogHistogram, check_range
from thunderagent.programs.messages import HistogramRecord, PriceRecord
from thunderagent.programs.state.program import TurnEnded

ALPHA_RATIOS: Final[tuple[float, ...]] = (1.0, 2.0, 3.0)
"""How many times its ideal time a turn or program may take and still be in time."""

IDLE_RATIO: Final = 0.1
"""Ratio of turns that shared their engine with fewest others."""

REFRESH_COUNT: Final = 16
"""The speed is looked up again after this many turns: the lookup costs more than all the rest."""

ENOUGH_TOKENS: Final = 8
"""Shorter answers say little of how fast tokens are generated."""


class Goodput:
    """How many turns and programs were in time, and how many were judged."""

    __slots__ = ("_decode_s", "_decode_token_s", "_since_refresh", "program_count", "programs", "turn_count", "turns")

    def __init__(self) -> None:
        """Start with nothing seen: no turn is judged before the speed of an answer was seen."""
        self._decode_s = LogHistogram(TOKEN_S_EDGES)
        self._decode_token_s = 0.0
        self._since_refresh = 0
        self.turn_count = self.program_count = 0
        """Number of judged turns and programs."""
        self.turns = dict.fromkeys(ALPHA_RATIOS, 0)
        """Judged turns that were in time, by allowed multiple of the ideal time."""
        self.programs = dict.fromkeys(ALPHA_RATIOS, 0)

    @property
    def decode_token_s(self) -> float:
        """Learned seconds to generate a token on an almost idle engine; 0 before the first answer."""
        return self._decode_token_s

    def turn_ended(self, ended: TurnEnded, prefill_token_s: float) -> float:
        """Learn how long an answer takes, judge by how long the client waited in all, and return the ideal time."""
        output_tokens = ended.output_tokens
        if output_tokens >= ENOUGH_TOKENS:
            generating_s = ended.duration_s - (ended.first_token_s or 0.0)
            self._decode_s.add(max(0.0, generating_s) / output_tokens)
            self._since_refresh += 1
            if self._since_refresh >= REFRESH_COUNT or not self._decode_token_s:
                self._decode_token_s = self._decode_s.quantile(IDLE_RATIO, 0.0)
                self._since_refresh = 0
        new_tokens = ended.prompt_tokens - ended.known_tokens  # no engine can have these cached
        if new_tokens > ended.uncached_tokens:
            new_tokens = ended.uncached_tokens
        ideal_s = new_tokens * prefill_token_s + output_tokens * self._decode_token_s
        if self._decode_token_s:
            self.turn_count += 1
            took_s = ended.now_s - ended.turn.waiting_since_s
            for alpha_ratio in ALPHA_RATIOS:
                if took_s <= alpha_ratio * ideal_s:
                    self.turns[alpha_ratio] += 1
        return ideal_s

    def export(self) -> tuple[HistogramRecord, float, int]:
        """Return the times of a token, that on an almost idle engine, and how many turns ago it was looked up."""
        return self._decode_s.export(), self._decode_token_s, self._since_refresh

    def adopt(self, record: PriceRecord) -> None:
        """Adopt the speed that another process learned; the counts stay its own. Raises ValueError."""
        check_range("decode", record.decode_token_s, (0.0, TOKEN_S_EDGES[-1]))
        check_range("turns since", record.decode_refreshed_count, (0, REFRESH_COUNT))
        self._decode_s.adopt(record.decode)
        self._decode_token_s, self._since_refresh = record.decode_token_s, record.decode_refreshed_count

    def program_ended(self, took_s: float, ideal_s: float) -> None:
        """Judge a program by the time from its first turn's arrival to the end of its last."""
        if ideal_s > 0:
            self.program_count += 1
            for alpha_ratio in ALPHA_RATIOS:
                if took_s <= alpha_ratio * ideal_s:
                    self.programs[alpha_ratio] += 1

    @property
    def words(self) -> str:
        """Return for a report how many of how many were in time, by allowed multiple of the ideal time."""
        alphas = "/".join(f"{alpha_ratio:g}" for alpha_ratio in ALPHA_RATIOS)
        turns, programs = (
            f"{in_time(number / (count or 1) for number in counts.values())} of {count} {kind}"
            for kind, counts, count in (
                ("turns", self.turns, self.turn_count),
                ("programs", self.programs, self.program_count),
            )
        )
        return f"within {alphas} times their ideal time: {turns}, {programs}"


def in_time(ratios: Iterable[float]) -> str:
    """Return the ratios in time, by allowed multiple of the ideal time, as a table cell: `71/93/98 %`."""
    return "/".join(f"{ratio * 100:.0f}" for ratio in ratios) + " %"
