"""Leases over the API count for the limits of their key, and belong to its tenant."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.support import (
    DEADLINE_S,
    FakeReplica,
    cap,
    fake_replica,
    get,
    metric,
    post,
    running_proxy,
    turn,
    until,
)
from tests.integration.test_websockets import REALTIME, engine, talking
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.proxy.gate.keys.file import KeyLimitsEntry, add_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.integration.support import Answer

ADMIN_KEY, ADMIN_LINE = mint_key("ops")
RED_KEY, RED_LINE = mint_key("red")
OTHER_RED_KEY, OTHER_RED_LINE = mint_key("red/new")
BLUE_KEY, BLUE_LINE = mint_key("blue")
KEYS: dict[str, Any] = {"api_keys": (RED_LINE, OTHER_RED_LINE, BLUE_LINE), "admin_keys": (ADMIN_LINE,)}


def bearer(key: str) -> tuple[str, str]:
    return ("Authorization", f"Bearer {key}")


RED, OTHER_RED, BLUE, ADMIN = map(bearer, (RED_KEY, OTHER_RED_KEY, BLUE_KEY, ADMIN_KEY))


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with fake_replica(capacity_tokens=100_000) as replica:
        yield replica


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    return path


def made(keys_file: Path, name: str, **limits: Any) -> tuple[str, str]:
    return bearer(add_key(keys_file, name, admin=False, expires=None, limits=KeyLimitsEntry(**limits)))


async def limited(url: str, limit: str) -> float:
    text = (await get(url, "/metrics")).body.decode()
    return next(
        float(line.split()[-1]) for line in text.splitlines() if f'key_limited_total{{limit="{limit}"}}' in line
    )


async def ended(url: str, answers: list[Answer], *headers: tuple[str, str]) -> None:
    for each in answers:
        if each.status == 200:
            await post(url, f"/leases/{each.json()['lease_id']}/end", {"outcome": "abandoned"}, *headers)


@pytest.mark.parametrize("keys_name_tenants", [True, False])
async def test_a_lease_is_its_tenants(replica: FakeReplica, *, keys_name_tenants: bool) -> None:
    """Another key's word of it is that of somebody who names an unknown lease; ids say nothing."""
    async with running_proxy(replica.url, **KEYS, tenant_from_key=keys_name_tenants) as proxy:
        leases = [(await post(proxy.url, "/leases", {"prompt_tokens": 10}, key)).json() for key in (RED, RED, ADMIN)]
        ids = [each["lease_id"] for each in leases]
        assert all(len(bytes.fromhex(each)) == 16 for each in ids)
        for lease_id in ids:
            progress = await post(proxy.url, f"/leases/{lease_id}/progress", {"output_tokens": 5}, BLUE)
            assert progress.json() == {"lease_id": lease_id, "held": False}
            end = await post(proxy.url, f"/leases/{lease_id}/end", b"", BLUE)
            assert end.json() == {"lease_id": lease_id, "ended": False}
        assert proxy.runtime.leases_count == 3
        assert (await post(proxy.url, f"/leases/{ids[2]}/end", b"", RED)).json()["ended"] is False
        assert (await post(proxy.url, f"/leases/{ids[0]}/progress", b"", OTHER_RED)).json()["held"] is True
        assert (await post(proxy.url, f"/leases/{ids[0]}/end", b"", OTHER_RED)).json()["ended"] is True
        for lease_id in ids[1:]:
            assert (await post(proxy.url, f"/leases/{lease_id}/end", b"", ADMIN)).json()["ended"] is True
        await proxy.nothing_left()


