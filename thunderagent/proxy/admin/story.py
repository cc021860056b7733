"""The admin API's report on one program: how it got into its state, and what must happen for it to go on.

All figures are facts of the scheduler and hold under any policy. Which of them decides is up to the policy. So the
sentence made of them says what is missing, and leaves open what else a policy keeps free.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import Literal

from pydantic import Field

from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.program import Level, Phase, Program, Status, Turn
from thunderagent.proxy.admin.reports import ProgramReport, program_fields
from thunderagent.proxy.gate.bodies import Report
from thunderagent.runtime import Runtime

LevelName = Literal["high", "medium", "low", "lowest"]
LEVEL_NAMES: dict[Level, LevelName] = {
    Level.HIGH: "high",
    Level.MEDIUM: "medium",
    Level.LOW: "low",
    Level.LOWEST: "lowest",
}


class StoryReport(Report):
    """One happening in a program's life."""

    ago_s: float
    what: str
    why: str
    replica_id: str | None
    claim_tokens: int
    began_ago_s: float | None = Field(description="of a turn that ended, when it got its lease; null if it never did")


class TurnReport(Report):
    """A turn that has not ended: held, or in flight on a replica."""

    turn_id: int
    branch_id: str
    replica_id: str | None
    prompt_tokens: int = Field(description="as estimated from its bytes")
    output_tokens: int = Field(description="as far as was seen")
    arrived_ago_s: float
    granted_ago_s: float | None = Field(description="null while it is held")
    started_ago_s: float | None = Field(description="when the first byte of its answer came")


class RoomReport(Report):
    """A replica that a program could go to, in tokens."""

    replica_id: str
    free_tokens: int | None = Field(description="what nobody claims; less than 0 if more is claimed than there is")
    kept_tokens: int = Field(
        description="what the policy keeps free of that, mostly for growth; negative where more than fit may come"
    )
    needed_tokens: int = Field(description="what the program would add, without what others there claim already")
    missing_tokens: int = Field(description="what is needed and kept, less what is free")
    growth_tokens: int = Field(description="what programs there are expected to grow by, and this one if it is new")
    resident_tokens: int = Field(description="of its history, what is expected to lie in memory there")
    is_home: bool


class WaitingReport(Report):
    """Why a program's turns are held."""

    reason: str
    for_s: float
    ahead_count: int = Field(description="programs before it in the queue")
    claim_tokens: int
    let_in_in_s: float | None = Field(
        description="when it is let in whether there is room or not, because its client would give up; null: never"
    )
    replicas: list[RoomReport]
    what_must_happen: str


class HoldingReport(Report):
    """A program that keeps its claim while its tool runs."""

    tool: str
    for_s: float
    hold_until_in_s: float | None = Field(
        description="less than 0: others get its room if they need it; null: for ever"
    )


class HintedReport(Report):
    """What its client said of its next turn."""

    next_turn_in_s: float | None = Field(
        description="from when it counts: now, less than 0 if it is overdue; null if only `keep` was said"
    )
    counts: bool = Field(description="false while a turn is with us, from the end of which it will count")
    keep: str
    believed_ratio: float = Field(description="what its client says, and no more than its hints were right so far")
    keeps_claim: bool = Field(description="whether it keeps the claim for longer than the policy would have")


class VerdictReport(Report):
    """What a judge said."""

    turn_count: int = Field(description="turns of the program that it was about")
    prediction: Literal["success", "failure"]
    confidence_ratio: float


class JudgedReport(Report):
    """What judges think of a program."""

    level: LevelName
    failure_count: int = Field(description="verdicts of failure among all")
    verdicts: list[VerdictReport] = Field(description="the last two")


class ProgramStoryReport(ProgramReport):
    """A program now, why it waits or what it holds, and how it came there."""

    judged: JudgedReport | None = Field(description="null before the first verdict")
    waiting: WaitingReport | None
    holding: HoldingReport | None
    hinted: HintedReport | None = Field(description="null if nothing was said since its last turn came")
    turns: list[TurnReport]
    story: list[StoryReport]


