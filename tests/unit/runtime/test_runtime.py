"""The runtime: leases, waiting, cancellation at every moment, and the order of a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest
import structlog.testing
from msgspec.structs import replace

from tests.builders import asked
from thunderagent.errors import (
    NoReplicaError,
    ProgramReleasedError,
    ShuttingDownError,
    StandingByError,
    TurnAbortedError,
)
from thunderagent.leases import TurnHint
from thunderagent.leases.open_lease import OpenLease
from thunderagent.programs.invariants import check
from thunderagent.programs.messages import (
    Decision,
    Event,
    Grant,
    Hold,
    Reason,
    Release,
    ReplicaPolled,
    Restore,
    SchedulerSettings,
    TurnAsk,
    TurnEnd,
)
from thunderagent.programs.policies.baselines.cap import Cap
from thunderagent.programs.policies.papers.thunderagent import ThunderAgent
from thunderagent.programs.policy import Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime import Runtime, RuntimeSettings
from thunderagent.runtime.event_log import EventLogWriter, read_events


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def running(
    policy: Policy | None = None, *, grace_s: float = 0.0, tick_s: float = 1.0, replicas: tuple[str, ...] = ("r0",)
) -> AsyncIterator[tuple[Runtime, Clock]]:
    """A runtime that admits one program at a time; at its end nothing may be left in it."""
    clock = Clock()
    scheduler = Scheduler(policy or Cap(n=1), SchedulerSettings(no_replica_limit_s=10.0))
    runtime = Runtime(scheduler, RuntimeSettings(grace_s=grace_s, tick_s=tick_s), clock=clock)
    for replica_id in replicas:
        runtime.dispatch(ReplicaPolled(runtime.now_s(), replica_id, 1000))
        runtime.replica_up(replica_id)
    yield runtime, clock
    check(scheduler)
    assert runtime.leases_count == runtime.held_count == scheduler.ledger.waiting_count == 0
    assert not scheduler.turns


async def held_lease(runtime: Runtime, program_id: str | None, **more: int | str) -> asyncio.Task[OpenLease]:
    """A task that waits for its lease."""
    before = runtime.held_count
    task = asyncio.ensure_future(runtime.lease(asked(runtime, program_id, **more)))
    await asyncio.sleep(0)
    assert runtime.held_count == before + 1
    return task


# --- Granted


async def test_a_turn_that_runs_already_is_counted_where_it_runs() -> None:
    """It counts with or without room; its end is as any other. If nothing is granted there, only its usage counts."""
    async with running(replicas=("r0", "r1")) as (runtime, _):
        with await runtime.lease(asked(runtime, "a")) as lease:
            other_id = "r1" if lease.granted.replica_id == "r0" else "r0"
            for program_id in ("b", "c"):  # one more than the policy admits
                ask = asked(runtime, program_id, prompt_bytes=4000)
                assert runtime.adopt(ask, other_id)
                assert not runtime.adopt(replace(ask, turn_id=runtime.new_turn_id()), "r9")
                assert runtime.turns_count(other_id) == 1
                runtime.ended(TurnEnd(ask.turn_id, program_id, 1, "finished", 100, 10))
                assert runtime.home_of(program_id) == other_id
            assert runtime.leases_count == 1
        runtime.count_end(TurnEnd(runtime.new_turn_id(), "d", 1, "finished", 5, 2))
        assert (runtime.prompt_tokens_total, runtime.output_tokens_total) == (205, 22)
        assert runtime.outcome_counts == {"finished": 3, "abandoned": 1}


async def test_a_lease_that_fits_is_granted_without_a_single_await() -> None:
    """The coroutine ends in its first step: it never yields to the loop."""
    async with running() as (runtime, _):
        with pytest.raises(StopIteration) as granted:
            runtime.lease(asked(runtime, "a")).send(None)
        lease = granted.value.value
        assert (lease.granted.replica_id, lease.granted.held_s) == ("r0", 0.0)
        lease.finished(10, 5, 0)


async def test_the_scheduler_hears_what_a_caller_knows_of_a_turn(tmp_path: Path) -> None:
    """It is told prompt and group at arrival, and the tool at the end."""
    writer = EventLogWriter(tmp_path / "log", policy="cap", policy_settings={"n": 1}, settings=SchedulerSettings())
    runtime = Runtime(Scheduler(Cap(n=1)), event_log=writer, clock=Clock())
    runtime.dispatch(ReplicaPolled(runtime.now_s(), "r0", 1000, 0.5, 10, 2))
    runtime.replica_up("r0")
    lease = await runtime.lease(asked(runtime, "a", prefix=((5, 100), (6, 200)), group_id="g"))
    lease.finished(10, 5, 0, "bash:ls")
    writer.close()
    with (tmp_path / "log").open("rb") as lines:
        polled, _, arrived, finished = read_events(lines)
    assert polled == ReplicaPolled(100.0, "r0", 1000, 0.5, 10, 2)
    assert arrived == TurnAsk(now_s=100.0, turn_id=1, program_id="a", prefix=((5, 100), (6, 200)), group_id="g")
    assert finished == TurnEnd(
        1, "a", 1, "finished", now_s=100.0, prompt_tokens=10, output_tokens=5, cached_tokens=0, tool="bash:ls"
    )


async def test_a_held_lease_is_granted_by_the_event_that_makes_room() -> None:
    """The lease says how long it was held."""
    async with running() as (runtime, clock):
        first = await runtime.lease(asked(runtime, "a"))
        waiting = await held_lease(runtime, "b")
        first.finished(10)
        await asyncio.sleep(0)
        assert not waiting.done()
        clock.now_s += 7.0
        runtime.release("a")
        lease = await waiting
        assert lease.granted.held_s == pytest.approx(7.0)
        lease.finished()


async def test_a_turn_that_is_let_in_when_its_own_hint_is_said_hears_of_it() -> None:
    """This is right after its arrival: by then its client may be about to give up."""
    async with running() as (runtime, clock):
        first = await runtime.lease(asked(runtime, "a"))

        def passes(_event: Event, _decisions: Sequence[Decision]) -> None:
            clock.now_s += 5.0

        runtime.observe(passes, TurnAsk)
        async with asyncio.timeout(5):
            (await runtime.lease(asked(runtime, "b", patience_s=6.0, hint=TurnHint(4.0)))).finished()
        first.finished()


async def test_a_turn_that_waited_for_its_pool_has_so_much_less_patience() -> None:
    """It waited until replicas reported their models, and its lease counts that as a hold."""
    clock = Clock()
    runtime = Runtime(Scheduler(Cap(n=1)), clock=clock, make_scheduler=lambda: Scheduler(Cap(n=1)))
    runtime.replica_at("r0", "http://r0")
    arrived: list[float] = []

    def hears(event: Event, _decisions: Sequence[Decision]) -> None:
        assert isinstance(event, TurnAsk)
        arrived.append(event.patience_s)

    runtime.observe(hears, TurnAsk)
    leasing = asyncio.ensure_future(runtime.lease(asked(runtime, "a", patience_s=60.0, model="m")))
    await asyncio.sleep(0)
    assert not arrived
    clock.now_s += 4.0
    runtime.served.listed("r0", ("m",))
    runtime.replica_up("r0", 1000)
    runtime.served.replica_heard("r0")
    lease = await leasing
    lease.finished()
    assert (arrived, lease.granted.held_s) == ([56.0], 4.0)


async def test_a_turn_that_waits_after_its_pool_was_found_was_held_all_the_time() -> None:
    """A hold begins when the turn comes."""
    clock = Clock()
    runtime = Runtime(Scheduler(Cap(n=1)), clock=clock, make_scheduler=lambda: Scheduler(Cap(n=1)))
    runtime.replica_at("r0", "http://r0")
    leasing = asyncio.ensure_future(runtime.lease(asked(runtime, "a", model="m")))
    await asyncio.sleep(0)
    clock.now_s += 4.0
    runtime.served.listed("r0", ("m",))
    runtime.served.replica_heard("r0")
    async with asyncio.timeout(5):
        while not runtime.held_count:
            await asyncio.sleep(0)
    clock.now_s += 3.0
    runtime.replica_up("r0", 1000)
    lease = await leasing
    lease.finished()
    assert lease.granted.held_s == 7.0


async def test_an_abort_of_one_replica_ends_no_wait_of_another_model() -> None:
    """A turn whose program was nowhere yet may run on any replica of its pool, and on no other."""
    runtime = Runtime(Scheduler(Cap(n=1)), clock=Clock(), make_scheduler=lambda: Scheduler(Cap(n=1)))
    for replica_id, model in (("r0", "m"), ("r1", "n")):
        runtime.served.listed(replica_id, (model,))
        runtime.replica_up(replica_id, 1000)
    runtime.suspend_grants("sync")
    turns = {model: await held_lease(runtime, f"of-{model}", model=model, abortable=True) for model in "mn"}
    assert runtime.abort_held("r1") == 1
    with pytest.raises(TurnAbortedError):
        await turns["n"]
    runtime.continue_grants("sync")
    (await turns["m"]).finished()


async def test_a_lease_is_ended_exactly_once_by_the_first_word() -> None:
    """Later words, and the end of its block, change nothing."""
    async with running() as (runtime, _):
        with await runtime.lease(asked(runtime, "a")) as lease:
            assert repr(lease) == "<Lease of turn 1 on r0>"
            lease.started()
            lease.progressed(3)
            lease.finished(100, 20, 0)
            lease.failed()
            lease.abandoned()
            lease.finished(999, 999, 999)
        assert runtime.outcome_counts == {"finished": 1}
        assert runtime.scheduler.programs.get("a").context_tokens == 120
        assert repr(lease) == "<Lease of turn 1 on r0, ended>"


async def test_a_lease_whose_block_ends_without_a_word_is_abandoned() -> None:
    """A handler that raises gives its lease back, and its error continues."""
    async with running() as (runtime, _):
        with pytest.raises(ZeroDivisionError), await runtime.lease(asked(runtime, "a")):
            raise ZeroDivisionError
        assert runtime.outcome_counts == {"abandoned": 1}


@pytest.mark.parametrize(("ending", "outcome"), [("failed", "failed"), ("abandoned", "abandoned")])
async def test_failed_and_abandoned_leases_teach_nothing(ending: str, outcome: str) -> None:
    """Each kind of end is counted under its own name."""
    async with running() as (runtime, _):
        lease = await runtime.lease(asked(runtime, "a", prompt_bytes=400))
        getattr(lease, ending)()
        assert runtime.outcome_counts == {outcome: 1}
        assert runtime.scheduler.programs.get("a").context_tokens == 0


# --- Cancelled


async def test_cancelling_a_wait_takes_the_turn_out_of_the_queue() -> None:
    """The next in the queue gets its place."""
    async with running() as (runtime, _):
        first = await runtime.lease(asked(runtime, "a"))
        leaving = await held_lease(runtime, "b")
        waiting = await held_lease(runtime, "c")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert runtime.held_count == 1
        first.finished()
        runtime.release("a")
        (await waiting).finished()


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_a_wait_cancelled_at_the_very_moment_of_its_grant_gives_the_lease_back(cancelled_first: bool) -> None:
    """Grant and cancellation fall between two steps of the loop, in either order: the place goes to the next."""
    async with running() as (runtime, _):
        first = await runtime.lease(asked(runtime, "a"))
        leaving = await held_lease(runtime, "b")
        waiting = await held_lease(runtime, "c")
        first.finished()
        if cancelled_first:
            leaving.cancel()
        runtime.release("a")
        if not cancelled_first:
            leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert runtime.scheduler.programs.get("b").in_flight == {}
        assert not waiting.done()
        runtime.release("b")
        (await waiting).finished()


async def test_a_handler_cancelled_while_it_holds_its_lease_gives_it_back() -> None:
    """This happens when a client leaves in the middle of a stream."""

    async def handler(runtime: Runtime) -> None:
        with await runtime.lease(asked(runtime, "a")):
            await asyncio.sleep(3600)

    async with running() as (runtime, _):
        task = asyncio.ensure_future(handler(runtime))
        await asyncio.sleep(0)
        assert runtime.leases_count == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runtime.outcome_counts == {"abandoned": 1}


# --- Refused


async def test_a_turn_whose_program_is_released_while_it_is_held_is_refused() -> None:
    """It gets 410, with the program's name; nothing was forwarded."""
    async with running() as (runtime, _):
        first = await runtime.lease(asked(runtime, "a"))
        waiting = await held_lease(runtime, "b")
        assert runtime.release("b")
        with pytest.raises(ProgramReleasedError, match="program 'b' was released while this turn waited"):
            await waiting
        assert runtime.outcome_counts == {"rejected": 1}
        first.finished()


