"""The manager with engines that fail, die, and know more than it does; nothing leaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from math import inf
from time import monotonic
from typing import Any

import pytest
import structlog

from tests.unit.tools.fakes import FakeDriver, FakePrograms, given_labels, labels_of
from thunderagent.errors import (
    NotFoundError,
    OtherTenantError,
    RequestError,
    SandboxConflictError,
    SandboxEngineError,
    SandboxImageError,
    SandboxRefusedError,
    SandboxSetupError,
    TooManyProgramsError,
)
from thunderagent.programs.messages import Grant, Reason, Release, Restore, Tick
from thunderagent.tools.base import Owner, Place, Usage
from thunderagent.tools.contact import ContactSettings
from thunderagent.tools.manager import SUSPEND_OVER_S, THAW_AHEAD_S, Manager, ManagerSettings
from thunderagent.tools.sandbox import Caps, Stage
from thunderagent.tools.template import Template

OWNER = Owner("here", "run-2")
FAST = ManagerSettings(
    takes_specs=True,
    plan_interval_s=0.01,
    plan_pause_s=0.002,
    shutdown_s=1.0,
    reclaim_timeout_s=1.0,
    contact=ContactSettings(resync_interval_s=0.05, measure_interval_s=0.02, retry_s=0.01, retry_limit_s=0.02),
)
TEMPLATES = {
    "plain": Template(image="plain", program_classes=("coder",)),
    "slow": Template(image="slow", prepare_timeout_s=0.05),
}


class World:
    """A manager, its engine and its programs."""

    def __init__(self, manager: Manager, driver: FakeDriver, programs: FakePrograms) -> None:
        self.manager = manager
        self.driver = driver
        self.programs = programs

    async def asks(self, program_id: str, **wanted: Any) -> dict[str, Any]:
        (report,) = await self.manager.request(program_id, json.dumps(wanted or {"template": "plain"}).encode())
        return report

    async def has_ready(self, program_id: str, **wanted: Any) -> dict[str, Any]:
        report = await self.asks(program_id, **wanted)
        await self.until(lambda: self.stage_of(report["sandbox_id"]) in ("ready", "in_use"))
        return next(each for each in self.manager.all() if each["sandbox_id"] == report["sandbox_id"])

    def stage_of(self, sandbox_id: str) -> str:
        sandbox = self.manager.table.sandboxes.get(sandbox_id)
        return "gone" if sandbox is None else sandbox.stage.value

    def admits(self, program_id: str) -> None:
        self.programs.running.add(program_id)
        self.manager.observe(Tick(0.0), [Grant(1, program_id, "r0", Reason.FITS)])

    def releases(self, program_id: str) -> None:
        self.manager.observe(Tick(0.0), [Release(program_id, 1, Reason.RELEASED)])

    async def until(self, condition: Callable[[], object], within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def running(
    *,
    settings: ManagerSettings = FAST,
    caps: Caps | None = None,
    before: Callable[[FakeDriver], None] = lambda driver: None,
    templates: dict[str, Template] | None = None,
    kind: str = "docker",
    name_letter: str = "s",
) -> AsyncIterator[World]:
    """Run a manager; at the end no task is left and its driver is closed. Names are by default as the ids."""
    ids, names = count(1), count(1)
    driver, programs = FakeDriver(OWNER), FakePrograms()
    before(driver)
    manager = Manager(
        OWNER,
        {kind: driver},
        programs,
        caps=caps or Caps(backoff_s=0.01),
        templates=TEMPLATES if templates is None else templates,
        new_id=lambda: f"s{next(ids)}",
        new_name=lambda: f"{name_letter}{next(names)}",
        settings=settings,
    )
    tasks_before = asyncio.all_tasks()
    task = asyncio.create_task(manager.run())
    await asyncio.sleep(0)
    try:
        yield World(manager, driver, programs)
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert driver.closed
    assert asyncio.all_tasks() == tasks_before
    assert not task.cancelled() or driver.preparing_count == 0


async def test_a_requested_sandbox_becomes_ready_and_goes_with_its_program() -> None:
    async with running() as world:
        report = await world.has_ready("p")
        assert (report["handle"], report["ports"]) == ("s1", {"8000": ["127.0.0.1", 4000]})
        assert world.programs.opened == ["p"]
        assert world.programs.story == [("p", "ready", "s1")]
        world.admits("p")
        assert world.stage_of("s1") == "in_use"
        world.releases("p")
        await world.until(lambda: world.stage_of("s1") == "gone")
        assert (world.driver.there, world.manager.reclaimed_count) == ({}, 1)


async def test_a_program_that_became_anothers_while_a_handle_was_looked_up_gets_nothing() -> None:
    """The caller's check says so; it is made afterwards."""
    async with running() as world:
        world.driver.put("box", {})
        owners = ["a"]

        def check() -> None:
            if owners != ["a"]:
                raise OtherTenantError("it belongs to another")

        body = b'{"handle": "box"}'
        asking = asyncio.create_task(world.manager.request("p", body, check=check))
        await asyncio.sleep(0)
        owners[:] = ["b"]
        with pytest.raises(OtherTenantError):
            await asking
        assert (world.programs.opened, world.manager.all()) == ([], [])
        owners[:] = ["a"]
        await world.manager.request("p", body, check=check)
        assert world.programs.opened == ["p"]


async def test_a_class_of_programs_gets_its_sandbox_at_first_sight() -> None:
    async with running() as world:
        for _ in range(3):
            world.manager.program_seen("p", "coder")
        world.manager.program_seen("q", "unheard of")
        await world.until(lambda: world.stage_of("s1") == "ready")
        assert len(world.driver.orders) == 1


async def test_releasing_stops_a_preparation() -> None:
    async with running() as world:
        world.driver.hold = asyncio.Event()
        await world.asks("p")
        await world.until(lambda: world.driver.preparing_count)
        world.releases("p")
        await world.until(lambda: world.stage_of("s1") == "gone")
        assert world.driver.cancelled == ["s1"]
        assert not world.driver.there


@pytest.mark.parametrize("yields", range(12))
async def test_releasing_at_any_moment_leaves_nothing(yields: int) -> None:
    """Its program ends at any stage of the preparation."""
    async with running() as world:
        await world.asks("p")
        for _ in range(yields):
            await asyncio.sleep(0)
        world.releases("p")
        await world.until(lambda: world.stage_of("s1") == "gone")
        await asyncio.sleep(0.02)
        assert not world.driver.there


