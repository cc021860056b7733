"""The sandbox table: order of preparation, sharing, giving way, and no lost sandboxes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from time import process_time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from thunderagent.errors import (
    LifecycleError,
    SandboxEngineError,
    SandboxImageError,
    SandboxPullLimitError,
    SandboxRefusedError,
    SandboxSetupError,
)
from thunderagent.tools.base import Place
from thunderagent.tools.sandbox import ALIVE, STEPS, TEMPLATES_LEARNED_COUNT, Caps, Sandbox, Stage, Step
from thunderagent.tools.table import FAILED_KEPT_COUNT, Action, HandOver, Prepare, Reclaim, SandboxTable
from thunderagent.tools.template import Template

PLAIN = Template(image="plain")


def table_with(**caps: float) -> SandboxTable:
    ids, names = count(1), count(1)
    return SandboxTable(Caps(**caps), lambda: f"s{next(ids)}", lambda: f"n{next(names)}")  # type: ignore[arg-type]


def plan(
    table: SandboxTable,
    now_s: float = 0.0,
    needed: Mapping[str, float] | None = None,
    *,
    running: Collection[str] = (),
    waiting: Collection[str] = (),
) -> list[Action]:
    """Plan; `running` have a turn, `waiting` run as well and wait for their sandbox."""
    for program_id in (*running, *waiting):
        table.used(now_s, program_id)
    return table.plan(
        now_s,
        lambda program_id: (needed or {}).get(program_id, 0.0),
        lambda program_id: program_id in running or program_id in waiting,
        lambda program_id: program_id in waiting,
    )


def prepared_ids(actions: list[Action]) -> list[str]:
    return [action.sandbox.sandbox_id for action in actions if isinstance(action, Prepare)]


def reclaimed_ids(actions: list[Action]) -> list[str]:
    return [action.sandbox.sandbox_id for action in actions if isinstance(action, Reclaim)]


def ready(table: SandboxTable, program_id: str, template: Template = PLAIN, *, took_s: float = 1.0) -> Sandbox:
    sandbox = table.request(0.0, template, "", program_id)
    if sandbox.stage is Stage.REQUESTED:
        assert sandbox.sandbox_id in prepared_ids(plan(table))
        table.prepared(took_s, sandbox, Place(f"handle of {sandbox.sandbox_id}"))
    return sandbox


def test_a_sandbox_lives_from_its_request_to_its_programs_end() -> None:
    table = table_with()
    sandbox = ready(table, "p")
    assert (sandbox.stage, sandbox.prepare_s) == (Stage.READY, 1.0)
    table.used(2.0, "p")
    assert sandbox.stage is Stage.IN_USE
    table.program_ended("p", "released")
    assert table.of_program("p") == []
    assert reclaimed_ids(plan(table)) == ["s1"]
    assert list(sandbox.program_ids) == ["p"], "it says to its end whose it was"
    table.reclaimed(sandbox)
    assert sandbox.stage is Stage.GONE
    assert not table.sandboxes
    assert table.with_handle("docker", "handle of s1") is None


def test_nothing_is_made_for_who_left_before() -> None:
    """A request that was not begun leaves nothing to reclaim."""
    table = table_with()
    table.request(0.0, PLAIN, "", "p")
    table.program_ended("p", "released")
    assert plan(table) == []
    assert not table.sandboxes


def test_sandbox_of_a_program_that_leaves_during_preparation_is_reclaimed() -> None:
    table = table_with()
    sandbox = table.request(0.0, PLAIN, "", "p")
    plan(table)
    table.program_ended("p", "released")
    assert reclaimed_ids(plan(table)) == ["s1"]
    assert sandbox.stage is Stage.RECLAIMING


@pytest.mark.parametrize("stage", list(Stage))
def test_an_illegal_step_raises(stage: Stage) -> None:
    """Every pair that is not in the table is a bug, and raises."""
    for step in Step:
        sandbox = Sandbox("s", PLAIN, "", 0.0, name="n")
        sandbox.stage = stage
        if (stage, step) in STEPS:
            sandbox.advance(step)
            assert sandbox.stage is STEPS[stage, step]
        else:
            with pytest.raises(LifecycleError, match="knows no"):
                sandbox.advance(step)


# --- order and caps


def test_sandbox_needed_first_is_prepared_first() -> None:
    table = table_with(hands_count=2)
    for program_id in ("late", "now", "soon"):
        table.request(0.0, PLAIN, "", program_id)
    assert prepared_ids(plan(table, needed={"late": 60.0, "soon": 5.0})) == ["s2", "s3"]


def test_hands_bound_how_many_are_prepared_at_a_time() -> None:
    table = table_with(hands_count=3)
    for number in range(10):
        table.request(0.0, PLAIN, "", f"p{number}")
    assert len(prepared_ids(plan(table))) == 3
    assert prepared_ids(plan(table)) == []
    table.prepared(1.0, table.sandboxes["s1"], Place("h"))
    assert prepared_ids(plan(table)) == ["s4"]


def test_sandbox_not_yet_due_leaves_its_room_to_others() -> None:
    """Of four places three may be used early; the fourth waits for a program that is due."""
    table = table_with(sandbox_count=4, early_ratio=0.75, hands_count=8)
    ready(table, "first", took_s=2.0)  # preparations take 2 s
    for number in range(4):
        table.request(0.0, PLAIN, "", f"p{number}")
    far = {f"p{number}": 60.0 for number in range(4)}
    assert prepared_ids(plan(table, needed=far)) == ["s2", "s3"]
    assert prepared_ids(plan(table, needed={**far, "p3": 1.0})) == ["s5"]
    assert prepared_ids(plan(table, needed=dict.fromkeys(far, 0.0))) == []


@pytest.mark.parametrize(
    ("what", "caps"), [("memory_bytes", {"memory_bytes": 100}), ("disk_bytes", {"disk_bytes": 100})]
)
def test_memory_and_disk_are_capped(what: str, caps: dict[str, float]) -> None:
    template = Template(image="i", **{what: 40})  # type: ignore[arg-type]
    table = table_with(**caps)
    for number in range(3):
        table.request(0.0, template, "", f"p{number}")
    assert prepared_ids(plan(table)) == ["s1", "s2"]
    with pytest.raises(SandboxRefusedError, match="the cap is 100"):
        table.request(0.0, Template(image="i", **{what: 101}), "", "q")  # type: ignore[arg-type]


def test_measured_size_counts_where_it_is_larger() -> None:
    table = table_with(disk_bytes=100)
    sandbox = ready(table, "p", Template(image="i", disk_bytes=10))
    sandbox.disk_bytes = 95
    table.request(0.0, Template(image="i", disk_bytes=10), "", "q")
    assert prepared_ids(plan(table)) == []


def test_sandbox_that_must_begin_first_is_prepared_first() -> None:
    """A slow one that is needed later may be due before a quick one that is needed sooner."""
    slow = Template(image="slow")
    table = table_with(sandbox_count=4, early_ratio=0.5, hands_count=4)
    ready(table, "a", took_s=1.0)
    ready(table, "b", slow, took_s=30.0)
    table.request(0.0, PLAIN, "", "quick")
    table.request(0.0, slow, "", "slow")
    assert prepared_ids(plan(table, needed={"quick": 10.0, "slow": 20.0})) == ["s4"]


def test_sandbox_not_yet_due_leaves_its_worker_to_others() -> None:
    table = table_with(hands_count=4)
    ready(table, "first", took_s=2.0)
    for number in range(6):
        table.request(0.0, PLAIN, "", f"p{number}")
    far = {f"p{number}": 60.0 for number in range(6)}
    assert prepared_ids(plan(table, needed=far)) == ["s2", "s3", "s4"]
    assert prepared_ids(plan(table, needed={**far, "p5": 0.0})) == ["s7"]


def test_a_plan_is_quick_with_thousands_of_sandboxes() -> None:
    """The limit is far above the actual time (a millisecond), and far below that of quadratic work."""
    table = table_with(sandbox_count=10_000, hands_count=4_000)
    for number in range(5_000):
        table.request(0.0, PLAIN, "", f"p{number}")
    for action in plan(table):
        table.prepared(1.0, action.sandbox, Place(action.sandbox.sandbox_id))
    table.caps = replace(table.caps, hands_count=4)
    table.keep_warm({"t": (PLAIN, 4)})
    began_s = process_time()
    plan(table, 2.0)
    assert process_time() - began_s < 0.1


@pytest.mark.parametrize("case", ["handed over", "for the first", "reclaimed"])
def test_a_plan_for_twice_as_many_costs_twice_as_much(case: str) -> None:
    """Counted in lines, not in time: no list of idle ones is walked again for each that is wanted."""

    def lines(count: int) -> int:
        table = table_with(sandbox_count=count, hands_count=count, early_ratio=1.0, known_count=10 * count)
        needed = {f"held{number}": 1000.0 - number for number in range(count)}
        for name in needed:
            table.request(0.0, PLAIN, "", name)
        for action in plan(table):
            table.prepared(1.0, action.sandbox, Place(action.sandbox.name))
        wanted = [f"wanted{number}" for number in range(count)]
        for name in wanted:
            table.request(2.0, Template(image="other") if case == "reclaimed" else PLAIN, "", name)
        if case == "for the first":  # and the others are not let in: they may take none, but a warm one
            table.keep_warm({"t": (PLAIN, count)})
            wanted = wanted[:1]
        counted = 0

        def count_line(_frame: object, event: str, _argument: object) -> object:
            nonlocal counted
            counted += event == "line"
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)  # type: ignore[arg-type]
        try:
            actions = plan(table, 3.0, needed, running=set(wanted), waiting=set(wanted))
        finally:
            sys.settrace(before)
        assert len(actions) >= len(wanted)
        return counted

    assert lines(200) < 2.5 * lines(100)


# --- what stands unused goes to who can use it


def handed_over(actions: list[Action]) -> list[tuple[str, str]]:
    """Return by their owners' names which sandboxes changed owners: the new one's, the former one's."""
    return [(each.sandbox.sandbox_id, each.instead.sandbox_id) for each in actions if isinstance(each, HandOver)]


