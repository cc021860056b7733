"""`breakeven`: hold memory through a tool as long as that costs less than to compute it again; oldest program first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from thunderagent.programs.decisions import Reason
from thunderagent.programs.lifecycle import Phase, Status
from thunderagent.programs.policies.base import (
    ClaimRules,
    Moment,
    Placement,
    ProgramView,
    ReplicaView,
    View,
    home_of,
    largest_capacity_tokens,
)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """TODO."""

    high_ratio: float = 1.0
    low_ratio: float = 0.95
    price: float = 0.75
    growth_quantile: float = 0.75
    reserve_tokens: int = 256
    share_prefixes: bool = True
    adapt_capacity: bool = True
    backfill_count: int = 16
    pass_ratio: float = 0.5
    home_wait_ratio: float = 1.0
    foresee: float = 3.0
    resident_first: float = 0.1
    preempt: bool = False
    victims: str = "youngest"
    order: str = "age"
    name: ClassVar[str] = "breakeven"
    tick_s: ClassVar[float] = 1.0

    @property
    def claim_rules(self) -> ClaimRules:
        return ClaimRules(
            reserve_tokens=self.reserve_tokens,
            growth_quantile=self.growth_quantile,
            growth_horizon_ratio=self.foresee,
            share_prefixes=bool(self.share_prefixes),
            adapt_capacity=bool(self.adapt_capacity),
        )

    def hold_s(self, view: View, program: ProgramView) -> float:
        threshold_s = self._threshold_s(view, program)
        return view.tool_hold_s(program.tool, threshold_s)

    def _threshold_s(self, view: View, program: ProgramView) -> float:
        capacity = next((r.account.limit_tokens for r in view.replicas if r.replica_id == program.replica_id), inf)
        return self.price * capacity * view.prefill_token_s

    def pause_rank(self, program: ProgramView) -> float:
        if self.victims == "smallest":
            return program.claim_tokens
        if self.victims == "largest":
            return -program.claim_tokens
        if self.victims == "expiry" and program.phase is Phase.ACTING:
            return program.hold_until_s if program.hold_until_s < inf else 1e18
        if self.victims == "idle" and program.phase is Phase.ACTING:
            return program.acting_since_s
        return -program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        if self.order == "size":
            return program.claim_tokens
        if self.order == "wait":
            return program.waiting_since_s if program.phase is Phase.REASONING else program.opened_s
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        home = home_of(program, candidates)
        if program.status is Status.ACTIVE and home is not None:
            return Placement(home, Reason.HOME)
        if not view.comes_before_all_waiting(program) and not self._may_pass(view):
            return Placement(None, Reason.QUEUE_AHEAD)
        return self._find(view, program, candidates, make_room=view.comes_before_all_waiting(program))

    def balance(self, view: View, moment: Moment) -> None:
        for replica in view.replicas:
            self._relieve(view, replica)
        if view.replicas:
            self._refill(view)

    def _may_pass(self, view: View) -> bool:
        if not self.backfill_count:
            return False
        head = view.first_waiting()
        return head is None or view.now_s - head.waiting_since_s <= self.pass_ratio * view.median_residence_s

    def _refill(self, view: View) -> None:
        programs = view.first_waiting_few(max(1, self.backfill_count))
        if self.resident_first and len(programs) > 1 and self._may_pass(view):
            programs = sorted(programs, key=lambda p: not self._is_resident(view, p))
        for index, program in enumerate(programs):
            if index and not self._may_pass(view):
                return
            placement = self._find(view, program, view.replicas, make_room=index == 0)
            if placement.replica is not None:
                view.propose_restore(program, placement.replica, placement.reason)

    def _find(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView], *, make_room: bool) -> Placement:
        roomiest = min(candidates, key=lambda r: (r.account.demand_tokens / r.account.limit_tokens, r.account.turn_count))
        if program.claim_tokens > self.low_ratio * largest_capacity_tokens(candidates):
            return Placement(roomiest, Reason.OVERSIZE)
        home = home_of(program, candidates)
        if home is not None and self._fits(view, program, home, make_room):
            return Placement(home, Reason.FITS)
        if home is not None and home is not roomiest and self._waits_for_home(view, program, home):
            return Placement(None, Reason.HOME_SOON)
        if self._fits(view, program, roomiest, make_room):
            return Placement(roomiest, Reason.FITS)
        return Placement(None, Reason.NO_ROOM)

    def _is_resident(self, view: View, program: ProgramView) -> bool:
        home = home_of(program, view.replicas)
        return home is not None and view.resident_tokens(program, home) > self.resident_first * program.claim_tokens

    def _waits_for_home(self, view: View, program: ProgramView, home: ReplicaView) -> bool:
        gain_s = view.resident_tokens(program, home) * view.prefill_token_s
        return view.now_s - program.waiting_since_s < self.home_wait_ratio * gain_s

    def _fits(self, view: View, program: ProgramView, replica: ReplicaView, make_room: bool) -> bool:
        account = replica.account
        claim = view.claim_tokens_on(program, replica)
        limit = self.low_ratio * account.limit_tokens
        if self.foresee and not program.turn_count:
            claim += account.growth_tokens + program.growth_tokens
        while account.active_count and account.demand_tokens + claim > limit:
            if not make_room:
                return False
            victim = view.first_expired(replica)
            if victim is None and self.preempt:
                victim = view.first_to_pause(replica)
                if victim is not None and victim.opened_s <= program.opened_s:
                    victim = None
            if victim is None or not view.propose_pause(victim, Reason.EXPIRED):
                return False
        return True

    def _relieve(self, view: View, replica: ReplicaView) -> None:
        account = replica.account
        limit = self.high_ratio * account.limit_tokens
        while account.demand_tokens - account.marked_tokens > limit:
            program = view.first_expired(replica) or view.first_to_pause(replica)
            if program is None or not view.propose_pause(program, Reason.THRASHING):
                break
        while account.demand_tokens - account.marked_tokens > limit and account.active_count > 1:
            program = view.first_to_mark(replica)
            if program is None or not view.propose_mark(program, Reason.THRASHING):
                break
        while (program := view.last_marked(replica)) is not None:
            if account.demand_tokens - account.marked_tokens + program.claim_tokens > limit:
                break
            if not view.propose_unmark(program, Reason.RELIEVED):
                break
