"""A run drives the scheduler as the server does, is the same every time, and thrashes as a real engine does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from time import process_time

import pytest

from thunderagent.errors import ConfigurationError
from thunderagent.programs.invariants import check
from thunderagent.programs.messages import (
    Grant,
    Hold,
    ProgramReleased,
    ReplicaPolled,
    ReplicaUp,
    Tick,
    TurnAsk,
    TurnEnd,
    TurnProgressed,
    TurnStarted,
    WorkPolled,
)
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.baselines.sticky import Sticky
from thunderagent.programs.policies.papers.thunderagent import ThunderAgent
from thunderagent.programs.policy import Policy
from thunderagent.programs.scheduler import Scheduler
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import COSTS_US, TimingProfile, profile
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.replicas import Outage
from thunderagent.simulator.runs.run import Simulation, simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.runs.tally import Progress
from thunderagent.simulator.runs.tools import ToolSettings
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

UNIT = TimingProfile("unit", base_s=1.0, prefill_token_s=0.0, decode_request_s=0.0)


@dataclass(frozen=True)
class StandardLoad:
    """6-12 turns, prompt 200 + 400-800, answers 24-64, results 150-450, tools 1 s."""

    name: str = "standard"

    def program(self, index: int, seed: int) -> ProgramPlan:
        rng = random.Random(f"{seed}/{index}")
        turns = tuple(
            TurnPlan(rng.randint(150, 450) if turn else rng.randint(400, 800), rng.randint(24, 64), rng.expovariate(1))
            for turn in range(rng.randint(6, 12))
        )
        return ProgramPlan(f"p{index}", turns, "system", 200)


@dataclass(frozen=True)
class Recorded:
    """A workload of exactly these plans."""

    plans: Sequence[ProgramPlan]
    name: str = "recorded"

    def program(self, index: int, seed: int) -> ProgramPlan:
        return self.plans[index]


def plan(*turns: tuple[int, int, float], name: str = "p0", arrival_s: float | None = None) -> ProgramPlan:
    return ProgramPlan(name, tuple(TurnPlan(*turn) for turn in turns), arrival_s=arrival_s)


def small(**changes: object) -> Scenario:
    """One replica whose iterations take a second each."""
    engine = EngineConfig(400, block_size=4, timing=UNIT)
    return replace(Scenario(engine, loop="batch", programs_count=1, horizon_s=1000.0), **changes)  # type: ignore[arg-type]


def standard(policy: Policy, programs_count: int, **changes: object) -> RunResult:
    scenario = Scenario(EngineConfig(16_000), programs_count=programs_count, horizon_s=200.0, warmup_s=20.0, seed=1)
    return simulate(replace(scenario, **changes), StandardLoad(), policy)  # type: ignore[arg-type]


# --- the same core, the same way


def test_a_program_is_told_to_the_scheduler_as_by_the_server() -> None:
    scenario = small(keep_events=True, poll_interval_s=500.0)
    result = simulate(scenario, Recorded([plan((10, 3, 2.5), (5, 2, 9.0))]), Passthrough())
    events = [event for event, _ in result.events]
    assert events[:3] == [ReplicaPolled(0.0, "r0", 400, None, 0, 0, 0.0, 0), ReplicaUp(0.0, "r0"), Tick(0.0)]
    assert [event for event in events[3:] if not isinstance(event, Tick)] == [
        TurnAsk(now_s=0.0, turn_id=1, program_id="p0", prompt_bytes=40),
        TurnStarted(1.0, 1),
        TurnProgressed(2.0, 1, 2),
        TurnEnd(now_s=3.0, turn_id=1, prompt_tokens=10, output_tokens=3, cached_tokens=0, tool="tool"),
        TurnAsk(now_s=5.5, turn_id=2, program_id="p0", prompt_bytes=72),
        TurnStarted(6.5, 2),
        TurnEnd(now_s=7.5, turn_id=2, prompt_tokens=18, output_tokens=2, cached_tokens=12, tool=""),
        ProgramReleased(7.5, "p0"),
    ]
    assert [event.now_s for event in events if isinstance(event, Tick)] == [float(second) for second in range(8)]
    assert (result.makespan_s, result.turn_count, result.program_count) == (7.5, 2, 1)


def test_arrivals_say_what_programs_share_and_who_finishes_together() -> None:
    """Its digest is the prefix's: programs with another prefix, or more of the same one, have another digest."""
    turns = (TurnPlan(10, 2, 0.0),)
    plans = [
        ProgramPlan("a", turns, "system", 40, group_id="g1"),
        ProgramPlan("b", turns, "system", 40, group_id="g1"),
        ProgramPlan("c", turns, "system", 20),
        ProgramPlan("d", turns, "other", 40),
        ProgramPlan("e", turns),
    ]
    result = simulate(small(programs_count=5, keep_events=True), Recorded(plans), Passthrough())
    arrived = [event for event, _ in result.events if isinstance(event, TurnAsk)]
    assert [event.group_id for event in arrived] == ["g1", "g1", "", "", ""]
    digests, sizes_bytes = zip(*(cut for event in arrived[:4] for cut in event.prefix), strict=True)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert sizes_bytes == (160, 160, 80, 160)
    assert arrived[4].prefix == ()


