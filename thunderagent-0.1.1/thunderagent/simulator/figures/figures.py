"""The figures of one run: notes during the run, and the results at its end."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, isfinite
from typing import Any, Self

from thunderagent.programs.learned.goodput import ALPHA_RATIOS
from thunderagent.programs.messages import Decision, Event
from thunderagent.programs.state.accounts import Costs
from thunderagent.simulator.figures.bounds import Bounds
from thunderagent.simulator.figures.restores import RestoreFigures
from thunderagent.simulator.figures.waits import Waits

SMALLEST_SIZE_TOKENS = 1024
"""Programs are grouped by size for held times: up to this, up to its double, and so on."""


@dataclass(slots=True)
class ToolFigures:
    """Use of tools: waits are sums in seconds, disk is the largest simultaneous use."""

    tool_count: int = 0
    waited_for_cpu_s: float = 0.0
    waited_for_sandbox_s: float = 0.0
    sandbox_count: int = 0
    peak_sandbox_count: int = 0
    peak_disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution of seconds. Percentiles are nearest-rank: values that really occurred."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Percentiles:
        """Return the distribution of these; all 0 if there are none."""
        ordered = sorted(values_s)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)

        p50_s, p90_s, p99_s = (nearest_rank(ordered, ratio) for ratio in (0.5, 0.9, 0.99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50_s, p90_s, p99_s, ordered[-1])


def nearest_rank(ordered: Sequence[float], ratio: float) -> float:
    """Return the value that this ratio of the values does not exceed; they are sorted, and not empty."""
    return ordered[max(0, ceil(ratio * len(ordered)) - 1)]


def quantiles_s(values_s: Sequence[float]) -> tuple[float, ...]:
    """Return the least value and the percentiles 1 to 100, nearest-rank; nothing if there are no values."""
    ordered = sorted(values_s)
    return tuple(ordered[max(0, -(-percent * len(ordered) // 100) - 1)] for percent in range(101)) if ordered else ()


ROUNDING_RATIO = 1e-9
"""How much sums in another order may differ."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What was in time (MARS, arXiv 2604.26963): within `alpha_ratio` times the time alone on an idle engine.

    A turn's ideal time finds all of its program's history in the cache, a program's is that of its turns and its tools.
    Ratios are parts of the turns, and of the programs, that count.
    """

    alpha_ratio: float
    turns_per_min_count: float
    programs_per_hour_count: float
    turn_ratio: float
    program_ratio: float

    @classmethod
    def of_all(
        cls, turns_s: Sequence[tuple[float, float]], programs_s: Sequence[tuple[float, float]], measured_s: float
    ) -> tuple[Self, ...]:
        """Return that of each of the three ratios, the strictest first."""
        return tuple(cls.of(alpha_ratio, turns_s, programs_s, measured_s) for alpha_ratio in ALPHA_RATIOS)

    @classmethod
    def of(
        cls,
        alpha_ratio: float,
        turns_s: Sequence[tuple[float, float]],
        programs_s: Sequence[tuple[float, float]],
        measured_s: float,
    ) -> Self:
        """Return that of turns and programs, each with the seconds that it took and those that it would take alone."""
        limit_ratio = alpha_ratio * (1 + ROUNDING_RATIO)
        turn_count = sum(took_s <= limit_ratio * alone_s for took_s, alone_s in turns_s)
        program_count = sum(took_s <= limit_ratio * alone_s for took_s, alone_s in programs_s)
        return cls(
            alpha_ratio,
            turns_per_min_count=turn_count * 60 / measured_s if measured_s > 0 else 0.0,
            programs_per_hour_count=program_count * 3600 / measured_s if measured_s > 0 else 0.0,
            turn_ratio=turn_count / len(turns_s) if turns_s else 0.0,
            program_ratio=program_count / len(programs_s) if programs_s else 0.0,
        )


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica at one time. `demand_tokens` is what programs claim, `used_tokens` what running turns reference.

    `lost_blocks_count` is since the replica came up.
    """

    demand_tokens: int
    used_tokens: int
    running_count: int
    waiting_count: int
    lost_blocks_count: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """All replicas at one time. `imbalance_ratio` is (most - least demand) / capacity of a replica."""

    now_s: float
    replicas: tuple[ReplicaSample, ...]
    held_count: int
    imbalance_ratio: float


