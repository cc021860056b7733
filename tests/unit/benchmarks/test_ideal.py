"""The goodput of a load in real time: the time of each turn and program alone, and which ones count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.ideal import StandardLoad, goodput_figures, goodputs
from benchmarks.load import LoadResult, LoadSpec, TurnRecord
from thunderagent.simulator.engine.timing import TimingProfile
from thunderagent.simulator.figures.bounds import Engines, turn_shapes

SPEC = LoadSpec(seed=3)
ENGINES = Engines(TimingProfile("unit", base_s=0.0, prefill_token_s=0.01, decode_request_s=0.1), 16_000)


def records_of(index: int, times_ideal: float) -> list[TurnRecord]:
    """Return a program's turns, each with a multiple of its time alone, and its tools as planned."""
    records, now_s = [], 0.0
    for number, shape in enumerate(turn_shapes(StandardLoad(SPEC).program(index, SPEC.seed))):
        start_s = now_s + (shape.gap_s or 0.0)
        alone_s = 0.01 * shape.new_tokens + 0.1 * (shape.output_tokens - 1)
        now_s = start_s + times_ideal * alone_s
        records.append(TurnRecord(index, number, start_s, None, now_s, 1, 0, 1, 200, 1))
    return records


def figures_of(*programs: list[TurnRecord], window_end_s: float = 1e6) -> dict[str, float]:
    records = tuple(sorted((record for each in programs for record in each), key=lambda record: record.end_s))
    return goodput_figures(goodputs(LoadResult(SPEC, 0.0, window_end_s, records, 0, 0), ENGINES))


def test_turns_and_programs_are_in_time_by_what_they_take_alone() -> None:
    """A program's ideal includes its tools: its turns took 2.5 times theirs, and all of it took less than that."""
    figures = figures_of(records_of(0, 0.99), records_of(1, 2.5))
    of_first, of_all = len(records_of(0, 1)), len(records_of(0, 1)) + len(records_of(1, 1))
    assert figures == {
        "goodput_turns_ratio_1": pytest.approx(of_first / of_all),
        "goodput_turns_ratio_2": pytest.approx(of_first / of_all),
        "goodput_turns_ratio_3": 1.0,
        "goodput_programs_ratio_1": 0.5,
        "goodput_programs_ratio_2": 0.5,
        "goodput_programs_ratio_3": 1.0,
    }


def test_only_programs_that_ended_in_the_window_count() -> None:
    """A program does not count if it was cut off, its last turn failed, or it ended later; its turns do."""
    whole = records_of(0, 0.5)
    cut, later = records_of(1, 0.5)[:-1], records_of(2, 0.5)
    failed = records_of(3, 0.5)
    failed[-1] = replace(failed[-1], status=503)
    late_s = later[-1].end_s
    assert figures_of(whole, cut, failed)["goodput_programs_ratio_1"] == 1.0
    assert figures_of(cut, failed)["goodput_programs_ratio_3"] == 0.0
    assert figures_of(later, window_end_s=late_s - 0.001)["goodput_programs_ratio_3"] == 0.0
    assert figures_of(later, window_end_s=late_s - 0.001)["goodput_turns_ratio_1"] == 1.0
