"""Access control on real sockets: keys, origins, rates, bodies, TLS, and secrets that are never shown."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import signal
import ssl
import tomllib
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import structlog
import trustme

from tests.integration.support import (
    ANSWER,
    CHAT,
    DEADLINE_S,
    JSON_TYPE,
    Answer,
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
    post,
    running_proxy,
    serve,
    sockets_count,
    turn,
    until,
    value_of,
)
from thunderagent.cli import main
from thunderagent.client import ProxyRefusedError, program
from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.proxy.gate.keys import Keyring, mint_key
from thunderagent.serving.security import check_security

if TYPE_CHECKING:
    from pathlib import Path

DATA_KEY, DATA_LINE = mint_key("app")
ADMIN_KEY, ADMIN_LINE = mint_key("ops")
KEYS = {"api_keys": (DATA_LINE,), "admin_keys": (ADMIN_LINE,)}
PAGE: Header = ("Origin", "https://page.test")


def bearer(key: str) -> Header:
    return ("Authorization", f"Bearer {key}")


async def call(url: str, method: str, target: str, *headers: Header, body: bytes = b"") -> Answer:
    return await exchange(url, method, target, headers, body)


# --- keys


async def test_a_turn_needs_a_key_and_the_engine_never_sees_it(replica: FakeReplica) -> None:
    """A client may send it in any of several headers; without one, or with a wrong one, nothing is forwarded."""
    async with running_proxy(replica.url, **KEYS, backend_api_key="sk-of-the-engine") as proxy:
        for headers in ([], [bearer("wrong")], [("X-API-Key", "")], [("X-ThunderAgent-Key", "é")]):
            refused = await post(proxy.url, CHAT, turn("p"), *headers)
            assert refused.status == 401
            assert refused.error["code"] == "invalid_api_key"
            assert refused.header("WWW-Authenticate") == "Bearer"
        assert not replica.calls
        for header in (bearer(DATA_KEY), ("x-api-key", DATA_KEY), ("X-ThunderAgent-Key", DATA_KEY), bearer(ADMIN_KEY)):
            assert (await post(proxy.url, CHAT, turn("p"), header)).status == 200
            sent = replica.calls[-1]
            assert DATA_KEY not in str(sent.headers)
            assert ADMIN_KEY not in str(sent.headers)
            assert sent.header("Authorization") == "Bearer sk-of-the-engine"
        own = ("Authorization", "Bearer sk-of-the-client")
        await post(proxy.url, CHAT, turn("p"), ("X-ThunderAgent-Key", DATA_KEY), own)
        assert replica.calls[-1].header("Authorization") == "Bearer sk-of-the-client"


async def test_a_refusal_is_in_the_schema_of_the_api_that_was_called(replica: FakeReplica) -> None:
    """Anthropic's clients get their schema, which has a place for the request's id."""
    async with running_proxy(replica.url, **KEYS, max_body_bytes=10) as proxy:
        mine = ("X-Request-Id", "mine")
        refused = await call(proxy.url, "POST", "/p/a/v1/messages", mine, body=b"{}")
        assert refused.status == 401
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["request_id"] == "mine"
        key = ("x-api-key", DATA_KEY)
        large = await call(proxy.url, "POST", "/v1/messages", key, body=b" " * 11)
        assert (large.status, large.json()["error"]["type"]) == (413, "request_too_large")
        admin = await call(proxy.url, "POST", "/v1/load_lora_adapter", key, body=b"{}")
        assert (admin.status, admin.error["code"]) == (403, "admin_key_needed")


async def test_data_keys_and_admin_keys_are_apart(replica: FakeReplica) -> None:
    """A program's agent may do what concerns its program, but nothing that concerns all."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        for method, target, body in [
            ("GET", "/v1/models", b""),
            ("POST", "/tokenize", b"{}"),
            ("POST", "/programs", b'{"program_id": "p"}'),
            ("GET", "/programs", b""),
            ("GET", "/programs/p", b""),
            ("POST", "/programs/release", b'{"program_id": "p"}'),
            ("DELETE", "/programs/p", b""),
            ("POST", "/finish_session?session_id=p", b""),
            ("DELETE", "/sessions/p", b""),
        ]:
            assert (await call(proxy.url, method, target, body=body)).status == 401, target
            assert (await call(proxy.url, method, target, bearer(DATA_KEY), body=body)).status in {200, 503}, target
        for method, target, body in [
            ("GET", "/queue", b""),
            ("GET", "/replicas", b""),
            ("GET", "/tools", b""),
            ("POST", "/programs/release", b'{"all": true}'),
            ("POST", "/pause", b""),
            ("POST", "/v1/%70ause", b""),
            ("POST", "/p/x/v1/collective_rpc", b""),
        ]:
            assert (await call(proxy.url, method, target, body=body)).status == 401, target
            refused = await call(proxy.url, method, target, bearer(DATA_KEY), body=body)
            assert (refused.status, refused.error["code"]) == (403, "admin_key_needed"), target
            assert (await call(proxy.url, method, target, bearer(ADMIN_KEY), body=body)).status in {200, 404}, target
        for target in ("/health", "/ready", "/metrics"):
            assert (await get(proxy.url, target)).status == 200


async def test_without_an_admin_key_nobody_is_admin(replica: FakeReplica) -> None:
    """With data keys alone all else is closed."""
    async with running_proxy(replica.url, api_keys=(DATA_LINE,)) as proxy:
        for headers in ([], [bearer(DATA_KEY)]):
            assert (await call(proxy.url, "GET", "/replicas", *headers)).status == 403
        assert (await ask(proxy.url, "p")).status == 401


async def test_admin_keys_alone_leave_data_open(replica: FakeReplica) -> None:
    """On loopback a developer may want that."""
    async with running_proxy(replica.url, admin_keys=(ADMIN_LINE,), metrics_need_key=True) as proxy:
        assert (await ask(proxy.url, "p")).status == 200
        assert (await get(proxy.url, "/queue")).status == 401
        assert (await get(proxy.url, "/metrics")).status == 401
        assert (await call(proxy.url, "GET", "/metrics", bearer(ADMIN_KEY))).status == 200
        assert (await call(proxy.url, "GET", "/queue", bearer(ADMIN_KEY))).status == 200


