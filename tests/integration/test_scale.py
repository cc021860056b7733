"""Gateways and a scheduler as separate processes: killed ones restart, and nothing is lost."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import ssl
import subprocess
import tarfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from tests.integration.support import (
    CHAT,
    DONE,
    LAST_CHUNK,
    USAGE_EVENT,
    Gate,
    Wire,
    answers,
    ask,
    chunk,
    command,
    engine,
    events_of,
    exchange,
    fake_replica,
    get,
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
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError, SchedulerUnreachableError
from thunderagent.one_machine import serve_with_gateways
from thunderagent.proxy.gate.guard import MAX_OPEN_BODY_BYTES
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import TARGET
from thunderagent.scale.gateway.app import Scheduler
from thunderagent.scaling import check_gateways

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import Answer, CommandProcess

pytestmark = pytest.mark.timeout(180)

FAIL_OPEN = "X-ThunderAgent-Fail-Open"


@asynccontextmanager
async def scheduler(*options: str, at: str = "") -> AsyncIterator[CommandProcess]:
    at = at or f"127.0.0.1:{free_ports(1)[0]}"  # so that nobody else gets the port of one that was killed
    quick = ("--listen", at, "--poll-interval-s", "0.05", "--gateway-lost-s", "3")
    async with command("scheduler", *quick, *options) as process:
        yield process


@asynccontextmanager
async def gateway(scheduler_url: str, *options: str) -> AsyncIterator[CommandProcess]:
    async with command("gateway", "--port", "0", "--schedulers", scheduler_url, *options) as process:
        await process.ready()
        yield process


async def next_line(process: CommandProcess) -> str:
    assert process.process.stdout is not None
    return (await process.process.stdout.readline()).decode()


async def test_no_process_of_a_cell_is_called_ready_while_no_replica_is_up() -> None:
    """Neither the scheduler, nor a gateway, nor all of them by one command; each says once that it is."""
    async with fake_replica() as replica, AsyncExitStack() as stack:
        await replica.stop()
        at = ("--backends", replica.url, "--poll-interval-s", "0.05")
        schedules = await stack.enter_async_context(scheduler("--backends", replica.url))
        carrying = command("gateway", "--port", "0", "--schedulers", schedules.url)
        together = command("serve", "--port", "0", "--gateways", "1", *at)
        processes = [schedules, *[await stack.enter_async_context(each) for each in (carrying, together)]]
        for process, what in zip(processes, ("policy ", "gateway ", "policy "), strict=True):
            assert process.ready_line.startswith(f"thunderagent not yet ready at {process.url}: {what}")
            assert "; no replica is up: " in process.ready_line
        await replica.start()
        for process in processes:
            assert (await next_line(process)).startswith(f"thunderagent ready at {process.url}: ")


async def test_a_gateway_without_a_scheduler_says_so_at_its_start() -> None:
    """It is ready once there is one."""
    at = f"127.0.0.1:{free_ports(1)[0]}"
    async with fake_replica() as replica, command("gateway", "--port", "0", "--schedulers", f"http://{at}") as carries:
        assert "; there is no link to a scheduler: " in carries.ready_line
        async with scheduler("--backends", replica.url, at=at):
            assert (await next_line(carries)).startswith(f"thunderagent ready at {carries.url}: gateway ")


async def killed(process: CommandProcess) -> str:
    """Kill a process, and return the address that it had."""
    process.process.kill()
    await process.exit_status()
    return process.url.removeprefix("http://")


async def gateway_ids(served: CommandProcess, count: int) -> list[int]:
    """Wait until this number of gateways runs, and return their process ids."""
    found: list[int] = []
    async with asyncio.timeout(60):
        while len(found) != count:
            await asyncio.sleep(0.05)
            of_parent = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
            found = [each for each in map(int, of_parent) if b"gateway" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return found


async def ask_in_stream(url: str, program_id: str) -> Answer:
    return await ask(url, program_id, stream=True, max_tokens=16, stream_options={"include_usage": True})


async def test_streams_go_through_a_restart_of_the_scheduler() -> None:
    """There is no error, and gateways count what the engine counts, to the token."""
    async with (
        engine(kv_tokens=64_000) as behind,
        scheduler("--backends", behind.url) as first,
        gateway(first.url) as front,
        asyncio.TaskGroup() as group,
    ):
        answers: list[Answer] = []
        stop = asyncio.Event()

        async def talk(program_id: str) -> None:
            while not stop.is_set():
                answers.append(await ask_in_stream(front.url, program_id))

        talking = [group.create_task(talk(f"p{number}")) for number in range(6)]
        await until(lambda: len(answers) >= 30)
        at = await killed(first)
        async with scheduler("--backends", behind.url, at=at) as second:
            before_count = len(answers)
            await until(lambda: len(answers) >= before_count + 30)
            stop.set()
            await asyncio.wait(talking)
            await until_metric(front.url, "leases_active", 0)
            await until_metric(front.url, "turns_held", 0)
            await until_metric(front.url, "gateway_turns_told", 0)
            assert await metric(second.url, "leases_active") == 0
            assert await metric(second.url, "turns_held") == 0
            assert await metric(front.url, "gateway_epoch") == 2
        assert {answer.status for answer in answers} == {200}
        assert all(answer.whole and events_of(answer.body)[-1] == "[DONE]" for answer in answers)
        assert await metric(front.url, "turns_total", "finished") == len(answers)
        of_engine = await metrics_of(behind.url)
        for ours, theirs in (("prompt_tokens_total", "prompt"), ("output_tokens_total", "generation")):
            counted = sum(of_engine[f"vllm:{theirs}_tokens_total"].values())
            assert await metric(front.url, ours) == counted
        assert "Traceback" not in front.log


async def begin(wire: Wire, program_id: str) -> None:
    wire.send("POST", CHAT, (), json.dumps(turn(program_id, stream=True)).encode())
    assert (await wire.head()).status == 200
    assert await wire.chunk() == word("one")


def a_stream() -> Gate:
    return Gate([stream_head(), chunk(word("one"))], [chunk(USAGE_EVENT), chunk(DONE), LAST_CHUNK])


ONE_AT_A_TIME = ("--policy", "cap", "--policy-arg", "n=1")


async def test_running_turns_are_counted_and_held_turns_stay_held() -> None:
    """A new scheduler learns both from its gateway, and grants nothing that the old one would not have granted."""
    async with fake_replica(gate := a_stream()) as replica:
        options = ("--backends", replica.url, *ONE_AT_A_TIME)
        async with (
            scheduler(*options) as first,
            gateway(first.url) as front,
            Wire.open(front.url) as wire,
            asyncio.TaskGroup() as group,
        ):
            await begin(wire, "running")
            held = group.create_task(ask(front.url, "held", stream=True))
            await until_metric(first.url, "turns_held", 1)
            at = await killed(first)
            beside = group.create_task(ask(front.url, "beside", stream=True))
            async with scheduler(*options, at=at) as second:
                await until_metric(second.url, "turns_held", 2)
                assert await metric(second.url, "leases_active") == 1
                assert len(replica.calls) == 1
                programs = json.loads((await get(front.url, "/programs")).body)["programs"]
                assert {each["program_id"] for each in programs} == {"running", "held", "beside"}
                assert {each["turns_in_flight_count"] for each in programs if each["program_id"] == "running"} == {1}
                gate.open()
                await wire.chunk()
                released = await post(front.url, "/programs/release", {"program_id": "running"})
                assert released.json()["released"]
                for each in (await held, await post(front.url, "/programs/release", {"program_id": "held"})):
                    assert each.status == 200
                assert (await beside).status == 200
                await until_metric(second.url, "turns_total", 3, "finished")
                assert await metric(front.url, "fail_open_turns_total") == 0


async def test_a_stream_goes_on_where_the_next_scheduler_does_not_know_its_replica(tmp_path: Path) -> None:
    """Its source may not have said so yet, or no longer does: no turn begins there, and none is cut."""
    file = tmp_path / "replicas.json"
    async with fake_replica(gate := a_stream()) as replica:
        file.write_text(json.dumps([replica.url]))
        options = ("--backends-file", str(file))
        async with scheduler(*options) as first, gateway(first.url) as front, Wire.open(front.url) as wire:
            await begin(wire, "running")
            at = await killed(first)
            file.write_text("[]")
            async with scheduler(*options, at=at):
                await until_metric(front.url, "gateway_epoch", 2)
                assert (await get(front.url, "/v1/models")).status == 503
                gate.open()
                assert await wire.chunk() == DONE
                await until_metric(front.url, "turns_total", 1, "finished")
                assert await metric(front.url, "turns_total", "failed") == 0


@pytest.mark.parametrize("is_same", [True, False])
async def test_the_next_attempt_at_a_turn_ends_the_one_at_another_gateway(is_same: bool) -> None:
    """The earlier attempt ends first, then the next runs; another turn under the same key is another turn."""
    async with (
        fake_replica(gate := Gate()) as replica,
        scheduler("--backends", replica.url) as over,
        gateway(over.url) as first,
        gateway(over.url) as second,
        Wire.open(first.url) as earlier,
        Wire.open(second.url) as later,
    ):
        for wire, content in ((earlier, "hello"), (later, "hello" if is_same else "hallo")):
            body = json.dumps(turn("p", content=content)).encode()
            wire.send("POST", CHAT, [("Content-Type", "application/json"), ("Idempotency-Key", "k")], body)
            await until(lambda wire=wire: len(replica.calls) == 1 + (wire is later))
        await until(lambda: replica.calls[0].left.is_set() is is_same)
        gate.open()
        assert (await later.answer()).status == 200
        assert (await earlier.answer()).status == (410 if is_same else 200)
        await until_metric(over.url, "turns_total", 1 if is_same else 0, "superseded")
        await until_metric(over.url, "turns_total", 1 if is_same else 2, "finished")
        for each in (over, first, second):
            assert await metric(each.url, "leases_active") == 0
            assert await metric(each.url, "turns_held") == 0


async def test_without_a_scheduler_turns_run_in_the_end() -> None:
    """They wait as long as they may; then they run, marked, and the next scheduler counts them."""
    async with fake_replica(gate := a_stream()) as replica:
        options = ("--backends", replica.url, *ONE_AT_A_TIME)
        limits = ("--scheduler-patience-s", "0.3", "--fail-open-turns-count", "2")
        async with (
            scheduler(*options) as first,
            gateway(first.url, *limits) as front,
            Wire.open(front.url) as wire,
            asyncio.TaskGroup() as group,
        ):
            await begin(wire, "a")
            waiting = []
            for name in ("b", "c"):  # in this order: the first one runs without a lease
                waiting.append(group.create_task(ask(front.url, name, stream=True)))
                await until_metric(first.url, "turns_held", len(waiting))
            at = await killed(first)
            await replica.call(1)
            assert await metric(front.url, "fail_open_turns_total") == 1
            assert await metric(front.url, "turns_held") == 1, "more than two run"
            assert (await get(front.url, "/ready")).status == 200
            assert (await get(front.url, "/programs")).error["code"] == "scheduler_unreachable"
            async with scheduler(*options, at=at) as second:
                await until_metric(second.url, "leases_active", 2)
                gate.open()
                for name in ("a", "b"):
                    await post(front.url, "/programs/release", {"program_id": name})
                answers = await asyncio.gather(*waiting)
                assert [answer.status for answer in answers] == [200, 200]
                assert sorted(answer.header(FAIL_OPEN) or "" for answer in answers) == ["", "1"]
                await until_metric(second.url, "turns_total", 3, "finished")


async def test_trainer_abort_at_a_gateway_is_no_engine_failure() -> None:
    """Only the scheduler hears of the abort, and only the gateway of the answer."""
    async with (
        fake_replica(answers({"status": "aborted"})) as replica,
        scheduler("--backends", replica.url) as over,
        gateway(over.url) as front,
        Wire.open(front.url) as wire,
    ):
        ends = Gate([stream_head(), chunk(word("one"))], [chunk(word("", "abort")), chunk(DONE), LAST_CHUNK])
        replica.behaviour = ends
        await begin(wire, "a")
        replica.behaviour = answers({"status": "aborted"})
        assert (await post(over.url, "/abort_requests", {})).status == 200
        ends.open()
        while await wire.chunk():
            pass
        await until_metric(over.url, "leases_active", 0)
        report = (await get(over.url, "/programs/a")).json()
        assert (report["verdict"], report["verdict_replica_id"]) == ("aborted_by_trainer", replica.replica_id)


async def test_limits_hold_through_gateways_and_the_end_of_a_program_aborts_its_turns_there() -> None:
    """The scheduler counts turns of all gateways, and says to each which of its turns end."""
    headers = [("Content-Type", "application/json"), ("X-Program-ID", "p"), ("X-Program-Limits", "max_turns=2")]
    body = json.dumps(turn()).encode()
    async with (
        fake_replica(answers()) as replica,
        scheduler("--backends", replica.url) as over,
        gateway(over.url) as first,
        gateway(over.url) as second,
    ):
        assert (await exchange(first.url, "POST", CHAT, headers, body)).status == 200
        replica.behaviour = Gate()
        running = asyncio.create_task(exchange(second.url, "POST", CHAT, headers, body))
        await until(lambda: len(replica.calls) == 2)
        refused = await exchange(first.url, "POST", CHAT, headers, body)
        assert (refused.status, refused.json()["error"]["code"]) == (410, "program_limit")
        assert (await post(over.url, "/programs/release", {"program_id": "p", "abort": True})).status == 200
        answer = await running
        assert (answer.status, answer.json()["error"]["code"]) == (410, "program_released")
        await until(replica.calls[1].left.is_set)
        await until_metric(over.url, "leases_active", 0)


async def test_the_turns_of_a_gateway_that_died_are_over() -> None:
    """Its program's room goes to others, through another gateway."""
    async with fake_replica(a_stream()) as replica:
        options = ("--backends", replica.url, *ONE_AT_A_TIME)
        async with (
            scheduler(*options, "--idle-limit-s", "0.2", "--gateway-lost-s", "0.5") as schedules,
            gateway(schedules.url) as one,
            gateway(schedules.url) as other,
        ):
            async with Wire.open(one.url) as wire, Wire.open(other.url) as second, asyncio.TaskGroup() as group:
                await begin(wire, "a")
                waiting = group.create_task(begin(second, "b"))
                await until_metric(schedules.url, "turns_held", 1)
                await killed(one)
                await waiting
                replica.calls[1].close()
                assert await second.chunk(), "an error event: its replica closed the connection, after the first word"
            await until_metric(schedules.url, "leases_active", 0)
            assert "gateway_lost" in schedules.log