def test_polls_say_what_was_looked_up_and_preempted_since_the_poll_before() -> None:
    """Two programs of 180 tokens at their end do not fit together in 200: one is preempted."""
    engine = EngineConfig(200, block_size=4, timing=UNIT)
    scenario = small(engine=engine, programs_count=2, keep_events=True, poll_interval_s=10.0)
    plans = [plan((80, 100, 0.0), name=f"p{number}") for number in range(2)]
    result = simulate(scenario, Recorded(plans), Passthrough())
    polls = [event for event, _ in result.events if isinstance(event, ReplicaPolled)]
    assert [poll.query_tokens for poll in polls[:3]] == [0, 160, 0]
    assert sum(poll.preemption_count or 0 for poll in polls) == result.replicas[0].preemption_count > 0


def test_an_engine_may_not_say_what_was_cached() -> None:
    scenario = small(keep_events=True, engine_tells_cached=False)
    result = simulate(scenario, Recorded([plan((10, 3, 2.5), (5, 2, 9.0))]), Passthrough())
    assert [e.cached_tokens for e, _ in result.events if (isinstance(e, TurnEnd) and e.outcome == "finished")] == [
        None,
        None,
    ]
    assert result.hit_ratio == 12 / 28
    assert any(event.hit_ratio for event, _ in result.events if isinstance(event, ReplicaPolled))


@pytest.mark.parametrize(("counters", "work"), [(True, True), (False, True), (True, False)])
def test_an_engine_may_say_what_its_iterations_computed(counters: bool, work: bool) -> None:
    scenario = small(keep_events=True, engine_tells_counters=counters, engine_tells_work=work, poll_interval_s=0.7)
    result = simulate(scenario, Recorded([plan((10, 3, 2.5), (5, 2, 9.0))]), Passthrough())
    told = [event for event, _ in result.events if isinstance(event, WorkPolled)]
    if not (counters and work):
        assert not told
        return
    assert sum(event.computed_tokens for event in told) == 10 + 6
    assert sum(event.generated_tokens for event in told) == 3 + 2
    assert sum(event.iteration_count for event in told) == 3 + 2
    assert not any(event.preemption_count for event in told)


def test_programs_may_end_without_a_word() -> None:
    """Half of them do, the same ones in every run; the closed loop continues at once."""
    plans = Recorded([plan((10, 4, 0.0), name=f"p{number}") for number in range(60)])
    runs = [
        simulate(
            small(loop="closed", programs_count=2, horizon_s=1000.0, keep_events=True, release_ratio=ratio),
            plans,
            Passthrough(),
        )
        for ratio in (1.0, 0.5, 0.5, 0.0)
    ]
    released = [[e.program_id for e, _ in run.events if isinstance(e, ProgramReleased)] for run in runs]
    assert len(released[0]) == 60
    assert 15 < len(released[1]) < 45
    assert released[1] == released[2]
    assert released[3] == []
    assert {run.program_count for run in runs} == {60}
    assert {run.simulated_s for run in runs} == {runs[0].simulated_s}


def test_the_scheduler_hears_every_second_how_far_a_turn_is() -> None:
    engine = EngineConfig(400, block_size=4, timing=replace(UNIT, base_s=0.25))
    scenario = small(engine=engine, keep_events=True)
    result = simulate(scenario, Recorded([plan((10, 12, 0.0))]), Passthrough())
    heard = [event for event, _ in result.events if isinstance(event, TurnProgressed)]
    assert [(event.now_s, event.output_tokens) for event in heard] == [(1.25, 5), (2.25, 9)]


