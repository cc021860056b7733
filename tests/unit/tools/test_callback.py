"""The callback driver's requests to a real external service, and its reading of all possible answers."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trustme
from aiohttp import web

from tests.loopback import free_ports
from thunderagent.errors import (
    ConfigurationError,
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxRefusedError,
    SandboxSetupError,
    SandboxSpaceError,
)
from thunderagent.tools.base import Order, Owner, Place, Usage
from thunderagent.tools.callback import MAX_ANSWER_BYTES, CallbackDriver
from thunderagent.tools.callback_urls import CallbackUrls
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from thunderagent.tools.base import Driver

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OWNER = Owner(owner_id="proxy-1", run_id="run-7")
EXPIRES_AT_S = 2_000_000_000.5
READY = {"handle": "sb 1/ä#@", "address": "10.1.2.3", "ports": {"8000": ["10.1.2.3", 41234]}, "details": {"zone": "a"}}


@contextmanager
def raises(kind: type[SandboxError], match: str) -> Iterator[pytest.ExceptionInfo[SandboxError]]:
    """Expect an error whose text for operators matches, and whose message does not hold that text."""
    with pytest.raises(kind) as raised:
        yield raised
    assert re.search(match, raised.value.for_operators), raised.value.for_operators
    assert not re.search(match, raised.value.message)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for a condition that no event announces, up to the test's own time limit."""
    while not condition():
        await asyncio.sleep(0.005)


def answer(body: object = None, status: int = 200, **headers: str) -> Handler:
    """Answer with JSON, or with text or bytes as they are."""

    async def handle(request: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, bytes):
            return web.Response(body=body, status=status, headers=named)
        return web.json_response(body, status=status, headers=named)

    return handle


async def never(request: web.Request) -> web.Response:
    """Answer nothing."""
    await asyncio.sleep(3600)
    return web.Response()


@dataclass
class Asked:
    """One received request."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Elsewhere:
    """A service on loopback. Each answer in the lists is given once, the last one repeatedly."""

    prepare: list[Handler] = field(default_factory=lambda: [answer(READY)])
    status: list[Handler] = field(default_factory=lambda: [answer(READY)])
    reclaim: list[Handler] = field(default_factory=lambda: [answer({})])
    asked: list[Asked] = field(default_factory=list)
    in_flight_count: int = 0
    most_in_flight_count: int = 0
    runner: web.AppRunner | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections_count(self) -> int:
        assert self.runner is not None
        assert self.runner.server is not None
        return len(self.runner.server.connections)

    def asks_of(self, path: str) -> list[Asked]:
        return [each for each in self.asked if each.path == path]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Elsewhere]:
        app = web.Application()
        app.router.add_route("*", "/{name}", self._answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]
        try:
            yield self
        finally:
            await self.runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body = json.loads(data) if data else {}
        self.asked.append(Asked(request.method, request.path, dict(request.headers), body))
        handlers: list[Handler] = getattr(self, request.match_info["name"])
        handler = handlers.pop(0) if len(handlers) > 1 else handlers[0]
        self.in_flight_count += 1
        self.most_in_flight_count = max(self.most_in_flight_count, self.in_flight_count)
        try:
            return await handler(request)
        finally:
            self.in_flight_count -= 1


TLS = ssl.create_default_context()
"""Made once: reading all authorities takes longer than a test."""


@pytest.fixture
async def elsewhere() -> AsyncIterator[Elsewhere]:
    async with Elsewhere().running() as service:
        yield service


@asynccontextmanager
async def driver_of(**options: Any) -> AsyncIterator[CallbackDriver]:
    """Yield a driver, and check that it leaves no task behind."""
    tasks = _tasks_but_the_servers()
    driver = CallbackDriver(OWNER, **{"concurrency_count": 4, "request_timeout_s": 5.0, "tls": TLS, **options})
    try:
        yield driver
        assert repr(driver) == "<CallbackDriver 0 requests in flight>"
    finally:
        await driver.close()
    await eventually(lambda: _tasks_but_the_servers() <= tasks)


def _tasks_but_the_servers() -> set[asyncio.Task[Any]]:
    """Return the tasks beside the caller; a test's server has a task for each open connection."""
    everything = asyncio.all_tasks() - {asyncio.current_task()}
    return {task for task in everything if "RequestHandler" not in repr(task.get_coro())}


@pytest.fixture
async def driver() -> AsyncIterator[CallbackDriver]:
    async with driver_of() as driver:
        yield driver


def urls_at(service: Elsewhere) -> tuple[str, str]:
    return f"{service.url}/prepare", f"{service.url}/reclaim"


