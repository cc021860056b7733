"""Write what a comparison came to: a page for people, CSV for spreadsheets, JSON for programs.

The page is one file: plots are SVG inside it, and nothing is loaded from elsewhere. CSV and JSON are the same, byte for
byte, whenever the same comparison is run again, but for what JSON has under `made`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from thunderagent import __version__
from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time
from thunderagent.simulator import plots
from thunderagent.simulator.comparison import COSTS, ComparisonResult, Row, Run, cost_parts, thinned
from thunderagent.simulator.intervals import Interval
from thunderagent.simulator.plots import Plot
from thunderagent.simulator.report import finite

FIGURES = (
    "turns_per_min",
    "ratio",
    "hit_ratio",
    "turn_mean_s",
    "turn_p50_s",
    "turn_p99_s",
    "held_p99_s",
    "program_mean_s",
    "goodput_per_hour",
    "imbalance_ratio",
    "limit_per_min",
    "limit_ratio",
)
"""The intervals of a row, in the order of the columns."""


@dataclass(frozen=True, slots=True)
class Making:
    """Where a report comes from: the command that makes it again, and what is another time otherwise.

    `made` are words to be shown: a date, a machine, versions.
    """

    command: str
    made: Mapping[str, str]


def write_report(folder: Path, result: ComparisonResult, making: Making) -> list[Path]:
    """Write `comparison.html`, `comparison.csv`, `runs.csv` and `comparison.json` into a folder that is there.

    Each is written under another name first, so that files of an earlier report are replaced as a whole, or stay.
    Raises OSError.
    """
    texts = {
        "comparison.html": html_page(result, plots.draw(result), making),
        "comparison.csv": rows_csv(result.rows()),
        "runs.csv": runs_csv(result.runs),
        "comparison.json": json_text(result, making),
    }
    written = {folder / name: folder / f".{name}.{os.getpid()}" for name in texts}
    try:
        for path, text in zip(written.values(), texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        for path, temporary_path in written.items():
            temporary_path.replace(path)
    finally:
        for path in written.values():
            path.unlink(missing_ok=True)
    return list(written)


# --- CSV and JSON ---------------------------------------------------------------------------------------------------


def rows_csv(rows: Iterable[Row]) -> str:
    """Return a line for each contestant at each load: means, and for each how far its 95 % interval reaches."""
    lines = []
    for row in rows:
        line: dict[str, object] = {
            "policy": row.contestant,
            "ran": row.policy,
            "programs": row.programs_count,
            "seeds": row.turns_per_min.count,
        }
        for name in FIGURES:
            line |= _columns(name, getattr(row, name))
        for kind, goodputs in (("turns", row.turn_goodputs), ("programs", row.program_goodputs)):
            for alpha_ratio, goodput in zip(ALPHA_RATIOS, goodputs, strict=True):
                line |= _columns(f"goodput_{kind}_ratio_{alpha_ratio:g}", goodput)
        line |= {"limited_by": row.limited_by, "failed_turns": row.failed_turn_count, "preempted": row.preemption_count}
        for name in COSTS:
            line |= _columns(f"cost_{name}_ratio", row.costs[name])
        lines.append(line)
    return _csv(lines)


def _columns(name: str, interval: Interval | None) -> dict[str, object]:
    mean = "" if interval is None else _number(interval.mean)
    half_width = "" if interval is None or interval.half_width is None else _number(interval.half_width)
    return {name: mean, f"{name}_ci95": half_width}


def runs_csv(runs: Iterable[Run]) -> str:
    """Return a line for each run."""
    lines = []
    for run in runs:
        result = run.result
        limit_per_min = result.bounds.limit_per_s * 60 if result.bounds is not None else math.inf
        lines.append(
            {
                "policy": run.contestant,
                "ran": run.policy,
                "programs": run.programs_count,
                "seed": run.seed,
                "complete": str(result.complete).lower(),
                "measured_s": _number(result.measured_s),
                "turns": result.turn_count,
                "programs_ended": result.program_count,
                "failed_turns": result.failed_turn_count,
                "turns_per_min": _number(result.turns_per_min_count),
                "limit_per_min": _number(limit_per_min),
                "limited_by": result.bounds.limited_by if math.isfinite(limit_per_min) and result.bounds else "",
                "hit_ratio": _number(result.hit_ratio),
                "turn_mean_s": _number(result.turn_latency.mean_s),
                "turn_p50_s": _number(result.turn_latency.p50_s),
                "turn_p99_s": _number(result.turn_latency.p99_s),
                "first_token_p99_s": _number(result.first_token_latency.p99_s),
                "held_p99_s": _number(result.held.p99_s),
                "program_mean_s": _number(result.program_latency.mean_s),
                **{
                    f"goodput_{kind}_ratio_{each.alpha_ratio:g}": _number(ratio)
                    for each in result.goodputs
                    for kind, ratio in (("turns", each.turn_ratio), ("programs", each.program_ratio))
                },
                "makespan_s": "" if result.makespan_s is None else _number(result.makespan_s),
                "imbalance_ratio": _number(result.imbalance_mean_ratio),
                **{f"cost_{name}_ratio": _number(part) for name, part in cost_parts(result).items()},
            }
        )
    return _csv(lines)


def _csv(lines: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return text.getvalue()


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def json_text(result: ComparisonResult, making: Making) -> str:
    """Return all figures of all runs, a run in a line; samples are those of the first seed, thinned."""
    plan = result.plan
    head = {
        "thunderagent": __version__,
        "command": making.command,
        "made": dict(making.made),
        "stopped_by": result.stopped_by,
        "planned_runs": result.planned_count,
        "plan": {
            "policies": plan.contestants,
            "programs": plan.programs_counts,
            "seeds": plan.seeds,
            "baseline": plan.baseline,
            "workload": plan.workload.name,
            "scenario": _scenario(result),
        },
        "cap_best": [
            {"programs": sweep.programs_count, "n": sweep.best_count, "tried": sweep.tried} for sweep in result.sweeps
        ],
        "rows": [_row(row) for row in result.rows()],
    }
    lines = [f"{json.dumps(key)}: {_json(value)}" for key, value in head.items()]
    runs = ",\n".join(_json(_run(run, result)) for run in result.runs)
    return "{\n" + ",\n".join(lines) + f',\n"runs": [\n{runs}\n]\n}}\n'


def _scenario(result: ComparisonResult) -> dict[str, Any]:
    """Return what all runs have in common."""
    scenario = asdict(result.plan.scenario)
    for name in ("programs_count", "seed", "keep_events"):
        del scenario[name]
    return scenario


def _row(row: Row) -> dict[str, Any]:
    figures = asdict(row)
    for name in ("contestant", "policy", "programs_count"):
        del figures[name]
    return {"policy": row.contestant, "ran": row.policy, "programs": row.programs_count, **figures}


def _run(run: Run, result: ComparisonResult) -> dict[str, Any]:
    keeps_samples = run.seed == result.plan.seeds[0]
    values = run.result.to_json()
    values["samples"] = [asdict(sample) for sample in thinned(run.result.samples)] if keeps_samples else []
    return {
        "policy": run.contestant,
        "ran": run.policy,
        "programs": run.programs_count,
        "seed": run.seed,
        "result": values,
    }


def _json(value: object) -> str:
    return json.dumps(finite(value), separators=(",", ":"), allow_nan=False)


# --- the page -------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("turns/min", "turns that ended, a minute"),
    ("ratio", "turns/min over those of the baseline, seed by seed"),
    ("hits", "prompt tokens that were found in caches"),
    ("turn p50", "seconds from a turn's arrival to its end, median"),
    ("turn p99", "seconds from a turn's arrival to its end, 99th percentile"),
    ("held p99", "seconds that a turn waited for its lease, 99th percentile"),
    ("program", "seconds from a program's first turn to its end, mean"),
    ("turns in time", "turns that took no longer than 1, 2 and 3 times their ideal time: alone, all history cached"),
    ("programs in time", "programs that took no longer than 1, 2 and 3 times that of their turns, and their tools"),
    ("of limit", "turns/min over min(L1, L2, L3) of the turns that ended"),
    ("by", "which bound is the limit"),
)

EQUAL_UP_TO_RATIO = 0.01
"""Policies that differ by less make equally many turns/min."""

NOTHING = "-"
"""What a cell shows where there is no figure."""

_CSS = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #ffffff; --ink: #1d2430; --soft: #5b6471; --grid: #dfe3e8;
  --best: #e3f1e9; --warn: #8a4b00; }
@media (prefers-color-scheme: dark) { :root { --page: #101318; --card: #191d24; --ink: #e8eaee; --soft: #a3abb7;
  --grid: #333a45; --best: #17382a; --warn: #ffb35c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; }
h2 { font-size: 17px; margin: 0 0 10px; }
p { margin: 0 0 10px; }
ul { margin: 0; padding-left: 20px; }
.lead { color: var(--soft); margin-bottom: 22px; }
.warn { color: var(--warn); font-weight: 600; }
section, figure { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 18px 20px;
  margin: 0 0 20px; break-inside: avoid; }
figure svg { display: block; width: 100%; max-width: 860px; height: auto; margin: 0 auto; }
figcaption { color: var(--soft); font-size: 13.5px; margin-top: 10px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th, td { padding: 4px 7px; }
td { text-align: right; white-space: nowrap; border-top: 1px solid var(--grid); }
td small { color: var(--soft); font-size: 12px; }
th[colspan] { text-align: left; color: var(--ink); padding-top: 14px; }
.best { background: var(--best); font-weight: 600; }
.notes { color: var(--soft); font-size: 13.5px; margin: 12px 0 0; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 12px 0 0; font-size: 13.5px; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--page); border-radius: 6px; padding: 10px 12px; margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; }
"""