async def test_a_stranger_sends_no_body(replica: FakeReplica) -> None:
    """The proxy asks for the key before it waits for the body."""
    async with running_proxy(replica.url, **KEYS) as proxy, Wire.open(proxy.url) as wire:
        wire.send_raw(head_bytes(f"POST {CHAT} HTTP/1.1", [("Host", "x"), ("Content-Length", "1000000")]))
        assert (await wire.head()).status == 401


async def test_the_sdk_and_the_status_command_bring_the_key_of_the_environment(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program begins and ends with a data key; the status is for an admin key."""
    async with running_proxy(replica.url, **KEYS) as proxy:

        def run_program() -> None:
            with program("sdk", proxy=proxy.url, group="g"):
                assert proxy.runtime.scheduler.programs.get("sdk") is not None

        with pytest.raises(ProxyRefusedError, match="401 invalid_api_key"):
            await asyncio.to_thread(run_program)
        monkeypatch.setenv("THUNDERAGENT_KEY", DATA_KEY)
        await asyncio.to_thread(run_program)
        assert proxy.runtime.scheduler.programs.get("sdk") is None
        assert await asyncio.to_thread(main, ["status", "--url", proxy.url]) == 1
        assert "answers 403: this key is for data, and an admin key is needed" in capfd.readouterr().err
        assert await asyncio.to_thread(main, ["status", "--url", proxy.url, "--key", ADMIN_KEY]) == 0


def test_the_key_command_makes_keys_that_are_let_in(capsys: pytest.CaptureFixture[str]) -> None:
    """Its output goes into the configuration unchanged."""
    assert main(["key", "ops", "--admin"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    line = tomllib.loads(second.removeprefix("in the configuration:").strip())["admin_keys"]
    found = Keyring((), line).find(first.removeprefix("key (shown only now):").strip())
    assert found is not None
    assert (found.name, found.is_admin) == ("ops", True)
    assert main(["key", "two words"]) == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.test"])
def test_nothing_is_open_to_a_network_by_mistake(host: str) -> None:
    """This takes a data key, or an explicit setting."""
    with pytest.raises(ConfigurationError, match=r"host: .*api_keys.*allow_open"):
        check_security(ServeConfig.load(host=host))
    with pytest.raises(ConfigurationError, match="host: "):
        check_security(ServeConfig.load(host=host, admin_keys=(ADMIN_LINE,)))
    engines = {"backends": "http://engine:8000"}
    check_security(ServeConfig.load(host=host, api_keys=(DATA_LINE,), **engines))
    check_security(ServeConfig.load(host=host, allow_open=True, **engines))


def test_simulated_engines_answer_no_network_unless_that_is_asked_for() -> None:
    """An image whose command `serve` lacks its backends must not be ready with made-up words."""
    given: dict[str, Any] = {"host": "0.0.0.0", "allow_open": True}
    with pytest.raises(ConfigurationError, match=r"backends: there are none.*THUNDERAGENT_BACKENDS.*demo"):
        check_security(ServeConfig.load(**given))
    check_security(ServeConfig.load(**given, demo=True))
    check_security(ServeConfig.load(**given, embedded_engines=0))
    check_security(ServeConfig.load(**given, backends="http://engine:8000"))
    check_security(ServeConfig.load(**given, provision="command", provision_command="run-engine"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    """This needs no setting."""
    check_security(ServeConfig.load(host=host))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api_keys": "app:secret"}, "NAME:sha256:HEX"),
        ({"metrics_need_key": True}, "metrics_need_key"),
        ({"tls_cert": "missing.pem"}, "tls_cert: cannot use missing.pem"),
        ({"backend_ca_file": "missing.pem"}, "backend_ca_file: cannot use missing.pem"),
        ({"backend_api_key_file": "missing"}, "backend_api_key_file: cannot read missing"),
        ({"backend_api_key_file": "a", "backend_api_key": "b"}, "not both"),
        ({"judge_url": "replicas", "judge_api_key_file": "missing"}, "judge_api_key_file: cannot read missing"),
        ({"judge_api_key_file": "a", "judge_api_key": "b"}, "not both"),
        ({"judge_url": "replicas", "judge_prompt": "missing"}, "judge_prompt: cannot read missing"),
        ({"judge_url": "judge:8000", "judge_model": "m"}, "is not a URL with http or https, nor replicas"),
        ({"judge_url": "http://127.0.0.1/v1"}, "needs judge_model"),
        ({"judge_ends_hopeless": True}, "goes with judge_url"),
        ({"cors_origins": "https://page.test/"}, "is not an origin"),
        ({"tls_key": "key.pem"}, "needs tls_cert"),
    ],
)
def test_wrong_configuration_is_reported_at_the_start(given: dict[str, Any], message: str) -> None:
    """The error comes before anything is started."""
    with pytest.raises(ConfigurationError, match=message):
        check_security(ServeConfig.load(**given))


# --- browsers


async def test_pages_of_other_origins_change_nothing_here(replica: FakeReplica) -> None:
    """A browser sends such requests without a preflight; on loopback there may be no key."""
    async with running_proxy(replica.url) as proxy:
        for target in ("/programs/release", "/finish_session?session_id=p", "/pause", "/v1/load_lora_adapter"):
            refused = await call(proxy.url, "POST", target, PAGE, ("Content-Type", "text/plain"), body=b'{"all": true}')
            assert (refused.status, refused.error["code"]) == (403, "origin_refused"), target
        same = ("Origin", proxy.url)
        assert (await call(proxy.url, "POST", "/programs/release", same, body=b'{"all": true}')).status == 200
        assert (await post(proxy.url, CHAT, turn("p"), PAGE)).status == 200  # the engine decides, as without origins
        assert (await call(proxy.url, "GET", "/queue", PAGE)).header("Access-Control-Allow-Origin") is None


async def test_origins_that_are_named_may_call_us() -> None:
    """A preflight needs no key, the request does; the engine's own headers for origins do not count."""
    behaviour = answers(headers=[JSON_TYPE, ("access-control-allow-origin", "*")])
    preflight = (PAGE, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "x-a"))
    async with (
        fake_replica(behaviour) as replica,
        running_proxy(replica.url, **KEYS, cors_origins="https://page.test") as proxy,
    ):
        allowed = await call(proxy.url, "OPTIONS", CHAT, *preflight)
        assert allowed.status == 204
        assert allowed.header("Access-Control-Allow-Origin") == "https://page.test"
        assert allowed.header("Access-Control-Allow-Headers") == "x-a"
        assert (await call(proxy.url, "OPTIONS", "/programs", *preflight)).status == 204
        refused = await call(proxy.url, "OPTIONS", CHAT, ("Origin", "https://evil.test"), *preflight[1:])
        assert refused.status == 403
        assert refused.header("Access-Control-Allow-Origin") is None
        assert not replica.calls
        assert (await post(proxy.url, CHAT, turn("p"), PAGE)).status == 401
        answer = await post(proxy.url, CHAT, turn("p"), PAGE, bearer(DATA_KEY))
        assert [value for name, value in answer.headers if name.lower() == "access-control-allow-origin"] == [PAGE[1]]
        assert "X-Program-ID" in (answer.header("Access-Control-Expose-Headers") or "")
        other = await post(proxy.url, CHAT, turn("p"), ("Origin", "https://evil.test"), bearer(DATA_KEY))
        assert other.header("Access-Control-Allow-Origin") is None
        assert (await call(proxy.url, "DELETE", "/programs/p", PAGE, bearer(DATA_KEY))).status == 200


