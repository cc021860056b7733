"""A report has every figure in three forms, its page stands alone, and its bytes never vary."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from thunderagent.errors import ConfigurationError
from thunderagent.programs.learned.goodput import in_time
from thunderagent.simulator.comparison.comparison import compare
from thunderagent.simulator.comparison.results import (
    KEPT_SAMPLES_COUNT,
    ComparisonPlan,
    ComparisonResult,
    Run,
    thinned,
)
from thunderagent.simulator.engine.records import EngineConfig
from thunderagent.simulator.engine.timing import profile
from thunderagent.simulator.report import plots
from thunderagent.simulator.report.page import Making, html_page, json_text, rows_csv, runs_csv, write_report
from thunderagent.simulator.report.plots import draw
from thunderagent.simulator.runs.scenario import Scenario
from thunderagent.simulator.workloads.distributions import workload
from thunderagent.simulator.workloads.plans import ProgramPlan

SCENARIO = Scenario(
    engine=EngineConfig(kv_tokens=16_000, timing=profile("demo")),
    replica_count=2,
    horizon_s=66,
    warmup_s=6,
    sample_interval_s=0.5,
)
PLAN = ComparisonPlan(
    SCENARIO,
    workload("standard"),
    ("passthrough", "cap-best", "thunderagent:delta_s=1"),
    (3, 12),
    seeds=(0, 1),
    process_count=1,
)
MAKING = Making("thunderagent compare --programs 4,16", {"date": "2026-01-31 12:00", "machine": "a small one"})


@pytest.fixture(scope="module")
def result() -> ComparisonResult:
    return compare(PLAN)


@pytest.fixture(scope="module")
def drawing(result: ComparisonResult) -> str:
    return draw(result)


@pytest.fixture(scope="module")
def page(result: ComparisonResult, drawing: str) -> str:
    return html_page(result, drawing, MAKING)


# --- CSV and JSON ---------------------------------------------------------------------------------------------------


def test_table_is_written_as_csv(result: ComparisonResult) -> None:
    lines = list(csv.DictReader(io.StringIO(rows_csv(result))))
    assert [(line["policy"], line["programs"], line["seeds"]) for line in lines] == [
        (contestant, str(count), "2") for count in (3, 12) for contestant in PLAN.contestants
    ]
    assert [line["ran"] for line in lines[:3]] == ["passthrough", "cap:n=3", "thunderagent:delta_s=1"]
    for line, row in zip(lines, result.rows(), strict=True):
        assert float(line["turns_per_min"]) == pytest.approx(row.turns_per_min.mean, rel=1e-5)
        assert float(line["turns_per_min_ci95"]) == pytest.approx(row.turns_per_min.half_width, rel=1e-5)
        assert float(line["cost_caching_ratio"]) == pytest.approx(row.costs["caching"].mean, rel=1e-5)
        assert line["limited_by"] == row.limited_by != ""
        for kind, goodputs in (("turn", row.turn_goodputs), ("program", row.program_goodputs)):
            columns = [f"{kind}_goodputs_{alpha}" for alpha in (1, 2, 3)]
            assert [float(line[name]) for name in columns] == pytest.approx([each.mean for each in goodputs], rel=1e-5)
            assert float(line[f"{columns[2]}_ci95"]) == pytest.approx(goodputs[2].half_width, rel=1e-5)
    assert (lines[0]["ratio"], lines[0]["ratio_ci95"]) == ("1", "0")


def test_runs_as_csv(result: ComparisonResult) -> None:
    lines = list(csv.DictReader(io.StringIO(runs_csv(result))))
    assert len(lines) == 3 * 2 * 2
    for line, run in zip(lines, result.runs, strict=True):
        assert (line["policy"], int(line["programs"]), int(line["seed"])) == (
            run.contestant,
            run.programs_count,
            run.seed,
        )
        assert int(line["turns"]) == run.result.turn_count
        assert float(line["turn_p99_s"]) == pytest.approx(run.result.turn_latency.p99_s, rel=1e-5)
        for alpha, goodput in zip((1, 2, 3), run.result.goodputs, strict=True):
            assert float(line[f"turn_goodputs_{alpha}"]) == pytest.approx(goodput.turn_ratio, abs=1e-5)
            assert float(line[f"program_goodputs_{alpha}"]) == pytest.approx(goodput.program_ratio, abs=1e-5)


def test_single_seed_has_no_interval(result: ComparisonResult) -> None:
    single = replace(result, runs=tuple(run for run in result.runs if run.seed == 0))
    for line in csv.DictReader(io.StringIO(rows_csv(single))):
        assert line["turns_per_min"] != ""
        assert line["turns_per_min_ci95"] == line["ratio_ci95"] == ""
    assert "±" not in html_page(single, "", MAKING)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_json_has_every_run_but_few_samples(result: ComparisonResult) -> None:
    """Infinite values, such as a bound that does not bind, are null."""
    written = json.loads(json_text(result, MAKING), parse_constant=refuse)
    assert (written["command"], written["made"]) == (MAKING.command, dict(MAKING.made))
    assert written["plan"]["scenario"]["engine"]["kv_tokens"] == 16_000
    assert written["cap_best"][1]["n"] == result.sweeps[1].best_count
    assert [(entry["policy"], entry["ran"], entry["programs"]) for entry in written["rows"]] == [
        (row.contestant, row.policy, row.programs_count) for row in result.rows()
    ]
    assert "contestant" not in json_text(result, MAKING)
    assert len(written["runs"]) == 12
    for entry, run in zip(written["runs"], result.runs, strict=True):
        assert (entry["policy"], entry["ran"], entry["seed"]) == (run.contestant, run.policy, run.seed)
        assert entry["result"]["turn_count"] == run.result.turn_count
        assert len(entry["result"]["turn_latency_quantiles_s"]) == 101
        assert entry["result"]["bounds"]["tools_per_s"] is None
        assert bool(entry["result"]["samples"]) == (run.seed == 0)
        assert len(entry["result"]["samples"]) <= KEPT_SAMPLES_COUNT < len(run.result.samples)


def test_samples_are_thinned_evenly(result: ComparisonResult) -> None:
    """Whatever a longer run keeps of a time is kept of it in a shorter one."""
    samples = result.runs[0].result.samples
    kept = thinned(samples)
    assert (kept[0], kept[1]) == (samples[0], samples[2])
    assert thinned(samples[:50]) == samples[:50]
    many = [replace(samples[0], now_s=float(number)) for number in range(1000)]
    for count in range(1, 1000):
        kept = thinned(many[:count])
        assert min(count, KEPT_SAMPLES_COUNT // 2) <= len(kept) <= KEPT_SAMPLES_COUNT
        assert {sample for sample in thinned(many) if sample.now_s < count} <= set(kept)


def test_the_same_comparison_writes_the_same_bytes(result: ComparisonResult) -> None:
    """Only `made` in JSON differs, which has its own line."""
    again = compare(PLAN)
    assert rows_csv(again) == rows_csv(result)
    assert runs_csv(again) == runs_csv(result)
    later = replace(MAKING, made={"date": "another"})
    lines, lines_again = (json_text(*each).splitlines() for each in ((result, MAKING), (again, later)))
    assert [line for line, other in zip(lines, lines_again, strict=True) if line != other] == [
        '"made": {"date":"2026-01-31 12:00","machine":"a small one"},'
    ]
    assert draw(again) == draw(result)


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(result: ComparisonResult, tmp_path: Path) -> None:
    """No partial file is left beside it."""
    path = tmp_path / "comparison.html"
    path.write_text("earlier")
    with pytest.raises(UnicodeEncodeError):
        write_report(tmp_path, replace(result, runs=()), "", replace(MAKING, command="no text: \ud800"))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "earlier"
    paths = write_report(tmp_path, replace(result, runs=result.runs[:1]), "", MAKING)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert path.read_text() != "earlier"


# --- the page -------------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """Checks that all opened tags are closed, and keeps attributes and words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_stands_alone(page: str) -> None:
    """It runs and loads nothing; all that it refers to is in it."""
    parsed = Page(page)
    assert not {tag for tag, _, _ in parsed.attributes} & {"script", "link", "img", "iframe", "object"}
    references = {value for _, name, value in parsed.attributes if name in {"href", "xlink:href", "src"}}
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert references <= {f"#{each}" for each in ids}
    assert set(re.findall(r"url\(#?([^)]+)\)", page)) <= set(ids)
    assert set(re.findall(r'"(https?://[^"]+)"', page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in page


def test_the_page_says_everything_of_the_comparison(page: str, result: ComparisonResult) -> None:
    words = " ".join(" ".join(Page(page).words).split())
    for text in (
        "3 policies on standard",
        "3 / 12 programs at a time on 2 replicas of demo with 16,000 tokens each",
        "of which the first 0.1 do not count; 2 seeds",
        MAKING.command,
        "2026-01-31 12:00",
        f"runs {result.planned_count} of {result.planned_count}",
        f"n=3 of 3 programs, n={result.sweeps[1].best_count} of 12 programs",
        "held p99",
    ):
        assert text in words, text
    row = result.rows()[-1]
    assert f"{row.turns_per_min.mean:.1f} ± {row.turns_per_min.half_width:.1f}" in words
    cells = [in_time(each.mean for each in goodputs) for goodputs in (row.turn_goodputs, row.program_goodputs)]
    assert " ".join(cells) in words
    assert "Not complete" not in words
    assert "failed" not in words


def test_colours_of_words_and_lines_are_the_page_s(page: str) -> None:
    """Then they are light on a dark page; a drawing alone has plain colours."""
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not set(re.findall(r"#[0-9a-f]{6}\b", drawings)) & {plots.INK, plots.SOFT_INK, plots.GRID}
    assert "var(--ink)" in drawings
    assert "@media (prefers-color-scheme: dark)" in page


def test_names_are_no_markup(result: ComparisonResult, drawing: str) -> None:
    @dataclass(frozen=True)
    class Named:
        name: str = "<b>&amp;.jsonl"

        def program(self, index: int, seed: int) -> ProgramPlan:
            return PLAN.workload.program(index, seed)

    renamed = replace(result, plan=replace(PLAN, workload=Named()))
    page = html_page(renamed, drawing, replace(MAKING, command="<i>"))
    assert "<title>3 policies on &lt;b&gt;&amp;amp;.jsonl</title>" in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_incomplete_report_says_so(result: ComparisonResult) -> None:
    late = replace(result.runs[0], result=replace(result.runs[0].result, complete=False, failed_turn_count=3))
    partial = replace(result, runs=(late, *result.runs[1:7]), done_count=9, stopped_by="it was interrupted")
    page = html_page(partial, "", MAKING)
    assert f"Not complete: it was interrupted. 9 of {result.planned_count} runs were done" in page
    assert "1 batch was not through at the time limit." in page
    assert "3 turns failed, in all runs together." in page


# --- the drawing ----------------------------------------------------------------------------------------------------

PANELS = {
    "Throughput, and the limit of any schedule": {"turns/min", "programs at a time"},
    "Throughput over that of passthrough": {"times passthrough"},
    "Prefix hits": {"prompt tokens cached (%)"},
    "Turn latency, 12 programs": {"turn latency, time held included (s)", "turns that took no longer (%)"},
    "Turns in time, 12 programs": {"in time (%)", "ideal time", "1 x", "2 x", "3 x"},
    "Programs in time, 12 programs": set(),
    "What memory was spent on, 12 programs": {
        "part of capacity x time (%)",
        "decode",
        "prefill",
        "recompute",
        "unused",
    },
    "Mean time held, 12 programs": {"held (s)", "prompt, up to so many tokens"},
    "Imbalance of the replicas, 12 programs": {"minutes", "(% of a replica's capacity)"},
    "Memory: passthrough, seed 0": {"demand", "used", "part of capacity (%)"},
    "Memory: cap-best, seed 0": set(),
    "Memory: thunderagent:delta_s=1, seed 0": set(),
}


def words_of(svg: str) -> list[str]:
    return ["".join(each.itertext()).strip() for each in ET.fromstring(svg).iter() if each.tag.endswith("text")]


def test_every_panel_names_its_axes_and_the_policies_are_named_once(drawing: str) -> None:
    words = words_of(drawing)
    assert [word for word in words if word in PANELS] == list(PANELS)
    assert set(words) >= set().union(*PANELS.values()) | set(PLAN.contestants)


def heights(svg: str, colour: str) -> list[tuple[float, ...]]:
    """Return the heights of the points of each line with that colour and its own width; up is more."""
    found = []
    for each in ET.fromstring(svg).iter():
        style = each.get("style", "")
        if each.tag.endswith("path") and f"stroke: {colour}" in style and "stroke-linecap: square" in style:
            points = re.findall(r"[ML] ([\d.]+) ([\d.]+)", each.get("d", ""))
            found.append(tuple(-float(y) for _, y in points))
    return found


def test_lines_are_where_the_figures_are(result: ComparisonResult, drawing: str) -> None:
    """Over the two loads the contestants' lines rise where their figures rise, by as much."""
    rows = result.rows()
    base, best = (
        [row.turns_per_min.mean for row in rows if row.contestant == contestant]
        for contestant in ("passthrough", "cap-best")
    )
    base_line = next(line for line in heights(drawing, plots.BASELINE_COLOUR) if len(line) == 2)
    best_line = next(line for line in heights(drawing, plots.COLOURS[0]) if len(line) == 2)
    scale = (best_line[1] - base_line[1]) / (best[1] - base[1])
    assert scale > 0
    assert best_line[0] - best_line[1] == pytest.approx(scale * (best[0] - best[1]), rel=1e-3)
    assert best_line[0] - base_line[1] == pytest.approx(scale * (best[0] - base[1]), rel=1e-3)


def test_goodput_is_drawn_by_how_many_times_the_ideal_time(result: ComparisonResult, drawing: str) -> None:
    """Turns are at the left, programs at the right; both panels have the same scale."""
    baseline = next(row for row in result.rows() if (row.contestant, row.programs_count) == ("passthrough", 12))
    turns, programs = [line for line in heights(drawing, plots.BASELINE_COLOUR) if len(line) == 3][:2]
    scale = (turns[2] - turns[0]) / (baseline.turn_goodputs[2].mean - baseline.turn_goodputs[0].mean)
    assert scale > 0
    for line, goodputs in ((turns, baseline.turn_goodputs), (programs, baseline.program_goodputs)):
        expected = [turns[0] + scale * (each.mean - baseline.turn_goodputs[0].mean) for each in goodputs]
        assert line == pytest.approx(expected, abs=1e-2)


def test_bars_that_are_cut_say_how_long_they_are(result: ComparisonResult, drawing: str) -> None:
    """Claims beyond the capacity have no upper end."""
    arrow = "\N{RIGHTWARDS ARROW}"
    assert not [words for words in words_of(drawing) if arrow in words]
    runs = []
    for run in result.runs:
        replicas = [
            replace(each, costs=replace(each.costs, recompute_token_s=each.capacity_tokens * run.result.measured_s * 3))
            for each in run.result.replicas
        ]
        runs.append(replace(run, result=replace(run.result, replicas=tuple(replicas))))
    cut = [words for words in words_of(draw(replace(result, runs=tuple(runs)))) if arrow in words]
    assert len(cut) == len(PLAN.contestants)
    assert all(300 <= float(words.removeprefix(arrow)) < 600 for words in cut)


def test_memory_is_drawn_of_a_seed_that_has_it(result: ComparisonResult) -> None:
    """An interrupt may leave the first seed of a policy undone; each panel names its own."""
    runs = tuple(run for run in result.runs if run.seed == 1 or run.contestant == "cap-best")
    titles = [words for words in words_of(draw(replace(result, runs=runs))) if words.startswith("Memory")]
    assert [title[-1] for title in titles] == ["1", "0", "1"]
    bare = []
    for run in runs[:2]:
        samples = tuple(replace(sample, replicas=()) for sample in run.result.samples)
        bare.append(replace(run, result=replace(run.result, samples=samples)))
    assert "Memory" not in draw(replace(result, runs=tuple(bare)))


def test_imbalance_is_a_mean_over_runs_at_the_same_time(result: ComparisonResult) -> None:
    """The first seed has all of its samples, and the second one few; with one policy that one ends earlier."""

    def ramp(run: Run) -> Run:
        ends_s = 40.0 if (run.contestant, run.seed) == ("passthrough", 1) else 66.0
        samples = [replace(each, imbalance_ratio=each.now_s) for each in run.result.samples if each.now_s <= ends_s]
        return replace(run, result=replace(run.result, samples=tuple(thinned(samples) if run.seed else samples)))

    runs = [ramp(run) for run in result.runs]
    figure = plots._Drawing(replace(result, runs=tuple(runs))).figure()
    (axes,) = [each for each in figure.axes if each.get_title().startswith("Imbalance")]
    assert len(axes.lines) == len(PLAN.contestants)
    for line in axes.lines:
        assert len(line.get_xdata()) > 30
        for minute, percent in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert percent == pytest.approx(100 * 60 * minute)


def test_replica_on_which_nothing_ends_can_be_drawn() -> None:
    """It has no imbalance, no percentile, no ratio and no limit."""
    short = replace(SCENARIO, replica_count=1, horizon_s=0.2, warmup_s=0.1)
    nothing = compare(replace(PLAN, scenario=short, contestants=("passthrough", "sticky")))
    assert {run.result.turn_count for run in nothing.runs} == {0}
    drawing = draw(nothing)
    assert "Imbalance" not in drawing
    page = html_page(nothing, drawing, MAKING)
    Page(page)
    assert "nan" not in page


def test_nothing_is_drawn_of_nothing(result: ComparisonResult) -> None:
    assert draw(replace(result, runs=())) == ""


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "thunderagent.simulator.report.plots")
    with pytest.raises(ConfigurationError, match="install thunderagent with the extra `plots`"):
        from thunderagent.simulator.report.plots import draw  # noqa: F401, PLC0415
