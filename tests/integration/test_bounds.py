"""What a client may take from others, on real sockets: leases, held turns and bytes, patience, programs, tenants."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    JSON_TYPE,
    SERVER_HEADERS,
    Answer,
    Call,
    FakeReplica,
    Gate,
    Header,
    RunningProxy,
    Wire,
    answers,
    ask,
    cap,
    chunk,
    exchange,
    fake_replica,
    get,
    head_bytes,
    metrics_of,
    post,
    running_proxy,
    serve,
    stream_head,
    turn,
    until,
    word,
    writes,
)
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.proxy.turns.relay import MOST_WHOLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

RED_KEY, RED_LINE = mint_key("red")
OTHER_RED_KEY, OTHER_RED_LINE = mint_key("red/new")
BLUE_KEY, BLUE_LINE = mint_key("blue")
ADMIN_KEY, ADMIN_LINE = mint_key("ops")
KEYS: dict[str, Any] = {"api_keys": (RED_LINE, OTHER_RED_LINE, BLUE_LINE), "admin_keys": (ADMIN_LINE,)}


def bearer(key: str) -> Header:
    return ("Authorization", f"Bearer {key}")


RED, OTHER_RED, BLUE, ADMIN = map(bearer, (RED_KEY, OTHER_RED_KEY, BLUE_KEY, ADMIN_KEY))


async def call(url: str, method: str, target: str, *headers: Header, body: object = None) -> Answer:
    return await exchange(url, method, target, headers, b"" if body is None else json.dumps(body).encode())


async def held(proxy: RunningProxy, count: int) -> None:
    await until(lambda: proxy.runtime.held_count == count)


# --- leases over the API


async def test_a_lease_whose_answer_cannot_be_written_ends(replica: FakeReplica) -> None:
    """Twenty callers ask and are killed: their leases end long before the limit."""
    async with running_proxy(replica.url) as proxy:
        for number in range(20):
            async with Wire.open(proxy.url) as wire:
                wire.send("POST", "/leases", body=json.dumps({"program_id": f"p{number}"}).encode())
                await asyncio.sleep(0)
                wire.reset()
        await until(lambda: sum(proxy.runtime.outcome_counts.values()) == 20)
        assert proxy.runtime.leases_count == 0


async def test_a_lease_is_short_where_nothing_is_said(replica: FakeReplica) -> None:
    async with running_proxy(replica.url) as proxy:
        lease = (await post(proxy.url, "/leases", {})).json()
        assert lease["limit_s"] == 60.0
        await post(proxy.url, f"/leases/{lease['lease_id']}/end")


async def test_a_lease_is_believed_no_more_tokens_than_the_largest_replica_has() -> None:
    """This holds at its begin, in its progress and at its end; its reports do not change how others' bytes count."""
    async with fake_replica(capacity_tokens=1000) as replica, running_proxy(replica.url) as proxy:
        scheduler = proxy.runtime.scheduler
        lease = (await post(proxy.url, "/leases", {"program_id": "a", "prompt_tokens": 2**31 - 1})).json()
        path = f"/leases/{lease['lease_id']}"

        def claim_tokens() -> int:
            program = scheduler.programs.get("a")
            assert program is not None
            return program.claim_tokens

        assert claim_tokens() == 1000
        await post(proxy.url, f"{path}/progress", {"output_tokens": 2**31 - 1})
        assert claim_tokens() == 1000
        await post(proxy.url, f"{path}/end", {"prompt_tokens": 2**31 - 1, "output_tokens": 2**31 - 1})
        assert claim_tokens() == 1000
        liar = (await post(proxy.url, "/leases", {"program_id": "liar", "prompt_tokens": 1})).json()
        await post(proxy.url, f"/leases/{liar['lease_id']}/end", {"prompt_tokens": 1000})
        await ask(proxy.url, "b", content="x" * 400)
        newcomer = scheduler.programs.get("b")
        assert newcomer is not None
        assert newcomer.claim_tokens < 500


