"""`thunderagent-released`: the policy that the authors of ThunderAgent ship, which is not quite that of their paper.

Theory of operation
===================
Every delta_s seconds, restores come first, then pauses. What is paused at a check waits for the next one.

*Restore.* The room of all replicas together is shared out in this order: programs that return with a turn, then new
ones, then those whose tools still run; of each the smallest first, and one for which the room does not suffice is
skipped. Those chosen are placed largest first, each on the replica with most room (best fit decreasing). Acting
programs count there by f(t) = 2^(-t / half_life_s); a restored one counts in full.

*Pause.* Where the claims, **undecayed**, exceed the capacity, acting programs are paused, the smallest first. If that
does not suffice, reasoning ones are marked. A marked program counts until its turn ends, so all are marked.

Between two checks only a new program can be let in: on the replica with the smallest demand among those with room for
it, counted in full, whoever waits. A turn of an active program is granted at once. One that waits for `force_s` is let
in regardless.

It differs from the paper (`thunderagent`) in the order, which there knows nothing of new and returning; in the sum
that decides a pause, which there decays; and in the reserve. It differs from the released code in two points. Those
whose tools run are placed after the others instead of among them; with one replica that is the same. A program whose
tool runs after its first turn is one of the third group, not of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.helpers import check_not_negative, home_of
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Status

_NEW_TOKENS = 2**50
"""More than any claim: added to the rank of new programs, which are ranked by their claims, too."""


@dataclass(frozen=True, slots=True)
class ThunderAgentReleased(Policy):
    """Restore returning programs, then new ones, then those whose tools run; pause by undecayed sums.

    `half_life_s` is that of f(t) where there is room to restore; `inf` is the released default, in which its option for
    the paper's decay is off.
    """

    delta_s: float = 5.0
    """Seconds between two checks of all replicas."""
    half_life_s: float = 1.0
    """Half-life of the weight of a program whose tool runs, for restores only; `inf` counts it in full."""
    reserve_tokens: int = 100
    """Tokens added to each context."""
    force_s: float = 1800.0
    """Seconds after which a turn that waits is granted without room."""
    name: ClassVar[str] = "thunderagent-released"
    stays_home: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        if not self.delta_s > 0:
            raise ConfigurationError(f"{self.name}: delta_s must be over 0, not {self.delta_s}")
        check_not_negative(self.name, self, "half_life_s", "reserve_tokens", "force_s")

    @property
    def tick_s(self) -> float:
        """Return delta_s: a check must not come later."""
        return self.delta_s

    @property
    def claim_rules(self) -> ClaimRules:
        """Return the decay and the constant reserve."""
        return ClaimRules(half_life_s=self.half_life_s, reserve_tokens=self.reserve_tokens)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return infinity: only pressure pauses."""
        return inf

    def pause_rank(self, program: ProgramView) -> float:
        """Return the claim: the smallest first."""
        return program.claim_tokens

    def restore_rank(self, program: ProgramView) -> float:
        """Put returning programs before new ones, and of each the smallest first."""
        return float(program.claim_tokens + (0 if program.turn_count else _NEW_TOKENS))

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Keep an active program on its replica; let a new one in where it fits; others wait for the next check."""
        if program.status is Status.ACTIVE:
            home = home_of(program, candidates)
            if home is not None:
                return Placement(home, Reason.HOME)
        if program.turn_count and program.routed_to is None:  # one that is routed is asked about here alone
            return Placement(None, Reason.QUEUE_AHEAD)
        fitting = [each for each in candidates if program.claim_tokens <= _free_tokens(each)]
        if not fitting:
            return Placement(None, Reason.NO_ROOM)
        return Placement(min(fitting, key=_load_of), Reason.FITS)

    def balance(self, view: View, moment: Moment) -> None:
        """Restore, then pause, every delta_s."""
        if moment is Moment.TICK and floor(view.now_s / self.delta_s) != floor(view.previous_tick_s / self.delta_s):
            self._force(view)
            self._restore(view)
            for replica in view.replicas:
                self._relieve(view, replica)

    def _force(self, view: View) -> None:
        """Let in who waited for `force_s`."""
        late = [program for program in view.waiting() if view.now_s - program.waiting_since_s >= self.force_s]
        for program in late:
            if targets := view.targets(program):
                view.propose_restore(program, min(targets, key=_load_of), Reason.FITS)

    def _restore(self, view: View) -> None:
        """Choose in order what fits into all room together, then place the largest first."""
        rooms = {each.replica_id: _room_tokens(each, view.now_s) for each in view.replicas}
        rooms = {name: room for name, room in rooms.items() if room > self.reserve_tokens}
        total = sum(rooms.values())
        chosen = []
        for program in view.waiting():
            if program.claim_tokens <= total:
                chosen.append(program)
                total -= program.claim_tokens
        for program in sorted(chosen, key=lambda each: -each.claim_tokens):
            self._place_roomiest(view, program, rooms)
        while (resting := view.first_paused_acting()) is not None and resting.claim_tokens <= total:
            total -= resting.claim_tokens
            if not self._place_roomiest(view, resting, rooms):
                break

    def _place_roomiest(self, view: View, program: ProgramView, rooms: dict[str, float]) -> bool:
        """Restore a program where most room is, if it fits there; return whether it was."""
        if not rooms:
            return False
        name = max(rooms, key=rooms.__getitem__)
        replica = view.replica(name)
        if replica is None or program.claim_tokens > rooms[name]:
            return False
        if not view.propose_restore(program, replica, Reason.FITS):
            return False
        rooms[name] -= program.claim_tokens
        if rooms[name] <= self.reserve_tokens:
            del rooms[name]
        return True

    def _relieve(self, view: View, replica: ReplicaView) -> None:
        """Pause acting programs until the rest fits; if it does not, mark all others."""
        capacity_tokens = replica.account.capacity_tokens
        while capacity_tokens is not None and replica.account.demand_tokens > capacity_tokens:
            first = view.first_to_pause_few(replica, 1)
            if first and view.propose_pause(first[0], Reason.THRASHING):
                continue
            program = view.first_to_mark(replica)
            if program is None or not view.propose_mark(program, Reason.THRASHING):
                break


def _free_tokens(replica: ReplicaView) -> float:
    capacity_tokens = replica.account.capacity_tokens
    return inf if capacity_tokens is None else capacity_tokens - replica.account.demand_tokens


def _room_tokens(replica: ReplicaView, now_s: float) -> float:
    capacity_tokens = replica.account.capacity_tokens
    return inf if capacity_tokens is None else capacity_tokens - replica.account.weighed_tokens(now_s)


def _load_of(replica: ReplicaView) -> tuple[int, int]:
    account = replica.account
    return account.demand_tokens, account.turn_count
