"""A file of keys with names, expiry and limits, which may change while the proxy runs.

It is JSON: {"keys": [{"name": "ci", "sha256": "...", "expires": "2027-01-01T00:00:00Z", "turns_per_min": 60}]}. To
change it, write another file and rename that, so that nobody reads half of it. The proxy reads it again when it has
changed; an invalid file changes nothing, and is logged.

A key that is revoked over the API is out at once, whatever becomes of the file. If that cannot be written, the key
stays out while this process runs, and the file is tried again until it is.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from thunderagent.errors import ConfigurationError, KeyExistsError, NotFoundError
from thunderagent.faults import faults_of, fields_at
from thunderagent.proxy.gate.keys.keyring import NAME, Key, KeyLimits, Keyring, digest_of, mint_key

log = structlog.get_logger("thunderagent.keys")

LOOK_INTERVAL_S = 2.0
PRIVATE_MODE = 0o600


def _in_utc(expires: datetime) -> datetime:
    """Return a time in UTC, in whole seconds, as a key keeps it. Raises ValueError outside of the years 1 to 9999."""
    try:
        return expires.astimezone(UTC).replace(microsecond=0)  # as seconds, the last one's parts would round up
    except OverflowError as error:
        raise ValueError("it is outside of the years 1 to 9999") from error


Expiry = Annotated[AwareDatetime, AfterValidator(_in_utc)]
_Rate = Annotated[float | None, Field(ge=1e-6, le=1e12, allow_inf_nan=False)]
_Total = Annotated[int | None, Field(ge=1, le=10**15)]
_Count = Annotated[int | None, Field(ge=1, le=10**9)]


class KeyLimitsEntry(BaseModel):
    """What a key may use; null is no limit of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns_per_min: _Rate = Field(None, description="turns that may begin in a minute; more wait")
    tokens_per_min: _Rate = Field(None, description="prompt and output tokens in a minute; turns wait past that")
    programs_count: _Count = Field(None, description="programs of this key that live at a time; more get 429")
    held_turns_count: _Count = Field(None, description="turns of this key that wait for a lease; more get 429")
    program_max_turns: _Count = Field(None, description="turns of each of its programs; further ones get 410")
    program_max_tokens: _Total = Field(None, description="tokens of prompts and answers of each; then 410")
    program_max_age_s: _Rate = Field(None, description="age of each, in seconds; then its turns get 410")
    program_deadline_s: _Rate = Field(None, description="deadline of each, in seconds after its first turn arrived")


class KeyEntry(KeyLimitsEntry):
    """A key as stored in the file."""

    name: str = Field(pattern=f"^{NAME}$", description="whose it is; what stands before a slash is its tenant")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    admin: bool = False
    expires: Expiry | None = Field(None, description="from then on it lets nobody in; null is never")

    def key(self) -> Key:
        """Return the key."""
        limits = KeyLimits(**{name: getattr(self, name) for name in KeyLimitsEntry.model_fields})
        expires_s = inf if self.expires is None else self.expires.timestamp()
        return Key(self.name, bytes.fromhex(self.sha256), self.admin, expires_s, limits)


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    keys: list[KeyEntry]

    @model_validator(mode="after")
    def _names_are_unique(self) -> _Content:
        names = [entry.name for entry in self.keys]
        if len(set(names)) < len(names):
            raise ValueError("two keys have the same name")
        return self


def read_keys(path: Path) -> list[KeyEntry]:
    """Return the keys of a file. Raises `ConfigurationError`."""
    try:
        return _Content.model_validate_json(path.read_bytes()).keys
    except ValidationError as error:
        faults = faults_of(error, whole="it", known=partial(fields_at, _Content))
        raise ConfigurationError(f"keys_file: {path}: {'; '.join(faults)}") from error
    except OSError as error:
        hint = f"; `thunderagent key NAME --keys-file {path}` makes it" if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(f"keys_file: cannot read {path}: {error.strerror}{hint}") from error