async def test_fifty_simultaneous_releases_reclaim_everything() -> None:
    async with running(caps=Caps(sandbox_count=64, hands_count=16)) as world:
        for number in range(50):
            await world.asks(f"p{number}")
        await world.until(lambda: len(world.driver.there) == 50)
        assert world.driver.most_preparing_count <= 16
        for number in range(50):
            world.releases(f"p{number}")
        await world.until(lambda: not world.manager.table.sandboxes)
        assert not world.driver.there


async def test_a_failure_is_tried_again_and_told() -> None:
    async with running() as world:
        world.driver.errors = [SandboxConflictError("the name is in use"), SandboxSetupError("make failed")]
        report = await world.has_ready("p")
        names = [order.sandbox_id for order in world.driver.orders]
        assert names == ["s1", "s1-1", "s1-2"], "each attempt has a name of its own"
        assert [what for _, what, _ in world.programs.story] == ["failed", "failed", "ready"]
        assert report["attempt_count"] == 2
        assert world.manager.failure_counts == {"sandbox_conflict": 1, "sandbox_setup_failed": 1}


async def test_a_missing_image_fails_at_once_with_its_reason() -> None:
    async with running() as world:
        world.driver.errors = [SandboxImageError("no image 'plain'")]
        await world.asks("p")
        await world.until(lambda: world.stage_of("s1") == "failed")
        (report,) = world.manager.of_program("p")
        assert report["why"] == "no image 'plain'"
        assert world.programs.story == [("p", "failed", "no image 'plain'")]
        world.releases("p")
        assert not world.manager.table.sandboxes


async def test_a_preparation_has_a_deadline() -> None:
    async with running(caps=Caps(attempts_count=1)) as world:
        world.driver.hold = asyncio.Event()
        await world.asks("p", template="slow")
        await world.until(lambda: world.stage_of("s1") == "failed")
        assert "not ready after 0.05 s" in world.programs.story[0][2]


async def test_an_engine_that_stops_loses_nothing_but_what_ran_on_it() -> None:
    """Waiting requests are served when it is back; unused sandboxes are made again, used ones are reported."""
    async with running() as world:
        await world.has_ready("used")
        world.admits("used")
        await world.has_ready("unused")
        world.driver.stop()
        await world.asks("new")
        await world.until(lambda: "docker" in world.manager.engine_errors)
        await asyncio.sleep(0.1)
        world.driver.reachable = True
        await world.until(lambda: world.stage_of("s1") == "failed")
        await world.until(lambda: world.stage_of("s3") == world.stage_of("s2") == "ready")
        await world.until(lambda: not world.manager.engine_errors)
        assert any(each[:2] == ("used", "failed") for each in world.programs.story)


async def test_an_engine_that_is_down_does_not_fill_the_story() -> None:
    """However often a preparation is retried meanwhile, the reason is reported only once."""
    async with running() as world:
        world.driver.reachable = False
        await world.asks("p")
        await world.until(lambda: len(world.driver.orders) > 5)
        assert [what for _, what, _ in world.programs.story] == ["failed"]


async def test_a_reclaiming_is_tried_until_it_succeeds() -> None:
    async with running() as world:
        await world.has_ready("p")
        world.driver.reclaim_error = SandboxEngineError("away")
        world.releases("p")
        await world.until(lambda: world.manager.all()[0]["why"] == "away")
        assert world.stage_of("s1") == "reclaiming"
        world.driver.reclaim_error = None
        await world.until(lambda: world.stage_of("s1") == "gone")


async def test_an_unexpected_error_of_a_driver_ends_nothing_else() -> None:
    """It is an error of that sandbox, which is tried again."""
    async with running() as world:
        world.driver.errors = [ValueError("a bug")]
        await world.has_ready("p")
        assert world.programs.story[0][:2] == ("p", "failed")
        assert "failed unexpectedly" in world.programs.story[0][2]
        assert "a bug" not in world.programs.story[0][2]  # it may hold what a stranger's service answered
        world.driver.reclaim_error = ValueError("another")
        world.releases("p")
        await world.until(lambda: "failed unexpectedly" in (world.manager.all()[0]["why"] or ""))
        world.driver.reclaim_error = None
        await world.until(lambda: world.stage_of("s1") == "gone")


async def test_a_sandbox_that_cannot_be_removed_is_given_up_unless_it_is_ours_and_lives() -> None:
    """One of ours has ended by itself when its time is over; a given one was never ours to end."""
    async with running(settings=replace(FAST, reclaim_tries_count=2)) as world:
        await world.has_ready("p")
        await world.has_ready("p")
        world.driver.put("mine", given_labels("p"), tell=False)
        await world.asks("p", handle="mine")
        world.driver.reclaim_error = SandboxRefusedError("never")
        world.releases("p")
        world.manager.table.sandboxes["s2"].begun_s = -inf
        await world.until(lambda: world.stage_of("s2") == world.stage_of("s3") == "gone")
        assert (world.stage_of("s1"), world.manager.reclaimed_count) == ("reclaiming", 0)
        looks_count = world.driver.find_count
        await world.until(lambda: world.driver.find_count > looks_count + 2)
        assert world.manager.table.with_handle("docker", "mine") is None  # it does not begin its program again
        world.driver.reclaim_error = None
        await world.until(lambda: world.manager.reclaimed_count == 1)


async def test_a_given_sandbox_is_not_given_up_while_its_engine_is_away() -> None:
    async with running(settings=replace(FAST, reclaim_tries_count=1)) as world:
        world.driver.put("mine", {}, tell=False)
        await world.asks("p", handle="mine")
        world.driver.reachable = False
        await world.until(lambda: world.manager.engine_errors)
        world.releases("p")
        await world.until(lambda: world.manager.all()[0]["why"] == "no engine answers")
        assert world.stage_of("s1") == "reclaiming"
        world.driver.reachable = True
        await world.until(lambda: world.driver.reclaimed == ["mine"])


async def test_sandboxes_of_clients_never_block_those_of_the_operator() -> None:
    settings = replace(FAST, reclaims_count=1, reclaim_timeout_s=60.0, shutdown_s=0.05)
    async with running(settings=settings) as world:
        world.driver.put("mine", {}, tell=False)
        world.driver.stuck = {"mine"}
        await world.asks("p", handle="mine")
        await world.has_ready("q")
        world.releases("p")
        await world.until(lambda: world.driver.reclaim_hold_count)
        world.releases("q")
        await world.until(lambda: world.driver.reclaimed == ["s2"])


