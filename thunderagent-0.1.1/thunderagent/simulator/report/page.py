"""Writes the result of a comparison: a page for people, CSV for spreadsheets, JSON for programs.

The page is one file: the drawing is SVG inside it, and nothing is loaded from elsewhere. CSV and JSON are the same,
byte for byte, whenever the same comparison is run again, except for the JSON's `made`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path

from thunderagent import __version__
from thunderagent.programs.learned.goodput import ALPHA_RATIOS, in_time
from thunderagent.simulator.comparison.results import ComparisonResult, Row, thinned
from thunderagent.simulator.figures.figures import finite
from thunderagent.simulator.figures.intervals import Interval

INK, SOFT_INK, GRID = "#1d2430", "#5b6471", "#dfe3e8"
"""Text, quieter text, the grid: they change on a dark page."""


@dataclass(frozen=True, slots=True)
class Making:
    """The origin of a report: the command that reproduces it, and what differs next time.

    `made` are words to be shown: a date, a machine, versions.
    """

    command: str
    made: Mapping[str, str]


def write_report(folder: Path, result: ComparisonResult, drawing: str, making: Making) -> list[Path]:
    """Write `comparison.html`, `comparison.csv`, `runs.csv` and `comparison.json` into a folder that is there.

    `drawing` is the page's, of `plots.draw`; without matplotlib it is empty, and the page has its tables.

    Each is written under another name first, so that files of an earlier report are replaced as a whole, or stay.
    Raises OSError.
    """
    texts = {
        "comparison.html": html_page(result, drawing, making),
        "comparison.csv": rows_csv(result),
        "runs.csv": runs_csv(result),
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


def rows_csv(result: ComparisonResult) -> str:
    """Return a line for each contestant at each load: means, and the half-width of each 95 % interval."""
    return _csv([_names(row) | {"seeds": row.turns_per_min.count} | _figures(row) for row in result.rows()])


def runs_csv(result: ComparisonResult) -> str:
    """Return a line for each run: the figures of a row for this run alone, and those that only a run has."""
    lines = []
    for run in result.runs:
        row, of_run = result.row_of((run,)), run.result
        own = {
            "seed": run.seed,
            "complete": str(of_run.complete).lower(),
            "measured_s": _number(of_run.measured_s),
            "turns": of_run.turn_count,
            "programs_ended": of_run.program_count,
            "makespan_s": "" if of_run.makespan_s is None else _number(of_run.makespan_s),
        }
        figures = {name: value for name, value in _figures(row).items() if not name.endswith("_ci95")}
        lines.append(_names(row) | own | figures)
    return _csv(lines)


def _names(row: Row) -> dict[str, object]:
    return {"policy": row.contestant, "ran": row.policy, "programs": row.programs_count}


def _figures(row: Row) -> dict[str, object]:
    """Return the figures of a row in columns, in the order of its fields."""
    columns: dict[str, object] = {}
    for field in fields(row)[3:]:
        value = getattr(row, field.name)
        if isinstance(value, tuple):
            for alpha_ratio, goodput in zip(ALPHA_RATIOS, value, strict=True):
                columns |= _columns(f"{field.name}_{alpha_ratio:g}", goodput)
        elif isinstance(value, dict):
            for name, cost in value.items():
                columns |= _columns(f"cost_{name}_ratio", cost)
        elif value is None or isinstance(value, Interval):
            columns |= _columns(field.name, value)
        else:
            columns[field.name] = value
    return columns


def _columns(name: str, interval: Interval | None) -> dict[str, object]:
    mean = "" if interval is None else _number(interval.mean)
    half_width = "" if interval is None or interval.half_width is None else _number(interval.half_width)
    return {name: mean, f"{name}_ci95": half_width}


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
    """Return all figures of all runs, one run per line; samples are those of the first seed, thinned."""
    plan = result.plan
    scenario = asdict(plan.scenario)
    for name in ("programs_count", "seed", "keep_events"):  # not common to the runs
        del scenario[name]
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
            "scenario": scenario,
        },
        "cap_best": [
            {"programs": each.programs_count, "n": each.best_count, "tried": each.tried} for each in result.sweeps
        ],
        "rows": [_names(row) | dict(list(asdict(row).items())[3:]) for row in result.rows()],
    }
    lines = [f"{json.dumps(key)}: {_json(value)}" for key, value in head.items()]
    runs = []
    for run in result.runs:
        samples = thinned(run.result.samples) if run.seed == plan.seeds[0] else ()
        values = run.result.to_json() | {"samples": [asdict(sample) for sample in samples]}
        names = {"policy": run.contestant, "ran": run.policy, "programs": run.programs_count, "seed": run.seed}
        runs.append(_json(names | {"result": values}))
    return "{\n" + ",\n".join([*lines, '"runs": [\n' + ",\n".join(runs) + "\n]"]) + "\n}\n"


def _json(value: object) -> str:
    return json.dumps(finite(value), separators=(",", ":"), allow_nan=False)


# --- the page -------------------------------------------------------------------------------------------------------

Cell = Callable[[Row], str]
NOTHING = "-"
"""Content of a cell without a figure."""


def _shown(name: str, digits: int, *, percent: bool = False) -> Cell:
    """Return a cell with an interval of a row."""

    def cell(row: Row) -> str:
        interval: Interval | None = getattr(row, name)
        form = "{} <small>± {}</small>"
        return NOTHING if interval is None else interval.text(digits, percent=percent, form=form)

    return cell


COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("turns/min", "turns that ended, a minute", _shown("turns_per_min", 1)),
    ("ratio", "turns/min over those of the baseline, seed by seed", _shown("ratio", 2)),
    ("hits", "prompt tokens that were found in caches", _shown("hit_ratio", 1, percent=True)),
    ("turn p50", "seconds from a turn's arrival to its end, median", _shown("turn_p50_s", 2)),
    ("turn p99", "seconds from a turn's arrival to its end, 99th percentile", _shown("turn_p99_s", 1)),
    ("held p99", "seconds that a turn waited for its lease, 99th percentile", _shown("held_p99_s", 1)),
    (
        "idle while held",
        "part of the time in which replicas had no turn while programs were held for memory",
        _shown("idle_held_ratio", 1, percent=True),
    ),
    ("program", "seconds from a program's first turn to its end, mean", _shown("program_mean_s", 1)),
    (
        "turns in time",
        "turns that took no longer than 1, 2 and 3 times their ideal time: alone, all history cached",
        lambda row: in_time(goodput.mean for goodput in row.turn_goodputs),
    ),
    (
        "programs in time",
        "programs that took no longer than 1, 2 and 3 times that of their turns, and their tools",
        lambda row: in_time(goodput.mean for goodput in row.program_goodputs),
    ),
    ("of limit", "turns/min over min(L1, L2, L3) of the turns that ended", _shown("limit_ratio", 0, percent=True)),
    ("by", "which bound is the limit", lambda row: escape(row.limited_by) or NOTHING),
)

EQUAL_UP_TO_RATIO = 0.01
"""Policies that differ by less count as equal in turns/min."""

_CSS = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #ffffff; --ink: #1d2430; --soft: #5b6471; --grid: #dfe3e8;
  --best: #e3f1e9; --warn: #8a4b00; }
@media (prefers-color-scheme: dark) { :root { --page: #101318; --card: #191d24; --ink: #e8eaee; --soft: #a3abb7;
  --grid: #333a45; --best: #17382a; --warn: #ffb35c; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px; }
h1, h2 { margin: 0 0 8px; }
.lead, .notes, th, td small, dt { color: var(--soft); } .warn { color: var(--warn); }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 18px 20px;
  margin: 0 0 20px; }
svg { width: 100%; height: auto; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
.best { background: var(--best); font-weight: 600; }
.notes, dl { font-size: 13.5px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; } dd { margin: 0; }
pre { background: var(--page); padding: 10px 12px; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
"""