def write_keys(path: Path, entries: list[KeyEntry]) -> None:
    """Replace a file, atomically and readable by its owner alone. Raises OSError."""
    rows = [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        part.unlink()
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE), "w") as file:
            file.write(json.dumps({"keys": rows}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()  # half a file takes room on a full disk
        raise


def add_key(path: Path, name: str, *, admin: bool, expires: datetime | None, limits: KeyLimitsEntry) -> str:
    """Mint a key into a file, created if needed; return the key.

    Raises `KeyExistsError`, and `ConfigurationError` for an invalid file or name.
    """
    entries = read_keys(path) if path.exists() else []
    if any(entry.name == name for entry in entries):
        raise KeyExistsError(f"there is a key {name!r} already")
    key, _ = mint_key(name)
    entry = {"name": name, "sha256": digest_of(key).hex(), "admin": admin, "expires": expires}
    try:
        write_keys(path, [*entries, KeyEntry.model_validate({**limits.model_dump(), **entry})])
    except OSError as error:
        raise ConfigurationError(f"keys_file: cannot write {path}: {error.strerror}") from error
    return key


class KeysFile:
    """Keeps a keyring in line with a file. What has begun is done to its end, because a thread cannot be cancelled."""

    def __init__(self, path: Path, keyring: Keyring) -> None:
        """Read the file. Raises `ConfigurationError`."""
        self.path = path
        self._keyring = keyring
        self._seen = self._stamp()
        self._lock = asyncio.Lock()
        self._revoked: dict[bytes, str] = {}
        """Names of revoked keys that may still be in the file, by digest."""
        keyring.set_filed(entry.key() for entry in read_keys(path))

    def __repr__(self) -> str:
        return f"<KeysFile {self.path}>"

    async def run(self) -> None:
        """Check until cancelled whether it has changed."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if self._revoked:
                await asyncio.shield(self._store_again())
            if self._stamp() != self._seen:
                await self.reload()

    async def reload(self) -> None:
        """Read it again; keep the current keys if it is invalid."""
        await asyncio.shield(self._reload())

    async def _reload(self) -> None:
        async with self._lock:
            await self._read()

    async def add(self, name: str, *, admin: bool, expires: datetime | None, limits: KeyLimitsEntry) -> str:
        """Mint a key, store it and accept it; return it. Raises `KeyExistsError`, `ConfigurationError`."""
        return await asyncio.shield(self._add(name, admin, expires, limits))

    async def _add(self, name: str, admin: bool, expires: datetime | None, limits: KeyLimitsEntry) -> str:
        async with self._lock:
            if self._keyring.named(name) is not None:
                raise KeyExistsError(f"there is a key {name!r} already")
            key = await asyncio.to_thread(lambda: add_key(self.path, name, admin=admin, expires=expires, limits=limits))
            await self._read()
            return key

    async def remove(self, name: str) -> str:
        """Revoke a key of the file, at once; return why the file could not be changed, empty if it was.

        Raises `NotFoundError`.
        """
        return await asyncio.shield(self._remove(name))

    async def _remove(self, name: str) -> str:
        revoked = [key for key in self._keyring.filed if key.name == name]
        if not revoked:
            raise NotFoundError(f"there is no key {name!r} in the file of keys")
        self._revoked.update((key.digest, name) for key in revoked)
        self._keyring.set_filed(key for key in self._keyring.filed if key.name != name)  # before anything may fail
        async with self._lock:
            try:
                await self._store_revoked()
            except ConfigurationError as error:
                with suppress(OSError):  # the log may be on the same full disk
                    log.error("keys_not_stored", why=error.message, name=name)  # noqa: TRY400 - no bug, so no trace
                return error.message
        return ""

    async def _store_again(self) -> None:
        """Take out of the file what was revoked, if that works by now."""
        async with self._lock:
            with suppress(ConfigurationError):
                await self._store_revoked()
                log.info("keys_stored")

    async def _store_revoked(self) -> None:
        """Take revoked keys out of the file. Raises `ConfigurationError`."""
        entries = await asyncio.to_thread(read_keys, self.path)
        stored = [*self._revoked]  # others may be revoked while this is written
        rest = [entry for entry in entries if not self._is_revoked(entry.key())]
        if len(rest) < len(entries):
            try:
                await asyncio.to_thread(write_keys, self.path, rest)
            except OSError as error:
                raise ConfigurationError(f"keys_file: cannot write {self.path}: {error.strerror}") from error
        for digest in stored:
            self._revoked.pop(digest, None)
        await self._read()

    def _is_revoked(self, key: Key) -> bool:
        return key.digest in self._revoked or key.name in self._revoked.values()

    async def _read(self) -> None:
        self._seen = self._stamp()
        before = {key.name: key for key in self._keyring.filed}
        try:
            entries = await asyncio.to_thread(read_keys, self.path)
            keys = [entry.key() for entry in entries]
            self._keyring.set_filed(key for key in keys if not self._is_revoked(key))
        except ConfigurationError as error:
            log.error("keys_not_reloaded", why=error.message)  # noqa: TRY400 - no bug, so no trace
            return
        after = {key.name: key for key in self._keyring.filed}
        changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
        log.info(
            "keys_reloaded",
            added=sorted(after.keys() - before.keys()),
            revoked=sorted(before.keys() - after.keys()),
            changed=sorted(changed),
        )

    def _stamp(self) -> tuple[int, int, int] | None:
        """Return what distinguishes versions of the file; None while there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def expires_of(text: str, now: datetime | None = None) -> datetime:
    """Parse `30d`, `12h` or a date with or without a time, as 2027-01-01T00:00:00Z; return it in UTC.

    Raises `ConfigurationError`, also outside of the years 1 to 9999.
    """
    number, unit = text[:-1], text[-1:]
    try:
        if number.isascii() and number.isdigit() and unit in ("d", "h"):
            seconds = int(number) * (86_400 if unit == "d" else 3_600)
            return datetime.fromtimestamp((now or datetime.now(UTC)).timestamp() + seconds, UTC).replace(microsecond=0)
        expires = datetime.fromisoformat(text)
        return _in_utc(expires if expires.tzinfo is not None else expires.replace(tzinfo=UTC))
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{text!r} is not a time, such as 30d, 12h or 2027-01-01T00:00:00Z") from error