async def test_leftovers_that_cannot_be_removed_are_no_loss_of_contact() -> None:
    """What was found counts, and they are left until the next sweep."""

    def before(driver: FakeDriver) -> None:
        driver.put("given", given_labels("p"))
        driver.sweep_error = SandboxConflictError("it is dead, and stays")

    async with running(before=before) as world:
        await world.until(lambda: world.driver.find_count >= 3)
        assert world.driver.sweep_count <= 1 + world.driver.find_count // 10
        assert not world.manager.engine_errors
        assert world.manager.of_program("p")
        await world.until(lambda: world.driver.sweep_count == 2)


async def test_orphans_of_earlier_runs_go_at_the_start_and_nobody_elses() -> None:
    def before(driver: FakeDriver) -> None:
        driver.put("orphan", labels_of(Owner("here", "run-1"), "s0"))
        driver.put("other", labels_of(Owner("elsewhere", "run-1"), "s0"))
        driver.put("foreign", {})

    async with running(before=before) as world:
        await world.until(lambda: world.driver.reclaimed)
        await asyncio.sleep(0.1)
        assert world.driver.reclaimed == ["orphan"]
        assert set(world.driver.there) == {"other", "foreign"}
        assert world.manager.orphan_count == 1


async def test_given_sandboxes_are_found_and_go_with_their_program() -> None:
    """The engine reports new ones, and a listing finds the earlier ones."""
    async with running(before=lambda driver: driver.put("early", given_labels("p")) and None) as world:
        await world.until(lambda: world.manager.of_program("p"))
        world.driver.put("late", given_labels("p"))
        await world.until(lambda: len(world.manager.of_program("p")) == 2)
        world.releases("p")
        await world.until(lambda: not world.driver.there)
        assert sorted(world.driver.reclaimed) == ["early", "late"]


async def test_a_given_sandbox_is_left_alone_while_no_program_can_be_opened() -> None:
    """The table of programs is full; once it is not, a listing finds the sandbox."""
    async with running() as world:
        world.programs.refuses = TooManyProgramsError("the limit of programs is reached")
        world.driver.put("mine", given_labels("p"))
        await world.until(lambda: world.programs.refused_count > 1)
        world.programs.refuses = None
        await world.until(lambda: world.manager.of_program("p"))


async def test_a_sandbox_may_be_registered_by_its_name() -> None:
    async with running() as world:
        world.driver.put("mine", {}, tell=False)
        report = await world.asks("p", handle="mine")
        assert (report["given"], report["stage"], report["address"]) == (True, "in_use", "10.0.0.9")
        with pytest.raises(NotFoundError, match="there is no other"):
            await world.asks("p", handle="other")
        world.releases("p")
        await world.until(lambda: "mine" not in world.driver.there)


async def test_a_command_in_a_sandbox_is_a_tool_of_its_program() -> None:
    """It begins with the first of several, and ends with the last."""
    async with running() as world:
        handle = (await world.has_ready("p"))["handle"]
        world.driver.runs(handle, "early", "ls")  # not used yet
        await asyncio.sleep(0.01)
        world.admits("p")
        world.driver.runs(handle, "e-1", "pytest")
        world.driver.runs(handle, "e-2", "tail -f log")
        world.driver.ran(handle, "e-1")
        world.driver.ran(handle, "e-1")
        await world.until(lambda: world.programs.tools)
        await asyncio.sleep(0.01)
        assert world.programs.tools == [("p", "pytest")]
        world.driver.ran(handle, "e-2")
        world.driver.ran(handle, "early")
        await world.until(lambda: len(world.programs.tools) > 1)
        assert world.programs.tools == [("p", "pytest"), ("p", None)]


async def test_a_command_that_runs_on_beside_a_turn_is_no_tool() -> None:
    """A server that is started inside does so: commands after it are tools of their own."""
    async with running() as world:
        handle = (await world.has_ready("p"))["handle"]
        world.admits("p")
        world.driver.runs(handle, "server", "python -m server")
        await world.until(lambda: world.programs.tools)
        world.admits("p")
        world.driver.runs(handle, "e-1", "ls")
        world.driver.ran(handle, "e-1")
        world.driver.ran(handle, "server")
        await world.until(lambda: len(world.programs.tools) > 2)
        await asyncio.sleep(0.01)
        assert world.programs.tools == [("p", "python -m server"), ("p", "ls"), ("p", None)]


async def test_a_command_goes_on_when_its_program_gets_its_claim_back() -> None:
    """No turn came yet: the command's end is still that of the tool."""
    async with running() as world:
        handle = (await world.has_ready("p"))["handle"]
        world.admits("p")
        world.driver.runs(handle, "e-1", "pytest")
        await world.until(lambda: world.programs.tools)
        world.manager.observe(Tick(0.0), [Restore("p", "r0", Reason.FITS)])
        await world.has_ready("p")  # another sandbox is no turn, either
        world.driver.ran(handle, "e-1")
        await world.until(lambda: len(world.programs.tools) > 1)
        assert world.programs.tools == [("p", "pytest"), ("p", None)]


@pytest.mark.parametrize("how", ["reclaimed", "dies"])
async def test_a_command_ends_with_its_sandbox(how: str) -> None:
    """Its end is not reported: the tool ends with the last command elsewhere, and the next one is a new tool."""
    async with running() as world:
        one, other, third = [await world.has_ready("p") for _ in range(3)]
        world.admits("p")
        for each in (one, other):
            world.driver.runs(each["handle"], "e-1", "sleep 1000")
        await world.until(lambda: len(world.manager._commands.get("p", ())) == 2)
        for each, tools in ((one, [("p", "sleep 1000")]), (other, [("p", "sleep 1000"), ("p", None)])):
            if how == "dies":
                world.driver.kill(each["handle"])
            else:
                world.manager.reclaim("p", each["sandbox_id"])
            await world.until(lambda box=each["sandbox_id"]: world.stage_of(box) in ("failed", "gone"))
            assert world.programs.tools == tools
        world.driver.runs(third["handle"], "e-2", "ls")
        world.driver.ran(third["handle"], "e-2")
        await world.until(lambda: len(world.programs.tools) == 4)
        assert world.programs.tools[2:] == [("p", "ls"), ("p", None)]


async def test_commands_of_sandboxes_that_are_shared_are_nobodys_tool() -> None:
    """The owner is unknown; in a given sandbox the label names it."""
    async with running() as world:
        shared = await world.has_ready("p", template="plain", share="both")
        await world.asks("q", template="plain", share="both")
        world.driver.put("given", given_labels("r"))
        await world.until(lambda: world.manager.of_program("r"))
        for program_id in "pqr":
            world.admits(program_id)
        world.driver.runs(shared["handle"], "e-1", "ls")
        world.driver.runs("given", "e-2", "ls")
        await world.until(lambda: world.programs.tools)
        assert world.programs.tools == [("r", "ls")]


