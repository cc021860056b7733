"""How often clients' hints and judges' verdicts were right, and how far hints are believed for it.

A program is believed as far as its client says it is sure, but no further than its own hints were right so far. Until
it has some, its tenant's hints stand in; a client without any history is believed. Programs without a tenant do not
form one: otherwise one stranger's wrong hint would count against all the others. The outcomes of programs, which
clients report, tell whether verdicts were right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from thunderagent.programs.learned.histogram import SLACK, check_range
from thunderagent.programs.messages import OUTCOMES as PROGRAM_OUTCOMES
from thunderagent.programs.state.program import Level, Program

MAX_TENANTS_COUNT: Final = 1024
"""Beyond this number, the tenant longest not heard of is forgotten."""

FORGETTING_RATIO: Final = 0.98
"""Weight of a hint relative to that of the next one of its program, or tenant."""

FIRST_WEIGHT: Final = 4.0
"""Prior belief weighs as much as this many hints of one's own."""

RIGHT: Final = "right"
EARLY: Final = "early"
LATE: Final = "late"
OUTCOMES = (RIGHT, EARLY, LATE)
"""The turn came when it was announced, earlier, or later."""

TURN_EDGES_COUNT = (5, 10, 15, 20, 30, 40, 60, 80)
"""Turns at which recall is reported."""


class HintRecord:
    """Hints by what they said and by their outcome."""

    __slots__ = ("_of_tenant", "error_s_total", "outcome_counts", "taken_counts")

    def __init__(self) -> None:
        """Start without hints."""
        self.taken_counts: Counter[str] = Counter()
        """By what they say of the memory; empty if they only say when the next turn comes."""
        self.outcome_counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        """Of measured hints."""
        self.error_s_total = 0.0
        """By how much turns missed the announced time."""
        self._of_tenant: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def export(self) -> tuple[tuple[str, float, float], ...]:
        """Return how many hints of each tenant were right, and of how many."""
        return tuple((tenant, *score) for tenant, score in self._of_tenant.items())

    def adopt(self, tenants: Iterable[tuple[str, float, float]]) -> None:
        """Adopt another's trust in tenants; the counts stay its own. Raises ValueError for impossible values."""
        kept = deque(tenants, maxlen=MAX_TENANTS_COUNT)
        for _, right, weight in kept:
            check_range("hints", weight, (0.0, 1 / (1 - FORGETTING_RATIO) + SLACK))
            check_range("right hints", right, (0.0, weight))
        self._of_tenant = OrderedDict((tenant, (right, weight)) for tenant, right, weight in kept)

    def confidence_ratio(self, program: Program, said_ratio: float) -> float:
        """Return how far a hint on a program is believed, given its client's own confidence. Cost: O(1)."""
        right, weight = self._of_tenant.get(program.tenant, (0.0, 0.0))
        tenant_ratio = (FIRST_WEIGHT + right) / (FIRST_WEIGHT + weight)
        own_right, own_weight = program.hint_score
        own_ratio = (FIRST_WEIGHT * tenant_ratio + own_right) / (FIRST_WEIGHT + own_weight)
        return min(said_ratio, own_ratio)

    def learn(self, program: Program, came_s: float, least_s: float, most_s: float) -> str:
        """Learn when a turn came that was expected within these bounds; return the outcome."""
        outcome = EARLY if came_s < least_s else LATE if came_s > most_s else RIGHT
        self.outcome_counts[outcome] += 1
        self.error_s_total += max(0.0, least_s - came_s, came_s - most_s)
        right_ratio = float(outcome == RIGHT)
        own_right, own_weight = program.hint_score
        program.hint_score = (own_right * FORGETTING_RATIO + right_ratio, own_weight * FORGETTING_RATIO + 1.0)
        if program.tenant:
            self._learn_of_tenant(program.tenant, right_ratio)
        return outcome

    def _learn_of_tenant(self, tenant: str, right_ratio: float) -> None:
        right, weight = self._of_tenant.get(tenant, (0.0, 0.0))
        self._of_tenant[tenant] = (right * FORGETTING_RATIO + right_ratio, weight * FORGETTING_RATIO + 1.0)
        self._of_tenant.move_to_end(tenant)
        if len(self._of_tenant) > MAX_TENANTS_COUNT:
            self._of_tenant.popitem(last=False)


class JudgeRecord:
    """After how many turns programs were predicted to fail, by their outcome."""

    __slots__ = ("_counts", "level_counts", "program_counts")

    def __init__(self) -> None:
        """Start without programs."""
        self.program_counts = dict.fromkeys(PROGRAM_OUTCOMES, 0)
        """Programs by outcome."""
        self.level_counts = dict.fromkeys(Level, 0)
        """Verdicts by the level that they set."""
        self._counts = {outcome: [0] * (len(TURN_EDGES_COUNT) + 1) for outcome in PROGRAM_OUTCOMES}

    def program_ended(self, outcome: str, first_failure_turn_count: int | None) -> None:
        """Add a program with an outcome; None means that it was never predicted to fail."""
        self.program_counts[outcome] += 1
        if first_failure_turn_count is not None:
            self._counts[outcome][bisect_left(TURN_EDGES_COUNT, first_failure_turn_count)] += 1

    def predicted_ratio(self, outcome: str, turn_count: int) -> float | None:
        """Return the ratio of programs with that outcome that were predicted to fail by that turn, which is an edge.

        For `FAILURE` that is the recall, for `SUCCESS` the ratio of false alarms; None before the first such program.
        """
        edges_count = TURN_EDGES_COUNT.index(turn_count) + 1
        whole_count = self.program_counts[outcome]
        return sum(self._counts[outcome][:edges_count]) / whole_count if whole_count else None