async def test_a_browser_trades_an_admin_key_for_a_cookie(replica: FakeReplica) -> None:
    """Scripts cannot read it and other sites cannot use it; only an admin key gets one."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        login = await post(proxy.url, "/dashboard/login", {"key": ADMIN_KEY})
        assert login.status == 200
        cookie, *attributes = (login.header("Set-Cookie") or "").split("; ")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} == set(attributes)
        assert ADMIN_KEY not in cookie
        assert (await call(proxy.url, "GET", "/replicas", ("Cookie", cookie[:-1]))).status == 401
        assert (await call(proxy.url, "GET", "/replicas", ("Cookie", f"thunderagent_login={ADMIN_KEY}"))).status == 401
        assert (await call(proxy.url, "GET", "/replicas", ("Cookie", cookie))).status == 200
        for key, status in ((DATA_KEY, 403), ("wrong", 401), ("", 401), (None, 400)):
            refused = await post(proxy.url, "/dashboard/login", {"key": key})
            assert (refused.status, refused.header("Set-Cookie")) == (status, None)
        assert (await post(proxy.url, "/dashboard/login", {"key": ADMIN_KEY}, PAGE)).status == 403


NOT_SHOWN = (
    *(("POST", CHAT), ("PUT", CHAT), ("GET", CHAT), ("POST", "/p/a/v1/messages"), ("POST", "/v1/unknown")),
    *(("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/version"), ("POST", "/pause"), ("GET", "/flush_cache")),
    *(("POST", "/replicas/r-1/v1/chat/completions"), ("GET", "/replicas/r-1/v1/models"), ("POST", "/replicas")),
    *(("POST", "/programs"), ("POST", "/programs/release"), ("DELETE", "/programs/p"), ("POST", "/leases")),
    *(("POST", "/programs/p/hints"), ("GET", "/concurrency"), ("GET", "/config"), ("GET", "/keys"), ("POST", "/keys")),
    *(("GET", "/internal/lease"), ("GET", "/sandboxes/events")),
)
"""Some of what the dashboard does not show: of data, of engines and of operators."""


@pytest.mark.parametrize("origin", [None, "its own", PAGE[1], "null"])
async def test_a_login_opens_what_the_dashboard_shows_and_nothing_else(
    replica: FakeReplica, origin: str | None
) -> None:
    """A cookie comes with what any page of the same host asks, on whatever port: so it lets in no turn."""
    async with running_proxy(replica.url, **KEYS, cors_origins=(PAGE[1],)) as proxy:
        login = await post(proxy.url, "/dashboard/login", {"key": ADMIN_KEY})
        headers = [("Cookie", (login.header("Set-Cookie") or "").partition(";")[0])]
        if origin is not None:
            headers.append(("Origin", proxy.url if origin == "its own" else origin))
        for path in ("/summary", "/replicas", "/queue", "/history", "/programs"):
            assert (await call(proxy.url, "GET", path, *headers)).status == 200, path
        assert (await call(proxy.url, "GET", "/programs/p", *headers)).status == 404
        seen_count = len(replica.calls)
        for method, path in NOT_SHOWN:
            refused = await call(proxy.url, method, path, *headers, body=b"{}" if method != "GET" else b"")
            assert refused.status in ((401,) if origin != "null" else (401, 403)), (method, path, refused.status)
        upgrade = [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", "13")]
        key = ("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")
        assert (await call(proxy.url, "GET", "/v1/realtime", *headers, *upgrade, key)).status in (401, 403)
        assert len(replica.calls) == seen_count
        with_key = await post(proxy.url, CHAT, turn("p"), *headers, bearer(DATA_KEY))
        assert with_key.status == 200, "a key counts, whatever cookie is beside it"


async def test_no_cookie_of_ours_reaches_an_engine(replica: FakeReplica) -> None:
    """This holds in whichever of several headers it is; other cookies pass."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        login = await post(proxy.url, "/dashboard/login", {"key": ADMIN_KEY})
        cookie = (login.header("Set-Cookie") or "").partition(";")[0]
        both = [("Cookie", "theme=dark"), ("Cookie", f"a=b; {cookie}; c=d"), bearer(DATA_KEY)]
        assert (await post(proxy.url, CHAT, turn("p"), *both)).status == 200
        assert [value for name, value in replica.calls[-1].headers if name.lower() == "cookie"] == [
            "theme=dark; a=b; c=d"
        ]


async def test_an_origin_that_nobody_could_be_is_refused_and_no_bug(replica: FakeReplica) -> None:
    async with running_proxy(replica.url) as proxy:
        refused = await post(proxy.url, "/programs/release", b'{"all": true}', ("Origin", "http://["))
        assert (refused.status, refused.error["code"]) == (403, "origin_refused")


