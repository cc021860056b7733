"""The operations over HTTP, and replicas that are started and ended as real processes."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from tests.integration.kubernetes_api import ApiError, Behaviour, KubernetesApi
from tests.integration.support import (
    DEADLINE_S,
    START_S,
    Gate,
    RunningProxy,
    answers,
    ask,
    cap,
    exchange,
    fake_replica,
    get,
    post,
    running_proxy,
    serve,
    until,
)
from thunderagent.backends.discovery.base import PodSelection
from thunderagent.backends.discovery.kubernetes import ClusterAccess
from thunderagent.errors import ConfigurationError, ProvisionError
from thunderagent.provision import docker
from thunderagent.provision.base import ReplicaGoneError, free_port
from thunderagent.provision.command import CommandProvisioner
from thunderagent.provision.docker import DockerProvisioner, ReplicaImage
from thunderagent.provision.kubernetes import KubernetesProvisioner, Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from tests.integration.support import Answer
    from thunderagent.provision.base import Launched

pytestmark = pytest.mark.timeout(180)

ENGINE = f"{sys.executable} -m thunderagent engine --port {{port}} --kv-tokens 16000 --profile instant --grace-s 0"


def id_of(url: str) -> str:
    return url.removeprefix("http://")


async def say(proxy: RunningProxy, primitive: str, **body: Any) -> Answer:
    return await post(proxy.url, f"/operations/{primitive}", body)


def home(proxy: RunningProxy, program_id: str) -> str | None:
    program = proxy.runtime.scheduler.programs.get(program_id)
    return None if program is None or program.status != "active" else program.replica_id


# --- route, set_priority, migrate, kill


async def test_a_route_sends_programs_of_a_class_to_a_replica() -> None:
    """A header names the class; the report shows the route, which can be taken back."""
    async with fake_replica(answers()) as one, fake_replica(answers()) as two, running_proxy(one.url, two.url) as proxy:
        answer = await say(proxy, "route", program_class="coder", replicas=[id_of(two.url)])
        assert answer.json() == {"scope": "class", "name": "coder", "replicas": {id_of(two.url): 1.0}}
        for number in range(4):
            headers = [("X-Program-Class", "coder"), ("X-Program-Id", f"p{number}")]
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            assert (await post(proxy.url, "/v1/chat/completions", body, *headers)).status == 200
        assert {home(proxy, f"p{number}") for number in range(4)} == {id_of(two.url)}
        report = (await get(proxy.url, "/operations")).json()
        assert report == {"policy": None, "routes": [answer.json()], "provision": None}
        await say(proxy, "route", program_class="coder", replicas=[])
        assert (await get(proxy.url, "/operations")).json()["routes"] == []


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ({"r0": 1, "r1": 0}, "replicas: the weight of r1 must be a number over 0"),
        ({"r0": "3"}, "replicas: the weight of r0 must be a number over 0"),
        (5, "replicas: must be a list of replica ids, or an object with their weights"),
    ],
)
async def test_a_route_that_cannot_be_is_refused_in_one_sentence(replicas: object, message: str) -> None:
    """It says what is wrong, and not all that might have been wrong."""
    async with running_proxy(up=0) as proxy:
        answer = await post(proxy.url, "/operations/route", {"all": True, "replicas": replicas})
        assert (answer.status, answer.error["code"], answer.error["message"]) == (400, "invalid_request", message)
        answer = await post(proxy.url, "/operations/route", {"replicas": []})
        assert answer.error["message"] == "name one of program_id, group_id, program_class, tenant, or all"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/operations/route", "POST"),
        ("PUT", "/operations/route?x=1", "POST"),
        ("POST", "/operations", "GET, HEAD"),
        ("PUT", "/programs", "GET, HEAD, POST"),
    ],
)
async def test_a_path_with_another_method_says_which_it_takes(method: str, path: str, allowed: str) -> None:
    """The answer is 405; 404 would say that there is no such path."""
    async with running_proxy(up=0) as proxy:
        answer = await exchange(proxy.url, method, path)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.header("Allow") == allowed
        assert (await exchange(proxy.url, method, "/operations/routes")).status == 404


async def test_routed_program_that_waits_for_its_replica_is_reported() -> None:
    """The queue and its story say what must happen there, whatever room other replicas have."""
    gate = Gate()
    settings = {"policy": "ttl", "policy_args": {"ttl_s": "100", "reserve_tokens": "0"}, "capacity_tokens": 1000}
    async with (
        fake_replica(gate) as one,
        fake_replica(answers()) as two,
        running_proxy(one.url, two.url, **settings) as proxy,
    ):
        await say(proxy, "route", all=True, replicas=[id_of(one.url)])
        turns = [asyncio.create_task(ask(proxy.url, name, content="x" * 2600)) for name in ("a", "b", "c")]
        await until(lambda: proxy.runtime.held_count == 2)
        queue = (await get(proxy.url, "/queue")).json()
        assert (queue["waiting_count"], len(queue["waiting"])) == (2, 2)
        waiting = (await get(proxy.url, f"/programs/{queue['waiting'][1]['program_id']}")).json()["waiting"]
        assert (waiting["ahead_count"], [room["replica_id"] for room in waiting["replicas"]]) == (1, [id_of(one.url)])
        gate.open()
        for name in ("a", "b", "c"):
            await post(proxy.url, "/programs/release", {"program_id": name})
        assert {(await turn).status for turn in turns} <= {200, 410}


async def test_program_with_priority_goes_first() -> None:
    """This holds among those that wait."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url, **cap(1)) as proxy:
        first = asyncio.create_task(ask(proxy.url, "a"))
        await replica.call(0)
        waiting = [asyncio.create_task(ask(proxy.url, program_id)) for program_id in ("b", "c")]
        await until(lambda: proxy.runtime.held_count == 2)
        answer = await say(proxy, "set_priority", program_id="c", priority=-1)
        assert answer.json() == {"program_id": "c", "priority": -1, "replica_id": None}
        gate.open()
        await first
        await post(proxy.url, "/programs/release", {"program_id": "a"})
        await until(lambda: home(proxy, "c") is not None)
        assert home(proxy, "b") is None
        await waiting[1]
        await post(proxy.url, "/programs/release", {"program_id": "c"})
        await waiting[0]