def order_at(service: Elsewhere | str, sandbox_id: str = "sandbox-1", **fields: Any) -> Order:
    url = service if isinstance(service, str) else service.url
    template = Template(
        **{
            "driver": "callback",
            "prepare_url": f"{url}/prepare",
            "reclaim_url": f"{url}/reclaim",
            "ready_interval_s": 0.01,
            **fields,
        }
    )
    return Order(
        sandbox_id=sandbox_id,
        template=template,
        template_name="tools",
        program_id="task-1",
        expires_at_s=EXPIRES_AT_S,
    )


def test_callback_is_a_driver() -> None:
    """It has the shape that the manager needs."""
    driver: Driver = CallbackDriver(OWNER, concurrency_count=1)
    assert driver.kind == "callback"


async def test_callback_sends_the_request(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """The request has the template's description of a sandbox, its program, and its expiry."""
    fields: dict[str, Any] = {
        "image": "debian",
        "command": ["sleep", "inf"],
        "environment": {"A": "b"},
        "ports": [8000],
        "setup": ["make"],
        "memory_bytes": 1000,
        "ttl_s": 60.0,
    }
    await driver.prepare(order_at(elsewhere, **fields))
    [asked] = elsewhere.asked
    assert (asked.method, asked.path) == ("POST", "/prepare")
    assert asked.headers["Idempotency-Key"] == "sandbox-1"
    assert "Authorization" not in asked.headers
    expected = {
        **fields,
        "sandbox_id": "sandbox-1",
        "program_id": "task-1",
        "template": "tools",
        "expires_at": 2_000_000_000,
        "labels": {
            "thunderagent.sandbox-id": "sandbox-1",
            "thunderagent.program-id": "task-1",
            "thunderagent.template": "tools",
            "thunderagent.expires": "2000000000",
            "thunderagent.owner": "proxy-1",
            "thunderagent.run": "run-7",
        },
    }
    assert expected.items() <= asked.body.items()
    assert not {"prepare_url", "reclaim_url", "driver", "warm_count", "namespace"} & asked.body.keys()


@pytest.mark.parametrize("status", [200, 201])
async def test_callback_reports_where_the_sandbox_is(elsewhere: Elsewhere, driver: CallbackDriver, status: int) -> None:
    """The answer has the sandbox's address."""
    elsewhere.prepare = [answer(READY, status)]
    place = await driver.prepare(order_at(elsewhere))
    assert place.address == "10.1.2.3"
    assert place.ports == {8000: ("10.1.2.3", 41234)}
    assert place.details == {"remote_handle": "sb 1/ä#@", "zone": "a"}


async def test_only_the_handle_is_needed(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """All else may be missing or null, and unknown fields are ignored."""
    elsewhere.prepare = [answer({"handle": "h", "address": None, "ports": None, "details": None, "more": [1]})]
    place = await driver.prepare(order_at(elsewhere))
    assert place == Place(place.handle, details={"remote_handle": "h"})


async def test_waiting_until_it_is_ready(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """After a 202 the status URL is asked until it says ready; earlier data stays valid."""
    elsewhere.prepare = [answer({"status_url": "/status"}, 202)]
    elsewhere.status = [
        answer(b"", 202),
        answer({"handle": "h", "address": "10.0.0.9", "ready": False, "status_url": f"{elsewhere.url}/status"}),
        answer({"ready": True}),
    ]
    place = await driver.prepare(order_at(elsewhere))
    assert place.address == "10.0.0.9"
    assert place.details == {"remote_handle": "h"}
    assert [each.method for each in elsewhere.asks_of("/status")] == ["GET"] * 3
    await driver.reclaim(place.handle)
    assert elsewhere.asked[-1].body == {"handle": "h", "sandbox_id": "sandbox-1"}


@pytest.mark.parametrize(
    "first",
    [
        answer({"handle": "h", "ready": False, "status_url": "/status"}, 201),
        answer({"handle": "h"}, 202, Location="/status"),
        answer(b"", 202, Location="/status"),
        answer(b"<html>", 303, Location="/status?call=1"),
    ],
    ids=["201", "202 with a handle", "202 with a location", "303"],
)
async def test_ways_to_say_not_yet(elsewhere: Elsewhere, driver: CallbackDriver, first: Handler) -> None:
    """Each of these leads to the status URL."""
    elsewhere.prepare = [first]
    place = await driver.prepare(order_at(elsewhere))
    assert place.address == READY["address"]
    assert len(elsewhere.asks_of("/status")) == 1


async def test_a_status_that_fails_now_and_then(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """A failed request says nothing about the sandbox."""
    elsewhere.prepare = [answer({"status_url": "/status"}, 202)]
    elsewhere.status = [answer({}, 503), answer({}, 429), answer({"ready": False}), answer({}, 500), answer(READY)]
    await driver.prepare(order_at(elsewhere))
    assert elsewhere.asks_of("/reclaim") == []


async def test_a_status_that_fails_for_long(elsewhere: Elsewhere) -> None:
    """After the time of one request the engine counts as gone, and the begun sandbox is given back."""
    elsewhere.prepare = [answer({"handle": "h", "ready": False, "status_url": "/status"})]
    elsewhere.status = [answer({"message": "broken"}, 500)]
    async with driver_of(request_timeout_s=0.25) as driver:
        with raises(SandboxEngineError, match="broken"):
            await driver.prepare(order_at(elsewhere))
    assert len(elsewhere.asks_of("/status")) > 1
    assert [each.body for each in elsewhere.asks_of("/reclaim")] == [{"handle": "h", "sandbox_id": "sandbox-1"}]


async def test_a_status_that_fails_again_after_it_was_heard(elsewhere: Elsewhere) -> None:
    """Each answer restarts that time."""
    heard_s = [time.monotonic()]

    async def status(request: web.Request) -> web.StreamResponse:
        if time.monotonic() - heard_s[-1] < 0.7:
            return await answer({}, 500)(request)
        heard_s.append(time.monotonic())
        return await answer(READY if len(heard_s) > 2 else {"ready": False})(request)

    elsewhere.prepare, elsewhere.status = [answer({"status_url": "/status"}, 202)], [status]
    async with driver_of(request_timeout_s=1.2) as driver:
        await driver.prepare(order_at(elsewhere))
    assert heard_s[-1] - heard_s[0] > 1.2


@pytest.mark.parametrize("status", [404, 410])
async def test_a_sandbox_that_ended_before_it_was_ready(
    elsewhere: Elsewhere, driver: CallbackDriver, status: int
) -> None:
    """The status URL no longer knows it: its set-up failed."""
    elsewhere.prepare = [answer({"status_url": "/status"}, 202)]
    elsewhere.status = [answer({"detail": "make: *** [all] Error 2"}, status)]
    with raises(SandboxSetupError, match="Error 2"):
        await driver.prepare(order_at(elsewhere))
    assert len(elsewhere.asks_of("/reclaim")) == 1


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, {"message": "no such image"}, SandboxRefusedError),
        (401, {"error": "no such image"}, SandboxRefusedError),
        (404, {"detail": "no such image"}, SandboxRefusedError),
        (422, {"error": {"message": "no such image", "code": "x"}}, SandboxRefusedError),
        (403, "no such image", SandboxRefusedError),
        (400, b"no such\r\n \x1bimage", SandboxRefusedError),
        (409, {"message": "no such image"}, SandboxConflictError),
        (408, {"message": "no such image"}, SandboxEngineError),
        (429, {"message": "no such image"}, SandboxEngineError),
        (500, {"message": "no such image"}, SandboxEngineError),
        (503, {"message": "no such image"}, SandboxEngineError),
        (507, {"message": "no such image"}, SandboxSpaceError),
        (503, {"error": {"message": "no such image", "code": "insufficient_capacity"}}, SandboxSpaceError),
        (400, {"message": "no such image", "code": "INSUFFICIENT_RESOURCES"}, SandboxSpaceError),
    ],
)
async def test_errors_of_the_service_are_reported(
    elsewhere: Elsewhere, driver: CallbackDriver, status: int, body: object, error: type[SandboxError]
) -> None:
    """Each status has its error, with the other side's words."""
    elsewhere.prepare = [answer(body, status)]
    with raises(SandboxError, match=rf"^127\.0\.0\.1 answered {status}: no such image$") as raised:
        await driver.prepare(order_at(elsewhere))
    assert type(raised.value) is error
    # A refusal made nothing; otherwise the outcome is unknown.
    assert len(elsewhere.asks_of("/reclaim")) == (error is not SandboxRefusedError)


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe", b"[" * 100_000, {"message": 5}, {"error": {"message": None}}, [1], None, 7]
)
async def test_errors_that_say_nothing(elsewhere: Elsewhere, driver: CallbackDriver, body: object) -> None:
    """A refusal counts whatever its body holds, and its message stays short."""
    elsewhere.prepare = [answer(body, 400)]
    with pytest.raises(SandboxRefusedError) as raised:
        await driver.prepare(order_at(elsewhere))
    assert raised.value.for_operators.startswith("127.0.0.1 answered 400")
    assert len(raised.value.for_operators) < 400


async def test_a_long_message_is_cut(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """Our message has a bounded part of theirs."""
    elsewhere.prepare = [answer({"message": "x" * 10_000}, 400)]
    with raises(SandboxRefusedError, match=r"x{300}$") as raised:
        await driver.prepare(order_at(elsewhere))
    assert len(raised.value.message) < 400


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b""),
        (200, b"not JSON"),
        (200, b"\xff"),
        (200, b"[" * 100_000),
        (200, []),
        (200, {}),
        (200, {"handle": ""}),
        (200, {"handle": 5}),
        (200, {"handle": "h" * 1025}),
        (200, {"handle": "h", "ports": {"http": ["a", 1]}}),
        (200, {"handle": "h", "ports": {"80": ["a", 70000]}}),
        (200, {"handle": "h", "ports": {"80": ["a"]}}),
        (200, {"handle": "h", "ports": {"80": "a:1"}}),
        (200, {"handle": "h", "details": {"a": 1}}),
        (200, {"handle": "h", "ready": False}),
        (200, {"handle": "h", "ready": "later"}),
        (202, {"handle": "h"}),
        (202, b""),
        (202, b"soon"),
        (204, b""),
        (206, {"handle": "h"}),
        (200, b'{"handle": "' + b"h" * MAX_ANSWER_BYTES + b'"}'),
        (202, {"status_url": "http://xn--a/"}),
        (202, {"status_url": "http://127.0.0.1:notaport/"}),
    ],
)
async def test_broken_answers_are_refused(
    elsewhere: Elsewhere, driver: CallbackDriver, status: int, body: object
) -> None:
    """An unreadable answer has its own error; a sandbox that was made is given back."""
    elsewhere.prepare = [answer(body, status)]
    with pytest.raises(SandboxError) as raised:
        await driver.prepare(order_at(elsewhere))
    assert type(raised.value) is SandboxError
    assert len(raised.value.message) < 500
    assert [each.body["sandbox_id"] for each in elsewhere.asks_of("/reclaim")] == ["sandbox-1"]


