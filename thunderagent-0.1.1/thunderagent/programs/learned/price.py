"""The price of a lost token, measured: how much of a replica's time each computed prompt token takes.

Theory of operation
===================
An engine that batches continuously works in iterations, and one that computes P prompt tokens while R sequences
generate takes about a + b·P + c·R seconds. So whatever it does in whatever order, over any time in which it has work

    time = a · iterations + b · prompt tokens computed + c · output tokens generated

by *all* of its turns. b is the price of a lost token: not how long a prompt takes, but how much longer everything else
there takes for it. The stay of a turn is such a time, from its lease to its end. A turn that streams tells when its
first token came, so its stay is two: until then, with what passes outside of the engine, and from then on,
where each of its tokens is an iteration.

Some engines read the whole context of a sequence for each token, so that many small sequences take as long as few large
ones. Where turns alone fill the memory, sequences that count alike then seem to cost nothing, and the iteration all. So
once enough turns are remembered a second fit is made, in which a generated token counts by the size of its context over
the mean one, and the closer of both counts.

What others computed within a stay follows from when: a prompt just before its first token, an answer evenly from there
on, while no prompt is computed. Where an answer came whole, its first token is estimated from its end by the prices
themselves; a few passes make both agree. How long such a turn waited inside of the engine remains uncertain, so it is
fitted under two assumptions, that it generated as fast as the prices say, or no faster than the quickest turns seen;
where they disagree, the interval covers both. The same is done with what an engine does not say: of a prompt with an
unknown cached part, only what its branch sent for the first time was computed for certain.

Where turns wait inside of an overloaded engine, a stay is mostly what others computed before, and when that was is
uncertain for whole answers. But what all turns *together* computed until the end of each is known up to those in
flight then, which are about as many at any time. So besides, the time in which the engine was busy until each end is
fitted by what was computed and generated until then. Such sums err together for as long as turns overlap, so their
interval follows from the errors' sums over that long (Newey and West); it is narrow where stays tell little, and wide
where the engine waits for programs.

The least squares are robust (Huber), and no price is negative. The interval is that of the residuals, with as many
independent values as turns do not overlap; so it is wide where prompts hardly vary, and its lower end 0 where nothing
is known. Where an engine counts what it computes and its iterations, the times between some polls are rows of the same
kind, with exact values; of both fits the closer one counts. What a turn loaded from a tier behind the pool has a price
of its own, which is left out here. Nothing is computed per turn but one record; the fit runs when enough turns came
since the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import inf, sqrt
from typing import Final

from thunderagent.programs.learned.histogram import check_range
from thunderagent.programs.messages import ReplicaPriceRecord
from thunderagent.programs.state.program import TurnEnded

FIRST_TOKEN_S: Final = 5e-5
"""Seconds to prefill a token until learned: an H100 with a model of some 30 billion active parameters."""

LEAST_TOKEN_S: Final = 1e-8
MOST_TOKEN_S: Final = 20.0

KEPT_COUNT: Final = 256
"""Turns that are remembered of a replica; more if many run at once."""

MOST_KEPT_COUNT: Final = 1024

FIRST_FIT_COUNT: Final = 16
"""Turns before the first fit, and between fits at first; an eighth of those that are remembered, if that is more."""

SUMS_COUNT: Final = 8
"""Turns after a fit at which sums alone are fitted anew; a sixteenth of those that are remembered, if that is more."""

LATER_FIT_COUNT: Final = 64
LATER_FIT_S: Final = 15.0
"""Turns and time between two fits once `KEPT_COUNT` are remembered: a fit takes some 10 ms."""

PREEMPTED_POLLS_COUNT: Final = 5
"""In so many polls after a preemption, what is computed again is not among what the engine counts."""

WINDOW_COUNT: Final = 8
"""Polls are taken together until so many turns ended: a prompt counts when it is done, not as it is computed."""

FIRST_PASSES_COUNT: Final = 4
LATER_PASSES_COUNT: Final = 2
"""How often a fit places what was computed anew: less often if the last fit's prices are at hand."""

OUTSIDE_S: Final = 0.02
"""What usually passes outside of an engine: a turn's network, reading and tokenizing."""

HUBER: Final = 2.0
"""Residuals over this many usual ones count by their size, not by its square."""

SURE_RATIO: Final = 2.0
"""The interval reaches this many standard errors to each side: some 95 %."""

WIDE_RATIO: Final = 1.5
"""An assumption whose residuals are larger than another's by this ratio is not believed alone."""

SIZED_FIT_COUNT: Final = 128
"""Turns from which on what is generated may count by the size of its context: before, contexts hardly differ."""

CLOSE_RATIO: Final = 0.5
"""Sums count if the price that follows from them is known to this part of it."""

LEAST_VARIED_RATIO: Final = 0.05
"""Sums tell nothing where prompts and answers vary against each other by less: turns all alike fit any price."""

MOST_LAGS_COUNT: Final = 64
"""Over how many turns sums err together at most."""

SHORT_TOKENS: Final = 4
"""The time in which an answer of no more tokens was generated says little."""

SIBLING_RATIO: Final = 2.0
"""By how much a replica's price may differ from those of its siblings."""

UNSEEN_REPLICAS_COUNT: Final = 256
"""How many absent replicas keep what was learned of them."""

GUESS: Final = "guess"
TURNS: Final = "turns"
COUNTERS: Final = "engine counters"
SIBLINGS: Final = "siblings"
MEASURED: Final = frozenset((TURNS, COUNTERS))


Done = tuple[float, float, float]
"""Iterations, computed and generated tokens."""

Row = tuple[float, float, float, float, float]
"""What an equation is made of: turns, iterations, computed, generated and loaded tokens."""