async def test_anonymous_leases_of_one_key_leave_memory_for_others(replica: FakeReplica) -> None:
    """They run without room, so half of the memory is all that they may claim; a program's lease waits for room."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        wanted = {"prompt_tokens": 20_000}
        answers = [await post(proxy.url, "/leases", wanted, RED) for _ in range(4)]
        assert [each.status for each in answers] == [200, 200, 429, 429]
        assert answers[2].error["code"] == "key_held_limit"
        assert "claim 40,000 tokens, and 20,000 more" in answers[2].error["message"]
        small = await post(proxy.url, "/leases", {"prompt_tokens": 10_000}, RED)
        assert small.status == 200
        named = await post(proxy.url, "/leases", {"program_id": "p", "prompt_tokens": 100}, RED)
        other = await post(proxy.url, "/leases", wanted, BLUE)
        assert (named.status, other.status) == (200, 200)
        await ended(proxy.url, [*answers, small, named], RED)
        again = await post(proxy.url, "/leases", wanted, RED)
        assert again.status == 200
        await ended(proxy.url, [again, other], ADMIN)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()


async def test_the_only_data_key_leases_all_of_the_memory(replica: FakeReplica) -> None:
    """There is nobody to leave a part to."""
    async with running_proxy(replica.url, api_keys=(RED_LINE,), admin_keys=(ADMIN_LINE,)) as proxy:
        answers = [await post(proxy.url, "/leases", {"prompt_tokens": 20_000}, RED) for _ in range(4)]
        assert [each.status for each in answers] == [200] * 4
        await ended(proxy.url, answers, RED)
        await proxy.nothing_left()


async def test_progress_claims_no_more_than_the_keys_part(replica: FakeReplica) -> None:
    """Leases of no size, which all fit, would otherwise claim everything by what is said of them later."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        leases = [await post(proxy.url, "/leases", {"program_id": f"p{number}"}, RED) for number in range(4)]
        for each in leases:
            report = {"output_tokens": 40_000}
            said = await post(proxy.url, f"/leases/{each.json()['lease_id']}/progress", report, RED)
            assert said.json()["held"] is True
        turns = proxy.runtime.scheduler.turns.values()
        assert sum(each.output_tokens for each in turns) == 50_000
        await ended(proxy.url, leases, RED)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()


async def until_held(url: str, count: int) -> None:
    """Wait until the bodies of so many leases are kept: those that wait in line are held."""
    async with asyncio.timeout(DEADLINE_S):
        while await metric(url, "held_body_bytes") < count * 40:
            await asyncio.sleep(0.01)


async def claim(url: str, name: str, key: tuple[str, str], tokens: int = 20_000) -> Answer:
    return await post(url, "/leases", {"program_id": name, "prompt_tokens": tokens}, key)


async def test_leases_for_programs_of_one_key_leave_memory_for_others(replica: FakeReplica) -> None:
    """Progress of a token keeps them alive, so half of the memory is all that they may claim; others wait in line."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        leases = [await claim(proxy.url, f"p{number}", RED) for number in range(2)]
        assert [each.status for each in leases] == [200, 200]
        waiting = [asyncio.create_task(claim(proxy.url, f"q{number}", RED)) for number in range(2)]
        await until_held(proxy.url, 2)
        late = {"program_id": "r", "prompt_tokens": 20_000, "patience_s": 0.05}
        refused = await post(proxy.url, "/leases", late, RED)
        assert (refused.status, refused.error["code"]) == (429, "key_held_limit")
        for each in leases:
            said = await post(proxy.url, f"/leases/{each.json()['lease_id']}/progress", {"output_tokens": 1}, RED)
            assert said.json()["held"] is True
        others = [await claim(proxy.url, f"o{number}", BLUE) for number in range(2)]
        others.append(await claim(proxy.url, "admin", ADMIN, 1_000))
        assert [each.status for each in others] == [200, 200, 200]
        assert not any(each.done() for each in waiting)
        await ended(proxy.url, [*leases, *others], ADMIN)
        await post(proxy.url, "/programs/release", {"program_ids": ["p0", "p1", "o0", "o1", "admin"]}, ADMIN)
        last = [await each for each in waiting]
        assert [each.status for each in last] == [200, 200]
        assert last[0].json()["held_s"] > 0
        await ended(proxy.url, last, RED)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()


async def test_lease_that_waited_in_line_does_not_join_the_program_that_another_tenant_began(
    replica: FakeReplica,
) -> None:
    async with running_proxy(replica.url, **KEYS, tenant_from_key=True) as proxy:
        leases = [await claim(proxy.url, f"p{number}", RED) for number in range(2)]
        waiting = asyncio.create_task(claim(proxy.url, "x", RED))
        await until_held(proxy.url, 1)
        leases.append(await claim(proxy.url, "x", BLUE, 10))
        await ended(proxy.url, leases, ADMIN)
        await post(proxy.url, "/programs/release", {"program_ids": ["p0", "p1"]}, ADMIN)
        refused = await waiting
        assert (refused.status, "belongs to another tenant" in refused.error["message"]) == (403, True)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()


async def test_known_claim_of_a_program_counts_although_its_lease_names_no_size(replica: FakeReplica) -> None:
    """Two leases for one program count once. The first of a key is let in even if it is larger than the part."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        for name, tokens in (("large", 60_000), ("small", 20_000)):
            lease = (await claim(proxy.url, name, RED, 100)).json()["lease_id"]
            end = {"prompt_tokens": tokens, "output_tokens": 1}
            assert (await post(proxy.url, f"/leases/{lease}/end", end, RED)).json()["ended"] is True
        leases = [await claim(proxy.url, "large", RED, 0) for _ in range(2)]
        assert [each.status for each in leases] == [200, 200]
        late = {"program_id": "small", "patience_s": 0.05}
        assert (await post(proxy.url, "/leases", late, RED)).status == 429
        for each in leases:
            await ended(proxy.url, [each], RED)
        again = await post(proxy.url, "/leases", late, RED)
        assert again.status == 200
        await ended(proxy.url, [again], RED)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()