def test_running_program_gets_the_unused_sandbox_of_one_that_waits_for_admission() -> None:
    """Of two that are made alike the one that is needed last; its owner is not forgotten."""
    table = table_with(sandbox_count=2, early_ratio=1.0)
    soon, late = ready(table, "soon"), ready(table, "late")
    table.request(2.0, PLAIN, "", "runs")
    handle = late.place
    needed = {"soon": 5.0, "late": 60.0}
    actions = plan(table, 2.0, needed, running={"runs"})
    assert handed_over(actions) == [("s3", "s2")]
    assert (prepared_ids(actions), reclaimed_ids(actions)) == ([], [])
    (mine,) = table.of_program("runs")
    assert (mine.place, mine.sandbox_id, mine.stage) == (handle, "s3", Stage.READY)
    (its,) = table.of_program("late")
    assert (its.place, its.sandbox_id, its.stage) == (None, "s2", Stage.REQUESTED)
    assert (table.of_program("soon"), table.sandboxes["s1"]) == ([soon], soon)
    table.used(3.0, "runs")
    assert plan(table, 3.0, needed, running={"runs"}) == [], "once"
    table.program_ended("runs", "released")
    table.reclaimed(plan(table, 4.0, needed)[0].sandbox)
    assert prepared_ids(plan(table, 5.0, needed)) == ["s2"], "then its owner gets another"


