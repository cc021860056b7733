"""Compare Nova's policies in virtual time, on stage times of the paper and assumed slowdowns: ranks, not margins.

Theory of operation
-------------------
The scheduler is the engine's own; this module simulates its workers. A pass is work of 1, done at a rate that depends
on what runs beside it, and ends when it is done. Each event books the work so far and recomputes the rates.

Published (an RTX A6000, 84 SMs): the time of each stage alone (Table I); decoding of 10 takes 30.6 ms (III-C); two
linear kernels of encoding and decoding on streams without a split slow down to 1 / 0.864 and 1 / 0.204 (Table IV, from
588.3 and 699.8 ms alone to 680.6 and 1241.8 ms). Assumed, because the curves are only drawn: on u of 84 SMs a stage
that computes takes 0.35 + 0.65 * 84 / u of its time, decoding 1 + (15 / u)^2, and both 5 % more beside each other.
This gives 1.5 s for encoding and prefill beside decoding (Table V: 1.35 to 1.44 s, some of it alone), and 78 ms for a
token in the smallest share of 12 SMs (V-A: below 80 ms). A chunk of a prefill reads all weights once, as a decoding
step does. Running together, the two share that cost in linear layers, three quarters of a step (III-B), and share
nothing in the rest.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import fmean

from benchmarks.machine import save_results
from thunderagent_nova.messages import (
    Arrived,
    Decision,
    DecodeDone,
    EncodeDone,
    Event,
    Free,
    PrefillDone,
    Profile,
    Resplit,
    Split,
    SplitTimes,
    StartDecode,
    StartEncode,
    StartPrefill,
)
from thunderagent_nova.policy import SplitPolicy, Static, adaptive_of
from thunderagent_nova.scheduler import Scheduler

UNITS = 84
ENCODE_S, PREFILL_S = 0.8068, 0.3241
PROMPT_TOKENS = 1700
OUTPUT_TOKENS = (30, 80)
MEAN_OUTPUT_TOKENS = 55
BESIDE = 1.05
STREAMS_ENCODE_RATE, STREAMS_DECODE_RATE = 0.864, 0.204
LINEAR_PART = 0.75
RATES_PER_S = (0.3, 0.5, 0.6, 0.7)
STATIC_UNITS = (12, 18, 24, 30, 36)


def decode_s(batch: int) -> float:
    """Return the time of a step that runs alone."""
    return 0.0289 + (0.0306 - 0.0289) * (batch - 1) / 9


def computing_slowdown(units: int) -> float:
    """Return the slowdown factor of encoding and prefill beside decoding, on a number of SMs."""
    return BESIDE * (0.35 + 0.65 * UNITS / units)


def decoding_slowdown(units: int) -> float:
    """Return the slowdown factor of decoding beside another stage, on a number of SMs."""
    return BESIDE * (1.0 + (15 / units) ** 2)


def profile() -> Profile:
    """Return the model as a measured profile, for every even share."""
    splits = tuple(
        SplitTimes(
            decode_units=units,
            rest_units=UNITS - units,
            encode_s=ENCODE_S * computing_slowdown(UNITS - units),
            prefill_s=PREFILL_S * computing_slowdown(UNITS - units),
            decode_beside_encode_s=decode_s(3) * decoding_slowdown(units),
            decode_beside_prefill_s=decode_s(3) * decoding_slowdown(units),
        )
        for units in range(2, UNITS, 2)
    )
    return Profile("a model of an RTX A6000", UNITS, ENCODE_S, PREFILL_S, {n: decode_s(n) for n in (1, 3, 10)}, splits)


@dataclass(frozen=True, slots=True)
class Card:
    """The time of each stage alone, and its slowdown beside another one on a split."""

    encode_s: float
    prefill_s: float
    decode_s: Callable[[int], float]
    slowdown: Callable[[str, Split], float]


def read_profile(path: Path) -> Profile:
    """Read the profile that `scripts/bench nova e1` measured, without torch."""
    told = json.loads(path.read_text())["profile"]
    decode_s = {int(batch): seconds for batch, seconds in told.pop("decode_s").items()}
    splits = tuple(SplitTimes(**split) for split in told.pop("splits"))
    return Profile(**told, decode_s=decode_s, splits=splits)


def measured(of: Profile) -> Card:
    """Return a card as measured; without a split it is as in the paper."""
    by_share = {times.decode_units: times for times in of.splits}
    most = max(of.decode_s)

    def slowdown(stage: str, split: Split) -> float:
        if split is None:
            return _slowdown(stage, None)
        times = by_share[split]
        if stage == "decode":
            return times.decode_beside_encode_s / of.decode_s[min(3, most)]
        return times.encode_s / of.encode_s if stage == "encode" else times.prefill_s / of.prefill_s

    return Card(of.encode_s, of.prefill_s, lambda batch: of.decode_s[min(batch, most)], slowdown)


@dataclass(slots=True)
class _Pass:
    """A worker's pass: its time alone, how much of it is left, and its split."""

    decision: StartEncode | StartPrefill | StartDecode
    alone_s: float
    split: Split
    left: float = 1.0
    rate_per_s: float = 0.0