@pytest.mark.parametrize("policy", [Passthrough(), Sticky(), Cap(5), ThunderAgent()], ids=lambda policy: policy.name)
def test_the_events_replayed_give_the_same_decisions(policy: Policy) -> None:
    """The invariants are checked after every event; of two replicas one goes away and returns."""
    outage = Outage("r1", 20.0, 30.0)
    result = standard(policy, 14, replica_count=2, horizon_s=60.0, keep_events=True, outages=(outage,))
    scheduler = Scheduler(policy)
    for event, decisions in result.events:
        assert tuple(scheduler.handle(event)) == decisions
        check(scheduler)
    assert sum((isinstance(event, TurnEnd) and event.outcome == "failed") for event, _ in result.events) > 0, (
        "the outage broke nothing off"
    )


@pytest.mark.parametrize("policy", [Passthrough(), ThunderAgent()], ids=lambda policy: policy.name)
def test_the_same_seed_gives_the_same_run(policy: Policy) -> None:
    first, second = (standard(policy, 16, keep_events=True, horizon_s=60.0) for _ in range(2))
    assert first == second
    assert first.to_json() == second.to_json()


def test_new_seed_gives_a_new_run() -> None:
    assert standard(Passthrough(), 6, seed=2).turn_latency != standard(Passthrough(), 6).turn_latency


def test_a_clairvoyant_policy_can_be_told_how_long_the_next_tool_runs() -> None:
    foresight: dict[str, float] = {}
    seen: list[dict[str, float]] = []
    simulate(
        small(sample_interval_s=2.0),
        Recorded([plan((10, 3, 2.5), (5, 2, 9.0))]),
        Passthrough(),
        on_progress=lambda _: seen.append(dict(foresight)),
        foresight=foresight,
    )
    assert seen == [{}, {"p0": 2.5}, {"p0": 2.5}, {"p0": inf}]
    assert foresight == {}


# --- figures


def test_the_standard_load_thrashes_as_on_the_real_engine() -> None:
    """A real vLLM on one CPU core made 155 turns/min at 6 programs, and 83 at 16 with 8 % hits."""
    few, many = standard(Passthrough(), 6), standard(Passthrough(), 16)
    assert 130 < few.turns_per_min_count < 190
    assert 65 < many.turns_per_min_count < 100
    assert few.hit_ratio > 0.7
    assert many.hit_ratio < 0.2
    assert many.replicas[0].costs.recompute_token_s > many.replicas[0].costs.prefill_token_s


def test_scheduling_pays_where_memory_is_short() -> None:
    """On the real engine the paper's policy made 118 to 133 turns/min where passing through made 83."""
    scheduled = standard(ThunderAgent(), 16, horizon_s=600.0)
    assert scheduled.turns_per_min_count > 1.3 * standard(Passthrough(), 16).turns_per_min_count
    assert scheduled.held.max_s > 0
    assert sum(group.held.count for group in scheduled.held_by_size) == scheduled.turn_count


def test_figures_begin_after_the_warm_up() -> None:
    whole = standard(Passthrough(), 6, warmup_s=0.0)
    late = standard(Passthrough(), 6, warmup_s=100.0)
    assert (late.measured_s, late.simulated_s) == (100.0, 200.0)
    assert late.turn_count < whole.turn_count
    assert late.samples == whole.samples
    assert late.replicas[0].costs.caching_token_s < whole.replicas[0].costs.caching_token_s


def test_held_turns_wait_and_unused_memory_is_charged() -> None:
    programs = Recorded([plan((10, 4, 0.0), name=f"p{number}") for number in range(2)])
    result = simulate(small(programs_count=2, keep_events=True), programs, Cap(1))
    assert sum(isinstance(d, Hold) for _, decisions in result.events for d in decisions) == 1
    assert result.held.max_s == 4.0
    assert result.turn_latency.max_s == 8.0
    assert result.makespan_s == 8.0
    assert result.replicas[0].costs.unused_token_s > 0
    assert result.decision_counts["hold no_room"] == 1