async def test_commands_running_when_contact_was_lost_are_forgotten() -> None:
    """Its end may have been missed: the next command is a new tool."""
    async with running() as world:
        handle = (await world.has_ready("p"))["handle"]
        world.admits("p")
        world.driver.runs(handle, "e-1", "ls")
        await world.until(lambda: world.programs.tools)
        lost = set(world.driver._changes)
        world.driver.loses_contact()
        await world.until(lambda: world.driver._changes and not world.driver._changes & lost)
        world.driver.runs(handle, "e-2", "cat")
        world.driver.ran(handle, "e-2")
        await world.until(lambda: len(world.programs.tools) > 2)
        assert world.programs.tools == [("p", "ls"), ("p", "cat"), ("p", None)]


async def test_a_sandbox_that_dies_is_told_of() -> None:
    async with running() as world:
        await world.has_ready("p")
        world.admits("p")
        world.driver.kill("s1", "it exited with 137")
        await world.until(lambda: world.stage_of("s1") == "failed")
        assert world.programs.story[-1] == ("p", "failed", "it exited with 137")
        assert world.manager.failure_counts["sandbox_died"] == 1


async def test_sandbox_that_died_unheard_is_missed() -> None:
    async with running() as world:
        await world.has_ready("p")
        world.admits("p")
        world.driver.kill("s1", tell=False)
        await world.until(lambda: world.stage_of("s1") == "failed")
        assert "no longer there" in world.programs.story[-1][2]


async def test_unstarted_or_paused_sandbox_is_not_missed() -> None:
    async with running() as world:
        handle = (await world.has_ready("p"))["handle"]
        world.admits("p")
        world.driver.there[handle] = replace(world.driver.there[handle], running=False)
        world.driver.put("mine", given_labels("q"), tell=False)
        await world.until(lambda: world.manager.table.with_handle("docker", "mine") is not None)  # it was looked at
        assert world.stage_of("s1") == "in_use"
        world.driver.there[handle] = replace(world.driver.there[handle], ended=True)
        await world.until(lambda: world.stage_of("s1") == "failed")


async def test_idle_programs_lose_their_sandboxes_if_that_is_wanted() -> None:
    settings = replace(FAST, idle_limit_s=60.0)
    async with running(settings=settings) as world:
        await world.has_ready("p")
        world.programs.idle_s["p"] = 61.0
        await world.until(lambda: not world.driver.there)


@pytest.mark.parametrize(("wanted", "left"), [(True, set()), (False, {"s1"})])
async def test_a_shutdown_reclaims_by_choice(wanted: bool, left: set[str]) -> None:
    settings = replace(FAST, reclaim_on_shutdown=wanted)
    async with running(settings=settings) as world:
        await world.has_ready("p")
        world.driver.put("given", given_labels("q"))
        await world.until(lambda: world.manager.of_program("q"))
        driver = world.driver
    assert set(driver.there) == left | {"given"}, "what an agent made itself is left to it"


async def test_a_shutdown_ends_though_the_engine_is_away() -> None:
    settings = replace(FAST, shutdown_s=0.1)
    async with running(settings=settings) as world:
        await world.has_ready("p")
        world.driver.reachable = False


async def test_the_hidden_part_of_a_preparation_is_measured() -> None:
    """It lasts from the admission of a program until its sandbox is usable: zero if that was ready before."""
    waited_s: list[float] = []
    async with running() as world:
        world.manager.hear_times(lambda _: None, waited_s.append)
        await world.has_ready("early")
        world.admits("early")
        assert waited_s == [0.0]
        world.driver.hold = asyncio.Event()
        await world.asks("late")
        began_s = monotonic()
        world.admits("late")
        await asyncio.sleep(0.05)
        world.driver.hold.set()
        await world.until(lambda: len(waited_s) == 2)
        assert 0.04 < waited_s[1] <= monotonic() - began_s
        assert world.stage_of("s2") == "in_use"


async def test_usage_of_sandboxes_is_measured_and_reported() -> None:
    async with running() as world:
        await world.has_ready("p")
        world.driver.usage = Usage({"s1": 20_000_000}, {"s1": 1_000_000})
        await world.until(lambda: world.programs.sums == (1, 20_000_000, 1_000_000))
        assert world.manager.all()[0]["disk_bytes"] == 20_000_000


async def test_the_feed_tells_each_change() -> None:
    async with running() as world, world.manager.feed() as queue:
        await world.has_ready("p")
        world.releases("p")
        await world.until(lambda: world.stage_of("s1") == "gone")
        told = [queue.get_nowait() for _ in range(queue.qsize())]
        assert [report["stage"] for report in told if report] == [
            *("requested", "preparing", "ready", "reclaiming", "gone")
        ]
        assert all(report and report["program_ids"] == ["p"] for report in told)


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (b"", RequestError, "body"),
        (b"[1]", RequestError, "sandboxes.0"),
        (b"{}", RequestError, "one of template, spec and handle"),
        (b'{"template": "none"}', NotFoundError, "there are: plain, slow"),
        (b'{"template": "plain", "handle": "x"}', RequestError, "one of"),
        (b'{"spec": {"driver": "kubernetes", "image": "i"}}', RequestError, "--sandboxes has: docker"),
        (b'{"spec": {"image": ""}}', RequestError, "needs an image"),
        (b'{"spec": {"driver": "agent-sandbox"}}', RequestError, "needs a warm_pool"),
        (
            b'{"spec": {"driver": "agent-sandbox", "warm_pool": "p", "image": "i", "setup": ["true"]}}',
            RequestError,
            "the warm pool of an agent-sandbox template says image, setup",
        ),
        (b'{"spec": {"image": "i", "ports": [1], "ready_port": 2}}', RequestError, "not among ports"),
        (b'{"spec": {"image": "i", "what": 1}}', RequestError, "what"),
        (b'{"spec": {"image": "i", "ttl_s": 1e999}}', RequestError, "ttl_s"),
        (b'{"spec": {"image": "i", "ttl_s": 1e300}}', RequestError, "ttl_s"),
        (b'{"spec": {"image": "i", "cpus_count": 1e305}}', RequestError, "cpus_count"),
        (b'{"spec": {"image": "i", "stop_grace_s": Infinity}}', RequestError, "stop_grace_s"),
        (b'{"spec": {"image": "i", "ports": [65536]}}', RequestError, "ports"),
        (
            b'[{"template": "plain", "share": "k"}, {"template": "slow", "share": "k"}]',
            SandboxRefusedError,
            "another template",
        ),
        (b'{"handle": "x", "driver": "nobody"}', RequestError, "driver"),
        (b'{"handle": "x", "reclaim_url": "http://h"}', RequestError, "must be given together"),
        (b'[{"template": "plain"}, {"template": "none"}]', NotFoundError, "no template"),
        (b"[" + b'{"template": "plain"},' * 1000 + b'{"template": "plain"}]', RequestError, "at most 1000"),
        (b'{"spec": {"image": "i", "memory_bytes": 999}}', SandboxRefusedError, "the cap is 100"),
    ],
)
async def test_senseless_request_is_refused_and_leaves_nothing(body: bytes, error: type[Exception], says: str) -> None:
    async with running(caps=Caps(memory_bytes=100)) as world:
        with pytest.raises(error, match=says):
            await world.manager.request("p", body)
        assert not world.manager.table.sandboxes
        assert not world.programs.opened