@dataclass(slots=True)
class _Course:
    """A request's times, and the number of tokens to come."""

    arrived_s: float
    tokens_left: int
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = inf


@dataclass(slots=True)
class Outcome:
    """The outcome of a policy on a load: latencies in seconds, in order of arrival."""

    latencies_s: list[float]
    waits_s: list[float]
    first_token_s: list[float]
    batches: list[int] = field(default_factory=list)
    front_s: list[float] = field(default_factory=list)

    @property
    def mean_s(self) -> float:
        """Return the mean latency."""
        return fmean(self.latencies_s)


class Model:
    """One run of a scheduler over arrivals, in virtual time."""

    def __init__(self, scheduler: Scheduler, arrivals: Sequence[tuple[float, int]], card: Card | None = None) -> None:
        """Take arrivals as (time, output tokens), ascending, on the paper's card unless another is given."""
        self._card = card or Card(ENCODE_S, PREFILL_S, decode_s, _slowdown)
        self._scheduler = scheduler
        self._courses = {str(i): _Course(at_s, tokens) for i, (at_s, tokens) in enumerate(arrivals)}
        self._arrivals = [(at_s, str(i)) for i, (at_s, _) in enumerate(arrivals)]
        self._passes: dict[str, _Pass] = {}
        self._batches: list[int] = []
        self._now_s = 0.0

    def run(self) -> Outcome:
        """Return the outcome after the last request ended."""
        waiting = iter([*self._arrivals, (inf, "")])
        next_s, request_id = next(waiting)
        while next_s < inf or self._passes:
            stage, end_s = self._first_to_end()
            self._advance(min(next_s, end_s))
            if next_s <= end_s:
                self._tell(Arrived(next_s, request_id, 1, PROMPT_TOKENS))
                next_s, request_id = next(waiting)
            else:
                self._tell(self._answer(self._passes.pop(stage)))
        courses = self._courses.values()
        return Outcome(
            [course.ended_s - course.arrived_s for course in courses],
            [course.started_s - course.arrived_s for course in courses],
            [course.first_token_s - course.arrived_s for course in courses],
            self._batches,
            [course.first_token_s - course.started_s for course in courses],
        )

    def _tell(self, event: Event) -> None:
        for decision in self._scheduler.handle(event):
            self._take(decision)
        self._set_rates()

    def _take(self, decision: Decision) -> None:
        match decision:
            case StartEncode(request_id, split):
                self._courses[request_id].started_s = self._now_s
                self._passes["encode"] = _Pass(decision, self._card.encode_s, split)
            case StartPrefill(_, begin, end, split):
                alone_s = self._card.prefill_s * (end - begin) / PROMPT_TOKENS
                if end - begin < PROMPT_TOKENS:  # a chunk
                    alone_s = max(alone_s, self._card.decode_s(1))
                self._passes["prefill"] = _Pass(decision, alone_s, split)
            case StartDecode(request_ids, split):
                self._batches.append(len(request_ids))
                self._passes["decode"] = _Pass(decision, self._card.decode_s(len(request_ids)), split)
            case Resplit(split):
                self._passes["encode"].split = split
            case Free(request_id):
                self._courses[request_id].ended_s = self._now_s

    def _answer(self, done: _Pass) -> Event:
        match done.decision:
            case StartEncode(request_id):
                return EncodeDone(self._now_s, request_id)
            case StartPrefill(request_id, _, end):
                if end == PROMPT_TOKENS:
                    course = self._courses[request_id]
                    course.first_token_s = self._now_s
                    course.tokens_left -= 1
                return PrefillDone(self._now_s, request_id, end)
            case StartDecode(request_ids):
                for request_id in request_ids:
                    self._courses[request_id].tokens_left -= 1
                finished = tuple(each for each in request_ids if not self._courses[each].tokens_left)
                return DecodeDone(self._now_s, request_ids, finished)

    def _first_to_end(self) -> tuple[str, float]:
        ends = ((stage, self._now_s + each.left / each.rate_per_s) for stage, each in self._passes.items())
        return min(ends, key=lambda end: end[1], default=("", inf))

    def _advance(self, to_s: float) -> None:
        for each in self._passes.values():
            each.left = max(0.0, each.left - (to_s - self._now_s) * each.rate_per_s)
        self._now_s = to_s

    def _set_rates(self) -> None:
        is_shared = len(self._passes) > 1
        is_merged = self._scheduler.policy_name == "chunked"
        merged_s = _merged_s([each.alone_s for each in self._passes.values()])
        for stage, each in self._passes.items():
            if is_shared and is_merged:
                each.rate_per_s = 1.0 / merged_s
            else:
                each.rate_per_s = 1.0 / (each.alone_s * (self._card.slowdown(stage, each.split) if is_shared else 1.0))