def test_waits_of_programs_by_hand() -> None:
    """One runs at a time: the second waits 4 s for the first, the third 8 s, and larger ones come later."""
    programs = Recorded([plan((10 * size, 4, 0.0), name=f"p{size}") for size in (1, 2, 3)])
    result = simulate(small(programs_count=3), programs, Cap(1))
    assert [(each.first_prompt_tokens, each.held_s) for each in result.waits.programs] == [(10, 0), (20, 4), (30, 8)]
    assert [each.residence_s for each in result.waits.programs] == [4.0, 8.0, 12.0]
    assert result.waits.pearson == pytest.approx(1.0)
    assert result.waits.spearman == pytest.approx(1.0)
    assert (result.longest_hold_s, result.program_latency.p50_s) == (8.0, 8.0)
    assert result.programs_per_hour_count == 3 * 3600 / 12


def test_turn_held_at_the_end_counts_for_the_longest_hold() -> None:
    programs = Recorded([plan((10, 90, 0.0), name=f"p{number}") for number in range(2)])
    result = simulate(small(programs_count=2, horizon_s=70.0), programs, Cap(1))
    assert (result.turn_count, result.held.max_s, result.longest_hold_s) == (0, 0.0, 70.0)


def test_a_batch_takes_no_less_than_its_longest_program_alone() -> None:
    """10 tokens in one iteration, 3 more for the answer, a tool of 2.5 s, and two iterations again."""
    programs = Recorded([plan((10, 4, 2.5), (5, 2, 9.0)), plan((10, 2, 0.0), name="p1")])
    result = simulate(small(programs_count=2), programs, Passthrough())
    assert result.makespan_bound_s == pytest.approx(4 + 2.5 + 2)
    assert result.makespan_s == pytest.approx(8.5, abs=1.0)
    assert simulate(small(horizon_s=2.5), programs, Passthrough()).makespan_bound_s is None


@pytest.mark.parametrize("policy", [Passthrough(), ThunderAgent()], ids=lambda policy: policy.name)
def test_no_batch_is_faster_than_its_bound(policy: Policy) -> None:
    scenario = Scenario(EngineConfig(16_000), loop="batch", programs_count=24, horizon_s=3600.0)
    result = simulate(scenario, workload("standard"), policy)
    assert result.makespan_s is not None
    assert result.makespan_bound_s is not None
    assert 0.3 < result.makespan_bound_s / result.makespan_s < 1.0


def test_pauses_and_restores_are_counted() -> None:
    """All pauses count, and the restores of programs that ran before."""
    result = standard(ThunderAgent(), 14, replica_count=2)
    counted = result.decision_counts
    restores = result.restores
    assert restores.pause_count == sum(count for name, count in counted.items() if name.startswith("pause ")) > 0
    all_restores_count = sum(count for name, count in counted.items() if name.startswith("restore "))
    assert 0 < restores.restore_count <= restores.pause_count
    assert restores.restore_count < all_restores_count
    assert 0 <= restores.moved_with_room_count <= restores.moved_count <= restores.restore_count
    assert 0 < result.imbalance_mean_ratio <= result.imbalance_p99_ratio


def test_samples_show_each_replica_over_time() -> None:
    result = standard(Sticky(), 12, replica_count=2)
    assert [sample.now_s for sample in result.samples] == [10.0 * number for number in range(21)]
    assert all(len(sample.replicas) == 2 for sample in result.samples)
    assert result.imbalance_mean_ratio > 0
    assert any(replica.demand_tokens >= replica.used_tokens > 0 for replica in result.samples[5].replicas)


def test_programs_share_the_prefix_of_their_workload() -> None:
    programs = [ProgramPlan(f"p{n}", (TurnPlan(10, 2, 0.0),), "system", 40, arrival_s=50.0 * n) for n in range(2)]
    result = simulate(small(loop="open", programs_count=2), Recorded(programs), Passthrough())
    assert result.hit_ratio == 40 / 100


# --- loops


def test_a_closed_loop_replaces_a_finished_program_at_once() -> None:
    plans = [plan((10, 4, 0.0), name=f"p{number}") for number in range(100)]
    result = simulate(small(loop="closed", programs_count=2, horizon_s=20.5, keep_events=True), Recorded(plans), Cap(9))
    arrived = [event for event, _ in result.events if isinstance(event, TurnAsk)]
    assert [event.now_s for event in arrived][:4] == [0.0, 0.0, 4.0, 5.0]
    assert result.complete
    assert result.simulated_s == 20.5