async def test_a_turn_that_no_replica_can_serve_is_refused_after_the_limit() -> None:
    """It gets 503 with Retry-After; this holds for programs and for anonymous turns."""
    async with running(replicas=()) as (runtime, clock):
        waiting = [await held_lease(runtime, "a"), await held_lease(runtime, None)]
        ticking = asyncio.ensure_future(runtime.run())
        runtime.replica_down("r0")
        clock.now_s += 11.0
        for task in waiting:
            with pytest.raises(NoReplicaError) as refused:
                async with asyncio.timeout(5):
                    await task
            assert refused.value.retry_after_s == 10
        ticking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ticking


async def test_release_says_whether_there_was_such_a_program() -> None:
    """It is idempotent; another generation is another program."""
    async with running() as (runtime, _):
        (await runtime.lease(asked(runtime, "a"))).finished()
        generation = runtime.scheduler.programs.get("a").generation
        assert not runtime.release("a", generation + 1)
        assert runtime.release("a", generation)
        assert not runtime.release("a")
        assert not runtime.release("never-was")


async def test_programs_that_are_released_together_are_no_longer_hopeless() -> None:
    """This is as in a release of one; only those that lived are returned."""
    async with running(replicas=("r0", "r1")) as (runtime, _):
        (await runtime.lease(asked(runtime, "a"))).finished()
        runtime.scheduler.refused_ids["b"] = None
        assert runtime.release_together(["b", "a", "never-was"]) == ["a"]
        assert not runtime.scheduler.refused_ids
        runtime.scheduler.refused_ids["b"] = None
        assert runtime.release_together(["b"]) == []
        assert not runtime.scheduler.refused_ids


