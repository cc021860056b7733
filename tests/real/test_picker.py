"""`thunderagent picker` behind a real Envoy: leases for turns whose bytes Envoy carries."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import trustme

from tests.integration.support import (
    CHAT,
    DONE,
    JSON_TYPE,
    LAST_CHUNK,
    USAGE,
    USAGE_EVENT,
    Gate,
    Wire,
    ask,
    chunk,
    command,
    engine,
    events_of,
    fake_replica,
    get,
    head_bytes,
    metric,
    metrics_of,
    post,
    stream_head,
    turn,
    until,
    until_metric,
    word,
)
from tests.loopback import free_ports
from tests.real.envoy_server import ClientTls, configuration, envoy, packages
from thunderagent.programs.policies.baselines.sticky import rendezvous_hash

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path
    from typing import NoReturn

    from tests.integration.support import CommandProcess


ONE_AT_A_TIME = ("--policy", "cap", "--policy-arg", "n=1", "--idle-limit-s", "30")
HALF_ANSWER = head_bytes("HTTP/1.1 200 OK", [JSON_TYPE, ("content-length", "1000")]) + b'{"id": '


@pytest.fixture(scope="module", autouse=True)
def installed(require_real: Callable[[str], NoReturn]) -> None:
    """Install it before the first test, whose time is limited."""
    packages(require_real)


class Front:
    """An Envoy and its picker, in front of engines."""

    def __init__(self, url: str, picker: CommandProcess) -> None:
        self.url = url
        self.picker = picker

    async def metric(self, name: str, *labels: str) -> float:
        return await metric(self.picker.url, name, *labels)

    async def until(self, name: str, value: float, *labels: str, within_s: float = 30.0) -> float:
        """Wait until a metric has a value; return the wait in seconds."""
        return await until_metric(self.picker.url, name, value, *labels, within_s=within_s)


@asynccontextmanager
async def front(
    require_real: Callable[[str], NoReturn],
    folder: Path,
    *urls: str,
    options: tuple[str, ...] = (),
    retries_count: int = 0,
    subset: Sequence[str] | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[Front]:
    """Run both; the picker calls engines by `host`, and picks among a `subset`."""
    found = packages(require_real)
    port, picker_port = free_ports(2)
    quick = ("--port", "0", "--picker-port", str(picker_port), "--poll-interval-s", "0.2", "--tick-s", "0.05")
    which = () if "--schedulers" in options else ("--backends", ",".join(urls).replace("127.0.0.1", host))
    settings = {"PYTHONPATH": str(found)}
    engine_ports = [int(url.rpartition(":")[2]) for url in urls]
    config = configuration(port, picker_port, engine_ports, retries_count=retries_count, subset=subset)
    async with command("picker", *quick, *which, *options, settings=settings) as picker:
        await picker.ready()
        async with envoy(found, folder, config, port=port) as url:
            try:
                yield Front(url, picker)
            except BaseException:
                print(picker.log[-6000:], (folder / "envoy.log").read_text()[-3000:])
                raise


@asynccontextmanager
async def begun(front: Front, program_id: str, **fields: Any) -> AsyncIterator[Wire]:
    """Send a turn whose client may leave."""
    async with Wire.open(front.url) as wire:
        body = json.dumps(turn(program_id, **fields)).encode()
        wire.send("POST", CHAT, [("Content-Type", "application/json")], body)
        yield wire


async def test_turns_are_counted_to_the_token(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """Covers streams and whole answers, large prompts, and requests besides turns; under leases, on both engines."""
    async with (
        engine(kv_tokens=400_000) as one,
        engine(kv_tokens=400_000) as two,
        front(require_real, tmp_path, one.url, two.url) as running,
    ):
        async with asyncio.TaskGroup() as group:
            answers = [
                group.create_task(ask(running.url, f"p{number % 8}", stream=number % 2 == 0, max_tokens=8))
                for number in range(32)
            ]
        for answer in (each.result() for each in answers):
            assert answer.status == 200
            assert answer.header("x-program-id")
            assert answer.header("x-replica-id")
        streamed = answers[0].result()
        assert events_of(streamed.body)[-1] == "[DONE]"
        assert b'"usage"' not in streamed.body, "what only we asked for is taken out"
        large = await ask(running.url, "large", content="word " * 60_000, max_tokens=4)
        assert large.status == 200
        named = await post(running.url, "/p/by-path/v1/chat/completions", turn(max_tokens=4))
        assert named.header("x-program-id") == "by-path"
        assert (await get(running.url, "/v1/models")).status == 200
        await running.until("leases_active", 0)
        assert await running.metric("turns_total", "finished") == 34
        counted = {"prompt": 0.0, "generation": 0.0}
        for each in (one, two):
            of_engine = await metrics_of(each.url)
            for name in counted:
                counted[name] += sum(of_engine[f"vllm:{name}_tokens_total"].values())
        assert await running.metric("prompt_tokens_total") == counted["prompt"]
        assert await running.metric("output_tokens_total") == counted["generation"]
        assert "Traceback" not in running.picker.log


async def test_a_client_leaves_in_five_moments(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """Held, before the first byte, in a stream or a whole answer: its lease returns, its engine stops. With `[DONE]`
    it has its answer."""
    stream = [stream_head(), chunk(word("one"))]
    done = [*stream, chunk(USAGE_EVENT), chunk(DONE)]
    behaviours = iter([Gate(), Gate(stream), Gate([HALF_ANSWER]), Gate(done)])

    async def behave(call: Any) -> None:
        await next(behaviours)(call)

    took_s = {}
    async with (
        fake_replica(behave) as replica,
        front(require_real, tmp_path, replica.url, options=ONE_AT_A_TIME) as running,
    ):
        async with begun(running, "first") as wire:
            await running.until("leases_active", 1)
            async with begun(running, "second") as held:
                await running.until("turns_held", 1)
                await held.leave()
                took_s["held"] = await running.until("turns_held", 0)
            call = await replica.call()
            await wire.leave()
            await asyncio.wait_for(call.left.wait(), 30.0)
            took_s["before the first byte"] = await running.until("leases_active", 0)
        async with begun(running, "first", stream=True) as wire:
            assert (await wire.head()).status == 200
            await wire.leave()
            took_s["in a stream"] = await running.until("leases_active", 0)
        async with begun(running, "first") as wire:
            await until(lambda: len(replica.calls) == 3)
            await asyncio.sleep(0.1)  # so that half of the answer has been sent
            await wire.leave()
            took_s["in an answer"] = await running.until("leases_active", 0)
        async with begun(running, "first", stream=True) as wire:
            await wire.head()
            while DONE not in await wire.chunk():
                pass
            await wire.leave()
            took_s["with the last event"] = await running.until("leases_active", 0)
        assert await running.metric("turns_total", "abandoned") == 4
        assert await running.metric("turns_total", "finished") == 1
        assert await running.metric("output_tokens_total") == USAGE["completion_tokens"]
        await until(lambda: all(call.left.is_set() for call in replica.calls))
        assert len(replica.calls) == 4
    print({name: f"{each * 1000:.0f} ms" for name, each in took_s.items()})


async def test_a_turn_is_held_past_the_message_timeout(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """The timeout is 0.2 s: Envoy waits as long as the lease takes, and the turn then runs."""
    async with (
        fake_replica(
            gate := Gate([stream_head(), chunk(word("one"))], [chunk(USAGE_EVENT), chunk(DONE), LAST_CHUNK])
        ) as replica,
        front(require_real, tmp_path, replica.url, options=(*ONE_AT_A_TIME, "--idle-limit-s", "0.1")) as running,
        begun(running, "first", stream=True) as first,
    ):
        assert (await first.head()).status == 200
        async with begun(running, "second", stream=True) as second:
            await running.until("turns_held", 1)
            await asyncio.sleep(5.0)
            assert await running.metric("turns_held") == 1
            gate.open()
            assert (await second.head()).status == 200
            await running.until("turns_held", 0)
        await running.until("leases_active", 0)


async def test_refusals_come_as_they_are(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """503 without replicas, 429 or 503 for too many turns, with JSON and Retry-After; 413 for too large a body."""
    limits = ("--max-held-turns-count", "1", "--no-replica-limit-s", "0.5", "--max-body-bytes", "100000")
    async with (
        fake_replica(Gate()) as replica,
        front(require_real, tmp_path, replica.url, options=(*ONE_AT_A_TIME, *limits)) as running,
        begun(running, "first"),
    ):
        await running.until("leases_active", 1)
        async with begun(running, "second"):
            await running.until("turns_held", 1)
            refused = await ask(running.url, "third")
            assert refused.status in (429, 503)
            assert refused.error["message"]
            assert refused.header("retry-after")
        large = await ask(running.url, "fourth", content="x" * 200_000)
        assert (large.status, large.error["code"]) == (413, "body_too_large")
        await replica.stop()
        await running.until("replica_up", 0, replica.replica_id)
        gone = await ask(running.url, "fifth")
        assert (gone.status, gone.error["code"]) == (503, "no_replica")
        assert gone.header("retry-after")


async def test_unsafe_side_call_gets_403(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """They control an engine, or generate on an unknown API; no engine receives them."""
    async with fake_replica() as replica, front(require_real, tmp_path, replica.url) as running:
        for path in ("/sleep", "/collective_rpc", "/v1/load_lora_adapter", "/v1/audio/transcriptions", "/nobody"):
            for target in (path, f"/p/some{path}"):
                refused = await post(running.url, target, {})
                assert (refused.status, refused.error["code"]) == (403, "admin_key_needed"), target
                assert "send this one to the engine" in refused.error["message"]
        assert not replica.calls
        assert (await get(running.url, "/v1/models")).status == 200
        assert len(replica.calls) == 1


async def test_bodies_are_bounded_in_sum_while_they_come(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """A client that waits after a part of a large body leaves no room for another, and frees it by leaving."""
    large = turn("second", content="x" * 200_000)
    limits = ("--max-held-bytes", "300000", "--max-body-bytes", "300000")
    async with fake_replica() as replica, front(require_real, tmp_path, replica.url, options=limits) as running:
        assert (await post(running.url, CHAT, large)).status == 200
        async with Wire.open(running.url) as wire:
            head = [("Host", "x"), JSON_TYPE, ("Content-Length", "250000")]
            wire.send_raw(head_bytes(f"POST {CHAT} HTTP/1.1", head) + b"x" * 200_000)
            async with asyncio.timeout(20):
                while (answer := await post(running.url, CHAT, large)).status == 200:
                    await asyncio.sleep(0.05)
            assert (answer.status, answer.error["code"]) == (503, "too_many_held")
            assert answer.header("retry-after")
        async with asyncio.timeout(20):
            while (await post(running.url, CHAT, large)).status != 200:
                await asyncio.sleep(0.05)


async def test_replicas_with_names_are_picked_among_a_subset_of_names(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """Envoy does not accept 0x7f.1 as an address, so it is looked up; the answer names the server by address."""
    async with engine(kv_tokens=64_000) as one:
        port = one.url.rpartition(":")[2]
        for hint, status in ((f"0x7f.1:{port}", 200), (f"127.0.0.1:{port}", 200), (f"0x7f.2:{port}", 503)):
            async with front(require_real, tmp_path, one.url, subset=[hint], host="0x7f.1") as running:
                answer = await ask(running.url, "p", max_tokens=4)
                assert answer.status == status, hint
                assert (await get(running.url, "/v1/models")).status == status
                if status == 200:
                    assert answer.header("x-replica-id") == f"0x7f.1:{port}"
                    await running.until("turns_total", 1, "finished")
                    assert "turn_moved" not in running.picker.log
                else:
                    assert answer.error["code"] == "no_replica"
                    assert await running.metric("leases_active") == 0


async def test_only_envoys_with_a_certificate_are_let_in(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """The certificate must be signed by the authority that the picker is configured with."""
    found = packages(require_real)
    servers, envoys = trustme.CA(), trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("servers", "envoys", "picker", "envoy", "stranger")}
    servers.cert_pem.write_to_path(str(files["servers"]))
    envoys.cert_pem.write_to_path(str(files["envoys"]))
    for name, authority in (("picker", servers), ("envoy", envoys), ("stranger", servers)):
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(files[name]))
    async with fake_replica() as replica:
        port, picker_port = free_ports(2)
        options = ("--port", "0", "--picker-port", str(picker_port), "--backends", replica.url)
        tls = ("--tls-cert", str(files["picker"]), "--picker-client-ca", str(files["envoys"]))
        async with command("picker", *options, *tls, settings={"PYTHONPATH": str(found)}):
            for own, is_let_in in (("envoy", True), ("stranger", False), (None, False)):
                shown = ClientTls(files["servers"], files[own] if own is not None else None)
                config = configuration(port, picker_port, [int(replica.url.rpartition(":")[2])], tls=shown)
                calls_count = len(replica.calls)
                async with envoy(found, tmp_path, config, port=port) as url:
                    status = (await ask(url, "p", max_tokens=4)).status
                assert status == 200 if is_let_in else status >= 500, own
                assert len(replica.calls) - calls_count == is_let_in


async def test_envoy_goes_around_an_engine_that_is_gone(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """It uses the list of fallbacks; the lease moves to the engine that served."""
    async with engine(kv_tokens=64_000) as one, engine(kv_tokens=64_000) as two:
        slow = ("--fallbacks", "1", "--policy", "sticky", "--poll-interval-s", "10")
        async with front(require_real, tmp_path, one.url, two.url, options=slow, retries_count=2) as running:
            for each in (one, two):
                await running.until("replica_up", 1, each.url.removeprefix("http://"))
            ids = [each.url.removeprefix("http://") for each in (one, two)]
            homes = {name: max(ids, key=partial(rendezvous_hash, name)) for name in map(str, range(64))}
            at = {home: name for name, home in homes.items()}  # a program for each engine, whatever their ports
            for home, name in at.items():
                assert (await ask(running.url, name, max_tokens=4)).header("x-replica-id") == home
            two.process.kill()  # it was polled just now, and is not again for ten seconds
            await two.exit_status()
            answer = await ask(running.url, at[ids[1]], max_tokens=4)
            assert answer.status == 200
            assert one.url.endswith(str(answer.header("x-replica-id")))
            await running.until("leases_active", 0)
            assert await running.metric("turns_total", "failed") == 1
            assert await running.metric("turns_total", "finished") == 3
            assert "turn_moved" in running.picker.log


async def test_a_killed_picker_ends_turns_and_is_started_again(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """Envoy refuses requests that it cannot ask about; a picker with a remote scheduler loses only open turns."""
    found = packages(require_real)
    async with engine(kv_tokens=64_000) as behind:
        (port,) = free_ports(1)
        quick = ("--listen", f"127.0.0.1:{port}", "--poll-interval-s", "0.2", "--gateway-lost-s", "0.5")
        async with command("scheduler", *quick, "--backends", behind.url) as scheduler:
            options = ("--schedulers", scheduler.url)
            async with front(require_real, tmp_path, behind.url, options=options) as running:
                assert (await ask(running.url, "p", max_tokens=4)).status == 200
                command_line = running.picker.ready_line
                picker_port = command_line.rpartition(":")[2].strip()
                running.picker.process.kill()
                await running.picker.exit_status()
                assert (await ask(running.url, "p", max_tokens=4)).status >= 500
                again = ("--port", "0", "--picker-port", picker_port, *options)
                async with command("picker", *again, settings={"PYTHONPATH": str(found)}) as picker:
                    await picker.ready()
                    async with asyncio.timeout(30):
                        while (await ask(running.url, "p", max_tokens=4)).status != 200:
                            await asyncio.sleep(0.1)
                    await until_metric(scheduler.url, "leases_active", 0)


async def test_thousands_are_held(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """2,500 turns wait in Envoy for leases while there is no replica, and all are answered when one comes."""
    async with (
        fake_replica() as replica,
        front(require_real, tmp_path, replica.url, options=("--no-replica-limit-s", "600")) as running,
    ):
        await replica.stop()
        await running.until("replica_up", 0, replica.replica_id)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as http:

            async def status_of(number: int) -> int:
                async with http.post(f"{running.url}{CHAT}", json=turn(f"p{number}")) as answer:
                    await answer.read()
                    return answer.status

            async with asyncio.TaskGroup() as group:
                statuses = [group.create_task(status_of(number)) for number in range(2500)]
                async with asyncio.timeout(250):
                    while await running.metric("turns_held") != 2500:
                        await asyncio.sleep(0.5)
                await replica.start()
        assert {each.result() for each in statuses} == {200}
        assert len(replica.calls) == 2500
        await running.until("leases_active", 0)