def test_running_program_goes_before_earlier_requests() -> None:
    table = table_with(sandbox_count=1)
    table.request(0.0, PLAIN, "", "early")
    table.request(1.0, Template(image="other"), "", "runs")
    assert prepared_ids(plan(table, 1.0, running={"runs"})) == ["s2"]


def test_sandbox_in_preparation_goes_to_a_running_program_too() -> None:
    """Its preparation goes on; who had it gets the one that has not begun."""
    table = table_with(sandbox_count=1)
    table.request(0.0, PLAIN, "", "held")
    (begun,) = plan(table)
    table.request(1.0, PLAIN, "", "runs")
    assert handed_over(plan(table, 1.0, running={"runs"})) == [("s2", "s1")]
    table.prepared(2.0, begun.sandbox, Place("h"))
    assert [each.place for each in table.of_program("runs")] == [Place("h")]


def test_a_running_program_gets_a_finished_one_for_its_own_that_is_not() -> None:
    table = table_with()
    ready(table, "held")
    table.request(1.0, PLAIN, "", "runs")
    plan(table, 1.0, {"held": 60.0})
    assert handed_over(plan(table, 1.0, {"held": 60.0}, running={"runs"})) == [("s2", "s1")]
    assert [each.stage for each in table.of_program("held")] == [Stage.PREPARING]


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.READY])
def test_waiting_program_gets_the_room_of_an_unused_sandbox_of_another_template(stage: Stage) -> None:
    """As soon as its turn is over and it can do nothing else, and not before: that preparation would be for nothing."""
    table = table_with(sandbox_count=1)
    held = table.request(0.0, PLAIN, "", "held")
    plan(table)
    if stage is Stage.READY:
        table.prepared(1.0, held, Place("h"))
    table.request(2.0, Template(image="other"), "", "runs")
    assert plan(table, 2.0, running={"runs"}) == []
    (action,) = plan(table, 3.0, waiting={"runs"})
    assert isinstance(action, Reclaim)
    assert (action.sandbox, action.sandbox.program_ids) == (held, {})
    assert action.instead is not None
    assert table.of_program("held") == [action.instead]
    assert action.instead.sandbox_id == "s1"
    assert plan(table, 3.0, waiting={"runs"}) == [], "one is enough"
    table.reclaimed(held)
    assert prepared_ids(plan(table, 4.0, waiting={"runs"})) == ["s2"]
    table.prepared(5.0, table.sandboxes["s2"], Place("mine"))
    assert plan(table, 6.0, waiting={"runs"}) == [], "and is not taken back"


