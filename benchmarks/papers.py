"""Reproduce the figures of the papers behind the project in the simulator, with one command each.

    scripts/bench papers fig4       # ThunderAgent, Fig. 1, 4, 5, 10: one engine, nine settings: turns/min, hits, time
    scripts/bench papers fig4-last  # the same on 8 bits at the last load, with Continuum and the released code
    scripts/bench papers fig4-rivals  # and on the other settings; with --only fe in some
    scripts/bench papers fig4-released  # and with the released code alone
    scripts/bench papers fig2a      # Fig. 2a: how far two replicas drift apart in 90 minutes
    scripts/bench papers fig6a      # Fig. 6a: the parts of a turn's latency, and the waits for sandboxes
    scripts/bench papers fig6b      # Fig. 6b: time between checks, and decay; --only released: of what they ship
    scripts/bench papers fig7b      # Fig. 7b: nodes that only prefill or only decode; --only policies, or policies-48
    scripts/bench papers table2     # Table 2: a rollout of 144 programs on two replicas
    scripts/bench papers table2-released  # with what the authors ship; --only batch, or openhands-closed: in parts
    scripts/bench papers orbit      # ORBIT, Table 1 and Fig. 4: latency of tasks, right and wrong; recall by step
    scripts/bench papers orbit-front  # the same with the default policy in front of the engine; --only short: where
                                    # memory is short, not the paper's setting
    scripts/bench papers oracle     # not from a paper: how near the clairvoyant policy comes to the bound L1
    scripts/bench papers mars       # MARS, Fig. 7, 10 and goodput: 20 points, ten policies
    scripts/bench papers mars-orders  # the paper's order of admission beside ours
    scripts/bench papers mars-evictions  # Fig. 3A: evicted blocks over a run
    scripts/bench papers mars-tails   # P90 and P95 of Fig. 7 and 10; Fig. 3B: time to the first token
    scripts/bench papers mars-fig8    # MARS, Fig. 8: GPT-OSS-120B
    scripts/bench papers mars-fig11   # MARS, Fig. 11 and 12: a whole agent framework
    scripts/bench papers mars-fig13   # MARS, Fig. 13: without a component each
    scripts/bench papers companions # Autellix, InferCept, Continuum and CONCUR beside ours, on our workloads; --only
                                    # beside: those that are not theirs

Each writes its figures to `benchmarks/results/papers-NAME.json` and its plots beside it. Runs are deterministic. The
paper's values are in the tables below, as far as they were published in words or numbers.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import mars, mars_figures
from benchmarks.companions import companions
from benchmarks.machine import save_results
from benchmarks.orbit import orbit, orbit_front
from benchmarks.simulated import COLOURS, Runner, add_legend, goodput_table, plot_lines, save_plot, scenario_of
from benchmarks.split_roles import Found, SplitRun
from thunderagent.simulator.comparison.results import ComparisonResult, Row
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.figures.figures import ReplicaSample, RunResult
from thunderagent.simulator.figures.intervals import Interval
from thunderagent.simulator.runs.tools import ToolSettings
from thunderagent.simulator.workloads.distributions import workload

Figures = dict[str, Any]

POLICIES = ("passthrough", "continuum", "thunderagent", "thunderagent-released", "breakeven")
RIVALS = tuple(policy for policy in POLICIES if policy != "thunderagent")
"""Beside the runs of `fig4`, in which `thunderagent` makes the same turns to the last digit."""


@dataclass(frozen=True)
class Setting:
    """One panel of Fig. 4: a workload on an engine at some loads, and the paper's speed-up over vLLM at the last."""

    title: str
    workload: str
    profile: str
    programs_counts: tuple[int, ...]
    paper_ratio: float