async def test_lease_of_a_data_key_teaches_about_its_own_programs_only() -> None:
    """They teach neither how others' bytes count nor what engines keep and compute; an admin key's leases do."""
    async with (
        fake_replica(capacity_tokens=10_000) as replica,
        running_proxy(replica.url, policy="breakeven", **KEYS) as proxy,
    ):
        scheduler = proxy.runtime.scheduler
        correction = scheduler.knowledge.corrections[replica.replica_id]
        first_ratio = scheduler.knowledge.tokens_per_byte_ratio
        for key, name, teaches in ((RED, "a", False), (RED, None, False), (ADMIN, "b", True)):
            for _ in range(3):
                asks = {"prompt_tokens": 1000} | ({"program_id": name} if name else {})
                lease = (await post(proxy.url, "/leases", asks, key)).json()
                path = f"/leases/{lease['lease_id']}"
                await post(proxy.url, f"{path}/progress", {"output_tokens": 1}, key)
                said = {"prompt_tokens": 2000, "output_tokens": 5, "cached_tokens": 0}
                await post(proxy.url, f"{path}/end", said, key)
            assert (correction.computed_tokens > 0) == teaches
            assert (scheduler.knowledge.tokens_per_byte_ratio != first_ratio) == teaches
            if name is not None:
                program = scheduler.programs.get(name)
                assert program is not None
                assert program.context_tokens == 2005


# --- passwords


PASSWORD = "s3cret-of-the-replica"


async def test_no_answer_log_metric_or_error_shows_a_replicas_password() -> None:
    """The test asks every route that answers, fails turns, and adds a replica and one that does not start."""
    async with fake_replica() as replica:
        url = replica.url.replace("//", f"//user:{PASSWORD}@")
        provision = ("--provision", "command", "--provision-min", "1", "--provision-ready-limit-s", "0.2")
        launched = f"{sys.executable} -c 'import time; time.sleep(60)' {{port}}"
        where = ("--provision-command", launched, "--provision-url", f"http://user:{PASSWORD}@127.0.0.1:{{port}}")
        limits = ("--retries-count", "0", "--no-replica-limit-s", "0.3")
        options = ("--backends", url, "--log-level", "debug", *limits, *provision, *where)
        async with serve(*options) as proxy:
            await proxy.ready()
            seen = [proxy.ready_line]
            behaviours: list[Callable[[Call], Awaitable[None]]] = [
                writes(b"rubbish\r\n\r\n"),
                writes(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab"),
                writes(),
                answers(status="307 Temporary Redirect", headers=[("location", "/elsewhere")]),
                answers(),
            ]
            for behaviour in behaviours:
                replica.behaviour = behaviour
                targets = (CHAT, "/v1/embeddings", "/reset_prefix_cache", "/operations/nothing")
                seen.extend([shown(await post(proxy.url, target, turn("p"))) for target in targets])
            for target, body in (
                ("/leases", {"program_id": "q"}),
                ("/replicas", {"url": f"http://user:{PASSWORD}@127.0.0.1:1"}),
                ("/replicas", {"url": f"http://user:{PASSWORD}@127.0.0.1:nonsense"}),
                ("/replicas", {"url": f"dns+http://user:{PASSWORD}@name:80"}),
                (f"/add_worker?url=http://user:{PASSWORD}@127.0.0.1:2", b""),
                (f"/remove_worker?url=http://user:{PASSWORD}@127.0.0.1:3", b""),
            ):
                seen.append(shown(await post(proxy.url, target, body)))
            await until(lambda: "replica_not_ready" in proxy.log)
            paths = json.loads((await get(proxy.url, "/openapi.json")).body)["paths"]
            for path in [path for path, methods in paths.items() if "get" in methods]:
                target = path.replace("{program_id}", "p").replace("{replica_id}", replica.replica_id)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):  # feeds do not end
                        seen.append(shown(await get(proxy.url, target)))
            seen.append(shown(await get(proxy.url, "/operations")))
            assert any("did not answer within" in text for text in seen), "the failure of provisioning is told"
            await replica.stop()
            await until(lambda: "replica_down" in proxy.log)
            seen.append(shown(await post(proxy.url, CHAT, turn("p"), ("X-Program-Patience", "0.2"))))
            seen.append(proxy.log)
        assert not [text for text in seen if PASSWORD in text]


def shown(answer: Answer) -> str:
    return f"{answer.headers}\n{answer.body.decode(errors='replace')}"


