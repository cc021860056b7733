"""One request to the proxy's own API, and a thread for it that nobody's cancellation reaches.

Python's own HTTP client: an agent's environment need not bear ours. One implementation serves both kinds of callers;
an `async` one awaits a thread. A thread ends what it began, whatever becomes of the code that waits for it: a
cancelled task, an event loop that closes, a second Ctrl-C. It is no daemon, so the interpreter waits for it, and each
of its requests has a timeout, so that it does not wait for long.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from thunderagent.client.errors import ProxyRefusedError, ProxyUnreachableError

MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_SAID_CHARACTERS = 300
KEY_VARIABLE = "THUNDERAGENT_KEY"
"""Names the proxy's API key, where it asks for one."""

Result = TypeVar("Result")


def exchange(proxy: str, method: str, path: str, body: object = None, *, timeout_s: float) -> dict[str, Any]:
    """Send one request with a JSON body, if any, and return the JSON object of the answer.

    `timeout_s` is for each wait of the connection. Environment variables of HTTP proxies are not heeded; the proxy's
    API key, if it asks for one, is `THUNDERAGENT_KEY`. Raises `ProxyUnreachableError`, and `ProxyRefusedError` for an
    answer that is not a JSON object or has a status over 299.
    """
    parts = urlsplit(proxy)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key := proxy_key():
        headers["X-ThunderAgent-Key"] = key
    try:
        with closing(kind(parts.hostname or "", parts.port, timeout=timeout_s)) as connection:
            connection.request(method, parts.path + path, content, headers)
            response = connection.getresponse()
            status, said = response.status, response.read(MAX_ANSWER_BYTES)
    except (OSError, HTTPException, UnicodeError) as error:  # the last for a host that is no name
        raise ProxyUnreachableError(f"no proxy answers at {proxy}: {error!r}") from error
    return _object_of(f"{method} {proxy}{path}", status, said)


def proxy_key() -> str:
    """Return the proxy's API key that the environment names; empty if it names none."""
    return os.environ.get(KEY_VARIABLE, "")


def _object_of(what: str, status: int, said: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(said)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and 200 <= status < 300:
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        text = said.decode("utf-8", "replace")[:_MAX_SAID_CHARACTERS]
        raise ProxyRefusedError(f"{what}: {status}, and not an answer of thunderagent: {text!r}", status=status)
    code = str(error.get("code") or "")
    raise ProxyRefusedError(f"{what}: {status} {code}: {error.get('message')}", status=status, code=code)


def in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Run `function` in a thread of its own; it cannot be cancelled."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    if sys.is_finalizing():  # a thread would never get to run, and starting it would never end
        work()
        return future
    try:
        threading.Thread(target=work, name="thunderagent-client").start()
    except RuntimeError:  # none can be started any more
        work()
    return future
