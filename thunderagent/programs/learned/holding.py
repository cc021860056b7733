"""How long it pays to hold programs through their tools: what an engine makes a second, if they are held for that long.

Theory of operation
===================
An engine is short of memory, of compute, or of both. Holding a context through a tool takes memory, in which another
turn could run; giving it up takes compute, because it is computed again. What is worth more depends on the engine and
on the load, and both are measured. So the time for which programs are held is *planned*: for each time H of a grid the
turns a second are predicted, and the best H wins.

**Compute.** An engine that serves B turns at once spends on each token that they generate an iteration, a + c·B
seconds, and b seconds on each prompt token that it computes (`price.py`). A turn brings u new tokens, generates o
and leaves L. Those are computed again unless its program comes back within H, which it does in a part P(H) of all
cases. So B turns at once take

    B·b·(u + (1 - P(H))·L) + o·(a + c·B)

seconds, and that many turns end in this time. (What is shared with other programs is not lost, and a program's last
turn loses nothing.)

**Memory.** A turn that runs holds x tokens, and so does a program whose tool runs, for E[min(tool, H)] seconds. At X
turns a second both together fill the memory C:

    B·x + X·E[min(tool, H)]·x = C.

B and X follow from the two equations. With H = 0 nothing is held, and turns alone fill the memory; with H = inf
everything is held. Where prefill is cheap, or contexts are small, or programs rarely come back, H = 0 is best. P and E
are those of all tools together (`tool_times.py`): engines evict what was not used for longest, whoever's it is, so
memory cannot be kept for quick tools alone for long. Until some programs came back nothing is held: programs of one
turn that do not say their end look like programs whose tools run.

**Softly.** Where a lost token costs little, hard claims for programs that are held waste more than they save: some are
back at any time, and all claims cover what no turn has brought yet. There claims may exceed the memory by a fifth, and
the engine gives up what was not used for longest. That is where an engine that holds nothing spends at most a quarter
of its time on lost histories, even by the upper end of the price.

**Filled.** Where nothing is held and a lost token costs that little, by the upper end of the price or by the geometric
mean of its ends, claims that all fit would leave a part of the memory unused, in which a turn could run. There some
programs more than fit are let in (`letting_in.py`). They wait in the engine's own queue. What is lost there says
nothing of the memory's size, and what was taken from it for earlier losses counts again only when programs are held
again. A turn's time has its wait in it, which the price takes for time that each sequence costs, as if fewer turns at
once were no loss. So holding must be predicted to bring more before a replica that was filled holds anybody.

**The threshold.** H is where one more second of holding no longer pays for all tools together. So one over the lowest
return rate up to there is what a lost token is worth in seconds of holding; each tool is held by that. That is the
break-even time b·C of an engine that is short of compute alone, less what the memory is worth.

**Who never comes back.** A program that is over and did not say so looks like one whose tool runs. It would be held for
as long as the longest tools. So all that are away count as not back until now, whether they are held or not
(`tool_times.py`); of times that are predicted to bring nearly as much the shortest counts; and if a plan is for less
long than the one before, that applies to who is held already, while others wait (`scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from thunderagent.programs.learned.sizes import TurnMeans

ENOUGH_TURNS_COUNT: Final = 16
"""Before this many turns nothing is planned, and nobody is held."""

ENOUGH_RETURNS_COUNT: Final = 8
"""Before this many programs came back from their tools nobody is held: perhaps none ever does."""

REFRESH_S: Final = 5.0
"""How long a plan stays."""

BISECTIONS_COUNT: Final = 30
"""Precision of a prediction: the memory divided by 2 so many times."""

HOLDING_GAIN_RATIO: Final = 1.06
"""Programs are held if that is predicted to make this many times the turns: a prediction is not exact. Where turns
alone fill the memory, it cannot be seen what part of an iteration's time is for its tokens: a predicted gain of a few
per cent may be a loss.
"""

FILLED_GAIN_RATIO: Final = 1.15
"""What must be predicted instead where turns wait in the engine's queue."""

NEARLY_RATIO: Final = 0.99
"""Of all times that are predicted to bring nearly as much as the best one, programs are held for the shortest: what few
returns were seen so late may be a guess, and those that never come back are held as long."""

CLAIMED_RATIO: Final = 0.95
"""Part of the memory that may be claimed where programs are held."""

CHEAP_LOSS_RATIO: Final = 0.25
"""A lost token costs little if an engine that holds nothing spends at most this part of its time on lost histories."""

SOFTLY_CLAIMED_RATIO: Final = 1.2
"""How many times the memory may be claimed where programs are held softly."""

SLACK_RATIO: Final = 1.0001
"""So that a tool whose rate is just the lowest is held."""


class EngineCosts(NamedTuple):
    """What an engine's iteration costs, in seconds: each prompt token, each iteration, each sequence in it."""

    prefill_token_s: float
    iteration_s: float
    sequence_s: float


