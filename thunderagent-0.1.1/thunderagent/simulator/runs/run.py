"""One run: programs, tools, engines and the scheduler in virtual time.

Theory of operation
-------------------
`Simulation` takes the place of clients, proxy and runtime on a server: it sends the scheduler the same events, and
carries out its decisions. The scheduler and its policy cannot tell the difference.

Everything that happens is an entry of one agenda (`agenda.py`), so a run is a fold over events: no clock, no threads,
and no randomness besides the seed's. The same scenario, policy and workload always give the same run.

A program's life: its turn arrives (`TurnAsk`, with the scenario's bytes a token as its size), waits for its
`Grant`, goes to that replica's engine, runs there (`TurnStarted` at its first token, `TurnProgressed` every second,
unless answers come whole), and finishes with its exact usage and the name of its tool. Then the tool runs, and its next
turn arrives. After its last turn no tool runs: it is released, or, if the scenario says so, simply falls silent.

Besides, every replica is polled every second, and a tick comes as often as on a server. A turn that the engine refuses
fails, and ends its program; one that an outage breaks off fails and arrives again, as if the proxy retried it
elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from random import Random

from thunderagent.programs.messages import (
    Decision,
    Event,
    Grant,
    Pause,
    ProgramJudged,
    ProgramReleased,
    Reject,
    Release,
    ReplicaDown,
    ReplicaPolled,
    ReplicaUp,
    Restore,
    Tick,
    TierPolled,
    TurnAsk,
    TurnEnd,
    TurnLimited,
    TurnProgressed,
    TurnStarted,
    WorkPolled,
)
from thunderagent.programs.policy import Policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.programs.state.program import Status
from thunderagent.simulator.engine.records import FinishedRequest
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.figures.restores import RestoreCounter
from thunderagent.simulator.runs.agenda import Agenda
from thunderagent.simulator.runs.clients import RunningProgram, Supplied, Supply
from thunderagent.simulator.runs.replicas import Outage, Reading, SimulatedReplica
from thunderagent.simulator.runs.scenario import Scenario, available_bytes, check_memory, estimate_bytes
from thunderagent.simulator.runs.tally import Progress, Tally
from thunderagent.simulator.runs.tools import Needs, ToolHost
from thunderagent.simulator.workloads.contexts import Context, TokenSpace
from thunderagent.simulator.workloads.plans import Workload
from thunderagent.tools.table import LOOKED_AHEAD_COUNT, needed_in_s

FAILURE_PAUSE_S = 1.0
"""Pause between a failed program and its replacement; without it a run of refused programs would never end."""

FOLLOWING_PERIOD_S = 5.0
"""How often a trainer asks for the number of useful programs."""

PROGRESS_PERIOD_S = 1.0
"""How often the scheduler hears a turn's progress, as from the proxy."""