_THEMED = {plots.INK: "--ink", plots.SOFT_INK: "--soft", plots.GRID: "--grid", plots.PAPER: "--card"}


def html_page(result: ComparisonResult, drawn: Sequence[Plot], making: Making) -> str:
    """Return the page: what was compared, the table, the plots, and how to make it again."""
    plan = result.plan
    title = f"{_count(len(plan.contestants), 'policy', 'policies')} on {plan.workload.name}"
    figures = "\n".join(
        f'<figure id="{plot.name}"><h2>{escape(plot.title)}</h2>\n{_themed(plot)}\n'
        f"<figcaption>{escape(plot.caption).replace(' %', '&nbsp;%')}</figcaption></figure>"
        for plot in drawn
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(_lead(result))}</p>
{_warnings(result)}{_findings(result)}
<section><h2>Figures</h2>
<div class="wide">{_table(result)}</div>
<p class="notes">Means over seeds, and how far their 95 % intervals reach (Student's t). Ratios are to
{escape(plan.baseline)}, seed by seed. Seconds are of simulated time; latencies of turns include the time held.
{escape(_sweep_words(result))}</p></section>
{figures}
<section><h2>Again</h2>
<pre>{escape(making.command)}</pre>
{_facts(result, making)}</section>
</main>
</body>
</html>
"""


def _themed(plot: Plot) -> str:
    """Return the drawing with the page's colours for words and lines, in light and in dark."""
    svg = plot.svg
    for colour, variable in _THEMED.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.title)}" ', 1)


