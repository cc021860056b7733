"""A judge in a simulation: its curve, its verdicts, and what its questions cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.judging import JudgeModel, at
from thunderagent.policy_loader import load_policy
from thunderagent.programs.messages import ProgramJudged, ProgramReleased, TurnAsk
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.replicas import Outage
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan

CURVE = ((10.0, 0.5), (20.0, 0.9))
CERTAIN = JudgeModel(recall=((0.5, 1.0),), false_alarms=((0.5, 0.0),), noise_ratio=0.0, every_turns_count=2)


@pytest.mark.parametrize(("turns", "height"), [(0, 0.0), (5, 0.25), (10, 0.5), (15, 0.7), (20, 0.9), (100, 0.9)])
def test_a_curve_is_straight_between_its_points(turns: float, height: float) -> None:
    """It starts at zero, and is flat at the end."""
    assert at(CURVE, turns) == pytest.approx(height)


def plan_of(number: int, outcome: str, turns_count: int = 6) -> ProgramPlan:
    turns = tuple(TurnPlan(100, 20, 0.5, role=("a", "b")[turn % 2]) for turn in range(turns_count))
    return ProgramPlan(f"p{number}", turns, arrival_s=float(number), outcome=outcome)


class Tasks:
    """Programs of which every second one fails."""

    name = "tasks"

    def program(self, index: int, seed: int) -> ProgramPlan:
        return plan_of(index, ("success", "failure")[index % 2])


def test_predictions_are_as_frequent_as_the_curves_say() -> None:
    """They depend on the outcome; with one seed they are the same however often they are computed."""
    judge = JudgeModel(recall=CURVE, false_alarms=((10.0, 0.1),), noise_ratio=0.3)
    for outcome, ratio in (("failure", 0.5), ("success", 0.1)):
        said = [judge.predicts_failure(plan_of(number, outcome), 7, 10) for number in range(3000)]
        assert sum(said) / len(said) == pytest.approx(ratio, abs=0.03)
        assert said == [judge.predicts_failure(plan_of(number, outcome), 7, 10) for number in range(3000)]


def test_without_noise_nobody_is_acquitted() -> None:
    """Each program is predicted to fail from some turn on."""
    judge = JudgeModel(recall=CURVE, false_alarms=CURVE, noise_ratio=0.0)
    for number in range(50):
        said = [judge.predicts_failure(plan_of(number, "failure"), 0, turns) for turns in range(0, 30, 5)]
        assert said == sorted(said)


def run(judge: JudgeModel | None, **changes: object) -> RunResult:
    engine = EngineConfig(kv_tokens=16_000, timing=profile("demo"), scheduling_policy="priority")
    scenario = Scenario(engine=engine, loop="open", programs_count=6, horizon_s=600, judge=judge, keep_events=True)
    policy = load_policy("passthrough", {"priority": "orbit-judge"})
    return simulate(replace(scenario, **changes), Tasks(), policy)  # type: ignore[arg-type]


def test_verdicts_come_and_questions_cost() -> None:
    """Every two turns of every program but the last; questions take time from others."""
    judged, alone = run(CERTAIN), run(None)
    events = [event for event, _ in judged.events]
    verdicts = [event for event in events if isinstance(event, ProgramJudged)]
    assert {(each.program_id, each.turn_count, each.will_succeed) for each in verdicts} == {
        (f"p{number}", turns, number % 2 == 0) for number in range(6) for turns in (2, 4)
    }
    assert sum(isinstance(each, TurnAsk) and each.program_id is None for each in events) == 12
    assert judged.decision_counts["grant anonymous"] == 12
    assert judged.turn_count == alone.turn_count == 36
    assert judged.program_latency.mean_s > alone.program_latency.mean_s
    assert run(CERTAIN).events == judged.events


def test_roles_and_outcomes_are_told() -> None:
    """They are told as a client's headers would tell them."""
    events = [event for event, _ in run(None).events]
    assert {event.role for event in events if isinstance(event, TurnAsk)} == {"a", "b"}
    outcomes = {event.program_id: event.outcome for event in events if isinstance(event, ProgramReleased)}
    assert outcomes == {f"p{number}": ("success", "failure")[number % 2] for number in range(6)}


def test_questions_are_lost_with_their_replica() -> None:
    """Lost questions give no more events; programs continue."""
    result = run(CERTAIN, outages=(Outage("r0", 1.0, 3.0),), replica_count=2)
    assert result.complete
    assert result.program_count == 6


def test_waits_know_what_their_programs_came_to() -> None:
    """Latencies can be split by it."""
    assert sorted(wait.outcome for wait in run(None).waits.programs) == ["failure"] * 3 + ["success"] * 3
