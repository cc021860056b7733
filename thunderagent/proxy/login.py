"""The way in for a browser: an admin key is traded for a cookie that no script can read and no other site can use."""

from __future__ import annotations

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from thunderagent.proxy.bodies import read_model
from thunderagent.proxy.keys import COOKIE, Keyring, check_key


class LoginRequest(BaseModel):
    """The admin key."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    key: str


class Login:
    """Handler of the login."""

    def __init__(self, keyring: Keyring) -> None:
        """Let in who has an admin key of `keyring`."""
        self._keyring = keyring

    def routes(self) -> list[web.RouteDef]:
        """Return the route of the login."""
        return [web.post("/dashboard/login", self.handle)]

    async def handle(self, request: web.Request) -> web.Response:
        """Trade an admin key for a cookie, which lasts until the browser is closed."""
        text = read_model(LoginRequest, await request.read()).key
        check_key(self._keyring.find(text), self._keyring, for_admin=True)
        response = web.json_response({"logged_in": True})
        response.set_cookie(COOKIE, text, path="/", httponly=True, samesite="Strict", secure=request.secure)
        return response