def test_an_open_loop_follows_the_arrivals_of_the_plans() -> None:
    plans = [plan((10, 4, 0.0), name=f"p{number}", arrival_s=7.0 * number) for number in range(3)]
    result = simulate(small(loop="open", programs_count=3, keep_events=True), Recorded(plans), Passthrough())
    assert [event.now_s for event, _ in result.events if isinstance(event, TurnAsk)] == [0.0, 7.0, 14.0]
    assert result.simulated_s == 18.0


def test_a_recorded_workload_ends_the_run_when_it_is_through() -> None:
    result = simulate(small(loop="closed", programs_count=5), Recorded([plan((10, 4, 0.0))]), Passthrough())
    assert (result.program_count, result.simulated_s) == (1, 4.0)


def test_a_batch_that_is_not_through_in_time_is_not_complete() -> None:
    result = simulate(small(horizon_s=2.5), Recorded([plan((10, 4, 0.0))]), Passthrough())
    assert (result.complete, result.makespan_s, result.turn_count) == (False, None, 0)


def test_tools_and_sandboxes_delay_turns() -> None:
    tools = ToolSettings(cpu_count=1, prepare_min_s=10.0, prepare_max_s=10.0)
    programs = Recorded([plan((10, 2, 5.0), (4, 2, 0.0), name=f"p{number}") for number in range(2)])
    result = simulate(small(programs_count=2, tools=tools), programs, Passthrough())
    assert result.makespan_s == 10.0 + 5.0 + 5.0 + 2.0
    assert result.tools.waited_for_cpu_s == 5.0
    assert result.tools.peak_sandbox_count == 2


def test_the_sandboxes_of_held_programs_leave_a_hand_to_those_that_run() -> None:
    """The scheduler expects holds once it has restored a program, here p1 after 30 s."""
    tools = ToolSettings(hands_count=4, prepare_min_s=20.0, prepare_max_s=20.0)
    arrivals_s = (0.0, 0.0, 40.0, 40.0, 40.0, 40.0, 40.0)
    plans = [plan((10, 30, 0.0), name=f"p{number}", arrival_s=each_s) for number, each_s in enumerate(arrivals_s)]
    scenario = small(loop="open", programs_count=len(plans), tools=tools, horizon_s=45.0)
    one, all_ = (simulate(scenario, Recorded(plans), Cap(count)).tools.sandbox_count for count in (1, len(plans)))
    assert (one, all_) == (2 + 3, 2 + 4)


# --- what goes wrong


def test_a_turn_that_the_engine_refuses_fails_and_ends_its_program() -> None:
    programs = Recorded([plan((10_000, 4, 0.0), name="too long"), plan((10, 4, 0.0))])
    result = simulate(small(programs_count=2, keep_events=True), programs, Passthrough())
    assert (result.failed_turn_count, result.turn_count, result.complete) == (1, 1, True)
    assert ProgramReleased(0.0, "too long") in [event for event, _ in result.events]


def test_an_outage_loses_the_cache_and_the_turns_arrive_again_elsewhere() -> None:
    programs = Recorded([plan((10, 8, 0.0), name=f"p{number}") for number in range(2)])
    scenario = small(programs_count=2, replica_count=2, outages=(Outage("r0", 3.5, 5.0),), keep_events=True)
    result = simulate(scenario, programs, Passthrough())
    again = [(event, decisions) for event, decisions in result.events if getattr(event, "avoid_replica_id", None)]
    ((event, decisions),) = again
    assert event.now_s == 3.5
    assert [d.replica_id for d in decisions if isinstance(d, Grant)] == ["r1"]
    assert ReplicaUp(5.0, "r0") in [event for event, _ in result.events]
    assert (result.turn_count, result.failed_turn_count) == (2, 0)


def test_a_capacity_that_is_told_wrong_is_what_the_scheduler_knows() -> None:
    simulation = Simulation(small(told_capacity_ratio=0.5), Recorded([plan((10, 4, 0.0))]), Passthrough())
    simulation.run()
    assert simulation.scheduler.ledger.accounts["r0"].capacity_tokens == 200


