"""Compute upper bounds on turns a second for any scheduler, so that results can be given as a per cent of them.

Theory of operation
-------------------
A turn costs an engine two things: time to compute, and room in memory while it computes. With T = `a` + work for an
iteration (`timing.py`), X turns a second on one replica of C tokens, and for the mean turn of a load

    g   seconds of work, all but the `a` of its iterations: b·p + e·p(cached + p/2) + Σ(c + d·context) over its decode
        iterations; p are the prompt tokens to compute
    W   tokens times iterations that it must be resident: the prompt as far as it is computed in each iteration of its
        prefill, its context in each of its decode iterations
    H   tokens times seconds that its program is held between the turn before and this one

an engine that is never idle makes (1 - X·g)/a iterations a second; each takes a/(1 - X·g) seconds in the mean. What is
resident has to fit:

    X·W·a/(1 - X·g) + X·H <= C

which has one smallest root X (a quadratic). Holding a context costs H, dropping it costs g and W for its recomputation.

An engine that slows with the used part U of its pool takes s·U - q·U² more for an iteration. That bends downwards, so
it is at least (s - q)·U: each token that is resident costs each decode iteration (s - q)/C seconds of work, part of g.

- **L0**: every gap is free: nothing is recomputed (least g and W), nothing is held (H = 0). X = 1/(g + W·a/C).
- **L1**: clairvoyant hold-or-drop. Each gap is known beforehand; a context is held if its gap is shorter than a
  threshold, else dropped and recomputed. A search finds the best threshold: both costs grow with the context, so the
  break-even gap is nearly the same for every program.
- **L2**: a closed loop of N programs. No program is faster than alone on an idle replica, so
  X <= N · turns / time alone. The programs also slow each other down: a turn needs at least n iterations (its first
  token comes with the last iteration of its prefill), which take n·a/(1 - X·g) in the mean, and then its tool takes z
  seconds. So for N programs

      X·n·a/(1 - X·g) + X·z <= N

  with the least g. This is the inequality above with programs in place of tokens; X and N are those of one replica.
  It assumes that no iteration is idle, which is the best case: with fewer iterations each does more.
- **L3**: tools: with K processors and the mean tool time t, X <= K/t.

If engines have a tier behind their pools, a dropped context may come back from there: dropping then costs the smaller
of recomputation and restoring, as if the tier held everything.

All are upper bounds, in turns a second of the whole system. L0, L3 and the first of L2 hold for every schedule on the
engine model, except for what is left out on purpose, which can only lower the truth: blocks of 16 tokens, the sequence
limit, prefixes computed once. L1 holds gaps in the order of their length. That is the best order if the costs of
holding and recomputing both grow with the context alone; if attention or unequal prefixes count for much, another order
could be a little better. L1 and the second of L2 also assume continuous batching: what is resident sees iterations of
mean length. A schedule that did all its prefill while little is resident could pass them; none here does.

A **batch** of programs that all begin at once and run once ends no earlier than the latest of

- all its turns at the rate L1: from begin to end its schedule is one of those that L1 bounds, for these very turns. It
  may be far below L1 at the end, when few programs are left, and can at no time make up for that;
- all its tools on the available processors (L3);
- its longest program alone on an idle engine: its turns follow one another, with its tools between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import TimingProfile
from thunderagent.simulator.workloads.plans import ProgramPlan


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a load, in turns per second of all replicas; infinite without a bound.

    `hold_below_s` is the best threshold of L1: a context is held if its gap is shorter (of the longest gaps under it,
    perhaps only a part, limited by the remaining memory).
    """

    no_recompute_per_s: float
    hold_or_drop_per_s: float
    hold_below_s: float
    closed_loop_per_s: float = math.inf
    tools_per_s: float = math.inf

    @property
    def limit_per_s(self) -> float:
        """Return min(L1, L2, L3); L0 is never less than L1."""
        return min(self.hold_or_drop_per_s, self.closed_loop_per_s, self.tools_per_s)

    @property
    def limited_by(self) -> str:
        """Return which of L1, L2, L3 is the limit."""
        named = {"L1": self.hold_or_drop_per_s, "L2": self.closed_loop_per_s, "L3": self.tools_per_s}
        return min(named, key=lambda name: named[name])


