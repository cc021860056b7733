"""Checks before every request's handler: an id, its target, host, origin, key, rate, its body in time. And what leaves.

If none of that is configured, a turn costs only its id and a check for what only browsers send.
"""

# compiled: each turn passes here

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Final, Protocol

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11
from multidict import CIMultiDict, CIMultiDictProxy, istr
from prometheus_client import CollectorRegistry

from thunderagent.errors import (
    BodyTooLargeError,
    NotFoundError,
    RateLimitedError,
)
from thunderagent.proxy.gate.access import (
    METRICS,
    OF_OWN_TENANT,
    Access,
    ForwardUnknown,
    Use,
    access_of_route,
    body_limit_of_route,
    engine_access,
    is_shown,
    use_of,
)
from thunderagent.proxy.gate.bodies import Visitor, come, too_large
from thunderagent.proxy.gate.browsers import Hosts, Origins, comes_from_a_browser
from thunderagent.proxy.gate.held import HeldTurns, KeptBody
from thunderagent.proxy.gate.keys import KEY_HEADER, NO_LIMITS, Key, Keyring, caller_key, check_key
from thunderagent.proxy.gate.keys.quotas import Quotas
from thunderagent.proxy.gate.login import Logins, has_login
from thunderagent.proxy.gate.rate_limit import RateLimits
from thunderagent.proxy.gate.unpacking import go_on, unpacking, ways_of
from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER
from thunderagent.proxy.reading.target import Target
from thunderagent.proxy.wire.aiohttp_request import KEPT_BODY, target_of
from thunderagent.proxy.wire.headers import REQUEST_ID, take_request_id
from thunderagent.proxy.wire.http11.server import CONTINUE, Asked

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_OPEN_BODY_BYTES: Final = 64 * 1024
"""For a request that needs no key: it takes nothing of what others may keep."""


NEEDS: Final = web.RequestKey("needs", Access)
"""What a request needs, once the guard has decided."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Settings of the guard."""

    max_body_bytes: int = 64 * 2**20
    body_timeout_s: float = 300.0
    """For a body to arrive, from the end of the head to its last byte."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call us; `*` is any."""
    rate_limit_per_s: float | None = None
    """Requests per second that a caller may send in the long run; None is unlimited."""
    rate_limit_burst_count: int = 100
    metrics_need_key: bool = False
    client_stall_limit_s: float = 120.0
    """A client that reads nothing of its answer for this long is cut off."""
    forward_unknown: ForwardUnknown | None = None
    """Who may call an unknown path of an engine; None is admins if there are keys, otherwise everybody."""
    hosts: tuple[str, ...] = ()
    """Names by which the proxy may be called if there are no keys, besides those of loopback; `*` is any."""