def test_several_that_wait_get_room_at_once() -> None:
    table = table_with(sandbox_count=3, early_ratio=1.0)
    for name in ("a", "b", "c"):
        ready(table, name)
    for name in ("x", "y"):
        table.request(2.0, Template(image=name), "", name)
    needed = {"a": 1.0, "b": 2.0, "c": 3.0}
    instead = [each.instead for each in plan(table, 2.0, needed, waiting={"x", "y"}) if isinstance(each, Reclaim)]
    assert [each and list(each.program_ids) for each in instead] == [["c"], ["b"]]


def test_room_is_made_on_a_disk_and_in_memory_too() -> None:
    table = table_with(disk_bytes=100)
    held = ready(table, "held", Template(image="i", disk_bytes=80))
    table.request(2.0, Template(image="other", disk_bytes=60), "", "runs")
    assert reclaimed_ids(plan(table, 2.0, waiting={"runs"})) == [held.sandbox_id]


@pytest.mark.parametrize("why", ["told", "given", "its program runs", "it is shared with one that runs"])
def test_sandbox_that_may_be_in_use_belongs_to_nobody_else(why: str) -> None:
    table = table_with(sandbox_count=1, early_ratio=1.0)
    if why == "given":
        table.register(0.0, "docker", "held", Place("h"))
        ready(table, "fills")
        table.used(1.0, "fills")
    else:
        held = ready(table, "held")
        held.told = why == "told"
    running = {"its program runs": {"held"}, "given": {"fills"}}.get(why, {"other"})
    if why == "it is shared with one that runs":
        table._join(held, "other")
    table.request(2.0, PLAIN, "", "runs")
    table.request(2.0, Template(image="i"), "", "runs")
    assert plan(table, 2.0, running=running, waiting={"runs"}) == []


@pytest.mark.parametrize("why", ["network", "callback", "suspended", "old"])
def test_owned_sandbox_is_reclaimed_rather_than_handed_over(why: str) -> None:
    urls = {"driver": "callback", "prepare_url": "http://h/p", "reclaim_url": "http://h/r"}
    more = {"network": {"network": "own"}, "callback": urls, "old": {"ttl_s": 4.0}}.get(why, {})
    template = Template(image="i", **more)  # type: ignore[arg-type]
    table = table_with(sandbox_count=1)
    held = ready(table, "held", template)
    held.suspended = why == "suspended"
    table.request(2.0, template, "", "runs")
    actions = plan(table, 2.0, waiting={"runs"})
    assert (handed_over(actions), reclaimed_ids(actions)) == ([], [held.sandbox_id])


@pytest.mark.parametrize(("driver", "taken"), [("docker", True), ("kubernetes", False)])
def test_unused_sandbox_of_a_paused_program_is_taken_where_commands_are_seen(driver: str, *, taken: bool) -> None:
    template = Template(image="i", driver=driver)  # type: ignore[arg-type]
    table = table_with(sandbox_count=1)
    ready(table, "paused", template)
    table.used(1.0, "paused")
    table.request(2.0, template, "", "runs")
    assert bool(plan(table, 2.0, waiting={"runs"})) == taken
    assert (table.sandboxes["s2"].stage is Stage.IN_USE) == taken


def test_sandbox_whose_image_cannot_be_pulled_now_is_taken_from_others() -> None:
    table = table_with()
    table.request(0.0, PLAIN, "", "runs")
    plan(table, running={"runs"})
    table.failed(0.0, table.sandboxes["s1"], SandboxPullLimitError("too many", 600.0))
    ready(table, "held")
    assert handed_over(plan(table, 2.0, running={"runs"})) == [("s1", "s2")]


def test_the_place_of_who_waits_is_kept_for_its_next_try() -> None:
    """Otherwise another's would be made there, and be removed for it, again and again."""
    table = table_with(sandbox_count=1, backoff_s=10.0)
    table.request(0.0, PLAIN, "", "runs")
    plan(table, waiting={"runs"})
    table.failed(0.0, table.sandboxes["s1"], SandboxEngineError("away"))
    table.request(0.0, Template(image="other"), "", "held")
    assert plan(table, 1.0, {"held": 60.0}, waiting={"runs"}) == []
    assert prepared_ids(plan(table, 10.0, {"held": 60.0}, waiting={"runs"})) == ["s1"]


