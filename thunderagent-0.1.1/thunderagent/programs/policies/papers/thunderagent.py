"""`thunderagent`: the policy of the paper (arXiv 2602.13692, sections 4.2 and 4.3).

Theory of operation
===================
Every delta_s seconds, for each replica with capacity C:

- It *thrashes* when C is smaller than the claims of its reasoning programs plus those of its acting programs, each
  weighed by f(t) = 2^(-t / half_life_s), where t is the seconds its tool has run [Eq. 7].
- Then programs are paused until the weighed sum is under lambda_max * C, in the order of S_pause(P) = 1/c + 1[acting]:
  acting programs first, the shortest first [Eq. 11]. A reasoning program is only marked and pauses at the end of its
  turn; its claim counts as gone at once here, so no more are marked than needed. If a check before that finds room for
  it again, the mark is removed.

Then, while a replica's sum is under lambda_min * C, programs are restored from the one global queue without passing
lambda_max * C, in the order of S_restore(P) = 1/c + 1[reasoning]: those with a turn first, the shortest first [Eq. 10].
A paused program's memory counts as gone, so it is restored on the replica with most room [4.3.2].

Both sides use the same sum, with two differences that keep programs from bouncing. For a restore, a marked program
still counts, because its memory is not free before its turn has ended. While some replica thrashes, only programs with
a turn are restored.

Between two checks, a turn whose program is new or paused is granted at once if its claim fits under lambda_max * C
beside all other claims and nobody in the queue comes before it. There an acting program counts in full: f(t) says what
may be taken from it at the next check, but until then its memory is in use. When replicas come or go the queue is
served at once.

A replica of unknown capacity has room for everyone.

The paper has no separate `thrash_ratio` and `restore_ratio`. They serve the settings of its public ports, which begin
to pause at 0.95 of the capacity (`thrash_ratio`), pause down to 0.80 (`lambda_max`) and restore up to 0.85
(`restore_ratio`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import exp2, floor, inf
from typing import ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.helpers import (
    check_not_negative,
    home_of,
    largest_capacity_tokens,
    without_routed_before,
)
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Phase, Status


@dataclass(frozen=True, slots=True)
class ThunderAgent(Policy):
    """Pause the shortest acting program where a replica thrashes, restore the shortest reasoning one where it fits.

    `delta_s` is the paper's time between two checks, `half_life_s` that of f(t) (`inf` counts acting programs in full,
    0 not at all), `lambda_max` and `lambda_min` the watermarks as parts of the capacity. `thrash_ratio` is the part
    above which a replica thrashes, `restore_ratio` the one up to which programs are restored: in the paper 1 and
    `lambda_max`, which it is where it is not given. `reserve_tokens` is added to
    each program's c, as room for what its next turn adds: 0 is the bare equation, 100 the constant of the authors'
    implementation. On a small engine whose turns add 340 tokens, 256 gave 5 points more prefix hits than 100.
    """

    delta_s: float = 5.0
    """Seconds between two checks of all replicas. `1` if turns are held although there is room."""
    half_life_s: float = 1.0
    """Half-life of the weight of a program whose tool runs; `inf` counts it in full. Raise it if engines recompute
    much; lower it if much memory is unused.
    """
    lambda_max: float = 1.0
    """Pause down to this part of the capacity, restore up to it. `0.9` if engines preempt although demand is under
    capacity.
    """
    lambda_min: float = 1.0
    """Restore only on replicas under this part of the capacity. Lower it if programs bounce."""
    thrash_ratio: float = 1.0
    """A replica thrashes above this part of the capacity (C in Eq. 7). Lower it to pause earlier."""
    restore_ratio: float | None = None
    """Restore up to this instead of `lambda_max`; higher leaves less memory unused."""
    reserve_tokens: int = 256
    """Tokens added to each context: room for what the next turn adds."""
    name: ClassVar[str] = "thunderagent"
    stays_home: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        if not self.delta_s > 0:
            raise ConfigurationError(f"thunderagent: delta_s must be over 0, not {self.delta_s}")
        check_not_negative("thunderagent", self, "half_life_s", "reserve_tokens")
        if not 0 < self.lambda_min <= self._restore_ratio:
            upper = "lambda_max" if self.restore_ratio is None else "restore_ratio"
            raise ConfigurationError(
                f"thunderagent: needs 0 < lambda_min <= {upper}, not {self.lambda_min} and {self._restore_ratio}"
            )
        if not (self.thrash_ratio > 0 and self.lambda_max > 0):
            raise ConfigurationError(
                f"thunderagent: needs lambda_max and thrash_ratio over 0, not {self.lambda_max} and {self.thrash_ratio}"
            )

    @property
    def _restore_ratio(self) -> float:
        return self.lambda_max if self.restore_ratio is None else self.restore_ratio

    @property
    def tick_s(self) -> float:
        """Return delta_s: a check must not come later."""
        return self.delta_s

    @property
    def claim_rules(self) -> ClaimRules:
        """Return the decay and the constant reserve."""
        return ClaimRules(half_life_s=self.half_life_s, reserve_tokens=self.reserve_tokens)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return infinity: decay replaces pausing."""
        return inf

    def pause_rank(self, program: ProgramView) -> float:
        """Return c: 1/c highest is c lowest [Eq. 11]."""
        return program.claim_tokens

    def restore_rank(self, program: ProgramView) -> float:
        """Return c: 1/c highest is c lowest [Eq. 10]."""
        return program.claim_tokens

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica, or the one with most free memory if the claim fits there."""
        if program.status is Status.ACTIVE:
            home = home_of(program, candidates)
            if home is not None:
                return Placement(home, Reason.HOME)
        replica = min(candidates, key=self._order_of_free)
        if program.claim_tokens > self._largest_tokens(candidates):
            return Placement(replica, Reason.OVERSIZE)
        if program.claim_tokens > self._free_tokens(replica):
            return Placement(None, Reason.NO_ROOM)
        open_to_it = without_routed_before(view, program, candidates)
        if not open_to_it or not view.comes_before_all_waiting(program):
            return Placement(None, Reason.QUEUE_AHEAD)
        if replica not in open_to_it:
            replica = min(open_to_it, key=self._order_of_free)
            if program.claim_tokens > self._free_tokens(replica):
                return Placement(None, Reason.QUEUE_AHEAD)
        return Placement(replica, Reason.FITS)

    def balance(self, view: View, moment: Moment) -> None:
        """Pause on thrashing replicas and restore where there is room, every delta_s; restore when replicas change."""
        if moment is Moment.TICK and floor(view.now_s / self.delta_s) != floor(view.previous_tick_s / self.delta_s):
            relieved = [self._relieve(view, replica) for replica in view.replicas]
            self._refill(view, acting_too=not any(relieved))
        elif moment is Moment.REPLICAS_CHANGED:
            self._refill(view, acting_too=True)

    def _relieve(self, view: View, replica: ReplicaView) -> bool:
        """Pause, then mark, until the projected sum is under the high watermark; return whether it thrashed.

        If it did not, unmark programs for which there is room under that.
        """
        account = replica.account
        capacity_tokens = account.capacity_tokens
        now_s = view.now_s
        if capacity_tokens is None:
            return False
        limit_tokens = self.lambda_max * capacity_tokens
        if account.weighed_tokens(now_s) - account.marked_tokens <= self.thrash_ratio * capacity_tokens:
            while (marked := view.last_marked(replica)) is not None:
                if account.weighed_tokens(now_s) - account.marked_tokens + marked.claim_tokens > limit_tokens:
                    break
                if not view.propose_unmark(marked, Reason.RELIEVED):
                    break
            return False
        view.propose_pause_until(replica, limit_tokens, Reason.THRASHING)
        while account.weighed_tokens(now_s) - account.marked_tokens > limit_tokens:
            program = view.first_to_mark(replica)
            if program is None or not view.propose_mark(program, Reason.THRASHING):
                break
        return True

    def _refill(self, view: View, *, acting_too: bool) -> None:
        """Restore from the queue onto the replica with most room, as long as the first in the queue fits there.

        If a program routed to the replica comes before the first in the queue, restore that one. A program that became
        larger than every replica while it waited will never fit: it is let in at once, as in `place`.
        """
        rooms = [
            (*self._order_of_room(view, replica), index, replica)
            for index, replica in enumerate(view.replicas)
            if self._below_low_watermark(view, replica)
        ]
        heapify(rooms)
        while rooms:
            *_, index, replica = rooms[0]
            program = self._next_for(view, replica, acting_too=acting_too)
            if program is None:
                heappop(rooms)
                continue
            oversize = program.phase is Phase.REASONING and program.claim_tokens > self._largest_tokens(view.replicas)
            if self._weighed_claim_tokens(view, program) > self._room_tokens(view, replica) and not oversize:
                heappop(rooms)
                continue
            if not view.propose_restore(program, replica, Reason.OVERSIZE if oversize else Reason.FITS):
                return
            heapreplace(rooms, (*self._order_of_room(view, replica), index, replica))

    def _next_for(self, view: View, replica: ReplicaView, *, acting_too: bool) -> ProgramView | None:
        """Return the next program to restore on a replica, of those that may go anywhere or are routed there."""
        first = view.first_waiting() or (view.first_paused_acting() if acting_too else None)
        if first is not None:
            return view.first_routed_before(first, replica) or first
        routed = view.first_waiting_for(replica, 1)
        return routed[0] if routed else None

    def _below_low_watermark(self, view: View, replica: ReplicaView) -> bool:
        capacity_tokens = replica.account.capacity_tokens
        return capacity_tokens is None or (
            replica.account.weighed_tokens(view.now_s) < self.lambda_min * capacity_tokens
        )

    def _room_tokens(self, view: View, replica: ReplicaView) -> float:
        capacity_tokens = replica.account.capacity_tokens
        if capacity_tokens is None:
            return inf
        return self._restore_ratio * capacity_tokens - replica.account.weighed_tokens(view.now_s)

    def _order_of_room(self, view: View, replica: ReplicaView) -> tuple[float, int, int]:
        """Order replicas by room, most first; among equals, as when no capacity is known, by current load."""
        account = replica.account
        return -self._room_tokens(view, replica), account.demand_tokens, account.turn_count

    def _free_tokens(self, replica: ReplicaView) -> float:
        """Return what no program claims: unlike room, this counts acting programs in full."""
        capacity_tokens = replica.account.capacity_tokens
        if capacity_tokens is None:
            return inf
        return self._restore_ratio * capacity_tokens - replica.account.demand_tokens

    def _order_of_free(self, replica: ReplicaView) -> tuple[float, int, int]:
        account = replica.account
        return -self._free_tokens(replica), account.demand_tokens, account.turn_count

    def _largest_tokens(self, candidates: Sequence[ReplicaView]) -> float:
        return self._restore_ratio * largest_capacity_tokens(candidates)

    def _weighed_claim_tokens(self, view: View, program: ProgramView) -> float:
        """Return what a restore of the program would add to the sum of Eq. 7."""
        if program.phase is Phase.REASONING:
            return program.claim_tokens
        if self.half_life_s <= 0:
            return 0.0
        return program.claim_tokens * exp2((program.acting_since_s - view.now_s) / self.half_life_s)
