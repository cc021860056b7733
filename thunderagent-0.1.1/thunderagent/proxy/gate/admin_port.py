"""The admin port: a second listener, and what the first one then refuses.

If it is configured, routes for operators and trainers (the state of programs and replicas, engine control) are served
only there, so that a network can keep agents away from them. The data port answers 404 to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from thunderagent.errors import NotFoundError
from thunderagent.proxy.gate.access import CATCH_ALL, OF_OWN_TENANT, Access, access_of_route
from thunderagent.proxy.gate.guard import NEEDS
from thunderagent.proxy.gate.tenancy import Tenancy
from thunderagent.proxy.wire.aiohttp_request import told_path

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DASHBOARD_PATH = "/dashboard"
"""For operators too, though the page needs no key."""

OF_ALL_UNLESS_NAMED = ("GET", "/sandboxes/events")
"""For an agent that follows its own program, and for operators who follow all."""

RELEASES = frozenset({("POST", "/programs/release"), ("POST", "/sessions/batch_delete")})
"""For an agent that names its programs, and for operators who mean all."""

MUST_NAME = web.RequestKey("must_name_programs", bool)
"""Set on a request from a listener where nobody may mean every program."""


def is_admin(method: str, route_path: str) -> bool:
    """Return whether a route is for operators and trainers, not for agents; `route_path` is as registered."""
    return access_of_route(method, route_path) is Access.ADMIN or route_path.startswith(DASHBOARD_PATH)


class AdminPort:
    """Knows which listener a request came to. `ports` is set once they are known: one for each address of the host."""

    def __init__(self) -> None:
        """Start before the listeners do."""
        self.ports: frozenset[int] = frozenset()

    def before(self, handler: Handler, method: str, route_path: str, tenancy: Tenancy) -> Handler:
        """Wrap a handler to refuse elsewhere what belongs on the admin port."""
        if method == "GET" and route_path in OF_OWN_TENANT:
            return self._only_here(handler, lambda _: tenancy.own is None)
        if is_admin(method, route_path):
            return self._only_here(handler, lambda _: True)
        if (method, route_path) == OF_ALL_UNLESS_NAMED:
            return self._only_here(handler, lambda request: "program_id" not in request.query)
        if (method, route_path) in RELEASES:
            return self._named_elsewhere(handler)
        if route_path == CATCH_ALL:  # a spelling that an engine may understand
            return self._only_here(handler, lambda request: request[NEEDS] is Access.ADMIN)
        return handler

    def check(self, transport: asyncio.Transport | None, path: str) -> None:
        """Raise `NotFoundError` for an operators' request that came elsewhere."""
        if not self.is_here(transport):
            raise NotFoundError(f"there is no {path} on this port")

    def _only_here(self, handler: Handler, concerns: Callable[[web.Request], bool]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if concerns(request):
                self.check(request.transport, told_path(request))
            return await handler(request)

        return handle

    def _named_elsewhere(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[MUST_NAME] = not self.is_here(request.transport)
            return await handler(request)

        return handle

    def is_here(self, transport: asyncio.Transport | None) -> bool:
        """Return whether a request came to the admin port."""
        if transport is None:
            return False
        address = transport.get_extra_info("sockname")
        return address is not None and address[1] in self.ports
