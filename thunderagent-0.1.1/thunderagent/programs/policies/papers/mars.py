"""`mars`: a window of programs, levels by work to compute, and memory that is kept where a warm return pays.

Theory of operation
===================
"MARS: Efficient, Adaptive Co-Scheduling for Heterogeneous Agentic Systems" (arXiv 2604.26963) has three parts. This
policy combines them:

- the **external control plane** (4.2, Algorithm 1) says which programs may begin: `mars_admission.py`;
- the **agent-centric scheduler** says who is served first: `mars_priority.py`, as the priority that an engine gets with
  each turn, and as the order in which programs without memory are restored;
- the **opportunistic co-scheduler** says whose memory is kept while its tool runs. That is here.

An active program claims its context. While its tool runs it keeps that claim as long as the *benefit of a warm return*
exceeds the *cost of the memory*. The formula for that is chosen here. Keeping c tokens until time u, or until an
earlier return, costs c·E[min(return, u)] token-seconds of memory. With P(return <= u) it saves computing c tokens
again, which takes β·c seconds of the whole engine, with its memory of C tokens: worth C·β·c token-seconds. c cancels
out: a tool is waited for as long as its rate of return is more than one in `warm_ratio`·β·C seconds
(`view.tool_hold_s`; β and the times of tools are learned). Beyond that the claim is expired, and is taken once somebody
needs the room; otherwise memory costs nothing.

**Eviction** is in the order of priority, the larger footprint first. Expired programs make room for a waiting one; then
one acting program does that is of a lower level and large enough. If programs outgrew the memory, expired ones are
paused first, then acting ones of the lowest level and largest size. Then those with a turn are marked, and unmarked if
there is room again.

Only an engine, and no proxy in front of it, can do the following: order in each iteration what it computes, by levels
that fall while a prompt is computed; shrink the chunk of a prompt that does not fit instead of preempting another; and
keep the blocks of acting programs, and take those before it preempts a running one. `benchmarks/mlfq.py` has an engine
that does all three. A real one takes the priority (vLLM: `--scheduling-policy priority`), and finds the history of a
program whose claim was kept, because no more is let in than fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Reason, Signal
from thunderagent.programs.policies.helpers import (
    check_not_negative,
    home_of,
    largest_capacity_tokens,
    times,
    without_routed_before,
    worth_a_look,
)
from thunderagent.programs.policies.papers.mars_admission import MarsAdmission
from thunderagent.programs.policies.papers.mars_priority import MarsOrder, MarsPriority, level_of
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Status

PASS_COUNT = 8
"""How many programs behind the first waiting one may be restored if that does not fit: they pass it."""

EXPIRED_COUNT = 64
"""How many programs are paused at most to make room for one."""

LEVEL_RANK_TOKENS = 1e9
"""Weight of a level against a footprint in the order of eviction: more than any footprint."""


@dataclass(slots=True)
class Mars(Policy):
    """Admission, order, priority and retention together; the parts, chosen separately, have more settings."""

    tool_cpu_count: int = 0
    """Processors that all tools share; 0 is unknown."""
    window_max_count: int = 0
    """The largest window; 0: as many mean-sized programs as memory holds."""
    warm_ratio: float = 1.0
    """Higher keeps memory through longer tools."""
    reserve_tokens: int = 256
    """Tokens added to each context: room for what the next turn adds, until that is learned."""
    growth_quantile: float = 0.75
    """A claim includes what the next turn adds in this quantile of cases, as learned. `0`: `reserve_tokens`."""
    admission: MarsAdmission = field(init=False)
    priority: MarsPriority = field(init=False)
    order: MarsOrder = field(init=False)
    name: ClassVar[str] = "mars"
    stays_home: ClassVar[bool] = True
    part_settings: ClassVar[Mapping[str, str]] = {"tool_cpu_count": "admission", "window_max_count": "admission"}
    """Settings passed on to a part, by its kind: also to a part that replaces it."""

    def __post_init__(self) -> None:
        """Create the parts, and reject invalid settings."""
        check_not_negative("mars", self, "warm_ratio", "reserve_tokens")
        if not 0 <= self.growth_quantile < 1:
            raise ConfigurationError(f"mars: growth_quantile is from 0 to under 1, not {self.growth_quantile}")
        self.admission = MarsAdmission(tool_cpu_count=self.tool_cpu_count, window_max_count=self.window_max_count)
        self.priority = MarsPriority()
        self.order = MarsOrder()

    @property
    def tick_s(self) -> float:
        """Return the control interval of the admission."""
        return self.admission.tick_s

    @property
    def claim_rules(self) -> ClaimRules:
        """Return what claims hold beyond contexts."""
        return ClaimRules(reserve_tokens=self.reserve_tokens, growth_quantile=self.growth_quantile, share_prefixes=True)

    def observe(self, view: View, signal: Signal) -> None:
        """Pass the signal to the parts."""
        self.admission.observe(view, signal)
        self.priority.observe(view, signal)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return until when a warm return is worth more than the memory."""
        return view.tool_hold_s(program.tool, self.hold_threshold_s(view, program))

    def hold_threshold_s(self, view: View, program: ProgramView) -> float:
        """Return the break-even time, times `warm_ratio`."""
        return times(self.warm_ratio, view.break_even_s(program.replica_id))

    def pause_rank(self, program: ProgramView) -> float:
        """Rank the lowest level first, within it the largest footprint; the last of a group last."""
        if program.is_last_of_group:
            return inf
        return -(self._level(program) * LEVEL_RANK_TOKENS + program.claim_tokens)

    def restore_rank(self, program: ProgramView) -> float:
        """Rank as the order does."""
        return self.order.restore_rank(program)

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica while it is active, otherwise one with room, if few wait."""
        home = home_of(program, candidates)
        if program.status is Status.ACTIVE and home is not None:
            return Placement(home, Reason.HOME)
        if not view.comes_before_all_waiting(program):
            return Placement(None, Reason.QUEUE_AHEAD)
        return self._find(view, program, candidates, home)

    def balance(self, view: View, moment: Moment) -> None:
        """Evict where claims exceed the memory, and restore programs that fit."""
        replicas = worth_a_look(view, moment)
        for replica in replicas:
            self._relieve(view, replica)
        while replicas and self._restore_one(view, replicas):
            pass

    def _restore_one(self, view: View, replicas: Sequence[ReplicaView]) -> bool:
        """Restore one of the first few that may go anywhere, or the first that waits for a replica alone.

        The latter may be behind a program that fits nowhere, and would keep all others from its replica if it waited.
        It passes that program as others do, but not for longer than programs take: it would take its room each time.
        """
        for program in view.first_waiting_few(PASS_COUNT + 1):
            placement = self._find(view, program, replicas, view.replica(program.replica_id))
            if placement.replica is not None and view.propose_restore(program, placement.replica, placement.reason):
                return True
        head = view.first_waiting()
        if head is not None and view.now_s - head.waiting_since_s > view.median_residence_s:
            return False
        for replica in replicas:
            for program in view.first_waiting_for(replica, 1):
                placement = self._find(view, program, [replica], None)
                if placement.replica is not None and view.propose_restore(program, replica, placement.reason):
                    return True
        return False

    def _find(
        self, view: View, program: ProgramView, candidates: Sequence[ReplicaView], home: ReplicaView | None
    ) -> Placement:
        """Return where a paused program fits: its home, which may be busy, or the replica with most room."""
        most_tokens = largest_capacity_tokens(view.replicas)
        if program.claim_tokens > most_tokens and view.claim_tokens_on(program, None) > most_tokens:
            return Placement(max(candidates, key=_order_of_room), Reason.OVERSIZE)
        open_to_it = without_routed_before(view, program, candidates)
        if not open_to_it:
            return Placement(None, Reason.QUEUE_AHEAD)
        if home is not None and view.first_routed_before(program, home) is not None:
            home = None
        roomiest = max(open_to_it, key=_order_of_room)
        for replica in (roomiest,) if home is None or home is roomiest else (home, roomiest):
            if self._fits(view, program, replica):
                return Placement(replica, Reason.FITS)
        return Placement(None, Reason.NO_ROOM)

    def _fits(self, view: View, program: ProgramView, replica: ReplicaView) -> bool:
        """Return whether a program fits once expired programs and one of a lower level are paused."""
        account = replica.account
        missing_tokens = view.claim_tokens_on(program, replica) - _free_tokens(replica)
        if missing_tokens <= 0 or not account.active_count:
            return True
        expired = view.first_expired_few(replica, EXPIRED_COUNT)
        if sum(each.claim_tokens for each in expired) >= missing_tokens:
            for each in expired:
                if view.claim_tokens_on(program, replica) <= _free_tokens(replica):
                    break
                view.propose_pause(each, Reason.EXPIRED)
        else:
            victim = view.first_to_pause(replica)
            if victim is None or victim.claim_tokens < missing_tokens or victim.is_last_of_group:
                return False
            if self._level(victim) <= self._level(program):
                return False
            view.propose_pause(victim, Reason.THRASHING)
        return not account.active_count or view.claim_tokens_on(program, replica) <= _free_tokens(replica)

    def _relieve(self, view: View, replica: ReplicaView) -> None:
        """Pause, then mark, until all unmarked claims fit; unmark where there is room."""
        account = replica.account
        view.propose_pause_until(replica, account.limit_tokens, Reason.THRASHING, least_count=1)
        while _free_tokens(replica) + account.marked_tokens < 0 and account.active_count > 1:
            victim = view.first_to_mark(replica)
            if victim is None or not view.propose_mark(victim, Reason.THRASHING):
                break
        while (marked := view.last_marked(replica)) is not None:
            if _free_tokens(replica) + account.marked_tokens < marked.claim_tokens:
                break
            if not view.propose_unmark(marked, Reason.RELIEVED):
                break

    def _level(self, program: ProgramView) -> int:
        return level_of(program.claim_tokens, self.order.first_level_tokens, self.order.level_count)


def _free_tokens(replica: ReplicaView) -> float:
    """Return what nobody claims there; infinite if the capacity is unknown."""
    return replica.account.limit_tokens - replica.account.demand_tokens


def _order_of_room(replica: ReplicaView) -> tuple[float, int, int]:
    return _free_tokens(replica), -replica.account.turn_count, -replica.account.demand_tokens
