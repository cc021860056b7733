"""The reports of the plugin in vLLM: what it says now, what an older or newer one may say, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thunderagent.backends.vllm_plugin import PluginReport, read_reports, report_of

RANK: dict[str, Any] = {
    "protocol": 1,
    "version": "0.1.0",
    "vllm": "0.32.0",
    "on": True,
    "mode": "on",
    "blocks": {"tokens": 6400, "total": 400, "free": 100, "pinned": 40},
    "programs": 7,
    "pins": {"p": [40, 12.5]},
    "pins_total": {"kept": 5, "used": 3, "made_up": 9},
    "turns_total": {"warm": 3, "cold": 2},
    "chunks_total": {"whole": 8, "bounded": 0, "shrunk": 1},
    "preemptions_total": {"-1": 1, "3": 2, "x": 9},
    "steps_total": 1000,
    "hook_seconds_total": 0.25,
    "failures_total": 0,
}


def _read(said: object) -> list[PluginReport]:
    return read_reports(json.dumps(said).encode())


def test_a_report_is_read_without_words_that_nobody_knows() -> None:
    """An engine makes no labels up."""
    (report,) = _read({**RANK, "ranks": [RANK]})
    assert (report.is_on, report.protocol, report.version, report.vllm_version) == (True, 1, "0.1.0", "0.32.0")
    assert report.capacity_tokens == 6400
    assert (report.total_blocks_count, report.free_blocks_count, report.pinned_blocks_count) == (400, 100, 40)
    assert report.pinned_ratio == 0.1
    assert (report.pins_count, report.programs_count) == (1, 7)
    assert report.pins_total == {"kept": 5, "used": 3}
    assert report.preemptions_total == {"-1": 1, "3": 2}
    assert (report.steps_total, report.hook_seconds_total, report.failures_total) == (1000, 0.25, 0)


def test_ranks_are_reported_each_and_in_sum() -> None:
    """The engine is on if all of them are."""
    blocks = {"tokens": 1600, "total": 100, "free": 0, "pinned": 10}
    other = {**RANK, "on": False, "blocks": blocks, "turns_total": {"warm": 1}}
    reports = _read({**RANK, "on": False, "ranks": [RANK, other]})
    assert [report_of(reports, rank).pinned_blocks_count for rank in (0, 1)] == [40, 10]
    whole = report_of(reports, None)
    assert (whole.is_on, whole.pinned_blocks_count, whole.total_blocks_count) == (False, 50, 500)
    assert whole.capacity_tokens == 8000
    assert whole.turns_total == {"warm": 4, "cold": 2}
    assert report_of(reports, 7) == whole


@pytest.mark.parametrize(
    ("why_not", "expected"),
    [("vLLM 0.40.0 was not tried", "vLLM 0.40.0 was not tried"), ("x" * 500, "x" * 200), ("\x1b[2J", ""), (7, "")],
)
def test_why_it_is_off_is_told_in_bounded_and_printable_words(why_not: object, expected: str) -> None:
    """They go to terminals and logs."""
    reports = _read({**RANK, "on": False, "ranks": [{**RANK, "on": False}, {**RANK, "on": False, "why_not": why_not}]})
    assert report_of(reports, 1).why_not == report_of(reports, None).why_not == expected


@pytest.mark.parametrize(
    "said",
    [
        {"protocol": 1, "on": True},
        {"protocol": 9, "on": True, "blocks": 7, "pins": None, "pins_total": [1], "programs": "7", "ranks": "none"},
        {"protocol": 1, "on": True, "blocks": {"total": -1, "pinned": True}, "hook_seconds_total": 1e300, "ranks": [3]},
        {"protocol": 1, "on": True, "blocks": {"tokens": 0}},
    ],
)
def test_an_older_or_newer_plugin_is_known_by_what_it_says(said: dict[str, Any]) -> None:
    """What is missing or different is unknown, and no error."""
    (report,) = _read(said)
    assert report.is_on
    assert (report.total_blocks_count, report.pinned_blocks_count, report.programs_count) == (None, None, None)
    assert report.capacity_tokens is None
    assert (report.pinned_ratio, report.pins_total, report.hook_seconds_total) == (0.0, {}, None)


@pytest.mark.parametrize(
    "said", [None, [], {}, {"on": True}, {"protocol": 1}, {"protocol": "1", "on": True}, {"protocol": True, "on": True}]
)
def test_answer_without_a_report_means_no_plugin(said: object) -> None:
    """Some servers answer 200 on any path."""
    assert _read(said) == []


def test_answer_that_is_no_json_means_no_plugin() -> None:
    """Nor is what nests too deeply."""
    for answer in (b"", b"\xff", b"<html>", b"[" * 100_000):
        assert read_reports(answer) == []
