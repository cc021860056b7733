"""The agent-centric engine: levels, quanta, chunks that shrink, retained blocks, and the order of eviction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from benchmarks.mlfq import Mlfq, effective_level, quantum_tokens
from tests.unit.simulator.engine.test_engine import UNIT, AnyUse, finish, tokens
from thunderagent.simulator.comparison.contestants import Contestant
from thunderagent.simulator.engine.engine import Engine
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload


def make_engine(*, blocks: int, block_size: int = 4, policy: str = "mlfq", **config: object) -> Engine:
    settings = {"block_size": block_size, "timing": UNIT, "max_num_batched_tokens": 8192, **config}
    if policy == "mlfq":
        policy, settings["discipline"] = "priority", Mlfq
    return Engine(EngineConfig(blocks * block_size, scheduling_policy=policy, **settings))  # type: ignore[arg-type]


def request(
    name: str, start: int, prompt: int, output: int = 1, *, priority: int = 0, retain: str = ""
) -> EngineRequest:
    words = tokens(start, prompt + output)
    return EngineRequest(name, words[:prompt], words[prompt:], priority, retain_id=retain)


@pytest.mark.parametrize(
    ("remaining", "feedback", "unserved_s", "level", "quantum"),
    [
        (2048, 0, 0.0, 0, 2048),
        (2049, 0, 0.0, 1, 1024),
        (8193, 0, 0.0, 2, 512),
        (100_000, 0, 0.0, 3, 256),
        (100, 2, 0.0, 2, 512),
        (100_000, 0, 29.9, 3, 256),
        (100_000, 0, 61.0, 1, 1024),
        (100_000, 3, 500.0, 0, 2048),
    ],
)
def test_a_level_is_of_what_remains_and_of_service_and_falls_by_waiting(
    remaining: int, feedback: int, unserved_s: float, level: int, quantum: int
) -> None:
    assert effective_level(remaining, feedback, unserved_s) == level
    assert quantum_tokens(level) == quantum


def test_a_long_prompt_stands_in_nobodys_way() -> None:
    """A later short prompt ends in one iteration; a stock engine first computes the long one."""
    through = {}
    for policy in ("fcfs", "mlfq"):
        engine = make_engine(blocks=20_000, policy=policy)
        engine.submit(request("long", 0, 60_000), 0.0)
        engine.step(0.0)
        engine.submit(request("short", 100_000, 500), 1.0)
        results = [engine.step(1.0 + number) for number in range(9)]
        through[policy] = next((n for n, each in enumerate(results) if each.finished), None)
    assert through["mlfq"] == 0
    assert (through["fcfs"] or 9) >= 6


def test_program_alone_gets_the_whole_budget() -> None:
    """Quanta apply only in company."""
    engine = make_engine(blocks=40_000)
    engine.submit(request("long", 0, 60_000, 2), 0.0)
    assert engine.step(0.0).work.prefill_tokens == 8192
    engine.submit(request("other", 100_000, 60_000), 0.0)
    assert engine.step(0.0).work.prefill_tokens == 256 + 256


def test_program_that_uses_whole_quanta_falls() -> None:
    """It falls one level each time, whatever is left: the tail of a prompt gets a quarter of its head's quantum."""
    engine = make_engine(blocks=5000)
    engine.submit(request("talks", 50_000, 4, 400), 0.0)
    engine.step(0.0)
    engine.submit(request("prompt", 0, 3500), 1.0)
    chunks = [engine.step(1.0 + number).work.prefill_tokens for number in range(7)]
    assert chunks == [1024, 1024, 512, 256, 256, 256, 172]


def test_a_chunk_that_does_not_fit_shrinks_instead_of_preempting() -> None:
    """A generating request grew into a prompt's room: as much as fits is computed, and nothing is preempted."""
    chunks, preempted = {}, {}
    for policy in ("priority", "mlfq"):
        engine = make_engine(blocks=40, max_num_batched_tokens=64, policy=policy)
        engine.submit(request("old", 0, 11, 60), 0.0)
        engine.step(0.0)
        engine.submit(request("new", 100, 148), 1.0)
        results = []
        for number in range(6):
            results.append(engine.step(1.0 + number))
            engine.check_invariants()
        chunks[policy] = [each.work.prefill_tokens for each in results[:4]]
        preempted[policy] = [list(each.preempted) for each in results[:4]]
        finish(engine)
    assert chunks["mlfq"] == [63, 63, 11, 5]
    assert preempted["mlfq"] == [[]] * 4
    assert ["new"] in preempted["priority"]


def test_shrinking_halves_down_to_one_block() -> None:
    """The quantum is halved again and again until it fits."""
    engine = make_engine(blocks=10)
    engine.submit(request("a", 0, 20), 0.0)
    sequence = engine._sequences["a"]
    assert engine._shrunk(sequence, 40) == 40
    engine._pool.allocate(6)
    assert engine._shrunk(sequence, 40) == 10
    engine._pool.allocate(4)
    assert engine._shrunk(sequence, 40) == 4