def test_scheduler_hears_only_the_end_of_whole_answers() -> None:
    """The run is the same; of its turn of four seconds the streamed one tells on the way."""
    plans = Recorded([plan((10, 4, 0.0))])
    whole, streamed = (
        simulate(small(keep_events=True, answers_whole=whole), plans, Passthrough()) for whole in (True, False)
    )
    told = [[e for e, _ in run.events if isinstance(e, TurnStarted | TurnProgressed)] for run in (whole, streamed)]
    assert told[0] == []
    assert told[1] != []
    assert whole.first_token_latency == streamed.first_token_latency


def test_engines_may_tell_nothing_but_a_given_capacity_and_some_not_even_that() -> None:
    scenario = small(replica_count=2, unknown_replica_count=1, engine_tells_counters=False, keep_events=True)
    result = simulate(scenario, Recorded([plan((10, 3, 2.5), (5, 2, 9.0))]), Passthrough())
    polls = [event for event, _ in result.events if isinstance(event, ReplicaPolled)]
    assert {(each.replica_id, each.capacity_tokens) for each in polls} == {("r0", None), ("r1", 400)}
    said = {(each.hit_ratio, each.query_tokens, each.kv_used_ratio, each.engine_waiting_count) for each in polls}
    assert said == {(None, None, None, None)}
    assert [e.cached_tokens for e, _ in result.events if (isinstance(e, TurnEnd) and e.outcome == "finished")] == [
        0,
        12,
    ]


def test_the_last_engine_may_be_smaller_and_slower() -> None:
    """The same turn takes twice as long there, and its poll says how much it holds."""
    base = small(replica_count=2, keep_events=True, loop="batch", programs_count=2)
    timing = base.engine.timing
    slow = replace(timing, **{name: 2 * getattr(timing, name) for name in COSTS_US.values()})
    last = replace(base.engine, kv_tokens=base.engine.kv_tokens // 2, timing=slow)
    plans = [plan((10, 3, 0.0), name=name) for name in ("a", "b")]
    result = simulate(replace(base, last_engine=last), Recorded(plans), Passthrough())
    ends = [event for event, _ in result.events if isinstance(event, TurnEnd)]
    assert len(ends) == 2
    assert ends[1].now_s == pytest.approx(2 * ends[0].now_s)
    polls = [event for event, _ in result.events if isinstance(event, ReplicaPolled)]
    assert {each.replica_id: each.capacity_tokens for each in polls} == {"r0": 400, "r1": 200}
    assert [each.capacity_tokens for each in result.replicas] == [400, 200]


def test_prompts_have_as_many_bytes_a_token_as_the_scenario_says() -> None:
    plans = Recorded([replace(plan((10, 3, 0.0)), shared_prefix_id="s", shared_prefix_tokens=8)])
    result = simulate(small(keep_events=True, bytes_per_token=5.5), plans, Passthrough())
    (arrived,) = [event for event, _ in result.events if isinstance(event, TurnAsk)]
    assert (arrived.prompt_bytes, arrived.prefix[0][1]) == (99, 44)


def test_idling_while_programs_are_held_is_a_part_of_the_replicas_time() -> None:
    """`cap` lets one run at a time: during each tool, of 10 of 15 s, the replica idles, but not while nobody waits."""
    plans = Recorded([plan((10, 1, 10.0), (5, 4, 0.0), name=f"p{number}") for number in range(2)])
    result = simulate(small(programs_count=2), plans, Cap(1))
    assert result.measured_s == 30.0
    assert [replica.idle_held_s for replica in result.replicas] == [10.0]
    assert result.idle_held_ratio == pytest.approx(1 / 3)
    assert simulate(small(programs_count=2), plans, Passthrough()).idle_held_ratio == 0.0


def test_a_turn_counts_as_its_part_of_its_program() -> None:
    """At 12 s two of the three turns of its only program have ended."""
    plans = Recorded([plan((10, 1, 4.0), (5, 1, 4.0), (5, 9, 0.0))])
    assert simulate(small(horizon_s=12.0), plans, Passthrough()).program_parts_count == pytest.approx(2 / 3)


def test_programs_are_timed_from_their_begins_to_their_ends() -> None:
    """Both begin at once; at 7 s one has ended, after 4 s. The third one begins then, and a fourth one later."""
    plans = Recorded(
        [plan((10, output, 0.0), name=f"p{number}") for number, output in enumerate((4, 9, 9))],
    )
    simulation = Simulation(small(programs_count=2, horizon_s=7.0, loop="closed"), plans, Passthrough())
    simulation.run()
    assert simulation.program_times_s(range(1)) == ([4.0], 0)
    assert simulation.program_times_s(range(2)) == ([4.0, 7.0], 1)
    assert simulation.program_times_s(range(1, 4)) == ([7.0, 3.0], 3)


def test_an_interrupt_keeps_what_is_done() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.now_s >= 100:
            raise KeyboardInterrupt

    scenario = Scenario(EngineConfig(16_000), programs_count=6, warmup_s=20.0)
    result = simulate(scenario, StandardLoad(), Passthrough(), on_progress=interrupt)
    assert not result.complete
    assert result.simulated_s == 100.0
    assert 130 < result.turns_per_min_count < 190


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (ProgramPlan("p", ()), "no turns"),
        (plan((0, 4, 0.0)), "turn 1 is impossible"),
        (plan((4, 4, 0.0), (4, 0, 0.0)), "turn 2 is impossible"),
        (plan((4, 4, -1.0)), "turn 1 is impossible"),
        (plan((4, 4, inf)), "turn 1 is impossible"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(wrong: ProgramPlan, says: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"recorded, program 0.*{says}"):
        simulate(small(), Recorded([wrong]), Passthrough())


def test_an_open_loop_without_arrivals_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="closed loop"):
        simulate(small(loop="open"), Recorded([plan((4, 4, 0.0))]), Passthrough())


def test_a_run_that_would_not_fit_in_memory_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"GiB of memory"):
        Simulation(small(programs_count=10**12), StandardLoad(), Passthrough())


