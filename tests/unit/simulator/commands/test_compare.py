"""`thunderagent compare`: its output, its files, and its refusals."""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shlex
import sys
import threading
from html import unescape
from pathlib import Path

import pytest

from thunderagent.cli import build_parser, main
from thunderagent.config import ServeConfig
from thunderagent.programs.learned.goodput import in_time
from thunderagent.simulator.commands.compare import add_arguments, command_line

QUICK = ("compare", "--policies", "passthrough,cap:n=3", "--programs", "8", "--minutes", "0.5", "--processes", "1")
PRESSED_OFTEN = """
import os
import signal
from threading import Timer
from thunderagent.programs.policies.baselines.passthrough import Passthrough

class Pressed(Passthrough):
    def place(self, view, program, candidates):
        for after_s in (0.01, 0.05, 0.1):
            Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        os.kill(os.getpid(), signal.SIGINT)
        return super().place(view, program, candidates)
"""

KINDS = ("turn", "program")
FILES = ["comparison.csv", "comparison.html", "comparison.json", "runs.csv"]

INTERRUPTED = """
from thunderagent.programs.policies.baselines.passthrough import Passthrough

class Interrupted(Passthrough):
    def place(self, view, program, candidates):
        raise KeyboardInterrupt
"""


def exit_status(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as exited:  # argparse refuses this way, and ends --help
        return int(exited.code or 0)


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_a_comparison_prints_a_table_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    options = ("--policies", "passthrough,cap-best,thunderagent-ports", "--programs", "3,8", "--seeds", "2")
    assert exit_status(*QUICK, *options, "--out", str(out)) == 0
    said = capsys.readouterr()
    for words in ("3 programs", "8 programs", "passthrough", "cap-best n=", "thunderagent-ports", "turns/min", "±"):
        assert words in said.out
    lines = said.out.splitlines()
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert "within 1/2/3 x ideal turns programs" in " ".join(said.out.split())
    for written in csv.DictReader(io.StringIO(files_of(out)["comparison.csv"])):
        cells = [in_time(float(written[f"{kind}_goodputs_{alpha}"]) for alpha in (1, 2, 3)) for kind in KINDS]
        assert " ".join([written["policy"], *cells]) in [" ".join(line.split()) for line in lines]
    assert sorted(lines[-4:]) == [str(out / name) for name in FILES]
    assert sorted(files_of(out)) == FILES
    assert said.err == ""
    page = files_of(out)["comparison.html"]
    assert "--policies passthrough,cap-best,thunderagent-ports --programs 3,8 --seeds 2" in page
    assert page.count("<svg ") == 1


def test_the_command_in_the_report_makes_the_same_figures_again(tmp_path: Path) -> None:
    """This holds for any folder and number of processes; only `made` may differ in JSON."""
    options = (
        "--minutes",
        "1",
        "--seeds",
        "2",
        "--kv-tokens",
        "9000",
        "--loop",
        "batch",
        "--sandbox-s",
        "0-2",
        "--warmup-minutes",
        "0.1",
    )
    assert exit_status(*QUICK, *options, "--out", str(tmp_path / "a")) == 0
    first = files_of(tmp_path / "a")
    command = unescape(first["comparison.html"].partition("<pre>")[2].partition("</pre>")[0])
    assert exit_status(*shlex.split(command)[1:], "--processes", "1", "--out", str(tmp_path / "b")) == 0
    again = files_of(tmp_path / "b")
    assert {name: again[name] for name in FILES if name.endswith("csv")} == {
        name: first[name] for name in FILES if name.endswith("csv")
    }
    values, values_again = json.loads(first["comparison.json"]), json.loads(again["comparison.json"])
    assert values.pop("made").keys() == values_again.pop("made").keys()
    assert values == values_again


def test_a_command_is_read_as_it_was_written() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = (
        "--trace",
        "a file.jsonl",
        "--sandbox-s",
        "30-120",
        "--policies",
        "m:C:a=1,oracle",
        "--baseline",
        "oracle",
    )
    args = parser.parse_args(
        [*options, "--programs", "2,40", "--processes", "7", "--out", "there", "--disk-gib", "1.5"]
    )
    command = command_line(args)
    assert "'a file.jsonl'" in command
    assert "--processes" not in command
    again = vars(parser.parse_args(shlex.split(command)[2:]))
    assert again == vars(args) | {"process_count": None, "out": Path("comparison")}


def test_every_number_is_read_as_the_very_same() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for options in (
        ("--minutes", "1234567.125"),
        ("--minutes", "1e-07"),
        ("--sandbox-s", "0.00001-12.3456789"),
        ("--warmup-minutes", "0.1", "--disk-gib", "inf"),
    ):
        args = parser.parse_args(options)
        again = parser.parse_args(shlex.split(command_line(args))[2:])
        assert vars(again) == vars(args)
    assert "--minutes 10 " in command_line(parser.parse_args(["--minutes", "10"])) + " "


def test_a_second_interrupt_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the report is written is too late, with or without an earlier one."""
    (tmp_path / "pressed_often.py").write_text(PRESSED_OFTEN)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--policies", "passthrough,pressed_often:Pressed", "--out", str(tmp_path / "report"))
    assert exit_status(*QUICK, *options) == 1
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert "it was interrupted: 1 of 10 runs are done" in capsys.readouterr().err
    assert sorted(files_of(tmp_path / "report")) == FILES


def test_a_report_that_cannot_be_written_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is still printed."""
    (tmp_path / "comparison.json").mkdir()
    assert exit_status(*QUICK, "--seeds", "1", "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert said.err == f"thunderagent: cannot write the report in {tmp_path}: Is a directory\n"
    assert "cap:n=3" in said.out
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_in_which_nothing_can_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal comes before anything runs."""
    assert exit_status(*QUICK, "--out", "/proc") == 2
    assert "cannot write in the folder /proc" in capsys.readouterr().err


def test_an_interrupt_leaves_a_report_of_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "interrupted_policy.py").write_text(INTERRUPTED)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--policies", "passthrough,interrupted_policy:Interrupted", "--out", str(tmp_path / "report"))
    assert exit_status(*QUICK, *options) == 1
    said = capsys.readouterr()
    assert said.err == "thunderagent: not complete, it was interrupted: 1 of 10 runs are done\n"
    assert (
        "Not complete: it was interrupted. 1 of 10 runs were done" in files_of(tmp_path / "report")["comparison.html"]
    )
    assert len(files_of(tmp_path / "report")["runs.csv"].splitlines()) == 1 + 1


def test_nothing_is_written_if_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "interrupted_at_once.py").write_text(INTERRUPTED)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--policies", "interrupted_at_once:Interrupted", "--out", str(tmp_path / "report"))
    assert exit_status(*QUICK, *options) == 1
    assert "0 of 5 runs are done" in capsys.readouterr().err
    assert files_of(tmp_path / "report") == {}


def test_batches_that_are_not_through_exit_with_1(tmp_path: Path) -> None:
    options = ("--loop", "batch", "--minutes", "0.2", "--seeds", "1", "--out", str(tmp_path))
    assert exit_status(*QUICK, *options) == 1
    assert "2 batches were not through at the time limit." in files_of(tmp_path)["comparison.html"]


def test_a_recorded_trace_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "day.jsonl"
    path.write_text('{"id": "a", "turns": [[0, 500, 20, 0, 1.0, 2.0, "tool"], [3, 700, 20, 520, 1.0, 0, "end"]]}\n')
    out = tmp_path / "report"
    assert exit_status(*QUICK, "--trace", str(path), "--seeds", "1", "--out", str(out)) == 0
    assert "1 programs, 2 turns" in capsys.readouterr().err
    assert "<h1>2 policies on day.jsonl</h1>" in files_of(out)["comparison.html"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policies", "nonsense"), "no policy 'nonsense'"),
        (("--policies", "passthrough,,cap"), "not names with commas between: 'passthrough,,cap'"),
        (("--policies", "cap:m=1"), "policy cap has no setting 'm'; it has: n"),
        (("--baseline", "sticky"), "the baseline 'sticky' is none of the policies: passthrough, cap:n=3"),
        (("--programs", "4,x"), "not whole numbers with commas between: '4,x'"),
        (("--programs", "0"), "programs_count must be at least 1"),
        (("--programs", "4,4"), "numbers of programs: 4 is there twice"),
        (("--seeds", "0"), "--seeds must be 1 to 10,000, got 0"),
        (("--seeds", "10001"), "--seeds must be 1 to 10,000, got 10001"),
        (("--processes", "0"), "at least 1 process"),
        (("--processes", "100000"), "that is enough for"),
        (("--programs", "1000000000000"), "GiB are free: that is enough for 0"),
        (("--workload", "nonsense"), "unknown workload"),
        (("--loop", "open"), "no arrival"),
        (("--minutes", "-1"), "horizon_s"),
        (("--trace", "no/such/file.jsonl"), "no/such/file.jsonl"),
        (("--out", "no/such/folder"), "cannot make the folder no/such/folder: No such file"),
    ],
)
def test_impossible_option_is_refused_before_anything_starts(
    options: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    assert exit_status(*QUICK, "--out", str(out), *options) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert exit_status(*QUICK, "--out", str(path)) == 2
    assert "cannot make the folder" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_without_matplotlib_there_are_tables_and_no_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All figures are there, and what to install for plots is said."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "thunderagent.simulator.report.plots", raising=False)
    assert exit_status(*QUICK, "--out", str(tmp_path / "report")) == 0
    out, err = capsys.readouterr()
    assert "cap:n=3" in out
    assert "no plots: plots need matplotlib: install thunderagent with the extra `plots`" in err
    page = (tmp_path / "report" / "comparison.html").read_text()
    assert "<h2>Figures</h2>" in page
    assert "<h2>Plots</h2>" not in page


def test_the_default_policy_is_compared_by_default() -> None:
    """Whoever compares wants to know how the proxy does as it is."""
    args = build_parser().parse_args(["compare"])
    assert ServeConfig.model_fields["policy"].default in args.policies


def test_simulate_runs_whom_compare_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs presets, and the oracle, which knows how long tools will run."""
    for policy, setting in (("oracle", "hold_below_s=2.5"), ("thunderagent-ports", "delta_s=1")):
        options = ("--policy", policy, "--policy-arg", setting, "--minutes", "0.5", "--programs", "4")
        assert exit_status("simulate", *options) == 0
        assert f"{policy.removesuffix('-ports')} on standard" in capsys.readouterr().out
    assert exit_status("simulate", "--policy", "oracle", "--policy-arg", "luck=1") == 2
    assert "policy oracle has no setting 'luck'" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("compare", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "simulate.md").read_text()
    (takes,) = re.findall(r"takes (about \d+ seconds on two cores)\.\s+It writes a folder `comparison`", page)
    assert takes in out
    for words in ("the same programs for each", "cap-best", "comparison.html", "--baseline", "--processes", "oracle"):
        assert words in out