class Guard:
    """Guards handlers."""

    def __init__(
        self,
        settings: GuardSettings,
        keyring: Keyring,
        registry: CollectorRegistry,
        logins: Logins,
        held: HeldTurns,
        quotas: Quotas | None = None,
        *,
        forwards: Callable[[Handler], bool] = lambda _handler: False,
    ) -> None:
        """Ask for keys of `keyring`, if it has any; count in `registry`, bodies in `held`.

        One of `logins` is enough for what the dashboard shows, and for nothing else: browsers send a cookie with what
        any page of the same host asks. `quotas` delays turns of keys that have used their share. `forwards` says
        whether a handler asks another process, which knows its own logins: a request with only a login is let through.
        """
        self._settings = settings
        self.origins = Origins(settings.cors_origins)
        """Whose pages may call."""
        self._held = held
        self._keyring = keyring
        self._logins = logins
        self._hosts = None if keyring.has_data_keys else Hosts(settings.hosts)
        default = ForwardUnknown.ADMIN if keyring else ForwardUnknown.DATA
        self._forward_unknown = settings.forward_unknown or default
        self._quotas = quotas
        self._forwards = forwards
        self._limits = None
        if settings.rate_limit_per_s is not None:
            self._limits = RateLimits(settings.rate_limit_per_s, settings.rate_limit_burst_count, registry)
        self._checks_keys_or_rate = bool(keyring) or self._limits is not None
        """Fixed at construction, as is whether keys are required."""

    def set_rate_limit(self, per_s: float | None, burst_count: int) -> bool:
        """Set the callers' rate limit; return False if enabling or disabling it takes a restart."""
        if self._limits is None or per_s is None:
            return self._limits is None and per_s is None
        self._limits.set(per_s, burst_count)
        return True

    def attach(self, app: web.Application) -> None:
        """Mark answers with who may read them, if not only their own origin."""
        if self.origins:
            app.on_response_prepare.append(self.origins.prepare)

    def before(self, handler: Handler, method: str, route_path: str) -> Handler:
        """Wrap the handler of a route; errors are raised to the next wrapper."""
        access = self._access_of(method, route_path)
        checks_keys_or_rate = access is not Access.OPEN and self._checks_keys_or_rate
        takes_login = is_shown(method, route_path)
        forwards = takes_login and self._forwards(handler)
        route_max_bytes = body_limit_of_route(method, route_path, self._settings.max_body_bytes)

        waits_later = method == "POST" and route_path == "/leases" and not self._forwards(handler)
        tells_all = method == "GET" and (route_path in OF_OWN_TENANT or route_path == "/sandboxes/events")

        async def handle(request: web.Request) -> web.StreamResponse:
            take_request_id(request.headers)
            target = target_of(request)
            needs = request[NEEDS] = access if access is not Access.ENGINE else self._needs(target, request.method)
            is_operators = tells_all or needs is Access.ADMIN
            if self._hosts is not None and (is_operators or comes_from_a_browser(request.headers)):
                self._check_name(request.headers)
            has_only_login = forwards and self._has_only_login(request.headers)
            if needs is Access.ADMIN:
                self.origins.check_site(request)
            if "Origin" in request.headers:
                if self.origins.is_preflight(request):
                    return self.origins.preflight(request)
                self.origins.check_origin(request, asks_engine=access is Access.ENGINE and needs is Access.DATA)
            if checks_keys_or_rate:
                is_turn = access is Access.ENGINE and self._quotas is not None and _is_turn(request)
                for_admin = needs is Access.ADMIN
                logins = self._logins if takes_login else None
                await self._check_key_and_rate(
                    request,
                    logins,
                    for_admin=for_admin,
                    is_turn=is_turn,
                    has_only_login=has_only_login,
                    waits_later=waits_later,
                )
            is_small = access is Access.OPEN or has_only_login
            max_bytes = min(MAX_OPEN_BODY_BYTES, route_max_bytes) if is_small else route_max_bytes
            is_packed = hdrs.CONTENT_ENCODING in request.headers
            if request.content.is_eof():  # most bodies arrive with their head
                if request.content.total_bytes > max_bytes:
                    raise BodyTooLargeError(too_large(request.content.total_bytes, max_bytes))
                if not is_packed:
                    return await handler(request)
            kept = request[KEPT_BODY] = KeptBody(self._held)
            try:
                if not request.content.is_eof():
                    await self._read_body(request, kept, max_bytes)
                if is_packed:
                    body = await _unpacked(request.headers, await request.read(), kept, max_bytes)
                    request._read_bytes, request._headers = body, _without_encoding(request.headers)  # noqa: SLF001
                    request._cache.pop("headers")  # noqa: SLF001 - read again from `_headers`
                return await handler(request)
            finally:
                kept.release()

        return handle

    def let_in(self, asked: Asked, for_admin: bool) -> Awaitable[KeptBody | None] | None:
        """Check a turn that our own server read. Raises like a handler of `before`, and so does the returned awaitable.

        A page of any origin may open a websocket, and then read it; so its origin is checked as if it changed
        something. If there is something to wait for, the returned awaitable receives the body, and returns its counter
        until the turn has ended. A body that came with its head is not counted.
        """
        headers = asked.head.headers
        take_request_id(headers)
        notes = asked.notes
        if self._hosts is not None and (
            for_admin or (notes.get("browser", True) and comes_from_a_browser(headers, notes))
        ):
            self._check_name(headers)
        if for_admin:
            self.origins.check_site(asked)
        if (for_admin or asked.head.upgrades) and "Origin" in headers:
            self.origins.check_page(asked)
        if self._checks_keys_or_rate or not asked.is_whole or hdrs.CONTENT_ENCODING in headers:
            return self._let_come(asked, for_admin=for_admin)
        asked.body = body = asked.taken()
        if len(body) > self._settings.max_body_bytes:
            raise BodyTooLargeError(too_large(len(body), self._settings.max_body_bytes))
        return None

    async def _let_come(self, asked: Asked, *, for_admin: bool) -> KeptBody | None:
        """Check the key and the rate of a turn, and receive its body."""
        if self._checks_keys_or_rate:
            await self._check_key_and_rate(asked, for_admin=for_admin, is_turn=not for_admin)
        if asked.head.upgrades:
            return None
        is_packed = hdrs.CONTENT_ENCODING in asked.headers
        if asked.is_whole and not is_packed:
            self._take_whole(asked)
            return None
        kept = KeptBody(self._held)
        try:
            if asked.is_whole:
                self._take_whole(asked)
                await self._unpack(asked, kept)
                return kept
            asked.body = await come(
                asked.next_piece,
                asked.headers,
                max(0, asked.head.length),
                kept,
                self._settings.body_timeout_s,
                self._settings.max_body_bytes,
                asked.invite if asked.head.is_http_11 else None,
            )
            if is_packed:
                await self._unpack(asked, kept)
        except BaseException:
            kept.release()
            raise
        return kept

    async def _unpack(self, asked: Asked, kept: KeptBody) -> None:
        """Unpack a body: its turn reads and forwards it as if it had come plain."""
        asked.body = await _unpacked(asked.headers, asked.body, kept, self._settings.max_body_bytes)
        asked.headers, asked.notes = _without_encoding(asked.headers), {}

    def _take_whole(self, asked: Asked) -> None:
        asked.body = body = asked.taken()
        if len(body) > self._settings.max_body_bytes:
            raise BodyTooLargeError(too_large(len(body), self._settings.max_body_bytes))

    def _needs(self, target: Target, method: str) -> Access:
        """Return what a request to an engine needs. Raises `NotFoundError` if it is not forwarded."""
        needs = engine_access(target, method, self._forward_unknown)
        if needs is None:
            raise NotFoundError("this path is not forwarded to engines")
        return needs

    def _access_of(self, method: str, route_path: str) -> Access:
        if route_path in METRICS and self._settings.metrics_need_key:
            return Access.ADMIN
        return access_of_route(method, route_path) or Access.ADMIN

    async def _check_key_and_rate(
        self,
        request: Visitor,
        logins: Logins | None = None,
        *,
        for_admin: bool,
        is_turn: bool,
        has_only_login: bool = False,
        waits_later: bool = False,
    ) -> None:
        """Check the key of a request, or its login if one of `logins` is enough; wait for its turn.

        One that `waits_later` does so by `wait_for_rate`, as its body says how long it may.
        """
        caller, waited = f"address {request.remote}", False
        key: Key | None = None
        if self._keyring:
            key = self._keyring.key_of(request.headers)
            if key is None and logins is not None:
                key = self._keyring.still(logins.key_of(request.headers))
            if not has_only_login:
                check_key(key, self._keyring, for_admin=for_admin)
            if key is not None:
                caller = f"key {key.name}"
                if key.limits != NO_LIMITS and self._quotas is not None and is_turn:
                    waited = await self._quotas.wait(key)
        if self._limits is not None:
            if for_admin:
                self._limits.check(caller)
            elif not waits_later:
                waited = await self._limits.wait(caller) or waited
        if waited and key is not None and not has_only_login:  # it may have been revoked, or have expired
            check_key(self._keyring.still(key), self._keyring, for_admin=for_admin)

    async def wait_for_rate(self, request: web.Request, patience_s: float | None) -> float:
        """Wait until a caller whose key is checked may take one more lease; return how long that took.

        Raises `RateLimitedError` if it takes longer than `patience_s`, and as the check of its key.
        """
        if not self._checks_keys_or_rate:
            return 0.0
        key, quotas, limits, waited = caller_key(), self._quotas, self._limits, False
        is_limited = key is not None and key.limits != NO_LIMITS
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(patience_s):
                if key is not None and quotas is not None and is_limited:
                    waited = await quotas.wait(key)
                if limits is not None:
                    caller = f"address {request.remote}" if key is None else f"key {key.name}"
                    waited = await limits.wait(caller) or waited
        except TimeoutError:
            error = RateLimitedError(f"the rate allows no lease within its patience of {patience_s:g} s")
            if key is not None and quotas is not None and is_limited:
                error.retry_after_s = max(error.retry_after_s, ceil(quotas.missing_s(key)))
            raise error from None
        if not waited:
            return 0.0
        if key is not None:  # it may have been revoked, or have expired
            check_key(self._keyring.still(key), self._keyring, for_admin=False)
        return loop.time() - began_s

    def _has_only_login(self, headers: CIMultiDictProxy[str]) -> bool:
        return bool(self._keyring) and has_login(headers) and self._keyring.key_of(headers) is None

    async def _read_body(self, request: web.Request, kept: KeptBody, max_bytes: int) -> None:
        """Read a body that did not come with its head; the handler later reads the same bytes."""
        request._read_bytes = await come(  # noqa: SLF001 - where `request.read` keeps it
            request.content.readany,
            request.headers,
            request.content_length or 0,
            kept,
            self._settings.body_timeout_s,
            max_bytes,
            partial(_invite, request) if request.version >= HttpVersion11 else None,
        )

    def _check_name(self, headers: CIMultiDictProxy[str]) -> None:
        """Check the host name of a request on operators' routes or from a browser, unless it has a key."""
        if self._hosts is not None and (not self._keyring or self._keyring.key_of(headers) is None):
            self._hosts.check(headers)