@dataclass(frozen=True, slots=True)
class HeldBySize:
    """How long turns were held whose prompts had over `over_tokens` and up to `up_to_tokens` tokens."""

    over_tokens: int
    up_to_tokens: int
    held: Percentiles


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """One replica over the measured time; `costs` are the five terms of the ledger, and what engines queued.

    `idle_held_s` is how long it had no turn in flight while a program was held for memory that could run there.
    """

    replica_id: str
    capacity_tokens: int
    turn_count: int
    preemption_count: int
    costs: Costs
    idle_held_s: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run came to. Only turns and programs that ended after the warm-up count, besides in `samples`.

    `complete` is False for a run that was interrupted, or a batch that was not through at its time limit.
    `program_parts_count` counts each turn as its part of its program: of few programs it says more than their number.
    `hit_ratio` is by tokens: cached over prompt. Latencies of turns begin at their arrival, so they include what was
    held; a program's latency is from its first turn's arrival to the end of its last. `turn_latency_quantiles_s` are
    those of 0, 1, ... 100 %; empty if no turn counts. `makespan_s` is set for a batch that is through, and
    `makespan_bound_s` says how long it takes at least. `longest_hold_s` is that of any turn, also of one that is still
    held at the end. `restores` are those of the whole run, as `decision_counts`.

    `bounds` are those of the very turns that count, None without any, and `limit_ratio` is the part of min(L1, L2, L3)
    that was reached; of a turn that began before the warm-up was over, only the part after it counts there. `events`
    are there on request only.
    """

    policy: str
    workload: str
    seed: int
    complete: bool
    simulated_s: float
    measured_s: float
    turn_count: int
    program_count: int
    programs_per_hour_count: float
    program_parts_count: float
    failed_turn_count: int
    bounds: Bounds | None
    limit_ratio: float
    turns_per_min_count: float
    hit_ratio: float
    turn_latency: Percentiles
    turn_latency_quantiles_s: tuple[float, ...]
    first_token_latency: Percentiles
    held: Percentiles
    longest_hold_s: float
    waits: Waits
    program_latency: Percentiles
    goodputs: tuple[Goodput, ...]
    makespan_s: float | None
    makespan_bound_s: float | None
    held_by_size: tuple[HeldBySize, ...]
    imbalance_mean_ratio: float
    imbalance_p99_ratio: float
    replicas: tuple[ReplicaFigures, ...]
    tools: ToolFigures
    decision_counts: dict[str, int]
    restores: RestoreFigures
    samples: tuple[Sample, ...]
    events: tuple[tuple[Event, tuple[Decision, ...]], ...] = field(default=(), repr=False)

    @property
    def idle_held_ratio(self) -> float:
        """Return the part of the replicas' time in which they had no turn while programs were held for memory."""
        time_s = self.measured_s * len(self.replicas)
        return sum(replica.idle_held_s for replica in self.replicas) / time_s if time_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return everything but the events as what JSON knows."""
        values: dict[str, Any] = finite(asdict(replace(self, events=())))
        del values["events"]
        return values


def finite(value: Any) -> Any:
    """Return the value with None for numbers that JSON cannot represent, such as infinity."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


class TurnLog:
    """Finished turns in columns, 56 bytes a turn."""

    __slots__ = ("arrived_s", "cached_tokens", "finished_s", "first_token_s", "granted_s", "prompt_tokens", "replicas")

    def __init__(self) -> None:
        self.arrived_s = array("d")
        self.granted_s = array("d")
        self.first_token_s = array("d")
        self.finished_s = array("d")
        self.prompt_tokens = array("q")
        self.cached_tokens = array("q")
        self.replicas = array("q")

    def __len__(self) -> int:
        return len(self.finished_s)

    def add(
        self,
        arrived_s: float,
        granted_s: float,
        first_token_s: float,
        finished_s: float,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        replica_count: int,
    ) -> None:
        """Add a turn that finished on replica number `replica_count`."""
        self.arrived_s.append(arrived_s)
        self.granted_s.append(granted_s)
        self.first_token_s.append(first_token_s)
        self.finished_s.append(finished_s)
        self.prompt_tokens.append(prompt_tokens)
        self.cached_tokens.append(cached_tokens)
        self.replicas.append(replica_count)

    def since(self, begin_s: float) -> range:
        """Return the positions of the turns that finished then or later."""
        count = len(self)
        while count and self.finished_s[count - 1] >= begin_s:
            count -= 1
        return range(count, len(self))

    def hit_ratio(self, turns: range) -> float:
        """Return the cached part of the prompts' tokens."""
        prompt_tokens = sum(self.prompt_tokens[turn] for turn in turns)
        return sum(self.cached_tokens[turn] for turn in turns) / prompt_tokens if prompt_tokens else 0.0

    def between(self, begins_s: array[float], ends_s: array[float], turns: range) -> Percentiles:
        """Return the distribution of the time from one column to another."""
        return Percentiles.of([ends_s[turn] - begins_s[turn] for turn in turns])

    def held_by_size(self, turns: range) -> tuple[HeldBySize, ...]:
        """Return held times by size of the prompt, doubling from group to group; groups without turns are left out."""
        groups: dict[int, list[float]] = {}
        for turn in turns:
            size_tokens = max(self.prompt_tokens[turn], 1)
            doublings = max(0, (ceil(size_tokens / SMALLEST_SIZE_TOKENS) - 1).bit_length())
            groups.setdefault(doublings, []).append(self.granted_s[turn] - self.arrived_s[turn])
        return tuple(
            HeldBySize(
                over_tokens=SMALLEST_SIZE_TOKENS << doublings - 1 if doublings else 0,
                up_to_tokens=SMALLEST_SIZE_TOKENS << doublings,
                held=Percentiles.of(groups[doublings]),
            )
            for doublings in sorted(groups)
        )


def difference(after: Costs, before: Costs) -> Costs:
    """Return what was spent between two readings of an account's costs."""
    return Costs(
        decode_token_s=after.decode_token_s - before.decode_token_s,
        prefill_token_s=after.prefill_token_s - before.prefill_token_s,
        recompute_token_s=after.recompute_token_s - before.recompute_token_s,
        unused_token_s=after.unused_token_s - before.unused_token_s,
        caching_token_s=after.caching_token_s - before.caching_token_s,
        queued_token_s=after.queued_token_s - before.queued_token_s,
    )