async def test_settings_of_a_program_can_be_read_back() -> None:
    """Its own report, the list and the queue have its priority, its route's replica, its group and class."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url, **cap(1)) as proxy:
        first = asyncio.create_task(ask(proxy.url, "first"))
        await replica.call(0)
        opened = {"program_id": "a", "group_id": "g", "program_class": "coder"}
        assert (await post(proxy.url, "/programs", opened)).status == 200
        waiting = asyncio.create_task(ask(proxy.url, "a"))
        await until(lambda: proxy.runtime.held_count == 1)
        here = id_of(replica.url)
        await say(proxy, "route", program_class="coder", replicas=[here])
        await say(proxy, "set_priority", program_id="a", priority=-3)
        await say(proxy, "set_priority", program_id="a", priority=7, replica_id=here)
        (listed,) = (await get(proxy.url, "/programs?search=a")).json()["programs"]
        (queued,) = (await get(proxy.url, "/queue")).json()["waiting"]
        for report in (listed, queued, (await get(proxy.url, "/programs/a")).json()):
            assert (report["priority"], report["priority_by_replica"]) == (-3, {here: 7})
            assert (report["routed_to"], report["group_id"], report["program_class"]) == (here, "g", "coder")
        other = (await get(proxy.url, "/programs/first")).json()
        assert (other["priority"], other["priority_by_replica"], other["routed_to"]) == (0, {}, None)
        gate.open()
        await first
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert (await waiting).status == 200


async def test_replicas_that_nobody_ends_are_not_said_to_end() -> None:
    """There are two replicas with nothing to do under `reassign`, and no `--provision`."""
    quick = {"global_policy.patience_s": "0", "global_policy.period_s": "0.01"}
    settings = {"global_policy": "reassign", "policy_args": quick, "tick_s": 0.01}
    async with fake_replica() as one, fake_replica() as two, running_proxy(one.url, two.url, **settings) as proxy:
        asked: Counter[str] = Counter()
        proxy.runtime.observe(lambda event, _: asked.update([type(event).__name__]))
        await until(lambda: asked["Tick"] > 5)
        assert proxy.runtime.decision_counts == {}


async def test_a_program_moves_to_another_replica() -> None:
    """It moves at once between two turns; during a turn it moves at the turn's end."""
    gate = Gate()
    async with fake_replica(answers()) as one, fake_replica(gate) as two, running_proxy(one.url, two.url) as proxy:
        await say(proxy, "route", all=True, replicas=[id_of(one.url)])
        await ask(proxy.url, "a")
        await say(proxy, "route", all=True, replicas=[])
        answer = await say(proxy, "migrate", program_id="a", replica_id=id_of(two.url))
        assert answer.json() == {"program_id": "a", "replica_id": id_of(two.url), "moved": True}
        turn = asyncio.create_task(ask(proxy.url, "a"))
        await two.call(0)
        answer = await say(proxy, "migrate", program_id="a", replica_id=id_of(one.url))
        assert answer.json()["moved"] is False
        gate.open()
        assert (await turn).status == 200
        await until(lambda: home(proxy, "a") == id_of(one.url))


async def test_a_program_that_is_killed_gets_a_clear_error() -> None:
    """Waiting turns get it; a turn in flight ends as it would have."""
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url, **cap(1)) as proxy:
        running = asyncio.create_task(ask(proxy.url, "a"))
        await replica.call(0)
        waiting = asyncio.create_task(ask(proxy.url, "b"))
        await until(lambda: proxy.runtime.held_count == 1)
        assert (await say(proxy, "kill", program_id="b")).json()["program_id"] == "b"
        refused = await waiting
        assert (refused.status, refused.error["code"]) == (410, "program_killed")
        assert (await say(proxy, "kill", program_id="a")).status == 200
        gate.open()
        assert (await running).status == 200