class SeenTurn:
    """What a replica's turn did to its engine, as far as it was seen."""

    __slots__ = (
        "computed_tokens",
        "context_tokens",
        "ended_s",
        "first_s",
        "granted_s",
        "is_row",
        "least_tokens",
        "loaded_tokens",
        "output_tokens",
    )

    def __init__(
        self,
        granted_s: float,
        first_s: float | None,
        ended_s: float,
        computed_tokens: int,
        least_tokens: int,
        output_tokens: int,
        *,
        context_tokens: int = 1,
        loaded_tokens: int = 0,
        is_row: bool = True,
    ) -> None:
        """Record a turn that ended; `first_s` is None if its first token was not seen apart from its end.

        `computed_tokens` of its prompt were computed, `least_tokens` for certain, and `loaded_tokens` came from a tier
        behind the replica's pool. While it generated it held `context_tokens` in the mean. If not `is_row`, its own
        time says nothing.
        """
        self.granted_s = granted_s
        self.first_s = -1.0 if first_s is None or not granted_s <= first_s < ended_s else first_s
        """Negative if unknown."""
        self.ended_s = ended_s
        self.computed_tokens = max(1, computed_tokens)
        self.least_tokens = max(1, min(computed_tokens, least_tokens))
        self.output_tokens = max(1, output_tokens)
        self.context_tokens = max(1, context_tokens)
        self.loaded_tokens = loaded_tokens
        self.is_row = is_row