async def test_with_origins_named_nothing_an_engine_says_of_origins_is_left() -> None:
    """Its `Allow-Credentials` would let pages read what they may not."""
    headers = [JSON_TYPE, ("Access-Control-Allow-Credentials", "true"), ("Access-Control-Expose-Headers", "X-Own")]
    async with (
        fake_replica(answers(headers=headers)) as replica,
        running_proxy(replica.url, cors_origins="https://page.test") as proxy,
    ):
        answer = await post(proxy.url, CHAT, turn("p"), PAGE)
        assert answer.header("Access-Control-Allow-Credentials") is None
        assert "X-Own" not in (answer.header("Access-Control-Expose-Headers") or "")
        assert (await get(proxy.url, "/v1/files")).header("Access-Control-Allow-Credentials") is None


@pytest.mark.parametrize(
    ("method", "target"), [("POST", "/replicas"), ("GET", "/programs"), ("POST", "/pause"), ("POST", "//pause")]
)
async def test_without_keys_nobody_calls_us_by_a_name_that_is_not_ours(
    method: str, target: str, replica: FakeReplica
) -> None:
    """A page may point its own name at this machine, and then has our origin."""
    async with running_proxy(replica.url, allowed_hosts="proxy.test", reached_at="http://scheduler.test:8300") as proxy:
        for name in ("evil.example", "evil.example:8300", "127.0.0.1.evil.example", "localhost.evil.example", "["):
            refused = await named(proxy.url, method, target, name)
            assert (refused.status, refused.error["code"]) == (421, "host_refused"), name
        for name in (
            "localhost:1",
            "app.localhost",
            "127.0.0.1",
            "[::1]:8300",
            "10.0.0.7:80",
            "proxy.test",
            "scheduler.test:8300",
        ):
            assert (await named(proxy.url, method, target, name)).status != 421, name


async def test_without_keys_no_page_of_another_name_uses_the_engines(replica: FakeReplica) -> None:
    """A browser identifies itself; other callers that use another name do so on purpose."""
    agent, page = ("User-Agent", "Mozilla/5.0"), ("Origin", "http://evil.example")
    async with running_proxy(replica.url) as proxy:
        for header in (agent, page, ("Sec-Fetch-Site", "same-origin")):
            assert (await named(proxy.url, "POST", CHAT, "evil.example", header)).status == 421
        assert not replica.calls
        assert (await named(proxy.url, "POST", CHAT, "gateway.internal")).status == 200
        assert (await named(proxy.url, "GET", "/health", "gateway.internal")).status == 200


