"""The weight fence: an engine that keeps its cache across updates reuses nothing that is too old, and bounds hold."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    Answer,
    Call,
    FakeReplica,
    RunningProxy,
    answers,
    fake_replica,
    get,
    metric,
    post,
    running_proxy,
    until,
)
from thunderagent.proxy.wire.headers import REPLICA_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

TASK = "w1 w2 w3 w4 w5 w6 w7 w8"
VLLM: dict[str, Any] = {"backend_type": "vllm"}


class Reuse(NamedTuple):
    """What one turn reused."""

    salt: object
    cached_tokens: int
    lag_count: int
    """How many updates ago the oldest of it was computed."""


class KeepingEngine:
    """An engine that keeps its cache when its weights change: what a salt separates it does not reuse."""

    def __init__(self, field: str = "cache_salt") -> None:
        self.updates_count = 0
        self.too_old_count = 0
        self.turns: list[Reuse] = []
        self.held: asyncio.Event | None = None
        self._field = field
        self._cache: dict[tuple[object, tuple[str, ...]], int] = {}

    async def __call__(self, call: Call) -> None:
        if call.target.startswith("/update_weights"):
            self.updates_count += 1
            await answers({"success": True})(call)
            return
        if call.target not in (CHAT, "/generate"):
            await answers({"success": True})(call)
            return
        body = call.json()
        text = body["text"] if "text" in body else " ".join(message["content"] for message in body["messages"])
        words, salt = tuple(text.split()), body.get(self._field)
        known = [self._cache.get((salt, words[:end])) for end in range(1, len(words) + 1)]
        found = [made for made in known if made is not None]
        if found and min(found) < int(body.get("user", 0)):  # updates that its client knew of when it sent the turn
            self.too_old_count += 1
        lag_count = self.updates_count - min(found) if found else 0
        self.turns.append(Reuse(salt, len(found), lag_count))
        for end in range(1, len(words) + 1):
            self._cache.setdefault((salt, words[:end]), self.updates_count)
        if self.held is not None:
            await asyncio.wait(
                [asyncio.ensure_future(each.wait()) for each in (self.held, call.left)],
                return_when=asyncio.FIRST_COMPLETED,
            )
        if not call.left.is_set():
            usage = {"prompt_tokens": len(words), "completion_tokens": 1, "total_tokens": len(words) + 1}
            message = {"role": "assistant", "content": "w0"}
            await answers({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})(
                call
            )


async def ask(proxy: RunningProxy, program_id: str | None, staleness: str = "", **fields: Any) -> Answer:
    """Send a turn."""
    headers = [("X-Program-ID", program_id)] if program_id else []
    headers += [("X-Program-Staleness", staleness)] if staleness else []
    body = {"messages": [{"role": "user", "content": TASK}], **fields}
    return await post(proxy.url, CHAT, body, *headers)


async def update(proxy: RunningProxy, version: str = "", replica: FakeReplica | None = None) -> None:
    """Change the weights of all replicas, or of one, and flush nothing."""
    where = "" if replica is None else f"/workers/{replica.replica_id}"
    body = {"flush_cache": False, **({"weight_version": version} if version else {})}
    answer = await post(proxy.url, f"{where}/update_weights_from_disk", body)
    assert answer.status == 200, answer.body


async def test_without_a_fence_old_weights_are_reused_and_nothing_is_asked() -> None:
    """The defect, and what is free when off: the engine gets the client's bytes."""
    engine = KeepingEngine()
    async with fake_replica(engine) as replica, running_proxy(replica.url, **VLLM) as proxy:
        await ask(proxy, "a")
        await update(proxy)
        assert (await ask(proxy, "b", "nonsense")).status == 200
    assert engine.turns == [Reuse(None, 0, 0), Reuse(None, 8, 1)]
    assert b"salt" not in replica.calls[-1].body


async def test_fence_by_turn_reuses_nothing_older() -> None:
    """Each program prefills anew after an update, anonymous ones too; until then all share."""
    engine = KeepingEngine()
    async with fake_replica(engine) as replica, running_proxy(replica.url, fence="turn", **VLLM) as proxy:
        for _ in range(3):
            for program_id in ("a", "b", None):
                await ask(proxy, program_id)
            await update(proxy)
    assert [each.cached_tokens for each in engine.turns] == [0, 8, 8] * 3
    assert all(each.lag_count == 0 for each in engine.turns)
    assert len({each.salt for each in engine.turns}) == 3


