"""`sticky`: session affinity by consistent hashing, as KV-aware load balancers do it. Nobody is held for memory.

Rendezvous hashing: a program goes to the replica with the highest hash of (program id, replica id), so when a
replica goes only its own programs move, and when it comes back only they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.helpers import restore_waiting
from thunderagent.programs.policy import Moment, Placement, Policy, ProgramView, ReplicaView, View


def rendezvous_hash(program_id: str, replica_id: str) -> bytes:
    """Return the weight of a replica for a program: equal on every machine and in every run."""
    return blake2b(f"{replica_id}\0{program_id}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Sticky(Policy):
    """Grant every turn at once on the replica that the program's id hashes to."""

    name: ClassVar[str] = "sticky"
    holds_nobody: ClassVar[bool] = True

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
