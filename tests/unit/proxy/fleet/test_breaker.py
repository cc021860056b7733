"""Breakers alone: waits for a probe, the end of a probe by leaving, and the affected replicas."""

from __future__ import annotations

import asyncio

import pytest

from thunderagent.errors import ReplicaTrippedError
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.fleet.breaker import Breakers, BreakerSettings, BreakerState
from thunderagent.runtime import Runtime

SETTINGS = BreakerSettings(failure_count=2, backoff_s=60.0, longest_backoff_s=60.0, probe_wait_s=0.05)


def breakers_of(*replica_ids: str, **models: str) -> tuple[Runtime, Breakers]:
    """Breakers of replicas that are up; `models` names further ones, each with the model that it lists."""
    runtime = Runtime(Scheduler(Passthrough()), make_scheduler=lambda: Scheduler(Passthrough()))
    for replica_id, model in models.items():
        runtime.served.listed(replica_id, (model,))
    for replica_id in (*replica_ids, *models):
        runtime.replica_up(replica_id)
    return runtime, Breakers(runtime, SETTINGS)


def trip(breakers: Breakers, replica_id: str) -> None:
    for _ in range(SETTINGS.failure_count):
        breakers.failed(replica_id)


async def half_open(runtime: Runtime, breakers: Breakers) -> None:
    """Trip `a`, and let it be tried early, because no other can serve."""
    trip(breakers, "a")
    runtime.replica_down("b")
    await asyncio.sleep(0)
    assert breakers.state_of("a") is BreakerState.HALF_OPEN


async def test_a_tripped_replica_is_tried_at_once_when_the_last_other_one_goes() -> None:
    """The rest of its backoff does not count while every turn waits."""
    runtime, breakers = breakers_of("a", "b")
    trip(breakers, "a")
    assert [replica.replica_id for replica in runtime.scheduler.open_replicas] == ["b"]
    runtime.replica_draining("b")
    await asyncio.sleep(0)
    assert breakers.state_of("a") is BreakerState.HALF_OPEN
    assert [replica.replica_id for replica in runtime.scheduler.open_replicas] == ["a"]
    breakers.close()


async def test_the_last_replica_of_a_model_is_never_taken_away() -> None:
    """Replicas of another model cannot serve its turns."""
    runtime, breakers = breakers_of(a="m", b="m", c="other")
    trip(breakers, "c")
    trip(breakers, "a")
    assert [breakers.state_of(each) for each in "ac"] == [BreakerState.OPEN, BreakerState.CLOSED]
    runtime.replica_down("b")
    await asyncio.sleep(0)
    assert breakers.state_of("a") is BreakerState.HALF_OPEN
    breakers.close()


async def test_a_suspended_replica_counts_as_usable() -> None:
    """Turns wait for it, and would fail on the tripped one, which is not tried early when a third one goes."""
    runtime, breakers = breakers_of("a", "b", "c")
    runtime.suspend_grants("sync", "b")
    trip(breakers, "a")
    assert breakers.state_of("a") is BreakerState.OPEN
    runtime.suspend_grants("sync")
    runtime.replica_down("c")
    await asyncio.sleep(0)
    assert breakers.state_of("a") is BreakerState.OPEN
    breakers.close()


async def test_failures_of_a_replica_that_is_gone_are_not_counted() -> None:
    """Turns that were connecting when it went down do not trip its successor."""
    runtime, breakers = breakers_of("a", "b")
    runtime.replica_down("a")
    trip(breakers, "a")
    breakers.failed("unknown")
    runtime.replica_up("a")
    assert breakers.state_of("a") is BreakerState.CLOSED
    assert repr(breakers) == "<Breakers: >"


async def test_only_the_probe_s_own_leaving_ends_it() -> None:
    """A turn that was sent before the replica was tripped does not matter."""
    runtime, breakers = breakers_of("a", "b")
    await half_open(runtime, breakers)
    probe = await breakers.admit("a")
    assert probe is not None
    waiting = asyncio.create_task(breakers.admit("a"))
    await asyncio.sleep(0)
    breakers.left("a", None)
    assert not probe.cancelled()
    breakers.left("a", probe)
    second = await waiting
    assert second not in (None, probe), "who waited is the probe now"
    breakers.succeeded("a")
    assert breakers.state_of("a") is BreakerState.CLOSED
    assert await breakers.admit("a") is None


async def test_turn_that_waits_for_a_failing_probe_is_not_sent() -> None:
    runtime, breakers = breakers_of("a", "b")
    await half_open(runtime, breakers)
    runtime.replica_up("b")
    await breakers.admit("a")
    waiting = asyncio.create_task(breakers.admit("a", is_bound=True))
    await asyncio.sleep(0)
    breakers.failed("a")
    with pytest.raises(ReplicaTrippedError, match="was not sent"):
        await waiting
    breakers.close()


