"""The admin port: a second listener, and what the first one refuses then.

Where it is configured, what an operator or a trainer calls - the state of programs and replicas, engine control - is
served there alone, so that a network can keep agents away from it. The data port answers 404 for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from posixpath import normpath
from urllib.parse import unquote

from aiohttp import web

from thunderagent.errors import NotFoundError
from thunderagent.proxy.commands import is_control
from thunderagent.proxy.identity import split_path

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ADMIN_PATHS = (
    *("/replicas", "/queue", "/tools", "/sandboxes", "/summary", "/history", "/events", "/dashboard"),
    *("/add_worker", "/remove_worker"),
)
"""What an operator calls, with whatever follows; other paths of ours are for agents, but those read below."""

PROGRAMS_PATH = "/programs"
"""Read by operators, written by agents."""


def is_admin(method: str, route_path: str) -> bool:
    """Say whether a route is for operators and trainers, not for agents; `route_path` is as it was registered."""
    if route_path.startswith(PROGRAMS_PATH):
        return method == "GET" and not route_path.endswith("/sandboxes")
    own = any(route_path == path or route_path.startswith(path + "/") for path in ADMIN_PATHS)
    return own or is_control(route_path) or route_path.endswith(("/v1/loads", "/get_load", "/get_loads"))


class AdminPort:
    """Knows which listener a request came to. `port` is set once it is known."""

    def __init__(self) -> None:
        """Begin before the listeners do."""
        self.port: int | None = None

    def before(self, handler: Handler, method: str, route_path: str) -> Handler:
        """Wrap a handler so that what is for the admin port is refused elsewhere."""
        if is_admin(method, route_path):
            return self._only_here(handler, lambda _: True)
        if route_path == "/{path:.*}":  # a spelling that an engine may understand
            return self._only_here(handler, _controls_engine)
        return handler

    def _only_here(self, handler: Handler, concerns: Callable[[web.Request], bool]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not self._came_here(request) and concerns(request):
                raise NotFoundError(f"there is no {request.path} on this port")
            return await handler(request)

        return handle

    def _came_here(self, request: web.Request) -> bool:
        if request.transport is None:
            return False
        address = request.transport.get_extra_info("sockname")
        return self.port is not None and address is not None and address[1] == self.port


def _controls_engine(request: web.Request) -> bool:
    _, path = split_path(request.raw_path)
    bare_path = normpath("/" + unquote(path.partition("?")[0]).lstrip("/"))
    return is_control(bare_path) or is_control(bare_path.removeprefix("/v1"))
