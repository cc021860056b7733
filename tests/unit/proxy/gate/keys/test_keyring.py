"""Keys in headers: found where clients put them, removed before an engine sees them."""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import replace

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from thunderagent.errors import ConfigurationError
from thunderagent.proxy.gate.guard import Outgoing
from thunderagent.proxy.gate.keys import Keyring, check_key, mint_key
from thunderagent.proxy.gate.login import LIFETIME_S, MAX_COUNT, Logins

DATA_KEY, DATA_LINE = mint_key("app")
ADMIN_KEY, ADMIN_LINE = mint_key("ops")
KEYRING = Keyring([DATA_LINE], [ADMIN_LINE])


def found(**headers: str) -> str | None:
    given = CIMultiDictProxy(CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}))
    key = KEYRING.key_of(given)
    return key and key.name


def mended(outgoing: Outgoing, **headers: str) -> dict[str, str]:
    given = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    outgoing.mend(given)
    outgoing.mend(given)  # a retry of the same turn
    return dict(given)


def test_a_key_is_random_and_its_line_does_not_tell_it() -> None:
    """The configuration's line does not give access."""
    key, line = mint_key("app")
    assert key not in line
    assert key != DATA_KEY
    assert len(key) > 40
    assert Keyring([line]).find(line.rpartition(":")[2]) is None
    assert Keyring([line]).find(key) is not None


def test_a_key_is_found_where_clients_put_it() -> None:
    """OpenAI's clients, Anthropic's, our own header, and a browser's cookie have it in different places."""
    assert found(Authorization=f"Bearer {DATA_KEY}") == "app"
    assert found(Authorization=f"bearer  {ADMIN_KEY}") == "ops"
    assert found(x_api_key=DATA_KEY) == "app"
    assert found(X_ThunderAgent_Key=DATA_KEY, Authorization="Bearer sk-of-the-engine") == "app"
    assert found(x_api_key="sk-of-the-engine", Authorization=f"Bearer {DATA_KEY}") == "app"


def test_invalid_key_finds_none() -> None:
    """Rubbish is no error, and if our own header is there, only it counts."""
    assert found() is None
    assert found(Authorization="Basic dTpw") is None
    assert found(Authorization="Bearer \udce9") is None
    assert found(Cookie=f"thunderagent_login={ADMIN_KEY}; thunderagent_key={ADMIN_KEY}") is None
    assert found(X_ThunderAgent_Key="wrong", Authorization=f"Bearer {DATA_KEY}") is None


LINES = ["", "app", "app:md5:00", "app:sha256:xyz", f"a b:sha256:{'0' * 64}", DATA_KEY]


@pytest.mark.parametrize("line", LINES, ids=["nothing", "name", "md5", "no hash", "two names", "key"])
def test_a_line_that_is_none_is_refused_and_not_repeated(line: str) -> None:
    """It may be a key that was put there by mistake."""
    with pytest.raises(ConfigurationError, match="NAME:sha256:HEX") as error:
        Keyring([line])
    assert not line or line not in str(error.value).split()


def test_a_name_comes_once() -> None:
    """A key's name in a log is unambiguous."""
    with pytest.raises(ConfigurationError, match="same name"):
        Keyring([DATA_LINE], [mint_key("app")[1]])


def test_no_key_of_ours_reaches_an_engine() -> None:
    """It is removed wherever it was; all else stays."""
    outgoing = Outgoing(KEYRING)
    assert mended(outgoing, Authorization=f"Bearer {DATA_KEY}", Accept="*/*") == {"Accept": "*/*"}
    assert mended(outgoing, X_API_Key=ADMIN_KEY) == {}
    assert mended(outgoing, Cookie="a=b; thunderagent_login=x") == {"Cookie": "a=b"}
    assert mended(outgoing, Cookie="thunderagent_login=x") == {}
    kept = mended(outgoing, X_ThunderAgent_Key=DATA_KEY, Authorization="Bearer sk-of-the-engine")
    assert kept == {"Authorization": "Bearer sk-of-the-engine"}


