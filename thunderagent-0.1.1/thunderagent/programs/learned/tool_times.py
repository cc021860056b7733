"""How long each tool runs, as learned, and how long holding a program's memory pays meanwhile.

Theory of operation
===================
When a turn ends nobody knows how long the tool will run; but tools of one name are alike. For each name, and for all
together, a life table on a logarithmic scale counts how many programs were *at risk* of coming back in each interval
and how many *returned* in it. (Kaplan and Meier: a program that is paused, or ends, before it returns was at risk until
then, and says nothing of later.) A rarely seen name is drawn towards all tools together, and these towards a
heavy-tailed guess.

Holding c tokens for t seconds costs c·t of memory. Pausing costs their recomputation, which is worth a threshold of T
seconds of holding. T is the same for every size, because recomputation is linear in tokens, too. Holding until time u,
or until an earlier return, costs E[min(return, u)] and saves T·P(return <= u). The best u gives the *return rate*

    G(t) = max over u of P(t < return <= u) / E[min(return, u) - t],

given that the tool has run for t seconds already: the Gittins index of the tool. Holding pays as long as G(t)·T > 1.
For tools whose hazard falls with time, as most do, G is the hazard itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Final

from thunderagent.programs.learned.histogram import check_counts, check_range, geometric_edges
from thunderagent.programs.learned.holding import Returns
from thunderagent.programs.messages import ToolRecord

EDGES_S: Final = geometric_edges(0.05, 2**0.5, 34)
"""Ends of the intervals: 50 ms to 77 min."""

_STARTS_S: Final = (0.0, *EDGES_S)
NOBODY_AWAY: Final[Sequence[float]] = (0.0,) * len(_STARTS_S)

_LENGTHS_S: Final = (*(end - start for start, end in zip(_STARTS_S, EDGES_S, strict=False)), EDGES_S[-1])

RETURN_RATIO: Final = 0.22
"""First guess of the ratio of those still away that return in an interval: 0.22 is a Pareto tail with exponent 0.7."""

GUESS_WEIGHT: Final = 2.0
"""Weight of the first guess, in programs at risk."""

ALL_TOOLS_WEIGHT: Final = 8.0
"""Weight of all tools together against one name, in programs at risk."""

REMEMBERED_COUNT: Final = 1000.0
"""Returns that count per tool; above it, what was seen before is halved."""

NAMES_COUNT: Final = 256
"""Names that are remembered; beyond, the name longest unseen is forgotten."""

SEEN_COUNT: Final = 10.0
"""Returns of a tool that must be seen before their lateness is believed."""

REFRESH_AFTER_COUNT: Final = 16
"""Rates are recomputed after this many new observations: sooner while there are few (after each further quarter), later
while there are many (after each further eighth)."""


class _LifeTable:
    """How many left in each interval: by returning, or otherwise (`away`)."""

    __slots__ = ("away", "count", "lowest", "rates", "refresh_at_count", "returned")

    def __init__(self) -> None:
        self.returned = [0.0] * len(_STARTS_S)
        self.away = [0.0] * len(_STARTS_S)
        self.count = 0.0
        self.refresh_at_count = 0.0
        self.rates: list[float] = []
        self.lowest: list[float] = []
        """For each interval, the lowest rate up to there, negated so that the list ascends."""

    def halve(self) -> None:
        """Let what was seen before count half."""
        self.returned = [count / 2 for count in self.returned]
        self.away = [count / 2 for count in self.away]
        self.count /= 2
        self.refresh_at_count = 0.0

    def add_away(self, counts: Sequence[int]) -> None:
        """Count those that left otherwise, by interval: the same as one after another."""
        for interval_id, of_interval in enumerate(counts):
            left_count = of_interval
            while left_count:
                some_count = min(left_count, int(REMEMBERED_COUNT - self.count) + 1)
                self.away[interval_id] += some_count
                self.count += some_count
                left_count -= some_count
                if self.count > REMEMBERED_COUNT:
                    self.halve()

    def export(self, name: str) -> ToolRecord:
        """Return its content, and the rates in use until the next refresh."""
        rates = tuple(self.rates)
        return ToolRecord(name, tuple(self.returned), tuple(self.away), self.count, rates, self.refresh_at_count)

    def adopt(self, record: ToolRecord) -> None:
        """Adopt another's content. Raises ValueError if it has other intervals or impossible values."""
        if {len(record.returned), len(record.away)} != {len(_STARTS_S)} or len(record.rates) not in (0, len(_STARTS_S)):
            raise ValueError(f"not {len(_STARTS_S)} intervals")
        check_counts(record.returned, len(_STARTS_S))
        for each in record.away:  # a program that came back later may leave a negative count
            check_range("away", each, (-REMEMBERED_COUNT, inf))
        for each in record.rates:
            check_range("rate", each, (0.0, inf))
        check_range("count", record.count, (0.0, REMEMBERED_COUNT))
        check_range("refreshed at", record.refresh_at_count, (0.0, record.count + _pause_count(record.count)))
        self.returned, self.away, self.count = list(record.returned), list(record.away), record.count
        self.refresh_at_count = record.refresh_at_count
        self.set_rates(list(record.rates))

    def set_rates(self, rates: list[float]) -> None:
        """Set the return rate of each interval."""
        self.rates = rates
        self.lowest = [-rate_per_s for rate_per_s in accumulate(rates, min)]

    def return_ratios(
        self, guess: list[float], guess_count: float, more_away: Sequence[float] = NOBODY_AWAY
    ) -> list[float]:
        """Return, for each interval, the ratio of those away at its start that return in it.

        `more_away` are in no count yet, by the interval in which they are.
        """
        at_risk = 0.0
        ratios = []
        for index in range(len(_STARTS_S) - 1, -1, -1):
            returned, away = self.returned[index], self.away[index] + more_away[index]
            if away < 0:
                away = 0.0
            # A program that left in the interval without returning was at risk for half of it on average.
            exposed = at_risk + returned + away / 2
            ratios.append((returned + guess_count * guess[index]) / (exposed + guess_count))
            at_risk += returned + away
        ratios.reverse()
        return ratios