def test_retried_sandbox_keeps_no_waiting_program_out() -> None:
    """An engine may be away for hours; others' sandboxes are made by another one."""
    table = table_with(sandbox_count=1, backoff_s=10.0)
    table.request(0.0, PLAIN, "", "a")
    plan(table, waiting={"a"})
    table.failed(0.0, table.sandboxes["s1"], SandboxEngineError("away"))
    table.request(0.0, Template(image="other"), "", "b")
    assert prepared_ids(plan(table, 1.0, waiting={"a", "b"})) == ["s2"]


def test_only_those_give_way_whose_room_is_needed() -> None:
    """Others that stand unused before them in the order stay: they would be prepared anew for nothing."""
    gigabyte = 10**9
    table = table_with(sandbox_count=10, memory_bytes=8 * gigabyte)
    for number in range(3):
        ready(table, f"idle-{number}")
    large = ready(table, "idle-large", PLAIN.model_copy(update={"memory_bytes": 8 * gigabyte}))
    table.request(1.0, Template(image="other", memory_bytes=8 * gigabyte), "", "a")
    needed = {f"idle-{number}": 60.0 - number for number in range(3)} | {"idle-large": 1.0}
    assert [action.sandbox for action in plan(table, 1.0, needed, waiting={"a"}) if isinstance(action, Reclaim)] == [
        large
    ]


def test_a_warm_one_goes_to_who_asked_before_it_was_there() -> None:
    """And to who asked without need for it at once: by the plan."""
    table = table_with()
    table.keep_warm({"t": (PLAIN, 1)})
    plan(table)
    table.prepared(1.0, table.sandboxes["s1"], Place("warm"))
    assert table.request(2.0, PLAIN, "t", "p", at_once=False).stage is Stage.REQUESTED
    actions = plan(table, 2.0, {"p": 60.0})
    assert (handed_over(actions), prepared_ids(actions)) == ([("s2", "s1")], ["s1"])
    assert [each.place for each in table.of_program("p")] == [Place("warm")]


# --- sharing and warmth


def test_a_shared_sandbox_goes_with_the_last_program() -> None:
    table = table_with()
    one = table.request(0.0, PLAIN, "", "a", share_key="k")
    assert table.request(0.0, PLAIN, "", "b", share_key="k") is one
    assert prepared_ids(plan(table)) == ["s1"]
    table.prepared(1.0, one, Place("h"))
    table.program_ended("a", "released")
    assert plan(table) == []
    assert [each.sandbox_id for each in table.of_program("b")] == ["s1"]
    table.program_ended("b", "released")
    assert reclaimed_ids(plan(table)) == ["s1"]
    assert table.request(0.0, PLAIN, "", "c", share_key="k") is not one, "who comes then gets a new one"


def test_sandboxes_of_two_templates_are_not_shared() -> None:
    table = table_with()
    table.request(0.0, PLAIN, "", "a", share_key="k")
    with pytest.raises(SandboxRefusedError, match="another template"):
        table.request(0.0, Template(image="other"), "", "b", share_key="k")


def test_warm_sandboxes_go_to_who_asks_and_are_replaced() -> None:
    table = table_with()
    table.keep_warm({"t": (PLAIN, 2)})
    assert prepared_ids(plan(table)) == ["s1", "s2"]
    for name in ("s1", "s2"):
        table.prepared(1.0, table.sandboxes[name], Place(name))
    assert table.request(2.0, PLAIN, "t", "p").sandbox_id == "s1"
    assert prepared_ids(plan(table)) == ["s3"]
    own = Template(image="plain", network="own")
    assert table.request(2.0, own, "", "q").stage is Stage.REQUESTED, "another template gets none of them"


def test_a_warm_sandbox_gives_way_to_who_is_due() -> None:
    table = table_with(sandbox_count=2, early_ratio=1.0)
    table.keep_warm({"t": (PLAIN, 2)})
    plan(table)
    for name in ("s1", "s2"):
        table.prepared(1.0, table.sandboxes[name], Place(name))
    table.request(2.0, Template(image="other"), "", "p")
    actions = plan(table)
    assert (prepared_ids(actions), reclaimed_ids(actions)) == ([], ["s1"]), "there is no room yet"
    assert plan(table) == [], "one is enough"
    table.reclaimed(table.sandboxes["s1"])
    assert prepared_ids(plan(table, 5.0)) == ["s3"]
    assert prepared_ids(plan(table, 6.0)) == [], "and no warm one takes its place"