async def test_with_keys_every_name_will_do(replica: FakeReplica) -> None:
    """A page has no key, so names do not matter."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        assert (await named(proxy.url, "GET", "/queue", "proxy.internal", bearer(ADMIN_KEY))).status == 200


async def named(url: str, method: str, target: str, name: str, *headers: Header) -> Answer:
    """Call the proxy by a name."""
    async with Wire.open(url) as wire:
        own = [("Host", name), ("Connection", "close"), ("Content-Length", "2" if method == "POST" else "0"), *headers]
        wire.send_raw(head_bytes(f"{method} {target} HTTP/1.1", own) + b"{}" * (method == "POST"))
        return await wire.answer()


# --- requests


@pytest.mark.parametrize("admin_port", [False, True])
async def test_no_spelling_of_a_target_gets_past_its_key(admin_port: bool, replica: FakeReplica) -> None:
    """The check of a target and its sender read it in the same way."""
    more: dict[str, Any] = {"admin_port": 0} if admin_port else {}
    targets = ("/p/a/pause#x", "/p/a/sleep#", "/slow_down#x", "/inference/v1/pause", "/debug/pause", "/v1/%2e%2e/pause")
    async with running_proxy(replica.url, **KEYS, **more) as proxy:
        for target in (*targets, "//pause", "/pause/", "/PAUSE", "/pause;x", "/v1%2fpause", "/p/a/x/pause", "/new"):
            refused = await call(proxy.url, "POST", target, bearer(DATA_KEY), body=b"{}")
            assert refused.status in {400, 403, 404}, target
        assert not replica.calls
        assert (await call(proxy.url, "POST", "/p/a/pause#x", bearer(ADMIN_KEY))).error["code"] == "invalid_request"
        assert not replica.calls


async def test_a_control_call_in_another_spelling_is_the_same_call(replica: FakeReplica) -> None:
    """The scheduler gets the call, and the engine gets the plain spelling."""
    async with running_proxy(replica.url, **KEYS) as proxy:
        for target in ("//pause?mode=keep", "/pause/?mode=keep", "/p/a/%70ause/?mode=keep"):
            assert (await call(proxy.url, "POST", target, bearer(ADMIN_KEY))).status == 200
            assert replica.calls[-1].target == "/pause?mode=keep"
            assert all(each.suspended_for for each in proxy.runtime.scheduler.replicas.values())
            assert (await call(proxy.url, "POST", "/resume", bearer(ADMIN_KEY))).status == 200


@pytest.mark.parametrize(
    ("forward", "keys", "statuses"),
    [
        (None, True, (401, 403, 200)),
        ("data", True, (401, 200, 200)),
        ("off", True, (404, 404, 404)),
        (None, False, (200, 200, 200)),
        ("off", False, (404, 404, 404)),
    ],
)
async def test_unknown_path_needs_an_admin_key_until_an_operator_opens_it(
    forward: str | None, keys: bool, statuses: tuple[int, int, int], replica: FakeReplica
) -> None:
    """With keys configured it needs an admin key by default; known data paths stay data."""
    given: dict[str, Any] = {**(KEYS if keys else {}), **({"forward_unknown": forward} if forward else {})}
    async with running_proxy(replica.url, **given) as proxy:
        for headers, status in zip(([], [bearer(DATA_KEY)], [bearer(ADMIN_KEY)]), statuses, strict=True):
            answer = await call(proxy.url, "POST", "/v1/new/thing", *headers, body=b"{}")
            assert answer.status == status
            if status == 404:
                assert answer.error["code"] == "not_found"
        assert (await call(proxy.url, "POST", "/tokenize", bearer(DATA_KEY), body=b"{}")).status == 200


async def test_a_url_of_ours_is_a_target_and_one_of_others_is_not(replica: FakeReplica) -> None:
    """RFC 9112, 3.2.2."""
    async with running_proxy(replica.url) as proxy:
        assert (await call(proxy.url, "GET", f"{proxy.url}/health")).status == 200
        assert (await call(proxy.url, "GET", f"{proxy.url}/p/a/v1/files?x")).status == 200
        assert replica.calls[-1].target == "/v1/files?x"
        assert (await call(proxy.url, "OPTIONS", "*")).error["code"] == "invalid_request"


MESSAGES = json.dumps(turn("p"))
UNUSUAL: dict[str, tuple[str, bytes, tuple[Header, ...]]] = {
    "byte order mark": (CHAT, MESSAGES.encode("utf-8-sig"), ()),
    "UTF-16": (CHAT, MESSAGES.encode("utf-16"), ()),
    "UTF-16, no mark": (CHAT, MESSAGES.encode("utf-16-le"), ()),
    "UTF-32": (CHAT, MESSAGES.encode("utf-32-be"), ()),
    "slash behind": (CHAT + "/", MESSAGES.encode(), ()),
    "two slashes": ("/" + CHAT, MESSAGES.encode(), ()),
    "small and large": (CHAT.title(), MESSAGES.encode(), ()),
    "gzip": (CHAT, gzip.compress(MESSAGES.encode()), (("Content-Encoding", "gzip"),)),
    "no JSON": (CHAT, b"--x", ()),
    "not a dialect": ("/invocations", MESSAGES.encode(), ()),
    "a form": ("/v1/audio/transcriptions", b"--x", (("Content-Type", "multipart/form-data; boundary=x"),)),
    "unknown": ("/v1/new", b"", ()),
}


@pytest.mark.parametrize("way", UNUSUAL)
async def test_every_post_that_can_generate_takes_a_lease(way: str, replica: FakeReplica) -> None:
    """Therefore it waits while grants are suspended, and it is counted."""
    target, body, headers = UNUSUAL[way]
    async with running_proxy(replica.url) as proxy:
        answer = await call(proxy.url, "POST", target, *headers, body=body)
        assert (answer.status, answer.header("X-Hold-Ms")) == (200, "0")
        assert proxy.runtime.outcome_counts["finished"] == 1
        is_read = way.startswith(("byte", "UTF", "slash", "two", "small", "gzip"))
        assert [program.program_id for program in proxy.runtime.scheduler.programs.values()] == (
            ["p"] if is_read else []
        )
        (sent,) = replica.calls
        if is_read:
            assert (sent.target, sent.json()) == (
                CHAT,
                {
                    **turn(),
                },
            )
        else:
            assert sent.target == target
            assert sent.body == (body if way != "not a dialect" else json.dumps(turn()).encode())


@pytest.mark.parametrize(("method", "target"), [("PUT", "/p/p/generate"), ("PATCH", "/v1/new")])
async def test_a_turn_by_another_method_than_post_takes_a_lease(method: str, target: str, replica: FakeReplica) -> None:
    """SGLang's `/generate` takes PUT, too; the engine gets the method that its client chose."""
    async with running_proxy(replica.url) as proxy:
        answer = await call(proxy.url, method, target, body=b'{"text":"go on"}')
        assert (answer.status, answer.header("X-Hold-Ms")) == (200, "0")
        assert proxy.runtime.outcome_counts["finished"] == 1
        assert [sent.method for sent in replica.calls] == [method]


async def test_an_admin_key_alone_closes_what_concerns_every_program(replica: FakeReplica) -> None:
    """Data is open then, but requests about all programs are not data."""
    async with running_proxy(replica.url, admin_keys=(ADMIN_LINE,), sandboxes="callback") as proxy:
        assert (await ask(proxy.url, "p")).status == 200
        for headers in ([], [bearer("wrong")]):
            refused = await call(proxy.url, "POST", "/programs/release", *headers, body=b'{"all": true}')
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            refused = await call(proxy.url, "GET", "/sandboxes/events", *headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            for method, target in (("GET", "/replicas"), ("POST", "/pause"), ("POST", "/v1/new/thing")):
                assert (await call(proxy.url, method, target, *headers)).status == 401
        assert proxy.runtime.scheduler.programs.get("p") is not None
        mine = await call(proxy.url, "POST", "/programs/release", bearer(ADMIN_KEY), body=b'{"all": true}')
        assert mine.status == 200


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("/v1/elsewhere?x", "{prefix}/v1/elsewhere?x"),
        ("elsewhere", "{prefix}/v1/chat/elsewhere"),
        ("{replica}/v1/elsewhere", "{prefix}/v1/elsewhere"),
        ("{replica}//evil.test/x", "{prefix}/evil.test/x"),
        ("http://evil.test/v1/elsewhere", None),
        ("//evil.test/v1/elsewhere", None),
        ("http://[", None),
    ],
)
@pytest.mark.parametrize("way", ["turn", "side call", "replica"])
async def test_a_redirect_of_an_engine_leads_nowhere_but_here(
    way: str, location: str, told: str | None, replica: FakeReplica
) -> None:
    """It leads to the same program or replica here; it cannot bypass keys and scheduler."""
    location = location.format(replica=replica.url)
    prefix = f"/workers/{replica.replica_id}" if way == "replica" else "/p/a"
    replica.behaviour = answers(
        b"", status="307 Temporary Redirect", headers=[("Location", location), ("Alt-Svc", 'h2="evil.test:443"')]
    )
    async with running_proxy(replica.url) as proxy:
        method = "GET" if way == "side call" else "POST"
        answer = await call(proxy.url, method, prefix + CHAT, body=b"{}" if method == "POST" else b"")
        assert answer.header("Alt-Svc") is None
        if told is None:
            assert (answer.status, answer.header("Location")) == (502, None)
            assert answer.error["code"] == "replica_redirects"
        else:
            assert (answer.status, answer.header("Location")) == (307, told.format(prefix=prefix))


