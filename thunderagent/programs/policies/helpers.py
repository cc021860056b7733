"""Helpers for many policies: questions to the view, and restoring waiting programs."""

# compiled: they are asked about every turn

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from thunderagent.programs.model.policy import Moment, Policy
from thunderagent.programs.model.view import View
from thunderagent.programs.model.views import ProgramView, ReplicaView

FEW_COUNT: Final = 16
"""How many expired programs are looked at first to make room for one: mostly the first is enough."""

MOST_EXPIRED_COUNT: Final = 256
"""How many are looked at in one event."""


def home_of(program: ProgramView, candidates: Sequence[ReplicaView]) -> ReplicaView | None:
    """Return the candidate on which the program is active or was last."""
    for replica in candidates:
        if replica.replica_id == program.replica_id:
            return replica
    return None


def largest_capacity_tokens(candidates: Sequence[ReplicaView]) -> float:
    """Return the capacity of the largest replica; infinite if one is unknown."""
    return max(
        inf if replica.account.capacity_tokens is None else replica.account.capacity_tokens for replica in candidates
    )


def without_routed_before(view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
    """Return the candidates without those for which a routed program waits that comes before this one."""
    if not view.routed_count:
        return candidates
    return [replica for replica in candidates if view.first_routed_before(program, replica) is None]


def first_expired_for(
    view: View, program: ProgramView, replica: ReplicaView, missing_tokens: float, grown_tokens: float = 0.0
) -> tuple[Sequence[ProgramView], bool]:
    """Return the first expired programs there that free enough for another one, or all, and whether they do.

    Each frees what it would grow by, too, but at most `grown_tokens`. `MOST_EXPIRED_COUNT` of them pass for enough: if
    they are not, the next ones go in the next event. Cost: O(cuts of those that are returned).
    """
    expired: Sequence[ProgramView] = ()
    account = replica.account
    most_tokens = account.acting.tokens + (account.growth_tokens if grown_tokens else 0)  # nobody frees more than that
    if missing_tokens > most_tokens and account.acting.count < account.active_count:  # it would not be alone either
        return expired, False
    for count in (FEW_COUNT, MOST_EXPIRED_COUNT):
        expired, left_tokens = view.first_expired_few(replica, count), missing_tokens
        for index, freed_tokens in enumerate(view.freed_tokens(expired, program, replica)):
            left_tokens -= freed_tokens + min(expired[index].growth_tokens, grown_tokens)
            if left_tokens <= 0:
                return expired[: index + 1], True
        if len(expired) < count:
            break
    return expired, len(expired) == MOST_EXPIRED_COUNT


def worth_a_look(view: View, moment: Moment) -> Sequence[ReplicaView]:
    """Return replicas that may have room or too little of it: those that changed, or all on a tick."""
    return view.replicas if moment in (Moment.TICK, Moment.REPLICAS_CHANGED) else view.changed_replicas


def restore_waiting_for(view: View, policy: Policy, replica: ReplicaView) -> None:
    """Restore programs that wait for that replica alone, by restore rank, until `place` holds the first of them."""
    while waiting := view.first_waiting_for(replica, 1):
        placement = policy.place(view, waiting[0], [replica])
        if placement.replica is None or not view.propose_restore(waiting[0], placement.replica, placement.reason):
            return


def restore_waiting(view: View, policy: Policy, replicas: Sequence[ReplicaView] | None = None) -> None:
    """Restore programs with a turn, by restore rank, wherever `place` says, until it holds the first of them.

    With `replicas`, only on those, for example because nothing changed on the others.
    """
    replicas = view.replicas if replicas is None else replicas
    while replicas and (program := view.first_waiting()) is not None:
        placement = policy.place(view, program, replicas)
        if placement.replica is None or not view.propose_restore(program, placement.replica, placement.reason):
            return