def _is_turn(request: web.Request) -> bool:
    return use_of(target_of(request), request.method) in (Use.TURN, Use.GENERATE)


def _invite(request: web.Request) -> None:
    """Tell a waiting client that its body is welcome (RFC 9110, 10.1.1)."""
    if request.transport is not None:
        request.transport.write(CONTINUE)  # bypass aiohttp's writer: it is no part of the answer


async def says_nothing_yet(request: web.Request) -> None:
    """Leave a client that expects an invitation waiting: the guard sends it, once it may."""


async def _unpacked(headers: CIMultiDictProxy[str], body: bytes, kept: KeptBody, max_bytes: int) -> bytes:
    """Unpack a body in a thread, and count what comes of it, as that of one that arrives. Raises `RequestError`."""
    steps = unpacking(body, ways_of(",".join(headers.getall(hdrs.CONTENT_ENCODING))), max_bytes)
    plain: bytes | None = None
    while plain is None:
        more_bytes, plain = await asyncio.to_thread(go_on, steps)
        kept.grow(more_bytes)
    kept.release()
    kept.grow(len(plain))
    return plain


def _without_encoding(headers: CIMultiDictProxy[str]) -> CIMultiDictProxy[str]:
    rest = CIMultiDict(headers)
    del rest[hdrs.CONTENT_ENCODING]
    return CIMultiDictProxy(rest)