async def test_a_program_has_a_thousand_sandboxes_at_most() -> None:
    """Those that it waits for count."""
    async with running() as world:
        await world.manager.request("p", json.dumps([{"template": "plain"}] * 600).encode())
        with pytest.raises(SandboxRefusedError, match="1000 sandboxes at most"):
            await world.manager.request("p", json.dumps([{"template": "plain"}] * 401).encode())
        await world.asks("other")


async def test_all_programs_together_have_a_bound() -> None:
    """It counts for requests and for classes; a turn goes on without."""
    async with running(caps=Caps(known_count=2)) as world:
        await world.asks("p")
        with pytest.raises(SandboxRefusedError, match="together may have 2 sandboxes at most"):
            await world.manager.request("q", b'[{"template": "plain"}, {"template": "plain"}]')
        assert "q" not in world.programs.opened
        world.manager.program_seen("q", "coder")
        world.manager.program_seen("r", "coder")
        assert (len(world.manager.of_program("q")), world.manager.of_program("r")) == (1, [])


async def test_clients_templates_can_be_refused() -> None:
    async with running(settings=replace(FAST, takes_specs=False)) as world:
        with pytest.raises(SandboxRefusedError, match="may not send templates"):
            await world.asks("p", spec={"image": "i", "mounts": [{"target": "/host", "source": "/"}]})
        world.driver.put("anybodys", {}, tell=False)
        with pytest.raises(SandboxRefusedError, match="may not send templates"):
            await world.asks("p", handle="anybodys")
        assert await world.asks("p", template="plain")


async def test_a_clients_template_is_refused_before_its_urls_are_called() -> None:
    """The program that asked for it is not opened."""

    def check(template: Template) -> None:
        raise SandboxRefusedError(f"{template.prepare_url} is not listed")

    async with running(settings=replace(FAST, check_callback=check), templates={}, kind="callback") as world:
        spec = {"driver": "callback", "prepare_url": "http://h/a", "reclaim_url": "http://h/b"}
        with pytest.raises(SandboxRefusedError, match="http://h/a is not listed"):
            await world.asks("p", spec=spec)
        assert not world.programs.opened


async def test_answer_of_a_service_is_in_the_log_alone() -> None:
    """Clients are told the kind of failure: in reports and stories, of preparations and of reclaims."""
    error = SandboxConflictError("the sandbox service has a conflict")
    error.for_operators = "10.0.0.1 answered 409: inner secret"
    async with running() as world:
        world.driver.errors = [error]
        with structlog.testing.capture_logs() as logs:
            await world.has_ready("p")
            world.driver.reclaim_error = error
            world.releases("p")
            await world.until(lambda: world.manager.all()[0]["why"])
        world.driver.reclaim_error = None
        await world.until(lambda: world.stage_of("s1") == "gone")
        assert "secret" not in json.dumps([world.manager.all(), world.programs.story], default=str)
    told = [each["event"] for each in logs if "inner secret" in str(each.get("why"))]
    assert set(told) == {"sandbox_failed", "sandbox_not_reclaimed"}


async def test_several_requests_are_carried_out_together_or_not_at_all() -> None:
    async with running() as world:
        await world.asks("p", template="plain", share="k")
        both = [{"template": "plain"}, {"template": "slow", "share": "k"}]
        with pytest.raises(SandboxRefusedError, match="another template"):
            await world.manager.request("q", json.dumps(both).encode())
        assert len(world.manager.table.sandboxes) == 1
        assert "q" not in world.programs.opened


async def test_only_its_own_programs_can_let_a_sandbox_go() -> None:
    async with running() as world:
        await world.has_ready("p")
        assert not world.manager.reclaim("q", "s1")
        assert world.manager.reclaim("p", "s1")
        assert not world.manager.reclaim("p", "s1")
        await world.until(lambda: not world.driver.there)
        assert Stage.GONE.value == world.stage_of("s1")


async def test_a_class_gives_a_sandbox_at_the_first_sight_alone() -> None:
    """The next turn of a program that released it gives none; a program that was idle or released gets one again."""
    async with running(settings=replace(FAST, idle_limit_s=60.0)) as world:
        for again in range(3):
            world.manager.program_seen("p", "coder")
            await world.until(lambda: world.driver.there)
            if again == 0:
                assert world.manager.reclaim("p", world.manager.of_program("p")[0]["sandbox_id"])
                world.manager.program_seen("p", "coder")
                assert not world.manager.of_program("p")
                world.releases("p")
            elif again == 1:
                world.programs.idle_s["p"] = 61.0
            await world.until(lambda again=again: again == 2 or not world.driver.there)
            world.programs.idle_s.clear()


async def test_a_warm_template_that_cannot_be_made_is_not_tried_without_pause() -> None:
    templates = {"t": Template(image="none", warm_count=1)}
    async with running(templates=templates, caps=Caps(backoff_s=0.01)) as world:
        world.driver.errors = [SandboxImageError("no image")] * 1000
        await asyncio.sleep(0.2)
        assert len(world.driver.orders) == 1


async def test_a_running_program_uses_a_warm_sandbox_at_once() -> None:
    waited_s: list[float] = []
    templates = {"t": Template(image="i", warm_count=1)}
    async with running(templates=templates) as world:
        world.manager.hear_times(lambda _: None, waited_s.append)
        await world.until(lambda: world.stage_of("s1") == "ready")
        world.admits("p")
        assert (await world.asks("p", template="t"))["stage"] == "in_use"
        assert (waited_s, world.programs.story) == ([0.0], [("p", "ready", "s1")])