async def test_a_turn_that_comes_to_a_standby_leaves_nothing_there() -> None:
    """Its pool is not looked for."""
    runtime = Runtime(Scheduler(Cap(n=1)), make_scheduler=lambda: Scheduler(Cap(n=1)))
    for replica_id in ("r0", "r1"):
        runtime.served.listed(replica_id, (f"model of {replica_id}",))
    runtime.stands_by = True
    with pytest.raises(StandingByError):
        await runtime.lease(asked(runtime, "a", model="model of r1"))
    assert not runtime.pools._to_come


# --- Shut down


async def test_a_shutdown_refuses_who_waits_and_who_comes_and_lets_turns_in_flight_end() -> None:
    """It gives no new lease and refuses held ones; then the last turn's end ends the wait, not the grace period."""
    async with running(grace_s=60.0) as (runtime, _):
        lease = await runtime.lease(asked(runtime, "a"))
        waiting = await held_lease(runtime, "b")
        closing = asyncio.ensure_future(runtime.close())
        with pytest.raises(ShuttingDownError):
            await waiting
        with pytest.raises(ShuttingDownError):
            await runtime.lease(asked(runtime, "a"))
        assert runtime.closing
        await asyncio.sleep(0.01)
        assert not closing.done()
        lease.finished()
        async with asyncio.timeout(5):
            await closing


