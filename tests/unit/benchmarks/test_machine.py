"""The origin that each result states, and results that are never lost."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.machine import ROOT, code_hash, save_results

ELSEWHERE = {"minisweagent", "openhands", "torch"}
"""What some benchmarks run on, in environments of their own."""


def test_a_result_says_which_code_made_it_and_on_what_machine(tmp_path: Path) -> None:
    report = json.loads(save_results("core", {"figures": 1}, tmp_path).read_text())
    assert report["figures"] == 1
    assert report["code"] == code_hash()
    assert len(report["commit"].rstrip("+")) == 12 or report["commit"] == "unknown"
    assert {"processor", "cores_count", "python", "date"} <= report["machine"].keys()


def test_an_earlier_result_is_kept_beside_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs are kept, not the best. The results of one process count as one."""
    for figure in (1, 2):
        monkeypatch.setattr(machine, "_written", set())  # as another process
        for step in range(3):
            path = save_results("core", {"figure": figure, "step": step}, tmp_path)
    assert json.loads(path.read_text())["figure"] == 2
    (earlier,) = (tmp_path / "earlier").glob("core-*.json")
    assert (json.loads(earlier.read_text())["figure"], json.loads(earlier.read_text())["step"]) == (1, 2)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_name_that_a_benchmark_imports_exists(name: str) -> None:
    try:
        import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ELSEWHERE:
            raise
    except SystemExit as error:  # it says what to install
        if "install" not in str(error):
            raise