def test_an_hour_of_two_large_replicas_takes_less_than_a_minute() -> None:
    """A tenth of the hour gets a quarter of the time: it takes about 2 s, and must not take far more."""
    engine = EngineConfig(540_000, max_num_batched_tokens=8192, timing=profile("glm-4.6-h100x8"))
    scenario = Scenario(engine, replica_count=2, programs_count=144, horizon_s=360.0)
    began_s = process_time()
    result = simulate(scenario, workload("mini-swe-agent"), ThunderAgent())
    assert process_time() - began_s < 15.0
    assert result.turn_count > 500


class _SometimesTooLarge:
    """Every second program is larger than any engine here."""

    name = "sometimes too large"

    def program(self, index: int, seed: int) -> ProgramPlan:
        return ProgramPlan(f"p{seed}-{index}", (TurnPlan(50_000 if index % 2 else 100, 1, 0.0),))


def test_programs_that_engines_refuse_end_and_time_goes_on() -> None:
    """Without a pause before the next one, a place with refused programs only would never see time pass."""
    small = EngineConfig(kv_tokens=1600, timing=profile("demo"))
    scenario = Scenario(engine=small, programs_count=3, horizon_s=30)
    result = simulate(scenario, _SometimesTooLarge(), Passthrough())
    assert result.complete
    assert 10 < result.failed_turn_count < 200
    assert result.turn_count > 10


def test_no_part_of_a_turn_before_the_warm_up_counts_for_the_limit() -> None:
    """In a window shorter than a turn with its tool, hardly anything counts as possible work."""
    scenario = Scenario(
        engine=EngineConfig(kv_tokens=540_000, timing=profile("glm-4.6-h100x8")),
        programs_count=4,
        horizon_s=40 * 60,
        warmup_s=38 * 60,
    )
    for name in ("coding-assistant", "gaia-magentic-one"):
        result = simulate(scenario, workload(name), Passthrough())
        assert result.turn_count > 0
        assert 0 < result.limit_ratio <= 1.0, name


def test_figures_are_json_also_where_nothing_limits() -> None:
    """JSON has no infinity: the bound by tools is null without a limit of processors."""
    scenario = Scenario(engine=EngineConfig(kv_tokens=16_000, timing=profile("demo")), programs_count=2, horizon_s=20)
    written = json.loads(json.dumps(simulate(scenario, workload("standard"), Passthrough()).to_json(), allow_nan=False))
    assert written["bounds"]["tools_per_s"] is None
    assert written["limit_ratio"] > 0