async def test_one_command_serves_with_several_gateways() -> None:
    """They share one port; a killed one is started again, and no turn of the others fails."""
    async with (
        engine(kv_tokens=64_000) as behind,
        command("serve", "--port", "0", "--backends", behind.url, "--gateways", "2") as served,
    ):
        await served.ready()
        first, second = await gateway_ids(served, 2)
        os.kill(first, signal.SIGKILL)
        await until(lambda: "gateway_ended" in served.log)
        assert second in await gateway_ids(served, 2)
        await served.ready()
        answers = await asyncio.gather(*(ask_in_stream(served.url, f"p{number}") for number in range(20)))
        assert {answer.status for answer in answers} == {200}
        programs = json.loads((await get(served.url, "/programs")).body)["programs"]
        assert len(programs) == 20
        of_scheduler = await get(served.url, "/scheduler/metrics")
        assert sum(b"thunderagent_programs{" in line for line in of_scheduler.body.splitlines()) > 0
        served.process.terminate()
        assert await served.exit_status() == 0
        assert "Traceback" not in served.log


async def test_with_keys_the_one_command_has_its_own_for_its_gateways() -> None:
    """Clients use theirs, at a gateway as at its scheduler; without a key no request gets in."""
    key, line = mint_key("me")
    named = ("--api-keys", line, "--tenant-from-key", "false")
    async with command("serve", "--port", "0", "--gateways", "1", *named) as served:
        await served.ready()
        bearer = ("Authorization", f"Bearer {key}")
        assert (await post(served.url, CHAT, turn("p"), bearer)).status == 200
        assert (await post(served.url, CHAT, turn("p"))).status == 401
        assert (await exchange(served.url, "DELETE", "/programs/p", [bearer])).json()["released"]
        assert (await exchange(served.url, "DELETE", "/programs/p")).status == 401
        assert (await exchange(served.url, "GET", "/queue", [bearer])).status == 403
        assert (await get(served.url, "/scheduler/metrics")).status == 200
        internal = await exchange(served.url, "GET", "/internal/lease", [bearer])
        assert internal.status in (403, 404)


