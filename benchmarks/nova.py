"""Run Nova on a card: `scripts/bench nova e0`, e1, e2, e3 and e4 are one command each, under ten minutes on an H100.

    e0  what partitions are: SMs that came out, whether a graph keeps its own, what a switch costs, the bus
    e1  stage times alone and beside decoding for each split; writes the profile that e3 and e4 read
    e2  the encoder's weights on the host: latency, memory, served latency
    e3  adaptive splits beside multi-stream, chunked and decode-limited prefill
    e4  adaptive beside static splits, a burst's timeline, overhead, waits beside M/G/1

Each writes `nova-eN.json` to --out (default: the results' folder) as it goes. Without a GPU the same runs use a small
model on the machine's cores: lanes are then cores, and e0 and e2 say little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("this benchmark needs torch: .venv/bin/python -m pip install --editable packages/thunderagent-nova")

from benchmarks import nova_card, nova_rig
from benchmarks.machine import RESULTS
from benchmarks.nova_rig import PAPER, SMALL, Run, Size, Turns
from thunderagent_nova.engine import Engine
from thunderagent_nova.messages import Profile
from thunderagent_nova.models import Vlm
from thunderagent_nova.policy import Adaptive, Static, adaptive_of, best_pair, expected_wait_s
from thunderagent_nova.profile import load, measure, save, warm
from thunderagent_nova.workers import ENCODE, PREFILL, Outcome

MEAN_OUTPUT_TOKENS = sum(nova_rig.OUTPUT_TOKENS) / 2
BATCH = 3  # in flight beside a pass, as in the paper's Table IV


class Bench:
    """One experiment: an engine, what is known of it, and a growing result file."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.size: Size = PAPER if self.device.type == "cuda" else SMALL
        self.path: Path = options.out / f"nova-{name}.json"
        self.made_by = nova_rig.made_by(self.device)
        self.told: dict[str, Any] = {
            **self.made_by, "options": {"requests": options.requests, "loads": options.loads, "rounds": options.rounds}
        }  # fmt: skip
        self.passes: list[Outcome] = []
        self.begin_s = time.monotonic()

    def note(self, key: str, value: Any) -> None:
        """Add a figure and write the file: an interrupted run keeps its figures so far."""
        self.told[key] = value
        self.told["took_s"] = time.monotonic() - self.begin_s
        self.path.write_text(json.dumps(self.told, indent=1) + "\n")
        print(f"{time.monotonic() - self.begin_s:6.1f} s  {key}: {_short(value)}", flush=True)

    def engine(self, counts: tuple[int, ...] | None = None) -> tuple[Vlm, Engine]:
        """Draw the model and make the engine."""
        vlm = nova_rig.draw(self.size, self.device)
        self.note("drawn", {"seconds": time.monotonic() - self.begin_s, "memory_gb": _allocated_gb()})
        pool = nova_rig.pool_for(self.device, self.options.counts if counts is None else counts)
        if not pool.splits and counts != ():  # e2 wants none
            sys.exit(f"{pool.name} cannot be split: this takes two at least")
        engine = Engine(
            vlm, pool, nova_rig.scheduler_of("nova", self.size), nova_rig.engine_config(self.size),
            on_pass=self.passes.append,
        )  # fmt: skip
        self.note("pool", {"units": pool.units, "splits": pool.splits})
        return vlm, engine

    async def started(self, engine: Engine, vlm: Vlm) -> None:
        """Capture the graphs, and run each stage once on each lane."""
        begin_s = time.monotonic()
        await engine.start()
        graphs = {"graphs": engine.stepper.graphs, "seconds": time.monotonic() - begin_s, "memory_gb": _allocated_gb()}
        self.note("captured", graphs)
        warm(nova_rig.subject_of(engine, self.size, vlm, batch=1))
        self.note("warm", {"memory_gb": _allocated_gb(), "reserved_gb": _reserved_gb()})

    async def run(self, engine: Engine, policy: str, split: Any, rate_per_s: float, tag: str) -> Run:
        """Serve the turns of this rate, which are the same for every policy."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        turns = Turns.poisson(self.size, self.options.requests, rate_per_s, nova_rig.SEED, dtype)
        return await nova_rig.serve(engine, nova_rig.scheduler_of(policy, self.size, split), turns, self.passes, tag)

    def profile(self) -> Profile:
        """Read the profile that e1 measured."""
        return load(self.options.profile)

    def adaptive(self, profile: Profile) -> Adaptive:
        """Return the adaptive policy with Eq. 3's shares, or the given ones."""
        if self.options.adaptive is None:
            return adaptive_of(profile, MEAN_OUTPUT_TOKENS)
        encode, prefill, floor, step = self.options.adaptive
        shares = tuple(
            split.decode_units for split in profile.splits if floor <= split.decode_units <= max(encode, prefill)
        )
        return Adaptive(shares, encode, prefill, floor, step, step)