@pytest.mark.parametrize(
    "wrong", [f"dns+http://user:{PASSWORD}@name:80", f"http://user:{PASSWORD}/x@host:80", f"ftp://user:{PASSWORD}@host"]
)
def test_a_backend_that_is_refused_does_not_tell_its_password(wrong: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        ServeConfig.load(backends=wrong)
    assert PASSWORD not in str(refusal.value)


# --- clients that do not read


async def floods(call: Call) -> None:
    """Behave: stream without end, as fast as the client reads."""
    call.write(stream_head())
    while not call.left.is_set():
        call.write(chunk(word("x" * 100_000)))
        await asyncio.sleep(0.01 if call.transport.get_write_buffer_size() > 1_000_000 else 0)


async def test_a_client_that_stops_reading_loses_its_lease_and_the_engines_connection() -> None:
    """This holds for turns and side calls; a client that reads slowly is left alone."""

    async def reads_slowly_and_stops(target: str) -> None:
        address = urlsplit(proxy.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            client.setblocking(False)
            body = json.dumps(turn("p", stream=True)).encode()
            head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            await asyncio.get_running_loop().sock_sendall(client, head + body)
            await until(lambda: target in {call.target for call in replica.calls})
            (asked,) = [call for call in replica.calls if call.target == target]
            for _ in range(50):  # for longer than the limit
                await asyncio.sleep(0.1)
                assert not asked.left.is_set()
                await asyncio.get_running_loop().sock_recv(client, 2_000_000)
            async with asyncio.timeout(DEADLINE_S):
                await asked.left.wait()

    async with fake_replica(floods) as replica, running_proxy(replica.url, client_stall_limit_s=4.0) as proxy:
        await asyncio.gather(*map(reads_slowly_and_stops, (CHAT, "/v1/embeddings")))
        await proxy.nothing_left()


async def test_a_client_that_does_not_read_a_whole_answer_is_cut_off() -> None:
    """Its lease has ended by then; the answer is not kept for it."""
    large = answers(b" " * 40_000_000)
    async with fake_replica(large) as replica, running_proxy(replica.url, client_stall_limit_s=0.3) as proxy:
        address = urlsplit(proxy.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            client.setblocking(False)
            body = json.dumps(turn("p")).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            await asyncio.get_running_loop().sock_sendall(client, head + body)
            await replica.call()
            await proxy.nothing_left()
            await asyncio.sleep(1.5)
            read_bytes = 0
            with suppress(ConnectionResetError):
                async with asyncio.timeout(DEADLINE_S):
                    while data := await asyncio.get_running_loop().sock_recv(client, 4_000_000):
                        read_bytes += len(data)
            assert read_bytes < 40_000_000


async def test_an_answer_that_is_too_large_to_be_kept_is_passed_on_as_it_comes() -> None:
    """The proxy does not read it; its client still gets it whole, or broken off where the engine breaks off."""
    size_bytes, broken = 96 * 2**20, asyncio.Event()
    last = asyncio.Event()

    async def behaviour(call: Call) -> None:
        length = ("content-length", str(size_bytes))
        call.write(head_bytes("HTTP/1.1 200 OK", [*SERVER_HEADERS, length, JSON_TYPE]))
        for _ in range(size_bytes // 2**20 - 1):
            call.write(b" " * 2**20)
            await until(lambda: call.transport.get_write_buffer_size() < 2**20 or call.left.is_set())
        await last.wait()
        if broken.is_set():
            call.close()
        else:
            call.write(b" " * 2**20)

    async with fake_replica(behaviour) as replica, running_proxy(replica.url) as proxy:
        for breaks in (False, True):
            last.clear()
            if breaks:
                broken.set()
            async with (
                aiohttp.ClientSession() as client,
                client.post(proxy.url + CHAT, json=turn("p")) as answer,
            ):
                read_bytes = 0
                while read_bytes < MOST_WHOLE_BYTES:  # the answer is not whole, and its client has most of it
                    read_bytes += len(await answer.content.readany())
                last.set()
                try:
                    read_bytes += len(await answer.content.read())
                except aiohttp.ClientPayloadError:
                    assert breaks
                assert (read_bytes == size_bytes) is not breaks
        await proxy.nothing_left()
        assert proxy.runtime.outcome_counts == {"finished": 1, "failed": 1}


# --- what is held


async def test_turn_past_the_bound_of_held_turns_gets_503_and_nothing_is_lost(replica: FakeReplica) -> None:
    gate = Gate()
    replica.behaviour = gate
    async with running_proxy(replica.url, **cap(1), max_held_turns_count=3) as proxy:

        async def one(program_id: str) -> int:
            answer = await ask(proxy.url, program_id)
            proxy.runtime.release(program_id)
            return answer.status

        running = asyncio.create_task(one("running"))
        await replica.call()
        waiting = [asyncio.create_task(one(f"p{number}")) for number in range(3)]
        await held(proxy, 3)
        refused = await ask(proxy.url, "one too many")
        assert (refused.status, refused.error["code"]) == (503, "too_many_held")
        assert int(refused.header("Retry-After") or 0) > 0
        lease = await post(proxy.url, "/leases", {"program_id": "q"})
        assert lease.status == 503
        metrics = await metrics_of(proxy.url)
        assert metrics["thunderagent_held_refused_total"]["turns",] == 2
        assert metrics["thunderagent_turns_held"][()] == 3
        assert metrics["thunderagent_held_body_bytes"][()] > 0
        gate.open()
        assert await asyncio.gather(running, *waiting) == [200] * 4
        assert (await metrics_of(proxy.url))["thunderagent_held_body_bytes"][()] == 0


async def test_held_bodies_are_bounded_and_all_that_were_held_are_answered(replica: FakeReplica) -> None:
    """Sixty turns of half a megabyte where ten megabytes may be held: about twenty wait, and none of these is lost."""
    gate = Gate()
    replica.behaviour = gate
    limits = {"max_body_bytes": 1_000_000, "max_held_bytes": 10_000_000}
    async with running_proxy(replica.url, **cap(1), **limits) as proxy:

        async def one(number: int) -> Answer:
            answer = await post(proxy.url, CHAT, turn(content="x" * 500_000), ("X-Program-ID", f"p{number}"))
            proxy.runtime.release(f"p{number}")
            return answer

        tasks = [asyncio.create_task(one(number)) for number in range(60)]
        await until(lambda: sum(task.done() for task in tasks) + proxy.runtime.held_count == 59)
        bytes_now = (await metrics_of(proxy.url))["thunderagent_held_body_bytes"][()]
        assert 9_000_000 < bytes_now <= 10_000_000
        gate.open()
        outcomes = [answer.status for answer in await asyncio.gather(*tasks)]
        assert set(outcomes) == {200, 503}
        assert 19 <= outcomes.count(200) <= 21
        assert (await metrics_of(proxy.url))["thunderagent_held_refused_total"]["bytes",] == outcomes.count(503)


@pytest.mark.parametrize("named", [True, False], ids=["programs", "nobody"])
async def test_bodies_of_turns_that_run_are_bounded_too(replica: FakeReplica, *, named: bool) -> None:
    """No turn is held, but past the bound a turn gets 503; when the running turns have ended there is room."""
    gate = Gate()
    replica.behaviour = gate
    async with running_proxy(replica.url, policy="passthrough", max_running_bytes=250_000) as proxy:

        def one(number: int) -> asyncio.Task[Answer]:
            body = turn(f"p{number}" if named else None, content="x" * (50_000 if named else 100_000))
            return asyncio.create_task(post(proxy.url, CHAT, body))

        tasks = [one(number) for number in range(2)]  # a body with program_id is kept as received and as forwarded
        await until(lambda: len(replica.calls) == 2)
        refused = await one(2)
        assert (refused.status, refused.error["code"]) == (503, "too_many_held")
        metrics = await metrics_of(proxy.url)
        assert metrics["thunderagent_held_refused_total"]["running_bytes",] == 1
        assert 200_000 < metrics["thunderagent_turn_body_bytes"][()] < 250_000
        assert proxy.runtime.leases_count == 2
        gate.open()
        assert [(await task).status for task in tasks] == [200] * 2
        assert (await one(3)).status == 200, "what ran has ended"
        assert (await metrics_of(proxy.url))["thunderagent_turn_body_bytes"][()] == 0


async def test_a_key_has_half_of_the_bodies_of_turns_that_run(replica: FakeReplica) -> None:
    gate = Gate()
    replica.behaviour = gate
    async with running_proxy(replica.url, policy="passthrough", **KEYS, max_running_bytes=400_000) as proxy:
        body = turn(None, content="x" * 150_000)
        tasks = [asyncio.create_task(post(proxy.url, CHAT, body, key)) for key in (RED, BLUE)]
        await until(lambda: len(replica.calls) == 2)
        assert (await post(proxy.url, CHAT, body, RED)).status == 503
        assert (await metrics_of(proxy.url))["thunderagent_held_refused_total"]["key_running_bytes",] == 1
        gate.open()
        assert [(await task).status for task in tasks] == [200, 200]


async def test_a_key_holds_no_more_than_its_part(replica: FakeReplica) -> None:
    """It gets 429, by turns or by bytes; turns of another key are still held."""
    gate = Gate()
    replica.behaviour = gate
    limits = {"max_held_turns_count": 4, "key_max_held_bytes": 2000}
    async with running_proxy(replica.url, **cap(1), **KEYS, **limits) as proxy:
        tasks = [asyncio.create_task(post(proxy.url, CHAT, turn("running"), RED))]
        await replica.call()
        tasks += [asyncio.create_task(post(proxy.url, CHAT, turn(f"p{number}"), RED)) for number in range(2)]
        await held(proxy, 2)
        refused = await post(proxy.url, CHAT, turn("p3"), RED)
        assert (refused.status, refused.error["code"]) == (429, "key_held_limit")
        assert int(refused.header("Retry-After") or 0) > 0
        tasks.append(asyncio.create_task(post(proxy.url, CHAT, turn("b"), BLUE)))
        await held(proxy, 3)
        assert (await post(proxy.url, CHAT, turn("c", content="x" * 3000), BLUE)).status == 429
        metrics = await call(proxy.url, "GET", "/metrics")
        assert b'held_refused_total{bound="key_turns"} 1.0' in metrics.body
        assert b'held_refused_total{bound="key_bytes"} 1.0' in metrics.body
        gate.open()
        await call(proxy.url, "POST", "/programs/release", ADMIN, body={"all": True})
        await asyncio.gather(*tasks)


# --- patience and programs


async def test_turn_past_the_patience_overdraft_is_told_why() -> None:
    """It gets 503 before its client gives up, with the time to come again."""
    gate = Gate()
    async with fake_replica(gate, capacity_tokens=1000) as replica, running_proxy(replica.url, **cap(1)) as proxy:
        patience = ("X-Program-Patience", "0.8")
        running = asyncio.create_task(ask(proxy.url, "running"))
        await replica.call()
        tasks = [
            asyncio.create_task(post(proxy.url, CHAT, turn(f"p{number}", content="x" * 8000), patience))
            for number in range(10)
        ]
        await until(lambda: sum(task.done() for task in tasks) == 9)
        for task in tasks:
            if task.done():
                assert (task.result().status, task.result().error["code"]) == (503, "no_room_in_time")
                assert int(task.result().header("Retry-After") or 0) > 0
        await until(lambda: len(replica.calls) == 2)
        gate.open()
        assert (await running).status == 200
        assert sorted(answer.status for answer in await asyncio.gather(*tasks)) == [200, *[503] * 9]


async def test_table_past_its_cap_forgets_the_oldest_idle_programs_then_answers_503(replica: FakeReplica) -> None:
    gate = Gate()
    caps = {"tenant_max_programs_count": 3, "max_programs_count": 5}
    async with running_proxy(replica.url, **caps) as proxy:
        for number in range(5):
            assert (await ask(proxy.url, f"p{number}")).status == 200
        assert [program.program_id for program in proxy.runtime.scheduler.programs.values()] == ["p2", "p3", "p4"]
        replica.behaviour = gate
        busy = [asyncio.create_task(ask(proxy.url, f"busy{number}")) for number in range(3)]
        await replica.call(7)
        refused = await ask(proxy.url, "one too many")
        assert (refused.status, refused.error["code"]) == (503, "too_many_programs")
        assert int(refused.header("Retry-After") or 0) > 0
        assert (await post(proxy.url, "/programs", {"program_id": "announced"})).status == 503
        assert (await post(proxy.url, "/programs", {"program_id": "of another", "tenant": "t"})).status == 200
        gate.open()
        assert {answer.status for answer in await asyncio.gather(*busy)} == {200}


# --- tenants


async def test_a_tenant_comes_from_the_key_and_the_header_does_not_count(replica: FakeReplica) -> None:
    async with running_proxy(replica.url, **KEYS) as proxy:
        table = proxy.runtime.scheduler.programs
        forged = ("X-Program-Tenant", "blue")
        await post(proxy.url, CHAT, turn("a"), RED, forged)
        await call(proxy.url, "POST", "/programs", OTHER_RED, body={"program_id": "b", "tenant": "blue"})
        lease = await post(proxy.url, "/leases", {"program_id": "c", "tenant": "red"}, BLUE)
        await post(proxy.url, f"/leases/{lease.json()['lease_id']}/end", {}, BLUE)
        await post(proxy.url, CHAT, turn("d"), ADMIN, forged)
        assert {program.program_id: program.tenant for program in table.values()} == {
            "a": "red",
            "b": "red",
            "c": "blue",
            "d": "blue",
        }


async def test_header_counts_where_the_option_is_off(replica: FakeReplica) -> None:
    async with running_proxy(replica.url, **KEYS, tenant_from_key=False) as proxy:
        await post(proxy.url, CHAT, turn("a"), RED, ("X-Program-Tenant", "blue"))
        program = proxy.runtime.scheduler.programs.get("a")
        assert program is not None
        assert program.tenant == "blue"
        assert (await call(proxy.url, "GET", "/programs", RED)).status == 403
        assert (await call(proxy.url, "DELETE", "/programs/a", BLUE)).json()["released"]


async def test_a_data_key_touches_programs_of_its_own_tenant_alone(replica: FakeReplica) -> None:
    """On every route blue sees no program of red's; red's other key has full access to them."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        table = proxy.runtime.scheduler.programs
        await post(proxy.url, CHAT, turn("a"), RED)
        await post(proxy.url, CHAT, turn("mine"), BLUE)
        releases: list[tuple[str, str, object]] = [
            ("DELETE", "/programs/a", None),
            ("POST", "/programs/release", {"program_id": "a"}),
            ("POST", "/programs/release", {"program_ids": ["a"]}),
            ("POST", "/programs/release", {"program_id": "a", "tenant": "red"}),
            ("POST", "/programs/release?program_id=a", None),
            ("POST", "/finish_session?session_id=a", None),
            ("POST", "/sessions/batch_delete", {"session_ids": ["a"]}),
            ("DELETE", "/sessions/a", None),
        ]
        for method, target, body in releases:
            answer = await call(proxy.url, method, target, BLUE, body=body)
            assert (answer.status, answer.json()["released"]) == (200, False), target
        for which in ("start", "end"):
            assert not (await call(proxy.url, "POST", f"/programs/a/tools/{which}", BLUE)).json()["known"]
        hint = {"next_turn_in_s": 1.0}
        assert not (await call(proxy.url, "POST", "/programs/a/hints", BLUE, body=hint)).json()["known"]
        refusals: list[tuple[str, object, list[Header]]] = [
            (CHAT, turn("a"), []),
            (CHAT, turn(), [("X-Program-ID", "a")]),
            (CHAT, turn(), [("X-Session-ID", "a"), ("X-Program-Final", "1")]),
            (f"/p/a{CHAT}", turn(), []),
            ("/programs", {"program_id": "a"}, []),
            ("/leases", {"program_id": "a"}, []),
        ]
        for target, body, headers in refusals:
            refused = await post(proxy.url, target, body, BLUE, *headers)
            assert (refused.status, refused.error["code"]) == (403, "other_tenant"), target
        assert (await call(proxy.url, "GET", "/programs/a", BLUE)).status == 404
        listed = (await call(proxy.url, "GET", "/programs?tenant=red", BLUE)).json()
        assert [program["program_id"] for program in listed["programs"]] == ["mine"]
        assert (await call(proxy.url, "GET", "/programs/a", OTHER_RED)).json()["tenant"] == "red"
        assert (await call(proxy.url, "GET", "/programs", ADMIN)).json()["total"] == 2
        assert (await call(proxy.url, "GET", "/programs")).status == 401
        assert table.get("a") is not None
        assert (await call(proxy.url, "DELETE", "/programs/a", OTHER_RED)).json()["released"]


async def test_a_family_and_a_group_live_in_one_tenant(replica: FakeReplica) -> None:
    """Blue's child of red's parent is held like a stranger; red's own child runs."""
    async with running_proxy(replica.url, **cap(1), **KEYS) as proxy:
        await post(proxy.url, CHAT, turn("parent"), RED, ("X-Program-Group", "g"))
        of_parent = ("X-Program-Parent", "parent")
        stranger = asyncio.create_task(post(proxy.url, CHAT, turn("s"), BLUE, of_parent, ("X-Program-Group", "g")))
        await held(proxy, 1)
        assert (await post(proxy.url, CHAT, turn("child"), RED, of_parent)).status == 200
        assert proxy.runtime.held_count == 1
        assert {len(group.programs) for group in proxy.runtime.scheduler.book.groups.values()} == {1}
        for program_id in ("parent", "child"):
            await call(proxy.url, "DELETE", f"/programs/{program_id}", RED)
        assert (await stranger).status == 200


async def test_a_prompt_that_begins_with_anothers_is_not_taken_for_its_next(replica: FakeReplica) -> None:
    said = {"role": "assistant", "content": "yes"}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    replica.behaviour = answers({"object": "chat.completion", "choices": [choice]})
    async with running_proxy(replica.url, **KEYS, infer_programs=True) as proxy:
        first = await post(proxy.url, CHAT, turn(content="task"), RED)
        asked = {"role": "user", "content": "task"}
        body = {"model": "simulated", "messages": [asked, said, {"role": "user", "content": "more"}]}
        stranger, own = await post(proxy.url, CHAT, body, BLUE), await post(proxy.url, CHAT, body, RED)
        assert stranger.header("X-Program-ID") != first.header("X-Program-ID")
        assert own.header("X-Program-ID") == first.header("X-Program-ID")


async def test_on_the_data_port_a_key_sees_its_own_programs(replica: FakeReplica) -> None:
    """Only keys with a tenant see any; the list of all programs is on the admin port alone."""
    async with running_proxy(replica.url, **KEYS, admin_port=0) as proxy:
        await post(proxy.url, CHAT, turn("a"), RED)
        assert (await call(proxy.url, "GET", "/programs", RED)).json()["total"] == 1
        assert (await call(proxy.url, "GET", "/programs", ADMIN)).status == 404
    async with running_proxy(replica.url, admin_port=0) as proxy:
        assert (await call(proxy.url, "GET", "/programs")).status == 404
        await ask(proxy.url, "a")
        for path in ("/programs/release", "/sessions/batch_delete"):
            assert (await call(proxy.url, "POST", path, body={"all": True})).status == 404
        named = await call(proxy.url, "POST", "/programs/release", body={"program_ids": ["a"]})
        assert named.json()["released_ids"] == ["a"]


async def test_a_body_that_needs_no_key_is_small(replica: FakeReplica) -> None:
    """At most 64 KiB are read before the client is known, whether announced or in chunks."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        for announced in (("Content-Length", str(65 * 1024)), ("Transfer-Encoding", "chunked")):
            async with Wire.open(proxy.url) as wire:
                wire.send_raw(head_bytes("POST /dashboard/login HTTP/1.1", [("Host", "x"), announced]))
                if announced[1] == "chunked":
                    wire.send_raw(65 * chunk(b" " * 1024))
                assert (await wire.answer()).status == 413


async def test_two_tenants_share_no_idempotency_key() -> None:
    """This holds even for unknown programs: the same body, which is no JSON, under the same key."""
    gate = Gate()
    async with (
        fake_replica(gate) as replica,
        running_proxy(replica.url, **KEYS) as proxy,
        Wire.open(proxy.url) as one,
        Wire.open(proxy.url) as other,
    ):
        again = [("Idempotency-Key", "k"), ("x-stainless-retry-count", "1"), ("Content-Type", "application/json")]
        for wire, key in ((one, RED), (other, BLUE)):
            wire.send("POST", CHAT, [*again, key], b"[no json")
        await until(lambda: len(replica.calls) == 2)
        gate.open()
        assert [(await wire.answer()).status for wire in (one, other)] == [200, 200]


async def test_every_program_needs_a_key_where_only_admins_have_keys(replica: FakeReplica) -> None:
    async with running_proxy(replica.url, admin_keys=(ADMIN_LINE,)) as proxy:
        await ask(proxy.url, "a")
        for target in ("/programs", "/programs/a"):
            assert (await call(proxy.url, "GET", target)).status in {401, 403}, target
            assert (await call(proxy.url, "GET", target, ADMIN)).status == 200, target
        assert (await call(proxy.url, "POST", "/programs/release", body={"all": True})).status in {401, 403}
        assert (await call(proxy.url, "DELETE", "/programs/a")).json()["released"]


def test_settings_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="less than one body"):
        ServeConfig.load(max_held_bytes=1000)
    with pytest.raises(ConfigurationError, match="tenant_from_key needs api_keys"):
        ServeConfig.load(tenant_from_key=True)