@dataclass(slots=True)
class TurnCost:
    """A turn's needs of an engine: `work_s` is g and `token_iterations` is W of the theory above."""

    work_s: float = 0.0
    token_iterations: float = 0.0

    def __add__(self, other: TurnCost) -> TurnCost:
        """Return the cost of both."""
        return TurnCost(self.work_s + other.work_s, self.token_iterations + other.token_iterations)

    def __sub__(self, other: TurnCost) -> TurnCost:
        """Return the additional cost."""
        return TurnCost(self.work_s - other.work_s, self.token_iterations - other.token_iterations)

    def __mul__(self, part: float) -> TurnCost:
        """Return the cost of a part of it."""
        return TurnCost(self.work_s * part, self.token_iterations * part)

    def __truediv__(self, count: float) -> TurnCost:
        """Return the mean of `count` turns."""
        return TurnCost(self.work_s / count, self.token_iterations / count)


@dataclass(slots=True)
class TurnShape:
    """The shape of a turn: of its `prompt_tokens` the last `new_tokens` were not in its program's context before.

    The first `shared_tokens` of the prompt are those that programs share. `gap_s` is how long the tool ran before the
    turn; None for the first turn of a program.
    """

    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    shared_tokens: int
    gap_s: float | None

    @property
    def held_tokens(self) -> int:
        """Return what is held through the gap, without what is shared."""
        return self.prompt_tokens - self.new_tokens - self.shared_tokens


def turn_shapes(program: ProgramPlan) -> Iterator[TurnShape]:
    """Yield the turns of a plan, in order."""
    context_tokens = program.shared_prefix_tokens
    gap_s = None
    for turn in program.turns:
        context_tokens += turn.new_tokens
        yield TurnShape(context_tokens, turn.new_tokens, turn.output_tokens, program.shared_prefix_tokens, gap_s)
        context_tokens += turn.output_tokens
        gap_s = turn.tool_s