def e0(bench: Bench) -> None:
    """Measure what partitions are on this card."""
    nova_card.partitions(bench.device, bench.note)


def e1(bench: Bench) -> None:
    """Measure stage times alone and beside decoding for each split."""
    vlm, engine = bench.engine()
    asyncio.run(bench.started(engine, vlm))
    subject = nova_rig.subject_of(engine, bench.size, vlm, batch=4)
    bench.note("graphs_give_what_calls_give", nova_card.graphs_agree(engine, subject))
    refused: dict[int, str] = {}
    profile = measure(
        subject, repeats=bench.options.repeats, batch=BATCH,
        on_refused=lambda split, error: refused.update({split: str(error)[:200]}),
    )  # fmt: skip
    bench.note("refused", refused)
    save(profile, bench.options.profile, batch=BATCH, **bench.made_by)
    step_s = profile.decode_s[BATCH]
    bench.note("alone", {"encode_s": profile.encode_s, "prefill_s": profile.prefill_s, "decode_s": profile.decode_s})
    bench.note("splits", [
        {
            "decode_units": t.decode_units, "rest_units": t.rest_units, "encode_s": t.encode_s,
            "decode_beside_encode_s": t.decode_beside_encode_s, "prefill_s": t.prefill_s,
            "decode_beside_prefill_s": t.decode_beside_prefill_s,
            "gain_encode": profile.encode_s / t.encode_s + step_s / t.decode_beside_encode_s - 1,
            "gain_prefill": profile.prefill_s / t.prefill_s + step_s / t.decode_beside_prefill_s - 1,
        }
        for t in profile.splits
    ])  # fmt: skip
    bench.note("whole_device", nova_card.beside_whole(subject, profile, bench.options.repeats, BATCH))
    best = best_pair(profile, MEAN_OUTPUT_TOKENS)
    bench.note("best", {"encode": best.beside_encode.decode_units, "prefill": best.beside_prefill.decode_units,
                        "latency_s": best.latency_s, "requests_per_s": best.throughput_per_s})  # fmt: skip
    asyncio.run(engine.stop()) if bench.device.type == "cpu" else None


def e2(bench: Bench) -> None:
    """Measure the encoder with its weights on the host: one pass, memory, and turns served."""
    asyncio.run(nova_card.offload(bench, requests=min(30, bench.options.requests)))


def e3(bench: Bench) -> None:
    """Serve the same turns under each policy at each rate."""
    profile = bench.profile()
    adaptive = bench.adaptive(profile)

    async def go() -> None:
        vlm, engine = bench.engine(adaptive.shares)
        await bench.started(engine, vlm)
        # The first run pays for each prompt length that is new to the card's libraries: it is not counted.
        await bench.run(engine, "nova", adaptive, 1.0 / (profile.encode_s + profile.prefill_s), "unseen")
        for load_share in bench.options.loads:
            rate = load_share / (profile.encode_s + profile.prefill_s)
            figures: dict[str, list[dict[str, Any]]] = {name: [] for name in bench.options.policies}
            for round_number in range(bench.options.rounds):
                order = bench.options.policies[:: -1 if round_number % 2 else 1]  # so that no policy is always first
                for name in order:
                    policy, _, units = name.partition("-")
                    split = Static(int(units), int(units)) if units else adaptive if policy == "nova" else None
                    policy = "nova" if policy == "static" else policy
                    run = await bench.run(engine, policy, split, rate, f"{name}-{load_share}-{round_number}")
                    figures[name].append(run.figures())
                    told = {"rate_per_s": rate, **nova_rig.together(figures[name]), "rounds": figures[name]}
                    bench.note(f"{name} at load {load_share}", told)
            first, *others = figures
            ours = nova_rig.latency_by_turn(figures[first])
            beside = {name: nova_rig.beside(ours, nova_rig.latency_by_turn(figures[name])) for name in others}
            bench.note(f"mean latency of {first} over others' at load {load_share}", beside)
        await engine.stop()

    bench.note("adaptive", _policy(adaptive))
    bench.note("rates", [share / (profile.encode_s + profile.prefill_s) for share in bench.options.loads])
    asyncio.run(go())