_THEMED = {INK: "--ink", SOFT_INK: "--soft", GRID: "--grid"}


def _plots(drawing: str) -> str:
    """Return the section with the drawing; empty without one."""
    if not drawing:
        return ""
    return f"""<section><h2>Plots</h2>
{drawing}
<p class="notes">Means and 95 % intervals over seeds. The limit, min(L1, L2, L3), is what no schedule of these turns can
pass; its bar is where it lies for the turns of the different policies. Costs are parts of capacity times time: what
lacks was empty while nobody waited.</p></section>"""


def html_page(result: ComparisonResult, drawing: str, making: Making) -> str:
    """Return the page: what was compared, the table, the drawing, and how to reproduce it."""
    plan = result.plan
    title = f"{_count(len(plan.contestants), 'policy', 'policies')} on {plan.workload.name}"
    for colour, variable in _THEMED.items():  # words and lines have the page's colours, in light and in dark
        drawing = drawing.replace(colour, f"var({variable})")
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_CSS}</style>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(_lead(result))}</p>
{_warnings(result)}{_findings(result)}
<section><h2>Figures</h2>
<div class="wide">{_table(result)}</div>
<p class="notes">Means over seeds, and how far their 95 % intervals reach (Student's t). Ratios are to
{escape(plan.baseline)}, seed by seed. Seconds are of simulated time; latencies of turns include the time held.
{escape(_sweep_words(result))}</p></section>
{_plots(drawing)}
<section><h2>Again</h2>
<pre>{escape(making.command)}</pre>
{_facts(result, making)}</section>
</main>
</html>
"""


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
        done = f"{result.done_count} of {result.planned_count} runs were done"
        said.append(f"Not complete: {result.stopped_by}. {done}; the figures are theirs.")
    if late_count := sum(not run.result.complete for run in result.runs):
        said.append(f"{_count(late_count, 'batch was', 'batches were')} not through at the time limit.")
    if failed_count := sum(run.result.failed_turn_count for run in result.runs):
        said.append(f"{_count(failed_count, 'turn')} failed, in all runs together.")
    return "".join(f'<p class="warn">{escape(words)}</p>\n' for words in said)


def _findings(result: ComparisonResult) -> str:
    """Say for each load which contestant was best, and how certain that is."""
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
    head = "".join(f'<th title="{escape(meaning)}">{escape(name)}</th>' for name, meaning, _ in COLUMNS)
    lines = []
    for programs_count in result.programs_counts:
        rows = [row for row in result.rows() if row.programs_count == programs_count]
        most = max(row.turns_per_min.mean for row in rows)
        lines.append(f'<tr><th colspan="{1 + len(COLUMNS)}">{programs_count} programs</th></tr>')
        for row in rows:
            name = escape(row.contestant)
            if row.policy != row.contestant:
                name += f" <small>{escape(row.policy)}</small>"
            cells = "".join(f"<td>{cell(row)}</td>" for _, _, cell in COLUMNS)
            if row.turns_per_min.mean == most:
                cells = cells.replace("<td>", '<td class="best">', 1)
            lines.append(f"<tr><td>{name}</td>{cells}</tr>")
    return f"<table><thead><tr><th>policy</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _facts(result: ComparisonResult, making: Making) -> str:
    facts = {
        "seeds": ", ".join(map(str, result.plan.seeds)),
        "runs": f"{result.done_count} of {result.planned_count}",
        "thunderagent": __version__,
        **making.made,
    }
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in facts.items())}</dl>"
