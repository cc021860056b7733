"""No turn waits for a guess: if the claims and the known future fit, every turn goes at once.

`CODING` is derived from the agentic coding traces of callanjfox/kv-cache-tester (captured at WEKA with
claude-code-proxy), Apache-2.0; modified: reduced to six sessions, and of each turn to its input and output tokens and
the seconds until the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from thunderagent.policy_loader import load_policy
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import RunResult
from thunderagent.simulator.runs.run import simulate
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan, TurnPlan, Workload

LARGE = EngineConfig(kv_tokens=540_000, timing=profile("glm-4.6-h100x8"), max_num_batched_tokens=8192)
SMALL = EngineConfig(kv_tokens=16_000, timing=profile("demo"), max_num_batched_tokens=2048)

# fmt: off
CODING: dict[str, tuple[tuple[int, int, float], ...]] = {
    "cc-0072": (
        (85554, 104, 2.87), (85805, 88, 3.04), (85912, 91, 6.24), (86015, 173, 2.82), (86295, 179, 3.77),
        (86493, 149, 5.36), (86663, 153, 5.01), (86933, 122, 7.15), (87138, 149, 7.67), (87401, 168, 3.34),
        (87678, 110, 4.23), (89210, 138, 4.18), (89692, 110, 8.03), (91751, 235, 13.92), (92745, 402, 0),
    ),
    "cc-0085": (
        (48175, 214, 39.7), (63842, 1005, 300), (64982, 685, 300), (65941, 511, 300), (66678, 6786, 114.31),
        (71881, 481, 141.07), (72580, 2163, 43.03), (77086, 352, 99.84), (77558, 413, 0.5), (78137, 6108,
        69.65), (83168, 323, 0.09), (83749, 5478, 16.6), (86408, 4353, 67.22), (97409, 321, 6.8), (97990, 256,
        24.73), (98566, 1815, 13.12), (100563, 514, 0),
    ),
    "cc-0106": (
        (65992, 162, 5.43), (83414, 159, 21.9), (83600, 1528, 7.84), (86722, 138, 3.64), (87788, 251, 5.94),
        (88311, 130, 14.74), (89298, 928, 5.7), (91212, 136, 6.84), (92073, 469, 4.27), (92936, 127, 14.69),
        (93708, 919, 4.84), (95264, 137, 29.26), (95423, 912, 0),
    ),
    "cc-0129": (
        (15459, 447, 7.98), (15858, 329, 18.56), (16539, 305, 5.95), (16842, 264, 6.61), (18552, 305, 6.74),
        (23996, 274, 7.02), (35022, 393, 8.17), (35393, 114, 3.03), (56024, 302, 16.99), (60026, 345, 8.3),
        (60360, 339, 5.64), (60787, 315, 5.79), (61831, 495, 12.34), (69772, 251, 11.4), (70625, 273, 6.46),
        (70911, 188, 3.83), (71367, 332, 4.51), (73060, 692, 15.24), (73691, 271, 6.5), (74005, 196, 4.71),
        (77752, 343, 7.14), (78430, 206, 8.54), (82483, 804, 11.9), (82782, 260, 0),
    ),
    "cc-0179": (
        (109585, 108, 2.87), (110596, 140, 3.24), (110952, 108, 5.05), (113020, 171, 3.59), (113524, 174, 7.09),
        (113971, 144, 5.42), (114161, 236, 3.27), (114488, 119, 4.82), (114863, 202, 0.36), (115491, 4069,
        60.48), (119769, 607, 14.63), (121528, 180, 300), (121750, 884, 3.52), (122648, 338, 0.38), (123786,
        1427, 12.12), (125505, 1689, 38.99), (126761, 654, 0),
    ),
    "cc-0214": (
        (112280, 265, 44.59), (112617, 100, 11.25), (113460, 146, 130.51), (113746, 79, 32.44), (113872, 143,
        21.56), (114384, 149, 8.46), (114851, 208, 8.08), (115092, 275, 0),
    ),
}
# fmt: on
"""Input, output, and the time until the next turn; persons are away for at most 300 s."""


@dataclass(frozen=True)
class Recorded:
    """The recorded programs, in their order."""

    name: str = "coding"

    def program(self, index: int, seed: int) -> ProgramPlan:
        program_id, calls = list(CODING.items())[index]
        turns, context_tokens = [], 0
        for input_tokens, output_tokens, gap_s in calls:
            turns.append(TurnPlan(max(1, input_tokens - context_tokens), output_tokens, gap_s))
            context_tokens += turns[-1].new_tokens + output_tokens
        return ProgramPlan(program_id, tuple(turns))


def run(scenario: Scenario, programs: Workload, policy: str) -> RunResult:
    return simulate(scenario, programs, load_policy(policy, {}))


def holds_count(result: RunResult) -> int:
    return sum(count for what, count in result.decision_counts.items() if what.startswith("hold"))


@pytest.mark.parametrize("policy", ["breakeven", "thunderagent"])
def test_three_recorded_programs_in_a_pool_that_holds_four_never_wait(policy: str) -> None:
    """Six sessions that grow to 80,000 to 128,000 tokens, three at a time, on a pool of 540,000."""
    scenario = Scenario(engine=LARGE, programs_count=3, horizon_s=4 * 3600.0)
    result = run(scenario, Recorded(), policy)
    assert result.turn_count == sum(map(len, CODING.values()))
    assert holds_count(result) == 0


def test_four_programs_where_seven_fit_hardly_ever_wait_from_a_cold_start() -> None:
    """In 80 s of each of ten seeds fewer than one turn in a hundred is held, and none for longer than a second."""
    held_count = turn_count = 0
    for seed in range(10):
        scenario = Scenario(engine=SMALL, programs_count=4, horizon_s=80.0, seed=seed)
        result = run(scenario, workload("standard"), "breakeven")
        held_count += holds_count(result)
        turn_count += result.turn_count
        assert result.longest_hold_s <= 1.0
    assert held_count <= 0.01 * turn_count


def test_growth_is_foreseen_once_seen_where_memory_is_short() -> None:
    """Sixteen programs, a minute after a cold start: twice the turns of passing through, and more than the paper's."""
    scenario = Scenario(engine=SMALL, programs_count=16, horizon_s=360.0, warmup_s=60.0)
    rates = {
        policy: sum(
            run(replace(scenario, seed=seed), workload("standard"), policy).turns_per_min_count for seed in range(2)
        )
        for policy in ("breakeven", "passthrough", "thunderagent")
    }
    assert rates["breakeven"] >= 2.0 * rates["passthrough"]
    assert rates["breakeven"] >= 1.08 * rates["thunderagent"]
