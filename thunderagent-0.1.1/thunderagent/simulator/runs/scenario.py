"""The settings of a run besides its policy and its workload, and whether the run would fit in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Literal, Protocol, get_args

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import SchedulerSettings
from thunderagent.simulator.engine.records import EngineConfig, EngineRequest
from thunderagent.simulator.runs.replicas import Outage
from thunderagent.simulator.runs.tools import ToolSettings
from thunderagent.simulator.workloads.contexts import Context, TokenSpace
from thunderagent.simulator.workloads.plans import ProgramPlan, Workload

Loop = Literal["closed", "open", "batch"]

TIER_BLOCK_BYTES = 110
"""Memory of a block in an engine's tier: its place in the order, of a dictionary that may just have grown."""

BLOCK_BYTES = 250
"""Memory of a block in an engine's pool, its key and its place in the free list: 241 measured on CPython 3.12."""

CONTEXT_BLOCK_BYTES = 56
"""Memory of a block in a program's context: 44 measured, and 8 for its place in the engine's list of keys."""

PROGRAM_BYTES = 8_000
"""Memory of a program besides its context: plan, ledger entry, story; about 5,000 measured with 9 turns."""

TURN_BYTES = 750
"""Memory of a finished turn: seven columns (`report.TurnLog`), its shape, and what its bounds take at the end; 735."""

EVENTS_OF_TURN_BYTES = 2_500
"""Memory of a turn's events and decisions, where they are kept: 215 an event measured, and about ten of them."""

MEMORY_ADVICE = "simulate fewer programs or replicas, a smaller KV pool, or larger blocks"
"""Advice if memory is short."""

SAMPLED_PROGRAMS_COUNT = 16
"""Number of plans that are sampled to estimate a run's memory."""


