"""Requests to an engine or a proxy over HTTP, with any result kept: no answer is a result, too."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from thunderagent.bounded import UNPACKED_ONLY, BoundedBody, ExcessError
from thunderagent.errors import ConfigurationError

LOOK_TIMEOUT_S = 10.0
"""For an engine's reports on itself. SGLang answers for its health with a token that it generates."""

MAX_ANSWER_BYTES = 16 * 2**20
"""A larger answer counts as none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request. `status` 0: nothing came, and `why` says why.

    `skew_s` is how far the other side's clock is ahead of ours beyond what latency and the header's whole seconds
    explain; None if it gave no time.
    """

    status: int
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    skew_s: float | None = None

    @property
    def is_good(self) -> bool:
        """Whether the request succeeded."""
        return self.status == 200

    @property
    def wants_key(self) -> bool:
        """Whether the other side requires a key."""
        return self.status in (401, 403)

    def json(self) -> dict[str, Any]:
        """Return the body's object; empty if it is none."""
        try:
            said = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return said if isinstance(said, dict) else {}

    def told(self) -> str:
        """Return the result, in a few words."""
        return f"{self.status} {' '.join(self.text.split())[:200]}".strip() if self.status else self.why


NO_ANSWER = Answer(0, why="it was not asked")


class Asker:
    """Sends requests to one base URL."""

    def __init__(
        self, http: httpx2.AsyncClient, *, timeout_s: float, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """Use `http`, whose base URL is the other side's; `timeout_s` is for requests that generate."""
        self._http = http
        self._timeout_s = timeout_s
        self._wall_clock = wall_clock

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Ask the other side for a report on itself; never raise."""
        return await self._ask("GET", path, headers, None, LOOK_TIMEOUT_S)

    async def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Answer:
        """Send the other side a command; never raise."""
        content = json.dumps(body).encode()
        return await self._ask(
            "POST", path, {"Content-Type": "application/json", **(headers or {})}, content, self._timeout_s
        )

    async def _ask(
        self, method: str, path: str, headers: Mapping[str, str] | None, body: bytes | None, timeout_s: float
    ) -> Answer:
        asked_s = self._wall_clock()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(
                    method, path, headers={**UNPACKED_ONLY, **(headers or {})}, content=body, timeout=timeout_s
                ) as answer,
            ):
                come = BoundedBody(MAX_ANSWER_BYTES, answer.headers.get("Content-Encoding"))
                came_whole = answer.is_stream_consumed
                async for piece in answer.aiter_bytes() if came_whole else answer.aiter_raw():
                    come.add(piece)
        except (httpx2.TimeoutException, TimeoutError):
            return Answer(0, why=f"no answer within {timeout_s:g} s")
        except ExcessError as error:
            return Answer(0, why=f"{path} {error}")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            return Answer(0, why=str(error) or type(error).__name__)
        skew_s = _skew_s(answer.headers.get("Date", ""), asked_s, self._wall_clock())
        return Answer(answer.status_code, come.taken().decode(errors="replace"), answer.headers, skew_s=skew_s)


def _skew_s(date: str, asked_s: float, answered_s: float) -> float | None:
    """Return how far a header `Date` is outside of the time in which its answer was made; it has whole seconds."""
    try:
        told_s = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    if told_s > answered_s:
        return told_s - answered_s
    return min(0.0, told_s + 1.0 - asked_s)


PROXY_VARIABLE = "THUNDERAGENT_PROXY"
KEY_VARIABLE = "THUNDERAGENT_KEY"
DEFAULT_PORT = 8300


def add_proxy_arguments(parser: argparse.ArgumentParser, target: argparse._ActionsContainer | None = None) -> None:
    """Add the options of all commands that ask a running proxy; `target` gets the one of the address."""
    (target or parser).add_argument(
        "--url",
        metavar="URL",
        help=f"where the proxy runs: a URL, or HOST:PORT (default: http://127.0.0.1:{DEFAULT_PORT}) [{PROXY_VARIABLE}]",
    )
    parser.add_argument(
        "--key",
        default=os.environ.get(KEY_VARIABLE, ""),
        help=f"an admin key of the proxy; better in the environment, where other users do not see it [{KEY_VARIABLE}]",
    )
    parser.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="certificates to trust for an https URL, PEM, instead of the system's",
    )


def proxy_url(given: str | None, port: int | None = None) -> str:
    """Return a proxy's base URL: what was given, otherwise the environment's, otherwise this machine's.

    `port` is one that is known to be the proxy's on this machine; it precedes the environment. Raises
    `ConfigurationError`.
    """
    text = given or ("" if port else os.environ.get(PROXY_VARIABLE, ""))
    if given is not None and not given.strip():
        raise ConfigurationError("--url: it is empty; give a URL, or HOST:PORT")
    if not text:
        return f"http://127.0.0.1:{port or DEFAULT_PORT}"
    text = text.strip()
    here = "127.0.0.1" if text.startswith(":") else ""
    url = text if "://" in text else f"http://{here}{text}"
    named = "--url" if given else PROXY_VARIABLE
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigurationError(f"{named}: {text!r} is not a URL, as http://HOST:PORT or HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


def refusal(url: str, status: int, *, has_key: bool) -> str:
    """Return what a refused request for an admin's answer means, and what to do."""
    if status == 401 or (status == 403 and not has_key):
        told = "does not know this key" if has_key else "wants an admin key"
    elif status == 403:
        told = "answers 403: this key is for data, and an admin key is needed"
    else:
        return f"{url} answers {status}"
    return f"{url} {told}; `thunderagent key NAME --admin` makes one: give it in {KEY_VARIABLE}, or as --key"


def trusted(ca_file: Path | None) -> ssl.SSLContext | None:
    """Return what trusts a file's certificates; None without one: the system's. Raises `ConfigurationError`."""
    try:
        return None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(f"--ca-file: cannot use {ca_file}: {error}") from error