async def test_a_replica_that_is_tried_is_failing_until_its_probe_has_ended_well() -> None:
    """Others are not sent meanwhile. After an end that says nothing the next one probes. Older turns do not count."""
    runtime, breakers = breakers_of("a", "b")
    await half_open(runtime, breakers)
    runtime.replica_up("b")

    def verdict() -> str:
        return runtime.replicas.states["a"].verdict

    probe = await breakers.admit("a")
    with pytest.raises(ReplicaTrippedError, match="was not sent"):
        await breakers.admit("a")
    breakers.left("a", probe)
    assert verdict() == "failing"
    second = await breakers.admit("a")
    assert second is not None
    breakers.succeeded("a", "sent before it failed")
    assert (breakers.state_of("a"), verdict()) == (BreakerState.HALF_OPEN, "failing")
    breakers.succeeded("a", "p", second)
    assert (breakers.state_of("a"), verdict()) == (BreakerState.CLOSED, "up")
    assert await breakers.admit("a") is None


async def test_an_error_in_a_probe_s_answer_always_counts() -> None:
    """Even of the program whose earlier error tripped the replica."""
    runtime, breakers = breakers_of("a", "b")
    breakers.failed("a")
    breakers.erred("a", "p", "an error inside its answer")
    runtime.replica_down("b")
    await asyncio.sleep(0)
    runtime.replica_up("b")
    assert await breakers.admit("a") is not None
    breakers.erred("a", "p", "an error inside its answer")
    assert breakers.state_of("a") is BreakerState.OPEN
    breakers.close()


async def test_a_probe_that_computes_holds_nobody_up_for_long() -> None:
    """A whole answer has no byte before its end, which may take minutes."""
    runtime, breakers = breakers_of("a", "b")
    await half_open(runtime, breakers)
    assert await breakers.admit("a") is not None
    async with asyncio.timeout(5):
        assert await breakers.admit("a") is None


def serves(breakers: Breakers, results: str) -> BreakerState:
    """Have turns of programs of their own end on `a`: `x` is a failure; return how its breaker stands then."""
    for result in results:
        if result == "x":
            breakers.failed("a")
        else:
            breakers.succeeded("a")
    return breakers.state_of("a")


FIVE = BreakerSettings()


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ("xxxx.", "closed"),
        ("xxxxx", "open"),
        ("x." * 7, "closed"),
        ("x." * 8, "open"),
        ("x" + 12 * "." + 7 * "x.", "closed"),
        ("xxx" + 14 * "." + "xxx" + 14 * "." + "xxxx", "closed"),
    ],
    ids=["four in a row", "five in a row", "seven of twenty", "eight of twenty", "the eighth is old", "rare ones"],
)
async def test_a_replica_that_fails_many_turns_is_failing_even_if_others_succeed(results: str, expected: str) -> None:
    runtime, _ = breakers_of("a", "b")
    breakers = Breakers(runtime, FIVE)
    assert serves(breakers, results) == expected
    if results.startswith("x.") and expected == "open":
        assert runtime.replicas.states["a"].why.startswith("8 of the last 20 turns failed")
    breakers.close()


async def test_a_replica_that_fails_again_right_after_its_trial_is_not_trusted_for_long() -> None:
    runtime, _ = breakers_of("a", "b")
    breakers = Breakers(runtime, BreakerSettings(backoff_s=0.01))
    assert serves(breakers, "x." * 8) is BreakerState.OPEN
    async with asyncio.timeout(5):
        while breakers.state_of("a") is BreakerState.OPEN:
            await asyncio.sleep(0.01)
    breakers.succeeded("a", None, await breakers.admit("a"))
    assert breakers.state_of("a") is BreakerState.CLOSED
    assert serves(breakers, ".x") is BreakerState.OPEN
    breakers.close()


async def test_a_turn_that_fails_on_two_replicas_alike_trips_neither() -> None:
    """However many come at once: what was counted meanwhile is taken back, and a trip with it."""
    runtime, _ = breakers_of("a", "b")
    breakers = Breakers(runtime, FIVE)
    assert serves(breakers, "xxxxx") is BreakerState.OPEN
    assert [replica.replica_id for replica in runtime.scheduler.open_replicas] == ["b"]
    breakers.excuse("a")
    assert breakers.state_of("a") is BreakerState.CLOSED
    assert [replica.replica_id for replica in runtime.scheduler.open_replicas] == ["a", "b"]
    for _ in range(4):
        breakers.excuse("a")
    assert serves(breakers, "xxxx") is BreakerState.CLOSED
    breakers.excuse("unknown")


async def test_errors_in_the_answers_of_one_program_count_once_until_it_has_a_good_one() -> None:
    """Turns of others that succeed meanwhile change nothing of that: the program may be to blame."""
    runtime, _ = breakers_of("a", "b")
    breakers = Breakers(runtime, FIVE)
    for _ in range(20):
        breakers.erred("a", "bad", "an error inside its answer")
        breakers.succeeded("a", "good")
    assert breakers.state_of("a") is BreakerState.CLOSED
    for _ in range(8):
        breakers.succeeded("a", "bad")
        breakers.erred("a", "bad", "an error inside its answer")
    assert breakers.state_of("a") is BreakerState.OPEN
    breakers.close()