async def test_the_grace_period_bounds_a_shutdown() -> None:
    """A turn that does not end is cut off afterwards."""
    async with running(grace_s=0.02) as (runtime, _):
        lease = await runtime.lease(asked(runtime, "a"))
        async with asyncio.timeout(5):
            await runtime.close()
        assert runtime.leases_count == 1
        lease.abandoned()


async def test_a_turn_that_was_granted_just_before_a_shutdown_is_waited_for() -> None:
    """Its grant is on its way when the shutdown begins in the same step of the loop: it counts as in flight."""

    async def turn(waiting: asyncio.Task[OpenLease]) -> None:
        with await waiting as lease:
            await asyncio.sleep(0.02)
            lease.finished()

    async with running(grace_s=60.0) as (runtime, _):
        first = await runtime.lease(asked(runtime, "a"))
        granted_last = asyncio.ensure_future(turn(await held_lease(runtime, "b")))
        first.finished()
        runtime.release("a")
        async with asyncio.timeout(5):
            await runtime.close()
        assert runtime.outcome_counts == {"finished": 2}
        await granted_last


async def test_a_shutdown_without_turns_takes_no_time() -> None:
    """The grace period is an upper bound."""
    async with running(grace_s=60.0) as (runtime, _):
        async with asyncio.timeout(5):
            await runtime.close()


# --- Time, and what is counted


async def test_runtime_ticks_as_often_as_the_policy_needs() -> None:
    """A policy that checks every 10 ms is asked that often, whatever period is configured."""
    policy = ThunderAgent(reserve_tokens=0, delta_s=0.01, half_life_s=inf)
    async with running(policy, tick_s=60.0) as (runtime, clock):
        ticking = asyncio.ensure_future(runtime.run())
        (await runtime.lease(asked(runtime, "a", prompt_bytes=3200))).finished(800, 0)
        waiting = await held_lease(runtime, "b", prompt_bytes=3200)
        runtime.release("a")
        clock.now_s += 0.02
        async with asyncio.timeout(5):
            (await waiting).finished(800, 0)
        ticking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ticking