@pytest.mark.parametrize(
    ("primitive", "body", "status", "why"),
    [
        ("route", {"replicas": []}, 400, "name one of program_id"),
        ("route", {"tenant": "t", "all": True, "replicas": []}, 400, "name one of program_id"),
        ("route", {"tenant": "t", "replicas": ["nowhere"]}, 404, "no replica 'nowhere'"),
        ("route", {"tenant": "t", "replicas": {"x": 0}}, 400, "replicas"),
        ("route", {"program_id": "x", "replicas": []}, 404, "no live program 'x'"),
        ("set_priority", {"program_id": "x", "priority": 1}, 404, "no live program 'x'"),
        ("set_priority", {"program_id": "x", "priority": 10**7}, 400, "less than or equal"),
        ("set_priority", {"program_id": "x", "priority": 1.5}, 400, "integer"),
        ("migrate", {"program_id": "x", "replica_id": "y"}, 404, "no live program 'x'"),
        ("migrate", {"program_id": "a", "replica_id": "y"}, 404, "no replica 'y'"),
        ("migrate", {"program_id": "a", "replica_id": "HOME"}, 409, "is on"),
        ("migrate", {"program_id": "a"}, 400, "replica_id"),
        ("kill", {}, 400, "name a program_id or a replica_id"),
        ("kill", {"program_id": "x"}, 404, "no live program 'x'"),
        ("kill", {"replica_id": "x"}, 404, "no replica 'x'"),
        ("provision", {}, 409, "not configured"),
    ],
)
async def test_impossible_operation_is_refused(primitive: str, body: dict[str, Any], status: int, why: str) -> None:
    """The refusal says what is wrong; nothing of it is in the event log."""
    async with fake_replica(answers()) as replica, running_proxy(replica.url) as proxy:
        await ask(proxy.url, "a")
        body = {name: id_of(replica.url) if value == "HOME" else value for name, value in body.items()}
        answer = await say(proxy, primitive, **body)
        assert (answer.status, why in answer.error["message"]) == (status, True), answer.body
        assert len(proxy.runtime.scheduler.core.routing.routes) == 0


async def test_a_replica_that_was_not_started_here_drains_and_is_forgotten() -> None:
    """An operator may still end it; its engine continues."""
    async with fake_replica(answers()) as one, fake_replica(answers()) as two, running_proxy(one.url, two.url) as proxy:
        answer = await say(proxy, "kill", replica_id=id_of(one.url))
        assert (answer.status, answer.json()["engine_ends"]) == (202, False)
        await until(lambda: set(proxy.runtime.scheduler.replicas) == {id_of(two.url)})
        await ask(proxy.url, "a")
        assert home(proxy, "a") == id_of(two.url)


# --- replicas that are processes


def by_command(**config: Any) -> dict[str, Any]:
    return {
        "provision": "command",
        "provision_command": ENGINE,
        "provision_cooldown_s": 0.1,
        "provision_end_limit_s": 5.0,
        "discovery_interval_s": 0.05,
        **config,
    }


def by_kubernetes(api: KubernetesApi, kind: str, **config: Any) -> dict[str, Any]:
    return {
        "provision": "kubernetes",
        "provision_workload": f"default/{kind}/engine",
        "provision_max": 2,
        "kubernetes_replicas": "default/app=vllm:http",
        "kubernetes_url": api.url,
        **config,
    }


def engines_of(proxy: RunningProxy) -> list[str]:
    return [replica.replica_id for replica in proxy.runtime.scheduler.open_replicas]


def process_ids(replica_id: str) -> list[int]:
    """The processes whose command names a port."""
    port, found = replica_id.rpartition(":")[2], []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if port.encode() in words and b"engine" in words:
                found.append(int(entry.name))
    return found


async def test_replicas_are_started_and_ended_by_command() -> None:
    """The configured number at first, one more on request, never too many; an ending one drains first."""
    async with running_proxy(up=1, **by_command(provision_min=1, provision_max=2)) as proxy:
        await until(lambda: len(engines_of(proxy)) == 1, within_s=START_S)
        answer = await say(proxy, "provision")
        assert (answer.status, answer.json()["by"], answer.json()["started_count"]) == (202, "command", 1)
        await until(lambda: len(engines_of(proxy)) == 2, within_s=START_S)
        refused = await say(proxy, "provision")
        assert (refused.status, refused.error["code"]) == (409, "provision_limit")
        assert [(await ask(proxy.url, f"p{number}")).status for number in range(4)] == [200] * 4
        first = engines_of(proxy)[0]
        (pid,) = process_ids(first)
        answer = await say(proxy, "kill", replica_id=first)
        assert (answer.status, answer.json()["engine_ends"]) == (202, True)
        await until(lambda: len(proxy.runtime.scheduler.replicas) == 1)
        await until(lambda: not Path(f"/proc/{pid}").exists())
        last = engines_of(proxy)[0]
        refused = await say(proxy, "kill", replica_id=last)
        assert (refused.status, refused.error["code"]) == (409, "provision_limit")
        report = (await get(proxy.url, "/operations")).json()["provision"]
        assert report == {"by": "command", "started_count": 1, "starting_count": 0, "failure": ""}
        (pid,) = process_ids(last)
    await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_started_replica_is_known_by_its_url_however_that_is_written() -> None:
    """Otherwise it would never count as up, and would be ended in the middle of its turns."""
    config = by_command(provision_min=1, provision_max=2, provision_url="http://127.0.0.1:{port}/")
    async with running_proxy(up=1, **config) as proxy:
        async with asyncio.timeout(DEADLINE_S):
            while (await get(proxy.url, "/operations")).json()["provision"]["starting_count"]:
                await asyncio.sleep(0.02)
        (replica_id,) = engines_of(proxy)
        await say(proxy, "provision")
        await proxy.up(2)
        assert (await say(proxy, "kill", replica_id=replica_id)).json()["engine_ends"] is True
        await until(lambda: not process_ids(replica_id))


