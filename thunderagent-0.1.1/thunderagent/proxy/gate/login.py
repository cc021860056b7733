"""Login for browsers: an admin key is exchanged for a token in a cookie that no script and no other site can use.

The token is not the key: a browser sends its cookies to every port of a host, so any listener there may see it. It
expires with this process, or after `LIFETIME_S`. It comes with what a page of any of these ports asks, too, so it opens
only what the dashboard shows (`access.py`): no turn, and nothing that changes something.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from secrets import token_urlsafe
from time import monotonic
from typing import Literal

from aiohttp import web
from multidict import CIMultiDictProxy
from pydantic import BaseModel, ConfigDict

from thunderagent.proxy.gate.bodies import Report, read_model, report_response
from thunderagent.proxy.gate.keys import COOKIE, KEY_HEADER, Key, Keyring, check_key, cookies_of

LIFETIME_S = 12 * 3600.0
MAX_COUNT = 1000
"""Logins at a time; the oldest ends first."""


class LoginRequest(BaseModel):
    """The admin key."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    key: str


class Logins:
    """The logged-in browsers: for each the hash of its token, its key, and its expiry."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Start without logins; `clock` returns seconds."""
        self._clock = clock
        self._logins: OrderedDict[bytes, tuple[Key, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._logins)

    def begin(self, key: Key) -> str:
        """Return a new token that stands for a key."""
        now_s = self._clock()
        while self._logins and (len(self._logins) >= MAX_COUNT or next(iter(self._logins.values()))[1] <= now_s):
            self._logins.popitem(last=False)
        token = token_urlsafe(32)
        self._logins[_digest(token)] = key, now_s + LIFETIME_S
        return token

    def key_of(self, headers: CIMultiDictProxy[str]) -> Key | None:
        """Return the key for a request's login cookie; a key in our own header takes precedence."""
        if KEY_HEADER in headers:
            return None
        for name, token in cookies_of(headers):
            key, until_s = self._logins.get(_digest(token), (None, 0.0)) if name == COOKIE else (None, 0.0)
            if key is not None and self._clock() < until_s:
                return key
        return None


def has_login(headers: CIMultiDictProxy[str]) -> bool:
    """Return whether a request has a login cookie, of any process, and no key of its own."""
    return KEY_HEADER not in headers and any(name == COOKIE for name, _ in cookies_of(headers))


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


class LoginReport(Report):
    """The answer carries the cookie."""

    logged_in: Literal[True]


class Login:
    """Handler of the login."""

    def __init__(self, keyring: Keyring, logins: Logins) -> None:
        """Accept admin keys of `keyring`, and remember the logins in `logins`."""
        self._keyring = keyring
        self._logins = logins

    def routes(self) -> list[web.RouteDef]:
        """Return the route of the login."""
        return [web.post("/dashboard/login", self.handle)]

    async def handle(self, request: web.Request) -> web.Response:
        """Exchange an admin key for a cookie, which lasts until the browser is closed, at most 12 hours."""
        key = self._keyring.find(read_model(LoginRequest, await request.read()).key)
        check_key(key, self._keyring, for_admin=True)
        response = report_response(LoginReport(logged_in=True))
        token = self._logins.begin(key) if key is not None else ""
        response.set_cookie(COOKIE, token, path="/", httponly=True, samesite="Strict", secure=request.secure)
        return response