async def test_leases_are_counted_and_their_prompts_are_bodies(replica: FakeReplica) -> None:
    """Of each key, half of all by default; those of all keys together have a limit, too."""
    limits = {"max_leases_count": 4, "max_running_bytes": 400_000, "key_max_leased_ratio": 100.0}
    async with running_proxy(replica.url, **KEYS, **limits) as proxy:
        answers = [await post(proxy.url, "/leases", {}, RED) for _ in range(3)]
        assert [each.status for each in answers] == [200, 200, 429]
        assert "2 leases of this key are open" in answers[2].error["message"]
        more = [await post(proxy.url, "/leases", {}, key) for key in (ADMIN, ADMIN, BLUE)]
        assert [each.status for each in more] == [200, 200, 503]
        await ended(proxy.url, [*answers, *more], ADMIN)
        large = [await post(proxy.url, "/leases", {"prompt_tokens": 30_000}, RED) for _ in range(2)]
        assert [each.status for each in large] == [200, 503]  # 120,000 bytes of 200,000
        await ended(proxy.url, large, RED)
        await proxy.nothing_left()


async def test_a_lease_that_waits_counts_as_held_and_leaves_nothing(replica: FakeReplica) -> None:
    limits: dict[str, Any] = {**cap(1), "key_max_held_turns_count": 1, "max_leases_count": 10}
    async with running_proxy(replica.url, **KEYS, **limits) as proxy:
        first = await post(proxy.url, "/leases", {"program_id": "a"}, RED)
        waiting = asyncio.create_task(post(proxy.url, "/leases", {"program_id": "b"}, RED))
        await until(lambda: proxy.runtime.held_count == 1)
        refused = await post(proxy.url, "/leases", {"program_id": "c"}, RED)
        assert (refused.status, refused.error["code"]) == (429, "key_held_limit")
        await ended(proxy.url, [first], RED)
        await post(proxy.url, "/programs/release", {"program_id": "a"}, RED)
        await ended(proxy.url, [await waiting], RED)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()


async def test_progress_prolongs_a_lease_no_longer_than_an_answer_may_take(replica: FakeReplica) -> None:
    async with running_proxy(replica.url, total_timeout_s=0.3, lease_limit_s=0.2) as proxy:
        lease_id = (await post(proxy.url, "/leases", {"program_id": "p"})).json()["lease_id"]
        async with asyncio.timeout(DEADLINE_S):
            while (await post(proxy.url, f"/leases/{lease_id}/progress", {"output_tokens": 1})).json()["held"]:
                await asyncio.sleep(0.01)
        assert proxy.runtime.leases_count == 0
        await post(proxy.url, "/programs/release", {"all": True})
        await proxy.nothing_left()