@pytest.mark.parametrize("query", ["", "?force=1"])
async def test_a_started_replica_that_is_removed_ends(query: str) -> None:
    """Nobody else could end it, and it would take the place of another."""
    async with running_proxy(up=0, **by_command(provision_max=1)) as proxy:
        await say(proxy, "provision")
        await until(lambda: len(engines_of(proxy)) == 1, within_s=START_S)
        (replica_id,) = engines_of(proxy)
        assert (await exchange(proxy.url, "DELETE", f"/replicas/{replica_id}{query}")).status in (200, 202)
        await until(lambda: not process_ids(replica_id))
        async with asyncio.timeout(DEADLINE_S):
            while (await say(proxy, "provision")).status != 202:  # its place is free a moment later
                await asyncio.sleep(0.02)
        await until(lambda: len(engines_of(proxy)) == 1, within_s=START_S)


async def test_a_turn_in_flight_ends_before_its_replica_does() -> None:
    """Kill drains first."""
    async with running_proxy(up=1, **by_command(provision_min=1, provision_max=2)) as proxy:
        await until(lambda: len(engines_of(proxy)) == 1, within_s=START_S)
        await say(proxy, "provision")
        await until(lambda: len(engines_of(proxy)) == 2, within_s=START_S)
        turns = [asyncio.create_task(ask(proxy.url, f"p{number}", max_tokens=200)) for number in range(8)]
        await until(lambda: proxy.runtime.leases_count > 0 or all(turn.done() for turn in turns))
        await say(proxy, "kill", replica_id=engines_of(proxy)[0])
        assert [(await turn).status for turn in turns] == [200] * 8
        await until(lambda: len(proxy.runtime.scheduler.replicas) == 1)


async def test_a_replica_that_crashes_is_noticed_and_started_again() -> None:
    """At least the configured number runs; the reason of its end is reported."""
    async with running_proxy(up=1, **by_command(provision_min=1, provision_max=1)) as proxy:
        await until(lambda: len(engines_of(proxy)) == 1, within_s=START_S)
        first = engines_of(proxy)[0]
        (pid,) = process_ids(first)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engines_of(proxy) not in ([], [first]), within_s=START_S)
        assert (await ask(proxy.url, "a")).status == 200
        assert process_ids(first) == []


async def test_a_command_that_cannot_be_started_is_told() -> None:
    """It is tried again only after a while; serving continues."""
    config = by_command(provision_command="/nowhere/engine {port}", provision_max=1, provision_cooldown_s=60.0)
    async with fake_replica(answers()) as replica, running_proxy(replica.url, **config) as proxy:
        assert (await say(proxy, "provision")).status == 202
        async with asyncio.timeout(DEADLINE_S):
            while "nowhere" not in (await get(proxy.url, "/operations")).json()["provision"]["failure"]:
                await asyncio.sleep(0.02)
        assert (await get(proxy.url, "/operations")).json()["provision"]["started_count"] == 0
        assert (await ask(proxy.url, "a")).status == 200


async def test_a_replica_that_never_answers_is_ended() -> None:
    """It ends after a while, and its own output is reported."""
    command = f"{sys.executable} -c 'import time; time.sleep(600)' {{port}} engine"
    config = by_command(provision_command=command, provision_ready_limit_s=0.5, provision_cooldown_s=60.0)
    async with fake_replica(answers()) as replica, running_proxy(replica.url, **config) as proxy:
        await say(proxy, "provision")
        async with asyncio.timeout(DEADLINE_S):
            while "did not answer" not in (await get(proxy.url, "/operations")).json()["provision"]["failure"]:
                await asyncio.sleep(0.02)
        await until(lambda: len(proxy.runtime.scheduler.replicas) == 1)


async def test_a_policy_starts_a_replica_when_turns_wait_and_ends_it_when_they_are_through() -> None:
    """`reassign`, over real sockets and processes."""
    policy_args = {
        "n": "1",
        "global_policy.waiting_count": "1",
        "global_policy.patience_s": "0.2",
        "global_policy.rest_s": "0.5",
        "global_policy.period_s": "0.1",
    }
    config = by_command(provision_max=1, policy="cap", policy_args=policy_args, global_policy="reassign")
    gate = Gate()
    async with fake_replica(gate) as replica, running_proxy(replica.url, **config) as proxy:

        async def whole(program_id: str) -> int:
            status = (await ask(proxy.url, program_id)).status
            await post(proxy.url, "/programs/release", {"program_id": program_id})
            return status

        programs = [asyncio.create_task(whole(f"p{number}")) for number in range(4)]
        await until(lambda: len(engines_of(proxy)) == 2, within_s=START_S)
        gate.open()
        assert await asyncio.gather(*programs) == [200] * 4
        await until(lambda: len(proxy.runtime.scheduler.replicas) == 1)
        assert engines_of(proxy) == [id_of(replica.url)]


