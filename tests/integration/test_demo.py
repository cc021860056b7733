"""The demo, as a newcomer runs it: real processes from beginning to end, without a terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(200)

PROXY_READY_S = 120.0


def demo(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.demo", "--quick", "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_demo_runs_both_policies_to_their_ends_and_leaves_a_plot(tmp_path: Path) -> None:
    """One command without a terminal gives plain lines, a table, a plot, the figures, and what to do next."""
    with demo(tmp_path) as process:
        output, errors = process.communicate(timeout=170)
    assert process.returncode == 0, errors
    assert "\x1b" not in output  # no control sequences where there is no terminal
    for words in ("passthrough", "breakeven", "turns/min", "makespan", "simulated", "serve --backends"):
        assert words in output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

    figures = json.loads((tmp_path / "demo.json").read_text())
    before, after = figures["runs"]
    assert (before["policy"], after["policy"]) == ("passthrough", "breakeven")
    assert before["turn_count"] == after["turn_count"] == len(before["end_s"]) > 20
    assert before["failed_turn_count"] == after["failed_turn_count"] == 0
    assert set(after["costs_token_s"]) == {"decode", "prefill", "recompute", "unused", "caching"}
    assert after["costs_token_s"]["decode"] > 0
    assert len(re.findall(r"(?:turns|programs) within 1/2/3 x ideal( +\d+/\d+/\d+ %){2}", output)) == 2
    for run in figures["runs"]:
        assert 0 < run["turn_goodput_ratios"][2] <= 1
        assert run["program_goodput_ratios"] == sorted(run["program_goodput_ratios"])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, or SIGTERM, ends the engines and the proxy too."""
    with demo(tmp_path) as process:
        deadline_s = time.monotonic() + PROXY_READY_S
        while len(started := children(process.pid)) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert len(started) == 3  # two engines and the proxy
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped" in output
    assert errors == ""
    assert not any(is_alive(pid) for pid in started)