def _lead(result: ComparisonResult) -> str:
    plan, scenario = result.plan, result.plan.scenario
    engine = scenario.engine
    counts = " / ".join(str(count) for count in sorted(plan.programs_counts))
    loop = {"closed": " at a time", "open": " that arrive in an open loop", "batch": " in a batch"}[scenario.loop]
    warmup = f", of which the first {scenario.warmup_s / 60:g} do not count" if scenario.warmup_s else ""
    return (
        f"{counts} programs{loop} on {_count(scenario.replica_count, 'replica')} of {engine.timing.name} with "
        f"{engine.capacity_tokens:,} tokens each, {scenario.horizon_s / 60:g} simulated minutes{warmup}; "
        f"{_count(len(plan.seeds), 'seed')}."
    )


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _warnings(result: ComparisonResult) -> str:
    said = []
    if result.stopped_by:
        said.append(
            f"Not complete: {result.stopped_by}. {result.done_count} of {result.planned_count} runs were done; the "
            "figures are theirs."
        )
    late_count = sum(not run.result.complete for run in result.runs)
    if late_count:
        said.append(f"{_count(late_count, 'batch was', 'batches were')} not through at the time limit.")
    failed_count = sum(run.result.failed_turn_count for run in result.runs)
    if failed_count:
        said.append(f"{_count(failed_count, 'turn')} failed, in all runs together.")
    return "".join(f'<p class="warn">{escape(words)}</p>\n' for words in said)