async def test_an_answer_without_end(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """No more is read than the limit of an answer."""
    written_bytes = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal written_bytes
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)
            written_bytes += 65536

    elsewhere.prepare = [endless]
    with raises(SandboxError, match="more than"):
        await driver.prepare(order_at(elsewhere))
    assert written_bytes < 32 * MAX_ANSWER_BYTES
    await eventually(lambda: elsewhere.in_flight_count == 0)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirects_are_not_followed(elsewhere: Elsewhere, driver: CallbackDriver, status: int) -> None:
    """None is followed, even to the same place: a POST must not be sent twice."""
    elsewhere.prepare = [answer({}, status, Location=f"{elsewhere.url}/status")]
    with raises(SandboxRefusedError, match="redirects are not followed"):
        await driver.prepare(order_at(elsewhere))
    assert [each.path for each in elsewhere.asked] == ["/prepare"]
    elsewhere.reclaim = elsewhere.prepare
    with raises(SandboxRefusedError, match="redirects are not followed"):
        await driver.reclaim((await driver.adopt("h", f"{elsewhere.url}/reclaim")).handle)


@pytest.mark.parametrize("how", ["202", "202 with a location", "303", "ready: false"])
async def test_nothing_leads_to_another_origin(elsewhere: Elsewhere, how: str) -> None:
    """A host that the template does not name is not asked, and gets no token."""
    async with Elsewhere().running() as other, driver_of(token="secret") as driver:
        there = f"{other.url}/status"
        elsewhere.prepare = [
            {
                "202": answer({"status_url": there}, 202),
                "202 with a location": answer(b"", 202, Location=there),
                "303": answer(b"", 303, Location=there),
                "ready: false": answer({"handle": "h", "ready": False, "status_url": f"//127.0.0.1:{other.port}/"}),
            }[how]
        ]
        with raises(SandboxError, match="another origin"):
            await driver.prepare(order_at(elsewhere))
        assert other.asked == []
        assert len(elsewhere.asks_of("/reclaim")) == 1  # the sandbox was begun