async def test_fence_by_start_lets_a_program_go_on_with_its_own() -> None:
    """It keeps its cache over updates; a program that begins later shares only with others of its time."""
    engine = KeepingEngine()
    async with fake_replica(engine) as replica, running_proxy(replica.url, fence="start", **VLLM) as proxy:
        await ask(proxy, "a")
        await update(proxy)
        for program_id in ("a", "b", "c"):
            await ask(proxy, program_id)
        await post(proxy.url, "/programs/release", {"program_id": "a"})
        await ask(proxy, "a")
    first, own, new, shared, again = engine.turns
    assert (own.salt, own.cached_tokens, own.lag_count) == (first.salt, 8, 1)
    assert (new.cached_tokens, new.lag_count) == (0, 0)
    assert (shared.salt, shared.cached_tokens, shared.lag_count) == (new.salt, 8, 0)
    assert again.salt == new.salt  # another program of the same name


async def test_clients_own_salts_stay_apart() -> None:
    """Two that gave different ones share nothing, whatever the weights."""
    engine = KeepingEngine()
    async with fake_replica(engine) as replica, running_proxy(replica.url, fence="turn", **VLLM) as proxy:
        for salt in ("x", "y", "x", None):
            await ask(proxy, "a", **({"cache_salt": salt} if salt else {}))
    assert [each.cached_tokens for each in engine.turns] == [0, 0, 8, 0]
    assert not {"x", "y"} & {each.salt for each in engine.turns}


async def test_call_that_failed_may_have_changed_weights() -> None:
    """And so may a remote call, and an adapter that is loaded again."""
    engine = KeepingEngine()

    async def fails(call: Call) -> None:
        refuses = answers({"success": False}, status="500 Internal Server Error")
        await (refuses if call.target.startswith("/update") else engine)(call)

    async with fake_replica(fails) as replica, running_proxy(replica.url, fence="turn", **VLLM) as proxy:
        for path in ("/update_weights_from_disk", "/collective_rpc", "/v1/load_lora_adapter"):
            await ask(proxy, "a")
            await post(proxy.url, path, {"flush_cache": False})
        await ask(proxy, "a")
    assert [each.cached_tokens for each in engine.turns] == [0] * 4


async def test_sglang_is_told_by_its_own_field() -> None:
    """Its API for texts and tokens has `extra_key`."""
    engine = KeepingEngine("extra_key")
    async with (
        fake_replica(engine) as replica,
        running_proxy(replica.url, fence="turn", backend_type="sglang", up=0) as proxy,
    ):
        replica.metrics = "sglang:max_total_num_tokens 100000\nsglang:num_used_tokens 0\n"
        await proxy.up(1)
        for _ in range(2):
            await post(proxy.url, "/generate", {"text": TASK, "extra_key": "mine"}, ("X-Program-ID", "a"))
            await update(proxy)
    assert [each.cached_tokens for each in engine.turns] == [0, 0]
    assert len({each.salt for each in engine.turns} - {"mine"}) == 2


async def test_record_says_the_salt() -> None:
    """Each turn of a rollout has the one that its engine got."""
    engine = KeepingEngine()
    records: dict[str, Any] = {"fence": "turn", "rollouts": "ids", **VLLM}
    async with fake_replica(engine) as replica, running_proxy(replica.url, **records) as proxy:
        await ask(proxy, "a")
        (turn,) = (await get(proxy.url, "/programs/a/trajectory")).json()["turns"]
    assert turn["salt"] == engine.turns[0].salt


async def updating(proxy: RunningProxy, engine: KeepingEngine, known: list[int]) -> None:
    """Update weights again and again; `known` has how many updates are through, as clients know."""
    for _ in range(int(os.environ.get("FENCE_UPDATES", "60"))):
        await update(proxy)
        known.append(engine.updates_count)
        await asyncio.sleep(0)


