"""The route: who may ask, what is passed on, and what is answered."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from thunderagent_vllm.route import MOST_BYTES, PATH, Route


class Core:
    """Stands in for vLLM's client of its engines."""

    def __init__(self, *reports: dict[str, Any]) -> None:
        self.reports = list(reports)
        self.calls: list[tuple[Any, ...]] = []

    async def call_utility_all_async(self, *call: Any) -> list[dict[str, Any]]:
        self.calls.append(call)
        if not self.reports:
            raise RuntimeError("the engine died")
        return self.reports


async def ask(
    core: object,
    body: bytes | None = None,
    *,
    path: str = PATH,
    method: str | None = None,
    client: str = "127.0.0.1",
    keys: object = None,
    authorization: str | None = None,
) -> tuple[int, dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    parts = [body[: len(body) // 2], body[len(body) // 2 :]] if body else [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def vllm(_scope: object, _receive: object, send: Any) -> None:
        await send({"status": 299})
        await send({"body": b"{}"})

    state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=core), args=SimpleNamespace(api_key=keys))
    headers = [(b"authorization", authorization.encode())] if authorization else []
    method = method or ("GET" if body is None else "POST")
    scope = {"type": "http", "path": path, "method": method, "headers": headers, "client": (client, 1)}
    await Route(vllm)({**scope, "app": SimpleNamespace(state=state)}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_get_reports_and_post_tells() -> None:
    core = Core({"on": True, "version": "1"})
    assert (await ask(core))[1]["on"] is True
    status, answer = await ask(core, b'{"protocol": 1, "ops": [["release", "a"]]}')
    assert (status, answer["version"], answer["protocol"]) == (200, "1", 1)
    assert core.calls == [("thunderagent_programs", []), ("thunderagent_programs", [["release", "a"]])]


async def test_plugin_is_on_only_if_all_ranks_are() -> None:
    _, answer = await ask(Core({"on": True}, {"on": False}))
    assert (answer["on"], len(answer["ranks"])) == (False, 2)


async def test_everything_else_is_vllms() -> None:
    assert (await ask(Core(), path="/v1/models"))[0] == 299


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"no", 400), (b"[]", 400), (b'{"ops": 5}', 400), (b"[" * 200_000, 400), (b"x" * (MOST_BYTES + 2), 413)],
)
async def test_bad_bodies_are_refused(body: bytes, status: int) -> None:
    assert (await ask(Core({}), body))[0] == status


async def test_unknown_methods_and_engines_without_programs_are_refused() -> None:
    assert (await ask(Core({}), method="DELETE"))[0] == 405
    assert (await ask(object()))[0] == 501
    assert (await ask(Core()))[0] == 503


async def test_route_beside_vllms_own_scheduler_says_so() -> None:
    """The engine's process knows no such method then; vLLM's client raises what it answers."""

    class Stock:
        async def call_utility_all_async(self, name: str, _ops: object) -> None:
            raise RuntimeError(f"Call to {name} method failed: 'EngineCoreProc' object has no attribute '{name}'")

    status, answer = await ask(Stock())
    assert status == 501
    assert "--scheduler-cls" in answer["error"]


@pytest.mark.parametrize(
    ("keys", "authorization", "client", "status"),
    [
        (None, None, "127.0.0.1", 200),
        (None, None, "::1", 200),
        (None, None, "10.0.0.1", 401),
        (None, None, "nowhere", 401),
        (["k", "l"], None, "127.0.0.1", 401),
        (["k", "l"], "Bearer l", "10.0.0.1", 200),
        ("k", "bearer k", "10.0.0.1", 200),
        (["k"], "Bearer x", "10.0.0.1", 401),
        (["k"], "Basic k", "10.0.0.1", 401),
    ],
)
async def test_authorised_callers_may_ask(keys: object, authorization: str | None, client: str, status: int) -> None:
    answer = await ask(Core({"on": True}), keys=keys, authorization=authorization, client=client)
    assert answer[0] == status


async def test_route_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDERAGENT_VLLM_KEY", "ours")
    assert (await ask(Core({"on": True})))[0] == 401
    assert (await ask(Core({"on": True}), authorization="Bearer ours", client="10.0.0.1"))[0] == 200