def program_story(runtime: Runtime, program: Program) -> ProgramStoryReport:
    """Report on one program with its story, oldest entry first. Costs O(n log n) of n waiting programs."""
    now_s = runtime.now_s()
    scheduler = _scheduler_of(runtime, program)
    story = [
        StoryReport(
            ago_s=round(now_s - entry.now_s, 3),
            what=entry.what,
            why=entry.why,
            replica_id=entry.replica_id,
            claim_tokens=entry.tokens,
            began_ago_s=_ago_s(entry.began_s, now_s),
        )
        for entry in program.story()
    ]
    return ProgramStoryReport(
        **program_fields(program, now_s, runtime.served.name_of_pool(program)),
        judged=_judged(program),
        waiting=_waiting(scheduler, program, now_s),
        holding=_holding(program, now_s),
        hinted=_hinted(scheduler, program, now_s),
        turns=[_turn(turn, now_s) for turn in (*program.in_flight.values(), *program.held.values())],
        story=story,
    )


def needs_of(runtime: Runtime, program: Program) -> str:
    """Return what must happen for a program to go on; empty if nothing of it is held. Cost: as `program_story`."""
    waiting = _waiting(_scheduler_of(runtime, program), program, runtime.now_s())
    return "" if waiting is None else waiting.what_must_happen


def _scheduler_of(runtime: Runtime, program: Program) -> Scheduler:
    schedulers = runtime.pools.schedulers
    return next((each for each in schedulers if each.programs.get(program.program_id) is program), runtime.scheduler)


def _judged(program: Program) -> JudgedReport | None:
    verdicts = program.verdicts
    if verdicts.level is None:
        return None
    return JudgedReport(
        level=LEVEL_NAMES[verdicts.level],
        failure_count=verdicts.failure_count,
        verdicts=[
            VerdictReport(
                turn_count=each.turn_count,
                prediction="success" if each.will_succeed else "failure",
                confidence_ratio=each.confidence_ratio,
            )
            for each in verdicts.last
        ],
    )


def _turn(turn: Turn, now_s: float) -> TurnReport:
    return TurnReport(
        turn_id=turn.turn_id,
        branch_id=turn.branch_id,
        replica_id=turn.account_id,
        prompt_tokens=turn.prompt_tokens,
        output_tokens=turn.output_tokens,
        arrived_ago_s=round(now_s - turn.arrived_s, 3),
        granted_ago_s=None if turn.account_id is None else round(now_s - turn.granted_s, 3),
        started_ago_s=_ago_s(turn.started_s, now_s),
    )


def _ago_s(at_s: float | None, now_s: float) -> float | None:
    return None if at_s is None else round(now_s - at_s, 3)


def _waiting(scheduler: Scheduler, program: Program, now_s: float) -> WaitingReport | None:
    if not program.held:
        return None
    ahead_count = scheduler.queue.ahead_count(program) if program.status is Status.PAUSED else 0
    rooms = _rooms(scheduler, program)
    granting = {replica.replica_id for replica in scheduler.granting_replicas}
    suspended_for = _suspended_for(scheduler, program)
    due_s = inf if program.status is Status.ACTIVE else min(map(scheduler.deadlines.due_s_of, program.held.values()))
    return WaitingReport(
        reason=program.hold_reason,
        for_s=round(now_s - program.waiting_since_s, 3),
        ahead_count=ahead_count,
        claim_tokens=program.claim_tokens,
        let_in_in_s=round(max(0.0, due_s - now_s), 3) if isfinite(due_s) else None,
        replicas=rooms,
        what_must_happen=_what_must_end(program)
        if program.marked
        else f"grants must go on, which are suspended for: {', '.join(suspended_for)}"
        if suspended_for
        else _what_must_happen([room for room in rooms if room.replica_id in granting], program, ahead_count)
        if program.admitted
        else _who_must_admit(scheduler),
    )


def _what_must_end(program: Program) -> str:
    count = len(program.in_flight)
    what = "its turn in flight" if count == 1 else f"its {count:,} turns in flight"
    return f"{what} on {program.replica_id} must end: the program leaves ({', '.join(program.leaves_for)})"


def _who_must_admit(scheduler: Scheduler) -> str:
    count = scheduler.book.admitted_count
    admitted = "1 program is admitted" if count == 1 else f"{count:,} programs are admitted"
    return f"a place must become free: {admitted} (admission {scheduler.admission_name})"


