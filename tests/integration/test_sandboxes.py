"""Sandboxes over HTTP: requested, reported, followed and released; a service of the test's own makes them."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client import CollectorRegistry

from tests.integration.support import DEADLINE_S, Wire, ask, cap, exchange, fake_replica, get, post, running_proxy, turn
from tests.loopback import free_ports, on_loopback
from tests.unit.tools.fakes import FakeDriver
from thunderagent.errors import OtherTenantError
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.scheduler import Scheduler
from thunderagent.proxy.admin.admin import Admin
from thunderagent.proxy.admin.sandboxes import SandboxHandlers
from thunderagent.proxy.fleet.replicas import Replicas
from thunderagent.proxy.gate.keys import Key, Keyring, check_key, mint_key
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.runtime import Runtime
from thunderagent.serving.sandboxes import RuntimePrograms
from thunderagent.tools.base import Owner
from thunderagent.tools.manager import Manager, ManagerSettings
from thunderagent.tools.sandbox import Caps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.support import Answer, RunningProxy


DATA_KEY, DATA_LINE = mint_key("app")
_, ADMIN_LINE = mint_key("ops")
KEYS = {"api_keys": (DATA_LINE,), "admin_keys": (ADMIN_LINE,)}
TRUSTING = ManagerSettings(takes_specs=True)
BY_DATA_KEY = ("Authorization", f"Bearer {DATA_KEY}")


class Inside:
    """A service that only the proxy should reach; what it answers is secret."""

    def __init__(self, status: int = 200) -> None:
        self.asked: list[str] = []
        self._status = status

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        said = {"message": "secret", "role": "secret"}
        return web.json_response(said, status=self._status, headers={"Location": "/elsewhere"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        async with on_loopback(app, shutdown_timeout=0.1) as url:
            yield url


class Elsewhere:
    """A service that makes sandboxes; `hold` delays its answers."""

    def __init__(self) -> None:
        self.url = ""
        self.there: set[str] = set()
        self.prepared: list[dict[str, Any]] = []
        self.hold: asyncio.Event | None = None
        self.refusal = 0

    async def prepare(self, request: web.Request) -> web.Response:
        order = await request.json()
        self.prepared.append(order)
        if self.hold is not None:
            await self.hold.wait()
        if self.refusal:
            return web.Response(status=self.refusal, text="there is no such thing")
        self.there.add(order["sandbox_id"])
        return web.json_response({"handle": order["sandbox_id"], "address": "10.1.1.1", "ports": {"80": ["h", 8080]}})

    async def reclaim(self, request: web.Request) -> web.Response:
        self.there.discard((await request.json())["handle"])
        return web.json_response({})

    def template(self, **more: Any) -> dict[str, Any]:
        urls = {"prepare_url": f"{self.url}/prepare", "reclaim_url": f"{self.url}/reclaim"}
        return {"driver": "callback", **urls, **more}


@asynccontextmanager
async def elsewhere() -> AsyncIterator[Elsewhere]:
    service = Elsewhere()
    app = web.Application()
    app.add_routes([web.post("/prepare", service.prepare), web.post("/reclaim", service.reclaim)])
    async with on_loopback(app, shutdown_timeout=0.1) as service.url:
        yield service


@asynccontextmanager
async def proxy_with_sandboxes(**config: Any) -> AsyncIterator[tuple[RunningProxy, Elsewhere]]:
    """Run a proxy whose programs of class `coder` get an external sandbox; at the end none may be left."""
    async with elsewhere() as service, fake_replica() as replica:
        templates = {"plain": service.template(), "coder": service.template(program_classes=["coder"])}
        more = {"sandboxes": ("callback",), "sandbox_templates": templates, **config}
        async with running_proxy(replica.url, **more) as proxy:
            yield proxy, service
        assert not service.there, "left behind by the shutdown"


async def test_a_program_follows_its_own_sandboxes_on_the_data_port() -> None:
    """Operators see those of all programs, on the admin port alone."""
    (admin_port,) = free_ports(1)
    async with proxy_with_sandboxes(admin_port=admin_port) as (proxy, _):
        admin_url = f"http://127.0.0.1:{admin_port}"
        assert (await get(proxy.url, "/sandboxes/events")).error["code"] == "not_found"
        for url, target in (
            (proxy.url, "/sandboxes/events?program_id=a"),
            (admin_url, "/sandboxes/events?program_id=a"),
            (admin_url, "/sandboxes/events"),
        ):
            async with Wire.open(url) as wire:
                wire.send("GET", target)
                assert (await wire.head()).status == 200, target


async def sandboxes_of(proxy: RunningProxy, program_id: str) -> list[dict[str, Any]]:
    answer = await get(proxy.url, f"/programs/{program_id}/sandboxes")
    assert answer.status == 200
    return list(answer.json()["sandboxes"])


async def has_stage(proxy: RunningProxy, program_id: str, stage: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for report in await sandboxes_of(proxy, program_id):
                if report["stage"] == stage:
                    return report
            await asyncio.sleep(0.01)


async def until_gone(service: Elsewhere) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while service.there:
            await asyncio.sleep(0.01)


async def test_a_sandbox_is_made_told_of_and_goes_with_its_program() -> None:
    async with proxy_with_sandboxes() as (proxy, service):
        answer = await post(proxy.url, "/programs/task/7/sandboxes", {"template": "plain"})
        assert answer.status == 202
        assert answer.json()["program_id"] == "task/7"
        report = await has_stage(proxy, "task/7", "ready")
        assert (report["address"], report["ports"]) == ("10.1.1.1", {"80": ["h", 8080]})
        await ask(proxy.url, "task/7")
        assert (await has_stage(proxy, "task/7", "in_use"))["program_ids"] == ["task/7"]
        story = (await get(proxy.url, "/programs/task/7")).json()["story"]
        assert "sandbox ready" in [entry["what"] for entry in story]
        assert len((await get(proxy.url, "/sandboxes")).json()["sandboxes"]) == 1
        await post(proxy.url, "/programs/release", {"program_id": "task/7"})
        await until_gone(service)
        assert await sandboxes_of(proxy, "task/7") == []


async def test_a_program_is_opened_with_its_sandboxes() -> None:
    """It is opened before its first turn; a second time changes nothing; it can be released without turns."""
    async with proxy_with_sandboxes() as (proxy, service):
        body = {"program_id": "p", "group_id": "g", "sandboxes": [{"template": "plain"}]}
        answer = (await post(proxy.url, "/programs", body)).json()
        assert (answer["opened"], len(answer["sandboxes"])) == (True, 1)
        assert (await post(proxy.url, "/programs", {"program_id": "p"})).json()["opened"] is False
        await has_stage(proxy, "p", "ready")
        assert (await get(proxy.url, "/programs/p")).json()["turn_count"] == 0
        assert (await exchange(proxy.url, "DELETE", "/programs/p")).json()["released"] is True
        await until_gone(service)


async def test_a_program_that_says_class_and_sandboxes_gets_what_it_asked_for() -> None:
    async with proxy_with_sandboxes() as (proxy, _):
        body = {"program_id": "p", "program_class": "coder", "sandboxes": [{"template": "plain"}]}
        answer = (await post(proxy.url, "/programs", body)).json()
        assert [each["template"] for each in answer["sandboxes"]] == ["plain"]


async def test_a_program_is_not_opened_where_its_sandboxes_are_refused() -> None:
    async with proxy_with_sandboxes() as (proxy, _):
        body = {"program_id": "p", "program_class": "coder", "sandboxes": [{"template": "none"}]}
        assert (await post(proxy.url, "/programs", body)).status == 404
        assert (await get(proxy.url, "/programs/p")).status == 404
        assert await sandboxes_of(proxy, "p") == []


async def test_the_first_turn_of_a_class_gets_its_sandbox_while_it_is_held() -> None:
    """The sandbox is ready before the program is admitted."""
    async with proxy_with_sandboxes(**cap(1)) as (proxy, service):
        await ask(proxy.url, "first")
        held = asyncio.create_task(post(proxy.url, "/v1/chat/completions", turn("p"), ("X-Program-Class", "coder")))
        await has_stage(proxy, "p", "ready")
        assert not held.done()
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert (await held).status == 200
        assert (await has_stage(proxy, "p", "in_use"))["template"] == "coder"
        metrics = (await get(proxy.url, "/metrics")).body.decode()
        assert 'thunderagent_sandboxes{driver="callback",stage="in_use"} 1.0' in metrics
        assert "thunderagent_sandbox_wait_seconds_sum 0.0" in metrics
        await post(proxy.url, "/programs/release", {"program_id": "p"})
        await until_gone(service)


@pytest.mark.parametrize("template", ["plain", "coder"])
async def test_a_window_of_programs_and_few_sandboxes_do_not_stand_still(template: str) -> None:
    """The only sandbox is prepared for a program that is not let in, and the one that was waits for it."""
    window = {"policy": "passthrough", "admission": "window", "policy_args": {"admission.n": "1"}}
    async with proxy_with_sandboxes(sandbox_max_count=1, **window) as (proxy, service):
        await post(proxy.url, "/programs/held/sandboxes", {"template": "plain"})
        async with asyncio.timeout(DEADLINE_S):
            while [each["stage"] for each in (await get(proxy.url, "/sandboxes")).json()["sandboxes"]] != ["ready"]:
                await asyncio.sleep(0.01)
        await ask(proxy.url, "first")
        held = asyncio.create_task(ask(proxy.url, "held"))
        await post(proxy.url, "/programs/first/sandboxes", {"template": template})
        mine = await has_stage(proxy, "first", "in_use")
        assert service.there == {mine["sandbox_id"]}
        assert [each["stage"] for each in await sandboxes_of(proxy, "held")] == ["requested"]
        await post(proxy.url, "/programs/release", {"program_id": "first"})
        assert (await held).status == 200
        await has_stage(proxy, "held", "in_use")
        await post(proxy.url, "/programs/release", {"program_id": "held"})
        await until_gone(service)


async def test_changes_are_streamed() -> None:
    """The stream has the current state first, then each change, of one program alone."""
    async with proxy_with_sandboxes() as (proxy, service):
        await post(proxy.url, "/programs/other/sandboxes", {"template": "plain"})
        await post(proxy.url, "/programs/p/sandboxes", {"template": "plain"})
        await has_stage(proxy, "p", "ready")
        async with Wire.open(proxy.url) as wire:
            wire.send("GET", "/sandboxes/events?program_id=p")
            assert (await wire.head()).header("Content-Type") == "text/event-stream"
            stages = []
            await post(proxy.url, "/programs/release", {"program_id": "p"})
            while "gone" not in stages:
                event = (await wire.chunk()).decode()
                assert event.startswith("event: sandbox\ndata: ")
                report = json.loads(event.partition("data: ")[2])
                assert report["program_ids"] == ["p"]
                stages.append(report["stage"])
            assert stages[-2:] == ["reclaiming", "gone"]
        assert len(service.there) == 1


async def test_a_stream_of_changes_ends_whole_at_a_shutdown() -> None:
    began = asyncio.Event()

    async def follow(url: str) -> Answer:
        async with Wire.open(url) as wire:
            wire.send("GET", "/sandboxes/events")
            answer = await wire.head()
            began.set()
            return await wire.body(answer)

    async with proxy_with_sandboxes() as (proxy, _):
        following = asyncio.create_task(follow(proxy.url))
        await began.wait()
    assert (await following).whole


@pytest.mark.parametrize("path", ["/programs", "/programs/p/sandboxes"])
async def test_a_program_that_changes_hands_while_a_handle_is_looked_up_gets_no_sandbox(path: str) -> None:
    """It ended, and another tenant began one of that id, which goes on without the first one's sandbox."""
    runtime = Runtime(Scheduler(Passthrough()))
    owner = Owner("here", "run")
    driver, tenancy = FakeDriver(owner), Tenancy(runtime, from_key=True)
    driver.put("box", {}, tell=False)
    programs = RuntimePrograms(runtime)
    manager = Manager(
        owner,
        {"docker": driver},
        programs,
        caps=Caps(),
        templates={},
        new_id=lambda: "s",
        new_name=lambda: "n",
        settings=TRUSTING,
    )
    admin = Admin(runtime, Replicas(runtime, []), CollectorRegistry(), tenancy, manager)
    handler = admin.open if path == "/programs" else SandboxHandlers(manager, tenancy).request
    check_key(Key("a", b"", is_admin=False), Keyring(), for_admin=False)

    def asked() -> asyncio.Task[web.Response]:
        request = make_mocked_request("POST", path, match_info={"program_id": "p"})
        wanted = {"handle": "box"}
        body = {"program_id": "p", "sandboxes": [wanted]} if path == "/programs" else wanted
        request._read_bytes = json.dumps(body).encode()
        return asyncio.create_task(handler(request))

    asking = asked()
    await asyncio.sleep(0)
    runtime.release("p")
    runtime.open_program("p", tenant="b")
    with pytest.raises(OtherTenantError):
        await asking
    assert (runtime.tenant_of("p"), manager.all()) == ("b", [])
    runtime.release("p")
    asking = asked()
    await asyncio.sleep(0)
    runtime.release("p")
    await asking
    assert (runtime.tenant_of("p"), len(manager.of_program("p"))) == ("a", 1)