async def test_waiting_time_of_a_running_program_counts_from_its_request() -> None:
    """It is neither zero, nor the time since it was admitted with a sandbox that failed."""
    waited_s: list[float] = []
    async with running() as world:
        world.manager.hear_times(lambda _: None, waited_s.append)
        world.driver.errors = [SandboxImageError("none")]
        await world.asks("p")
        world.admits("p")
        await world.until(lambda: world.stage_of("s1") == "failed")
        await asyncio.sleep(0.3)
        world.driver.hold = asyncio.Event()
        began_s = monotonic()
        await world.asks("p")
        await asyncio.sleep(0.05)
        world.driver.hold.set()
        await world.until(lambda: waited_s)
        assert 0.04 < waited_s[0] < monotonic() - began_s


async def test_a_look_that_is_late_takes_nothing_new_for_dead() -> None:
    async with running() as world:
        world.driver.look_hold = asyncio.Event()
        await world.until(lambda: world.driver.looking)
        await world.has_ready("p")
        world.driver.look_hold.set()
        world.driver.look_hold = None
        await asyncio.sleep(0.1)
        assert world.stage_of("s1") == "ready"
        assert world.programs.story == [("p", "ready", "s1")]


async def test_a_look_that_is_late_brings_no_program_back() -> None:
    async with running() as world:
        world.driver.put("given", given_labels("p"))
        await world.until(lambda: world.manager.of_program("p"))
        world.driver.look_hold = asyncio.Event()
        await world.until(lambda: world.driver.looking)
        world.releases("p")
        world.programs.opened.clear()
        await world.until(lambda: not world.manager.table.sandboxes)
        world.driver.look_hold.set()
        world.driver.look_hold = None
        await asyncio.sleep(0.1)
        assert not world.programs.opened
        assert not world.manager.table.sandboxes


async def test_leftover_of_a_lost_preparation_is_removed() -> None:
    """It belongs to this run, but to no known sandbox; known ones stay."""
    async with running() as world:
        await world.has_ready("p")
        world.driver.hold = asyncio.Event()
        await world.asks("q")
        await world.until(lambda: world.driver.preparing_count)
        world.driver.put("left", labels_of(OWNER, "s9"))
        world.driver.put("begun", labels_of(OWNER, "s2"))
        await world.until(lambda: "left" in world.driver.reclaimed)
        await asyncio.sleep(0.1)
        assert (world.driver.reclaimed, world.manager.orphan_count) == (["left"], 0)


async def test_a_sandbox_whose_time_is_over_is_told_of_though_no_engine_says_so() -> None:
    """An unused one is made again; a given one has no known time."""
    templates = {"short": Template(image="i", ttl_s=1.5), "plain": Template(image="plain")}
    async with running(templates=templates) as world:
        await world.has_ready("used", template="short")
        world.admits("used")
        await world.has_ready("unused", template="short")
        await world.has_ready("other", template="plain")
        world.driver.put("given", given_labels("q"))
        await world.until(lambda: world.stage_of("s1") == "failed")
        assert ("used", "failed", "its time to live is over") in world.programs.story
        await world.until(lambda: {"s1", "s2"} <= set(world.driver.reclaimed))
        await world.until(lambda: world.stage_of("s2") == "ready")
        assert {"s3", "given"} <= set(world.driver.there)


async def test_a_given_sandbox_that_is_let_go_goes_with_the_shutdown() -> None:
    """It has no time to live of its own; those of live programs stay."""
    async with running(settings=replace(FAST, reclaim_on_shutdown=False)) as world:
        world.driver.put("mine", given_labels("p"))
        await world.has_ready("q")
        await world.until(lambda: world.manager.of_program("p"))
        world.releases("p")
        driver = world.driver
    assert set(driver.there) == {"s1"}


async def test_the_feed_tells_of_one_that_went_before_it_was_begun() -> None:
    async with running(caps=Caps(sandbox_count=1)) as world:
        await world.has_ready("other")
        async with world.manager.feed("p") as queue, world.manager.feed("q") as nothing:
            await world.asks("p")
            world.releases("p")
            await world.asks("p")
            world.manager.reclaim("p", "s3")
            told = [queue.get_nowait() for _ in range(queue.qsize())]
            assert [report["stage"] for report in told if report] == ["requested", "gone"] * 2
            assert nothing.empty()


async def test_many_changes_are_planned_together() -> None:
    """Each plan looks at all sandboxes."""
    async with running(settings=replace(FAST, plan_pause_s=0.1, plan_interval_s=5.0)) as world:
        looks_count = 0

        class Counted(dict[str, float]):
            def values(self) -> Any:
                nonlocal looks_count
                looks_count += 1
                return super().values()

        began_s = monotonic()
        world.programs.holds_s = Counted()
        for number in range(50):
            await world.asks(f"p{number}")
            await asyncio.sleep(0.001)
        assert looks_count < (monotonic() - began_s) / 0.1 + 2


async def test_an_engine_that_hangs_keeps_no_other_from_reclaiming() -> None:
    class Elsewhere(FakeDriver):
        kind = "kubernetes"

    hangs, answers = Elsewhere(OWNER), FakeDriver(OWNER)
    hangs.reclaim_hold = asyncio.Event()
    for number in range(2):
        hangs.put(f"h{number}", labels_of(Owner("here", "run-1"), f"h{number}"))
    manager = Manager(
        OWNER,
        {"kubernetes": hangs, "docker": answers},
        FakePrograms(),
        caps=Caps(),
        templates={},
        new_id=lambda: "s1",
        new_name=lambda: "s1",
        settings=replace(FAST, reclaims_count=1, reclaim_timeout_s=60.0),
    )
    task = asyncio.create_task(manager.run())
    try:
        async with asyncio.timeout(5):
            while not hangs.reclaim_hold_count:
                await asyncio.sleep(0.002)
            answers.put("late", given_labels("p"))
            while not manager.of_program("p"):
                await asyncio.sleep(0.002)
            manager.observe(Tick(0.0), [Release("p", 1, Reason.RELEASED)])
            while answers.there:
                await asyncio.sleep(0.002)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_container_that_turns_name_goes_with_its_program() -> None:
    """Each turn names it again, and it is looked up once; one that is not there yet is looked up again."""
    async with running() as world:
        world.driver.put("box", {})
        for _ in range(3):
            world.manager.sandboxes_named("p", ["box", "box", "nowhere"])
        await world.until(lambda: world.manager.of_program("p"))
        (report,) = world.manager.of_program("p")
        assert (report["handle"], report["given"], report["stage"]) == ("box", True, "in_use")
        assert world.programs.opened == ["p"]
        world.driver.put("nowhere", {})
        world.manager.sandboxes_named("p", ["box", "nowhere"])
        await world.until(lambda: len(world.manager.of_program("p")) == 2)
        world.releases("p")
        await world.until(lambda: sorted(world.driver.reclaimed) == ["box", "nowhere"])


