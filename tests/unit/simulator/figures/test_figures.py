"""Figures follow correctly from the records."""

from __future__ import annotations

from thunderagent.simulator.figures.figures import Goodput, Percentiles, TurnLog


def test_percentiles_are_values_that_occurred() -> None:
    values = Percentiles.of([float(value) for value in range(100, 0, -1)])
    assert (values.count, values.mean_s) == (100, 50.5)
    assert (values.p50_s, values.p90_s, values.p99_s, values.max_s) == (50.0, 90.0, 99.0, 100.0)


def test_percentiles_of_one_value_are_that_value_and_of_none_are_zero() -> None:
    one = Percentiles.of([3.0])
    assert (one.p50_s, one.p99_s, one.max_s) == (3.0, 3.0, 3.0)
    assert Percentiles.of([]) == Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_goodput_is_what_was_in_time() -> None:
    """Parts and rates count; sums in another order do not make a program late."""
    turns_s = [(1.0, 1.0), (2.0, 1.0), (3.0 + 1e-12, 1.0), (3.1, 1.0)]
    goodputs = [Goodput.of(alpha_ratio, turns_s, [(10.0, 4.0)], 120.0) for alpha_ratio in (1, 2, 3)]
    assert [each.turn_ratio for each in goodputs] == [0.25, 0.5, 0.75]
    assert [each.turns_per_min_count for each in goodputs] == [0.5, 1.0, 1.5]
    assert [each.program_ratio for each in goodputs] == [0.0, 0.0, 1.0]
    assert goodputs[2].programs_per_hour_count == 30.0
    assert Goodput.of(1.0, [], [], 0.0) == Goodput(1.0, 0.0, 0.0, 0.0, 0.0)


def log_of(*turns: tuple[float, float, float, int, int]) -> TurnLog:
    log = TurnLog()
    for arrived_s, granted_s, finished_s, prompt_tokens, cached_tokens in turns:
        log.add(
            arrived_s,
            granted_s,
            granted_s,
            finished_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            replica_count=0,
        )
    return log


def test_turns_since_a_time_are_those_that_finished_then_or_later() -> None:
    log = log_of((0, 0, 1, 10, 0), (0, 0, 2, 10, 5), (0, 0, 3, 30, 25))
    assert log.since(2.0) == range(1, 3)
    assert log.hit_ratio(log.since(2.0)) == 30 / 40
    assert log.hit_ratio(log.since(9.0)) == 0.0


def test_held_times_are_grouped_by_doubling_sizes() -> None:
    log = log_of((0, 1, 9, 1, 0), (0, 2, 9, 1024, 0), (0, 3, 9, 1025, 0), (0, 4, 9, 2048, 0), (0, 5, 9, 100_000, 0))
    groups = log.held_by_size(range(5))
    assert [(group.over_tokens, group.up_to_tokens, group.held.count) for group in groups] == [
        (0, 1024, 2),
        (1024, 2048, 2),
        (65_536, 131_072, 1),
    ]
    assert groups[1].held.max_s == 4