async def test_programs_of_leases_count(replica: FakeReplica, keys_file: Path) -> None:
    """Also one that was released while its lease goes on: what it holds is there."""
    few = made(keys_file, "few", programs_count=2)
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        answers = [await post(proxy.url, "/leases", {"program_id": each}, few) for each in "abc"]
        assert [each.status for each in answers] == [200, 200, 429]
        assert answers[2].error["code"] == "key_programs_limit"
        await post(proxy.url, "/programs/release", {"program_ids": ["a", "b"]}, few)
        assert (await post(proxy.url, "/leases", {"program_id": "c"}, few)).status == 429
        await ended(proxy.url, answers, few)
        last = await post(proxy.url, "/leases", {"program_id": "c"}, few)
        assert last.status == 200
        await ended(proxy.url, [last], few)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()


@pytest.mark.parametrize(
    "end",
    [
        {"outcome": "failed"},
        {"outcome": "refused"},
        {"outcome": "abandoned"},
        {"outcome": "finished", "prompt_tokens": 0, "output_tokens": 0},
    ],
)
@pytest.mark.parametrize("prompt_tokens", [1500, 0])
async def test_granted_lease_counts_whatever_its_end_says(
    replica: FakeReplica, keys_file: Path, end: dict[str, Any], prompt_tokens: int
) -> None:
    """A lease of no size counts as if it had some: nobody else knows."""
    key = made(keys_file, "ci", tokens_per_min=500)
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        lease = await post(proxy.url, "/leases", {"prompt_tokens": prompt_tokens}, key)
        assert lease.status == 200
        for wanted in ("/leases", "/v1/chat/completions"):  # already while it runs
            waiting = asyncio.create_task(post(proxy.url, wanted, turn(), key))
            before = await limited(proxy.url, "tokens")
            async with asyncio.timeout(DEADLINE_S):
                while await limited(proxy.url, "tokens") == before:
                    await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
            if wanted == "/leases":
                await post(proxy.url, f"/leases/{lease.json()['lease_id']}/end", end, key)
        await proxy.nothing_left()


async def test_a_websocket_counts_its_program_and_its_bytes(keys_file: Path) -> None:
    """It opens no program, but while it lasts, it holds one of its key's."""
    few, ci = made(keys_file, "few", programs_count=2), made(keys_file, "ci", tokens_per_min=5000)
    async with engine() as behind, running_proxy(behind.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        headers = [{"X-Program-ID": each, few[0]: few[1]} for each in "abc"]
        async with talking(proxy.url, headers=headers[0]):
            async with talking(proxy.url, headers=headers[1]), talking(proxy.url, headers=headers[0]):
                refused = await post(proxy.url, "/leases", {"program_id": "d"}, few)
                assert (refused.status, refused.error["code"]) == (429, "key_programs_limit")
                with pytest.raises(Exception, match="429"):
                    async with talking(proxy.url, headers=headers[2]):
                        pass
            await until(lambda: proxy.runtime.leases_count == 1)
            async with talking(proxy.url, headers=headers[2]):
                pass
        async with talking(proxy.url, REALTIME, headers={ci[0]: ci[1]}) as socket:
            await socket.send_bytes(b"x" * 20_000)
            await socket.receive_bytes()
            waiting = asyncio.create_task(post(proxy.url, "/leases", {}, ci))
            async with asyncio.timeout(DEADLINE_S):
                while not await limited(proxy.url, "tokens"):
                    await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
        await proxy.nothing_left()


@pytest.mark.parametrize("limit", ["tokens_per_min", "turns_per_min"])
async def test_patience_is_over_the_wait_for_a_rate_too(replica: FakeReplica, keys_file: Path, limit: str) -> None:
    """A caller that waits no longer is told so, and leaves nothing."""
    key = made(keys_file, "ci", **{limit: 1})
    async with running_proxy(replica.url, keys_file=keys_file, admin_keys=(ADMIN_LINE,)) as proxy:
        first = await post(proxy.url, "/leases", {"program_id": "a", "prompt_tokens": 70}, key)
        assert first.status == 200
        wanted = {"program_id": "b", "patience_s": 0.2}
        async with asyncio.timeout(DEADLINE_S):
            refused = await post(proxy.url, "/leases", wanted, key)
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert "patience of 0.2 s" in refused.error["message"]
        assert int(refused.header("Retry-After") or "0") >= 1
        await ended(proxy.url, [first], ADMIN)
        await post(proxy.url, "/programs/release", {"all": True}, ADMIN)
        await proxy.nothing_left()