async def test_a_server_that_is_told_to_end_leaves_no_process() -> None:
    """SIGTERM ends all; engines that end with their standard input also end if the proxy is killed."""
    command = f"{ENGINE} --end-with-stdin"
    options = ("--provision", "command", "--provision-command", command, "--provision-min", "1")
    for number in (signal.SIGTERM, signal.SIGKILL):
        async with serve(*options) as process:
            await process.ready()
            replicas = (await get(process.url, "/replicas")).json()["replicas"]
            (pid,) = process_ids(replicas[0]["replica_id"])
            process.process.send_signal(number)
            await process.exit_status()
            await until(lambda pid=pid: not is_running(Path(f"/proc/{pid}")))


@pytest.mark.parametrize(
    ("command", "url", "why"),
    [
        ("", "http://127.0.0.1:{port}", "needs a command"),
        ("engine", "http://127.0.0.1:{port}", r"need \{port\}"),
        ("engine {port}", "http://127.0.0.1:8000", r"need \{port\}"),
        ("engine '{port}", "http://127.0.0.1:{port}", "No closing quotation"),
        ("engine {port}", "127.0.0.1:{port}", "provision_url: .* is not an http or https URL"),
        ("engine {port}", "http://127.0.0.1:{port}/v1", "provision_url: .* without /v1"),
        ("engine {port}", "http://127.0.0.1:{port}#dp=2", "provision_url: .* data_parallel_ranks"),
    ],
)
def test_a_command_that_is_none_is_refused(command: str, url: str, why: str) -> None:
    """The refusal comes before anything is started."""
    with pytest.raises(ConfigurationError, match=why):
        CommandProvisioner(command, url)


def test_a_port_is_none_that_the_system_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be bound; if none can, that is an error, and not an endless search."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, given.read_text().split())
    for _ in range(20):
        port = free_port()
        assert not first <= port <= last or (first <= 10_000 and last == 65_535)  # there all are given away
        socket.create_server(("127.0.0.1", port)).close()

    class Bound(socket.socket):
        def bind(self, _address: object, /) -> None:
            raise OSError("in use")

    monkeypatch.setattr(socket, "socket", Bound)
    with pytest.raises(ProvisionError, match="no port"):
        free_port()


async def test_output_of_an_engine_command_is_kept_on_request(tmp_path: Path) -> None:
    """Each port has a file; a process that ignores SIGTERM is killed."""
    script = (
        "import signal, sys, time; signal.signal(15, lambda *_: None); print(sys.argv[1:], flush=True); time.sleep(60)"
    )
    driver = CommandProvisioner(
        f'{sys.executable} -c "{script}" {{port}} {{replica_id}}',
        "http://127.0.0.1:{port}",
        end_limit_s=0.3,
        log_folder=tmp_path,
    )
    launched = await driver.start()
    port = launched.url.rpartition(":")[2]
    log = tmp_path / f"replica-{port}.log"
    await until(lambda: log.read_text() == f"['{port}', '127.0.0.1:{port}']\n")
    await driver.end(launched.handle, launched.url)
    assert not Path(f"/proc/{launched.handle}").exists()
    await driver.end(launched.handle, launched.url)
    await driver.close()


STUBBORN = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
"""It prints its process id, and ignores SIGTERM."""


async def stubborn(code: str, folder: Path, *, end_limit_s: float) -> tuple[CommandProvisioner, Launched, Path]:
    """Start a command of Python; return it with the folder in /proc of its stubborn process."""
    command = f"{sys.executable} -c {shlex.quote(code)} {{port}}"
    driver = CommandProvisioner(command, "http://127.0.0.1:{port}", end_limit_s=end_limit_s, log_folder=folder)
    launched = await driver.start()
    log = folder / f"replica-{launched.url.rpartition(':')[2]}.log"
    await until(lambda: log.read_text().endswith("\n"))
    return driver, launched, Path(f"/proc/{int(log.read_text())}")


async def test_child_processes_of_an_engine_end_with_it(tmp_path: Path) -> None:
    """It ignores SIGTERM, and the engine itself does not."""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"
    driver, launched, child = await stubborn(code, tmp_path, end_limit_s=30)
    assert child.name != launched.handle
    await driver.end(launched.handle, launched.url)
    await until(lambda: not is_running(child))


async def test_a_shutdown_ends_a_process_that_takes_its_time_to_end(tmp_path: Path) -> None:
    """The task that waited for that is cancelled: the process must not outlive the proxy."""
    driver, launched, process = await stubborn(STUBBORN, tmp_path, end_limit_s=5.0)
    ending = asyncio.create_task(driver.end(launched.handle, launched.url))
    await asyncio.sleep(0.1)
    assert is_running(process)
    ending.cancel()
    await asyncio.wait([ending])
    await driver.close()
    await until(lambda: not is_running(process))