class Price:
    """What one replica's time is spent on."""

    __slots__ = (
        "_bound_token_s",
        "_busy_s",
        "_by_counters",
        "_by_sums",
        "_by_turns",
        "_counted",
        "_ended_count",
        "_fits",
        "_fitted_s",
        "_forgotten_s",
        "_polls",
        "_polls_since_fit",
        "_polls_to_skip",
        "_since_fit",
        "_turns",
        "cautious_token_s",
        "decided_token_s",
        "high_token_s",
        "is_measured",
        "iteration_s",
        "least_token_s",
        "low_token_s",
        "most_token_s",
        "sequence_s",
        "source",
        "token_s",
    )

    def __init__(self) -> None:
        """Start with a guess, which nothing is held for."""
        self.token_s = FIRST_TOKEN_S
        """Seconds for each computed prompt token."""
        self.low_token_s = 0.0
        self.high_token_s = inf
        """Its interval."""
        self.cautious_token_s = 0.0
        """What a decision may count on: the lower end of what turns or counters tell, but at least half of that; 0 if
        unknown. Where an engine is overloaded the interval reaches down to 0 for long. Whoever then holds nothing keeps
        the engine overloaded.
        """
        self.least_token_s = 0.0
        self.most_token_s = inf
        """The interval that turns or counters tell: decisions count on its ends, and not on what sums add."""
        self.decided_token_s = FIRST_TOKEN_S
        """The estimate that turns or counters tell: what decisions count on, where they count on an estimate."""
        self.iteration_s = 0.0
        """Seconds for each iteration, whatever it computes; 0 until known."""
        self.sequence_s = 0.0
        """Seconds more for each sequence of mean size that generates in it."""
        self.source = GUESS
        self.is_measured = False
        """Whether it comes from what was seen on a replica, now or before a restart."""
        self._turns: deque[SeenTurn] = deque()
        self._forgotten_s = -inf
        """Before this, some turns are not known."""
        self._since_fit = 0
        self._fitted_s = -inf
        self._fits: list[Fit] = []
        """The last ones, one for each assumption."""
        self._by_turns: Bounds | None = None
        self._by_sums: Bounds | None = None
        self._bound_token_s = inf
        """What a token cost if nothing but prompts took time: all together, and the quickest turn's."""
        self._polls: deque[list[float]] = deque(maxlen=KEPT_COUNT)
        """What the engine did while some turns ended, and how long it was busy."""
        self._by_counters: Bounds | None = None
        self._polls_since_fit = self._ended_count = 0
        self._counted = [0.0] * 4
        """Since the last of them: iterations, computed and generated tokens, and the time in which it was busy."""
        self._busy_s = -1.0
        self._polls_to_skip = 0

    def fixed_ratio(self, sequences_count: float) -> float:
        """Return what part of an iteration with that many sequences is spent whether they are there or not."""
        whole_s = self.iteration_s + self.sequence_s * sequences_count
        return self.iteration_s / whole_s if whole_s > 0 else 0.0

    @property
    def turn_count(self) -> int:
        """Turns that it comes from, of those that are remembered."""
        return sum([turn.is_row for turn in self._turns])

    def answered_s(self, ended: TurnEnded, others_count: int) -> float:
        """Return the time from a turn's lease to its first token; an estimate if that was not seen."""
        if ended.first_token_s is not None:
            return ended.first_token_s
        token_s = self.iteration_s + self.sequence_s * (1 + others_count)
        return max(0.0, ended.duration_s - token_s * ended.output_tokens)

    def interrupted(self, now_s: float) -> None:
        """Forget the turns: their engine stood still, or what ran there is not known."""
        self._turns.clear()
        self.unknown_work()
        self._forgotten_s = now_s

    def turn_ended(self, turn: SeenTurn, others_count: int) -> bool:
        """Remember a turn, and fit if it is time; `others_count` turns are still in flight there. Cost: O(1), mostly.

        Return whether it was fitted.
        """
        turns = self._turns
        turns.append(turn)
        limit_count = max(KEPT_COUNT, min(4 * others_count, MOST_KEPT_COUNT))
        while len(turns) > limit_count:
            self._forgotten_s = turns.popleft().ended_s
        self._since_fit += 1
        self._ended_count += turn.is_row
        if len(turns) < KEPT_COUNT:
            is_due = self._since_fit >= max(FIRST_FIT_COUNT, len(turns) // 8)
        else:
            is_due = self._since_fit >= LATER_FIT_COUNT and turn.ended_s >= self._fitted_s + LATER_FIT_S
        if is_due:
            self._since_fit, self._fitted_s = 0, turn.ended_s
            self._fit(others_count)
        elif self._fits and len(turns) < KEPT_COUNT and self._since_fit == max(SUMS_COUNT, len(turns) // 16):
            self._sum_up(list(turns))
            self._choose()
        return is_due

    def export(self, replica_id: str) -> ReplicaPriceRecord:
        """Return what decisions count on: they are the same after a restart. Sums are soon fitted anew."""
        return ReplicaPriceRecord(
            replica_id,
            self.decided_token_s,
            self.least_token_s,
            self.most_token_s,
            self.iteration_s,
            self.sequence_s,
            self.source,
        )

    def adopt(self, record: ReplicaPriceRecord) -> None:
        """Adopt what another process learned. Raises ValueError for impossible values."""
        check_range("price", record.token_s, (LEAST_TOKEN_S, MOST_TOKEN_S))
        check_range("low price", record.low_token_s, (0.0, MOST_TOKEN_S))
        check_range("high price", record.high_token_s, (record.token_s, inf))
        check_range("iteration", record.iteration_s, (0.0, inf))
        check_range("sequence", record.sequence_s, (0.0, inf))
        if record.source not in MEASURED:
            raise ValueError(f"no source of a price: {record.source[:32]}")
        self.token_s, self.low_token_s, self.high_token_s = record.token_s, record.low_token_s, record.high_token_s
        self.iteration_s, self.sequence_s, self.source = record.iteration_s, record.sequence_s, record.source
        self.is_measured = True
        self._decide()

    def _fit(self, others_count: int) -> None:
        turns = list(self._turns)
        rows_to = len(turns) - min(others_count, len(turns) // 4)
        chosen = [
            index for index in range(rows_to) if turns[index].is_row and turns[index].granted_s >= self._forgotten_s
        ]
        if len(chosen) < FIRST_FIT_COUNT // 2:
            return
        if _quantile([turns[index].ended_s - turns[index].granted_s for index in chosen], 0.5) <= 0:
            return
        before = {(fit.slow, fit.least, fit.sized): fit for fit in self._fits} if len(turns) >= KEPT_COUNT else {}
        assumptions = [(False, False)]
        if any(turns[index].first_s < 0 for index in chosen):
            assumptions.append((True, False))
        if any(turn.least_tokens < turn.computed_tokens for turn in turns):
            assumptions += [(slow, True) for slow, _ in tuple(assumptions)]
        kinds = (False, True) if len(turns) >= SIZED_FIT_COUNT else (False,)
        by_kind = [
            [
                Fit(turns, chosen, before.get((slow, least, sized)), slow=slow, least=least, sized=sized)
                for slow, least in assumptions
            ]
            for sized in kinds
        ]
        self._fits = [fit for fits in by_kind for fit in fits]
        self._sum_up(turns)
        self._say(min(by_kind, key=_least_error_of))

    def _sum_up(self, turns: list[SeenTurn]) -> None:
        """Fit what all turns together took, if some answers came whole."""
        self._by_sums, self._bound_token_s = None, inf
        if not any(turn.first_s < 0 for turn in turns):
            return
        busy_s = busy_until_ends(turns)
        if busy_s[-1] <= 0:
            return
        alone_s = _quantile([(turn.ended_s - turn.granted_s) / turn.least_tokens for turn in turns], 0.02)
        self._bound_token_s = min(alone_s, busy_s[-1] / sum([turn.least_tokens for turn in turns]))
        self._by_sums = by_sums(turns, busy_s)

    def _say(self, fits: list[Fit]) -> None:
        """Combine what follows from the assumptions."""
        best, first = min(fits, key=_error_of), fits[0]
        token_s = sqrt(first.token_s * best.token_s)
        if first.relative_error <= WIDE_RATIO * best.relative_error:
            best, token_s = first, first.token_s
        low_s = min([each.token_s - SURE_RATIO * each.error_token_s for each in fits])
        high_s = max([each.token_s + SURE_RATIO * each.error_token_s for each in fits])
        self._by_turns = Bounds(token_s, low_s, high_s, best.error_token_s, best.iteration_s, best.sequence_s, TURNS)
        self._choose()

    def work_polled(self, busy_s: float, computed_tokens: int, generated_tokens: int, iteration_count: int) -> bool:
        """Remember what an engine counted since the last poll; by now it was busy for `busy_s` in all.

        Return whether it was fitted.
        """
        since_s, self._busy_s = busy_s - self._busy_s, busy_s
        self._polls_to_skip -= self._polls_to_skip > 0
        if since_s > busy_s or self._polls_to_skip:  # the first poll
            self._ended_count = 0
            return False
        counted = self._counted
        for index, amount in enumerate((iteration_count, computed_tokens, generated_tokens, since_s)):
            counted[index] += amount
        if self._ended_count < WINDOW_COUNT:
            return False
        self._polls.append([float(self._ended_count), *counted])
        self._ended_count, self._counted = 0, [0.0] * len(counted)
        self._polls_since_fit += 1
        if self._polls_since_fit < WINDOW_COUNT:
            return False
        self._polls_since_fit = 0
        rows = [(row[0], row[1], row[2], row[3], 0.0) for row in self._polls]
        found = Solution(rows, [row[4] for row in self._polls], 1.0, columns_count=4, passes_count=4)
        _, iteration_s, token_s, sequence_s = found.prices
        sure_s = SURE_RATIO * found.error_token_s
        self._by_counters = Bounds(
            token_s, token_s - sure_s, token_s + sure_s, found.error_token_s, iteration_s, sequence_s, COUNTERS
        )
        self._choose()
        return True

    def unknown_work(self, polls_count: int = 0) -> None:
        """Note that what the engine did since the last poll is not known, nor until the next ones."""
        self._busy_s, self._ended_count, self._counted = -1.0, 0, [0.0] * 4
        self._polls_to_skip = max(self._polls_to_skip, polls_count)

    def _choose(self) -> None:
        """Say what follows from turns or from counters, whichever is known more closely; sums sharpen it."""
        known = [each for each in (self._by_counters, self._by_turns) if each is not None]
        if not known:
            return
        best = min(known, key=_width_of)
        token_s, self.low_token_s, self.high_token_s = best.token_s, max(0.0, best.low_token_s), best.high_token_s
        for each in known:  # both miss something if they contradict each other
            self._cover(best, each)
        if token_s < best.error_token_s:  # it might as well be 0: nothing is known
            token_s = max(self.low_token_s, min(FIRST_TOKEN_S, self.high_token_s))
        self._set(token_s)
        self.iteration_s, self.sequence_s, self.source = best.iteration_s, best.sequence_s, best.source
        self.is_measured = True
        self._decide()
        if self._bound_token_s < inf:
            self._sharpen(best)

    def _decide(self) -> None:
        """Let decisions count on the present interval."""
        self.least_token_s, self.most_token_s = self.low_token_s, self.high_token_s
        self.cautious_token_s = max(self.low_token_s, self.token_s / 2)
        self.decided_token_s = self.token_s

    def _sharpen(self, best: Bounds) -> None:
        """Say what sums tell, if that is closer; `best` is what turns or counters tell."""
        sums = self._by_sums
        if sums is not None and _width_of(sums) < _width_of(best):
            self.low_token_s, self.high_token_s = sums.low_token_s, sums.high_token_s
            self._cover(sums, best)
            best = sums
        token_s, self.high_token_s = best.token_s, min(self.high_token_s, self._bound_token_s)
        if best.low_token_s <= 0:  # only an upper end is known: what was computed at an unknown time lowers the price
            token_s = max(token_s, min(self._bound_token_s / 2, self.high_token_s))
        self._set(token_s)

    def _cover(self, best: Bounds, other: Bounds) -> None:
        """Have the interval of `best` cover another that contradicts it."""
        if other.low_token_s > best.high_token_s:
            self.high_token_s = other.high_token_s
        elif other.high_token_s < best.low_token_s:
            self.low_token_s = max(0.0, other.low_token_s)

    def _set(self, token_s: float) -> None:
        """Set the estimate, which is within its interval."""
        self.token_s = max(LEAST_TOKEN_S, min(token_s, MOST_TOKEN_S))
        self.low_token_s = min(self.low_token_s, self.token_s)
        self.high_token_s = max(self.high_token_s, self.token_s)


class Bounds:
    """A price with its interval and standard error, and what else an iteration costs."""

    __slots__ = (
        "error_token_s",
        "high_token_s",
        "iteration_s",
        "low_token_s",
        "sequence_s",
        "source",
        "token_s",
    )

    def __init__(
        self,
        token_s: float,
        low_token_s: float,
        high_token_s: float,
        error_token_s: float,
        iteration_s: float,
        sequence_s: float,
        source: str,
    ) -> None:
        """Hold these."""
        self.token_s = token_s
        self.low_token_s, self.high_token_s = low_token_s, high_token_s
        self.error_token_s = error_token_s
        self.iteration_s, self.sequence_s = iteration_s, sequence_s
        self.source = source


class Prices:
    """The prices of all replicas of a pool. One that has shown nothing yet has those of its siblings."""

    __slots__ = ("_by_replica", "_middle", "_others")

    def __init__(self) -> None:
        """Start with a guess."""
        self._by_replica: dict[str, Price] = {}
        """Also of replicas not heard of since theirs was adopted."""
        self._others = Price()
        """Of replicas that have shown nothing."""
        self._middle = self._others
        """That of the usual replica."""

    def of(self, replica_id: str | None) -> Price:
        """Return the price of a replica, or what its siblings let expect of it. None: the usual one."""
        if replica_id is None:
            return self._middle
        price = self._by_replica.get(replica_id)
        return self._others if price is None or not price.is_measured else price

    def turn_count(self, replica_id: str) -> int:
        """Return how many turns of a replica are remembered whose times count."""
        price = self._by_replica.get(replica_id)
        return 0 if price is None else price.turn_count

    @property
    def token_s(self) -> float:
        """Seconds for each computed prompt token on the usual replica."""
        return self._middle.token_s

    @property
    def decided_token_s(self) -> float:
        """The same, without what sums add: what decisions count on."""
        return self._middle.decided_token_s

    def turn_ended(self, replica_id: str, turn: SeenTurn, others_count: int) -> None:
        """Remember a turn of a replica on which `others_count` are still in flight. Cost: O(1), mostly."""
        price = self._by_replica.get(replica_id)
        if price is None:
            price = self._by_replica[replica_id] = Price()
        if price.turn_ended(turn, others_count):
            self._compare()

    def work_polled(
        self,
        replica_id: str,
        busy_s: float,
        computed_tokens: int,
        generated_tokens: int,
        iteration_count: int,
        *,
        is_whole: bool,
    ) -> None:
        """Remember what a replica's engine counted since the last poll, if that `is_whole`. Cost: O(1), mostly.

        By now a turn was in flight there for `busy_s` in all.
        """
        price = self._by_replica.get(replica_id)
        if price is None:  # no turn of ours ended there yet
            return
        if not is_whole:
            price.unknown_work(PREEMPTED_POLLS_COUNT)
        elif price.work_polled(busy_s, computed_tokens, generated_tokens, iteration_count):
            self._compare()

    def interrupted(self, replica_id: str, now_s: float) -> None:
        """Note that what a replica did until now is not known any more."""
        if (price := self._by_replica.get(replica_id)) is not None:
            price.interrupted(now_s)

    def replica_removed(self, replica_id: str) -> None:
        """Forget a replica."""
        self._by_replica.pop(replica_id, None)

    def export(self) -> tuple[ReplicaPriceRecord, ...]:
        """Return what was learned of all."""
        return tuple([each.export(each_id) for each_id, each in self._by_replica.items() if each.is_measured])

    def adopt(self, records: Sequence[ReplicaPriceRecord]) -> None:
        """Adopt what another process learned. Raises ValueError for impossible values."""
        for record in records[-UNSEEN_REPLICAS_COUNT:]:
            price = self._by_replica.get(record.replica_id) or Price()
            price.adopt(record)
            self._by_replica[record.replica_id] = price
        self._compare()

    def _compare(self) -> None:
        """Say what is expected of a replica that has shown nothing: the median of the others, in a wide interval."""
        known = sorted([each for each in self._by_replica.values() if each.is_measured], key=_token_s_of)
        if not known:
            return
        middle, others = known[len(known) // 2], self._others
        self._middle = middle
        others.token_s, others.iteration_s, others.sequence_s = middle.token_s, middle.iteration_s, middle.sequence_s
        others.decided_token_s = middle.decided_token_s
        others.low_token_s = min([each.low_token_s for each in known]) / SIBLING_RATIO
        others.high_token_s = max([each.high_token_s for each in known]) * SIBLING_RATIO
        others.least_token_s = min([each.least_token_s for each in known]) / SIBLING_RATIO
        others.most_token_s = max([each.most_token_s for each in known]) * SIBLING_RATIO
        others.source = SIBLINGS


class Fit:
    """The prices under which the turns of a replica took as long as they did."""

    __slots__ = (
        "_size_ratios",
        "error_token_s",
        "generated_token_s",
        "iteration_s",
        "least",
        "relative_error",
        "sequence_s",
        "sized",
        "slow",
        "token_s",
    )

    def __init__(
        self,
        turns: list[SeenTurn],
        chosen: list[int],
        last: Fit | None,
        *,
        slow: bool = False,
        least: bool = False,
        sized: bool = False,
    ) -> None:
        """Fit the stays of the `chosen` turns among all `turns`, starting from the `last` fit if there is one.

        With `slow`, turns whose first token was not seen generated no faster than the quickest; with `least`, only
        what was computed for certain was; with `sized`, what a turn generated counts by the size of its context.
        """
        self.slow, self.least, self.sized = slow, least, sized
        self.error_token_s = self.relative_error = 0.0
        self.generated_token_s: float = 0.0
        outputs_tokens = sum([turn.output_tokens for turn in turns])
        self._size_ratios = [1.0] * len(turns)
        if sized:
            mean_tokens = sum([turn.context_tokens * turn.output_tokens for turn in turns]) / outputs_tokens
            self._size_ratios = [turn.context_tokens / mean_tokens for turn in turns]
        tokens = [turn.least_tokens if least else turn.computed_tokens for turn in turns]
        speeds_s = [_until(turn) / turn.output_tokens for turn in turns if turn.output_tokens > 1]
        token_s = _quantile([_answered(turn) / each for turn, each in zip(turns, tokens, strict=True)], 0.02)
        quickest_s = _quantile(speeds_s, 0.05)
        generating_s = [turn.output_tokens * quickest_s for turn in turns]
        self.iteration_s, self.token_s, self.sequence_s = quickest_s, token_s, 0.0
        passes_count = FIRST_PASSES_COUNT
        if last is not None and last.token_s > 0:
            passes_count = LATER_PASSES_COUNT
            self.iteration_s, self.token_s, self.sequence_s = last.iteration_s, last.token_s, last.sequence_s
            own_token_s = max(last.generated_token_s, quickest_s if slow else 0.0)
            generating_s = [turn.output_tokens * own_token_s for turn in turns]
        for number in range(passes_count):
            generating_s = self._pass(turns, tokens, chosen, generating_s, last=number == passes_count - 1)
        self.generated_token_s = sum(generating_s) / outputs_tokens

    def _pass(
        self, turns: list[SeenTurn], tokens: list[int], chosen: list[int], generating_s: list[float], *, last: bool
    ) -> list[float]:
        """Place what was computed by the present prices, fit anew, and return how long each turn generated."""
        line = Timeline(turns, tokens, self.token_s, generating_s, self._size_ratios)
        rows: list[Row] = []
        times_s: list[float] = []
        for index in chosen:
            turn, first_s, size_ratio = turns[index], line.firsts_s[index], self._size_ratios[index]
            prompt_tokens, output_tokens = float(tokens[index]), float(turn.output_tokens)
            loaded_tokens = float(turn.loaded_tokens)
            at_begin, at_end = line.at(turn.granted_s), line.at_ends[index]
            if turn.first_s < 0:
                _, computed, generated = since(at_begin, at_end)
                computed, generated = max(prompt_tokens, computed), max(size_ratio * output_tokens, generated)
                rows.append((1.0, output_tokens, computed, generated, loaded_tokens))
                times_s.append(turn.ended_s - turn.granted_s)
                continue
            at_first = line.at_firsts[index]
            iterations, computed, generated = since(at_begin, at_first)
            computed = max(prompt_tokens, computed)
            rows.append((1.0, 1.0 + iterations, computed, size_ratio + generated, loaded_tokens))
            times_s.append(first_s - turn.granted_s)
            if output_tokens > SHORT_TOKENS:
                _, computed, generated = since(at_first, at_end)
                generated = max(size_ratio * (output_tokens - 1.0), generated)
                rows.append((0.0, output_tokens - 1.0, computed, generated, 0.0))
                times_s.append(turn.ended_s - first_s)
        columns_count = 5 if any(turn.loaded_tokens for turn in turns) else 4
        found = Solution(
            rows, times_s, _overlap(turns, chosen), columns_count=columns_count, passes_count=4 if last else 2
        )
        self.iteration_s, self.token_s, self.sequence_s = found.prices[1:4]
        self.error_token_s, self.relative_error = found.error_token_s, found.relative_error
        quickest_s = 0.0
        if self.slow:
            left_s = [max(0.0, _until(turn) - self.token_s * each) for turn, each in zip(turns, tokens, strict=True)]
            quickest_s = _quantile([each / turn.output_tokens for each, turn in zip(left_s, turns, strict=True)], 0.05)
        took_s = []
        for index, turn in enumerate(turns):
            _, computed, generated = since(line.at_firsts[index], line.at_ends[index])
            size_ratio = self._size_ratios[index]
            own_s = self.iteration_s * turn.output_tokens + self.token_s * computed
            own_s += self.sequence_s * max(size_ratio * turn.output_tokens, generated)
            took_s.append(max(own_s, quickest_s * turn.output_tokens))
        return took_s


class Solution:
    """Prices of what rows are made of, by robust least squares of their times; none is negative.

    A row has turns, iterations, computed, generated and loaded tokens, of which the first `columns_count` are fitted.
    """

    __slots__ = ("error_token_s", "prices", "relative_error")

    def __init__(
        self, rows: list[Row], times_s: list[float], overlap_count: float, *, columns_count: int, passes_count: int
    ) -> None:
        """Find them; so many rows at a time tell of the same."""
        weights = [1.0] * len(rows)
        outside_weight = 0.01 * len(rows)
        prices: list[float] = []
        residuals: list[float] = []
        usual_s = 0.0
        for _ in range(passes_count):
            squares, products = _normal(rows, times_s, weights, columns_count)
            squares[0][0] += outside_weight
            prices = not_negative(squares, products)
            turn_s, iteration_s, token_s, sequence_s = prices[0], prices[1], prices[2], prices[3]
            loaded_s = prices[4] if columns_count > 4 else 0.0
            residuals = []
            for row, time_s in zip(rows, times_s, strict=True):
                a, b, c, d, e = row
                residuals.append(time_s - (turn_s * a + iteration_s * b + token_s * c + sequence_s * d + loaded_s * e))
            usual_s = max(1e-9, 1.48 * _quantile([abs(each) for each in residuals], 0.5))
            weights = [min(1.0, HUBER * usual_s / max(abs(each), 1e-12)) for each in residuals]
            outside_weight = (usual_s / OUTSIDE_S) ** 2
        self.prices = prices
        clipped = sum([min(each * each, 9 * usual_s * usual_s) for each in residuals])
        squares, _ = _normal(rows, times_s, weights, columns_count)
        squares[0][0] += outside_weight
        self.error_token_s = sqrt(clipped / len(rows) * overlap_count * inverse_at(squares, 2))
        self.relative_error = sqrt(clipped / max(1e-12, sum([each * each for each in times_s])))


class Timeline:
    """When a replica computed which prompts and generated which tokens, by its turns and the present prices."""

    __slots__ = ("_clock", "_computed", "_generated", "_iterations", "at_ends", "at_firsts", "firsts_s")

    def __init__(
        self,
        turns: list[SeenTurn],
        tokens: list[int],
        token_s: float,
        generating_s: list[float],
        size_ratios: list[float],
    ) -> None:
        """Place the `tokens` of each prompt, and an answer that came whole, which took so long to generate.

        What a turn generates counts by its size.
        """
        self.firsts_s: list[float] = []
        """When each turn's first token came."""
        prompts: list[tuple[float, float, float]] = []
        for turn, prompt_tokens, own_s in zip(turns, tokens, generating_s, strict=True):
            first_s = turn.first_s
            if first_s < 0:
                stay_s = turn.ended_s - turn.granted_s
                first_s = max(turn.granted_s + min(token_s * prompt_tokens, 0.95 * stay_s), turn.ended_s - own_s)
            self.firsts_s.append(first_s)
            prompts.append((max(turn.granted_s, first_s - token_s * prompt_tokens), first_s, float(prompt_tokens)))
        self._computed = Curve(prompts)
        self._clock = DecodeClock(prompts)
        outputs: list[tuple[float, float, float]] = []
        for turn, first_s in zip(turns, self.firsts_s, strict=True):
            outputs.append((self._clock.at(first_s), self._clock.at(turn.ended_s), float(turn.output_tokens)))
        sized = zip(outputs, size_ratios, strict=True)
        self._generated = Curve([(first, end, size_ratio * amount) for (first, end, amount), size_ratio in sized])
        running = Curve([(first, end, end - first) for first, end, _ in outputs])
        iterations: list[tuple[float, float, float]] = []
        for first, end, output_tokens in outputs:
            running_count = (running.at(end) - running.at(first)) / (end - first) if end > first else 1.0
            iterations.append((first, end, output_tokens / max(1.0, running_count)))
        self._iterations = Curve(iterations)
        self.at_firsts = [self._at(first_s, output[0]) for first_s, output in zip(self.firsts_s, outputs, strict=True)]
        """What was done until the first token of each turn, and until its end."""
        self.at_ends = [self._at(turn.ended_s, output[1]) for turn, output in zip(turns, outputs, strict=True)]

    def at(self, time_s: float) -> Done:
        """Return what all turns did until a time."""
        return self._at(time_s, self._clock.at(time_s))

    def _at(self, time_s: float, clock_s: float) -> Done:
        return self._iterations.at(clock_s), self._computed.at(time_s), self._generated.at(clock_s)


def since(begin: Done, end: Done) -> Done:
    """Return what was done between two times."""
    return end[0] - begin[0], end[1] - begin[1], end[2] - begin[2]


class Curve:
    """A sum that grows in ramps: each adds its amount evenly from its begin to its end."""

    __slots__ = ("_slopes", "_times", "_values")

    def __init__(self, ramps: list[tuple[float, float, float]]) -> None:
        """Add ramps of begin, end and amount. Cost: O(n log n)."""
        bends: list[tuple[float, float]] = []
        for begin, end, amount in ramps:
            from_ = begin if end - begin > 1e-9 else end - 1e-9
            slope = amount / (end - from_)
            bends.append((from_, slope))
            bends.append((end, -slope))
        bends.sort()
        self._times: list[float] = []
        self._values: list[float] = []
        self._slopes: list[float] = []
        value = slope = last = 0.0
        for time, change in bends:
            value += slope * (time - last)
            slope += change
            last = time
            self._times.append(time)
            self._values.append(value)
            self._slopes.append(slope)

    def at(self, time: float) -> float:
        """Return the sum at a time. Cost: O(log n)."""
        index = bisect_right(self._times, time) - 1
        return 0.0 if index < 0 else self._values[index] + self._slopes[index] * (time - self._times[index])


class DecodeClock:
    """A clock that all but stands still while a prompt is computed: then sequences generate only a few tokens."""

    __slots__ = ("_busy",)

    def __init__(self, prompts: list[tuple[float, float, float]]) -> None:
        """Stand still within these spans."""
        merged: list[tuple[float, float, float]] = []
        for begin, end, _ in sorted(prompts):
            from_, to = begin, end
            if merged and begin <= merged[-1][1]:
                from_, before, _ = merged.pop()
                to = max(end, before)
            merged.append((from_, to, to - from_))
        self._busy = Curve(merged)

    def at(self, time_s: float) -> float:
        """Return what the clock shows."""
        return time_s - 0.98 * self._busy.at(time_s)


def by_sums(turns: list[SeenTurn], busy_s: list[float]) -> Bounds | None:
    """Return the price by which all turns together took as long as they did; None if that says nothing.

    `turns` are in the order of their ends, until each of which some were in flight for `busy_s`. Cost: O(n · overlap).
    """
    rows: list[Row] = []
    computed_tokens = output_tokens = 0.0
    for turn in turns:
        if turn.least_tokens < turn.computed_tokens or turn.loaded_tokens:
            return None
        computed_tokens += turn.computed_tokens
        output_tokens += turn.output_tokens
        rows.append((1.0, computed_tokens, output_tokens, 0.0, 0.0))
    squares, products = _normal(rows, busy_s, [1.0] * len(rows), 3)
    if not _vary(squares):
        return None
    before_s, token_s, output_s = not_negative(squares, products)
    if not token_s:
        return None
    if not output_s:
        squares = [row[:2] for row in squares[:2]]
    scales = [sqrt(squares[index][index]) for index in range(len(squares))]
    matrix = [
        [squares[i][j] / scales[i] / scales[j] + (1e-9 if i == j else 0.0) for j in range(len(scales))]
        + [1.0 / scales[1] if i == 1 else 0.0]
        for i in range(len(scales))
    ]
    shares = [value / scale for value, scale in zip(_eliminated(matrix), scales, strict=True)]
    effects: list[float] = []
    """By how much the error of each row moves the price."""
    for row, time_s in zip(rows, busy_s, strict=True):
        expected_s = before_s + token_s * row[1] + (output_s * row[2] if output_s else 0.0)
        amounts = row[: len(shares)]
        effect = sum([share * amount for share, amount in zip(shares, amounts, strict=True)])
        effects.append((time_s - expected_s) * effect)
    free_ratio = len(rows) / max(1, len(rows) - len(scales))
    sure_s = SURE_RATIO * sqrt(free_ratio) * _error_of_sum(effects, int(_overlap(turns, list(range(len(turns))))))
    if sure_s > token_s * CLOSE_RATIO:
        return None
    error_s = sure_s / SURE_RATIO
    return Bounds(token_s, token_s - sure_s, token_s + sure_s, error_s, 0.0, output_s, TURNS)


def _vary(squares: list[list[float]]) -> bool:
    """Tell whether sums of prompts vary for another reason than sums of answers do, by their normal equations."""
    count = squares[0][0]
    prompts = squares[1][1] - squares[0][1] * squares[0][1] / count
    answers = squares[2][2] - squares[0][2] * squares[0][2] / count
    together = squares[1][2] - squares[0][1] * squares[0][2] / count
    own = prompts - together * together / answers if answers > 0 else prompts
    return own * count > LEAST_VARIED_RATIO * LEAST_VARIED_RATIO * prompts


def busy_until_ends(turns: list[SeenTurn]) -> list[float]:
    """Return for how long any of the turns was in flight until the end of each; they are in the order of their ends."""
    begins_s = sorted([(turn.granted_s, turn.ended_s) for turn in turns])
    found: list[float] = []
    spans: list[tuple[float, float]] = []
    for begin_s, end_s in begins_s:
        if spans and begin_s <= spans[-1][1]:
            if end_s > spans[-1][1]:
                spans[-1] = (spans[-1][0], end_s)
        else:
            spans.append((begin_s, end_s))
    index, past_s = 0, 0.0
    for turn in turns:
        while spans[index][1] < turn.ended_s:
            past_s += spans[index][1] - spans[index][0]
            index += 1
        found.append(past_s + turn.ended_s - spans[index][0])
    return found


def _error_of_sum(effects: list[float], overlap_count: int) -> float:
    """Return the standard error of a sum whose parts err alike over so many of them, by Bartlett's weights."""
    count = len(effects)
    lags_count = min(count // 4, max(2, overlap_count), MOST_LAGS_COUNT)
    variance = 0.0
    for each in effects:
        variance += each * each
    for lag in range(1, lags_count + 1):
        together = 0.0
        for index in range(lag, count):
            together += effects[index] * effects[index - lag]
        variance += 2.0 * (1.0 - lag / (lags_count + 1)) * together
    return sqrt(max(0.0, variance))


def not_negative(squares: list[list[float]], products: list[float]) -> list[float]:
    """Return the least-squares solution of the normal equations without negative values: those are left out in turn."""
    scales = [sqrt(squares[index][index]) or 1.0 for index in range(len(products))]
    active = list(range(len(products)))
    found = [0.0] * len(products)
    while active:
        matrix = [
            [squares[i][j] / scales[i] / scales[j] + (1e-6 if i == j else 0.0) for j in active]
            + [products[i] / scales[i]]
            for i in active
        ]
        solution = _eliminated(matrix)
        worst = min(range(len(active)), key=solution.__getitem__)
        if solution[worst] >= 0:
            for index, value in zip(active, solution, strict=True):
                found[index] = value / scales[index]
            break
        del active[worst]
    return found


def inverse_at(squares: list[list[float]], column: int) -> float:
    """Return an element of the diagonal of the inverse."""
    size = len(squares)
    scales = [sqrt(squares[index][index]) or 1.0 for index in range(size)]
    matrix = [
        [squares[i][j] / scales[i] / scales[j] + (1e-9 if i == j else 0.0) for j in range(size)]
        + [1.0 / scales[i] if i == column else 0.0]
        for i in range(size)
    ]
    return max(0.0, _eliminated(matrix)[column] / scales[column])


def _eliminated(matrix: list[list[float]]) -> list[float]:
    """Solve equations whose last column is the right side, by elimination; they are positive definite."""
    size = len(matrix)
    for index in range(size):
        row = matrix[index]
        pivot = row[index] or 1e-300
        for other in matrix[index + 1 :]:
            factor = other[index] / pivot
            for column in range(index, size + 1):
                other[column] -= factor * row[column]
    solution = [0.0] * size
    for index in range(size - 1, -1, -1):
        row = matrix[index]
        rest = row[size]
        for column in range(index + 1, size):
            rest -= row[column] * solution[column]
        solution[index] = rest / (row[index] or 1e-300)
    return solution


def _normal(
    rows: list[Row], times_s: list[float], weights: list[float], columns_count: int
) -> tuple[list[list[float]], list[float]]:
    """Return the normal equations of weighted rows. They are written out: compiled, numbers in names are no objects."""
    aa = ab = ac = ad = ae = bb = bc = bd = be = cc = cd = ce = dd = de = ee = 0.0
    at = bt = ct = dt = et = 0.0
    for row, time_s, weight in zip(rows, times_s, weights, strict=True):
        a, b, c, d, e = row
        weighted = weight * a
        at += weighted * time_s
        aa += weighted * a
        ab += weighted * b
        ac += weighted * c
        ad += weighted * d
        ae += weighted * e
        weighted = weight * b
        bt += weighted * time_s
        bb += weighted * b
        bc += weighted * c
        bd += weighted * d
        be += weighted * e
        weighted = weight * c
        ct += weighted * time_s
        cc += weighted * c
        cd += weighted * d
        ce += weighted * e
        weighted = weight * d
        dt += weighted * time_s
        dd += weighted * d
        de += weighted * e
        weighted = weight * e
        et += weighted * time_s
        ee += weighted * e
    squares = [
        [aa, ab, ac, ad, ae],
        [ab, bb, bc, bd, be],
        [ac, bc, cc, cd, ce],
        [ad, bd, cd, dd, de],
        [ae, be, ce, de, ee],
    ]
    return [row[:columns_count] for row in squares[:columns_count]], [at, bt, ct, dt, et][:columns_count]


def _overlap(turns: list[SeenTurn], chosen: list[int]) -> float:
    """Return how many of the chosen turns were in flight at a time, while any was."""
    spans = sorted([(turns[index].granted_s, turns[index].ended_s) for index in chosen])
    total_s = busy_s = 0.0
    until_s = -inf
    for begin_s, end_s in spans:
        total_s += end_s - begin_s
        if end_s > until_s:
            busy_s += end_s - max(begin_s, until_s)
            until_s = end_s
    return max(1.0, total_s / busy_s) if busy_s > 0 else 1.0


def _answered(turn: SeenTurn) -> float:
    """Return the time until a turn's first token; until its end if that was not seen."""
    return (turn.first_s if turn.first_s >= 0 else turn.ended_s) - turn.granted_s


def _until(turn: SeenTurn) -> float:
    """Return the time from a turn's first token to its end; from its lease if that was not seen."""
    return turn.ended_s - (turn.first_s if turn.first_s >= 0 else turn.granted_s)


def _quantile(values: list[float], ratio: float) -> float:
    if not values:
        return 0.0
    values = sorted(values)
    return values[min(len(values) - 1, int(ratio * len(values)))]


def _width_of(bounds: Bounds) -> float:
    return (bounds.high_token_s - max(0.0, bounds.low_token_s)) / max(LEAST_TOKEN_S, bounds.token_s)


def _token_s_of(price: Price) -> float:
    return price.decided_token_s


def _error_of(fit: Fit) -> float:
    return fit.relative_error


def _least_error_of(fits: list[Fit]) -> float:
    return min([fit.relative_error for fit in fits])
