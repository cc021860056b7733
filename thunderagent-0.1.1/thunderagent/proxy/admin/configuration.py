"""Reloading the configuration over the API; the answer says what changed."""

from __future__ import annotations

from typing import Any, Protocol

from aiohttp import web
from pydantic import Field

from thunderagent.errors import ConfigurationError, RequestError
from thunderagent.proxy.gate.bodies import Report, report_response


class Reloads(Protocol):
    """Something that reloads the configuration."""

    async def reload(self) -> dict[str, Any]:
        """Reload and return what changed. Raises `ConfigurationError`; then nothing has changed."""


class ReloadReport(Report):
    """What changed, setting by setting; secrets are not shown."""

    applied: dict[str, str] = Field(description="what holds from now on")
    needs_restart: dict[str, str] = Field(description="what holds after a restart only")


class ConfigurationHandlers:
    """Handler of `/config/reload`."""

    def __init__(self, reloads: Reloads | None) -> None:
        """Reload with `reloads`, if there is something to reload."""
        self._reloads = reloads

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/config/reload", self.reload)]

    async def reload(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Reload the configuration, as on SIGHUP, and say what changed. An invalid one changes nothing."""
        if self._reloads is None:
            raise RequestError("this proxy was started without a configuration that can be reloaded")
        try:
            return report_response(ReloadReport.model_validate(await self._reloads.reload()))
        except ConfigurationError as error:
            raise RequestError(f"the configuration is wrong, and nothing has changed: {error.message}") from error