def test_the_largest_prompt_is_preempted_before_who_generates() -> None:
    """Priority precedes footprint, and the youngest goes last."""
    engine = make_engine(blocks=16, max_num_batched_tokens=4096)
    for name, start, prompt in (("small", 0, 8), ("large", 100, 24)):
        engine.submit(request(name, start, prompt, 20), 0.0)
    engine.step(0.0)
    assert engine._victim(1.0).request_id == "large"
    engine.submit(request("prompt", 200, 4, 1), 1.0)
    sequence = engine._sequences["prompt"]
    engine._admit_waiting(_plan(engine))
    assert engine._victim(1.0) is sequence


def _plan(engine: Engine):  # type: ignore[no-untyped-def]
    from thunderagent.simulator.engine.records import Plan  # noqa: PLC0415

    return Plan(engine.config.max_num_batched_tokens, 1.0)


def test_retained_blocks_wait_for_the_next_turn() -> None:
    """Others do not take them as free blocks; they are given back when the next turn has them."""
    for retain, cached in (("", 0), ("p", 40)):
        engine = make_engine(blocks=24)
        engine.submit(request("first", 0, 40, retain=retain), 0.0)
        finish(engine)
        assert engine.stats.used_block_count == (10 if retain else 0)
        for number in range(6):  # 8 blocks each, in turn
            engine.submit(request(f"other-{number}", 1000 * (number + 1), 32), 0.0)
            finish(engine)
        engine.submit(EngineRequest("second", tokens(0, 44), [9], retain_id=retain), 0.0)
        assert finish(engine)[-1].finished[0].cached_tokens == cached
        assert engine.stats.used_block_count == (11 if retain else 0)
        engine.drop_retained("p")
        engine.drop_retained("nobody")
        assert engine.stats.used_block_count == 0


def test_retained_blocks_go_before_anybody_waits_the_least_important_and_largest_first() -> None:
    """The priority of the turn that left them counts, then their number."""
    engine = make_engine(blocks=24)
    for name, start, prompt, priority in (("low", 0, 16, 3), ("large", 100, 32, 1), ("small", 200, 16, 1)):
        engine.submit(request(name, start, prompt, priority=priority, retain=name), 0.0)
        finish(engine)
    left = []
    for number, prompt in enumerate((36, 48, 64)):  # 8 blocks are free at first
        engine.submit(request(f"other-{number}", 1000 * (number + 1), prompt), 0.0)
        results = finish(engine)
        assert not any(each.preempted for each in results)
        left.append(engine._retained.ids)
    assert left == [{"large", "small"}, {"large", "small"}, {"small"}]


class AnyUseThatRetains(AnyUse):
    """The engine also retains blocks and lets them go: every block is either free or held, and all turns end."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine(blocks=9, max_num_batched_tokens=12, max_num_seqs=4)

    @rule(
        family=st.integers(0, 2),
        prompt_tokens=st.integers(1, 26),
        output_tokens=st.integers(1, 10),
        priority=st.integers(0, 2),
        retain=st.sampled_from(["p", "q"]),
    )
    def submit_retained(self, family: int, prompt_tokens: int, output_tokens: int, priority: int, retain: str) -> None:
        name = str(next(self.ids))
        self.engine.submit(
            request(name, family * 100, prompt_tokens, output_tokens, priority=priority, retain=retain), self.now_s
        )
        self.live.add(name)

    @rule(name=st.sampled_from(["p", "q", "r"]))
    def drop_retained(self, name: str) -> None:
        self.engine.drop_retained(name)

    @rule()
    def retract(self) -> None:
        running_count = self.engine.stats.running_count
        assert self.engine.retract_all() == running_count
        assert self.engine.stats.running_count == 0  # retained blocks still count as used

    def teardown(self) -> None:
        finish(self.engine)
        self.engine.drop_retained("p")
        self.engine.drop_retained("q")
        super().teardown()


TestAnyUseThatRetains = AnyUseThatRetains.TestCase
TestAnyUseThatRetains.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_run_retains_what_is_claimed_and_ends_with_nothing() -> None:
    """With memory for all, every turn but the first finds its whole history; the stock engine is unchanged."""
    scenario = Scenario(EngineConfig(200_000), loop="batch", programs_count=6, engines_retain=True)
    scenario = replace(scenario, engine=replace(scenario.engine, scheduling_policy="priority", discipline=Mlfq))
    result = Contestant.parse("mars").run(scenario, workload("standard"))
    assert result.complete
    assert result.program_count == 6
    assert all(replica.preemption_count == 0 for replica in result.replicas)
    stock = Contestant.parse("mars").run(replace(scenario, engine=EngineConfig(200_000)), workload("standard"))
    assert stock.complete
    assert abs(stock.hit_ratio - result.hit_ratio) < 0.02