def test_warm_sandboxes_do_not_give_way_for_nothing() -> None:
    """If there would be no room without them either, they stay until there is."""
    table = table_with(memory_bytes=100)
    held = ready(table, "p", Template(image="i", memory_bytes=60))
    small = Template(image="small", memory_bytes=10)
    table.keep_warm({"t": (small, 1)})
    plan(table)
    table.prepared(1.0, table.sandboxes["s2"], Place("warm"))
    table.request(2.0, Template(image="i", memory_bytes=95), "", "q")
    assert plan(table, 2.0) == []
    table.leave(held, "p", "released")
    assert reclaimed_ids(plan(table, 3.0)) == ["s1", "s2"]


def test_a_warm_one_that_finds_no_room_keeps_no_other_from_being_made() -> None:
    table = table_with(memory_bytes=100)
    ready(table, "p", Template(image="i", memory_bytes=10))
    large, small = Template(image="large", memory_bytes=90), Template(image="small", memory_bytes=10)
    table.keep_warm({"large": (large, 1), "small": (small, 1)})
    assert prepared_ids(plan(table)) == ["s3"]


def test_two_templates_that_make_the_same_are_kept_warm_together() -> None:
    """Neither counts the other's as too many."""
    table = table_with()
    table.keep_warm({"a": (PLAIN, 2), "b": (Template(image="plain", program_classes=("c",)), 1)})
    assert prepared_ids(plan(table)) == ["s1", "s2", "s3"]
    for name in ("s1", "s2", "s3"):
        table.prepared(1.0, table.sandboxes[name], Place(name))
    assert plan(table, 2.0) == []
    table.keep_warm({})
    assert reclaimed_ids(plan(table, 3.0)) == ["s1", "s2", "s3"]


def test_a_warm_one_that_cannot_be_made_is_not_asked_for_at_once_again() -> None:
    table = table_with(backoff_limit_s=30.0)
    table.keep_warm({"t": (PLAIN, 1)})
    plan(table)
    table.failed(0.0, table.sandboxes["s1"], SandboxImageError("none"))
    assert plan(table, 0.1) == []
    assert not table.sandboxes
    assert prepared_ids(plan(table, 31.0)) == ["s2"]


def test_retried_sandbox_keeps_no_warm_one_from_being_made() -> None:
    table = table_with(backoff_s=10.0)
    table.request(0.0, Template(image="other"), "", "p")
    plan(table)
    table.failed(0.0, table.sandboxes["s1"], SandboxEngineError("away"))
    table.keep_warm({"t": (PLAIN, 1)})
    assert prepared_ids(plan(table, 1.0)) == ["s2"]


def test_a_warm_one_is_replaced_while_most_of_its_life_is_left() -> None:
    """Its user needs it for long."""
    template = Template(image="plain", ttl_s=100.0)
    table = table_with()
    table.keep_warm({"t": (template, 1)})
    plan(table)
    table.prepared(1.0, table.sandboxes["s1"], Place("one"))
    assert plan(table, 20.0) == []
    assert table.request(30.0, template, "t", "p").sandbox_id == "s2", "nobody gets it any more"
    assert reclaimed_ids(plan(table, 30.0)) == ["s1"]


def test_a_warm_one_that_is_not_begun_is_nobodys_help() -> None:
    table = table_with()
    table.keep_warm({"t": (PLAIN, 1)})
    plan(table)
    table.failed(0.0, table.sandboxes["s1"], SandboxSetupError("make failed"))
    sandbox = table.request(0.1, PLAIN, "t", "p")
    assert (sandbox.attempt_count, prepared_ids(plan(table, 0.1))) == (0, ["s2"]), "it does not wait for the pause"


# --- what goes wrong


def test_a_failed_preparation_is_tried_again_later_each_time() -> None:
    table = table_with(attempts_count=3, backoff_s=1.0)
    sandbox = table.request(0.0, PLAIN, "", "p")
    times_s = []
    now_s = 0.0
    while sandbox.stage is not Stage.FAILED:
        assert prepared_ids(plan(table, now_s)) == ["s1"]
        table.failed(now_s, sandbox, SandboxSetupError("make failed"))
        assert plan(table, now_s) == []
        times_s.append(sandbox.retry_at_s - now_s)
        now_s = sandbox.retry_at_s
    assert times_s[:2] == [1.0, 2.0]
    assert (sandbox.attempt_count, sandbox.why) == (3, "make failed")
    assert [each.sandbox_id for each in table.of_program("p")] == ["s1"], "its program can read why"
    table.program_ended("p", "released")
    assert not table.sandboxes