ONE_NODE = (24, 48, 96)
FP8_KV = "glm-4.6-h100x8-fp8kv"
SETTINGS = (
    Setting("a: mini-SWE-agent, GLM-4.6", "mini-swe-agent", "glm-4.6-h100x8", ONE_NODE, 2.65),
    Setting("b: OpenHands, GLM-4.6", "openhands", "glm-4.6-h100x8", ONE_NODE, 3.58),
    Setting("c: ToolOrchestra HLE, Qwen3-8B", "toolorchestra-hle", "qwen3-8b-rtx5090", (24, 32, 48), 1.48),
    Setting("d: mini-SWE-agent, Qwen3-235B", "mini-swe-agent", "qwen3-235b-h100x8", ONE_NODE, 3.02),
    Setting("e: OpenHands, Qwen3-235B", "openhands", "qwen3-235b-h100x8", ONE_NODE, 2.43),
    Setting("f: ScienceAgentBench, GLM-4.6", "scienceagentbench", "glm-4.6-h100x8", ONE_NODE, 1.24),
    Setting("a, KV of 8 bits", "mini-swe-agent", FP8_KV, ONE_NODE, 2.65),
    Setting("b, KV of 8 bits", "openhands", FP8_KV, ONE_NODE, 3.58),
    Setting("f, KV of 8 bits", "scienceagentbench", FP8_KV, ONE_NODE, 1.24),
)
"""The size of the pool is the first guess: 16 bits for a number in the KV cache, or the 8 bits of the authors' runs."""

NODES_COUNT = 2
ROLLOUT_PROGRAMS_COUNT = 144
ROLLOUT_PAPER = {"mini-swe-agent": (375.4, 671.8), "openhands": (69.1, 270.8)}
"""Table 2: steps a minute of vLLM with the SGLang gateway, and of ThunderAgent, on two nodes with GLM-4.6."""

SANDBOXES = ToolSettings(hands_count=8, sandbox_disk_bytes=10 * 2**30, disk_bytes=3 * 2**40)
"""A host of OpenHands' sandboxes, of 10 GB each as in the paper: eight are prepared at a time."""


# --- Figures 1, 4, 5 and 10 ---------------------------------------------------------------------------


def serving(runner: Runner, console: Console) -> Figures:
    """Simulate one engine in the paper's settings: turns a minute, prefix hits and latency against programs."""
    results = {}
    for setting in sorted(SETTINGS, key=lambda setting: setting.profile != FP8_KV):
        scenario = scenario_of(setting.profile, minutes=60, warmup_minutes=10)
        result = runner.compare(setting.title, scenario, workload(setting.workload), POLICIES, setting.programs_counts)
        results[setting.title] = result
        console.print(table(setting.title, result, f"paper at the last load: {setting.paper_ratio} x vLLM"))
    results = {setting.title: results[setting.title] for setting in SETTINGS}
    save_plot("papers-fig4", _panels(results, "turns/min", lambda row: row.turns_per_min.mean))
    save_plot("papers-fig5", _panels(results, "prompt tokens cached (%)", lambda row: row.hit_ratio.mean * 100))
    save_plot("papers-fig10", _panels(results, "turn, mean (s)", lambda row: row.turn_mean_s.mean))
    save_plot("papers-fig1", _fig1(results["a, KV of 8 bits"]))
    return {
        setting.title: {"paper_ratio": setting.paper_ratio, "rows": rows_of(results[setting.title])}
        for setting in SETTINGS
    }


def serving_last(runner: Runner, console: Console) -> Figures:
    """Simulate those on 8 bits, or some of them, at their last load, with the authors' rival and what they ship."""
    return _at_last_load(
        runner, console, _named(runner, [each for each in SETTINGS if each.profile == FP8_KV]), POLICIES
    )


def serving_rivals(runner: Runner, console: Console) -> Figures:
    """Simulate the other settings so, or those of them that the command line names."""
    return _at_last_load(runner, console, _others(runner), RIVALS)


def serving_released(runner: Runner, console: Console) -> Figures:
    """Simulate in the other settings what the authors ship alone, beside no policy at all."""
    return _at_last_load(runner, console, _others(runner), ("passthrough", "thunderagent-released"))


def _others(runner: Runner) -> list[Setting]:
    return _named(runner, [each for each in SETTINGS if each.profile != FP8_KV])