async def test_an_operator_logs_in_at_any_gateway() -> None:
    """The scheduler knows the logins: an unknown cookie opens neither the scheduler nor a gateway."""
    key, line = mint_key("operator")
    named = ("--admin-keys", line, "--api-keys", mint_key("me")[1], "--tenant-from-key", "false")
    async with command("serve", "--port", "0", "--gateways", "2", "--metrics-need-key", *named) as served:
        await served.ready()
        page = ("Origin", served.url), ("Sec-Fetch-Site", "same-origin")
        login = await post(served.url, "/dashboard/login", json.dumps({"key": key}).encode(), *page)
        assert login.status == 200
        cookie = ("Cookie", str(login.header("Set-Cookie")).partition(";")[0])
        for _ in range(8):  # the system chooses the gateway of each connection
            assert (await exchange(served.url, "GET", "/queue", [cookie, *page])).status == 200
            assert (await get(served.url, "/scheduler/metrics")).status == 401
            assert (await post(served.url, CHAT, turn("p"), cookie)).status == 401
        assert (await post(served.url, "/replicas", b"{}", cookie, ("Origin", "http://elsewhere"))).status == 403
        assert (await exchange(served.url, "GET", "/queue", [("Cookie", "thunderagent_login=x")])).status == 401
        admins = [("Authorization", f"Bearer {key}")]
        assert (await exchange(served.url, "GET", "/scheduler/metrics", admins)).status == 200
        for login_only in (cookie, ("Cookie", "thunderagent_login=x")):
            assert (await post(served.url, "/programs/release", b'{"all": true}', login_only, *page)).status == 401
        large = b" " * (16 * MAX_OPEN_BODY_BYTES)
        assert (await exchange(served.url, "GET", "/queue", [("Cookie", "thunderagent_login=x")], large)).status == 413


