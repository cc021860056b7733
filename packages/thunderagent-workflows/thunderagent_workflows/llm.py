"""Turns of LLMs: each request to the proxy bears whose it is, without a change to the agent's code.

A session is a program at the proxy. A call of an agent is a branch of it, with a context of its own: `developer/3` is
a call of the developer, the third that was made. A pinned agent goes on in one context, so its branch is `developer`. A
workflow within a workflow is a program of its own, with the session around it as parent, and those that one call opened
as group. What runs for several sessions at once belongs to none, and is sent anonymous.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from thunderagent.client.program import DEFAULT_PROXY, PROXY_VARIABLE
from thunderagent_workflows.errors import WorkflowError
from thunderagent_workflows.hints import branch_name
from thunderagent_workflows.scope import Scope, current

MAX_HEADER_CHARACTERS = 256
TURN_TIMEOUT = httpx2.Timeout(3600.0, connect=10.0)
"""A turn may be held for long."""


def turn_headers() -> dict[str, str]:
    """Return the headers of a turn that this code makes: empty outside of a session, and in a batch of several.

    Raises `SessionEndedError` after the session's end: the turn would begin its program anew, and nobody would end it.
    """
    scope = current.get()
    if scope is None or scope.is_mixed:
        return {}
    session = scope.session
    scope.node.uses_proxy(scope)
    if scope.node.hints is not None:
        scope.node.hints.turn_begins(scope)
    headers = {"X-Program-ID": session.name}
    if branch := branch_of(scope):
        headers["X-Program-Branch"] = branch
    if session.parent:
        headers["X-Program-Parent"] = session.parent
        headers["X-Program-Group"] = session.group
    return headers


def branch_of(scope: Scope) -> str:
    """Return the branch of a call's turns; "" for a driver, whose turns are the main branch."""
    call = scope.call
    if call is None:
        return ""
    rules = scope.node.agents[call.agent].directives.rules
    return call.agent if rules.is_pinned else branch_name(call.agent, call.call_id)


class ProgramHook:
    """A hook for `event_hooks` of httpx2 and httpx: it names the program in requests to the proxy, and in no others."""

    def __init__(self, proxy: str = "") -> None:
        self.proxy = proxy or os.environ.get(PROXY_VARIABLE) or DEFAULT_PROXY
        parts = urlsplit(self.proxy)
        self._origin = (parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme))

    def __call__(self, request: Any) -> None:
        """Set the headers of a request. Raises `SessionEndedError`."""
        url = request.url
        if (url.scheme, url.host, url.port or _PORTS.get(url.scheme)) == self._origin:
            request.headers.update(turn_headers())

    async def async_call(self, request: Any) -> None:
        """Do as a call, for clients of asyncio."""
        self(request)


_PORTS = {"http": 80, "https": 443}


def http_client(proxy: str = "", **options: Any) -> httpx2.Client:
    """Return a client for `openai.OpenAI(http_client=...)`; close it. `proxy` is as `deploy` has it."""
    options.setdefault("timeout", TURN_TIMEOUT)
    return httpx2.Client(event_hooks={"request": [ProgramHook(proxy)]}, **options)


def async_http_client(proxy: str = "", **options: Any) -> httpx2.AsyncClient:
    """Return a client for `openai.AsyncOpenAI(http_client=...)`; close it. `proxy` is as `deploy` has it."""
    options.setdefault("timeout", TURN_TIMEOUT)
    return httpx2.AsyncClient(event_hooks={"request": [ProgramHook(proxy).async_call]}, **options)


def base_url(proxy: str = "") -> str:
    """Return a base URL that names the program, for what takes no client: a command line, another language.

    In a batch of several sessions it names none.
    Raises `WorkflowError` outside of a session, `SessionEndedError` after its end.
    """
    scope = current.get()
    if scope is None:
        raise WorkflowError("a base URL contains the session: call this from a driver or an agent")
    root = (proxy or os.environ.get(PROXY_VARIABLE) or DEFAULT_PROXY).rstrip("/")
    if scope.is_mixed:
        return f"{root}/v1"
    scope.node.uses_proxy(scope)
    return f"{root}/p/{quote(scope.session.name, safe='')}/v1"


def check_session_name(name: str) -> None:
    """Raise `WorkflowError` for a name that cannot be a program's id in a header."""
    if not (name.isascii() and name.isprintable() and name == name.strip() and len(name) <= MAX_HEADER_CHARACTERS):
        raise WorkflowError(
            f"a session's name is at most {MAX_HEADER_CHARACTERS} printable ASCII characters, not {name!r}"
        )
