"""Programs, their tools and their sandboxes begin and end, and judges rate them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from thunderagent.programs.messages import ProgramLimits, TurnAsk
from thunderagent.programs.model.advice.verdicts import OUTCOMES, Level, Verdict
from thunderagent.programs.model.decisions import Reason
from thunderagent.programs.model.events import (
    ProgramCrowdedOut,
    ProgramHinted,
    ProgramJudged,
    ProgramOpened,
    ProgramReleased,
    ProgramsReleased,
    ToolEnded,
    ToolStarted,
)
from thunderagent.programs.model.fleet_events import SandboxesMeasured, SandboxFailed, SandboxReady, SandboxSums
from thunderagent.programs.model.places import Kind, Phase
from thunderagent.programs.model.program import Program
from thunderagent.programs.model.records.kept import ProgramRecord
from thunderagent.programs.model.settings import SchedulerSettings
from thunderagent.programs.policy import Moment
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
        if self._core.stream.flows_whole:
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
        hold_s = core.policy.hold_s(core.view, program)
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
        held_s = core.policy.hold_s if event.inferred else core.hints.threshold_s or core.policy.hold_s
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
            Verdict(event.turn_count, event.will_succeed, event.confidence_ratio),
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