def _findings(result: ComparisonResult) -> str:
    """Say for each load who was best, and how sure that is."""
    said = []
    for programs_count in result.programs_counts:
        rows = [row for row in result.rows() if row.programs_count == programs_count]
        best = max(rows, key=lambda row: row.turns_per_min.mean)
        least = min(row.turns_per_min.mean for row in rows)
        if len(rows) > 1 and least >= (1 - EQUAL_UP_TO_RATIO) * best.turns_per_min.mean:
            said.append(f"<li>{programs_count} programs: all made {best.turns_per_min.text(1)} turns/min.</li>")
            continue
        words = f"{programs_count} programs: {best.contestant} made the most turns/min, {best.turns_per_min.text(1)}"
        if best.contestant != result.plan.baseline and best.ratio is not None:
            words += f", which is {best.ratio.text(2)} times {result.plan.baseline}"
        if best.limit_ratio is not None:
            words += f" and {best.limit_ratio.mean:.0%} of the limit"
        said.append(f"<li>{escape(words)}.</li>")
    return f"<section><h2>In short</h2><ul>{''.join(said)}</ul></section>" if said else ""


def _sweep_words(result: ComparisonResult) -> str:
    if not result.sweeps:
        return ""
    found = ", ".join(f"n={sweep.best_count} of {sweep.programs_count} programs" for sweep in result.sweeps)
    return f"cap-best is the policy cap with the n that came nearest to its limit with a seed besides these: {found}."


def _table(result: ComparisonResult) -> str:
    head = "".join(f'<th title="{escape(meaning)}">{escape(name)}</th>' for name, meaning in COLUMNS)
    lines = []
    for programs_count in result.programs_counts:
        rows = [row for row in result.rows() if row.programs_count == programs_count]
        most = max(row.turns_per_min.mean for row in rows)
        lines.append(f'<tr><th colspan="{1 + len(COLUMNS)}">{programs_count} programs</th></tr>')
        lines += [_table_line(row, is_best=row.turns_per_min.mean == most) for row in rows]
    return f"<table><thead><tr><th>policy</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _table_line(row: Row, *, is_best: bool) -> str:
    cells = [
        _cell(row.turns_per_min, 1),
        _cell(row.ratio, 2),
        _cell(row.hit_ratio, 1, percent=True),
        _cell(row.turn_p50_s, 2),
        _cell(row.turn_p99_s, 1),
        _cell(row.held_p99_s, 1),
        _cell(row.program_mean_s, 1),
        in_time(goodput.mean for goodput in row.turn_goodputs),
        in_time(goodput.mean for goodput in row.program_goodputs),
        _cell(row.limit_ratio, 0, percent=True),
        escape(row.limited_by) or NOTHING,
    ]
    name = escape(row.contestant)
    if row.policy != row.contestant:
        name += f" <small>{escape(row.policy)}</small>"
    first, *others = cells
    marked = f'<td class="best">{first}</td>' if is_best else f"<td>{first}</td>"
    return f"<tr><td>{name}</td>{marked}{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"


def _cell(interval: Interval | None, digits: int, *, percent: bool = False) -> str:
    return NOTHING if interval is None else interval.text(digits, percent=percent, form="{} <small>± {}</small>")


def _facts(result: ComparisonResult, making: Making) -> str:
    plan, scenario = result.plan, result.plan.scenario
    engine, tools = scenario.engine, scenario.tools
    facts = {
        "workload": plan.workload.name,
        "loop": scenario.loop,
        "replicas": f"{scenario.replica_count} x {engine.timing.name}, {engine.capacity_tokens:,} tokens in blocks of "
        f"{engine.block_size}, {engine.max_num_batched_tokens} tokens and {engine.max_num_seqs} turns an iteration",
        "time": f"{scenario.horizon_s / 60:g} min, warm-up {scenario.warmup_s / 60:g} min",
        "seeds": ", ".join(map(str, plan.seeds)),
        "tools": f"{'no limit of' if tools.cpu_count is None else tools.cpu_count} processors",
        "runs": f"{result.done_count} of {result.planned_count}",
        "thunderagent": __version__,
        **making.made,
    }
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{lines}</dl>'
