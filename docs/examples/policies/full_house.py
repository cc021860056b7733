# full_house.py
from dataclasses import dataclass
from math import inf

from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.policy import ClaimRules, Placement
from thunderagent.programs.policies.helpers import home_of


@dataclass(frozen=True)
class FullHouse:
    """Let the oldest programs in, as many as fit under a part of the capacity."""

    budget_ratio: float = 0.9
    name: str = "full_house"
    claim_rules: ClaimRules = ClaimRules()  # claims are contexts, and nothing is added
    tick_s: float = 1.0  # it wants no ticks more often

    def hold_s(self, view, program):
        return inf  # as long as there is room

    def pause_rank(self, program):
        return -program.opened_s

    def restore_rank(self, program):
        return program.opened_s

    def room_tokens(self, replica):
        capacity_tokens = replica.account.capacity_tokens
        if capacity_tokens is None:
            return inf
        return self.budget_ratio * capacity_tokens - replica.account.demand_tokens

    def place(self, view, program, candidates):
        home = home_of(program, candidates) if program.status == "active" else None
        if home is not None:
            return Placement(home, Reason.HOME)
        replica = max(candidates, key=self.room_tokens)
        if program.claim_tokens > self.room_tokens(replica):
            if replica.account.demand_tokens == 0:
                return Placement(replica, Reason.OVERSIZE)  # larger than all of it: let it run alone
            return Placement(None, Reason.NO_ROOM)
        if not view.comes_before_all_waiting(program) or view.first_routed_before(program, replica):
            return Placement(None, Reason.QUEUE_AHEAD)
        return Placement(replica, Reason.FITS)

    def balance(self, view, moment):
        for replica in view.replicas:
            while self.room_tokens(replica) < 0 and (program := view.first_to_pause(replica)):
                view.propose_pause(program, Reason.THRASHING)
        while view.replicas and (program := view.first_waiting()):
            placement = self.place(view, program, view.replicas)
            if placement.replica is None:
                return
            view.propose_restore(program, placement.replica, placement.reason)