async def test_decisions_are_counted_by_kind_and_reason() -> None:
    """The metrics explain a run."""
    async with running() as (runtime, _):
        first = await runtime.lease(asked(runtime, "a"))
        waiting = await held_lease(runtime, "b")
        first.finished()
        runtime.release("a")
        (await waiting).finished()
        assert runtime.decision_counts == {
            (Restore, Reason.FITS): 2,
            (Grant, Reason.FITS): 2,
            (Hold, Reason.NO_ROOM): 1,
            (Release, Reason.RELEASED): 1,
        }


async def test_operator_command_is_logged_with_its_subject() -> None:
    """The log has the owner and target of a route, and the owner and value of a priority."""
    async with running(replicas=("r0", "r1")) as (runtime, _):
        ask = asked(runtime, "a", program_class="coder")
        with await runtime.lease(ask) as lease, structlog.testing.capture_logs() as lines:
            lease.finished(10)
            runtime.operator.set_route("class", "coder", (("r0", 3.0), ("r1", 1.0)))
            runtime.operator.set_priority("a", -5)
        assert lines == [
            {
                "event": "set_route",
                "log_level": "info",
                "scope": "class",
                "name": "coder",
                "replicas": {"r0": 3.0, "r1": 1.0},
                "reason": "operator",
            },
            {
                "event": "set_priority",
                "log_level": "info",
                "program_id": "a",
                "replica_id": None,
                "priority": -5,
                "reason": "operator",
            },
        ]


async def test_runtime_reports_what_it_is() -> None:
    """Logs and failures show `repr`."""
    async with running() as (runtime, _):
        lease = await runtime.lease(asked(runtime, "a"))
        waiting = await held_lease(runtime, "b")
        assert repr(runtime).startswith("<Runtime: 1 leases, 1 held, <Scheduler cap: 2 programs")
        waiting.cancel()
        await asyncio.wait([waiting])
        lease.finished()


# --- Bugs and broken parts