# --- limits


async def test_a_body_is_invited_only_once_it_is_welcome(replica: FakeReplica) -> None:
    """The proxy invites it after the key and size check: curl and others wait for that (RFC 9110, 10.1.1)."""
    expects = [("Host", "localhost"), ("Expect", "100-continue")]
    async with running_proxy(replica.url, **KEYS, max_body_bytes=1000) as proxy:
        for headers, length, status in (
            ([], 10, b"401"),
            ([bearer(DATA_KEY)], 2000, b"413"),
            ([bearer(DATA_KEY), ("Expect", "a miracle")], 10, b"417"),
            ([bearer(DATA_KEY)], 10, b"100"),
        ):
            own = [*expects[: 1 if len(headers) == 2 else 2], *headers, ("Content-Length", str(length))]
            async with Wire.open(proxy.url) as wire:
                wire.send_raw(head_bytes(f"POST {CHAT} HTTP/1.1", own))
                first = await wire.line()
                assert first.split()[1] == status
                if status == b"100":
                    wire.send_raw(b"{" + b" " * 8 + b"}")
                    assert (await wire.answer()).status == 200
        assert len(replica.calls) == 1


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_half_closes_gets_its_answer(version: str, replica: FakeReplica) -> None:
    """Such a client sends nothing more, but reads: `nc -N` and some libraries do so."""
    body = json.dumps(turn("p")).encode()
    async with running_proxy(replica.url) as proxy:
        for waits_s in (0.0, 0.3):
            replica.behaviour = gate = Gate()
            async with Wire.open(proxy.url) as wire:
                head = [("Host", "localhost"), ("Content-Length", str(len(body)))]
                wire.send_raw(head_bytes(f"POST {CHAT} HTTP/{version}", head) + body)
                wire.end()
                await asyncio.sleep(waits_s)
                gate.open()
                assert (await wire.answer()).status == 200
                assert await wire.rest() == b""


async def test_a_client_that_closes_while_it_waits_is_still_seen_to_leave(replica: FakeReplica) -> None:
    """At first both look the same; then its turn is given up, and no replica works for it."""
    replica.behaviour = Gate()
    async with running_proxy(replica.url) as proxy:
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, body=json.dumps(turn("p")).encode())
            await replica.call()
        await proxy.nothing_left()


async def test_turns_over_the_rate_wait_and_admin_requests_are_refused(replica: FakeReplica) -> None:
    """A turn never gets 429, at which Codex gives up. Health is never limited."""
    async with running_proxy(replica.url, **KEYS, rate_limit_per_s=8, rate_limit_burst_count=2) as proxy:
        began_s = asyncio.get_running_loop().time()
        turns = [post(proxy.url, CHAT, turn("p"), bearer(DATA_KEY)) for _ in range(6)]
        assert {answer.status for answer in await asyncio.gather(*turns)} == {200}
        assert asyncio.get_running_loop().time() - began_s >= 0.45
        admin = await asyncio.gather(*(call(proxy.url, "GET", "/queue", bearer(ADMIN_KEY)) for _ in range(8)))
        refused = [answer for answer in admin if answer.status == 429]
        assert refused
        assert refused[0].error["code"] == "rate_limited"
        assert refused[0].header("Retry-After") == "1"
        for _ in range(5):
            assert (await get(proxy.url, "/health")).status == 200
        assert b'thunderagent_rate_limited_total{outcome="waited"} 4.0' in (await get(proxy.url, "/metrics")).body


async def test_a_turn_that_waits_for_its_rate_may_leave(replica: FakeReplica) -> None:
    """Nothing of it is left, and nothing was forwarded."""
    async with running_proxy(replica.url, rate_limit_per_s=0.1, rate_limit_burst_count=1) as proxy:
        await ask(proxy.url, "p")
        async with Wire.open(proxy.url) as wire:
            wire.send("POST", CHAT, body=b'{"messages": []}')
            await asyncio.sleep(0.05)
        await proxy.nothing_left()
        assert len(replica.calls) == 1


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(replica: FakeReplica) -> None:
    """Its length refuses it, or its chunks as soon as they are too many."""
    async with running_proxy(replica.url, max_body_bytes=1000) as proxy:
        async with Wire.open(proxy.url) as wire:
            wire.send_raw(head_bytes(f"POST {CHAT} HTTP/1.1", [("Host", "x"), ("Content-Length", "1001")]))
            assert (await wire.answer()).error["code"] == "body_too_large"
        async with Wire.open(proxy.url) as wire:
            wire.send_raw(head_bytes(f"POST {CHAT} HTTP/1.1", [("Host", "x"), ("Transfer-Encoding", "chunked")]))
            for _ in range(11):
                wire.send_raw(chunk(b" " * 100))
            refused = await wire.answer()
            assert (refused.status, refused.error["code"]) == (413, "body_too_large")
        assert not replica.calls


@pytest.mark.parametrize("path", [CHAT, "/programs/release", "/tokenize", "/leases"])
@pytest.mark.parametrize("wrong", [b"zz\r\n", b"2\r\nabcd\r\n", b"-1\r\n\r\n", b"f" * 17 + b"\r\n"])
async def test_a_bad_chunk_is_refused_at_once_on_each_path(wrong: bytes, path: str, replica: FakeReplica) -> None:
    """Not when the time of the body is over."""
    async with running_proxy(replica.url, body_timeout_s=60.0) as proxy, Wire.open(proxy.url) as wire:
        head = head_bytes(f"POST {path} HTTP/1.1", [("Host", "127.0.0.1"), ("Transfer-Encoding", "chunked")])
        wire.send_raw(head + b"2\r\n{}\r\n" + wrong)
        async with asyncio.timeout(10):
            assert (await wire.head()).status == 400
        assert not replica.calls


