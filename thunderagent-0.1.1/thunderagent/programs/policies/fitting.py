"""For policies that let programs in where their full claims fit: how much room there is, and who gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.helpers import home_of, largest_capacity_tokens, without_routed_before
from thunderagent.programs.policy import Placement, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Status


@dataclass(frozen=True, slots=True)
class Fitting:
    """How claims are measured against a replica's capacity.

    When programs are let in, `headroom_ratio` of it stays free for the growth of those already there. `shared_tokens`
    is common to all programs: it is in memory once for all that are active on a replica.
    """

    headroom_ratio: float = 0.0
    shared_tokens: int = 0

    def free_tokens(self, replica: ReplicaView) -> float:
        """Return what no program claims; infinite if the capacity is unknown, negative if claims exceed it."""
        account = replica.account
        if account.assumed_tokens is None:
            return inf
        counted_twice_tokens = self.shared_tokens * max(0, account.active_count - 1)
        return account.assumed_tokens - account.demand_tokens + counted_twice_tokens

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica while it is active, otherwise one where its claim fits: `place` of a policy.

        Its last replica, which may still have its history, comes first, then the one with most room. A program larger
        than every replica is let in at once. Nobody passes a waiting program with a lower restore rank; a program that
        waits for a single replica blocks only that one.
        """
        home = home_of(program, candidates)
        if program.status is Status.ACTIVE and home is not None:
            return Placement(home, Reason.HOME)
        placement = self.find_room(view, program, candidates)
        if placement.reason is not Reason.FITS:
            return placement
        if not view.comes_before_all_waiting(program):
            return Placement(None, Reason.QUEUE_AHEAD)
        open_to_it = without_routed_before(view, program, candidates)
        if len(open_to_it) == len(candidates):
            return placement
        placement = self.find_room(view, program, open_to_it) if open_to_it else Placement(None, Reason.NO_ROOM)
        return placement if placement.reason is Reason.FITS else Placement(None, Reason.QUEUE_AHEAD)

    def find_room(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return where an inactive program could go, regardless of other waiting programs."""
        roomiest = max(candidates, key=lambda replica: (self.free_tokens(replica), -replica.account.demand_tokens))
        if program.claim_tokens > largest_capacity_tokens(view.replicas if program.routed_to is None else candidates):
            return Placement(roomiest, Reason.OVERSIZE)
        home = home_of(program, candidates)
        for replica in (roomiest,) if home is None else (home, roomiest):
            if self._fits(program, replica):
                return Placement(replica, Reason.FITS)
        return Placement(None, Reason.NO_ROOM)

    def relieve(self, view: View, replica: ReplicaView) -> None:
        """Pause, then mark, programs by pause rank until all unmarked claims fit; unmark where there is room."""
        account = replica.account
        while self.free_tokens(replica) + account.marked_tokens < 0:
            program = view.first_to_pause(replica)
            if program is None or not view.propose_pause(program, Reason.THRASHING):
                break
        while self.free_tokens(replica) + account.marked_tokens < 0:
            program = view.first_to_mark(replica)
            if program is None or not view.propose_mark(program, Reason.THRASHING):
                break
        while (marked := view.last_marked(replica)) is not None:
            if self.free_tokens(replica) + account.marked_tokens < marked.claim_tokens:
                break
            if not view.propose_unmark(marked, Reason.RELIEVED):
                break

    def _fits(self, program: ProgramView, replica: ReplicaView) -> bool:
        account = replica.account
        own_tokens, headroom_tokens = program.claim_tokens, 0.0
        if account.active_count:
            own_tokens -= self.shared_tokens
            headroom_tokens = self.headroom_ratio * (account.capacity_tokens or 0)
        return own_tokens <= self.free_tokens(replica) - headroom_tokens
