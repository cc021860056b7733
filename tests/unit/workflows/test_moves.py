"""A move of a session, stopped at each of its six steps: nothing is lost or run twice, whatever happens there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.workflows.model import Model
from thunderagent_workflows.core import messages as m
from thunderagent_workflows.core.call import Call, Maker, Outcome, Rules
from thunderagent_workflows.core.controller import Controller
from thunderagent_workflows.errors import LostError, SessionEndedError

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = (m.Migrate, m.Retarget, m.Retargeted, m.ExecutorChanged, m.Transfer, m.Activated)
"""The message in flight at each of the paper's steps, 1 to 6."""


def moving(step: type) -> Model:
    """Return a session of a managed agent whose move has reached a step, with calls that wait for a value."""
    model = Model(lambda _: 0, ("plain", "managed"), instances=2)
    first = model.call("managed", "s0")
    model.deliver_all()
    model.finish("managed/0", first.call)
    producer = model.call("plain", "s0")
    for _ in range(3):
        model.call("managed", "s0", needs=(producer,))
    model.call("managed", "s0")
    model.deliver_all()
    model.channels["global", "managed/0"].append(m.Migrate("s0", "managed/1"))
    running = model.machines["managed/0"].running
    if step is not m.Migrate:
        model.finish("managed/0", *running.values())
    while not any(isinstance(message, step) for messages in model.channels.values() for message in messages):
        channel = model.waiting_channels()[0]
        model.deliver(channel)
    return model