def _suspended_for(scheduler: Scheduler, program: Program) -> list[str]:
    """Return why a program with held turns is granted nothing where it may go; empty if something might be granted.

    An unadmitted program must first be admitted, which is possible while any replica grants.
    """
    if program.status is Status.ACTIVE:
        return list(scheduler.replicas[program.replica_id or ""].suspended_for)
    if program.admitted and program.routed_to is not None:
        waited_for = scheduler.replicas.get(program.routed_to)
        return [] if waited_for is None else list(waited_for.suspended_for)
    if scheduler.granting_replicas:
        return []
    return list(dict.fromkeys(cause for replica in scheduler.open_replicas for cause in replica.suspended_for))


def _rooms(scheduler: Scheduler, program: Program) -> list[RoomReport]:
    view = scheduler.view
    rooms = []
    for replica in scheduler.open_replicas:
        if program.routed_to not in (None, replica.replica_id):
            continue
        account = replica.account
        free_tokens = int(account.limit_tokens) - account.demand_tokens if isfinite(account.limit_tokens) else None
        needed_tokens = view.claim_tokens_on(program, replica)
        kept_tokens = int(scheduler.policy.kept_tokens(view, program, replica))
        rooms.append(
            RoomReport(
                replica_id=replica.replica_id,
                free_tokens=free_tokens,
                kept_tokens=kept_tokens,
                needed_tokens=needed_tokens,
                missing_tokens=0 if free_tokens is None else max(0, needed_tokens + kept_tokens - free_tokens),
                growth_tokens=account.growth_tokens + (0 if program.turn_count else program.growth_tokens),
                resident_tokens=min(program.claim_tokens, view.resident_tokens(program, replica)),
                is_home=replica.replica_id == program.replica_id,
            )
        )
    return rooms


def _what_must_happen(rooms: Sequence[RoomReport], program: Program, ahead_count: int) -> str:
    """Return in one sentence what a program waits for: the programs before it, and room where least is missing."""
    if not rooms:
        return "a replica must come up"
    room = min(rooms, key=_order_of_need)
    first = ""
    if ahead_count:
        first = f"{ahead_count:,} {'program goes' if ahead_count == 1 else 'programs go'} first; then "
    return first + _what_is_missing(room, program, is_first=not ahead_count)


def _order_of_need(room: RoomReport) -> tuple[bool, int, int]:
    """Order replicas by the missing room, less what is already there."""
    return room.missing_tokens > 0, room.missing_tokens - room.resident_tokens, -(room.free_tokens or 0)


def _what_is_missing(room: RoomReport, program: Program, *, is_first: bool) -> str:
    where = room.replica_id
    if room.resident_tokens:
        where += (
            f", where {room.resident_tokens:,} tokens of its {'history' if program.turn_count else 'prompt'} are cached"
        )
    if room.missing_tokens:
        kept = ""
        if room.free_tokens is not None and room.free_tokens >= room.needed_tokens:
            kept = (
                f": {room.needed_tokens:,} are needed and {room.free_tokens:,} are free,"
                f" but {room.kept_tokens:,} are kept for programs to grow"
            )
        return f"{room.missing_tokens:,} tokens must become free on {where}{kept}"
    if not is_first:
        return f"it fits on {where}, if enough room is left"
    return f"the policy must let it in: it fits on {where}, but the policy limits active programs"


def _holding(program: Program, now_s: float) -> HoldingReport | None:
    if program.status is not Status.ACTIVE or program.phase is not Phase.ACTING:
        return None
    until_in_s = program.hold_until_s - now_s
    return HoldingReport(
        tool=program.tool,
        for_s=round(now_s - program.acting_since_s, 3),
        hold_until_in_s=round(until_in_s, 3) if isfinite(until_in_s) else None,
    )


def _hinted(scheduler: Scheduler, program: Program, now_s: float) -> HintedReport | None:
    hint = program.hint
    if hint is None:
        return None
    in_s = hint.next_turn_in_s
    if in_s is not None and hint.given_s is not None:
        in_s -= now_s - hint.given_s
    return HintedReport(
        next_turn_in_s=None if in_s is None else round(in_s, 3),
        counts=hint.given_s is not None,
        keep=hint.keep,
        believed_ratio=round(scheduler.knowledge.hints.confidence_ratio(program, hint.confidence_ratio), 3),
        keeps_claim=program.hint_keeps,
    )