def test_option_for_one_process_is_refused_with_gateways() -> None:
    """The refusal comes before anything starts, with the names of the settings."""
    config = ServeConfig.load(gateways=2, infer_programs=True, judge_url="replicas")
    with pytest.raises(ConfigurationError, match="infer_programs, judge_url go with no gateways yet"):
        check_gateways(config)
    _, line = mint_key("me")
    with pytest.raises(ConfigurationError, match="tenant_from_key"):
        check_gateways(ServeConfig.load(gateways=2, api_keys=line))
    with pytest.raises(ConfigurationError, match="is not a URL"):
        ServeConfig.load(schedulers="http://host:port:")


async def test_gateways_answer_no_network_with_simulated_engines() -> None:
    """`serve` refuses the same with gateways: a scheduler on loopback makes no difference."""
    config = ServeConfig.load(host="0.0.0.0", port=0, allow_open=True, gateways=1)
    with pytest.raises(ConfigurationError, match="backends: there are none"):
        await serve_with_gateways(config, (), announcer=None)


async def forwarded(method: str, target: str, to: Scheduler) -> int:
    """Forward a request of a gateway; return the status of the answer."""
    request = make_mocked_request(method, target)
    request[TARGET] = Target.parse(target, "gateway")
    async with asynccontextmanager(to.context)(web.Application()):
        relay = to.metrics if target == "/scheduler/metrics" else to.forward
        return (await relay(request)).status


