"""A program is opened, spoken of, adopted and released.

Adoption
========
A program passes from one scheduler to another: one writes a record, the next adopts it.

A record says where a program stands without its turns. Whoever carries the turns reports them, as `TurnAdopted` or by
sending them again. So a program with turns in flight is adopted as if its tool ran, with its claim; one that waits, as
a paused one. Adoption makes no decision, because each program stays where it was. Some things are measured anew: how
long it may stay idle, what it shares with others, its hints. What should be cached of its next turn is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from thunderagent.programs.messages import (
    OUTCOMES,
    BranchRecord,
    ProgramCrowdedOut,
    ProgramHinted,
    ProgramJudged,
    ProgramLimits,
    ProgramOpened,
    ProgramRecord,
    ProgramReleased,
    ProgramsAdopted,
    ProgramsReleased,
    Reason,
    SandboxesMeasured,
    SandboxFailed,
    SandboxReady,
    SandboxSums,
    SchedulerSettings,
    ToolEnded,
    ToolStarted,
    TurnAsk,
)
from thunderagent.programs.policy import Moment
from thunderagent.programs.state.book import Book
from thunderagent.programs.state.program import MAIN_BRANCH, Branch, JudgeVerdict, Kind, Level, Phase, Program
from thunderagent.programs.transitions import Core

MOST_HALVINGS: Final = 30

MAX_REFUSED_COUNT: Final = 10_000
"""How many ids of programs that were ended for good are remembered; the oldest is forgotten first."""


class Lives:
    """Handles what happens to a program outside its turns."""

    def __init__(self, core: Core, settings: SchedulerSettings) -> None:
        """Work on the parts of `core`."""
        self._core = core
        self._settings = settings
        self.refused_ids: dict[str, Reason] = {}
        """Programs that were ended for good, judged hopeless or at a limit, and why; their turns are rejected."""

    def handlers(self) -> dict[type[Any], Callable[[Any], Moment | None]]:
        """Return the handler of each event type; it returns why a balance is due, or None."""
        return {
            ProgramOpened: self._program_opened,
            ProgramCrowdedOut: self._program_crowded_out,
            ProgramReleased: self._program_released,
            ProgramsReleased: self._programs_released,
            ProgramJudged: self._program_judged,
            ProgramHinted: self._core.hints.take,
            ToolStarted: self._tool_started,
            ToolEnded: self._tool_ended,
            SandboxReady: self._sandbox_ready,
            SandboxFailed: self._sandbox_failed,
            SandboxesMeasured: self._sandboxes_measured,
        }

    # --- begin ------------------------------------------------------------------------------------------------------

    def has_place(self, tenant: str, *, opens: bool = True) -> bool:
        """Return whether a tenant may have one more program, forgetting the oldest one without a turn if needed.

        A tenant at its own limit forgets one of its own; at the total limit, the tenant with most does. If `opens` is
        false, the program lives already and belonged to nobody until now.
        """
        limits = self._core.limits
        if not limits.is_full(tenant, opens=opens):
            return True
        oldest = limits.whom_to_forget(tenant)
        if oldest is None:
            return False
        self._core.end(oldest, Reason.FORGOTTEN)
        self._core.balance(Moment.PROGRAM_ENDED)  # at once: those that wait come before the newcomer
        return True

    def open(self, event: TurnAsk | ProgramOpened | ProgramRecord, program_id: str) -> Program:
        """Open a program, without placing a turn."""
        program = self._core.book.open(program_id, event.tenant)
        self._core.limits.opened(program)
        self._core.book.join_group(program, event.group_id)
        self._core.families.join(program, event.parent_id)
        program.program_class = event.program_class
        if isinstance(event, ProgramRecord) and event.limits is not None:
            program.program_limits = ProgramLimits(*event.limits)
        return program

    def announced_begins(self, program: Program, event: TurnAsk) -> None:
        """Record what the first turn says of a program that was announced without one."""
        book, families = self._core.book, self._core.families
        program.opened_s = book.now_s
        if event.tenant and not program.tenant:
            group = program.group
            families.leave(program)
            book.leave_group(program)
            self._core.limits.name_tenant(program, event.tenant)
            families.join(program, program.parent_id)
            program.group = None
            if group is not None:
                book.join_group(program, group.group_id)
        if program.group is None:
            book.join_group(program, event.group_id)
        if not program.parent_id:
            families.join(program, event.parent_id)
        program.program_class = program.program_class or event.program_class

    def parent_goes_on(self, program_id: str) -> bool:
        """End the children that a program waited for, and theirs; return whether there were any."""
        program = self._core.book.programs.get(program_id)
        parents, any_ended = [program] if program is not None else [], False
        while parents:
            for child in self._core.families.done_children(parents.pop()):
                if child is not program:  # two may name each other
                    parents.append(child)
                    any_ended = True
                    self._core.end(child, Reason.PARENT_GOES_ON)
        return any_ended

    def _program_opened(self, event: ProgramOpened) -> None:
        core = self._core
        self.refused_ids.pop(event.program_id, None)
        if event.program_id in core.book.programs or not self.has_place(event.tenant):
            return
        program = self.open(event, event.program_id)
        core.limits.hear_of(program)
        if core.routing.routes:
            core.routing.send(program)
        core.book.resize(program)
        program.note(core.book.now_s, "opened", "", None)

    def _program_crowded_out(self, event: ProgramCrowdedOut) -> Moment | None:
        oldest = self._core.limits.whom_to_forget(event.tenant)
        if oldest is not None:
            self._core.end(oldest, Reason.FORGOTTEN)
        return None if oldest is None else Moment.PROGRAM_ENDED

    # --- tools ------------------------------------------------------------------------------------------------------

    def tool_returned(self, program: Program) -> None:
        """Learn how long a finished tool took."""
        self._core.knowledge.tool_returned(program, self._core.book.now_s)
        if self._core.stream.flows:
            self._core.stream.tool_ended(program)

    def _tool_started(self, event: ToolStarted) -> None:
        """Measure the tool from now on, whatever was assumed to have begun at the end of the turn.

        Only the first one since then also begins the hold and the idle limit anew: what follows could go on for ever.
        It shortens no hold, though.
        """
        core, book = self._core, self._core.book
        program = book.programs.get(event.program_id)
        if program is None or program.place.phase is not Phase.ACTING or program.place is book.announced:
            return
        if program.tool_runs:
            core.knowledge.tool_is_another(program)
        if event.tool and not (event.inferred and program.tool_named):
            program.tool, program.tool_named = event.tool, not event.inferred
        is_first = program.acting_since_s <= program.turns_ended_s
        core.limits.hear_of(program, goes_on=not is_first)
        core.tool_began(program)
        hold_s = core.decider.hold_s(core.view, program)
        hold_until_s = book.now_s + hold_s if is_first else max(program.hold_until_s, program.turns_ended_s + hold_s)
        self._act_anew(program, book.now_s, hold_until_s)

    def _tool_ended(self, event: ToolEnded) -> None:
        """Hold a program that will be back at once while that pays; if nobody said so, as long as when its tool began.

        For each further end since its turn it is half as long: together at most twice, however often they come.
        """
        core, program = self._core, self._core.book.programs.get(event.program_id)
        if program is None or not program.tool_runs:
            return
        core.limits.hear_of(program, goes_on=True)
        self.tool_returned(program)
        held_s = core.decider.hold_s if event.inferred else core.hints.threshold_s or core.decider.hold_s
        hold_s = held_s(core.view, program)
        hold_until_s = core.book.now_s + hold_s / 2.0 ** min(program.tool_ends_count, MOST_HALVINGS)
        program.tool_ends_count += 1
        self._act_anew(program, program.acting_since_s, hold_until_s, is_hinted=event.inferred)

    def _act_anew(self, program: Program, since_s: float, hold_until_s: float, *, is_hinted: bool = True) -> None:
        core, keeps = self._core, False
        if is_hinted and program.hint is not None:
            hold_until_s, keeps = core.hints.hold_until_s(program, program.hint, hold_until_s)
        core.book.act_anew(program, since_s, hold_until_s, hint_keeps=keeps)
        if program.place.kind is Kind.ACTING:
            core.limits.watch(program)
        else:
            core.watch_paused(program)

    # --- judges -----------------------------------------------------------------------------------------------------

    def _program_judged(self, event: ProgramJudged) -> Moment | None:
        core, program = self._core, self._core.book.programs.get(event.program_id)
        if program is None or event.generation != program.generation:
            return None
        settings, verdicts = self._settings, program.verdicts
        if not verdicts.add(
            JudgeVerdict(event.turn_count, event.will_succeed, event.confidence_ratio),
            fail_count=settings.judge_fail_count,
            least_confidence_ratio=settings.judge_confidence_ratio,
        ):
            return None
        assert verdicts.level is not None, "a verdict makes a level"
        core.knowledge.judge_record.level_counts[verdicts.level] += 1
        prediction = "success" if event.will_succeed else "failure"
        why = f"{prediction} by {event.confidence_ratio:.2f} at turn {event.turn_count}: {verdicts.level.name.lower()}"
        program.note(core.book.now_s, "judged", why, program.replica_id)
        if settings.judge_ends_hopeless and verdicts.level is Level.LOWEST:
            self.end_for_good(program, Reason.HOPELESS)
            return Moment.PROGRAM_ENDED
        core.book.rank_anew(program)
        return None

    def end_for_good(self, program: Program, reason: Reason) -> None:
        """End a program, and reject its turns until it is released."""
        self.refused_ids[program.program_id] = reason
        if len(self.refused_ids) > MAX_REFUSED_COUNT:
            del self.refused_ids[next(iter(self.refused_ids))]
        self._core.end(program, reason)

    # --- sandboxes --------------------------------------------------------------------------------------------------

    def _sandbox_ready(self, event: SandboxReady) -> None:
        program = self._core.book.programs.get(event.program_id)
        if program is not None:
            why = f"{event.sandbox_id} after {event.prepare_s:.1f} s"
            program.note(self._core.book.now_s, "sandbox ready", why, program.replica_id)

    def _sandbox_failed(self, event: SandboxFailed) -> None:
        program = self._core.book.programs.get(event.program_id)
        if program is not None:
            why = f"{event.sandbox_id}: {event.why}"
            program.note(self._core.book.now_s, "sandbox failed", why, program.replica_id)

    def _sandboxes_measured(self, event: SandboxesMeasured) -> None:
        self._core.book.sandboxes = SandboxSums(event.sandbox_count, event.disk_bytes, event.memory_bytes)

    # --- end --------------------------------------------------------------------------------------------------------

    def _program_released(self, event: ProgramReleased) -> Moment | None:
        self.refused_ids.pop(event.program_id, None)
        program = self._core.book.programs.get(event.program_id)
        if program is None or event.generation not in (None, program.generation):
            return None
        if event.outcome in OUTCOMES:
            record = self._core.knowledge.judge_record
            record.program_ended(event.outcome, program.verdicts.first_failure_turn_count)
        self._core.end(program, Reason.RELEASED)
        return Moment.PROGRAM_ENDED

    def _programs_released(self, event: ProgramsReleased) -> Moment:
        for program_id in event.program_ids:
            self.refused_ids.pop(program_id, None)
            program = self._core.book.programs.get(program_id)
            if program is not None:
                self._core.end(program, Reason.RELEASED)
        return Moment.PROGRAM_ENDED


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
        program.hold_until_s = held_since_s + core.decider.hold_s(core.view, program)
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
