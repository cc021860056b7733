"""Limits on browsers: by which names the proxy may be called, and what pages of other origins may do.

Names protect against pages whose own host name was made to resolve to the proxy (DNS rebinding). For a browser such a
page has the proxy's origin, so `Origin` does not show it. The name in `Host` does: it is the page's. An address cannot
be made to resolve elsewhere, so all addresses are accepted.
"""

# compiled: each turn passes here

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy, istr

from thunderagent.errors import HostRefusedError, OriginRefusedError
from thunderagent.proxy.gate.bodies import Visitor
from thunderagent.proxy.gate.keys import KEY_HEADER
from thunderagent.proxy.reading.header_words import REQUEST_ID_HEADER

ANY: Final = "*"

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PREFLIGHT_AGE_S: Final = 600

EXPOSED_HEADERS = (
    f"{REQUEST_ID_HEADER}, X-Program-ID, X-Program-ID-Source, X-Replica-ID, X-Hold-Ms, X-ThunderAgent-Note, "
    "Retry-After, WWW-Authenticate"
)

_ORIGIN, _SITE, _USER_AGENT = istr("Origin"), istr("Sec-Fetch-Site"), istr("User-Agent")


class Hosts:
    """The accepted names."""

    def __init__(self, names: Iterable[str]) -> None:
        """Accept `names`, besides those of loopback and all addresses; `*` is any."""
        self._names = {host_of(name) for name in names}

    def check(self, headers: CIMultiDictProxy[str]) -> None:
        """Check the host name of a request. Raises `HostRefusedError`. Browsers always send `Host`; others may not."""
        for value in headers.getall("Host", ()):
            if not self._takes(host_of(value)):
                raise HostRefusedError("this name is not one of the proxy's; allowed_hosts says which are")

    def _takes(self, host: str) -> bool:
        if host in self._names or ANY in self._names or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            ip_address(host.strip("[]"))
        except ValueError:
            return False
        return True


def host_of(value: str) -> str:
    """Return the name or address in a `Host` header, without its port."""
    value = value.strip().lower()
    host = value.partition("]")[0] + "]" if value.startswith("[") else value.partition(":")[0]
    return host.rstrip(".")


def comes_from_a_browser(headers: CIMultiDictProxy[str], notes: dict[str, Any] | None = None) -> bool:
    """Return whether a request is a browser's, by headers that all of them send; `notes` are those of its head."""
    known: bool | None = None if notes is None else notes.get("browser")
    if known is None:
        known = _ORIGIN in headers or _SITE in headers or headers.get(_USER_AGENT, "").startswith("Mozilla/")
        if notes is not None:
            notes["browser"] = known
    return known


class Origins:
    """The origins whose pages may call the proxy, besides its own; `*` is any."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Accept pages of `origins`."""
        self._all = frozenset(origins)

    def __bool__(self) -> bool:
        return bool(self._all)

    def _is_allowed(self, origin: str) -> bool:
        return origin in self._all or ANY in self._all

    def is_preflight(self, request: web.Request) -> bool:
        """Return whether a browser asks whether a page may send a request."""
        return bool(self._all) and request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers

    def preflight(self, request: web.Request) -> web.Response:
        """Answer a browser that asks whether a page may send a request; it asks without a key."""
        if not self._is_allowed(request.headers["Origin"]):
            raise OriginRefusedError("pages of this origin may not call the proxy; cors_origins says which may")
        wanted = request.headers.get("Access-Control-Request-Headers", f"Authorization, Content-Type, {KEY_HEADER}")
        headers = {
            "Access-Control-Allow-Methods": request.headers["Access-Control-Request-Method"],
            "Access-Control-Allow-Headers": wanted,
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    def check_origin(self, request: Visitor, *, asks_engine: bool) -> None:
        """Refuse what a page of another origin makes its reader's browser do to our own API.

        Browsers send such requests without asking first, and without a key they may be enough on loopback. A request to
        an engine is the engine's to judge, unless it controls the engine.
        """
        if request.method not in SAFE_METHODS and not asks_engine:
            self.check_page(request)

    def check_page(self, request: Visitor) -> None:
        """Refuse any request of another origin's page."""
        origin = request.headers["Origin"]
        if _host_and_port(origin) != request.host and not self._is_allowed(origin):
            raise OriginRefusedError("a page of this origin may not do that; cors_origins says which may")

    def check_site(self, request: Visitor) -> None:
        """Refuse any request to an operator's route that another site's page makes its reader's browser send.

        A picture or a link is a GET without an origin, and some engines take a GET as a command.
        """
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            origin = request.headers.get("Origin")
            if origin is None or not self._is_allowed(origin):
                raise OriginRefusedError("a page of another site may not ask for that; cors_origins says which may")

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Mark an aiohttp answer with the origin that may read it, and how."""
        self.mark(request, response.headers, is_ours=self.is_preflight(request))

    def mark(self, request: Visitor, headers: CIMultiDict[str], *, is_ours: bool = False) -> None:
        """Mark an answer with the foreign origin that may read it, if any, and how.

        It replaces what an engine says of that, unless the answer `is_ours`.
        """
        if not is_ours:
            for name in {name for name in headers if name.lower().startswith("access-control-")}:
                headers.popall(name, None)
        headers.add("Vary", "Origin")
        origin = request.headers.get("Origin")
        if origin is not None and self._is_allowed(origin):
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS


def _host_and_port(origin: str) -> str | None:
    """Return the host and port of an origin; None for an impossible one."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