async def test_a_container_whose_program_ended_while_it_was_looked_up_is_removed() -> None:
    """The program does not begin again by it."""
    async with running() as world:
        world.driver.put("box", {})
        world.manager.sandboxes_named("p", ["box"])
        world.releases("p")
        await world.until(lambda: world.driver.reclaimed == ["box"])
        assert world.manager.of_program("p") == []
        assert world.programs.opened == ["p"]


async def test_containers_of_clients_that_are_not_trusted_are_ignored_and_said_once() -> None:
    """The turn goes on."""
    async with running(settings=replace(FAST, takes_specs=False)) as world:
        world.driver.put("box", {})
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                world.manager.sandboxes_named("p", ["box"])
        assert [each["event"] for each in logs] == ["docker_ids_ignored"]
        assert (world.programs.opened, world.manager.all()) == ([], [])


async def test_an_unexpected_error_of_a_named_container_stops_nothing() -> None:
    """The manager goes on."""
    async with running() as world:

        async def adopt(name: str, reclaim_url: str) -> Place:
            raise ZeroDivisionError

        world.driver.adopt = adopt  # type: ignore[method-assign]
        world.manager.sandboxes_named("p", ["box"])
        assert (await world.has_ready("q"))["stage"] == "ready"


# --- what stands unused goes to who can use it ------------------------------------------------------------------------


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("template", ["plain", "slow"])
async def test_a_program_that_was_let_in_does_not_wait_for_sandboxes_of_those_that_were_not(
    template: str, *, is_paused: bool
) -> None:
    """They would wait for it, and it for them, for ever. At the engine the name of what it gets stays."""
    async with running(caps=Caps(sandbox_count=1)) as world:
        await world.has_ready("held")
        async with world.manager.feed() as changes:
            world.programs.using.add("runs")
            world.programs.running |= set() if is_paused else {"runs"}
            report = await world.asks("runs", template=template)
            await world.until(lambda: world.stage_of(report["sandbox_id"]) == "in_use")
            (mine,) = world.manager.of_program("runs")
            (its,) = world.manager.of_program("held")
            assert (mine["sandbox_id"], mine["handle"]) == ("s2", "s1" if template == "plain" else "s2")
            assert (its["sandbox_id"], its["stage"], its["handle"]) == ("s1", "requested", None)
            assert [*world.driver.there] == [mine["handle"]]
            said = [each and (each["sandbox_id"], each["stage"]) for each in (changes.get_nowait() for _ in range(3))]
            assert ("s1", "requested") in said
        assert ("runs", "ready", "s2") in world.programs.story
        world.programs.running.discard("runs")
        world.programs.using.clear()
        world.releases("runs")
        await world.until(lambda: world.stage_of("s1") == "ready")
        assert len(world.driver.there) == 1
        looks_count = world.driver.find_count
        await world.until(lambda: world.driver.find_count > looks_count + 2)
        assert world.stage_of("s1") == "ready", "it is no leftover"


@pytest.mark.parametrize("told", ["its client", "a stream", "a command"])
async def test_a_sandbox_of_which_a_client_was_told_is_not_taken(told: str) -> None:
    """What an operator reads says nothing."""
    async with running(caps=Caps(sandbox_count=1)) as world:
        if told == "a stream":
            async with world.manager.feed("held"):
                await world.has_ready("held")
        else:
            await world.has_ready("held")
        if told == "its client":
            world.manager.of_program("held")
        elif told == "a command":
            world.driver.runs("s1", "e-1", "cp")
            await world.until(lambda: world.manager.table.sandboxes["s1"].told)
        world.programs.using.add("runs")
        await world.asks("runs")
        await asyncio.sleep(10 * FAST.plan_interval_s)
        assert (world.stage_of("s1"), world.stage_of("s2")) == ("ready", "requested")


async def test_a_paused_program_that_uses_tools_goes_before_those_that_asked_earlier() -> None:
    """Its agent waits for nothing but its sandbox, and no turn of it says so."""
    async with running(caps=Caps(sandbox_count=1)) as world:
        await world.has_ready("first")
        world.admits("first")
        world.programs.holds_s = {"held": 3.0}
        await world.asks("held")
        await world.asks("paused")
        world.admits("paused")
        world.programs.running.discard("paused")
        world.programs.using.add("paused")
        world.releases("first")
        await world.until(lambda: world.stage_of("s3") == "in_use")
        assert world.stage_of("s2") == "requested"


async def test_a_program_that_is_held_gets_a_warm_one_that_others_may_need_first() -> None:
    """The answer to its request does not tell where it is: it was told of nothing yet."""
    templates = {"t": Template(image="i", warm_count=1)}
    async with running(templates=templates, caps=Caps(sandbox_count=1)) as world:
        await world.until(lambda: world.stage_of("s1") == "ready")
        assert (await world.asks("held", template="t"))["handle"] is None
        await world.until(lambda: world.stage_of("s2") == "ready")
        assert world.manager.table.sandboxes["s2"].name == "s1"
        world.programs.running.add("runs")
        await world.asks("runs", template="t")
        await world.until(lambda: world.stage_of("s3") == "in_use")
        assert world.manager.table.sandboxes["s3"].name == "s1"


async def test_a_sandbox_that_may_go_to_another_program_is_labelled_with_none() -> None:
    """Name and labels cannot be changed, so they would name the wrong one's. One with its program's network stays."""
    templates = {"plain": Template(image="i"), "networked": Template(image="i", network="own")}
    async with running(templates=templates, name_letter="n") as world:
        reports = [await world.has_ready("p", template=name) for name in templates]
        assert [each["sandbox_id"] for each in reports] == ["s1", "s2"]
        assert [(each.sandbox_id, each.program_id) for each in world.driver.orders] == [("n1", ""), ("s2", "p")]
        assert not {"p", "s1"} & set(world.driver.orders[0].labels.values())