def test_a_key_that_ended_while_its_turn_was_held_does_not_reach_an_engine() -> None:
    """It expired, or was revoked."""
    keyring, theirs = Keyring(has_file=True), {"Authorization": "Bearer sk-configured"}
    outgoing = Outgoing(keyring, "sk-configured")
    key = replace(KEYRING.keys[0], expires_s=0.0)
    keyring.set_filed([key])
    assert mended(outgoing, Authorization=f"Bearer {DATA_KEY}") == theirs
    keyring.set_filed([])
    asked = copy_context()
    asked.run(check_key, key, keyring, for_admin=False)
    assert asked.run(mended, outgoing, Authorization=f"Bearer {DATA_KEY}") == theirs


def test_engines_get_the_key_that_is_configured_for_them() -> None:
    """If the client sends ours in another header, its own key for the engine stays."""
    theirs = {"Authorization": "Bearer sk-configured"}
    outgoing = Outgoing(KEYRING, "sk-configured")
    assert mended(outgoing, Authorization=f"Bearer {DATA_KEY}") == theirs
    assert mended(outgoing) == theirs
    assert mended(outgoing, X_ThunderAgent_Key=DATA_KEY, Authorization="Bearer own")["Authorization"] == "Bearer own"
    assert mended(Outgoing(Keyring(), "sk-configured"), Authorization="Bearer EMPTY") == theirs
    assert mended(Outgoing(Keyring()), Authorization="Bearer own") == {"Authorization": "Bearer own"}


@pytest.mark.parametrize(
    ("name", "tenant"),
    [("lab", "lab"), ("lab/2026", "lab"), ("a@b.org", "a@b.org"), (".a/...", ".a"), ("a" * 64, "a" * 64)],
)
def test_a_key_names_its_tenant(name: str, tenant: str) -> None:
    """The tenant is its name, or the part before a slash: several keys may belong to one tenant."""
    key, line = mint_key(name)
    found_key = Keyring([line]).find(key)
    assert found_key is not None
    assert (found_key.name, found_key.tenant) == (name, tenant)


@pytest.mark.parametrize("name", ["a/b/c", "/a", "a/", ".", "..", "../a", "a/..", "a/.", "a" * 65])
def test_a_name_has_one_slash_with_words_around_it(name: str) -> None:
    """A word is no segment of a path that means another one: `DELETE /keys/..` would name no key."""
    with pytest.raises(ConfigurationError):
        mint_key(name)


class Clock:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_login_ends_with_its_time_and_is_not_the_key() -> None:
    """A browser sends its cookies to every port of a host, so a login is worth little, and not for long."""
    clock, key = Clock(), KEYRING.find(ADMIN_KEY)
    assert key is not None
    logins = Logins(clock)
    token = logins.begin(key)
    assert ADMIN_KEY not in token
    cookies = CIMultiDictProxy(CIMultiDict([("Cookie", "a=b"), ("Cookie", f'x; thunderagent_login="{token}"')]))
    assert logins.key_of(cookies) is key
    assert logins.key_of(CIMultiDictProxy(CIMultiDict({"Cookie": f"thunderagent_login={token}x"}))) is None
    assert logins.key_of(CIMultiDictProxy(CIMultiDict({**cookies, "X-ThunderAgent-Key": "wrong"}))) is None
    clock.now_s = LIFETIME_S
    assert logins.key_of(cookies) is None
    assert logins.begin(key) != token
    assert len(logins) == 1  # the expired one is forgotten


def test_remembered_logins_are_bounded() -> None:
    """The oldest is forgotten first."""
    key = KEYRING.find(ADMIN_KEY)
    assert key is not None
    logins = Logins(Clock())
    tokens = [logins.begin(key) for _ in range(MAX_COUNT + 1)]
    assert len(logins) == MAX_COUNT
    known = [logins.key_of(CIMultiDictProxy(CIMultiDict({"Cookie": f"thunderagent_login={each}"}))) for each in tokens]
    assert [key is None for key in known] == [True, *([False] * MAX_COUNT)]
