"""Counts pauses and restores, and restores elsewhere although there was room at home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from thunderagent.programs.messages import Decision, Pause, Restore
from thunderagent.programs.scheduler import Scheduler


@dataclass(slots=True)
class RestoreFigures:
    """Pauses, and restores of programs that ran before: the first placement of a program is none.

    `moved_count` restores went to another replica than the one where the program's last turn ran, its home, and at
    `moved_with_room_count` of them the home was open and had room: its demand and the program's claim were within what
    the scheduler lets programs claim there. Of a claim all counts, also what the program shares with others. Not among
    these are `moved_from_kept_count`: the first in the queue had waited for so long that the policy keeps a replica for
    it, which nobody else may take.
    """

    pause_count: int = 0
    restore_count: int = 0
    moved_count: int = 0
    moved_with_room_count: int = 0
    moved_from_kept_count: int = 0


class RestoreCounter:
    """Checks decisions right after they were made, while the scheduler's accounts still show why."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.figures = RestoreFigures()
        self._scheduler = scheduler

    def note(self, decision: Pause | Restore, decisions: Sequence[Decision], home_id: str) -> None:
        """Count one of the decisions on an event; `home_id` is where the program's last turn ran, empty if none did."""
        figures = self.figures
        if isinstance(decision, Pause):
            figures.pause_count += 1
        elif home_id:
            figures.restore_count += 1
            if home_id != decision.replica_id:
                figures.moved_count += 1
                if self._has_room(home_id, decision, decisions):
                    if self._keeps_a_replica():
                        figures.moved_from_kept_count += 1
                    else:
                        figures.moved_with_room_count += 1

    def _has_room(self, home_id: str, restore: Restore, decisions: Sequence[Decision]) -> bool:
        """Return whether a restored program would have fitted at its home at that moment.

        The account shows the claims after the whole event: later restores there are subtracted, and later pauses added
        back.
        """
        account = self._scheduler.ledger.accounts[home_id]
        if not account.usable:
            return False
        later = decisions[decisions.index(restore) + 1 :]
        there = [each for each in later if isinstance(each, Pause | Restore) and each.replica_id == home_id]
        later_tokens = sum(
            self._claim_tokens(each.program_id) * (1 if isinstance(each, Restore) else -1) for each in there
        )
        claim_tokens = self._claim_tokens(restore.program_id)
        may_claim_tokens = getattr(self._policy, "low_ratio", 1.0) * account.limit_tokens
        return account.demand_tokens - later_tokens + claim_tokens <= may_claim_tokens

    @property
    def _policy(self) -> object:
        """The policy itself, with whatever parts."""
        return getattr(self._scheduler.policy, "base", self._scheduler.policy)

    def _keeps_a_replica(self) -> bool:
        view, wait_ratio = self._scheduler.view, getattr(self._policy, "wait_ratio", inf)
        first = view.first_waiting()
        return first is not None and view.now_s - first.waiting_since_s > wait_ratio * view.median_residence_s

    def _claim_tokens(self, program_id: str) -> int:
        program = self._scheduler.programs.get(program_id)
        return program.claim_tokens if program is not None else 0
