"""The route for `--middleware thunderagent_vllm.route.Route`: what the proxy says between turns, and what it asks.

`GET /thunderagent/programs` reports; `POST` with `{"protocol": 1, "ops": [["release", id], ["pause", id],
["hold", id, seconds]]}` carries out messages and reports. Everything else passes through.

vLLM checks its API keys after middlewares, and not on this path: the keys are checked here. Without keys only this
machine may ask, unless `THUNDERAGENT_VLLM_KEY` names a key of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from thunderagent_vllm import PROTOCOL

PATH = "/thunderagent/programs"
UTILITY = "thunderagent_programs"
"""The method that `scheduler.py` adds to vLLM's engine."""

MOST_BYTES = 1 << 20
TIMEOUT_S = 30.0
"""An engine answers between two steps; one that does not is stuck."""

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Route:
    """An ASGI middleware in front of vLLM's server."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer on our path; pass on everything else."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            await self.app(scope, receive, send)
            return
        status, answer = await self._answer(scope, receive)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        if scope["method"] not in ("GET", "POST"):
            return 405, {"error": "GET or POST"}
        state = getattr(scope.get("app"), "state", None)
        if not may_ask(scope, _keys(state)):
            return 401, {"error": "Unauthorized"}
        ops: list[Any] = []
        if scope["method"] == "POST":
            body = await _body(receive)
            if body is None:
                return 413, {"error": f"more than {MOST_BYTES} bytes"}
            try:
                ops = _ops(body)
            except ValueError as error:
                return 400, {"error": str(error)}
        client = getattr(getattr(state, "engine_client", None), "engine_core", None)
        if not hasattr(client, "call_utility_all_async"):
            return 501, {"error": "this engine takes no messages"}
        try:
            reports = await asyncio.wait_for(client.call_utility_all_async(UTILITY, ops), TIMEOUT_S)
        except Exception as error:
            if f"has no attribute '{UTILITY}'" in str(error):
                return 501, {"error": "vLLM's own scheduler runs: --scheduler-cls does not name thunderagent's"}
            return 503, {"error": f"the scheduler did not answer: {type(error).__name__}"}
        first = reports[0] if reports else {}
        return 200, {**first, "protocol": PROTOCOL, "on": all(each.get("on") for each in reports), "ranks": reports}


def may_ask(scope: Scope, keys: list[str]) -> bool:
    """Return whether a request has one of the keys or, if there are none, comes from this machine."""
    if keys:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and any(hmac.compare_digest(key, each.encode()) for each in keys)
    host = (scope.get("client") or ("",))[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _keys(state: Any) -> list[str]:
    """Return vLLM's keys, and ours."""
    given = getattr(getattr(state, "args", None), "api_key", None) or os.environ.get("VLLM_API_KEY") or []
    keys = [given] if isinstance(given, str) else list(given)
    return [each for each in (*keys, os.environ.get("THUNDERAGENT_VLLM_KEY")) if each]


async def _body(receive: Receive) -> bytes | None:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            return None
        if not message.get("more_body"):
            return body


def _ops(body: bytes) -> list[Any]:
    """Return the messages in a body. Raises ValueError."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is no JSON") from None
    ops = said.get("ops") if isinstance(said, dict) else None
    if not isinstance(ops, list):
        raise ValueError("the body has no list `ops`")  # noqa: TRY004 - it is the content of a body
    return ops
