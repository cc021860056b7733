"""`thunderagent simulate`: its output, its files, and its refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from thunderagent.cli import main

QUICK = ("simulate", "--minutes", "2", "--programs", "8")


def exit_status(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as exited:  # argparse refuses this way, and ends --help
        return int(exited.code or 0)


def test_a_run_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(*QUICK, "--policy", "cap", "--policy-arg", "n=4", "--replicas", "2") == 0
    out = capsys.readouterr().out
    for words in ("cap on standard, seed 0: 2.0 min simulated", "turns/min", "first token", "recompute", "r0", "r1"):
        assert words in out
    assert all(len(line) <= 80 for line in out.splitlines())
    in_time = r"within 1/2/3 times their ideal time: \d+/\d+/\d+ % of turns, \d+/\d+/\d+ % of programs"
    assert re.search(in_time, out)


def test_all_figures_are_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    assert exit_status(*QUICK, "--json", str(path)) == 0
    written = json.loads(path.read_text())
    capsys.readouterr()
    assert exit_status(*QUICK, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == written
    assert written["policy"] == "breakeven"
    assert set(written["replicas"][0]["costs"]) == {
        "decode_token_s",
        "prefill_token_s",
        "recompute_token_s",
        "unused_token_s",
        "caching_token_s",
        "queued_token_s",
    }
    assert len(written["samples"]) == 13
    assert [goodput["alpha_ratio"] for goodput in written["goodputs"]] == [1, 2, 3]
    for kind in ("turn", "program"):
        first, second, third = (goodput[f"{kind}_ratio"] for goodput in written["goodputs"])
        assert first <= second <= third > 0


def test_tools_and_loops_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--loop", "batch", "--tool-cpus", "2", "--sandbox-s", "5-10", "--sandbox-gib", "2", "--disk-gib", "8")
    assert exit_status("simulate", "--programs", "8", *options) == 0
    out = capsys.readouterr().out
    assert "makespan" in out
    assert "4 sandboxes at most on 8.0 GiB" in out


def test_a_recorded_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "day.jsonl"
    path.write_text('{"id": "a", "turns": [[0, 500, 20, 0, 1.0, 2.0, "tool"], [3, 700, 20, 520, 1.0, 0, "end"]]}\n')
    assert exit_status("simulate", "--trace", str(path), "--loop", "batch", "--programs", "3") == 0
    said = capsys.readouterr()
    assert "breakeven on day.jsonl" in said.out
    assert "6 turns, 3 programs" in said.out
    assert "1 programs, 2 turns" in said.err


def test_a_batch_that_is_not_through_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("simulate", "--loop", "batch", "--minutes", "0.1") == 1
    assert "not complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--kv-tokens", "3"), "must hold one block"),
        (("--profile", "qwen3-14b-h100"), "give --kv-tokens"),
        (("--programs", "0"), "programs_count"),
        (("--minutes", "-1"), "horizon_s"),
        (("--programs", "1000000000000"), "GiB of memory"),
        (("--policy", "nonsense"), "no policy 'nonsense'"),
        (("--policy-arg", "n"), "NAME=VALUE"),
        (("--workload", "nonsense"), "unknown workload"),
        (("--loop", "open"), "no arrival"),
        (("--trace", "/nowhere/at/all.jsonl"), "/nowhere/at/all.jsonl"),
        (("--disk-gib", "1", "--sandbox-gib", "2"), "holds no sandbox"),
        (("--sandbox-s", "soon"), "range like 30-120"),
        (("--json", "/nowhere/at/all.json"), "cannot write /nowhere/at/all.json: No such file"),
        (("--json", "/"), "cannot write /: Is a directory"),
        (("--disk-gib", "inf"), "--disk-gib must be a number"),
        (("--sandbox-gib", "nan"), "--sandbox-gib must be a number"),
        (("--policy", "oracle:reserve_tokens=inf"), "reserve_tokens must be a number"),
        (("--policy", "oracle:headroom_ratio=1"), "headroom_ratio must be under 1"),
        (("--kv-tokens", "300"), "need 652 tokens or more, and an engine takes 288"),
    ],
)
def test_impossible_option_is_refused_in_words(
    options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(*QUICK, *options) == 2
    assert says in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("simulate", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("an hour takes seconds", "--policy-arg", "mini-swe-agent", "closed:", "--json"):
        assert words in out