def e4(bench: Bench) -> None:
    """Serve the same turns with static splits and the adaptive one; a burst; overhead; M/G/1."""
    profile = bench.profile()
    adaptive = bench.adaptive(profile)
    shares = adaptive.shares
    best = adaptive.beside_encode_units
    tried = {shares[min(1, len(shares) - 1)], int(best), shares[-2 % len(shares)]}
    statics = {f"static {units}": Static(units, units) for units in sorted(tried)}

    async def go() -> None:
        vlm, engine = bench.engine(tuple(split.decode_units for split in profile.splits))
        await bench.started(engine, vlm)
        await bench.run(engine, "nova", adaptive, 1.0 / (profile.encode_s + profile.prefill_s), "unseen")
        for load_share in bench.options.loads:
            rate = load_share / (profile.encode_s + profile.prefill_s)
            for name, split in {"adaptive": adaptive, **statics}.items():
                run = await bench.run(engine, "nova", split, rate, f"{name}-{load_share}")
                figures = {"rate_per_s": rate, **run.figures()}
                if name == "adaptive":
                    figures |= _waits(run, rate)
                    bench.note(f"timeline at load {load_share}", _timeline(run))
                    bench.note(f"overhead at load {load_share}", _overhead(run))
                bench.note(f"{name} at load {load_share}", figures)
        await engine.stop()

    bench.note("adaptive", _policy(adaptive))
    asyncio.run(go())


def _policy(adaptive: Any) -> dict[str, Any]:
    names = ("shares", "beside_encode_units", "beside_prefill_units", "floor_units", "encode_step_units",
             "prefill_step_units")  # fmt: skip
    return {name: getattr(adaptive, name) for name in names}


def _waits(run: Run, rate_per_s: float) -> dict[str, Any]:
    """Return how long turns waited for their encoding, beside the M/G/1 prediction (Table V)."""
    front: dict[str, float] = {}
    waits = []
    for done in run.passes:
        if done.stage in (ENCODE, PREFILL):
            name = done.job.turns[0].request.request_id
            front[name] = front.get(name, 0.0) + done.end_s - done.begin_s
            if done.stage == ENCODE:
                index = int(name.rsplit("-", 1)[1])
                waits.append(done.begin_s - run.begin_s - run.turns[index].arrived_s)
    mean_s, deviation_s = statistics.fmean(front.values()), statistics.pstdev(front.values())
    return {"front_mean_s": mean_s, "load": rate_per_s * mean_s, "waited_mean_s": statistics.fmean(waits),
            "mg1_wait_s": expected_wait_s(rate_per_s, mean_s, deviation_s)}  # fmt: skip


def _timeline(run: Run) -> list[list[Any]]:
    """Return the first twelve seconds: (stage, begin, seconds, units, turns)."""
    return [
        [done.stage, round(done.begin_s - run.begin_s, 4), round(done.end_s - done.begin_s, 5), done.job.split,
         len(done.job.turns)]
        for done in run.passes if done.begin_s - run.begin_s < 12.0
    ]  # fmt: skip


def _overhead(run: Run) -> dict[str, list[float]]:
    """Return percentiles of the delay of a job between the scheduler and its worker, in seconds."""
    out = {}
    for stage in {done.stage for done in run.passes}:
        waits = sorted(done.begin_s - done.job.put_s for done in run.passes if done.stage == stage)
        out[stage] = [waits[min(len(waits) - 1, int(share * len(waits)))] for share in (0.1, 0.5, 0.9, 0.99, 1.0)]
    return out


def _allocated_gb() -> float:
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def _reserved_gb() -> float:
    return torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())[:400]
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:200]


EXPERIMENTS: dict[str, Callable[[Bench], None]] = {"e0": e0, "e1": e1, "e2": e2, "e3": e3, "e4": e4}


def main() -> None:
    """Run the named experiments, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--profile", type=Path, help="what e1 writes and e3 and e4 read; in --out unless said")
    parser.add_argument("--requests", type=int, default=200, help="turns of each run (the paper takes 500)")
    parser.add_argument("--rounds", type=int, default=1, help="times e3 serves each policy the turns, in turn")
    parser.add_argument("--counts", type=int, nargs="+", default=nova_rig.COUNTS, help="SMs for decoding to measure")
    parser.add_argument("--repeats", type=int, default=4, help="passes of each stage for one time")
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.4, 0.55, 0.7],
        help="rates, times what encoding and prefill take alone",
    )
    parser.add_argument(
        "--adaptive", type=int, nargs=4, metavar=("ENCODE", "PREFILL", "FLOOR", "STEP"),
        help="units of Eq. 5, for e3 and e4; from the profile by Eq. 3 unless said",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="+", default=["nova", "multi_stream", "chunked", "pf_limit"],
        help="of e3; static-N is a static split of N units",
    )  # fmt: skip
    options = parser.parse_args()
    options.profile = options.profile or options.out / "nova-profile.json"
    for name in options.experiments:
        EXPERIMENTS[name](Bench(name, options))


if __name__ == "__main__":
    main()
