"""`sticky`: session affinity by consistent hashing, as KV-aware load balancers do it. Nobody is held for memory.

Rendezvous hashing: a program goes to the replica with the highest hash of (program id, replica id), so when a
replica goes only its own programs move, and when it comes back only they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import ClassVar

from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.policy import ClaimRules, Moment, Placement
from thunderagent.programs.model.view import View
from thunderagent.programs.model.views import ProgramView, ReplicaView
from thunderagent.programs.policies.helpers import restore_waiting


def rendezvous_hash(program_id: str, replica_id: str) -> bytes:
    """Return the weight of a replica for a program: equal on every machine and in every run."""
    return blake2b(f"{replica_id}\0{program_id}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Sticky:
    """Grant every turn at once on the replica that the program's id hashes to."""

    name: ClassVar[str] = "sticky"
    holds_nobody: ClassVar[bool] = True
    claim_rules: ClassVar[ClaimRules] = ClaimRules()
    tick_s: ClassVar[float] = 1.0

    def pause_rank(self, program: ProgramView) -> float:
        """Return the age: unused, because nobody is paused."""
        return program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time: after an outage, the oldest program comes first."""
        return program.opened_s

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return infinity: nobody is paused."""
        return inf

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the replica with the highest rendezvous hash."""
        program_id = program.program_id
        return Placement(
            max(candidates, key=lambda replica: rendezvous_hash(program_id, replica.replica_id)), Reason.POLICY
        )

    def balance(self, view: View, moment: Moment) -> None:
        """Restore programs that waited for a replica to come back."""
        if moment is Moment.REPLICAS_CHANGED:
            restore_waiting(view, self)