class ToolTimes:
    """Life tables of tools by name, and of all together. The empty name (`""`) is a name like others."""

    __slots__ = ("_all", "_by_name", "_guess")

    def __init__(self) -> None:
        """Start with the first guess only."""
        self._guess = [RETURN_RATIO] * len(_STARTS_S)
        self._all = _LifeTable()
        self._by_name: OrderedDict[str, _LifeTable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_name)

    def export(self) -> tuple[ToolRecord, tuple[ToolRecord, ...]]:
        """Return what is known of all tools together, and of each."""
        return self._all.export(""), tuple(table.export(name) for name, table in self._by_name.items())

    def adopt(self, all_tools: ToolRecord, tools: Sequence[ToolRecord]) -> None:
        """Adopt what another process learned. Raises ValueError if it has other intervals."""
        self._all.adopt(all_tools)
        self._by_name.clear()
        for record in tools:
            self._table(record.name).adopt(record)

    def returned(self, name: str, away_s: float) -> None:
        """Learn that a program came back this long after its tool began."""
        interval_id = bisect_right(EDGES_S, away_s)
        for table in (self._all, self._table(name)):
            table.returned[interval_id] += 1.0
            table.count += 1.0
            if table.count > REMEMBERED_COUNT:
                table.halve()

    def censored(self, name: str, away_s: float) -> None:
        """Learn that a program was not back after this time, when its memory was given away or it ended."""
        interval_id = bisect_right(EDGES_S, away_s)
        for table in (self._all, self._table(name)):
            table.away[interval_id] += 1.0
            table.count += 1.0
            if table.count > REMEMBERED_COUNT:
                table.halve()

    def all_censored(self, name: str, away_s: Sequence[float]) -> None:
        """Learn the same of many programs."""
        ordered = sorted(away_s)
        below = [0, *[bisect_left(ordered, edge_s) for edge_s in EDGES_S], len(ordered)]
        counts = [upto - before for before, upto in pairwise(below)]
        self._all.add_away(counts)
        self._table(name).add_away(counts)

    def came_back_late(self, name: str, censored_after_s: float, away_s: float) -> None:
        """Learn that a paused program came back after all: `censored` was not the end of it."""
        censored_id, interval_id = bisect_right(EDGES_S, censored_after_s), bisect_right(EDGES_S, away_s)
        for table in (self._all, self._table(name)):  # the totals stay the same
            if table.away[censored_id] >= 1.0 - REMEMBERED_COUNT:  # else more come back than are remembered
                table.away[censored_id] -= 1.0
                table.returned[interval_id] += 1.0

    def hold_s(self, name: str, threshold_s: float) -> float:
        """Return how long from a tool's begin holding pays: until G·threshold falls to 1.

        `inf` if it never does. Cost: O(log intervals); sometimes O(intervals) to compute the rates.
        """
        needed_per_s = 1.0 / threshold_s if threshold_s > 0 else inf
        table = self._by_name.get(name, self._all)
        if table.count >= table.refresh_at_count or not table.rates:
            self._refresh(table)
        first_below = bisect_right(table.lowest, -needed_per_s)
        return _STARTS_S[first_below] if first_below < len(_STARTS_S) else inf

    def returns(self, away_s: Sequence[float] = (), censored_s: Sequence[float] = ()) -> Returns:
        """Return when programs came back from tools of all names together.

        Some are away for `away_s`; some of these were counted as away for `censored_s` when they lost their claims.
        Cost: O(intervals + away).
        """
        more_away = list(NOBODY_AWAY)
        for each_s in away_s:
            more_away[bisect_right(EDGES_S, each_s)] += 1.0
        for each_s in censored_s:
            more_away[bisect_right(EDGES_S, each_s)] -= 1.0
        ratios = self._all.return_ratios(self._guess, GUESS_WEIGHT, more_away)
        return Returns(_LENGTHS_S, ratios, _return_rates(ratios), sum(self._all.returned))

    def return_rate_per_s(self, name: str, elapsed_s: float) -> float:
        """Return G for a tool that has run for `elapsed_s`."""
        table = self._by_name.get(name, self._all)
        if table.count >= table.refresh_at_count or not table.rates:
            self._refresh(table)
        return table.rates[bisect_right(EDGES_S, elapsed_s)]

    def returned_within_s(self, name: str, ratio: float) -> float:
        """Return the time within which `ratio` of a tool's returns came; 0 if fewer than `SEEN_COUNT` were seen.

        Programs that never came back do not count. Cost: O(intervals).
        """
        table = self._by_name.get(name)
        returned = list(accumulate(table.returned)) if table is not None else [0.0]
        if returned[-1] < SEEN_COUNT:
            return 0.0
        index = next(index for index, count in enumerate(returned) if count >= ratio * returned[-1])
        return EDGES_S[min(index, len(EDGES_S) - 1)]

    def shortest_s(self, ratio: float) -> float:
        """Return a time before which at most `ratio` of all returns came; 0 if fewer than `SEEN_COUNT` were seen.

        Cost: O(intervals).
        """
        returned = list(accumulate(self._all.returned))
        return _STARTS_S[bisect_right(returned, ratio * returned[-1])] if returned[-1] >= SEEN_COUNT else 0.0

    def _table(self, name: str) -> _LifeTable:
        table = self._by_name.get(name)
        if table is None:
            table = self._by_name[name] = _LifeTable()
            if len(self._by_name) > NAMES_COUNT:
                self._by_name.popitem(last=False)
        else:
            self._by_name.move_to_end(name)
        return table

    def _refresh(self, table: _LifeTable) -> None:
        """Compute the rates of a tool, or of all tools, anew."""
        ratios = self._all.return_ratios(self._guess, GUESS_WEIGHT)
        if table is not self._all:
            ratios = table.return_ratios(ratios, ALL_TOOLS_WEIGHT)
        table.set_rates(_return_rates(ratios))
        table.refresh_at_count = table.count + _pause_count(table.count)


def _pause_count(count: float) -> float:
    """Return after how many more observations rates are recomputed."""
    return min(1 + count / 4, max(REFRESH_AFTER_COUNT, count / 8))


def _return_rates(ratios: list[float]) -> list[float]:
    """Return G at the start of each interval, assuming even returns within it. Cost: O(intervals).

    Works from the last interval to the first: a holder that goes through one interval also goes through the following
    ones if their rate is higher. So an interval joins the stretches after it as long as the next one has a higher rate.
    """
    rates: list[float] = []
    ahead: list[tuple[float, float, float]] = []  # stretches, nearest last: rate, mean time away, part still away
    for ratio, length_s in zip(reversed(ratios), reversed(_LENGTHS_S), strict=True):
        away_s = length_s * (1 - ratio / 2)
        still_away = 1 - ratio
        rate_per_s = (1 - still_away) / away_s
        while ahead and ahead[-1][0] > rate_per_s:
            _, next_away_s, next_still_away = ahead.pop()
            away_s += still_away * next_away_s
            still_away *= next_still_away
            rate_per_s = (1 - still_away) / away_s
        ahead.append((rate_per_s, away_s, still_away))
        rates.append(rate_per_s)
    rates.reverse()
    return rates