async def test_tools_and_what_they_take_are_told() -> None:
    async with proxy_with_sandboxes() as (proxy, _):
        await ask(proxy.url, "p")
        tools = (await get(proxy.url, "/tools")).json()
        assert (tools["running_count"], tools["mean_s"], tools["sandbox_count"]) == (1, 0.0, 0)
        await ask(proxy.url, "p")
        assert (await get(proxy.url, "/tools")).json()["mean_s"] > 0


async def test_a_failed_sandbox_stops_no_turn() -> None:
    async with proxy_with_sandboxes() as (proxy, service):
        service.refusal = 404
        await post(proxy.url, "/programs/p/sandboxes", {"template": "plain"})
        assert (await has_stage(proxy, "p", "failed"))["why"] == "the sandbox service refused"
        assert (await ask(proxy.url, "p")).status == 200
        assert "sandbox failed" in [entry["what"] for entry in (await get(proxy.url, "/programs/p")).json()["story"]]


async def test_single_sandbox_can_be_released() -> None:
    async with proxy_with_sandboxes() as (proxy, _):
        await post(proxy.url, "/programs/p/sandboxes", [{"template": "plain"}, {"template": "plain"}])
        await has_stage(proxy, "p", "ready")
        first, second = await sandboxes_of(proxy, "p")
        target = f"/programs/p/sandboxes/{first['sandbox_id']}"
        assert (await exchange(proxy.url, "DELETE", target)).json()["reclaimed"] is True
        assert (await exchange(proxy.url, "DELETE", target)).json()["reclaimed"] is False
        assert [each["sandbox_id"] for each in await sandboxes_of(proxy, "p")] == [second["sandbox_id"]]


