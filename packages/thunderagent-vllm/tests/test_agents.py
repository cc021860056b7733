"""The decisions: order, chunks, what is kept, who goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from thunderagent_vllm import agents as agents_module
from thunderagent_vllm.agents import Agents, hold_of
from thunderagent_vllm.levels import quantum_tokens
from thunderagent_vllm.settings import Settings, read_settings


class AnyPool:
    """Takes any block."""

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free(self, blocks: Sequence[Any]) -> None: ...


def agents(**settings: Any) -> Agents:
    return Agents(replace(Settings(), **settings), AnyPool(), pool_blocks=100, block_tokens=32, budget_tokens=2048)


def order(made: Agents, now_s: float, *request_ids: str, priority: dict[str, int] | None = None) -> list[str]:
    priorities = priority or {}
    return sorted(
        request_ids,
        key=lambda each: made.waiting_key(each, priorities.get(each, 0), float(request_ids.index(each)), now_s),
    )


def test_short_prompts_go_before_long_ones_and_priority_before_both() -> None:
    made = agents()
    made.arrived("long", "a", 9000, None, 0.0)
    made.arrived("short", "b", 100, None, 0.1)
    assert order(made, 1.0, "long", "short") == ["short", "long"]
    assert order(made, 1.0, "long", "short", priority={"short": 1}) == ["long", "short"]


def test_long_prompt_is_promoted_by_waiting() -> None:
    made = agents()
    made.arrived("long", "a", 9000, None, 0.0)
    made.arrived("short", "b", 100, None, 59.0)
    assert order(made, 59.0, "long", "short") == ["short", "long"]
    assert order(made, 60.0, "long", "short") == ["long", "short"]


def test_preempted_then_pinned_then_older_programs_go_first() -> None:
    made = agents()
    for program in ("old", "pinned"):
        made.arrived(program, program, 10, None, 0.0)
        made.started(program, 0.0, is_reading=True)
        made.ended(program, 5, [1, 2] if program == "pinned" else None, 1.0)
    made.arrived("new-1", "new", 10, None, 2.0)
    made.arrived("old-1", "old", 10, None, 2.0)
    made.arrived("pinned-1", "pinned", 10, None, 2.0)
    made.arrived("hit", "late", 10, None, 2.0)
    made.started("hit", 2.0, is_reading=True)
    made.preempted("hit")
    assert order(made, 2.0, "new-1", "old-1", "pinned-1", "hit") == ["hit", "pinned-1", "old-1", "new-1"]
    assert made.preemptions == {0: 1}


def test_program_that_was_served_much_comes_later_until_that_is_forgotten() -> None:
    made = agents()
    made.arrived("a-1", "a", 100, None, 0.0)
    made.started("a-1", 0.0, is_reading=True)
    made.read("a-1", 20_000, 1.0, is_through=True)
    made.ended("a-1", 0, None, 1.0)
    assert made.arrived("a-2", "a", 100, None, 1.0).base_level == 1
    assert made.arrived("a-3", "a", 100, None, 100.0).base_level == 0


def test_without_order_requests_keep_their_own() -> None:
    made = agents(order=False)
    made.arrived("long", "a", 9000, None, 0.0)
    made.arrived("short", "b", 100, None, 0.1)
    assert order(made, 1.0, "long", "short") == ["long", "short"]


def test_unknown_request_has_a_place() -> None:
    assert order(agents(), 1.0, "x", "y") == ["x", "y"]


def test_generating_requests_run_first_then_levels_then_the_longest_unserved() -> None:
    made = agents()
    for name, tokens, served_s in (("slow", 9000, 0.0), ("late", 100, 2.0), ("early", 100, 1.0), ("speaks", 100, 0.0)):
        made.arrived(name, name, tokens, None, 0.0)
        made.started(name, served_s, is_reading=name != "speaks")
    made.begin_step(3.0, None, head_fits=False)
    assert sorted(("slow", "late", "early", "speaks"), key=made.running_key) == ["speaks", "early", "late", "slow"]


def chunk(made: Agents, request_id: str, wanted: int, fitting: int | None = None, *, alone: bool = False) -> int:
    return made.chunk_tokens(request_id, wanted, fitting, is_alone=alone, generating_count=4)


def test_quantum_bounds_a_prompt_that_is_not_alone_and_lowers_it() -> None:
    made = agents(quanta=True)
    made.arrived("a", "a", 9000, None, 0.0)
    made.started("a", 0.0, is_reading=True)
    made.begin_step(0.0, None, head_fits=False)
    assert chunk(made, "a", 2048, alone=True) == 2048
    assert chunk(made, "a", 2048) == 512
    made.read("a", 512, 0.0, is_through=False)
    made.begin_step(0.0, None, head_fits=False)
    assert chunk(made, "a", 2048) == 256
    made.read("a", 100, 0.0, is_through=False)
    assert made.calls["a"].feedback_level == 3
    made.read("a", 256, 0.0, is_through=True)
    assert (made.calls["a"].feedback_level, made.reading) == (0, {})


def test_worse_level_leaves_tokens_to_the_head_of_the_queue() -> None:
    made = agents()
    made.arrived("long", "a", 9000, None, 0.0)
    made.started("long", 0.0, is_reading=True)
    head = made.arrived("short", "b", 600, None, 0.0)
    made.begin_step(0.0, head, head_fits=True)
    assert chunk(made, "long", 2048) == 2048 - 600 - 4
    assert chunk(made, "long", 2048) == 32  # all was given: one block at least
    made.begin_step(0.0, head, head_fits=False)
    assert chunk(made, "long", 2048) == 2048
    made.begin_step(0.0, made.arrived("other", "c", 9000, None, 0.0), head_fits=True)
    assert chunk(made, "long", 2048) == 2048  # the same level


def test_no_more_than_half_is_left_to_the_head() -> None:
    made = agents()
    made.arrived("long", "a", 40_000, None, 0.0)
    made.started("long", 0.0, is_reading=True)
    made.begin_step(0.0, made.arrived("better", "b", 8000, None, 0.0), head_fits=True)
    assert chunk(made, "long", 2048) == 1024 - 4


@pytest.mark.parametrize(
    ("floor", "fitting", "tokens"), [(0.0, 300, 256), (0.0, 0, 32), (0.125, 0, 128), (0.125, 5000, 1024)]
)
def test_chunk_shrinks_to_the_free_blocks(floor: float, fitting: int, tokens: int) -> None:
    made = agents(shrink_floor=floor)
    made.arrived("a", "a", 5000, None, 0.0)
    assert chunk(made, "a", 1024, fitting) == tokens
    assert made.counts["chunks_shrunk"] == (tokens < 1024)


def test_chunks_of_unknown_requests_and_without_shrinking_are_whole() -> None:
    made = agents(shrink=False)
    assert chunk(made, "unknown", 1024, 0) == 1024
    made.arrived("a", "a", 5000, None, 0.0)
    assert chunk(made, "a", 1024, 0) == 1024
    assert chunk(made, "a", 7, 0) == 7


def turn(made: Agents, program: str, now_s: float, hint: object = None, blocks: int = 10) -> None:
    made.arrived(f"{program}@{now_s}", program, 10, hint, now_s)
    made.started(f"{program}@{now_s}", now_s, is_reading=True)
    made.ended(f"{program}@{now_s}", 5, list(range(blocks)), now_s)


def test_program_is_held_between_its_turns() -> None:
    made = agents()
    turn(made, "a", 0.0)
    assert made.pins.block_count_of("a") == 10
    made.arrived("a-2", "a", 10, None, 1.0)
    assert "a" in made.pins  # as long as it waits
    made.started("a-2", 1.0, is_reading=True)
    assert "a" not in made.pins
    made.preempted("a-2")
    made.started("a-2", 2.0, is_reading=True)
    assert made.counts == {"turns_warm": 1, "turns_cold": 1}


def test_hint_says_how_long() -> None:
    made = agents()
    turn(made, "a", 0.0, hint=100)
    made.pins.expire(99.0)
    assert "a" in made.pins
    turn(made, "a", 99.0, hint=0)
    assert "a" not in made.pins
    assert made.pins.counts["kept"] == 1


@pytest.mark.parametrize(
    ("hint", "hold_s"),
    [(5, 5.0), (0, 0.0), (-1, 0.0), (1e9, 600.0), (True, None), ("5", None), (None, None), (float("nan"), None)],
)
def test_hints_are_bounded(hint: object, hold_s: float | None) -> None:
    assert hold_of(hint) == hold_s


@pytest.mark.parametrize("session", [None, "", 7, "x" * 257])
def test_request_without_a_usable_id_is_never_held(session: object) -> None:
    made = agents()
    made.arrived("r", session, 10, None, 0.0)
    made.started("r", 0.0, is_reading=True)
    assert not made.ended("r", 5, [1, 2], 1.0)
    assert (made.program_count, len(made.pins), made.calls) == (0, 0, {})


def test_messages_between_turns_are_obeyed() -> None:
    made = agents()
    for program in ("a", "b", "c"):
        turn(made, program, 0.0, blocks=5)
    ops = [["hold", "a", 90], ["pause", "b"], ["release", "c"], ["dance", "a"], ["hold", "a"], ["hold", "a", "x"]]
    assert made.tell([*ops, ["release", "unknown"], "no", [], ["release", 5]], 1.0) == 4
    made.pins.expire(80.0)
    assert [program_id for program_id, _ in made.pins.items()] == ["a"]
    assert made.program_count == 2
    assert made.tell([["hold", "a", 0]], 80.0) == 1
    assert "a" not in made.pins


def test_release_during_a_turn_leaves_no_pin() -> None:
    made = agents()
    made.arrived("r", "a", 10, None, 0.0)
    made.tell([["release", "a"]], 0.5)
    assert not made.ended("r", 5, [1], 1.0)


def test_pins_of_younger_programs_may_be_taken_first() -> None:
    made = agents()
    turn(made, "old", 0.0)
    made.arrived("asker", "mid", 10, None, 0.0)
    turn(made, "young", 0.0)

    def takes(now_s: float, *, running: bool = False, runs_any: bool = True) -> list[str]:
        return made.pins_to_take("asker", now_s, is_running=running, runs_any=runs_any)

    assert takes(1.0) == ["young"]
    assert set(takes(1.0, running=True)) == set(takes(1.0, runs_any=False)) == {"old", "young"}
    assert set(takes(120.0)) == {"old", "young"}
    assert set(made.pins_to_take("unknown", 1.0, is_running=False, runs_any=True)) == {"old", "young"}


def grow(made: Agents, program: str, block_count: int, now_s: float) -> None:
    """Have a program run a turn after which it has so many blocks."""
    made.arrived(f"{program}@{now_s}", program, 100, None, now_s)
    made.started(f"{program}@{now_s}", now_s, is_reading=True)
    made.ended(f"{program}@{now_s}", 5, range(block_count), now_s + 1)


def test_program_that_begins_leaves_room_for_those_that_are_here_to_grow() -> None:
    made = agents(room_turns=2, stale_s=30)
    grow(made, "old", 10, 0.0)
    made.arrived("new", "new", 100, None, 1.0)
    assert made.room_blocks("new", 1, 1.0) == 0  # nothing is known of growth
    grow(made, "old", 16, 2.0)
    assert made.room_blocks("new", 1, 3.0) == 2 * 6 * 2  # one that runs, and one that is pinned
    assert made.room_blocks("new", 0, 3.0) == 0  # where nothing runs nobody waits
    grow(made, "young", 4, 4.0)
    assert made.room_blocks("new", 1, 5.0) == 2 * 6 * 2  # younger ones need no room: their pins may be taken
    made.arrived("old-3", "old", 100, None, 5.0)
    made.arrived("hit", "late", 100, None, 5.0)
    made.preempted("hit")
    assert [made.room_blocks(each, 1, 5.0) for each in ("old-3", "hit", "unknown")] == [0, 0, 0]
    assert made.room_blocks("new", 1, 121.0) == 0  # it has waited for too long
    assert agents().settings.room_turns > 0
    assert agents(room_turns=0).room_blocks("new", 1, 3.0) == 0


def test_growth_is_a_mean_that_follows() -> None:
    made = agents(room_turns=1)
    made.arrived("new", "new", 100, None, 0.0)
    for number in range(200):
        grow(made, "old", 10 + 4 * min(number, 50), float(number))
    assert 0 < made.room_blocks("new", 10, 1.0) < 20
    grow(made, "shrinks", 50, 200.0)
    grow(made, "shrinks", 10, 201.0)
    assert made.room_blocks("new", 10, 1.0) < 20


def test_request_that_waited_for_rounds_goes_first_and_takes_any_pin() -> None:
    made = agents(starve_rounds=2, window_s=1000, stale_s=500)
    made.arrived("waits", "waits", 100, None, 0.0)
    for number in range(10):
        grow(made, "old", 10, float(number * 2))
    made.arrived("old-2", "old", 10, None, 20.0)
    names = ("old-2", "waits")
    made.look(20.0)
    assert order(made, 20.0, *names) == ["waits", "old-2"]
    assert made.pins_to_take("waits", 20.0, is_running=False, runs_any=True) == ["old"]


def test_victim_is_the_least_important_then_lowest_level_then_largest() -> None:
    made = agents()
    for name, tokens in (("speaks", 100), ("short", 100), ("long", 9000), ("longer", 9000)):
        made.arrived(name, name, tokens, None, 0.0)
        made.started(name, 0.0, is_reading=name != "speaks")
    blocks = {"speaks": 99, "short": 50, "long": 10, "longer": 20}

    def victim(*names: str, priority: dict[str, int] | None = None) -> str:
        priorities = priority or {}
        return max(names, key=lambda each: made.victim_key(each, priorities.get(each, 0), blocks[each], 0.0))

    assert victim("speaks", "short", "long", "longer") == "longer"
    assert victim("speaks", "short") == "short"
    assert victim("speaks", "longer", priority={"speaks": 1}) == "speaks"


def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_module, "MOST_PROGRAMS", 3)
    made = agents()
    for number in range(6):
        turn(made, f"p{number}", float(number))
    assert made.program_count == 3
    assert {program_id for program_id, _ in made.pins.items()} == {"p3", "p4", "p5"}


def test_events_of_unknown_requests_change_nothing() -> None:
    made = agents()
    made.started("x", 0.0, is_reading=True)
    made.preempted("x")
    assert not made.ended("x", 1, [1], 0.0)
    assert not made.reading


def test_settings_are_read_leniently() -> None:
    assert read_settings(None) == read_settings([]) == Settings()
    mars = read_settings({"preset": "mars", "pin_share": 0.5})
    assert (mars.quanta, mars.shrink_floor, mars.largest_first, mars.pin_share) == (True, 0.0, True, 0.5)
    bad = {"preset": "x", "quanta": 1, "mode": "maybe", "hold_s": "9", "pin_share": 2, "level_count": 0, "none": 1}
    assert read_settings({**bad, "promote_s": 0, "starve_s": float("inf"), "order": False}) == Settings(order=False)
    assert read_settings({"hold_s": 10, "level_count": 5.0}) == Settings(hold_s=10.0, level_count=5)


@pytest.mark.parametrize(
    ("settings", "stale_after_s"),
    [({}, 3.0), ({"stale_gaps": 2.0}, 2.0), ({"stale_s": 1.5}, 1.5), ({"stale_gaps": 0.0}, 5.0)],
)
def test_when_a_program_counts_as_gone_is_learned_from_those_that_come_back(
    settings: dict[str, Any], stale_after_s: float
) -> None:
    made = agents(**settings)
    now_s = 0.0
    for number in range(12):
        made.arrived(f"r{number}", "a", 10, None, now_s)
        made.started(f"r{number}", now_s, is_reading=False)
        made.ended(f"r{number}", 5, [1, 2], now_s + 1.0)
        now_s += 2.0  # it is gone for a second each time
    ended_s = now_s - 1.0
    made.arrived("newer", "b", 10, None, now_s)

    def may_be_taken(after_s: float) -> bool:
        return made.pins_to_take("newer", ended_s + after_s, is_running=False, runs_any=True) == ["a"]

    assert not may_be_taken(stale_after_s - 0.01)
    assert may_be_taken(stale_after_s)


def test_few_returns_teach_nothing_and_a_hold_that_was_asked_for_counts() -> None:
    made = agents()
    for number, hold_s in enumerate((None, None, 20.0)):
        made.arrived(f"r{number}", "a", 10, hold_s, number)
        made.started(f"r{number}", number, is_reading=False)
        made.ended(f"r{number}", 5, [1, 2], number + 0.5)
        taken_after_s = 20.0 if hold_s else 5.0
        assert not made.pins.candidates(None, 9, number + 0.49 + taken_after_s)
        assert made.pins.candidates(None, 9, number + 0.5 + taken_after_s) == ["a"]


def test_preset_mars_has_none_of_this_projects_own_rules() -> None:
    made = read_settings({"preset": "mars"})
    assert (made.room_turns, made.starve_rounds, made.stale_gaps) == (0.0, 0.0, 0.0)
    assert made.stale_s >= made.hold_s  # no pin is stale before it is over
    assert (made.quanta, made.largest_first, made.shrink_floor) == (True, True, 0.0)
    assert not made.program_order


def test_preset_mars_orders_by_level_then_arrival() -> None:
    """Not by program, nor by what is held, nor by age beyond promotion; a level is served whether or not others wait."""
    made = Agents(read_settings({"preset": "mars"}), AnyPool(), pool_blocks=100, block_tokens=32, budget_tokens=2048)
    for program in ("old", "pinned"):
        made.arrived(program, program, 10, None, 0.0)
        made.started(program, 0.0, is_reading=True)
        made.ended(program, 5, [1, 2] if program == "pinned" else None, 1.0)
    made.arrived("long", "long", 40_000, None, 1.0)
    for request_id in ("new-1", "old-1", "pinned-1"):
        made.arrived(request_id, request_id[:-2], 10, None, 2.0)
    assert "pinned" in made.pins
    assert order(made, 2.0, "long", "new-1", "old-1", "pinned-1") == ["new-1", "old-1", "pinned-1", "long"]
    assert order(made, 200.0, "new-1", "old-1", "pinned-1") == ["new-1", "old-1", "pinned-1"]
    made.started("long", 2.0, is_reading=True)
    made.begin_step(2.0, made.calls["new-1"], head_fits=True)
    wanted = quantum_tokens(2048, made.calls["long"].level_now)
    for _ in range(10):  # of an iteration: nothing is left for the one that waits
        assert made.chunk_tokens("long", 2000, None, is_alone=False, generating_count=0) == wanted
