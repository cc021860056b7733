"""`migrate`: programs that wait for a replica with a long turn go where there is room.

Theory of operation
===================
The second of the three default policies of Nalar (arXiv 2601.05109, section 6.1) moves a job that waits behind a long
one to another instance. Here a program with a turn waits for the replica of its route; without a route, for the one
with its history. If it has waited for `wait_s`, and a turn on that replica has run for `long_turn_s`, it goes to the
replica with most room that its route allows, if it fits there. The first `looked_at_count` waiting programs are checked
per period, and as many of those bound to replicas by routes, shared among the replicas. A turn that an engine already
has cannot be moved. The numbers are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Reason
from thunderagent.programs.policies.global_policies.room import emptiest_first, free_tokens
from thunderagent.programs.policy import GlobalPolicy, ProgramView, View


@dataclass(frozen=True, slots=True)
class Migrate(GlobalPolicy):
    """Move programs from behind long turns."""

    long_turn_s: float = 10.0
    """A turn that runs for longer is long."""
    wait_s: float = 1.0
    """A program that waited longer may move."""
    looked_at_count: int = 256
    """Waiting programs looked at in a period."""
    period_s: float = 1.0
    """Seconds between two looks."""
    name: ClassVar[str] = "migrate"

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        if not (self.long_turn_s >= 0 and self.wait_s >= 0 and self.looked_at_count >= 1 and self.period_s > 0):
            raise ConfigurationError(
                "migrate: long_turn_s and wait_s are not negative, looked_at_count and period_s are over 0"
            )

    def decide(self, view: View) -> None:
        """Move programs that wait behind a long turn and fit elsewhere."""
        long_turns = {
            replica.replica_id for replica in view.replicas if view.longest_turn_s(replica) >= self.long_turn_s
        }
        if not long_turns:
            return
        for program in list(self._waiting(view)):
            waits_for = program.routed_to or program.replica_id
            if waits_for not in long_turns or view.now_s - program.waiting_since_s < self.wait_s:
                continue
            others = [replica for replica in view.targets(program) if replica.replica_id != waits_for]
            target = min(others, key=emptiest_first, default=None)
            if target is not None and program.claim_tokens <= free_tokens(target):
                view.propose_migrate(program, target, Reason.LONG_TURN)

    def _waiting(self, view: View) -> Iterator[ProgramView]:
        yield from view.first_waiting_few(self.looked_at_count)
        routed_to = [replica for replica in view.replicas if view.waiting_count_for(replica)]
        for replica in routed_to:
            yield from view.first_waiting_for(replica, max(1, self.looked_at_count // len(routed_to)))