async def test_senseless_sandbox_request_is_refused() -> None:
    async with proxy_with_sandboxes(sandbox_specs=True) as (proxy, _):
        for body, status, code in (
            (b"not json", 400, "invalid_request"),
            ({"template": "none"}, 404, "not_found"),
            ({"spec": {"driver": "docker", "image": "i"}}, 400, "invalid_request"),
        ):
            answer = await post(proxy.url, "/programs/p/sandboxes", body)
            assert (answer.status, answer.error["code"]) == (status, code)
        assert (await get(proxy.url, "/programs/p")).status == 404, "a refused request opens nothing"
        assert (await post(proxy.url, "/programs", {"sandboxes": []})).status == 400


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "sandbox_specs is off"),
        ({"sandbox_specs": True}, "neither a template's nor listed"),
        ({"sandbox_specs": True, "sandbox_callback_urls": ("https://sandboxes.example",)}, "neither a template's nor"),
    ],
)
async def test_a_data_key_does_not_choose_where_the_proxy_posts(config: dict[str, Any], why: str) -> None:
    """Neither by a template of its own, nor by a sandbox to be reclaimed, at each route that takes them."""
    inside = Inside()
    async with inside.running() as url, proxy_with_sandboxes(**KEYS, **config) as (proxy, _):
        spec = {"driver": "callback", "prepare_url": f"{url}/latest/meta-data", "reclaim_url": f"{url}/end"}
        for wanted in ({"spec": spec}, {"driver": "callback", "handle": "h", "reclaim_url": f"{url}/end"}):
            for path, body in (
                ("/programs/p/sandboxes", wanted),
                ("/programs/p/sandboxes", [wanted]),
                ("/programs", {"program_id": "p", "sandboxes": [wanted]}),
            ):
                answer = await post(proxy.url, path, body, BY_DATA_KEY)
                assert (answer.status, answer.error["code"]) == (422, "sandbox_refused")
                assert why in answer.error["message"]
        assert (await exchange(proxy.url, "GET", "/programs/p", [BY_DATA_KEY])).status == 404
    assert inside.asked == []


