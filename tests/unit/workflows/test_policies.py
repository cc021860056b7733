"""Policies are functions of a view: each gets one, and returns its actions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from thunderagent_workflows import DeclarationError, policies
from thunderagent_workflows.core import messages as m
from thunderagent_workflows.declare import Directives
from thunderagent_workflows.globalloop import without
from thunderagent_workflows.store import Decisions
from thunderagent_workflows.view import Act, Line, Summary, View, load_policy


def view_of(agents: dict[str, Any], *summaries: Summary, resources: Any = None, now_s: float = 100.0) -> View:
    view = View({name: Directives.model_validate(given) for name, given in agents.items()}, resources)
    view.merge(summaries, now_s)
    return view


def summary(location: str, waiting: dict[str, Line] | None = None, **fields: Any) -> Summary:
    lines = dict(waiting or {})
    queued_count = sum(line.calls_count for line in lines.values())
    given = {"running": (), "running_since_s": 0.0, "done_count": 0, "busy_s": 0.0, "is_retiring": False, **fields}
    return Summary(location=location, node="n", queued_count=queued_count, lines=dict(lines), **given)


def decide(name: str, view: View) -> Act:
    act = Act(view)
    load_policy(name)(view, act)
    return act


def line(calls_count: int = 1, stage_count: int = 1, returns_count: int = 0, oldest_s: float = 90.0) -> Line:
    return Line(calls_count, stage_count, returns_count, oldest_s)


RUNS = {"running": (("x", 50.0),), "running_since_s": 50.0}


def test_srtf_puts_first_who_is_furthest_and_lpt_who_went_back() -> None:
    waiting = {"near": line(stage_count=1), "far": line(stage_count=4), "again": line(stage_count=2, returns_count=2)}
    for name, first in (("srtf", "far"), ("lpt", "again")):
        act = decide(name, view_of({"a": {}}, summary("a/0", waiting)))
        assert max(act.priorities, key=act.priorities.__getitem__) == first
        assert decide(name, act.view).priorities == {}  # nothing has changed


def test_head_of_line_gives_an_idle_instance_who_waits_behind_a_long_call() -> None:
    def view(**fields: Any) -> View:
        return view_of(
            {"a": {"max_instances": 2, **fields}},
            summary(
                "a/0", {"young": line(oldest_s=80.0), "old": line(oldest_s=60.0)}, done_count=9, busy_s=9.0, **RUNS
            ),
            summary("a/1"),
        )

    (migration,) = decide("head_of_line", view()).migrations["a/0"]
    assert (migration.session, migration.to) == ("old", "a/1")
    assert decide("head_of_line", view(stateful=True)).migrations == {}
    recent = view_of({"a": {}}, summary("a/0", {"old": line()}, done_count=9, busy_s=900.0, **RUNS), summary("a/1"))
    assert decide("head_of_line", recent).migrations == {}


def test_balance_weighs_instances_that_differ() -> None:
    busy = summary("a/0", {"s": line(7)}, done_count=10, busy_s=10.0, **RUNS)
    (route,) = decide("balance", view_of({"a": {}}, busy, summary("a/1", done_count=10, busy_s=10.0))).routes
    weights = dict(route.weights)
    assert weights["a/1"] == 1.0
    assert weights["a/0"] < 0.5
    alike = view_of({"a": {}}, summary("a/0", done_count=1, busy_s=1.0), summary("a/1", done_count=1, busy_s=1.2))
    assert decide("balance", alike).routes == []


def test_balance_takes_a_new_instance_to_be_as_fast_as_the_others() -> None:
    """Whatever a call of the agent takes: a new one gets neither all of them nor none."""
    for call_s in (0.05, 60.0):
        known = [summary(f"a/{n}", done_count=10, busy_s=10 * call_s) for n in range(2)]
        assert decide("balance", view_of({"a": {}}, *known, summary("a/2"))).routes == []
        waits = summary("a/0", {"s": line(1)}, done_count=10, busy_s=10 * call_s)
        (route,) = decide("balance", view_of({"a": {}}, waits, summary("a/1"))).routes
        assert dict(route.weights) == {"a/0": 0.5, "a/1": 1.0}


def test_reassign_makes_room_for_who_has_much_to_do() -> None:
    agents = {"busy": {"max_instances": 4, "resources": {"gpu": 1}}, "calm": {"min_instances": 1, "max_instances": 2}}
    agents["calm"]["resources"] = {"gpu": 1}
    said = (summary("busy/0", {"s": line(8)}), summary("calm/0"), summary("calm/1"))
    assert decide("reassign", view_of(agents, *said, resources={"gpu": 4})).provisions == ["busy"]
    full = decide("reassign", view_of(agents, *said, resources={"gpu": 3}))
    assert (full.provisions, full.kills) == ([], ["calm/1"])
    assert "its resources are not free" in full.refused[0]
    agents["busy"]["max_instances"] = 1
    most = decide("reassign", view_of(agents, *said, resources={"gpu": 3}))
    assert (most.provisions, most.kills, most.refused) == ([], [], [])


def test_priority_moves_who_was_put_first_to_an_idle_instance() -> None:
    view = view_of({"a": {}}, summary("a/0", {"vip": line(), "other": line()}, **RUNS), summary("a/1"))
    view.sessions["vip"].priority = 10.0
    act = decide("priority", view)
    assert [(each.session, each.to) for each in act.migrations["a/0"]] == [("vip", "a/1")]


def test_impossible_policy_is_refused_with_a_reason() -> None:
    view = view_of({"a": {"stateful": True}, "b": {}}, summary("a/0"), summary("a/1"), summary("b/0"))
    act = Act(view)
    act.migrate("s", "a/0", "a/1")
    act.migrate("s", "a/0", "a/9")
    act.kill("b/0")
    act.kill("c/0")
    act.provision("b")
    act.provision("c")
    act.route(to="b/0")
    assert len(act.refused) == 7
    assert [act.migrations, act.kills, act.provisions, act.routes] == [{}, [], [], []]


def test_routes_are_by_session_agent_role_and_weight() -> None:
    view = view_of({"a": {"role": "coder"}, "b": {"role": "coder"}}, summary("a/0"), summary("a/1"), summary("b/0"))
    act = Act(view)
    act.route(agent="a", session="s", to="a/1")
    act.route(role="coder", to=["a/0", "b/0"])
    act.route(agent="a", to={"a/0": 1.0, "a/1": 3.0})
    assert [(each.agent, each.session, dict(each.weights)) for each in act.routes] == [
        ("a", "s", {"a/1": 1.0}),
        ("a", "", {"a/0": 1.0}),
        ("b", "", {"b/0": 1.0}),
        ("a", "", {"a/0": 1.0, "a/1": 3.0}),
    ]


@pytest.mark.parametrize("name", policies.NAMES)
def test_a_policy_is_short(name: str) -> None:
    assert len(inspect.getsource(load_policy(name)).splitlines()) < 30


def own_policy(view: View, act: Act) -> None:
    act.set_priority("s", view.now_s)


def test_a_policy_of_one_s_own_is_named_by_its_module() -> None:
    assert load_policy(f"{__name__}:own_policy") is own_policy or load_policy(f"{__name__}:own_policy").__name__
    for name in ("nothing", "os.path:nothing", f"{__name__}:RUNS"):
        with pytest.raises(DeclarationError, match="policy"):
            load_policy(name)


def test_the_next_session_of_a_name_has_no_priority_of_the_one_before() -> None:
    """So it can be given the same one."""
    view = view_of({"a": {}}, summary("a/0", {"s": line()}))
    Act(view).set_priority("s", 5.0)
    view.end_session("s")
    assert (view.sessions, view.instances["a/0"].waiting) == ({}, {})
    view.merge([summary("a/0", {"s": line()})], 101.0)
    act = Act(view)
    act.set_priority("s", 5.0)
    assert act.priorities == {"s": 5.0}


def test_decisions_are_not_about_sessions_that_have_ended_on_the_way() -> None:
    """All else is left as it was."""
    routes = [m.SetRoute("a", session, (("a/0", 1.0),)) for session in ("s", "t", "")]
    decisions = Decisions(routes, {"s": 1.0, "t": 2.0}, {"a": {"s": 3.0}}, kills=["a/1"])
    assert without(decisions, {"s"}) == Decisions(routes[1:], {"t": 2.0}, {"a": {}}, kills=["a/1"])


def test_a_priority_everywhere_takes_back_an_agent_s_own() -> None:
    """Also if it is the one that was there before."""
    view = view_of({"a": {}, "b": {}})
    Act(view).set_priority("s", 2.0)
    Act(view).set_priority("s", 1.0, agent="a")
    for expected in ({"s": 2.0}, {}):
        act = Act(view)
        act.set_priority("s", 2.0)
        assert act.priorities == expected
    assert view.agent_priorities == {"a": {}}


def test_gone_instance_is_forgotten() -> None:
    view = view_of({"a": {}}, summary("a/0", {"s": line(), "t": line()}), summary("a/1", {"s": line()}))
    view.forget("a/0")
    assert set(view.sessions) == {"s"}
    view.merge([Summary("a/1", "n", 0, (), 0.0, 1, 1.0, False, {"s": None})], 101.0)
    assert view.sessions == {}
