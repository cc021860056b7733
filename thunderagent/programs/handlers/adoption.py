"""A program passes from one scheduler to another: one writes a record, the next adopts it.

Theory of operation
===================
A record says where a program stands without its turns. Whoever carries the turns reports them, as `TurnAdopted` or by
sending them again. So a program with turns in flight is adopted as if its tool ran, with its claim; one that waits, as
a paused one. Adoption makes no decision, because each program stays where it was. Some things are measured anew: how
long it may stay idle, what it shares with others, its hints. What should be cached of its next turn is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunderagent.programs.book.book import Book
from thunderagent.programs.handlers.lives import Lives
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.records.kept import BranchRecord, ProgramRecord, ProgramsAdopted
from thunderagent.programs.model.turn import MAIN_BRANCH, Branch
from thunderagent.programs.policy import Moment
from thunderagent.programs.transitions import Core


def record_of(program: Program, book: Book) -> ProgramRecord:
    """Return a record from which another scheduler can go on. Cost: O(branches)."""
    place, replica = program.place, book.replicas.get(program.replica_id or "")
    if place is book.announced:
        standing = "announced"
    elif place.active:
        standing = "active"
    elif not place.admitted:
        standing = "unadmitted"
    else:
        standing = "idle" if place is book.idle else "paused"
    return ProgramRecord(
        program.program_id,
        program.tenant,
        program.group_id,
        program.parent_id,
        program.program_class,
        standing,
        program.replica_id or "",
        replica.residency.resident_tokens(program.generation) if replica is not None else 0,
        tuple(
            [
                BranchRecord(
                    branch_id,
                    branch.context_tokens,
                    branch.prompt_tokens,
                    branch.tokens_per_byte_ratio,
                    branch.parent_id,
                    branch.parent_turns_count,
                )
                for branch_id, branch in program.branches.items()
            ]
        ),
        book.now_s - program.opened_s,
        book.now_s - program.acting_since_s,
        program.tool,
        program.tool_named,
        program.tool_runs,
        program.priority,
        program.turn_count - len(program.in_flight),  # they count again where they are adopted
        program.first_prompt_tokens,
        program.larger_tokens_total,
        program.prompt_tokens_total,
        program.output_tokens_total,
        program.cached_tokens_total,
        program.held_s_total,
        program.ideal_s_total,
        program.program_limits,
    )


class Adoption:
    """Adopts programs of another scheduler."""

    def __init__(self, core: Core, lives: Lives) -> None:
        """Work on the parts of `core`."""
        self._core = core
        self._lives = lives

    def handlers(self) -> dict[type[Any], Callable[[Any], Moment | None]]:
        """Return the handler of each event type; it returns why a balance is due, or None."""
        return {ProgramsAdopted: self._programs_adopted}

    def _programs_adopted(self, event: ProgramsAdopted) -> None:
        core, lives = self._core, self._lives
        for record in event.programs:
            known = record.program_id in core.book.programs or record.program_id in lives.refused_ids
            if not known and lives.has_place(record.tenant):
                program = lives.open(record, record.program_id)
                _take_in(program, record, core.book.now_s)
                self._place(program, record)

    def _place(self, program: Program, record: ProgramRecord) -> None:
        core, book = self._core, self._core.book
        core.limits.hear_of(program)
        replica = book.replicas.get(record.replica_id)
        if replica is not None:
            program.replica_id = replica.replica_id
        if core.routing.routes:
            core.routing.send(program)
        if record.standing == "announced":
            book.resize(program)
            return
        held_since_s = book.now_s  # a turn of it may run, which is reported later
        if record.tool_runs:
            core.tool_began(program)
            held_since_s = program.acting_since_s
        program.hold_until_s = held_since_s + core.policy.hold_s(core.view, program)
        may_stay = replica is not None and replica.open_to_programs
        if record.standing == "active" and may_stay and program.routed_to in (None, record.replica_id):
            assert replica is not None, "it is open"
            book.move(program, replica.acting, resized=True)
            core.limits.watch(program)
            core.families.got_claim(program)
        else:
            is_idle = record.standing == "idle" or not program.context_tokens
            resting = book.idle if is_idle else book.queue.resting
            book.resize(program)
            is_unadmitted = record.standing == "unadmitted" and core.admission is not None
            book.move(program, book.dismissed if is_unadmitted else resting)
            if not is_idle and program.place.admitted:
                core.stand(program)  # its route may send it to a certain replica
            core.watch_paused(program)
        if replica is not None and record.resident_tokens:
            replica.residency.report(program.generation, record.resident_tokens)


def _take_in(program: Program, record: ProgramRecord, now_s: float) -> None:
    """Write down what only the program itself keeps of a record."""
    program.opened_s = now_s - record.age_s
    program.acting_since_s = program.turns_ended_s = now_s - record.acting_s
    program.branches = {each.branch_id: _branch_of(each) for each in record.branches}
    program.branches.setdefault(MAIN_BRANCH, Branch())
    program.tool, program.tool_named = record.tool, record.tool_named
    program.priority = record.priority
    program.turn_count = record.turn_count
    program.first_prompt_tokens = record.first_prompt_tokens
    program.larger_tokens_total = record.larger_tokens_total
    program.learned_count = record.turn_count if record.first_prompt_tokens else 0
    program.prompt_tokens_total = record.prompt_tokens_total
    program.output_tokens_total = record.output_tokens_total
    program.cached_tokens_total = record.cached_tokens_total
    program.held_s_total = record.held_s_total
    program.ideal_s_total = record.ideal_s_total
    if record.turn_count:
        program.last_ended_s = program.acting_since_s
    program.note(now_s, "adopted", record.standing, record.replica_id or None)


def _branch_of(record: BranchRecord) -> Branch:
    branch = Branch()
    branch.context_tokens = record.context_tokens
    branch.prompt_tokens = record.prompt_tokens
    branch.tokens_per_byte_ratio = record.tokens_per_byte_ratio
    branch.parent_id = record.parent_id
    branch.parent_turns_count = record.parent_turns_count
    return branch