@pytest.mark.parametrize("status", [200, 302, 404, 409, 500])
async def test_a_data_key_reads_no_answer_of_a_callback(status: int) -> None:
    """Of a template's own service, too: errors tell their kind in reports, in events and in the program's story."""
    inside = Inside(status)
    async with inside.running() as url:
        templates = {"t": {"driver": "callback", "prepare_url": f"{url}/make", "reclaim_url": f"{url}/end"}}
        async with proxy_with_sandboxes(**KEYS, sandbox_templates=templates, sandbox_attempts_count=1) as (proxy, _):
            await post(proxy.url, "/programs/p/sandboxes", {"template": "t"}, BY_DATA_KEY)
            told = ""
            while '"why":"' not in told:
                told = (await exchange(proxy.url, "GET", "/programs/p/sandboxes", [BY_DATA_KEY])).body.decode()
            told += (await exchange(proxy.url, "GET", "/programs/p", [BY_DATA_KEY])).body.decode()
            assert "secret" not in told
            assert "127.0.0.1" not in told
            await post(proxy.url, "/programs/release", {"program_id": "p"}, BY_DATA_KEY)
    assert inside.asked[0] == "/make"
    assert "/elsewhere" not in inside.asked


async def test_without_sandboxes_the_api_says_so() -> None:
    async with fake_replica() as replica, running_proxy(replica.url) as proxy:
        answer = await get(proxy.url, "/programs/p/sandboxes")
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert "sandboxes are off" in answer.error["message"]
        assert (await post(proxy.url, "/programs", {"program_id": "p"})).json()["opened"] is True
        refused = await post(proxy.url, "/programs", {"program_id": "q", "sandboxes": [{"template": "x"}]})
        assert refused.status == 400
        assert (await get(proxy.url, "/programs/q")).status == 404
