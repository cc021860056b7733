"""The dashboard: a page of static files, which asks the admin API for everything that it shows.

The browser may run and load only what comes from here, and sends nothing elsewhere. The page works without a network,
and an id of a program that looks like HTML stays text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from thunderagent.errors import NotFoundError

CONTENT_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

INDEX = "index.html"

WELCOME = """\
This is thunderagent, a reverse proxy for LLM agents.

Base URL for clients:  /v1, or /p/PROGRAM_ID/v1 to name the program
When a program ends:   POST /programs/release with {"program_id": "PROGRAM_ID"}
For operators:         /dashboard in a browser, `thunderagent status --url URL` in a terminal
All routes:            /openapi.json
"""


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


class Dashboard:
    """Handlers of the page and its files, which are read once at the start."""

    def __init__(self, is_shown: Callable[[web.Request], bool] = lambda _: True) -> None:
        """Read the files. `is_shown` says whether the page is served where a request came to."""
        self._is_shown = is_shown
        self._files: dict[str, _File] = {}
        for path in resources.files(__package__).iterdir():
            content_type = CONTENT_TYPES.get(path.name.rpartition(".")[2])
            if content_type is not None:
                body = path.read_bytes()
                self._files[path.name] = _File(body, content_type, hashlib.sha256(body).hexdigest()[:16])

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/", self.welcome),
            web.get("/dashboard", self.page),
            web.get("/dashboard/", self.page_without_slash),
            web.get("/dashboard/{name}", self.file),
        ]

    async def welcome(self, request: web.Request) -> web.Response:
        """Say what this is; lead a browser to the dashboard."""
        headers = {"Vary": "Accept"}
        if "text/html" in request.headers.get("Accept", "") and self._is_shown(request):
            return web.Response(status=302, headers={**headers, "Location": "dashboard"})
        return web.Response(text=WELCOME, headers=headers)

    async def page(self, request: web.Request) -> web.Response:
        """Give the page."""
        return self._answer(request, INDEX)

    async def page_without_slash(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Redirect the browser to the page's one address: the page's links are relative to it."""
        return web.Response(status=308, headers={"Location": "../dashboard"})

    async def file(self, request: web.Request) -> web.Response:
        """Serve one of the page's files."""
        return self._answer(request, request.match_info["name"])

    def _answer(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise NotFoundError(f"the dashboard has no file {name!r}")
        headers = {**HEADERS, "ETag": f'"{file.etag}"'}
        if any(each.value == file.etag for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)