class Simulation:
    """One run of a workload under a policy; `run` it once."""

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        policy: Policy,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        foresight: dict[str, float] | None = None,
        agenda: Agenda | None = None,
        turn_ids_from: int = 0,
        wanted_count: Callable[[Scheduler], int] | None = None,
    ) -> None:
        """Prepare a run. Raises ConfigurationError if it would not fit in memory.

        `foresight` is for a clairvoyant policy, which the caller made with the same dictionary: from the arrival of a
        program's turn on it says for how many seconds the tool after that turn will run; `inf` for the last one.
        `agenda` is shared with other runs (`together.py`), whose turns have other numbers than those from
        `turn_ids_from` on. `wanted_count` says how many programs a closed loop keeps going, at most the scenario's: it
        is asked every `FOLLOWING_PERIOD_S`, and when one ends.
        """
        check_memory(estimate_bytes(scenario, workload), available_bytes())
        self.scheduler = Scheduler(policy, scenario.scheduler)
        self.handle: Callable[[Event], list[Decision]] = self.scheduler.handle
        """The receiver of events, which returns decisions."""
        self.events: list[tuple[Event, tuple[Decision, ...]]] = []
        self._scenario = scenario
        self._workload_name = workload.name
        self._supply = Supply(scenario, workload)
        self._on_progress = on_progress
        self._foresight = foresight
        self._agenda = Agenda() if agenda is None else agenda
        self._tools = ToolHost(scenario.tools, self._agenda, seed=scenario.seed, needs=self._needs)
        self._tokens = TokenSpace(scenario.engine.block_size)
        self._replicas = {
            replica_id: SimulatedReplica(replica_id, engine, self._agenda, self)
            for replica_id, engine in scenario.engines.items()
        }
        self._tally = Tally(scenario, self.scheduler, self._replicas)
        self._decision_counts: Counter[tuple[type[Decision], str]] = Counter()
        self._restores = RestoreCounter(self.scheduler)
        self._programs: dict[int, RunningProgram] = {}  # by the id of the turn that is with the scheduler
        self._judged: dict[int, tuple[RunningProgram, int, int]] = {}  # questions: program, generation, turns
        self._read_by_judge: dict[str, Context] = {}
        self._on_their_way: dict[int, str] = {}  # granted turns that are not in the engine yet: their replicas
        self._by_program_id: dict[str, RunningProgram] = {}
        self._turn_count, self._poll_count = turn_ids_from, 0
        self._live_count = 0
        self._wanted_count = wanted_count

    def __repr__(self) -> str:
        return f"<Simulation at {self._agenda.now_s:.1f} s: {self._live_count} programs, {self.scheduler!r}>"

    def run(self) -> RunResult:
        """Run to the end and return the figures; an interrupt (Ctrl-C) ends the run, and finished work counts."""
        agenda, complete = self._agenda, True
        try:
            self.begin()
            while self._live_count and agenda.advance(self._scenario.horizon_s):
                pass
            complete = self.end()
        except KeyboardInterrupt:
            complete = False
        return self.result(complete=complete)

    def end(self) -> bool:
        """Advance time to the end of the run, if it is over before all programs are; return whether it is complete."""
        if not self.has_more:
            return True
        self._agenda.now_s = self._scenario.horizon_s
        return self._scenario.loop != "batch"

    def result(self, *, complete: bool) -> RunResult:
        """Return the figures so far."""
        decided = self._decision_counts.items()
        return self._tally.result(
            now_s=self._agenda.now_s,
            complete=complete,
            workload=self._workload_name,
            decision_counts=dict(
                sorted((f"{kind.__name__.lower()} {reason}", count) for (kind, reason), count in decided)
            ),
            tools=replace(self._tools.figures),
            restores=replace(self._restores.figures),
            held_since_s=[program.arrived_s for program in self._programs.values() if program.is_held],
            events=tuple(self.events),
        )

    def program_times_s(self, serial_ids: range) -> tuple[list[float], int]:
        """Return how long these programs of the workload took, and how many of them have not ended.

        Those that began count with their time until now.
        """
        ended = [wait.residence_s for wait in self._tally.ended if wait.serial_id in serial_ids]
        live = self._by_program_id.values()
        living = [self._agenda.now_s - each.started_s for each in live if each.wait.serial_id in serial_ids]
        return ended + living, len(serial_ids) - len(ended)

    @property
    def has_more(self) -> bool:
        """Whether any program is there, or still to come."""
        return self._live_count > 0

    # --- the begin of things ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Bring replicas up, and start programs."""
        scenario = self._scenario
        for replica_id in self._replicas:
            self._poll(replica_id)
            self._dispatch(ReplicaUp(0.0, replica_id))
        for outage in scenario.outages:
            self._agenda.at(outage.down_s, partial(self._go_down, outage))
        self._tick()
        self._agenda.at(scenario.warmup_s, self._tally.begin)
        self._sample()
        if scenario.loop == "open":
            self._expect_arrival()
        elif self._wanted_count is not None:
            self._follow()
        else:
            for _ in range(scenario.programs_count):
                self._start_next()

    def _start_next(self) -> None:
        supplied = self._supply.next()
        if supplied is not None:
            self._live_count += 1
            self._start(supplied)

    def _follow(self) -> None:
        self._fill()
        self._agenda.after(FOLLOWING_PERIOD_S, self._follow)

    def _fill(self) -> None:
        """Start programs until there are as many as wanted; surplus ones are not ended."""
        assert self._wanted_count is not None
        wanted_count = min(self._scenario.programs_count, max(1, self._wanted_count(self.scheduler)))
        for _ in range(wanted_count - self._live_count):
            self._start_next()

    def _expect_arrival(self) -> None:
        supplied = self._supply.next()
        if supplied is not None:
            self._live_count += 1
            self._agenda.at(supplied.plan.arrival_s or 0.0, partial(self._arrive, supplied))

    def _arrive(self, supplied: Supplied) -> None:
        self._expect_arrival()
        self._start(supplied)

    def _start(self, supplied: Supplied) -> None:
        sandbox = self._tools.open(supplied.plan.program_id, supplied.serial_id, supplied.sandbox_s)
        program = RunningProgram(supplied, self._tokens, sandbox, self._agenda.now_s, self._scenario.bytes_per_token)
        self._by_program_id[supplied.plan.program_id] = program
        self._turn_arrives(program)

    def _needs(self) -> Needs:
        return needed_in_s(self._runs, self.scheduler.expected_holds_s(LOOKED_AHEAD_COUNT))

    def _runs(self, program_id: str) -> bool:
        program = self.scheduler.programs.get(program_id)
        return program is not None and program.status is Status.ACTIVE

    # --- a turn -------------------------------------------------------------------------------------------------------

    def _turn_arrives(self, program: RunningProgram) -> None:
        program.begin_turn(self._agenda.now_s)
        if self._foresight is not None:
            self._foresight[program.plan.program_id] = inf if program.is_at_last_turn else program.turn.tool_s
        self._ask(program, None)

    def _ask(self, program: RunningProgram, avoid_replica_id: str | None) -> None:
        """Request a lease, for the first time or after an outage."""
        self._turn_count += 1
        program.turn_id = self._turn_count
        program.is_held = True
        self._programs[program.turn_id] = program
        if program.plan.limits is not None:
            self._dispatch(TurnLimited(self._agenda.now_s, program.turn_id, program.plan.limits))
        self._dispatch(
            TurnAsk(
                now_s=self._agenda.now_s,
                turn_id=program.turn_id,
                program_id=program.plan.program_id,
                prompt_bytes=int(len(program.context) * self._scenario.bytes_per_token),
                avoid_replica_id=avoid_replica_id,
                prefix=program.prefix,
                group_id=program.plan.group_id,
                tenant=program.plan.tenant,
                parent_id=program.plan.parent_id,
                role=program.turn.role,
            )
        )

    def _granted(self, grant: Grant) -> None:
        if grant.turn_id in self._judged:
            self._question_granted(grant)
            return
        program = self._programs[grant.turn_id]
        program.granted_s = self._agenda.now_s
        program.is_held = False
        program.replica_id = grant.replica_id
        program.engine_priority = grant.engine_priority or 0
        overhead_s = self._scenario.engine.timing.request_overhead_s
        if overhead_s == 0:
            self._submit(grant.turn_id, program)
        else:
            self._on_their_way[grant.turn_id] = grant.replica_id
            self._agenda.after(overhead_s, partial(self._arrives_at_engine, grant.turn_id, program))

    def _arrives_at_engine(self, turn_id: int, program: RunningProgram) -> None:
        if self._on_their_way.pop(turn_id, None) is not None:  # its replica did not go down meanwhile
            self._submit(turn_id, program)

    def _submit(self, turn_id: int, program: RunningProgram) -> None:
        try:
            self._replicas[program.replica_id].submit(program.request(retained=self._scenario.engines_retain))
        except ValueError:  # longer than the engine's limit: a server answers 400
            self._agenda.at(self._agenda.now_s, partial(self._refused, turn_id))

    def _refused(self, turn_id: int) -> None:
        program = self._programs.pop(turn_id)
        self._dispatch(TurnEnd(now_s=self._agenda.now_s, turn_id=turn_id, outcome="failed"))
        self._program_failed(program)

    def _rejected(self, turn_id: int) -> None:
        if self._judged.pop(turn_id, None) is None:
            self._program_failed(self._programs.pop(turn_id))

    def first_token(self, request_id: str) -> None:
        """Report that a turn's prefill is over, and from now on every second its progress; not of a whole answer."""
        if self._scenario.answers_whole:
            return
        turn_id = int(request_id)
        self._dispatch(TurnStarted(self._agenda.now_s, turn_id))
        self._agenda.after(PROGRESS_PERIOD_S, partial(self._progress, turn_id, request_id))

    def _progress(self, turn_id: int, request_id: str) -> None:
        program = self._programs.get(turn_id)
        if program is None:
            return
        output_tokens = self._replicas[program.replica_id].engine.generated_tokens(request_id)
        if output_tokens is not None:
            self._dispatch(TurnProgressed(self._agenda.now_s, turn_id, output_tokens))
            self._agenda.after(PROGRESS_PERIOD_S, partial(self._progress, turn_id, request_id))

    def request_finished(self, finished: FinishedRequest) -> None:
        """Report a turn's usage to the scheduler, and continue with its tool, or end its program."""
        now_s = self._agenda.now_s
        turn_id = int(finished.request_id)
        if turn_id in self._judged:
            self._question_answered(turn_id, finished)
            return
        program = self._programs.pop(turn_id)
        turn, shape = program.turn, program.shape()
        goes_on = program.end_turn()
        self._dispatch(
            TurnEnd(
                now_s=now_s,
                turn_id=turn_id,
                prompt_tokens=finished.prompt_tokens,
                output_tokens=finished.generated_tokens,
                cached_tokens=finished.cached_tokens if self._scenario.engine_tells_cached else None,
                tool=turn.tool_name if goes_on else "",
            )
        )
        self._tally.finished(program, finished, shape)
        if goes_on:
            self._ask_judge(program)
            self._tools.run(turn.tool_s, program.sandbox, partial(self._turn_arrives, program))
        else:
            self._tally.program_ended(program, now_s)
            self._end_program(program)

    # --- the judge ----------------------------------------------------------------------------------------------------

    def _ask_judge(self, program: RunningProgram) -> None:
        """Ask the judge about a program with a finished turn, if it is due: by an anonymous turn."""
        judge = self._scenario.judge
        known = self.scheduler.programs.get(program.plan.program_id)
        if judge is None or known is None or not judge.asks_after(program.turns_done_count):
            return
        self._turn_count += 1
        self._judged[self._turn_count] = program, known.generation, program.turns_done_count
        tokens = judge.prompt_tokens + min(len(program.context), judge.max_transcript_tokens)
        prompt_bytes = int(tokens * self._scenario.bytes_per_token)
        self._dispatch(
            TurnAsk(now_s=self._agenda.now_s, turn_id=self._turn_count, program_id=None, prompt_bytes=prompt_bytes)
        )

    def _question_granted(self, grant: Grant) -> None:
        judge, (program, _, _) = self._scenario.judge, self._judged[grant.turn_id]
        assert judge is not None
        read = self._read_by_judge.setdefault(program.plan.program_id, judge.begin(self._tokens))
        request = judge.question(grant.turn_id, self._tokens, read, len(program.context))
        self._replicas[grant.replica_id].submit(request)

    def _question_answered(self, turn_id: int, finished: FinishedRequest) -> None:
        judge, (program, generation, turn_count) = self._scenario.judge, self._judged.pop(turn_id)
        assert judge is not None
        now_s = self._agenda.now_s
        self._dispatch(
            TurnEnd(
                now_s=now_s,
                turn_id=turn_id,
                prompt_tokens=finished.prompt_tokens,
                output_tokens=finished.generated_tokens,
                cached_tokens=finished.cached_tokens,
            )
        )
        fails = judge.predicts_failure(program.plan, self._scenario.seed, turn_count)
        program.wait.verdicts.append((turn_count, fails))
        program_id = program.plan.program_id
        self._dispatch(ProgramJudged(now_s, program_id, generation, turn_count, not fails, judge.confidence_ratio))

    # --- the end of a program -----------------------------------------------------------------------------------------

    def _program_failed(self, program: RunningProgram) -> None:
        """End a program with a refused turn: its sender waits before the next one."""
        self._tally.failed()
        self._end_program(program, pause_s=FAILURE_PAUSE_S)

    def _end_program(self, program: RunningProgram, pause_s: float = 0.0) -> None:
        if program.says_release:
            plan = program.plan
            self._dispatch(ProgramReleased(self._agenda.now_s, plan.program_id, outcome=plan.outcome))
        del self._by_program_id[program.plan.program_id]
        self._read_by_judge.pop(program.plan.program_id, None)
        self._tools.close(program.sandbox)
        if self._foresight is not None:
            del self._foresight[program.plan.program_id]
        if self._scenario.loop == "closed" and pause_s:
            self._agenda.after(pause_s, self._replace_program)
        else:
            self._replace_program()

    def _replace_program(self) -> None:
        """In a closed loop, start the next program to replace an ended one, which counted until now."""
        if self._scenario.loop == "closed" and self._wanted_count is None:
            self._start_next()
        self._live_count -= 1
        if self._wanted_count is not None:
            self._fill()

    # --- the scheduler ------------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        decisions = self.handle(event)
        if self._scenario.keep_events:
            self.events.append((event, tuple(decisions)))
        self.carry_out(decisions)

    def carry_out(self, decisions: list[Decision]) -> None:
        """Carry out the decisions."""
        for decision in decisions:
            self._decision_counts[type(decision), decision.reason] += 1
            if isinstance(decision, Grant):
                self._granted(decision)
                continue
            if isinstance(decision, (Pause, Restore)):
                self._restores.note(decision, decisions, self._home_of(decision.program_id))
            if isinstance(decision, (Pause, Release)):
                self._lose_claim(decision.program_id)
            elif isinstance(decision, Reject):
                self._agenda.at(self._agenda.now_s, partial(self._rejected, decision.turn_id))
        if self._tools.waits:
            self._tools.plan_soon()

    def _home_of(self, program_id: str) -> str:
        """Return where a program's last turn ran; empty if none did."""
        program = self._by_program_id.get(program_id)
        return program.replica_id if program is not None else ""

    def _lose_claim(self, program_id: str) -> None:
        """Tell engines that support it that a program has lost its claim."""
        program = self._by_program_id.get(program_id)
        if program is None or not program.replica_id:
            return
        if self._scenario.engines_retain:
            self._replicas[program.replica_id].drop_retained(program_id)
        if self._scenario.engines_drop:
            self._replicas[program.replica_id].drop(program.own_block_keys())

    def _tick(self) -> None:
        self._dispatch(Tick(self._agenda.now_s))
        self._agenda.after(min(self._scenario.tick_s, self.scheduler.policy.tick_s), self._tick)

    def _poll(self, replica_id: str) -> None:
        """Read a replica's metrics, which arrive a little later; at the start they are there."""
        replica, scenario = self._replicas[replica_id], self._scenario
        self._poll_count += 1
        if replica.up and (not self._agenda.now_s or self._poll_answers()):
            reading = replica.poll()
            event = self._polled(replica_id, reading)
            if event.age_s:
                self._agenda.after(event.age_s, partial(self._poll_comes, event))
            else:
                self._dispatch(event)
            if scenario.engine.tier_block_count:
                told = TierPolled(event.now_s, replica_id, reading.tier_query_tokens, reading.tier_hit_tokens)
                self._agenda.at(event.now_s, partial(self._poll_comes, told))
            if scenario.tells_work and self._agenda.now_s:
                work = WorkPolled(
                    event.now_s,
                    replica_id,
                    reading.computed_tokens,
                    reading.generated_tokens,
                    reading.iteration_count,
                    reading.preemption_count,
                    event.age_s,
                )
                self._agenda.at(event.now_s, partial(self._poll_comes, work))
        self._agenda.after(scenario.poll_interval_s, partial(self._poll, replica_id))

    def _poll_answers(self) -> bool:
        missing_ratio = self._scenario.poll_missing_ratio
        if not missing_ratio:
            return True
        return Random(f"poll/{self._scenario.seed}/{self._poll_count}").random() >= missing_ratio  # noqa: S311

    def _polled(self, replica_id: str, reading: Reading) -> ReplicaPolled:
        scenario = self._scenario
        age_s = scenario.poll_delay_s if self._agenda.now_s else 0.0
        now_s = self._agenda.now_s + age_s
        capacity_tokens: int | None = int(reading.capacity_tokens * scenario.told_capacity_ratio)
        if replica_id in scenario.unknown_replica_ids:
            capacity_tokens = None
        if not scenario.engine_tells_counters:
            return ReplicaPolled(now_s, replica_id, capacity_tokens, age_s=age_s)
        return ReplicaPolled(
            now_s,
            replica_id,
            capacity_tokens,
            reading.hit_ratio,
            reading.query_tokens,
            reading.preemption_count,
            reading.kv_used_ratio,
            reading.waiting_count,
            age_s,
        )

    def _poll_comes(self, event: ReplicaPolled | TierPolled | WorkPolled) -> None:
        if self._replicas[event.replica_id].up:
            self._dispatch(event)

    def _go_down(self, outage: Outage) -> None:
        now_s = self._agenda.now_s
        lost = [int(request_id) for request_id in self._replicas[outage.replica_id].go_down()]
        lost += [turn_id for turn_id, replica_id in self._on_their_way.items() if replica_id == outage.replica_id]
        self._dispatch(ReplicaDown(now_s, outage.replica_id))
        for turn_id in lost:
            self._on_their_way.pop(turn_id, None)
            if self._judged.pop(turn_id, None) is not None:
                self._dispatch(TurnEnd(now_s=now_s, turn_id=turn_id, outcome="failed"))
                continue
            program = self._programs.pop(turn_id)
            self._dispatch(TurnEnd(now_s=now_s, turn_id=turn_id, outcome="failed"))
            self._ask(program, outage.replica_id)
        self._agenda.at(outage.up_s, partial(self._come_up, outage))

    def _come_up(self, outage: Outage) -> None:
        self._replicas[outage.replica_id].come_up()
        self._dispatch(ReplicaUp(self._agenda.now_s, outage.replica_id))

    def _sample(self) -> None:
        self._tally.sample(self._agenda.now_s)
        if self._on_progress is not None:
            self._on_progress(self._tally.progress(self._agenda.now_s))
        self._agenda.after(self._scenario.sample_interval_s, self._sample)


def simulate(
    scenario: Scenario,
    workload: Workload,
    policy: Policy,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    foresight: dict[str, float] | None = None,
) -> RunResult:
    """Run a workload under a policy and return the figures. Raises ConfigurationError. See `Simulation`."""
    return Simulation(scenario, workload, policy, on_progress=on_progress, foresight=foresight).run()
