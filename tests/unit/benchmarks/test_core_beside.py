"""The core beside an earlier commit: the commit's own code runs, and the stored ratios are those of one round."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.core_beside import run_once, summary, unpacked
from benchmarks.machine import ROOT


def test_ratios_are_those_of_each_round() -> None:
    """A round on a slow machine is slow for all builds, and its ratio stays."""
    before = [{"event_mean_ms": each} for each in (10.0, 40.0, 10.0)]
    now = [{"event_mean_ms": each} for each in (5.0, 20.0, 6.0)]
    figures = summary({"before": before, "interpreted": now})
    assert figures["interpreted"] == {"event_mean_ms": 6.0, "event_ratio": 0.5, "event_ratio_max": 0.6}
    assert figures["before"] == {"event_mean_ms": 10.0}


def test_the_code_of_a_commit_runs_from_where_it_lies(tmp_path: Path) -> None:
    """A commit whose benchmark fails makes the run fail: so its own code ran, not today's."""
    if subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("not a checkout")
    tree = unpacked("HEAD", tmp_path)
    arguments = ("breakeven", "40", "2", "200")
    figures = run_once(tree, arguments)
    assert figures["event_mean_ms"] > 0
    assert figures["tick_paused_count"] > 0
    (tree / "benchmarks" / "core.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(subprocess.CalledProcessError):
        run_once(tree, arguments)
