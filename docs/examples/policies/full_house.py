# full_house.py
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from thunderagent.programs.messages import Reason
from thunderagent.programs.policy import Moment, Placement, Policy, ProgramView, ReplicaView, View


@dataclass(frozen=True)
class FullHouse(Policy):
    """Let the oldest programs in, as many as fit under a part of the capacity."""

    budget_ratio: float = 0.9
    name: str = "full_house"

    def room_tokens(self, replica: ReplicaView) -> float:
        capacity_tokens = replica.account.capacity_tokens
        return inf if capacity_tokens is None else self.budget_ratio * capacity_tokens - replica.account.demand_tokens

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        home = next((each for each in candidates if each.replica_id == program.replica_id), None)
        if home is not None and program.status == "active":
            return Placement(home, Reason.HOME)
        replica = max(candidates, key=self.room_tokens)
        if program.claim_tokens > self.room_tokens(replica) and replica.account.demand_tokens:
            return Placement(None, Reason.NO_ROOM)  # one that is larger than all of it runs alone
        if not view.comes_before_all_waiting(program) or view.first_routed_before(program, replica):
            return Placement(None, Reason.QUEUE_AHEAD)
        return Placement(replica, Reason.FITS)

    def balance(self, view: View, moment: Moment) -> None:
        for replica in view.replicas:
            while self.room_tokens(replica) < 0 and (program := view.first_to_pause(replica)):
                view.propose_pause(program, Reason.THRASHING)
        while view.replicas and (program := view.first_waiting()):
            placement = self.place(view, program, view.replicas)
            if placement.replica is None:
                return
            view.propose_restore(program, placement.replica, placement.reason)