def _merged_s(passes_s: list[float]) -> float:
    return LINEAR_PART * max(passes_s, default=0.0) + (1.0 - LINEAR_PART) * sum(passes_s)


def _slowdown(stage: str, split: Split) -> float:
    if split is None:
        return 1.0 / (STREAMS_DECODE_RATE if stage == "decode" else STREAMS_ENCODE_RATE)
    return decoding_slowdown(split) if stage == "decode" else computing_slowdown(UNITS - split)


def arrivals(rate_per_s: float, count: int, seed: int) -> list[tuple[float, int]]:
    """Return Poisson arrivals with outputs of 30 to 80 tokens, the same for each policy."""
    draw = random.Random(seed)
    at_s, drawn = 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(rate_per_s)
        drawn.append((at_s, draw.randint(*OUTPUT_TOKENS)))
    return drawn


def run(
    policy_name: str,
    rate_per_s: float,
    *,
    split_policy: SplitPolicy | None = None,
    count: int = 500,
    seed: int = 0,
    card: Card | None = None,
) -> Outcome:
    """Run one policy over one load, with enough slots for all requests."""
    scheduler = Scheduler(policy_name, slots=count, split_policy=split_policy)
    return Model(scheduler, arrivals(rate_per_s, count, seed), card).run()


def compare(rate_per_s: float, *, count: int = 500, seed: int = 0) -> dict[str, Outcome]:
    """Run all policies over the same load: the adaptive split, static ones, and the three others."""
    adaptive = adaptive_of(profile(), MEAN_OUTPUT_TOKENS)
    outcomes = {"adaptive": run("nova", rate_per_s, split_policy=adaptive, count=count, seed=seed)}
    for units in STATIC_UNITS:
        static = Static(units, units)
        outcomes[f"static-{units}"] = run("nova", rate_per_s, split_policy=static, count=count, seed=seed)
    for name in ("multi_stream", "chunked", "pf_limit"):
        outcomes[name] = run(name, rate_per_s, count=count, seed=seed)
    return outcomes


def main() -> None:
    """Print and save mean and longest latency of each policy at each rate, in seconds; means over the runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="requests of each run (default: %(default)s)")
    parser.add_argument(
        "--runs", type=int, default=10, help="runs, each with arrivals of its own (default: %(default)s)"
    )
    args = parser.parse_args()
    rates = []
    for rate_per_s in RATES_PER_S:
        runs = [compare(rate_per_s, count=args.count, seed=seed) for seed in range(args.runs)]
        table = {name: _mean_and_longest_s([run[name] for run in runs]) for name in runs[0]}
        rates.append({"rate_per_s": rate_per_s, "mean_and_longest_s": table})
        print(json.dumps(rates[-1]), flush=True)
    save_results("nova-model", {"arguments": vars(args), "rates": rates})


def _mean_and_longest_s(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    longest_s = fmean(max(each.latencies_s) for each in outcomes)
    return round(fmean(each.mean_s for each in outcomes), 1), round(longest_s, 1)


if __name__ == "__main__":
    main()