def is_running(process: Path) -> bool:
    """Say whether a process exists and did not end: its parent may not have collected its status yet."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- replicas that are containers


START, STOP, REMOVE = "POST /containers/c1/start", "POST /containers/c1/stop", "DELETE /containers/c1"


@asynccontextmanager
async def by_docker(
    first: Mapping[str, Callable[[], Awaitable[int]]],
) -> AsyncIterator[tuple[DockerProvisioner, list[str]]]:
    """Provision by an engine with one container, which does not run; yield also what it was asked.

    `first` waits at the first requests of some kinds, and returns their status.
    """
    said: list[str] = []

    async def engine(request: web.Request) -> web.Response:
        path = re.sub(r"^/v[0-9.]+", "", request.path)
        said.append(f"{request.method} {path}")
        if said[-1] in first and said.count(said[-1]) == 1:
            return web.Response(status=await first[said[-1]]())
        if request.method == "GET":
            version = {"ApiVersion": "1.44", "MinAPIVersion": "1.24", "Version": "26", "Os": "linux"}
            return web.json_response({**version, "State": {"Running": False, "ExitCode": 1}})
        is_created = path == "/containers/create"
        return web.json_response({"Id": "c1", "Warnings": []}, status=201) if is_created else web.Response(status=204)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "tcp://{}:{}".format(*runner.addresses[0])
        yield DockerProvisioner(ReplicaImage("image"), owner="o", docker_url=url, end_limit_s=1.0), said
    finally:
        await runner.cleanup()


async def fails() -> int:
    return 500


async def test_a_shutdown_removes_a_container_that_takes_its_time_to_stop() -> None:
    """The task that waited for that is cancelled: the container must not stay."""
    stops = asyncio.Event()

    async def stop() -> int:
        await stops.wait()
        return 204

    async with by_docker({STOP: stop}) as (driver, said):
        launched = await driver.start()
        ending = asyncio.create_task(driver.end(launched.handle, launched.url))
        await until(lambda: STOP in said)
        ending.cancel()
        await asyncio.wait([ending])
        asyncio.get_running_loop().call_later(0.2, stops.set)
        await driver.close()
        assert said.count(REMOVE) == 1


async def test_a_shutdown_removes_a_container_that_could_not_be_removed_before() -> None:
    """The engine had failed: the container must not stay."""
    async with by_docker({REMOVE: fails}) as (driver, said):
        launched = await driver.start()
        with pytest.raises(ProvisionError):
            await driver.end(launched.handle, launched.url)
        await driver.close()
        assert said.count(REMOVE) == 2


async def test_a_container_that_is_being_started_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not run yet: it would be removed, and nobody told."""
    monkeypatch.setattr(docker, "LOOK_S", 0.01)
    starts = asyncio.Event()

    async def start() -> int:
        await starts.wait()
        return 204

    async with by_docker({START: start}) as (driver, said):
        watching = asyncio.create_task(driver.run(lambda _handle, _why: None))
        starting = asyncio.create_task(driver.start())
        await until(lambda: START in said)
        await asyncio.sleep(10 * docker.LOOK_S)
        watching.cancel()
        await asyncio.wait([watching])
        starts.set()
        await starting
        assert REMOVE not in said
        await driver.close()
        assert REMOVE in said


async def test_a_container_that_ended_by_itself_is_removed_however_often_that_fails() -> None:
    """Its loss is told at once."""
    lost: list[str] = []
    async with by_docker({REMOVE: fails}) as (driver, said):
        launched = await driver.start()
        watching = asyncio.create_task(driver.run(lambda handle, _why: lost.append(handle)))
        await until(lambda: REMOVE in said)
        watching.cancel()
        await asyncio.wait([watching])
        assert lost == [launched.handle]
        await driver.close()
        assert said.count(REMOVE) == 2


# --- replicas that are pods


async def pod(api: KubernetesApi, name: str, url: str) -> None:
    """Start a pod whose engine is at a URL."""
    ports = [{"name": "http", "containerPort": int(url.rpartition(":")[2])}]
    spec = {"containers": [{"name": "e", "image": "engine", "ports": ports}]}
    api.create("pods", {"metadata": {"name": name, "labels": {"app": "vllm"}}, "spec": spec})
    await until(lambda: api.get("pods", name)["status"].get("podIP"))
    api.patch("pods", name, {"status": {"podIP": "127.0.0.1"}})


async def test_replicas_are_pods_of_a_deployment_that_is_scaled() -> None:
    """It grows by one, and shrinks by the named one after that drained; Kubernetes finds and ends them."""
    api = KubernetesApi()
    await api.start()
    tasks: list[asyncio.Task[None]] = []
    async with fake_replica(answers()) as one, fake_replica(answers()) as two:

        def scaled(before: int, after: int) -> None:
            if after > before:
                tasks.append(asyncio.get_running_loop().create_task(pod(api, "engine-b", two.url)))
                return
            pods = [each["metadata"] for each in api.all_of("pods", "app=vllm")]
            cost = "controller.kubernetes.io/pod-deletion-cost"
            first = min(pods, key=lambda each: int((each.get("annotations") or {}).get(cost, 0)))
            api.delete("pods", first["name"], {"gracePeriodSeconds": 0})

        api.sizes["default", "deployments", "engine"] = 1
        api.on_scale = scaled
        config = by_kubernetes(api, "deployment", discovery_interval_s=0.02)
        try:
            await pod(api, "engine-a", one.url)
            async with running_proxy(up=1, **config) as proxy:
                await until(lambda: api.requests["apps", "deployments/scale", "get"] > 0)
                assert (await say(proxy, "provision")).json()["by"] == "kubernetes"
                await proxy.up(2)
                assert api.sizes["default", "deployments", "engine"] == 2
                assert (await say(proxy, "provision")).error["code"] == "provision_limit"
                assert (await say(proxy, "kill", replica_id=id_of(one.url))).json()["engine_ends"] is True
                await until(lambda: api.sizes["default", "deployments", "engine"] == 1)
                await until(lambda: not api.has("pods", "engine-a"))
                assert api.has("pods", "engine-b")
                await proxy.up(1)
                assert (await ask(proxy.url, "a")).status == 200
                await until(lambda: id_of(one.url) not in proxy.runtime.scheduler.replicas)
        finally:
            await asyncio.gather(*tasks)
            await api.stop()