def finish(model: Model) -> None:
    model.settle()
    model.check_settled()
    assert sum(record.outcome is not None for record in model.records) == len(model.records)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_move_loses_and_doubles_nothing_at_any_step(step: type) -> None:
    model = moving(step)
    finish(model)
    assert [model.ran[record.call.call_id] for record in model.records] == [1] * len(model.records)
    assert [moved.why_not for moved in model.moves] == [""]
    assert model.machines["managed/1"].states["s0"] == model.order["managed", "s0"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("event", ["value comes", "another call comes", "it moves back", "the aim retires"])
def test_interruption_changes_nothing(step: type, event: str) -> None:
    model = moving(step)
    events: dict[str, Callable[[], object]] = {
        "value comes": lambda: model.finish("plain/0", model.records[1].call),
        "another call comes": lambda: model.call("managed", "s0", node="n1"),
        "it moves back": lambda: model.handle("managed/1", m.Migrate("s0", "managed/0")),
        "the aim retires": lambda: model.retire("managed/1"),
    }
    events[event]()
    finish(model)
    assert [model.ran[record.call.call_id] for record in model.records] == [1] * len(model.records)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("lost", ["managed/0", "managed/1", "plain/0", "n1"])
def test_every_call_is_over_when_something_is_lost_in_between(step: type, lost: str) -> None:
    """Calls at the lost place fail, with that place; all others have their value; nothing runs twice."""
    model = moving(step)
    if lost == "n1":
        model.call("managed", "s0", node="n1")
    model.crash([lost])
    model.settle()
    model.check_settled()
    for record in model.records:
        if record.call.origin not in model.machines:
            continue
        assert record.outcome is not None
        assert model.ran[record.call.call_id] <= 1
        if record.outcome.error is not None:
            assert isinstance(record.outcome.error, LostError)
            assert record.outcome.error.instance == lost


def test_a_stateful_session_is_not_moved() -> None:
    model = Model(lambda _: 0, ("stateful",), instances=2)
    for _ in range(3):
        model.call("stateful", "s0")
    model.deliver_all()
    model.handle("stateful/0", m.Migrate("s0", "stateful/1"))
    assert [moved.why_not for moved in model.moves] == ["a stateful session stays where it is"]
    finish(model)
    assert model.places["stateful", "s0"] == {"stateful/0"}


def test_a_call_of_higher_priority_interrupts_one_that_can_be() -> None:
    """The interrupted call finds its checkpoint when it runs again."""
    model = Model(lambda _: 0, ("soft",), instances=1)
    low = model.call("soft", "low")
    model.deliver_all()
    model.handle("soft/0", m.SetPriorities({"high": 2.0}))
    high = model.call("soft", "high")
    model.deliver_all()
    assert model.interrupting["soft/0"] == {low.call.call_id}
    model.interrupt("soft/0", *model.machines["soft/0"].running.values())
    (running,) = model.machines["soft/0"].running.values()
    assert running.call_id == high.call.call_id
    model.finish("soft/0", running)
    (again,) = model.machines["soft/0"].running.values()
    assert again.checkpoint == ("checkpoint", low.call.call_id)
    finish(model)


def test_a_batch_is_of_one_method_and_no_larger_than_it_may_be() -> None:
    model = Model(lambda _: 0, ("batch",), instances=1)
    for number in range(8):
        model.call("batch", f"s{number % 3}")
    model.deliver_all()
    sizes = []
    while running := list(model.machines["batch/0"].running.values()):
        sizes.append(len(running))
        for call in running:
            model.finish("batch/0", call)
    assert sizes == [1, 3, 3, 1]


def test_a_session_whose_state_is_lost_fails_until_it_has_ended() -> None:
    """Its calls would miss their state; those of other sessions, and of other agents, continue."""
    model = Model(lambda _: 0, ("managed", "plain"), instances=2)
    model.call("managed", "s0")
    model.settle()
    lost_at = model.machines["directory"].homes["s0", "managed"].location
    model.crash([lost_at])
    for node in ("n0", "n1"):
        failed = model.call("managed", "s0", node=node)
        depends = model.call("plain", "s0", needs=(failed,), node=node)
        others = [model.call("managed", "s1"), model.call("plain", "s0")]
        model.settle()
        model.check_settled()
        for record in (failed, depends):
            assert isinstance(record.outcome.error, LostError)
            assert record.outcome.error.instance == lost_at
        assert [record.outcome.error for record in others] == [None, None]
    for to in sorted(model.machines, key=lambda name: name != "directory"):
        model.send("n0", to, m.SessionEnded("s0"))
    model.settle()
    again = model.call("managed", "s0")
    model.settle()
    assert again.outcome.error is None


def test_a_home_that_was_lost_before_it_said_that_it_is_one_is_lost() -> None:
    """Its message, and that of the session's sender, may arrive after the news of its loss."""
    model = moving(m.Transfer)
    model.deliver(("managed/0", "managed/1"))
    model.crashed = True
    del model.machines["managed/1"]
    for to in ("directory", "n0"):
        model.handle(to, m.Gone("managed/1"))
    model.deliver(("managed/1", "directory"))
    late = model.call("managed", "s0")
    model.broadcast("shell", m.Gone("managed/1"))
    model.settle()
    model.check_settled()
    assert isinstance(late.outcome.error, LostError)


@pytest.mark.parametrize("again", [False, True], ids=["ended", "begun anew"])
def test_an_end_that_overtakes_a_call_leaves_nothing_of_it(again: bool) -> None:
    """The call names a home that its controller has given up; one that is made after the end still runs."""
    model = Model(lambda _: 0, ("managed",), instances=2)
    model.crashed = True  # the session's life is incomplete
    model.call("managed", "s0")
    model.settle()
    model.handle("managed/0", m.Migrate("s0", "managed/1"))
    model.deliver_all()
    late = model.call("managed", "s0", node="n1")
    model.deliver(("n1", "directory"))
    model.broadcast("n0", m.SessionEnded("s0"))
    model.deliver(("n0", "managed/1"))
    if again:
        model.deliver(("n0", "n1"))
        late = model.call("managed", "s0", node="n1")
    model.deliver(("directory", "n1"))
    model.deliver(("n1", "managed/1"))
    assert model.machines["managed/1"].moves.held
    model.settle()
    model.check_settled()
    assert isinstance(late.outcome.error, SessionEndedError) != again
    assert model.ran[late.call.call_id] == again


def test_sent_state_does_not_return_after_the_end_of_its_session() -> None:
    """Its new place retired meanwhile. Its calls have failed, and would run nevertheless."""
    controller = Controller("plain/0", Rules())
    for call_id in (1, 2):
        controller.handle(m.Submit(Call(call_id, Maker("s0", "n0"), "plain", "run")))
    controller.handle(m.Migrate("s0", "plain/1"))
    assert len(controller.moves.sent) == 1
    controller.handle(m.SessionEnded("s0"))
    controller.handle(m.Gone("plain/1", is_clean=True))
    assert controller.handle(m.Finished(1, Outcome())) == []
    assert controller.here == {}


def test_a_call_that_moved_with_a_home_that_is_over_runs_at_the_new_home() -> None:
    """Its origin learned of the old home after the end. The session has restarted where the call moves."""
    model = Model(lambda _: 0, ("managed", "plain"), instances=2)
    model.crashed = True  # the session's life is incomplete
    busy = model.call("managed", "s1")
    model.call("managed", "s0", node="n1")
    model.deliver(("n0", "directory"))
    model.deliver(("n1", "directory"))
    model.broadcast("n0", m.SessionEnded("s0"))
    for to in ("directory", "n0", "n1", "managed/0", "managed/1"):
        while model.channels["n0", to]:
            model.deliver(("n0", to))
    model.deliver(("directory", "n0"))
    model.deliver(("n0", "managed/0"))
    late = model.call("managed", "s0", node="n1")
    model.deliver(("directory", "n1"))
    depends = model.call("plain", "s1", needs=(late,), node="n1")
    for channel in (("n1", "managed/0"), ("n1", "plain/0"), ("plain/0", "managed/0")):
        model.deliver(channel)
    assert model.machines["managed/0"].subscribers[late.call.call_id] == [("plain/0", depends.call.call_id)]
    anew = model.call("managed", "s0")
    for channel in (("n0", "directory"), ("directory", "n0"), ("n0", "managed/1")):
        model.deliver(channel)
    model.handle("managed/0", m.Migrate("s0", "managed/1"))
    model.deliver(("managed/0", "managed/1"))
    ask, answer = ("n1", "directory"), ("directory", "n1")
    for channel in (ask, answer, ("managed/1", "n1"), ask, answer):
        while model.channels[channel]:  # before the old place tells n1 that the call has left
            model.deliver(channel)
    model.settle()
    model.check_settled()
    for record in (busy, late, depends, anew):
        assert record.outcome.error is None
        assert model.ran[record.call.call_id] == 1
    assert (late.executor, late.left) == ("managed/1", "")