async def test_question_to_a_gateway_reaches_its_scheduler() -> None:
    """A target in absolute form is a path there, too; a client that vouches for replicas does so there."""
    heard: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        heard.append(request.raw_path)
        return web.Response()

    app, authority = web.Application(), trustme.CA()
    app.router.add_get("/{tail:.*}", answer)
    of_server, of_gateway = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(of_server)
    authority.configure_trust(of_gateway)
    async with AsyncExitStack() as stack:
        server = TestServer(app, host="127.0.0.1")
        await server.start_server(ssl=of_server)
        stack.push_async_callback(server.close)
        to = Scheduler(lambda: str(server.make_url("/")), of_gateway)
        assert await forwarded("GET", "/programs/a%2Fb?pool=m", to) == 200
        assert await forwarded("GET", "http://gateway/queue?x=1", to) == 200
        assert await forwarded("GET", "/scheduler/metrics", to) == 200
    assert heard == ["/programs/a%2Fb?pool=m", "/queue?x=1", "/metrics"]


async def test_a_scheduler_that_hangs_is_waited_for_no_longer_than_it_may_take() -> None:
    """A query is given up after its limit; leases and commands have no limit."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.set()
        await go_on.wait()
        return web.Response(status=201 if request.method == "POST" else 200)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    async with TestServer(app, host="127.0.0.1") as server, asyncio.TaskGroup() as group:
        url = str(server.make_url("/"))
        with pytest.raises(SchedulerUnreachableError, match="did not answer in 0"):
            await forwarded("GET", "/queue", Scheduler(lambda: url, answer_limit_s=0.05))
        asked.clear()
        waiting = group.create_task(forwarded("POST", "/leases", Scheduler(lambda: url, answer_limit_s=0.0)))
        await asked.wait()
        go_on.set()
        assert await waiting == 201


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the settings that run the version of the first frames, from this repository's history."""
    root = Path(__file__).parents[2]
    added = ("log", "--format=%H", "--diff-filter=A", "--", "tests/unit/scale/frames-1.json")
    found = subprocess.run(("git", *added), cwd=root, capture_output=True, text=True, check=False)
    commits = found.stdout.split()
    shallow = subprocess.run(
        ("git", "rev-parse", "--is-shallow-repository"), cwd=root, capture_output=True, check=False
    )
    if not commits or shallow.stdout.strip() != b"false":
        pytest.skip("the repository's history is not here")
    folder = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(("git", "archive", commits[-1], "thunderagent"), cwd=root, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize("older", ["gateway", "scheduler"])
async def test_two_versions_speak_to_each_other(older: str, earlier: dict[str, str]) -> None:
    """They carry turns, streams and a program's end, with an earlier gateway or an earlier scheduler."""
    of = {name: earlier if name == older else {} for name in ("gateway", "scheduler")}
    quick = ("--listen", "127.0.0.1:0", "--poll-interval-s", "0.05")
    async with (
        engine() as behind,
        command("scheduler", *quick, "--backends", behind.url, settings=of["scheduler"]) as leader,
        command("gateway", "--port", "0", "--schedulers", leader.url, settings=of["gateway"]) as front,
    ):
        await front.ready()
        health = json.loads((await get(of_older := {"gateway": front, "scheduler": leader}[older].url, "/health")).body)
        assert "role" not in health, f"{of_older} is of today's version"
        answers = [await ask(front.url, "p"), await ask_in_stream(front.url, "p")]
        assert [each.status for each in answers] == [200, 200]
        await until_metric(front.url, "gateway_turns_told", 0)
        assert await metric(leader.url, "turns_total", "finished") == 2
        assert json.loads((await get(leader.url, "/programs/p")).body)["turn_count"] == 2
        assert (await post(front.url, "/programs/release", {"program_id": "p"})).status == 200
        assert (await get(leader.url, "/programs/p")).status == 404
        assert "Traceback" not in front.log + leader.log