@dataclass(frozen=True, slots=True)
class Engines:
    """The replicas that a load runs on: equal ones, `capacity_tokens` is the KV pool of each.

    A prompt is computed at most `max_num_batched_tokens` tokens an iteration. `restore_token_s` is what a token costs
    that comes from the tier behind the pool; infinite where there is none. Raises ValueError.
    """

    timing: TimingProfile
    capacity_tokens: int
    replicas_count: int = 1
    max_num_batched_tokens: int = 2048
    restore_token_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("capacity_tokens", "replicas_count", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, config: EngineConfig, replicas_count: int) -> Self:
        """Return this many engines of that kind."""
        restore_token_s = config.restore_token_s if config.tier_block_count else math.inf
        return cls(
            config.timing, config.capacity_tokens, replicas_count, config.max_num_batched_tokens, restore_token_s
        )

    def turn_cost(
        self, *, prompt_tokens: int, computed_tokens: int, output_tokens: int, shared_tokens: int
    ) -> TurnCost:
        """Return the least cost of a turn that computes the last `computed_tokens` of its prompt.

        Tokens shared with other programs may be in memory once for all of them: they take no room here.
        """
        timing = self.timing
        cached_tokens = prompt_tokens - computed_tokens
        decode_count = max(0, output_tokens - 1)  # the first token comes with the prompt's last iteration
        decode_tokens = decode_count * prompt_tokens + decode_count * (decode_count + 1) / 2
        work_s = (
            timing.prefill_token_s * computed_tokens
            + timing.attention_pair_s * computed_tokens * (cached_tokens + computed_tokens / 2)
            + timing.decode_request_s * decode_count
            + timing.decode_context_token_s * decode_tokens
            + self.pool_token_s * (decode_tokens - decode_count * shared_tokens)
        )
        chunks = self.prefill_iterations_count(computed_tokens)
        chunk_tokens = self.max_num_batched_tokens
        prefill = chunks * (cached_tokens - shared_tokens) + chunk_tokens * chunks * (chunks - 1) / 2 + computed_tokens
        return TurnCost(work_s, prefill + decode_tokens - decode_count * shared_tokens)

    @property
    def pool_token_s(self) -> float:
        """Return what a used token of the pool costs an iteration at least: least where all are used."""
        timing = self.timing
        return (timing.decode_pool_s - timing.decode_pool_square_s) / self.capacity_tokens

    def prefill_iterations_count(self, computed_tokens: int) -> int:
        """Return the least number of iterations that compute this many prompt tokens."""
        return max(1, math.ceil(computed_tokens / self.max_num_batched_tokens))

    def least_cost(self, shape: TurnShape) -> TurnCost:
        """Return what a turn costs if all of its program's context is in memory."""
        return self._cost(shape, shape.new_tokens)

    def dropped_cost(self, shape: TurnShape) -> TurnCost:
        """Return what a turn costs if only what it shares with other programs is in memory."""
        recomputed = self._cost(shape, shape.prompt_tokens - shape.shared_tokens)
        if self.restore_token_s == math.inf:
            return recomputed
        least = self.least_cost(shape)
        restored_s = least.work_s + self.restore_token_s * shape.held_tokens
        return TurnCost(min(recomputed.work_s, restored_s), least.token_iterations)

    def iterations_count(self, shape: TurnShape) -> int:
        """Return a turn's least number of iterations; its first token comes with the last one of its prefill."""
        return self.prefill_iterations_count(shape.new_tokens) + max(0, shape.output_tokens - 1)

    def alone_s(self, shape: TurnShape) -> float:
        """Return a turn's least time: on an idle replica that holds all of its program's context."""
        timing = self.timing
        prefill_base_s = self.prefill_iterations_count(shape.new_tokens) * timing.prefill_base_s
        return self.iterations_count(shape) * timing.base_s + prefill_base_s + self.least_cost(shape).work_s

    def _cost(self, shape: TurnShape, computed_tokens: int) -> TurnCost:
        return self.turn_cost(
            prompt_tokens=shape.prompt_tokens,
            computed_tokens=computed_tokens,
            output_tokens=shape.output_tokens,
            shared_tokens=shape.shared_tokens,
        )

    def turns_per_s(self, mean: TurnCost, held_token_s: float) -> float:
        """Solve X·W·a/(1 - X·g) + X·H = C for one replica; return the X of all of them. See the module docstring."""
        resident_s = mean.token_iterations * self.timing.base_s
        return self.replicas_count * _rate_per_s(resident_s, held_token_s, mean.work_s, self.capacity_tokens)

    def looped_turns_per_s(self, iterations_count: float, work_s: float, gap_s: float, programs_count: int) -> float:
        """Solve X·n·a/(1 - X·g) + X·z = N in the same way, for as many programs on each replica."""
        resident_s, on_each = iterations_count * self.timing.base_s, programs_count / self.replicas_count
        return self.replicas_count * _rate_per_s(resident_s, gap_s, work_s, on_each)


def bounds(
    turns: Iterable[TurnShape],
    engines: Engines,
    *,
    parts: Sequence[float] | None = None,
    programs_count: int | None = None,
    tool_processors_count: int | None = None,
) -> Bounds:
    """Return the bounds of a load of which `turns` are a fair sample: every one of them runs equally often.

    For a load before it runs that is every turn of its plans (`turn_shapes`); for a run, the turns that it finished:
    a policy that lets short programs run first has other turns in the same time, and other bounds. `parts` says how
    much of each turn counts (None: all of it), for turns of which a part lies before the time that is looked at.

    `programs_count` programs run at a time in a closed loop (None: an open loop, no L2); `tool_processors_count` tools
    at a time (None: no L3). Cost: O(turns · log turns). Raises ValueError for no turns, and for one that fits on no
    replica.
    """
    shapes = list(turns)
    if not shapes:
        raise ValueError("bounds need at least one turn")
    largest = max(shapes, key=lambda shape: shape.prompt_tokens + shape.output_tokens)
    if largest.prompt_tokens + largest.output_tokens > engines.capacity_tokens:
        raise ValueError(
            f"a turn of {largest.prompt_tokens + largest.output_tokens} tokens fits on no replica of "
            f"{engines.capacity_tokens}"
        )
    if parts is None:
        parts = [1.0] * len(shapes)
    turns_count = sum(parts)
    fixed, gaps, alone_s, tools_s, iterations_count = TurnCost(), [], 0.0, 0.0, 0.0
    for shape, part in zip(shapes, parts, strict=True):
        least = engines.least_cost(shape)
        fixed += least * part
        alone_s += part * engines.alone_s(shape)
        iterations_count += part * engines.iterations_count(shape)
        if shape.gap_s is not None:
            recompute = (engines.dropped_cost(shape) - least) * part
            gaps.append(_Gap(shape.gap_s, part * shape.gap_s * shape.held_tokens, recompute))
            tools_s += part * shape.gap_s
    threshold_s, hold_or_drop = _best_threshold(fixed, gaps, turns_count, engines)
    closed_loop = _ratio(programs_count, turns_count, alone_s + tools_s)
    if programs_count is not None:
        mean_counts = iterations_count / turns_count, fixed.work_s / turns_count, tools_s / turns_count
        closed_loop = min(closed_loop, engines.looped_turns_per_s(*mean_counts, programs_count))
    return Bounds(
        no_recompute_per_s=engines.turns_per_s(fixed / turns_count, 0.0),
        hold_or_drop_per_s=hold_or_drop,
        hold_below_s=threshold_s,
        closed_loop_per_s=closed_loop,
        tools_per_s=_ratio(tool_processors_count, turns_count, tools_s),
    )