@dataclass(frozen=True)
class Broken(ThunderAgent):
    """An operator's policy with a bug."""

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Raise, in the middle of an event."""
        raise ZeroDivisionError


async def test_an_exception_in_a_policy_ends_the_process() -> None:
    """The sums cannot be trusted any more, so the endless loop raises the same error."""
    runtime = Runtime(Scheduler(Broken(delta_s=60.0)), RuntimeSettings(tick_s=60.0))
    runtime.replica_up("r0")
    ticking = asyncio.ensure_future(runtime.run())
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        await runtime.lease(asked(runtime, "a"))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(ticking, 5)


async def test_a_full_disk_costs_the_event_log_and_nothing_else(tmp_path: Path) -> None:
    """The grant that could not be written is still carried out."""
    writer = EventLogWriter(tmp_path / "log", policy="cap", policy_settings={}, settings=SchedulerSettings())
    writer.close()
    writer._file = FullDisk()  # type: ignore[assignment]
    runtime = Runtime(Scheduler(Cap(n=1)), event_log=writer)
    with structlog.testing.capture_logs() as logs:
        runtime.replica_up("r0")
        with await runtime.lease(asked(runtime, "a")) as lease:
            lease.finished()
    assert runtime.outcome_counts["finished"] == 1
    said = [each for each in logs if each["event"] == "event_log_given_up"]
    assert said == [{"event": "event_log_given_up", "log_level": "error", "why": "No space left on device"}]


class FullDisk:
    """A file on a disk without room."""

    def write(self, _: bytes) -> int:
        """Fail as the operating system does."""
        raise OSError(28, "No space left on device")


# --- patience, and attempts that are superseded


async def test_a_held_turn_is_let_in_when_it_is_due_not_at_the_next_tick() -> None:
    """There are no ticks here; half of a patience of 0.1 s is left for the answer."""
    async with running() as (runtime, clock):
        with await runtime.lease(asked(runtime, "first")):
            begun_s = asyncio.get_running_loop().time()
            waiting = asyncio.ensure_future(runtime.lease(asked(runtime, "second", patience_s=0.1)))
            await asyncio.sleep(0)
            assert runtime.held_count == 1
            clock.now_s += 0.06
            with await waiting as lease:
                assert lease.granted.reason is Reason.PATIENCE
            assert asyncio.get_running_loop().time() - begun_s >= 0.045


async def test_a_turn_that_is_due_is_no_tick() -> None:
    """A tick costs as much as all replicas and limits, and is not needed, however many turns are due."""
    async with running() as (runtime, clock):
        events: list[str] = []
        runtime.observe(lambda event, _: events.append(type(event).__name__))
        with await runtime.lease(asked(runtime, "first")):
            held = [
                asyncio.ensure_future(runtime.lease(asked(runtime, f"held-{n}", patience_s=0.1))) for n in range(20)
            ]
            await asyncio.sleep(0)
            assert runtime.held_count == 20
            clock.now_s += 0.06
            for waiting in held:
                (await waiting).finished()
        assert "TurnDue" in events
        assert "Tick" not in events


async def test_an_observer_hears_an_event_once_and_in_its_turn() -> None:
    """The event itself, its decisions, or both concern the observer; one that stopped gets nothing."""
    async with running() as (runtime, _):
        heard: list[str] = []
        runtime.observe(lambda event, _: heard.append("decision"), Grant)
        stop = runtime.observe(lambda event, _: heard.append("all"))
        runtime.observe(lambda event, _: heard.append("both"), TurnAsk, Grant)
        runtime.observe(lambda event, _: heard.append("neither"), Release)
        with await runtime.lease(asked(runtime, "a")):
            assert heard == ["decision", "all", "both"]
            stop()
        assert heard == ["decision", "all", "both"]


async def test_an_observer_hears_only_what_it_is_about() -> None:
    async with running() as (runtime, _):
        heard: dict[str, list[str]] = {"all": [], "events": [], "decisions": []}
        runtime.observe(lambda event, _: heard["all"].append(type(event).__name__))
        runtime.observe(lambda event, _: heard["events"].append(type(event).__name__), TurnEnd)
        stop = runtime.observe(lambda event, _: heard["decisions"].append(type(event).__name__), Release)
        (await runtime.lease(asked(runtime, "first"))).finished()
        runtime.release("first")
        assert heard == {
            "all": ["TurnAsk", "TurnEnd", "ProgramReleased"],
            "events": ["TurnEnd"],
            "decisions": ["ProgramReleased"],
        }
        stop()
        stop()
        (await runtime.lease(asked(runtime, "second"))).finished()
        runtime.release("second")
        assert (len(heard["all"]), len(heard["decisions"])) == (6, 1)


async def test_a_turn_that_leaves_takes_its_timer_along() -> None:
    async with running() as (runtime, _):
        with await runtime.lease(asked(runtime, "first")):
            waiting = asyncio.ensure_future(runtime.lease(asked(runtime, "second", patience_s=0.02)))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            events: list[object] = []
            runtime.observe(lambda event, decisions: events.append(event))
            await asyncio.sleep(0.03)
            assert events == []


async def test_a_held_turn_that_is_superseded_counts_as_that() -> None:
    """Its waiter is cancelled; its place in the queue is kept."""
    async with running() as (runtime, _):
        first = await runtime.lease(asked(runtime, "first"))
        earlier_id = runtime.new_turn_id()
        earlier = await held_lease(runtime, "second", turn_id=earlier_id)
        later = asyncio.ensure_future(runtime.lease(asked(runtime, "second", supersedes_id=earlier_id)))
        earlier.cancel()
        await asyncio.gather(earlier, return_exceptions=True)
        assert (runtime.held_count, runtime.scheduler.ledger.waiting_count) == (1, 1)
        first.finished()
        runtime.release("first")
        with await later as lease:
            lease.finished()
        assert runtime.outcome_counts == {"superseded": 1, "finished": 2}


async def test_a_lease_whose_turn_is_superseded_passes_on() -> None:
    """Its holder may end it late, and in any way."""
    async with running() as (runtime, _):
        earlier_id = runtime.new_turn_id()
        earlier = await runtime.lease(asked(runtime, "a", turn_id=earlier_id))
        with await runtime.lease(asked(runtime, "a", supersedes_id=earlier_id)) as later:
            assert runtime.leases_count == 2
            earlier.failed()
            assert (runtime.leases_count, len(runtime.scheduler.turns)) == (1, 1)
            later.finished()
        assert runtime.outcome_counts == {"superseded": 1, "finished": 1}


async def test_a_turn_that_ended_already_cannot_be_superseded() -> None:
    """The next one is an ordinary turn, and nothing of the first is kept."""
    async with running() as (runtime, _):
        (await runtime.lease(asked(runtime, "a", turn_id=77_000))).finished()
        with await runtime.lease(asked(runtime, "a", supersedes_id=77_000)) as lease:
            lease.finished()
        assert runtime.outcome_counts == {"finished": 2}
        assert not runtime._ends_as