# --- suspending -------------------------------------------------------------------------------------------------------

STANDS_STILL = {"still": Template(image="i", suspend=True), "plain": Template(image="plain")}


@asynccontextmanager
async def used(template: str = "still") -> AsyncIterator[tuple[World, str]]:
    """Run a manager with a program that uses a sandbox, and waits for nothing."""
    async with running(templates=STANDS_STILL) as world:
        handle = (await world.has_ready("p", template=template))["handle"]
        world.admits("p")
        assert world.manager.of_program("p")[0]["stage"] == "in_use"
        yield world, handle


async def test_a_sandbox_stands_still_while_its_program_waits_and_wakes_ahead_of_its_turn() -> None:
    """Neither a short wait nor a running tool suspends it, and each change is reported."""
    async with used() as (world, handle):
        (sandbox,) = world.manager.table
        world.programs.holds_s = {"p": SUSPEND_OVER_S}
        await asyncio.sleep(5 * FAST.plan_interval_s)
        assert world.driver.suspensions == []
        async with world.manager.feed("p") as changes:
            world.programs.holds_s = {"p": SUSPEND_OVER_S + 1}
            await world.until(lambda: sandbox.suspended and handle in world.driver.suspended)
            report = await changes.get()
            assert report is not None
            assert report["suspended"]
        world.programs.holds_s = {"p": THAW_AHEAD_S + 0.5, "sooner": THAW_AHEAD_S}
        await asyncio.sleep(5 * FAST.plan_interval_s)
        assert handle in world.driver.suspended
        world.programs.holds_s = {"p": THAW_AHEAD_S, "sooner": THAW_AHEAD_S / 2}
        await world.until(lambda: not world.manager.of_program("p")[0]["suspended"])
        assert world.driver.suspended == set()
        assert world.driver.suspensions == [("suspend", handle), ("thaw", handle)]


async def test_the_sandbox_of_the_next_turn_wakes_though_that_comes_later_than_soon() -> None:
    """Where turns come seconds apart, none would be foreseen sooner. One that is far off stands still, though next."""
    async with used() as (world, handle):
        world.programs.holds_s = {"sooner": SUSPEND_OVER_S - 1, "p": 2 * SUSPEND_OVER_S}
        await world.until(lambda: handle in world.driver.suspended)
        world.programs.holds_s = {"p": SUSPEND_OVER_S + 1}
        await asyncio.sleep(5 * FAST.plan_interval_s)
        assert handle in world.driver.suspended
        world.programs.holds_s = {"p": SUSPEND_OVER_S - 1, "later": 2 * SUSPEND_OVER_S}
        await world.until(lambda: world.driver.suspended == set())


async def test_a_sandbox_that_its_agent_knows_stands_still_before_the_first_turn_too() -> None:
    """One that no agent was told of may go to another program, and stays awake."""
    async with running(templates=STANDS_STILL) as world:
        known, unknown = [(await world.has_ready(name, template="still"))["handle"] for name in ("p", "q")]
        assert world.manager.of_program("p")[0]["stage"] == "ready"
        world.programs.holds_s = {"p": 60.0, "q": 60.0}
        await world.until(lambda: world.driver.suspended == {known})
        await asyncio.sleep(5 * FAST.plan_interval_s)
        assert world.driver.suspensions == [("suspend", known)]
        world.programs.holds_s = {"q": 60.0}
        world.admits("p")
        await world.until(lambda: world.driver.suspended == set())
        assert world.stage_of("s1") == "in_use"
        assert unknown in world.driver.there


async def test_a_sandbox_that_died_while_it_stood_still_is_made_anew_and_awake() -> None:
    async with running(templates=STANDS_STILL) as world:
        handle = (await world.has_ready("p", template="still"))["handle"]
        world.manager.of_program("p")
        world.programs.holds_s = {"p": 60.0}
        await world.until(lambda: world.driver.suspended == {handle})
        world.programs.holds_s = {}
        world.manager.ended("docker", handle, "killed")
        assert not world.manager.of_program("p")[0]["suspended"]
        await world.until(lambda: world.stage_of("s1") == "ready")
        assert not world.manager.of_program("p")[0]["suspended"]


async def test_a_turn_that_is_let_in_before_it_was_expected_wakes_the_sandbox() -> None:
    """Also one that is about to be suspended."""
    async with used() as (world, handle):
        (sandbox,) = world.manager.table
        world.programs.holds_s = {"p": 60.0}
        await world.until(lambda: sandbox.suspended)
        world.programs.holds_s = {}
        world.admits("p")
        assert not sandbox.wants_suspension
        await world.until(lambda: not sandbox.suspended)
        assert world.driver.suspensions[-1] == ("thaw", handle)


@pytest.mark.parametrize("why", ["a command runs", "another uses it", "its template does not say so"])
async def test_a_sandbox_in_which_something_may_happen_is_not_suspended(why: str) -> None:
    async with used("plain" if why == "its template does not say so" else "still") as (world, handle):
        if why == "a command runs":
            world.driver.runs(handle, "e-1", "pytest")
            await world.until(lambda: world.programs.tools)
        elif why == "another uses it":
            world.manager.table.sandboxes["s1"].program_ids["q"] = None
        world.programs.holds_s = {"p": 60.0, "q": 60.0}
        await asyncio.sleep(5 * FAST.plan_interval_s)
        assert world.driver.suspensions == []
        world.manager.table.sandboxes["s1"].program_ids.pop("q", None)


async def test_sandbox_that_could_not_be_suspended_is_woken_and_stays_awake() -> None:
    """Nobody knows whether the engine suspended it after all; waking is tried until it works."""
    async with used() as (world, handle):
        world.driver.suspend_error = world.driver.thaw_error = SandboxEngineError("no answer")
        world.programs.holds_s = {"p": 60.0}
        await world.until(lambda: world.driver.suspensions.count(("thaw", handle)) >= 2)
        assert handle in world.driver.suspended
        world.driver.thaw_error = None
        await world.until(lambda: not world.manager.of_program("p")[0]["suspended"])
        assert world.driver.suspended == set()
        await asyncio.sleep(5 * FAST.plan_interval_s)
        assert world.driver.suspensions.count(("suspend", handle)) == 1


async def test_a_suspended_sandbox_goes_with_its_program() -> None:
    async with used() as (world, handle):
        world.programs.holds_s = {"p": 60.0}
        await world.until(lambda: handle in world.driver.suspended)
        world.releases("p")
        await world.until(lambda: world.driver.reclaimed == [handle])