def makespan_bound_s(limits: Bounds, turns_count: int, programs_alone_s: Sequence[float]) -> float:
    """Return the least time of a batch: the module docstring explains it.

    `limits` are those of all its turns, of which there are `turns_count`; `programs_alone_s` is the time alone of each
    program that ended, including its tools: there may be none.
    """
    turns_s = turns_count / min(limits.hold_or_drop_per_s, limits.tools_per_s)
    return max([turns_s, *programs_alone_s])


@dataclass(frozen=True, slots=True)
class _Gap:
    """A tool's time, the cost of holding the context for it, and the next turn's additional cost of dropping it."""

    gap_s: float
    held_token_s: float
    recompute: TurnCost


def _best_threshold(fixed: TurnCost, gaps: list[_Gap], turns_count: float, engines: Engines) -> tuple[float, float]:
    """Return the threshold with the most turns per second, and that rate: all gaps below it are held."""
    by_length = sorted(gaps, key=lambda gap: gap.gap_s)
    cost = sum((gap.recompute for gap in by_length), fixed)
    held = [(cost, 0.0)]  # by number of the shortest gaps held: the cost of turns, and of holding
    for gap in by_length:
        cost -= gap.recompute
        held.append((cost, held[-1][1] + gap.held_token_s))

    def turns_per_s(held_count: float) -> float:
        whole_count = min(int(held_count), len(by_length))
        cost, held_token_s = held[whole_count]
        if part := held_count - whole_count:
            gap = by_length[whole_count]
            cost, held_token_s = cost - gap.recompute * part, held_token_s + gap.held_token_s * part
        return engines.turns_per_s(cost / turns_count, held_token_s / turns_count)

    best = max(range(len(held)), key=turns_per_s)
    # The sample stands for many programs: of the gap at the threshold a part may be held.
    exact = _peak(turns_per_s, max(0, best - 1), min(len(by_length), best + 1))
    threshold_s = math.nextafter(by_length[math.ceil(exact) - 1].gap_s, math.inf) if exact > 0 else 0.0
    return threshold_s, turns_per_s(exact)


def _peak(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the maximum position of a function that rises and then falls, including the ends and the middle."""
    candidates = [low, high, (low + high) // 2]
    for _ in range(60):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if function(left) < function(right):
            low = left
        else:
            high = right
    return max([*candidates, low], key=function)


def _rate_per_s(resident_s: float, held_s: float, work_s: float, room: float) -> float:
    """Return the smallest root X of X·resident/(1 - X·work) + X·held = room."""
    linear = resident_s + held_s + room * work_s
    if linear == 0:
        return math.inf
    root = math.sqrt(max(0.0, linear**2 - 4 * held_s * work_s * room))
    return 2 * room / (linear + root)


def _ratio(count: int | None, turns_count: float, total_s: float) -> float:
    return math.inf if count is None or total_s == 0 else count * turns_count / total_s