async def test_nothing_older_is_reused_under_load_either() -> None:
    """Turns come while weights change: one that was sent after an update has nothing of before, in any program."""
    engine, known, answered = KeepingEngine(), [0], 0
    async with fake_replica(engine) as replica, running_proxy(replica.url, fence="turn", **VLLM) as proxy:
        updates = asyncio.create_task(updating(proxy, engine, known))

        async def agent(program_id: str) -> None:
            nonlocal answered
            while not updates.done():
                answer = await ask(proxy, program_id, user=str(known[-1]))
                assert answer.status == 200, answer.body
                answered += 1

        await asyncio.gather(updates, *(agent(f"p{number}") for number in range(6)))
    assert engine.too_old_count == 0
    assert answered > 30
    assert sum(turn.cached_tokens for turn in engine.turns) > 0, "it has a cache that it uses"
    assert max(turn.lag_count for turn in engine.turns) <= 1, "of turns that were under way"


# --- staleness


@pytest.mark.parametrize("when", ["finish", "abort"])
async def test_bound_is_kept_under_load(when: str) -> None:
    """No turn is answered that was sent when more updates were through than its program may outlive."""
    engine, known, counts = KeepingEngine(), [0], {200: 0, 410: 0}
    bound: dict[str, Any] = {"fence": "start", "fence_max_lag_count": 2, "fence_when_stale": when, **VLLM}
    async with fake_replica(engine) as replica, running_proxy(replica.url, **bound) as proxy:
        updates = asyncio.create_task(updating(proxy, engine, known))

        async def agent(number: int) -> None:
            while not updates.done():
                number, first, answer = number + 6, None, None
                while answer is None or answer.status == 200:
                    sent = known[-1]
                    answer = await ask(proxy, f"p{number}")
                    counts[answer.status] += 1
                    if answer.status == 200 and first is not None:
                        assert sent - first <= 2, (first, sent)
                    first = engine.updates_count if first is None else first
                    if updates.done():
                        break
                await post(proxy.url, "/programs/release", {"program_id": f"p{number}"})

        await asyncio.gather(updates, *(agent(number) for number in range(6)))
    assert min(counts.values()) > 5, counts


@pytest.mark.parametrize(
    ("when", "statuses"), [("continue", [200, 200, 200]), ("finish", [200, 200, 410]), ("abort", [200, 200, 410])]
)
async def test_bound_is_kept(when: str, statuses: list[int]) -> None:
    """One update is within it, two are not; several calls within one pause are one update."""
    async with fake_replica(KeepingEngine()) as replica:
        bound: dict[str, Any] = {"fence": "start", "fence_max_lag_count": 1, "fence_when_stale": when}
        async with running_proxy(replica.url, **bound, **VLLM) as proxy:
            got = []
            for _ in range(3):
                answer = await ask(proxy, "a")
                got.append(answer.status)
                await post(proxy.url, "/pause?mode=keep")
                await update(proxy)
                await update(proxy)
                await post(proxy.url, "/resume")
            assert got == statuses
            if when != "continue":
                assert answer.error["code"] == "program_stale"
            assert (await ask(proxy, "b")).status == 200
            await post(proxy.url, "/programs/release", {"program_id": "a"})
            assert (await ask(proxy, "a")).status == 200


async def test_header_bounds_one_program() -> None:
    """Whatever the option says; a wrong one is an error."""
    async with fake_replica(KeepingEngine()) as replica, running_proxy(replica.url, fence="start", **VLLM) as proxy:
        for program_id in ("a", "b"):
            await ask(proxy, program_id, "max_lag=0, when=finish" if program_id == "a" else "")
        await update(proxy)
        assert [(await ask(proxy, each)).status for each in ("a", "b")] == [410, 200]
        assert (await ask(proxy, "a", "max_lag=1")).status == 200
        assert (await ask(proxy, "c", "max_lag=-1")).status == 400