class Judge(Protocol):
    """Asks about programs by anonymous turns on the same replicas; an answered question gives a verdict."""

    @property
    def prompt_tokens(self) -> int:
        """The common part of all questions."""

    @property
    def max_transcript_tokens(self) -> int:
        """Limit of what is read of a program."""

    @property
    def confidence_ratio(self) -> float:
        """The confidence of its verdicts."""

    def asks_after(self, turn_count: int) -> bool:
        """Return whether it is asked about a program after this many turns."""

    def predicts_failure(self, plan: ProgramPlan, seed: int, turn_count: int) -> bool:
        """Return its prediction for a program after this many turns."""

    def begin(self, tokens: TokenSpace) -> Context:
        """Return what is read of a program before its first question."""

    def question(self, turn_id: int, tokens: TokenSpace, read: Context, context_tokens: int) -> EngineRequest:
        """Return the engine request of a question about a program with this context; `read` is what was read before."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Fix replicas, tools, the kind of loop and its length. Raises ConfigurationError for what is impossible.

    `loop`: `closed` keeps `programs_count` programs going, a finished one is replaced at once; `open` lets programs
    arrive when their plans say, `programs_count` of them; `batch` starts `programs_count` at once and ends with the
    last. `horizon_s` ends every run; a batch is incomplete then. Turns and programs that end before `warmup_s` do not
    count. `told_capacity_ratio` is for trying what a wrong capacity costs: the scheduler is told that part of it.
    `release_ratio` is the part of the programs that say that they end; of the others nothing is heard any more.
    `engine_tells_cached` False is for engines whose usage does not say how much of a prompt was cached, as vLLM's
    without `--enable-prompt-tokens-details`: the scheduler then knows no more than the hit rate of the polls.
    `engine_tells_counters` False is for engines without metrics, whose capacity an operator gave: a poll says nothing
    else. `engine_tells_work` is for engines that count what their iterations compute, as vLLM; SGLang and Dynamo's
    mocker do not. Of the first `unknown_replica_count` replicas nobody said how much they hold. `answers_whole` is for
    clients that do not stream: the scheduler hears of a turn when it is granted and when it ends, and of nothing in
    between. `last_engine` is the last replica's, if that is smaller or slower than the others; the bounds are those of
    replicas that are all as the first. Prompts have `bytes_per_token` bytes a token; with 4, the scheduler's first
    guess, it estimates each exactly.
    A poll's answer comes `poll_delay_s` after it was read, and `poll_missing_ratio` of them do not come at all: what
    was counted meanwhile comes with the next.
    `engines_drop` is for engines that could be told whose blocks are worth least: those of a program that is paused or
    released are taken first, but for a prefix that it shares. `engines_retain` is for engines that keep the blocks of a
    program at its tool until it is paused or released, or blocks are short (`retained.py`). `judge` is asked about
    programs, on the same replicas.
    """

    engine: EngineConfig
    replica_count: int = 1
    last_engine: EngineConfig | None = None
    loop: Loop = "closed"
    programs_count: int = 16
    horizon_s: float = 3600.0
    warmup_s: float = 0.0
    seed: int = 0
    tools: ToolSettings = field(default_factory=ToolSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    tick_s: float = 1.0
    poll_interval_s: float = 1.0
    poll_delay_s: float = 0.0
    poll_missing_ratio: float = 0.0
    sample_interval_s: float = 10.0
    outages: tuple[Outage, ...] = ()
    told_capacity_ratio: float = 1.0
    release_ratio: float = 1.0
    engine_tells_cached: bool = True
    engine_tells_counters: bool = True
    engine_tells_work: bool = False
    unknown_replica_count: int = 0
    answers_whole: bool = False
    bytes_per_token: float = 4.0
    engines_drop: bool = False
    judge: Judge | None = None
    engines_retain: bool = False
    keep_events: bool = False
    replica_prefix: str = "r"
    """Replica names are this prefix and a number; runs behind one proxy must use different ones."""

    def __post_init__(self) -> None:
        for name in ("replica_count", "programs_count"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "tick_s",
            "poll_interval_s",
            "sample_interval_s",
            "told_capacity_ratio",
            "horizon_s",
            "bytes_per_token",
        ):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be a number over 0, got {value}")
        if not 0 <= self.warmup_s < self.horizon_s:
            raise ConfigurationError(f"warmup_s must be 0 or more and under {self.horizon_s:g} s, got {self.warmup_s}")
        if not (0 <= self.poll_delay_s < inf and 0 <= self.poll_missing_ratio < 1):
            raise ConfigurationError("poll_delay_s must be 0 or more, and poll_missing_ratio from 0 to under 1")
        if not 0 <= self.release_ratio <= 1:
            raise ConfigurationError(f"release_ratio must be from 0 to 1, got {self.release_ratio}")
        if not 0 <= self.unknown_replica_count <= self.replica_count:
            raise ConfigurationError(
                f"unknown_replica_count must be from 0 to {self.replica_count}, got {self.unknown_replica_count}"
            )
        self._check_last_engine()
        if self.loop not in get_args(Loop):
            raise ConfigurationError(f"loop must be one of {', '.join(get_args(Loop))}, got {self.loop!r}")
        for outage in self.outages:
            if outage.replica_id not in self.replica_ids or not 0 <= outage.down_s < outage.up_s:
                raise ConfigurationError(
                    f"impossible outage {outage}: replicas are {', '.join(self.replica_ids)}, and up_s follows down_s"
                )

    def _check_last_engine(self) -> None:
        last, first = self.last_engine, self.engine
        if last is None:
            return
        if self.replica_count < 2 or last.block_size != first.block_size or last.kv_tokens > first.kv_tokens:
            raise ConfigurationError(
                "last_engine follows another replica, which has as large blocks and no less memory"
            )

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Return the names of the replicas."""
        return tuple(f"{self.replica_prefix}{number}" for number in range(self.replica_count))

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """Return the engines of the replicas, by their names."""
        found = dict.fromkeys(self.replica_ids, self.engine)
        if self.last_engine is not None:
            found[self.replica_ids[-1]] = self.last_engine
        return found

    @property
    def tells_work(self) -> bool:
        """Return whether a poll tells what iterations computed."""
        return self.engine_tells_work and self.engine_tells_counters

    @property
    def unknown_replica_ids(self) -> tuple[str, ...]:
        """Return the names of the replicas of unknown capacity."""
        return self.replica_ids[: self.unknown_replica_count]


def estimate_bytes(scenario: Scenario, workload: Workload) -> int:
    """Estimate the memory that a run needs at most, from the first plans of its workload.

    Counts the pools, the contexts of the programs that are there at a time, and what is kept of every turn. The number
    of turns is bounded by what the engines can generate in the time.
    """
    engine = scenario.engine
    largest_context_tokens = largest_turn_count = 0
    fewest_output_tokens = inf
    for index in range(min(SAMPLED_PROGRAMS_COUNT, scenario.programs_count)):
        try:
            plan = workload.program(index, scenario.seed)
        except IndexError:
            break
        context_tokens = plan.shared_prefix_tokens + sum(t.new_tokens + t.output_tokens for t in plan.turns)
        largest_context_tokens = max(largest_context_tokens, context_tokens)
        largest_turn_count = max(largest_turn_count, len(plan.turns))
        output_tokens = sum(turn.output_tokens for turn in plan.turns) / max(1, len(plan.turns))
        fewest_output_tokens = min(fewest_output_tokens, max(1.0, output_tokens))
    turn_count: float = largest_turn_count * scenario.programs_count
    if scenario.loop == "closed" and engine.timing.base_s > 0:
        places_count = min(scenario.programs_count, engine.max_num_seqs * scenario.replica_count)
        turn_count += scenario.horizon_s / engine.timing.base_s * places_count / fewest_output_tokens
    of_a_turn = TURN_BYTES + (EVENTS_OF_TURN_BYTES if scenario.keep_events else 0)
    of_a_program = PROGRAM_BYTES + largest_context_tokens // engine.block_size * CONTEXT_BLOCK_BYTES
    return int(
        scenario.replica_count * (engine.block_count * BLOCK_BYTES + engine.tier_block_count * TIER_BLOCK_BYTES)
        + scenario.programs_count * of_a_program
        + turn_count * of_a_turn
    )


def available_bytes() -> int | None:
    """Return how much memory the machine can still give; None if unknown (Linux reports it)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kibibytes[0] * 1024 if kibibytes else None


def check_memory(needed_bytes: int, free_bytes: int | None) -> None:
    """Raise ConfigurationError if a run would not fit in memory."""
    if free_bytes is not None and needed_bytes > free_bytes:
        raise ConfigurationError(
            f"this run would need about {needed_bytes / 2**30:.1f} GiB of memory, and {free_bytes / 2**30:.1f} GiB are "
            f"free: {MEMORY_ADVICE}"
        )