@pytest.mark.parametrize(
    ("sent", "is_anthropics"),
    [
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: +2\r\n\r\n{{}}", False),
        (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", False),
        ("POST /p/a/v1/messages HTTP/1.1\r\nHost: x\r\nX-Program-ID: a\0b\r\n\r\n", True),
        ("POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", True),
        ("POST /v1/messages/count_tokens HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", True),
        ("GET /a b c\r\n\r\n", False),
        ("GET \r\n\r\n", False),
        ("\0\r\n\r\n", False),
    ],
)
async def test_what_is_no_http_is_refused_in_the_callers_schema(
    sent: str, is_anthropics: bool, replica: FakeReplica
) -> None:
    """As far as its path can be read; SDKs show the text of these schemas alone."""
    async with running_proxy(replica.url) as proxy, Wire.open(proxy.url) as wire:
        wire.send_raw(sent.encode())
        refused = await wire.answer()
        assert (refused.status, refused.header("Content-Type")) == (400, "application/json; charset=utf-8")
        said = refused.json()
        assert (said.get("type") == "error") is is_anthropics
        assert said["error"]["code"] == "invalid_request"
        assert said["error"]["message"].startswith("the request was not accepted: ")
        assert not replica.calls


async def test_a_head_over_the_limit_is_refused(replica: FakeReplica) -> None:
    """Limits are 64 KiB a header and 128 headers; the connection is closed."""
    async with running_proxy(replica.url) as proxy:
        for headers in ([("X-Long", "x" * 70_000)], [(f"X-{number}", "x") for number in range(200)]):
            assert (await call(proxy.url, "GET", "/health", *headers)).status == 400


@pytest.mark.parametrize("target", ["http://x/v1/files", "x://evil.test/v1/files"])
async def test_a_target_is_a_path(target: str, replica: FakeReplica) -> None:
    """After a replica's address anything else would name another host."""
    async with running_proxy(replica.url) as proxy:
        refused = await call(proxy.url, "GET", target)
        assert (refused.status, refused.error["code"]) == (400, "invalid_request")
        assert not replica.calls


async def test_slow_heads_and_bodies_are_cut(replica: FakeReplica) -> None:
    """A client that sends a byte now and then cannot keep a connection."""
    async with running_proxy(replica.url, idle_timeout_s=0.5, body_timeout_s=0.1) as proxy:
        async with Wire.open(proxy.url) as wire:
            wire.send_raw(head_bytes(f"POST {CHAT} HTTP/1.1", [("Host", "x"), ("Content-Length", "100")]))
            wire.send_raw(b'{"mess')
            late = await wire.answer()
            assert (late.status, late.error["code"]) == (408, "body_timeout")
        async with Wire.open(proxy.url) as wire:
            wire.send_raw(b"GET /health HT")
            with pytest.raises(asyncio.IncompleteReadError):
                await wire.head()
        async with Wire.open(proxy.url) as wire:  # after a first request, too
            wire.send("GET", "/health")
            assert (await wire.answer()).status == 200
            wire.send_raw(b"GET /health HT")
            with pytest.raises(asyncio.IncompleteReadError):
                await wire.head()


async def test_a_held_turn_is_not_idle(replica: FakeReplica) -> None:
    """The limits on connections are for heads and bodies, not for waiting."""
    gate = Gate()
    replica.behaviour = gate
    async with running_proxy(replica.url, idle_timeout_s=0.4, body_timeout_s=0.4, **cap(1)) as proxy:
        first = asyncio.create_task(ask(proxy.url, "a"))
        await replica.call()
        second = asyncio.create_task(ask(proxy.url, "b"))
        await asyncio.sleep(0.9)
        gate.open()
        assert (await first).status == 200
        await call(proxy.url, "DELETE", "/programs/a")
        assert (await second).status == 200


# --- TLS


class Files:
    """A certificate authority and its certificates, as files."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.folder = folder
        self.ca_file = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca_file))
        self.cert = folder / "cert.pem"
        self.key = folder / "key.pem"

    def issue(self, name: str = "127.0.0.1") -> int:
        """Write a new certificate; return its serial number."""
        leaf = self.authority.issue_cert(name)
        leaf.private_key_pem.write_to_path(str(self.key))
        leaf.cert_chain_pems[0].write_to_path(str(self.cert))
        decoded = ssl._ssl._test_decode_cert(str(self.cert))  # type: ignore[attr-defined]
        return int(decoded["serialNumber"], 16)

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))


async def serial_of(url: str, files: Files) -> int:
    """Return the serial number of the certificate that a server shows."""
    address = httpx2.URL(url)
    _, writer = await asyncio.open_connection(address.host, address.port, ssl=files.trusting())
    shown = writer.get_extra_info("peercert")
    writer.close()
    return int(shown["serialNumber"], 16)


async def test_https_with_a_certificate_that_is_read_again(tmp_path: Path, replica: FakeReplica) -> None:
    """It is read on SIGHUP; an invalid one leaves the old one in place, and open connections continue."""
    files = Files(tmp_path)
    first = files.issue()
    async with running_proxy(replica.url, tls_cert=files.cert, tls_key=files.key) as proxy:
        assert proxy.url.startswith("https://")
        assert await serial_of(proxy.url, files) == first
        async with httpx2.AsyncClient(verify=files.trusting(), base_url=proxy.url, timeout=DEADLINE_S) as client:
            assert (await client.post(CHAT, json=turn("p"))).json() == ANSWER
            second = files.issue()
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(DEADLINE_S):
                while await serial_of(proxy.url, files) != second:
                    await asyncio.sleep(0.01)
            files.cert.write_text("no certificate")
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.2)
            assert await serial_of(proxy.url, files) == second
            assert (await client.get("/health")).status_code == 200
        await until(lambda: sockets_count() < 20)


async def test_engines_with_https_are_verified_by_the_file(tmp_path: Path) -> None:
    """Poller and turns verify them; without the file they are not trusted."""
    files = Files(tmp_path)
    files.issue()
    engine_keys = {"api_keys": (DATA_LINE,), "tls_cert": files.cert, "tls_key": files.key}
    behaviour = answers(headers=[JSON_TYPE, ("connection", "close")])
    async with fake_replica(behaviour) as replica, running_proxy(replica.url, **engine_keys) as engine:
        async with running_proxy(
            engine.url, backend_ca_file=files.ca_file, backend_api_key=DATA_KEY
        ) as proxy:  # the proxy behind speaks https and needs a key, as an engine may
            assert (await ask(proxy.url, "p")).status == 200
        async with running_proxy(engine.url, up=0, no_replica_limit_s=0, backend_api_key=DATA_KEY) as proxy:
            assert (await ask(proxy.url, "p")).status == 503
            async with asyncio.timeout(DEADLINE_S):
                while "CERTIFICATE_VERIFY_FAILED" not in (await get(proxy.url, "/replicas")).body.decode():
                    await asyncio.sleep(0.01)


# --- request ids


async def ids_of(replica: FakeReplica, proxy: RunningProxy, *headers: Header) -> tuple[str | None, str | None]:
    """Make a turn; return its id as the engine saw it and as the client did."""
    answer = await post(proxy.url, CHAT, turn("p"), *headers)
    return value_of(replica.calls[-1].headers, "X-Request-Id"), answer.header("X-Request-Id")


async def test_a_request_has_one_id_everywhere(replica: FakeReplica) -> None:
    """It is the client's or a new one, and is seen at the engine, in the answer, in the log, and with an error."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    async with running_proxy(replica.url) as proxy:
        with structlog.testing.capture_logs() as logged:
            assert await ids_of(replica, proxy, ("x-request-id", "mine-1")) == ("mine-1", "mine-1")
            minted, shown = await ids_of(replica, proxy)
            again, _ = await ids_of(replica, proxy)
            rubbish = await ids_of(replica, proxy, ("X-Request-Id", "a b"))
        assert minted == shown
        assert minted != again
        assert rubbish[0] == rubbish[1] != "a b"
        lines = [line["request_id"] for line in logged if line["event"] == "turn"]
        assert lines == ["mine-1", minted, again, rubbish[0]]
        error = await call(proxy.url, "GET", "/programs/none", ("X-Request-Id", "mine-2"))
        assert (error.status, error.header("X-Request-Id")) == (404, "mine-2")
        assert (await get(proxy.url, "/health")).header("X-Request-Id")


# --- secrets that are never shown


async def test_no_secret_is_ever_shown(tmp_path: Path) -> None:
    """No log, no answer of ours, no printed configuration and no event log has one."""
    secrets = ("s3cret-of-the-engine", "s3cret-in-the-url", "s3cret-callback", "sk-of-the-client", DATA_KEY, ADMIN_KEY)
    async with fake_replica() as replica:
        url = replica.url.replace("http://", "http://user:s3cret-in-the-url@")
        options = {
            "--backends": f"{url},http://user:s3cret-in-the-url@127.0.0.1:9",
            "--api-keys": DATA_LINE,
            "--admin-keys": ADMIN_LINE,
            "--backend-api-key": "s3cret-of-the-engine",
            "--sandboxes": "callback",
            "--sandbox-callback-token": "s3cret-callback",
            "--log-level": "debug",
            "--no-replica-limit-s": "0",
            "--event-log": str(tmp_path / "events"),
        }
        async with serve(*(part for option in options.items() for part in option)) as process:
            await process.ready()
            for headers in ([bearer(DATA_KEY)], [("X-ThunderAgent-Key", DATA_KEY), bearer("sk-of-the-client")]):
                assert (await post(process.url, CHAT, turn("p"), *headers)).status == 200
            for key in (DATA_KEY, ADMIN_KEY, "sk-of-the-client"):
                await call(process.url, "POST", "/pause", bearer(key))
                for header in (bearer(key), ("Cookie", f"thunderagent_login={key}"), ("X-API-Key", key)):
                    for target in ("/programs", "/programs/p", "/replicas", "/queue", "/tools", "/sandboxes", "/none"):
                        said = await call(process.url, "GET", target, header)
                        assert not [secret for secret in secrets if secret.encode() in said.body], target
            async with Wire.open(process.url) as wire:  # input that is not HTTP is not repeated either
                wire.send_raw(f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {DATA_KEY}\0\r\n\r\n".encode())
                assert (await wire.head()).status == 400
            metrics = (await get(process.url, "/metrics")).body.decode()
            await replica.stop()  # then failures are logged, too
            await post(process.url, CHAT, turn("q"), bearer(DATA_KEY), ("Connection", "close"))
            process.process.terminate()
            assert await process.exit_status() == 0
            lines = [json.loads(line) for line in process.log.splitlines()]  # every line is JSON
            turns = [line for line in lines if line["event"] == "turn" and line["program_id"] == "p"]
            assert len({line["request_id"] for line in turns}) == 2
            shown = process.log + metrics + (tmp_path / "events").read_text()
    assert "replica_down" in shown
    assert "request_is_not_http" in shown
    assert not [secret for secret in secrets if secret in shown]
    with pytest.raises(ConfigurationError) as error:
        ServeConfig.load(backends="user:s3cret-in-the-url@10.0.0.1:8000", backend_api_key="s3cret-of-the-engine")
    assert "s3cret" not in str(error.value)
    config = ServeConfig.load(backend_api_key="s3cret-of-the-engine", api_keys=(DATA_LINE,))
    assert "s3cret" not in repr(config)


async def test_names_matter_where_only_operators_have_keys(replica: FakeReplica) -> None:
    """Data is open then, so a page whose name points here must be kept out."""
    agent = ("User-Agent", "Mozilla/5.0")
    async with running_proxy(replica.url, admin_keys=(ADMIN_LINE,)) as proxy:
        assert (await named(proxy.url, "POST", CHAT, "evil.example", agent)).status == 421
        assert not replica.calls


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_picture_on_another_site_commands_no_engine(site: str, replica: FakeReplica) -> None:
    """A GET has no origin, and some engines take one for a command."""
    async with running_proxy(replica.url) as proxy:
        for target in ("/flush_cache", "/abort_request?abort_all=true"):
            refused = await call(proxy.url, "GET", target, ("Sec-Fetch-Site", site))
            assert (refused.status, refused.json()["error"]["code"]) == (403, "origin_refused")
        assert not replica.calls
        assert (await call(proxy.url, "GET", "/replicas", ("Sec-Fetch-Site", "same-origin"))).status == 200