def _named(runner: Runner, settings: Sequence[Setting]) -> list[Setting]:
    """Return those whose letters the command line names, or all."""
    return [each for each in settings if each.title[0] in (runner.only or each.title)]


def _at_last_load(runner: Runner, console: Console, settings: Sequence[Setting], policies: Sequence[str]) -> Figures:
    figures: Figures = {}
    for setting in settings:
        scenario = scenario_of(setting.profile, minutes=60, warmup_minutes=10)
        loads = setting.programs_counts[-1:]
        wanted = [each for each in policies if each == policies[0] or each in (runner.policies or policies)]
        result = runner.compare(setting.title, scenario, workload(setting.workload), wanted, loads, keep_samples=False)
        console.print(table(setting.title, result, f"paper: {setting.paper_ratio} x vLLM"))
        figures[setting.title] = {"paper_ratio": setting.paper_ratio, "rows": rows_of(result)}
        runner.keep(figures)
    return figures


def _fig1(result: ComparisonResult) -> Figure:
    """Draw an engine without a scheduler: turns a minute, prefix hits and latency against load."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, label, pick in (
        (panels[0], "turns/min", lambda row: row.turns_per_min.mean),
        (panels[1], "prompt tokens cached (%)", lambda row: row.hit_ratio.mean * 100),
        (panels[2], "turn latency, mean (s)", lambda row: row.turn_mean_s.mean),
    ):
        plot_lines(axes, result, pick, only=("passthrough", "continuum", "thunderagent"))
        axes.set_ylabel(label)
    add_legend(figure, panels[0])
    return figure


# --- Figure 2a ------------------------------------------------------------------------------------


def imbalance(runner: Runner, console: Console) -> Figures:
    """Simulate two replicas for 90 minutes: the gap between their engines' use, as a part of a replica's capacity."""
    scenario = scenario_of("glm-4.6-h100x8", replicas_count=NODES_COUNT, minutes=90)
    figures: Figures = {}
    figure = Figure(figsize=(7.2, 6.4), layout="constrained")
    panels = figure.subplots(3, 2, sharex=True, sharey=True)
    panels[2][1].set_axis_off()
    contestants = ("sticky", "passthrough", "thunderagent", "thunderagent-released", "breakeven")
    result = runner.compare("fig2a", scenario, workload("openhands"), contestants, [48])
    capacity_tokens = scenario.engine.capacity_tokens
    for axes, contestant in zip(panels.flat, contestants, strict=False):
        gaps, first = [], result.runs_of(contestant, 48)[0].result
        for run in result.runs_of(contestant, 48):
            gaps += [_gap_ratio(sample.replicas, capacity_tokens) for sample in run.result.samples]
        figures[contestant] = {
            "gap_p99_ratio": sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1],
            "gap_max_ratio": max(gaps),
            "minutes_over_20_percent": 90 * sum(gap > 0.2 for gap in gaps) / len(gaps),
        }
        minutes = [sample.now_s / 60 for sample in first.samples]
        for number in range(NODES_COUNT):
            used = [100 * sample.replicas[number].used_tokens / capacity_tokens for sample in first.samples]
            axes.plot(minutes, used, linewidth=0.8, color=("#1c88cf", "#d55e00")[number], label=f"replica {number}")
        axes.set_title(contestant, fontsize=9, loc="left")
        console.print(contestant, figures[contestant])
    for axes in (panels[1][1], panels[2][0]):
        axes.set_xlabel("minutes")
    for axes in panels[:, 0]:
        axes.set_ylabel("KV in use (%)")
    add_legend(figure, panels[0][0])
    save_plot("papers-fig2a", figure)
    console.print("paper, vLLM's KV-aware router: gap over 20 % for more than 37 of 90 minutes, at most 51 %")
    return {"policies": figures, "rows": rows_of(result)}


def _gap_ratio(replicas: Sequence[ReplicaSample], capacity_tokens: int) -> float:
    used = [replica.used_tokens for replica in replicas]
    return (max(used) - min(used)) / capacity_tokens


# --- Figure 6a ------------------------------------------------------------------------------------


def breakdown(runner: Runner, console: Console) -> Figures:
    """Simulate the rollout of OpenHands: the parts of a turn's latency, and what a tool waits for its sandbox.

    The gateway's programs make their sandboxes at their first tool; the others' are prepared ahead.
    """
    scenario = scenario_of("glm-4.6-h100x8", replicas_count=NODES_COUNT, minutes=60, warmup_minutes=10)
    figures: Figures = {}
    for contestant in ("sticky", "thunderagent", "thunderagent-released", "breakeven"):
        tools = replace(SANDBOXES, prepare_at="first_tool") if contestant == "sticky" else SANDBOXES
        title = f"fig6a, {contestant}"
        loaded = replace(scenario, tools=tools)
        result = runner.compare(
            title, loaded, workload("openhands"), [contestant], [ROLLOUT_PROGRAMS_COUNT], keep_samples=False
        )
        runs = [run.result for run in result.runs_of(contestant, ROLLOUT_PROGRAMS_COUNT)]
        figures[contestant] = {
            name: _pair(Interval.of([pick(run) for run in runs])) for name, pick in PARTS_OF_A_TURN.items()
        }
        console.print(contestant, figures[contestant])
    return {"paper": "gains mostly in prefill and decoding; tool resources about 10 %", "parts": figures}


PARTS_OF_A_TURN: dict[str, Callable[[RunResult], float]] = {
    "held_s": lambda run: run.held.mean_s,
    "queued_and_prefilled_s": lambda run: run.first_token_latency.mean_s - run.held.mean_s,
    "decoded_s": lambda run: run.turn_latency.mean_s - run.first_token_latency.mean_s,
    "turn_s": lambda run: run.turn_latency.mean_s,
    "sandbox_wait_s_per_tool": lambda run: run.tools.waited_for_sandbox_s / max(1, run.tools.tool_count),
    "turns_per_min": lambda run: run.turns_per_min_count,
}
"""Means over turns, but for the waits, which are of the whole run."""


# --- Figure 6b ------------------------------------------------------------------------------------


def ablation(runner: Runner, console: Console) -> Figures:
    """Simulate one engine with 96 mini-SWE-agent programs: time between checks, and base x of f(t) = x^-t."""
    scenario = scenario_of("glm-4.6-h100x8", minutes=60, warmup_minutes=10)
    if runner.only == "released":
        shipped = ("thunderagent-released", *(f"thunderagent-released:delta_s={delta_s}" for delta_s in (1, 10, 20)))
        result = runner.compare("fig6b", scenario, workload("mini-swe-agent"), shipped, [96], keep_samples=False)
        console.print(table("Fig. 6b, as its authors ship it", result, "paper: stable over a range"))
        return {"rows": rows_of(result)}
    by_check = {delta_s: f"thunderagent:delta_s={delta_s}" for delta_s in (1, 2, 5, 10, 20)}
    by_base = {
        base: f"thunderagent:half_life_s={math.log(2) / math.log(base) if base > 1 else math.inf:.4g}"
        for base in (1.0, 1.1, 1.5, 2.0, 4.0)
    }
    contestants = ("passthrough", "breakeven", "thunderagent-released", *by_check.values(), *by_base.values())
    result = runner.compare("fig6b", scenario, workload("mini-swe-agent"), contestants, [96])
    rows = {row.contestant: row for row in result.rows()}
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, label, chosen in ((panels[0], "time between checks (s)", by_check), (panels[1], "base of f(t)", by_base)):
        intervals = [rows[text].turns_per_min for text in chosen.values()]
        places = range(len(chosen))
        axes.errorbar(
            places,
            [interval.mean for interval in intervals],
            yerr=[interval.half_width or 0 for interval in intervals],
            color=COLOURS["thunderagent"],
            marker="o",
            capsize=3,
        )
        for beside in ("passthrough", "breakeven"):
            axes.axhline(rows[beside].turns_per_min.mean, color=COLOURS[beside], label=beside)
        axes.set_xticks(places, [f"{value:g}" for value in chosen])
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("turns/min")
    add_legend(figure, panels[0])
    save_plot("papers-fig6b", figure)
    console.print(table("Fig. 6b: 96 programs, mini-SWE-agent, GLM-4.6", result, "paper: stable over a range"))
    return {"rows": rows_of(result)}


# --- Figure 7b ------------------------------------------------------------------------------------

SPLIT_NODES_COUNT = 4
SPLITS = (0, 1, 2, 3)
"""Of the nodes, how many only prefill; 0: each does both."""

SPLIT_LOADS = (24, 48, 96)
"""6 to 24 programs for each node."""

SPLIT_BLOCK_TOKENS = 64
"""A run takes a third of the time of one with blocks of 16."""

PARTS_OF_A_SPLIT: dict[str, Callable[[Found], float]] = {
    "hit_ratio": lambda run: run.hit_ratio,
    "turn_mean_s": lambda run: run.turn_mean_s,
    "program_mean_s": lambda run: run.program_mean_s,
}


def split_roles(runner: Runner, console: Console) -> Figures:
    """Simulate four nodes without a scheduler, by how many only prefill; beside them policies on whole nodes."""
    base = scenario_of("glm-4.6-h100x8", replicas_count=SPLIT_NODES_COUNT, minutes=40, warmup_minutes=10)
    base = replace(base, engine=replace(base.engine, block_size=SPLIT_BLOCK_TOKENS))
    counted_min = (base.horizon_s - base.warmup_s) / 60
    programs = workload("mini-swe-agent")
    rows: list[dict[str, Any]] = []
    figures: Figures = {"nodes": SPLIT_NODES_COUNT, "splits": rows}
    for load in SPLIT_LOADS:
        for split in () if runner.only else SPLITS:
            scenarios = [replace(base, programs_count=load, seed=seed) for seed in runner.seeds]
            runs = [SplitRun(scenario, programs, split).run() for scenario in scenarios]
            of = {name: [pick(run) for run in runs] for name, pick in PARTS_OF_A_SPLIT.items()}
            of["turns_per_min"] = [len(run.turns_s) / counted_min for run in runs]
            of["programs_per_hour"] = [60 * len(run.programs_s) / counted_min for run in runs]
            shown = {name: _pair(Interval.of(values)) for name, values in of.items()}
            rows.append({"programs": load, "prefilling": split} | shown)
            console.print(rows[-1])
            runner.keep(figures)
    contestants = ("sticky", "thunderagent", "thunderagent-released", "breakeven")
    loads = [load for load in SPLIT_LOADS if runner.only in ("", "policies", f"policies-{load}")]
    result = runner.compare("fig7b", base, programs, contestants, loads, keep_samples=False)
    console.print(table("Fig. 7b, nodes that do both", result, "paper: split nodes thrash earlier"))
    if rows:
        save_plot("papers-fig7b", _split_plot(rows))
    return figures | {"rows": rows_of(result)}


def _split_plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw turns a minute and hits against load, a line for each split."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, name, label in ((panels[0], "turns_per_min", "turns/min"), (panels[1], "hit_ratio", "part cached")):
        for split in SPLITS:
            of = [row for row in rows if row["prefilling"] == split]
            title = f"{split} prefill, {SPLIT_NODES_COUNT - split} decode" if split else "each does both"
            values = [float(row[name].partition(" ")[0]) for row in of]
            axes.plot([row["programs"] for row in of], values, marker="o", markersize=3, label=title)
        axes.set_xlabel("programs at a time", fontsize=8)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    add_legend(figure, panels[0])
    return figure


# --- Table 2 --------------------------------------------------------------------------------------


def rollout(runner: Runner, console: Console) -> Figures:
    """Simulate two replicas with 144 programs: kept at that number for an hour, and as a batch to its end.

    OpenHands' sandboxes are prepared by the proxy's plan, ahead; beside it by each program's first tool.
    """
    return _rollout(runner, console, ("sticky", *POLICIES[2:], "oracle"), late_too=True)


def rollout_released(runner: Runner, console: Console) -> Figures:
    """Simulate it with what the authors ship alone, without late sandboxes, or parts of it."""
    return _rollout(runner, console, ("sticky", "thunderagent-released"), late_too=False)


def _rollout(runner: Runner, console: Console, contestants: Sequence[str], *, late_too: bool) -> Figures:
    closed = scenario_of("glm-4.6-h100x8", replicas_count=NODES_COUNT, minutes=60, warmup_minutes=10)
    batch = scenario_of("glm-4.6-h100x8", replicas_count=NODES_COUNT, minutes=24 * 60, loop="batch")
    figures: Figures = {
        name: {"paper": {"gateway_per_min": gateway, "thunderagent_per_min": thunderagent}}
        for name, (gateway, thunderagent) in ROLLOUT_PAPER.items()
    }
    at_first_tool = replace(SANDBOXES, prepare_at="first_tool")
    for loop, scenario in (("closed", closed), ("batch", batch)):
        for name in ROLLOUT_PAPER:
            if runner.only not in f"{name}-{loop}":
                continue
            loaded = {loop: replace(scenario, tools=SANDBOXES) if name == "openhands" else scenario}
            if late_too and name == "openhands":
                loaded[f"{loop}, at the first tool"] = replace(scenario, tools=at_first_tool)
            for title, each in loaded.items():
                programs, counts = workload(name), [ROLLOUT_PROGRAMS_COUNT]
                result = runner.compare(f"{name}, {title}", each, programs, contestants, counts, keep_samples=False)
                console.print(table(f"Table 2, {name}, {title}", result, f"paper: {figures[name]['paper']}"))
                figures[name][title] = rows_of(result)
                runner.keep(figures)
    return figures


# --- The oracle -----------------------------------------------------------------------------------


def oracle(runner: Runner, console: Console) -> Figures:
    """Measure how much of the bound L1 the clairvoyant policy reaches as more programs fit in memory together."""
    figures: Figures = {}
    for name, profile_name, times, programs in (
        ("mini-swe-agent", "qwen3-14b-h100", 1.0, 32),
        ("mini-swe-agent", "glm-4.6-h100x8", 1.0, 96),
        ("mini-swe-agent", "glm-4.6-h100x8", 4.0, 256),
        ("scienceagentbench", "glm-4.6-h100x8", 1.0, 200),
        ("toolorchestra-hle", "glm-4.6-h100x8", 1.0, 200),
    ):
        timing = profile(profile_name)
        pool_tokens = int(times * (timing.kv_tokens or 200_000))
        scenario = scenario_of("glm-4.6-h100x8", minutes=120, warmup_minutes=40)
        scenario = replace(scenario, engine=replace(scenario.engine, timing=timing, kv_tokens=pool_tokens))
        title = f"{name}, {profile_name}, {pool_tokens:,} tokens"
        result = runner.compare(title, scenario, workload(name), ("passthrough", "thunderagent", "oracle"), [programs])
        console.print(table(title, result, "per cent of L1 are of the very turns that a run finished"))
        figures[title] = rows_of(result)
        runner.keep(figures)
    return figures


# --- shared ---------------------------------------------------------------------------------------


FIGURES = (
    *("turns_per_min", "ratio", "hit_ratio", "turn_mean_s", "turn_p50_s", "turn_p99_s", "program_mean_s"),
    *("imbalance_ratio", "limit_per_min", "limit_ratio"),
)


def rows_of(result: ComparisonResult) -> list[dict[str, Any]]:
    """Return the rows of a comparison for a JSON file, each figure as its mean and half-width of its interval."""
    return [
        {"programs": row.programs_count, "policy": row.contestant, "limited_by": row.limited_by}
        | {name: _pair(getattr(row, name)) for name in FIGURES}
        | {"programs_per_hour": _pair(_programs_per_hour(result, row))}
        for row in result.rows()
    ]


def _programs_per_hour(result: ComparisonResult, row: Row) -> Interval:
    """Return how many programs end an hour: turns alone say little of a policy that brings programs to their end."""
    runs = result.runs_of(row.contestant, row.programs_count)
    return Interval.of([run.result.programs_per_hour_count for run in runs])


def _pair(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.mean:.4g} ± {interval.half_width or 0.0:.2g}"


def table(title: str, result: ComparisonResult, caption: str) -> Table:
    """Return a table with a row for each contestant and load."""
    made = Table(title=title, caption=caption, box=box.SIMPLE_HEAD)
    for column in (
        "n",
        "policy",
        "turns/min",
        "x",
        "hits",
        "of limit",
        "turn mean",
        "p99 (s)",
        "program (s)",
        "programs/h",
    ):
        made.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in result.rows():
        made.add_row(
            str(row.programs_count),
            row.contestant,
            f"{row.turns_per_min.mean:.1f} ±{row.turns_per_min.half_width or 0:.1f}",
            "-" if row.ratio is None else f"{row.ratio.mean:.2f}",
            f"{row.hit_ratio.mean:.0%}",
            "-" if row.limit_ratio is None else f"{row.limit_ratio.mean:.0%}",
            f"{row.turn_mean_s.mean:.0f}",
            f"{row.turn_p99_s.mean:.0f}",
            f"{row.program_mean_s.mean:.0f}",
            f"{_programs_per_hour(result, row).mean:.0f}",
        )
    return made


def _panels(results: dict[str, ComparisonResult], label: str, pick: Callable[[Row], float]) -> Figure:
    figure = Figure(figsize=(7.2, 6.6), layout="constrained")
    panels = figure.subplots(3, 3)
    for axes, (title, result) in zip(panels.flat, results.items(), strict=True):
        plot_lines(axes, result, pick)
        axes.set_title(title, fontsize=8, loc="left")
    for axes in panels[:, 0]:
        axes.set_ylabel(label)
    add_legend(figure, panels[0][0])
    return figure


COMMANDS: dict[str, Callable[[Runner, Console], Figures]] = {
    "fig4": serving,
    "fig4-last": serving_last,
    "fig4-rivals": serving_rivals,
    "fig4-released": serving_released,
    "fig2a": imbalance,
    "fig6a": breakdown,
    "fig6b": ablation,
    "fig7b": split_roles,
    "table2": rollout,
    "table2-released": rollout_released,
    "oracle": oracle,
    "companions": companions,
    "orbit": orbit,
    "orbit-front": orbit_front,
    "mars": mars.figure,
    "mars-orders": mars_figures.orders,
    "mars-evictions": mars_figures.evictions,
    "mars-tails": mars_figures.tails,
    "mars-fig8": mars_figures.fig8,
    "mars-fig11": mars_figures.fig11,
    "mars-fig13": mars_figures.fig13,
}


def main() -> None:
    """Make one figure."""
    parser = argparse.ArgumentParser(description="The papers' figures again, in the simulator.")
    parser.add_argument("figure", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, each with other programs")
    parser.add_argument(
        "--only",
        default="",
        help="a part, into a file of its own; of fig4-last, fig4-rivals and fig4-released: settings, by their letters",
    )
    parser.add_argument(
        "--policies", default="", help="of fig4-last, fig4-rivals and fig4-released: those beside the first"
    )
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one for each core)")
    args = parser.parse_args()
    console = Console()
    console.width = max(console.width, 150)  # the tables' width
    runner = Runner(seeds_count=args.seeds, jobs_count=args.jobs, console=console, only=args.only)
    runner.policies = tuple(filter(None, args.policies.split(",")))

    def keep(figures: Figures) -> None:
        report = {
            "command": shlex.join(["python", "-m", "benchmarks.papers", *sys.argv[1:]]),
            "seeds": args.seeds,
            "figures": figures,
            "goodput": runner.in_time,
        }
        save_results("-".join(["papers", args.figure, *filter(None, [args.only])]), report)

    runner.keep = keep
    keep(COMMANDS[args.figure](runner, console))
    console.print(goodput_table(runner.in_time))


if __name__ == "__main__":
    main()
