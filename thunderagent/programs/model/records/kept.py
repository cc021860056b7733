"""What another scheduler needs to go on with a program."""

# interpreted: the event log reads the types of the fields, which a compiled class does not keep

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thunderagent.programs.messages import ProgramLimits


class BranchRecord(NamedTuple):
    """A branch after its last finished turn."""

    branch_id: str
    context_tokens: int
    prompt_tokens: int = 0
    tokens_per_byte_ratio: float | None = None
    parent_id: str = ""
    parent_turns_count: int = 0


class ProgramRecord(NamedTuple):
    """A program as one scheduler had it: where it stands, what it claims and what it used. Fields are only added.

    Times are durations before the record was written: two schedulers share no clock.
    """

    program_id: str
    tenant: str = ""
    group_id: str = ""
    parent_id: str = ""
    program_class: str = ""
    standing: str = "announced"
    """`announced`, `active`, `paused`, `idle` (its claim went at the idle limit) or `unadmitted`."""
    replica_id: str = ""
    """Where it is active, or was when it was paused."""
    resident_tokens: int = 0
    """Its tokens in that replica's memory."""
    branches: tuple[BranchRecord, ...] = ()
    age_s: float = 0.0
    acting_s: float = 0.0
    """How long it has had no turn."""
    tool: str = ""
    tool_named: bool = False
    tool_runs: bool = False
    priority: int = 0
    turn_count: int = 0
    first_prompt_tokens: int = 0
    larger_tokens_total: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    cached_tokens_total: int = 0
    held_s_total: float = 0.0
    ideal_s_total: float = 0.0
    limits: ProgramLimits | None = None

    def older(self, elapsed_s: float) -> ProgramRecord:
        """Return the same record, `elapsed_s` later."""
        return self._replace(age_s=self.age_s + elapsed_s, acting_s=self.acting_s + elapsed_s)


@dataclass(slots=True)
class ProgramsAdopted:
    """These programs belonged to another scheduler, which is gone; all are in the pool of a replica.

    A program that is already live stays as it is. One whose replica is not open is paused. Its turns are reported
    separately.
    """

    now_s: float
    replica_id: str
    programs: tuple[ProgramRecord, ...]