async def test_a_status_may_not_lead_elsewhere_later(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """This holds for status answers, too; then the sandbox is given back."""
    elsewhere.prepare = [answer({"status_url": "/status"}, 202)]
    elsewhere.status = [answer({"ready": False, "status_url": "http://localhost:1/status"})]
    with raises(SandboxError, match="another origin"):
        await driver.prepare(order_at(elsewhere))
    assert len(elsewhere.asks_of("/reclaim")) == 1


async def test_failed_call_is_tried_again(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """A retry has the same key, and gives the same handle."""
    elsewhere.prepare = [answer({}, 503), answer(READY), answer(READY, 200)]
    with pytest.raises(SandboxEngineError) as raised:
        await driver.prepare(order_at(elsewhere))
    assert raised.value.may_recover
    first = await driver.prepare(order_at(elsewhere))
    second = await driver.prepare(order_at(elsewhere))
    assert first == second
    assert {each.headers["Idempotency-Key"] for each in elsewhere.asks_of("/prepare")} == {"sandbox-1"}


async def test_callback_without_a_service_fails(driver: CallbackDriver) -> None:
    """A failed connection may succeed later; nothing was begun, so there is no reclaim and no warning."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with structlog.testing.capture_logs() as logs:
        with raises(SandboxEngineError, match=r"127\.0\.0\.1 cannot be reached"):
            await driver.prepare(order_at(url))
        with raises(SandboxEngineError, match=r"127\.0\.0\.1 cannot be reached"):
            await driver.reclaim((await driver.adopt("h", f"{url}/reclaim")).handle)
    assert logs == []


async def test_the_environment_names_no_proxy(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template's URL is asked directly, whatever HTTP_PROXY says."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with driver_of() as driver:
        await driver.prepare(order_at(elsewhere))


async def test_sandbox_behind_a_broken_connection_is_given_back(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """After a broken answer it is unknown what was made, so that is given back."""

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    elsewhere.prepare = [cut]
    with raises(SandboxEngineError, match=r"127\.0\.0\.1 cannot be reached"):
        await driver.prepare(order_at(elsewhere))
    assert [each.body for each in elsewhere.asks_of("/reclaim")] == [{"handle": "", "sandbox_id": "sandbox-1"}]


async def test_silent_service_times_out(elsewhere: Elsewhere) -> None:
    """A request without an answer ends, on both sides."""
    elsewhere.prepare = [never]
    async with driver_of(request_timeout_s=0.25) as driver:
        with raises(SandboxEngineError, match=r"within 0\.25 s"):
            await driver.prepare(order_at(elsewhere))
        await eventually(lambda: elsewhere.in_flight_count == 0)
    assert len(elsewhere.asks_of("/reclaim")) == 1


async def test_a_slow_answer_has_one_time_limit(elsewhere: Elsewhere) -> None:
    """A byte now and then does not extend the wait."""

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    elsewhere.prepare = [drip]
    async with driver_of(request_timeout_s=0.2) as driver:
        with raises(SandboxEngineError, match="within"):
            await driver.prepare(order_at(elsewhere))


# --- Reclaiming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 202, 204, 404, 410])
async def test_reclaiming_calls_the_service(elsewhere: Elsewhere, driver: CallbackDriver, status: int) -> None:
    """It is sent once; a sandbox that is already gone is fine, and the body does not matter."""
    elsewhere.reclaim = [answer(b"" if status == 204 else b"whatever", status)]
    place = await driver.prepare(order_at(elsewhere))
    await driver.reclaim(place.handle)
    await driver.reclaim(place.handle)
    asked = elsewhere.asks_of("/reclaim")
    assert [each.body for each in asked] == [{"handle": "sb 1/ä#@", "sandbox_id": "sandbox-1"}] * 2


@pytest.mark.parametrize(
    ("status", "error"), [(400, SandboxRefusedError), (429, SandboxEngineError), (500, SandboxEngineError)]
)
async def test_reclaiming_that_fails(
    elsewhere: Elsewhere, driver: CallbackDriver, status: int, error: type[SandboxError]
) -> None:
    """The manager retries, not the driver."""
    elsewhere.reclaim = [answer({"message": "no"}, status)]
    with raises(error, match="answered .*: no$"):
        await driver.reclaim((await driver.adopt("h", f"{elsewhere.url}/reclaim")).handle)


async def test_a_handle_outlives_the_driver(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """Another run of the proxy reclaims it by the handle alone."""
    handle = (await driver.prepare(order_at(elsewhere, "a@b#c/d"))).handle
    async with driver_of(token="secret") as later:
        await later.reclaim(handle)
    [asked] = elsewhere.asks_of("/reclaim")
    assert asked.body == {"handle": "sb 1/ä#@", "sandbox_id": "a@b#c/d"}
    assert asked.headers["Authorization"] == "Bearer secret"


async def test_sandbox_registered_by_a_client_is_adopted(elsewhere: Elsewhere) -> None:
    """It is reclaimed at the URL that the client gave, which does not get our token."""
    async with driver_of(token="secret") as driver:
        place = await driver.adopt("their/1", f"{elsewhere.url}/reclaim?key=a@b")
        assert place.details == {"remote_handle": "their/1"}
        await driver.reclaim(place.handle)
    [asked] = elsewhere.asked
    assert asked.body == {"handle": "their/1", "sandbox_id": ""}
    assert "Authorization" not in asked.headers


async def test_a_sandbox_without_a_name(driver: CallbackDriver) -> None:
    """A client that registers one must name it."""
    with pytest.raises(SandboxRefusedError):
        await driver.adopt("", "http://127.0.0.1:1/reclaim")


@pytest.mark.parametrize("handle", ["", "sandbox-1", "a@b", "a@file:///x#h", "a@http://#h", "@#"])
async def test_a_handle_that_is_none(driver: CallbackDriver, handle: str) -> None:
    """A handle that this driver did not write is refused."""
    with pytest.raises(SandboxRefusedError):
        await driver.reclaim(handle)


@pytest.mark.parametrize(
    "url",
    ["", "x", "ftp://h/", "http://", "http://u:p@h/", "http://h/#f", "http://h:x/", "http://h:99999/"],
)
async def test_a_url_that_is_none(driver: CallbackDriver, url: str) -> None:
    """A URL that is unusable, or whose password would show in the handle, is refused beforehand."""
    with pytest.raises(SandboxRefusedError):
        await driver.adopt("h", url)
    with pytest.raises(SandboxRefusedError):
        await driver.prepare(order_at("http://127.0.0.1:1", reclaim_url=url or "x"))


# --- The token ------------------------------------------------------------------------------------------------


async def test_the_token_goes_along(elsewhere: Elsewhere) -> None:
    """Every request for a sandbox of ours has it."""
    elsewhere.prepare = [answer({"status_url": "/status"}, 202)]
    async with driver_of(token="secret") as driver:
        await driver.reclaim((await driver.prepare(order_at(elsewhere))).handle)
    assert [each.path for each in elsewhere.asked] == ["/prepare", "/status", "/reclaim"]
    assert {each.headers.get("Authorization") for each in elsewhere.asked} == {"Bearer secret"}


async def test_the_token_goes_only_where_it_is_meant_to(elsewhere: Elsewhere) -> None:
    """The URLs of the operator's own templates get it; a URL from a request does not."""
    async with (
        Elsewhere().running() as other,
        driver_of(token="secret", urls=CallbackUrls([urls_at(elsewhere)], [other.url])) as driver,
    ):
        for service in (elsewhere, other):
            await driver.reclaim((await driver.prepare(order_at(service))).handle)
        assert all("Authorization" in each.headers for each in elsewhere.asked)
        assert not any("Authorization" in each.headers for each in other.asked)


@pytest.mark.parametrize("token", ["a\r\nX: y", "ä", "a\0"])
def test_a_token_that_is_none(token: str) -> None:
    """It must fit into a header."""
    with pytest.raises(ConfigurationError):
        CallbackDriver(OWNER, concurrency_count=1, token=token)


# --- What a client's URL reaches --------------------------------------------------------------------------------


@asynccontextmanager
async def driver_with(urls: CallbackUrls) -> AsyncIterator[CallbackDriver]:
    async with driver_of(token="secret", urls=urls) as driver:
        yield driver


def resolving_to(*answers: str) -> tuple[list[str], Callable[[str], Awaitable[Sequence[str]]]]:
    """Return the names that were asked for, and a resolver with another answer each time."""
    asked: list[str] = []
    left = list(answers)

    async def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        return [left.pop(0)]

    return asked, resolve


async def test_the_connection_goes_to_the_address_that_was_checked(elsewhere: Elsewhere) -> None:
    """A name is resolved once a request: what it would lead to a moment later is not asked."""
    asked, resolve = resolving_to("127.0.0.1", "169.254.169.254")
    base = f"http://sandboxes.invalid:{elsewhere.port}"
    urls = CallbackUrls([], [base], ["127.0.0.0/8"], resolve=resolve)
    async with driver_with(urls) as driver:
        place = await driver.adopt("their/1", f"{base}/reclaim?key=1")
        await driver.reclaim(place.handle)
        assert asked == ["sandboxes.invalid"]
        with raises(SandboxRefusedError, match=r"169\.254\.169\.254"):
            await driver.reclaim(place.handle)
    [request] = elsewhere.asked
    assert request.headers["Host"] == f"sandboxes.invalid:{elsewhere.port}"
    assert "Authorization" not in request.headers


async def test_a_clients_template_reaches_no_other_service(elsewhere: Elsewhere) -> None:
    """Its URLs are listed, and so must be what they lead to; a service of the same host is another one."""
    async with driver_with(CallbackUrls([], [f"{elsewhere.url}/prepare", f"{elsewhere.url}/reclaim"])) as driver:
        place = await driver.prepare(order_at(elsewhere))
        assert place.details == {"remote_handle": READY["handle"]}  # none of what the answer says besides
        for fields in ({"prepare_url": f"{elsewhere.url}/status"}, {"reclaim_url": f"{elsewhere.url}/status"}):
            with pytest.raises(SandboxRefusedError):
                await driver.prepare(order_at(elsewhere, **fields))
        elsewhere.prepare = [answer({"status_url": "/status"}, 202)]
        with pytest.raises(SandboxRefusedError):
            await driver.prepare(order_at(elsewhere))
    assert elsewhere.asks_of("/status") == []


async def test_a_clients_service_does_not_reclaim_at_the_operators(elsewhere: Elsewhere) -> None:
    """It would choose which sandbox goes, and our token would go along."""
    async with (
        Elsewhere().running() as theirs,
        driver_with(CallbackUrls([urls_at(elsewhere)], [theirs.url])) as driver,
    ):
        with pytest.raises(SandboxRefusedError, match="of one template"):
            await driver.prepare(order_at(theirs, reclaim_url=f"{elsewhere.url}/reclaim"))
    assert theirs.asked == elsewhere.asked == []


async def test_the_certificate_is_of_the_name(elsewhere: Elsewhere) -> None:
    """A server at the checked address that cannot show one for the name is not asked."""
    authority = trustme.CA()
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("good.invalid").configure_cert(shown)
    app = web.Application()
    app.router.add_post("/reclaim", answer({}))
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=shown).start()
        port = runner.addresses[0][1]
        bases = [f"https://{name}.invalid:{port}" for name in ("good", "bad")]
        _, resolve = resolving_to("127.0.0.1", "127.0.0.1")
        async with driver_of(tls=tls, urls=CallbackUrls([], bases, ["127.0.0.1"], resolve=resolve)) as driver:
            good, bad = [(await driver.adopt("h", f"{base}/reclaim")).handle for base in bases]
            await driver.reclaim(good)
            with raises(SandboxEngineError, match="certificate"):
                await driver.reclaim(bad)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("field", ["address", "ports"])
async def test_an_address_that_is_none_is_not_passed_on(
    elsewhere: Elsewhere, driver: CallbackDriver, field: str
) -> None:
    """Clients see addresses: no text of another kind goes there."""
    text = "<html>secret</html>"
    elsewhere.prepare = [answer({"handle": "h", field: text if field == "address" else {"80": [text, 80]}})]
    with raises(SandboxError, match=field):
        await driver.prepare(order_at(elsewhere))


# --- Cancellation, and how much at once -----------------------------------------------------------------------


async def test_preparation_cancelled_at_the_service_is_reclaimed(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """The request ends, and what it may have made is given back before the caller continues."""
    elsewhere.prepare = [never]
    preparing = asyncio.ensure_future(driver.prepare(order_at(elsewhere)))
    await eventually(lambda: elsewhere.in_flight_count)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert [each.body for each in elsewhere.asks_of("/reclaim")] == [{"handle": "", "sandbox_id": "sandbox-1"}]
    await eventually(lambda: elsewhere.in_flight_count == 0)


@pytest.mark.parametrize("status", [never, answer({"ready": False})], ids=["asking", "waiting"])
async def test_cancelled_while_it_waits_for_ready(
    elsewhere: Elsewhere, driver: CallbackDriver, status: Handler
) -> None:
    """The same holds between the answers, with the handle that is then known."""
    elsewhere.prepare = [answer({"handle": "h", "ready": False, "status_url": "/status"})]
    elsewhere.status = [status]
    preparing = asyncio.ensure_future(driver.prepare(order_at(elsewhere)))
    await eventually(lambda: len(elsewhere.asks_of("/status")) > (status is not never))
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert [each.body for each in elsewhere.asks_of("/reclaim")] == [{"handle": "h", "sandbox_id": "sandbox-1"}]
    await eventually(lambda: elsewhere.in_flight_count == 0)


async def test_cancelled_before_anything_was_sent(elsewhere: Elsewhere) -> None:
    """A waiting call leaves nothing to reclaim, and gives its place to the next."""
    elsewhere.prepare = [never, answer(READY)]
    async with driver_of(concurrency_count=1) as driver:
        first = asyncio.ensure_future(driver.prepare(order_at(elsewhere, "sandbox-1")))
        await eventually(lambda: elsewhere.in_flight_count)
        second = asyncio.ensure_future(driver.prepare(order_at(elsewhere, "sandbox-2")))
        await asyncio.sleep(0.02)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert elsewhere.asks_of("/reclaim") == []
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await driver.prepare(order_at(elsewhere, "sandbox-3"))
    assert [each.body["sandbox_id"] for each in elsewhere.asks_of("/reclaim")] == ["sandbox-1"]


async def test_giving_back_takes_no_longer_than_it_may(elsewhere: Elsewhere) -> None:
    """A hanging reclaim blocks nothing for long, and is logged."""
    elsewhere.prepare, elsewhere.reclaim = [answer({}, 500)], [never]
    async with driver_of(request_timeout_s=0.25) as driver:
        with structlog.testing.capture_logs() as logs, pytest.raises(SandboxEngineError):
            await driver.prepare(order_at(elsewhere))
    [log] = logs
    assert log["log_level"] == "warning"
    assert (log["sandbox_id"], log["program_id"]) == ("sandbox-1", "task-1")
    await eventually(lambda: elsewhere.in_flight_count == 0)


async def test_giving_back_that_fails(elsewhere: Elsewhere, driver: CallbackDriver) -> None:
    """The caller gets the error of the preparation; the other one is in the log."""
    elsewhere.prepare, elsewhere.reclaim = [answer({"message": "first"}, 500)], [answer({"message": "then"}, 500)]
    with structlog.testing.capture_logs() as logs, raises(SandboxEngineError, match="first"):
        await driver.prepare(order_at(elsewhere))
    assert ["then" in each["why"] for each in logs] == [True]


async def test_many_cancelled_leave_nothing(elsewhere: Elsewhere) -> None:
    """Cancelled at any time, each requested one is given back, and no socket stays open."""

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return await answer({"status_url": "/status"}, 202)(request)

    elsewhere.prepare, elsewhere.status = [slow], [answer({"ready": False})]
    async with driver_of(concurrency_count=8) as driver:
        preparing = [asyncio.ensure_future(driver.prepare(order_at(elsewhere, f"s-{n}"))) for n in range(60)]
        for each in preparing:
            await asyncio.sleep(0.002)
            each.cancel()
        results = await asyncio.gather(*preparing, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results)
        asked = {each.body["sandbox_id"] for each in elsewhere.asks_of("/prepare")}
        # If it was cancelled while its request was written, it may be given back without having arrived.
        assert asked <= {each.body["sandbox_id"] for each in elsewhere.asks_of("/reclaim")}
    await eventually(lambda: elsewhere.connections_count == 0)
    assert elsewhere.in_flight_count == 0


async def test_callback_bounds_requests_in_flight(elsewhere: Elsewhere) -> None:
    """Preparations beyond the limit wait; a reclaim does not wait for them."""
    gate = asyncio.Event()

    async def gated(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await answer(READY)(request)

    elsewhere.prepare = [gated]
    async with driver_of(concurrency_count=3) as driver:
        preparing = [asyncio.ensure_future(driver.prepare(order_at(elsewhere, f"s-{n}"))) for n in range(20)]
        await eventually(lambda: elsewhere.in_flight_count == 3)
        assert repr(driver) == "<CallbackDriver 3 requests in flight>"
        await driver.reclaim((await driver.adopt("h", f"{elsewhere.url}/reclaim")).handle)
        assert elsewhere.most_in_flight_count == 4
        gate.set()
        places = await asyncio.gather(*preparing)
    assert len({place.handle for place in places}) == 20
    assert elsewhere.most_in_flight_count == 4


async def test_a_clients_dead_url_takes_no_place_of_the_operators(elsewhere: Elsewhere) -> None:
    """It is the URL of a registered sandbox, or of a client's own template."""
    async with (
        Elsewhere(reclaim=[never]).running() as dead,
        driver_of(concurrency_count=1, urls=CallbackUrls([urls_at(elsewhere)], [dead.url])) as driver,
    ):
        ours = (await driver.prepare(order_at(elsewhere))).handle
        stuck = [(await driver.adopt("h", f"{dead.url}/reclaim")).handle, (await driver.prepare(order_at(dead))).handle]
        reclaiming = [asyncio.ensure_future(driver.reclaim(handle)) for handle in stuck]
        await eventually(lambda: dead.in_flight_count == 1)
        async with asyncio.timeout(3):  # less than a request's
            await driver.reclaim(ours)
        for task in reclaiming:
            task.cancel()
        await asyncio.wait(reclaiming)


async def test_waiting_for_ready_takes_no_place(elsewhere: Elsewhere) -> None:
    """Many may become ready at the same time, with few requests."""
    ready_s = time.monotonic() + 0.15

    async def status(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.005)
        return await answer(READY if time.monotonic() > ready_s else {"ready": False})(request)

    elsewhere.prepare, elsewhere.status = [answer({"status_url": "/status"}, 202)], [status]
    async with driver_of(concurrency_count=1) as driver:
        await asyncio.gather(*(driver.prepare(order_at(elsewhere, f"s-{n}")) for n in range(10)))
    assert len(elsewhere.asks_of("/prepare")) == 10
    assert elsewhere.most_in_flight_count == 1


# --- Nothing to do --------------------------------------------------------------------------------------------


async def test_nothing_is_found(driver: CallbackDriver) -> None:
    """The other side keeps its own records."""
    assert list(await driver.find()) == []
    assert await driver.measure(["h"]) == Usage()
    await driver.sweep()


async def test_watching_reports_nothing_and_ends_with_the_driver(driver: CallbackDriver) -> None:
    """It reports nothing, and ends with the driver."""
    watching = asyncio.ensure_future(anext(driver.watch(), None))
    await asyncio.sleep(0.02)
    assert not watching.done()
    await driver.close()
    assert await watching is None


async def test_watching_can_be_cancelled(driver: CallbackDriver) -> None:
    """So can every await of a driver."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(driver.watch()), 0.02)


async def test_closing_twice_is_harmless(driver: CallbackDriver) -> None:
    """The second call does nothing."""
    await driver.close()