async def test_update_aborts_turns_of_a_program_that_becomes_stale() -> None:
    """At their engine, too; programs within their bound go on."""
    engine = KeepingEngine()
    aborts: dict[str, Any] = {"fence": "start", "fence_when_stale": "abort", **VLLM}
    async with fake_replica(engine) as replica, running_proxy(replica.url, **aborts) as proxy:
        for program_id in ("a", "b"):
            await ask(proxy, program_id, "max_lag=0" if program_id == "a" else "max_lag=1")
        engine.held = asyncio.Event()
        stale, within = (asyncio.create_task(ask(proxy, each)) for each in ("a", "b"))
        await until(lambda: len(engine.turns) == 4)
        await update(proxy)
        answer = await stale
        assert (answer.status, answer.error["code"]) == (410, "program_stale")
        await until(lambda: any(call.target == CHAT and call.left.is_set() for call in replica.calls))
        engine.held.set()
        assert (await within).status == 200


async def two_replicas(check: Callable[[RunningProxy, FakeReplica, FakeReplica], Any], **config: Any) -> None:
    """Check something in front of two replicas; the first one has the program `a`."""
    async with (
        fake_replica(KeepingEngine()) as one,
        fake_replica(KeepingEngine()) as other,
        running_proxy(one.url, other.url, fence="start", **config, **VLLM) as proxy,
    ):
        home = (await ask(proxy, "a")).header(REPLICA_HEADER)
        first, second = (one, other) if home == one.replica_id else (other, one)
        await check(proxy, first, second)


async def held(proxy: RunningProxy, turn: asyncio.Task[Answer]) -> asyncio.Task[Answer]:
    """Wait until a turn waits."""
    async with asyncio.timeout(DEADLINE_S):
        while not await metric(proxy.url, "held_body_bytes"):
            assert not turn.done(), turn.result()
    return turn


async def test_program_finishes_on_a_replica_with_old_weights() -> None:
    """As long as there is one."""

    async def check(proxy: RunningProxy, first: FakeReplica, second: FakeReplica) -> None:
        await update(proxy, "1", first)
        for _ in range(2):
            assert (await ask(proxy, "a")).header(REPLICA_HEADER) == second.replica_id
        await update(proxy, "1", second)
        assert (await ask(proxy, "a")).status == 410

    await two_replicas(check, fence_max_lag_count=0, fence_when_stale="finish")


async def test_program_is_held_until_a_replica_has_weights_of_its_bound() -> None:
    """A trainer went back to an earlier version; meanwhile nobody answers, and its client may give up."""

    async def check(proxy: RunningProxy, first: FakeReplica, second: FakeReplica) -> None:
        await update(proxy, "1")
        await update(proxy, "2")
        waiting = await held(proxy, asyncio.create_task(ask(proxy, "a")))
        gives_up = await post(
            proxy.url,
            CHAT,
            {"messages": [{"role": "user", "content": "w1"}]},
            ("X-Program-ID", "a"),
            ("X-Program-Branch", "side"),
            ("X-Program-Patience", "0.2"),
        )
        assert (gives_up.status, gives_up.error["code"]) == (503, "no_room_in_time")
        assert not waiting.done()
        await update(proxy, "1", second)
        assert (await waiting).header(REPLICA_HEADER) == second.replica_id

    await two_replicas(check, fence_max_lag_count=1, fence_when_stale="hold")


async def test_release_ends_the_wait() -> None:
    """The turn does not open the program anew."""

    async def check(proxy: RunningProxy, first: FakeReplica, second: FakeReplica) -> None:
        await update(proxy)
        waiting = await held(proxy, asyncio.create_task(ask(proxy, "a")))
        await post(proxy.url, "/programs/release", {"program_id": "a"})
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (410, "program_released")

    await two_replicas(check, fence_max_lag_count=0, fence_when_stale="hold")


async def test_program_never_goes_back_to_older_weights() -> None:
    """During a rolling update it waits for the replica that has the new ones."""

    async def check(proxy: RunningProxy, first: FakeReplica, second: FakeReplica) -> None:
        await update(proxy, "1", first)
        assert (await ask(proxy, "a")).header(REPLICA_HEADER) == first.replica_id
        await post(proxy.url, f"/workers/{first.replica_id}/pause?mode=keep")
        waiting = await held(proxy, asyncio.create_task(ask(proxy, "a")))
        assert (await ask(proxy, "b")).header(REPLICA_HEADER) == second.replica_id
        assert not waiting.done()
        await post(proxy.url, f"/workers/{first.replica_id}/resume")
        assert (await waiting).header(REPLICA_HEADER) == first.replica_id

    await two_replicas(check)