def test_hopeless_sandbox_is_not_tried_again() -> None:
    table = table_with()
    sandbox = table.request(0.0, PLAIN, "", "p")
    plan(table)
    assert table.failed(0.0, sandbox, SandboxImageError("no such image")) is False
    assert sandbox.stage is Stage.FAILED


def test_an_engine_that_is_away_costs_no_attempt() -> None:
    table = table_with(attempts_count=1)
    sandbox = table.request(0.0, PLAIN, "", "p")
    now_s = 0.0
    for _ in range(10):
        now_s = max(now_s, sandbox.retry_at_s)
        assert prepared_ids(plan(table, now_s)) == ["s1"]
        assert table.failed(now_s, sandbox, SandboxEngineError("away"))


def test_sandbox_that_dies_unused_is_made_again_and_one_in_use_is_not() -> None:
    table = table_with(backoff_s=1.0)
    unused, used = ready(table, "a"), ready(table, "b")
    table.used(2.0, "b")
    assert table.died(2.0, unused, "killed")
    assert not table.died(2.0, used, "killed")
    assert (unused.stage, used.stage) == (Stage.REQUESTED, Stage.FAILED)
    assert prepared_ids(plan(table, 3.0)) == ["s1"]
    assert table.died(3.0, used, "again") is False


def test_a_given_sandbox_is_taken_once_and_forgotten_when_it_dies() -> None:
    table = table_with()
    one = table.register(0.0, "docker", "p", Place("c1"))
    assert table.register(0.0, "docker", "p", Place("c1")) is one
    table.died(1.0, one, "exited")
    assert not table.sandboxes
    two = table.register(2.0, "docker", "p", Place("c2"))
    table.program_ended("p", "released")
    assert reclaimed_ids(plan(table)) == [two.sandbox_id]


def test_failed_ones_are_not_remembered_for_ever() -> None:
    table = table_with(hands_count=10_000, sandbox_count=10_000)
    for number in range(FAILED_KEPT_COUNT + 5):
        sandbox = table.request(0.0, PLAIN, "", f"p{number}")
        plan(table)
        table.failed(0.0, sandbox, SandboxImageError("none"))
    assert len(table.sandboxes) == FAILED_KEPT_COUNT


def test_sandbox_made_again_has_no_preparation_time_yet() -> None:
    table = table_with(backoff_s=1.0)
    sandbox = ready(table, "p")
    table.died(5.0, sandbox, "killed")
    plan(table, 7.0)
    assert (sandbox.stage, sandbox.prepare_s) == (Stage.PREPARING, None)


def test_preparation_times_of_templates_are_not_remembered_for_ever() -> None:
    """Each program may bring its own."""
    table = table_with(hands_count=10_000, sandbox_count=10_000)
    for number in range(TEMPLATES_LEARNED_COUNT + 5):
        ready(table, f"p{number}", Template(image="i", environment={"ID": str(number)}))
        table.prepare_times.expected_s(Template(image=f"asked about {number}").digest())
    assert len(table.prepare_times._by_digest_s) == TEMPLATES_LEARNED_COUNT


def test_preparation_times_are_learned_for_each_template() -> None:
    table = table_with()
    slow = Template(image="slow")
    assert table.prepare_times.expected_s(slow.digest()) == 0.0
    for number in range(20):
        ready(table, f"p{number}", took_s=1.0)
        ready(table, f"q{number}", slow, took_s=30.0)
    assert table.prepare_times.expected_s(PLAIN.digest()) == pytest.approx(1.0, rel=0.2)
    assert table.prepare_times.expected_s(slow.digest()) == pytest.approx(30.0, rel=0.2)


# --- whatever happens


PROGRAMS = st.sampled_from(["a", "b", "c", "d"])
TEMPLATES = st.sampled_from([PLAIN, Template(image="big", memory_bytes=60), Template(image="own", network="own")])


