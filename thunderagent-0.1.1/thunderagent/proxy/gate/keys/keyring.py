"""Which key a request has, and whether it is accepted.

Keys are random, so one round of SHA-256 is enough to hide them; each is compared in constant time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from math import inf
from secrets import token_urlsafe

from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

from thunderagent.errors import AdminKeyNeededError, ConfigurationError, KeyNeededError
from thunderagent.programs.messages import ProgramLimits

KEY_HEADER = "X-ThunderAgent-Key"
"""Our own header: a client that uses it keeps `Authorization` for the engine."""

COOKIE = "thunderagent_login"
"""Where a browser keeps its login for an admin key. A key itself is never read from a cookie."""

KEY_PREFIX = "tak_"
_PART = r"(?:[A-Za-z0-9_@-][A-Za-z0-9_.@-]{0,63}|\.[A-Za-z0-9_@-][A-Za-z0-9_.@-]{0,62}|\.\.[A-Za-z0-9_.@-]{1,62})"
NAME = rf"{_PART}(?:/{_PART})?"
"""Of a key. Each part has at most 64 characters, and is no `.` or `..`: no path could name such a key to revoke it."""
_LINE = re.compile(rf"(?P<name>{NAME}):sha256:(?P<digest>[0-9a-f]{{64}})")
_KEY: ContextVar[Key | None] = ContextVar("key", default=None)
"""The key of the current request; aiohttp handles each in a context of its own."""
_MAY_ALL: ContextVar[bool] = ContextVar("may_all", default=True)
"""Whether that request may do what needs an admin key: it has one, or there are no keys."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use; None is no limit of its own."""

    turns_per_min: float | None = None
    tokens_per_min: float | None = None
    programs_count: int | None = None
    """Programs that live at a time."""
    held_turns_count: int | None = None
    """Turns that wait for a lease at a time."""
    program_max_turns: int | None = None
    program_max_tokens: int | None = None
    program_max_age_s: float | None = None
    program_deadline_s: float | None = None
    """Limits of each of its programs; so are those before."""

    @property
    def program(self) -> ProgramLimits | None:
        """What each of its programs may use; None if nothing limits that."""
        limits = (self.program_max_turns, self.program_max_tokens, self.program_max_age_s, self.program_deadline_s)
        return None if limits == (None, None, None, None) else ProgramLimits(*limits)


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """A key by its hash; `name` says whose it is."""

    name: str
    digest: bytes
    is_admin: bool
    expires_s: float = inf
    """Unix time from which on it is no longer accepted."""
    limits: KeyLimits = NO_LIMITS

    @property
    def tenant(self) -> str:
        """Its owner: the name, or the part before a slash if the tenant has several keys."""
        return self.name.partition("/")[0]


def mint_key(name: str) -> tuple[str, str]:
    """Return a new key and its line for the configuration. Raises `ConfigurationError` for an invalid name."""
    key = KEY_PREFIX + token_urlsafe(32)
    line = f"{name}:sha256:{digest_of(key).hex()}"
    _read_line(line, is_admin=False)
    return key, line


def digest_of(text: str) -> bytes:
    """Return the hash by which a key is known."""
    return sha256(text.encode("utf-8", "surrogateescape")).digest()


def _read_line(line: str, *, is_admin: bool) -> Key:
    match = _LINE.fullmatch(line)
    if match is None:  # the line is not repeated: it may be a key, by mistake
        raise ConfigurationError("a key must be NAME:sha256:HEX, as `thunderagent key NAME` prints it")
    return Key(match["name"], bytes.fromhex(match["digest"]), is_admin)