# --- The headers of every request to an engine: our keys go, its own and the id come

_KEY_HEADER: Final = istr(KEY_HEADER)


class TraceContext(Protocol):
    """Tells engines which trace a request belongs to."""

    def inject(self, headers: CIMultiDict[str]) -> None:
        """Write the W3C trace context of the current request."""

    def answered(self, status: int) -> None:
        """Note that the head of an engine's answer arrived."""


class Outgoing:
    """Changes headers in place; idempotent, because retries repeat it."""

    def __init__(
        self,
        keyring: Keyring,
        backend_api_key: str = "",
        tracing: TraceContext | None = None,
        *,
        forwards_authorization: bool = True,
    ) -> None:
        """Remove the keys of `keyring`; send `backend_api_key`, if any, to the engines.

        Without `forwards_authorization` the clients' header is for us alone, because it names programs.
        """
        self._keyring = keyring or None
        """Fixed at construction, as is whether keys are required."""
        self._forwards_authorization = forwards_authorization
        self._authorization = f"Bearer {backend_api_key}" if backend_api_key else ""
        self._tracing = tracing
        self.answered = None if tracing is None else tracing.answered
        """Notes that the head of an engine's answer arrived; None if nobody wants to know."""

    def mend(self, headers: CIMultiDict[str]) -> None:
        """Change the headers of a request."""
        request_id = REQUEST_ID.get()
        if request_id and headers.get(REQUEST_ID_HEADER) != request_id:
            headers[REQUEST_ID_HEADER] = request_id
        if self._keyring is not None:
            self._keyring.take_out(headers)
        elif _KEY_HEADER in headers:
            headers.popall(_KEY_HEADER)
        if not self._forwards_authorization and headers.get("Authorization") != self._authorization:
            headers.popall("Authorization", None)
        # If data needs a key of ours, what is left in Authorization is meant for the engine. If not, we cannot tell,
        # because most clients must send some text there: the engine gets the configured one.
        if self._authorization:
            asks = self._keyring is not None and self._keyring.has_data_keys
            if not (asks and "Authorization" in headers):
                headers["Authorization"] = self._authorization
        if self._tracing is not None:
            self._tracing.inject(headers)
