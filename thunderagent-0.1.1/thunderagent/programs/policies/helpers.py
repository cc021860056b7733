"""Helpers for many policies: checks of their settings, questions to the view, and restoring waiting programs."""

# compiled: they are asked about every turn

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan

from thunderagent.errors import ConfigurationError
from thunderagent.programs.policy import Moment, Policy, ProgramView, ReplicaView, View


def check_not_negative(policy_name: str, settings: object, *names: str) -> None:
    """Raise `ConfigurationError` for the first of these settings that is negative or not a number."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 0:
            raise ConfigurationError(f"{policy_name}: {name} must not be negative, not {value}")


def check_whole_from_one(policy_name: str, settings: object, *names: str) -> None:
    """Raise `ConfigurationError` for the first of these settings that is not a whole number from 1 on."""
    for name in names:
        value = getattr(settings, name)
        if value < 1 or value % 1:
            raise ConfigurationError(f"{policy_name}: {name} must be a whole number, at least 1, not {value}")


def times(ratio: float, value: float) -> float:
    """Return their product; of 0 and infinity it is the ratio."""
    product = ratio * value
    return ratio if isnan(product) else product


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