class Keyring:
    """The accepted keys: those of the configuration, and those of a file, which may change."""

    def __init__(
        self,
        data_lines: Iterable[str] = (),
        admin_lines: Iterable[str] = (),
        *,
        has_file: bool = False,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read lines of the configuration. Raises `ConfigurationError` for an invalid line or a repeated name.

        With a file of keys (`has_file`) keys are required, even while it is empty.
        """
        self.keys: tuple[Key, ...] = ()
        """All of them, including expired ones."""
        self.filed: tuple[Key, ...] = ()
        """Those of the file."""
        self._lined: tuple[Key, ...] = ()
        self._has_file = has_file
        self._wall_clock = wall_clock
        self.set_lines(data_lines, admin_lines)

    def __repr__(self) -> str:
        return f"<Keyring: {', '.join(key.name for key in self.keys) or 'no key'}>"

    def __bool__(self) -> bool:
        return self._has_file or bool(self._lined)

    @property
    def has_data_keys(self) -> bool:
        """Whether data needs a key."""
        return self._has_file or any(not key.is_admin for key in self._lined)

    @property
    def has_several_data_keys(self) -> bool:
        """Whether keys share what there is."""
        return sum(not key.is_admin for key in self.keys) > 1

    @property
    def has_admin_keys(self) -> bool:
        """Whether anybody may call the admin API."""
        return any(key.is_admin for key in self.keys)

    def set_lines(self, data_lines: Iterable[str], admin_lines: Iterable[str]) -> None:
        """Replace the lines of the configuration. Raises `ConfigurationError`, changing nothing."""
        lined = [_read_line(line, is_admin=False) for line in data_lines]
        lined += [_read_line(line, is_admin=True) for line in admin_lines]
        self._take(tuple(lined), self.filed)

    def set_filed(self, keys: Iterable[Key]) -> None:
        """Replace the keys of the file. Raises `ConfigurationError`, changing nothing."""
        self._take(self._lined, tuple(keys))

    def _take(self, lined: tuple[Key, ...], filed: tuple[Key, ...]) -> None:
        keys = lined + filed
        if len({key.name for key in keys}) < len(keys):
            raise ConfigurationError("two keys have the same name")
        self._lined, self.filed, self.keys = lined, filed, keys

    def named(self, name: str) -> Key | None:
        """Return the key of a name, expired or not."""
        return next((key for key in self.keys if key.name == name), None)

    def still(self, key: Key | None) -> Key | None:
        """Return a key's current state: None if it was revoked or has expired."""
        return None if key is None else self._by_digest(key.digest)

    def find(self, text: str) -> Key | None:
        """Return the key for a text, if any. Costs the same for every text, and grows with the number of keys."""
        return self._by_digest(digest_of(text))

    def _by_digest(self, digest: bytes) -> Key | None:
        found = self._expired_or_not(digest)
        return found if found is None or self._wall_clock() < found.expires_s else None

    def _expired_or_not(self, digest: bytes) -> Key | None:
        found = None
        for key in self.keys:
            if compare_digest(key.digest, digest):
                found = key
        return found

    def key_of(self, headers: CIMultiDictProxy[str]) -> Key | None:
        """Return the key of a request: in our own header, or otherwise in any of those that clients use."""
        own = headers.get(KEY_HEADER)
        texts = [own] if own is not None else _usual_texts(headers)
        for text in texts:
            if (key := self.find(text)) is not None:
                return key
        return None

    def take_out(self, headers: CIMultiDict[str]) -> None:
        """Remove all of our keys from headers that go to an engine."""
        headers.popall(KEY_HEADER, None)
        for name in ("Authorization", "X-API-Key"):
            texts = headers.getall(name, ())
            if any(self._is_ours(_bearer(text)) for text in texts):
                headers.popall(name)
        if any(name == COOKIE for name, _ in cookies_of(headers)):
            cookies = [each.strip() for text in headers.popall("Cookie") for each in text.split(";")]
            if rest := "; ".join(each for each in cookies if each.partition("=")[0].strip() != COOKIE):
                headers["Cookie"] = rest

    def _is_ours(self, text: str) -> bool:
        """Return whether a text is one of our keys, or was one when its request came."""
        digest, key = digest_of(text), _KEY.get()
        return self._expired_or_not(digest) is not None or (key is not None and compare_digest(key.digest, digest))


def _usual_texts(headers: CIMultiDictProxy[str]) -> list[str]:
    return [_bearer(text) for name in ("X-API-Key", "Authorization") for text in headers.getall(name, ())]


def _bearer(text: str) -> str:
    scheme, _, rest = text.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else text


def cookies_of(headers: MultiMapping[str]) -> Iterator[tuple[str, str]]:
    """Yield the cookies of a request, of all its headers, by name."""
    for text in headers.getall("Cookie", ()):
        for each in text.split(";"):
            name, _, value = each.partition("=")
            yield name.strip(), value.strip().strip('"')


def check_key(key: Key | None, keyring: Keyring, *, for_admin: bool) -> None:
    """Check that a request with this key may continue. Raises `KeyNeededError` (401), `AdminKeyNeededError` (403)."""
    _KEY.set(key)
    _MAY_ALL.set(key is not None and key.is_admin)
    if key is None:
        if not for_admin and not keyring.has_data_keys:
            return
        if for_admin and not keyring.has_admin_keys:
            raise AdminKeyNeededError("this needs an admin key, and none is configured")
        raise KeyNeededError(
            f"send a key of this proxy as Authorization: Bearer, X-API-Key or {KEY_HEADER}; there was none, or it is "
            f"unknown, or has expired"
        )
    if not key.is_admin and for_admin:
        raise AdminKeyNeededError("this needs an admin key; the request has a data key")


caller_key: Callable[[], Key | None] = _KEY.get
"""Returns the key of the current request; None if it has none."""


def check_admin() -> None:
    """Check, in a handler that accepts data keys, for an admin key. Raises as `check_key` does."""
    if _MAY_ALL.get():
        return
    why = "what concerns every program needs an admin key"
    raise KeyNeededError(why) if _KEY.get() is None else AdminKeyNeededError(f"{why}; the request has a data key")