class Returns(NamedTuple):
    """When programs come back from their tools: for each interval of a grid its length, and the part that returns.

    `return_ratios` are of those still away at its start; `rates_per_s` are the return rates there (`tool_times.py`).
    `seen_count` were seen to come back: what they do not tell is a guess.
    """

    lengths_s: Sequence[float]
    return_ratios: Sequence[float]
    rates_per_s: Sequence[float]
    seen_count: float


class HoldingPlan(NamedTuple):
    """For how long tools are held, and what that brings."""

    threshold_s: float
    """What a lost token is worth, in seconds of holding: 0 if nothing is held, infinite if all is."""
    turns_per_s: float
    """Predicted with it; 0 if nothing is known yet."""
    unheld_turns_per_s: float
    """Predicted if nothing were held."""
    claimed_ratio: float = 1.0
    """How many times the memory may be claimed."""
    may_overfill: bool = False
    """Whether programs more than fit are let in, because turns alone should fill the memory."""


NOTHING_HELD: Final = HoldingPlan(0.0, 0.0, 0.0)


def plan_holding(
    costs: EngineCosts,
    means: TurnMeans,
    returns: Returns,
    *,
    memory_tokens: float,
    corrected_ratio: float = 1.0,
    own_ratio: float = 1.0,
    reserve_tokens: float = 0.0,
    least_token_s: float = 0.0,
    most_token_s: float = inf,
    was_filled: bool = False,
) -> HoldingPlan:
    """Return for how long tools are best held on an engine with this memory.

    `corrected_ratio` of it can be claimed (`capacity.py`), `own_ratio` of what turns hold is not shared with others,
    and a program that is held claims `reserve_tokens` besides. A prompt token costs from `least_token_s` to
    `most_token_s`; if that is little, claims may exceed the memory. `was_filled`: so the plan before said. Cost:
    O(intervals · bisections).
    """
    held_tokens = own_ratio * means.held_tokens
    if memory_tokens <= 0 or memory_tokens == inf or means.count < ENOUGH_TURNS_COUNT or held_tokens <= 0:
        return NOTHING_HELD
    if not any(costs) or returns.seen_count < ENOUGH_RETURNS_COUNT:
        return NOTHING_HELD
    memory_tokens *= min(1.0, corrected_ratio)  # what is not there is there for nobody
    goes_on_ratio = means.goes_on_ratio
    lost_tokens = goes_on_ratio * own_ratio * means.left_tokens
    unheld = best = _turns_per_s(costs, means, memory_tokens / held_tokens, lost_tokens, 0.0)
    is_soft = unheld * most_token_s * lost_tokens <= CHEAP_LOSS_RATIO
    exceeding_ratio = SOFTLY_CLAIMED_RATIO if is_soft else 1.0
    claimed_ratio = exceeding_ratio * CLAIMED_RATIO * max(1.0, corrected_ratio)
    places_count = claimed_ratio * memory_tokens / (held_tokens + reserve_tokens)
    lowest_per_s, away_ratio, away_s = inf, 1.0, 0.0
    predictions: list[tuple[float, float]] = []
    grid = zip(returns.lengths_s, returns.return_ratios, returns.rates_per_s, strict=True)
    for length_s, return_ratio, rate_per_s in grid:
        away_s += away_ratio * length_s * (1.0 - return_ratio / 2)
        away_ratio *= 1.0 - return_ratio
        lowest_per_s = min(lowest_per_s, rate_per_s)
        predicted = _turns_per_s(costs, means, places_count, away_ratio * lost_tokens, goes_on_ratio * away_s)
        predictions.append((predicted, lowest_per_s))
        best = max(best, predicted)
    if not best or best < (FILLED_GAIN_RATIO if was_filled else HOLDING_GAIN_RATIO) * unheld:
        middle_token_s = (least_token_s * most_token_s) ** 0.5
        is_cheap = 0.0 < unheld * middle_token_s * lost_tokens <= CHEAP_LOSS_RATIO
        return HoldingPlan(0.0, unheld, unheld, may_overfill=is_soft or is_cheap)
    lowest_per_s = next(rate_per_s for predicted, rate_per_s in predictions if predicted >= NEARLY_RATIO * best)
    return HoldingPlan(SLACK_RATIO / lowest_per_s if lowest_per_s > 0 else inf, best, unheld, exceeding_ratio)


def _turns_per_s(costs: EngineCosts, means: TurnMeans, places_count: float, lost_tokens: float, away_s: float) -> float:
    """Return the predicted turns a second, if each loses that many tokens, and a place is kept for `away_s` after it.

    Fewer than one turn at once: the engine idles for the rest of the time.
    """
    own_s = costs.prefill_token_s * (means.new_tokens + lost_tokens) + means.output_tokens * costs.sequence_s
    shared_s = means.output_tokens * costs.iteration_s
    if own_s + shared_s <= 0:
        return 0.0
    low, high, turns_per_s = 0.0, places_count, 0.0
    for _ in range(BISECTIONS_COUNT):
        running_count = (low + high) / 2
        if running_count < 1.0:
            turns_per_s = running_count / (own_s + shared_s)
        else:
            turns_per_s = running_count / (running_count * own_s + shared_s)
        if running_count + turns_per_s * away_s > places_count:
            high = running_count
        else:
            low = running_count
    return turns_per_s