class TableMachine(RuleBasedStateMachine):
    """Caps hold, indexes agree with the table, and after all programs ended and all is carried out nothing is left."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_with(sandbox_count=5, memory_bytes=150, hands_count=3, attempts_count=2)
        self.table.keep_warm({"plain": (PLAIN, 1)})
        self.now_s = 0.0
        self.handles = count(1)
        self.reclaims: list[Sandbox] = []

    def preparing(self) -> list[Sandbox]:
        return [each for each in self.table if each.stage is Stage.PREPARING]

    @rule(program_id=PROGRAMS, template=TEMPLATES, share_key=st.sampled_from(["", "", "k"]))
    def request(self, program_id: str, template: Template, share_key: str) -> None:
        try:
            self.table.request(self.now_s, template, "", program_id, share_key)
        except SandboxRefusedError:
            assert share_key

    @rule(program_id=PROGRAMS)
    def give(self, program_id: str) -> None:
        self.table.register(self.now_s, "docker", program_id, Place(f"given {next(self.handles)}"))

    @rule(program_id=PROGRAMS)
    def end(self, program_id: str) -> None:
        self.table.program_ended(program_id, "released")
        assert self.table.of_program(program_id) == []

    @rule(program_id=PROGRAMS)
    def run(self, program_id: str) -> None:
        self.table.used(self.now_s, program_id)

    @rule(elapsed_s=st.floats(0, 10), needed_s=st.floats(0, 20), waits=st.booleans())
    def plan(self, elapsed_s: float, needed_s: float, *, waits: bool) -> None:
        self.now_s += elapsed_s
        owners = {each.sandbox_id: list(each.program_ids) for each in self.table}
        in_use = {each.name: each.place for each in self.table if each.told and each.stage is not Stage.RECLAIMING}
        of_running = {each.name for each in self.table if {"a", "b"} & set(each.program_ids)}
        actions = self.table.plan(
            self.now_s,
            lambda program_id: needed_s if program_id > "b" else 0.0,
            lambda program_id: program_id <= "b",
            lambda program_id: waits and program_id <= "b",
        )
        for action in actions:
            if isinstance(action, Reclaim):
                self.reclaims.append(action.sandbox)
                assert action.instead is None or action.sandbox.name not in of_running
            elif isinstance(action, HandOver):
                assert action.instead.sandbox_id != action.sandbox.sandbox_id
                assert owners[action.instead.sandbox_id] == list(action.instead.program_ids)
                assert not {"a", "b"} & set(action.instead.program_ids)
        assert {name for name, place in in_use.items() if self.named(name).place != place} == set()

    def named(self, name: str) -> Sandbox:
        return next(each for each in self.table if each.name == name)

    @rule(program_id=PROGRAMS)
    def tell(self, program_id: str) -> None:
        for sandbox in self.table.of_program(program_id):
            sandbox.told = sandbox.place is not None

    @precondition(lambda self: self.preparing())
    @rule(data=st.data(), error=st.sampled_from([None, SandboxSetupError("s"), SandboxImageError("i")]))
    def preparation_ends(self, data: st.DataObject, error: SandboxSetupError | None) -> None:
        sandbox = data.draw(st.sampled_from(self.preparing()))
        if error is None:
            self.table.prepared(self.now_s, sandbox, Place(f"handle {next(self.handles)}"))
        else:
            self.table.failed(self.now_s, sandbox, error)

    @precondition(lambda self: self.reclaims)
    @rule()
    def reclaiming_ends(self) -> None:
        self.table.reclaimed(self.reclaims.pop())

    @rule(data=st.data())
    def one_dies(self, data: st.DataObject) -> None:
        if self.table.sandboxes:
            self.table.died(self.now_s, data.draw(st.sampled_from(list(self.table))), "killed")

    @invariant()
    def all_agrees(self) -> None:
        table = self.table
        made = [each for each in table if each.stage in ALIVE and not each.given]
        assert len(made) <= 5
        assert sum(each.template.memory_bytes or 0 for each in made) <= 150
        assert len(self.preparing()) <= 3
        for program_id in ("a", "b", "c", "d"):
            for sandbox in table.of_program(program_id):
                assert program_id in sandbox.program_ids
                assert table.sandboxes[sandbox.sandbox_id] is sandbox
        for sandbox in table:
            assert sandbox.stage is not Stage.GONE
            if sandbox.stage is not Stage.RECLAIMING:
                assert all(sandbox in table.of_program(program_id) for program_id in sandbox.program_ids)
            is_unowned = not sandbox.program_ids and sandbox.stage is not Stage.RECLAIMING
            assert is_unowned == (sandbox.sandbox_id in table._unowned)
            if sandbox.place is not None:
                assert table.with_handle("docker", sandbox.place.handle) is sandbox

    def teardown(self) -> None:
        table = self.table
        table.keep_warm({"plain": (PLAIN, 0)})
        for program_id in ("a", "b", "c", "d"):
            table.program_ended(program_id, "released")
        for action in table.plan(self.now_s + 1000, lambda program_id: 0.0):
            assert isinstance(action, Reclaim), "nothing is made for nobody"
            self.reclaims.append(action.sandbox)
        for sandbox in self.reclaims:
            table.reclaimed(sandbox)
        assert not table.sandboxes
        assert not table._of_program
        assert not table._by_handle
        assert not table._by_share_key
        assert not table._failed
        assert not table._unowned


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40)