async def test_a_pod_that_ends_is_not_ended_twice() -> None:
    """Otherwise the workload would lose another one, since a stopping pod still has its address."""
    api, gate = KubernetesApi(), Gate()
    await api.start()
    api.images["engine"] = Behaviour(stops_at_once=False)
    api.sizes["default", "deployments", "engine"] = 2
    config = by_kubernetes(api, "deployment")
    try:
        async with fake_replica(gate) as one, fake_replica(answers()) as two:
            api.on_scale = lambda before, after: api.delete("pods", "engine-a", {})
            await pod(api, "engine-a", one.url)
            await pod(api, "engine-b", two.url)
            async with running_proxy(up=2, **config) as proxy:
                await until(lambda: api.requests["apps", "deployments/scale", "get"] > 0)
                await say(proxy, "route", all=True, replicas=[id_of(one.url)])
                turn = asyncio.create_task(ask(proxy.url, "a"))
                await until(lambda: proxy.runtime.leases_count == 1)
                assert (await say(proxy, "kill", replica_id=id_of(one.url))).status == 202
                await until(lambda: proxy.runtime.scheduler.replicas[id_of(one.url)].draining)
                again = await say(proxy, "kill", replica_id=id_of(one.url))
                assert (again.status, again.error["code"]) == (409, "operation_refused")
                assert (await get(proxy.url, "/operations")).json()["provision"]["started_count"] == 1
                gate.open()
                assert (await turn).status == 200
                await until(lambda: id_of(one.url) not in proxy.runtime.scheduler.replicas)
                await until(lambda: api.sizes["default", "deployments", "engine"] == 1)
                await asyncio.sleep(0.5)
                assert api.sizes["default", "deployments", "engine"] == 1
    finally:
        await api.stop()


async def test_an_end_whose_answer_was_lost_ends_no_other_pod() -> None:
    """It may have had its effect, so it is tried again only if no pod is about to end for it."""
    api = KubernetesApi()
    await api.start()
    api.images["engine"] = Behaviour(stops_at_once=False)
    sizes, engine = api.sizes, ("default", "deployments", "engine")
    sizes[engine] = 2

    def loses_the_answer(_before: int, _after: int) -> None:
        raise ApiError(500, "InternalError", "lost")

    try:
        workload, selection = Workload.read("default/deployment/engine"), PodSelection.read("default/app=vllm:http")
        driver = KubernetesProvisioner(workload, selection, ClusterAccess(api_url=api.url))
        urls = {name: f"http://127.0.0.1:{9000 + number}" for number, name in enumerate(("engine-a", "engine-b"))}
        for name, url in urls.items():
            await pod(api, name, url)
        api.on_scale = loses_the_answer
        with pytest.raises(ProvisionError, match="lost"):
            await driver.end("", urls["engine-a"])
        with pytest.raises(ProvisionError, match="it may be engine-a that ends"):
            await driver.end("", urls["engine-a"])
        api.delete("pods", "engine-a", {})
        with pytest.raises(ReplicaGoneError):
            await driver.check_end("", urls["engine-a"])
        await driver.end("", urls["engine-a"])
        assert sizes[engine] == 1
        with pytest.raises(ReplicaGoneError):
            await driver.end("", urls["engine-a"])
    finally:
        await api.stop()


async def test_an_end_that_was_refused_had_no_effect() -> None:
    """A pod that goes by itself afterwards was not ended."""
    api = KubernetesApi()
    await api.start()
    sizes, engine, url = api.sizes, ("default", "deployments", "engine"), "http://127.0.0.1:9000"
    sizes[engine] = 1

    def refuses(before: int, _after: int) -> None:
        sizes[engine] = before
        raise ApiError(403, "Forbidden", "no right")

    try:
        workload, selection = Workload.read("default/deployment/engine"), PodSelection.read("default/app=vllm:http")
        driver = KubernetesProvisioner(workload, selection, ClusterAccess(api_url=api.url))
        await pod(api, "engine-a", url)
        api.on_scale = refuses
        with pytest.raises(ProvisionError, match="no right"):
            await driver.end("", url)
        api.delete("pods", "engine-a", {})
        with pytest.raises(ReplicaGoneError):
            await driver.end("", url)
    finally:
        await api.stop()


