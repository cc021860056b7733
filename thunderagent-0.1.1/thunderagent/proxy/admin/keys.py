"""Keys over the API: list, add or remove one; effective at once, and stored in the file of keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from aiohttp import web
from pydantic import Field

from thunderagent.errors import ConfigurationError, KeysNotChangedError, NotFoundError, RequestError
from thunderagent.proxy.gate.bodies import Report, read_model, report_response
from thunderagent.proxy.gate.keys import Key, Keyring
from thunderagent.proxy.gate.keys.file import Expiry, KeyLimitsEntry, KeysFile
from thunderagent.proxy.gate.keys.keyring import NAME
from thunderagent.proxy.gate.keys.quotas import Quotas

NO_FILE = "keys can be changed where there is a keys_file, and there is none"


class KeyRequest(KeyLimitsEntry):
    """A key to be made."""

    name: str = Field(pattern=f"^{NAME}$", description="whose it is; what stands before a slash is its tenant")
    admin: bool = False
    expires: Expiry | None = Field(None, description="from then on it lets nobody in; null is never")


class KeyReport(Report):
    """A key, without its secret."""

    name: str
    tenant: str
    admin: bool
    expires: datetime | None
    turns_per_min: float | None
    tokens_per_min: float | None
    programs_count: int | None
    held_turns_count: int | None
    program_max_turns: int | None
    program_max_tokens: int | None
    program_max_age_s: float | None
    program_deadline_s: float | None
    live_programs_count: int = Field(description="its programs that live, where they are limited")
    revocable: bool = Field(description="whether it is in the file of keys; others stand in the configuration")


class KeysReport(Report):
    """All keys."""

    keys: list[KeyReport]


class NewKeyReport(Report):
    """A new key: it is shown only this once."""

    name: str
    key: str


class RevokedKeyReport(Report):
    """A key that is no longer accepted."""

    name: str
    revoked: bool
    stored: bool = Field(description="whether it is out of the file of keys; if not, that is tried again")
    why: str | None = Field(
        None,
        description="why the file could not be changed: a restart before it is, or another process, accepts the key",
    )


@contextmanager
def _told() -> Iterator[None]:
    """Tell the caller why the file of keys cannot be changed."""
    try:
        yield
    except ConfigurationError as error:
        raise KeysNotChangedError(error.message) from error


class KeyHandlers:
    """Handlers of `/keys`."""

    def __init__(self, keyring: Keyring, file: KeysFile | None, quotas: Quotas) -> None:
        """Report on `keyring`, and change `file`, if there is one."""
        self._keyring = keyring
        self._file = file
        self._quotas = quotas

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/keys", self.keys),
            web.post("/keys", self.add),
            web.delete("/keys/{name:.+}", self.remove),
        ]

    async def keys(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """List the keys: names, expiry and limits, never secrets."""
        filed = {key.name for key in self._keyring.filed}
        return report_response(KeysReport(keys=[self._report(key, key.name in filed) for key in self._keyring.keys]))

    async def add(self, request: web.Request) -> web.Response:
        """Make a key, valid at once. It is shown only in this answer."""
        wanted = read_model(KeyRequest, await request.read())
        limits = KeyLimitsEntry(**{name: getattr(wanted, name) for name in KeyLimitsEntry.model_fields})
        file = self._writable()
        with _told():
            key = await file.add(wanted.name, admin=wanted.admin, expires=wanted.expires, limits=limits)
        return report_response(NewKeyReport(name=wanted.name, key=key))

    async def remove(self, request: web.Request) -> web.Response:
        """Revoke a key, at once, even if the file cannot be written. Turns that began with it go on."""
        name = request.match_info["name"]
        if self._keyring.named(name) is None:
            raise NotFoundError(f"there is no key {name!r}")
        why = await self._writable().remove(name)
        return report_response(RevokedKeyReport(name=name, revoked=True, stored=not why, why=why or None))

    def _writable(self) -> KeysFile:
        if self._file is None:
            raise RequestError(NO_FILE)
        return self._file

    def _report(self, key: Key, is_filed: bool) -> KeyReport:
        limits: dict[str, Any] = {name: getattr(key.limits, name) for name in KeyLimitsEntry.model_fields}
        return KeyReport(
            name=key.name,
            tenant=key.tenant,
            admin=key.is_admin,
            expires=datetime.fromtimestamp(key.expires_s, UTC) if isfinite(key.expires_s) else None,
            live_programs_count=self._quotas.programs_count(key.name),
            revocable=is_filed,
            **limits,
        )