async def test_stateful_set_ends_its_last_pod_only() -> None:
    """It is refused before anything drains; refusals of the API server are reported."""
    api = KubernetesApi()
    await api.start()
    try:
        workload = Workload.read("default/statefulset/engine")
        selection = PodSelection.read("default/app=vllm:http")
        driver = KubernetesProvisioner(workload, selection, ClusterAccess(api_url=api.url))
        with pytest.raises(ProvisionError, match="not found"):
            await driver.open()
        api.sizes["default", "statefulsets", "engine"] = 2
        assert await driver.open() == 2
        for number in range(2):
            await pod(api, f"engine-{number}", f"http://127.0.0.1:{9000 + number}")
        with pytest.raises(ProvisionError, match="only the last pod can end, engine-1, and not engine-0"):
            await driver.check_end("", "http://127.0.0.1:9000")
        with pytest.raises(ProvisionError, match="no pod of engine is at"):
            await driver.check_end("", "http://127.0.0.1:9009")
        await driver.check_end("", "http://127.0.0.1:9001")
        await driver.end("", "http://127.0.0.1:9001")
        assert api.sizes["default", "statefulsets", "engine"] == 1
        api.rights = set()
        with pytest.raises(ProvisionError, match="lacks the right"):
            await driver.start()
        await driver.close()
    finally:
        await api.stop()
    with pytest.raises(ProvisionError):
        await driver.start()


@pytest.mark.parametrize("kind", ["deployment", "statefulset"])
async def test_a_cluster_where_the_wrong_pod_would_end_is_refused(kind: str) -> None:
    """Deletion costs are newer than 1.21: there a Deployment is not scaled; a StatefulSet's last pod is known."""
    api = KubernetesApi()
    api.version = (1, 21)
    await api.start()
    try:
        selection = PodSelection.read("default/app=vllm:http")
        access = ClusterAccess(api_url=api.url)
        driver = KubernetesProvisioner(Workload.read(f"default/{kind}/engine"), selection, access)
        api.sizes["default", f"{kind}s", "engine"] = 1
        if kind == "deployment":
            with pytest.raises(ProvisionError, match=r"Kubernetes 1\.21 is older than 1\.22"):
                await driver.open()
            api.version = (1, 22)
        assert await driver.open() == 1
    finally:
        await api.stop()


async def test_replicas_that_start_at_once_are_all_counted() -> None:
    """Each one adds to those before it: the minimum number begin together."""
    api = KubernetesApi()
    await api.start()
    try:
        workload, selection = Workload.read("default/deployment/engine"), PodSelection.read("default/app=vllm:http")
        driver = KubernetesProvisioner(workload, selection, ClusterAccess(api_url=api.url))
        api.sizes["default", "deployments", "engine"] = 0
        await asyncio.gather(*(driver.start() for _ in range(3)))
        assert api.sizes["default", "deployments", "engine"] == 3
    finally:
        await api.stop()


async def test_a_start_whose_answer_was_lost_is_not_made_twice() -> None:
    """The next start finds its pod; after one that was refused, or was undone by an end, it adds one."""
    api = KubernetesApi()
    await api.start()
    sizes, engine, url = api.sizes, ("default", "deployments", "engine"), "http://127.0.0.1:9000"
    sizes[engine] = 1
    errors = [ApiError(500, "InternalError", "lost"), ApiError(403, "Forbidden", "no right")]

    def fails(before: int, _after: int) -> None:
        error = errors.pop(0)
        if error.status["code"] == 403:
            sizes[engine] = before
        raise error

    try:
        workload, selection = Workload.read("default/deployment/engine"), PodSelection.read("default/app=vllm:http")
        driver = KubernetesProvisioner(workload, selection, ClusterAccess(api_url=api.url))
        api.on_scale = fails
        with pytest.raises(ProvisionError, match="lost"):
            await driver.start()
        await driver.start()
        assert sizes[engine] == 2
        with pytest.raises(ProvisionError, match="no right"):
            await driver.start()
        api.on_scale = lambda _before, _after: None
        await driver.start()
        assert sizes[engine] == 3
        errors.append(ApiError(500, "InternalError", "lost"))
        api.on_scale = fails
        with pytest.raises(ProvisionError, match="lost"):
            await driver.start()
        api.on_scale = lambda _before, _after: None
        await pod(api, "engine-a", url)
        await driver.end("", url)
        assert sizes[engine] == 3
        await driver.start()
        assert sizes[engine] == 3
        await driver.start()
        assert sizes[engine] == 4
    finally:
        await api.stop()


@pytest.mark.parametrize("text", ["", "engine", "default/job/engine", "default/deployment/"])
def test_a_workload_that_is_none_is_refused(text: str) -> None:
    """The refusal says how a workload is written."""
    with pytest.raises(ConfigurationError, match="is not NAMESPACE/deployment/NAME"):
        Workload.read(text)


async def test_a_replica_that_cannot_be_ended_stays() -> None:
    """It is the first pod of a StatefulSet: nothing drains, and the answer says why."""
    api = KubernetesApi()
    await api.start()
    try:
        async with fake_replica(answers()) as one, fake_replica(answers()) as two:
            api.sizes["default", "statefulsets", "engine"] = 2
            await pod(api, "engine-0", one.url)
            await pod(api, "engine-1", two.url)
            async with running_proxy(up=2, **by_kubernetes(api, "statefulset")) as proxy:
                await until(lambda: api.requests["apps", "statefulsets/scale", "get"] > 0)
                await say(proxy, "kill", replica_id=id_of(one.url))
                async with asyncio.timeout(DEADLINE_S):
                    while "only the last" not in (await get(proxy.url, "/operations")).json()["provision"]["failure"]:
                        await asyncio.sleep(0.02)
                assert len(engines_of(proxy)) == 2
                assert (await get(proxy.url, "/operations")).json()["provision"]["started_count"] == 2
    finally:
        await api.stop()
