"""The file of keys: its contents and changes; a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import stat
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from thunderagent.errors import ConfigurationError, KeyExistsError, NotFoundError
from thunderagent.proxy.gate.keys import KeyLimits, Keyring, mint_key
from thunderagent.proxy.gate.keys.file import KeyLimitsEntry, KeysFile, add_key, expires_of, read_keys, write_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NONE = KeyLimitsEntry()


def test_a_key_is_added_with_its_expiry_and_limits(tmp_path: Path) -> None:
    """The new file is its owner's alone, and has no key, only the data to recognise one."""
    path = tmp_path / "keys.json"
    until = datetime(2027, 1, 1, tzinfo=UTC)
    key = add_key(
        path, "acme/ci", admin=False, expires=until, limits=KeyLimitsEntry(turns_per_min=60, programs_count=8)
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    (entry,) = read_keys(path)
    assert entry.key().limits == KeyLimits(turns_per_min=60, programs_count=8)
    assert entry.key().expires_s == until.timestamp()
    keyring = Keyring(has_file=True, wall_clock=lambda: until.timestamp() - 1)
    keyring.set_filed([entry.key()])
    found = keyring.find(key)
    assert found is not None
    assert found.tenant == "acme"
    with pytest.raises(KeyExistsError):
        add_key(path, "acme/ci", admin=True, expires=None, limits=NONE)


def test_a_key_lets_nobody_in_once_it_has_expired(tmp_path: Path) -> None:
    """It ends in that very second, without a reload."""
    path, now_s = tmp_path / "keys.json", 1_000_000.0
    key = add_key(path, "ci", admin=False, expires=datetime.fromtimestamp(now_s + 10, UTC), limits=NONE)
    keyring = Keyring(has_file=True, wall_clock=lambda: now_s)
    KeysFile(path, keyring)
    held = keyring.find(key)
    assert held is not None
    assert keyring.still(held) is held
    now_s += 10
    assert keyring.find(key) is None
    assert keyring.still(held) is None


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    """With a key file keys are required, whatever its contents."""
    path = tmp_path / "keys.json"
    path.write_text('{"keys": []}')
    keyring = Keyring(has_file=True)
    KeysFile(path, keyring)
    assert (bool(keyring), keyring.has_data_keys, keyring.has_admin_keys) == (True, True, False)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"keys": [{"name": "a b", "sha256": "%s"}]}' % ("0" * 64), "keys.0.name"),
        ('{"keys": [{"name": "a", "sha256": "12"}]}', "keys.0.sha256"),
        ('{"keys": [{"name": "a", "sha256": "%s", "turns": 1}]}' % ("0" * 64), "keys.0.turns"),
        ('{"keys": [{"name": "a", "sha256": "%s", "turns_per_min": 0}]}' % ("0" * 64), "keys.0.turns_per_min"),
        (
            '{"keys": [{"name": "a", "sha256": "%s", "turn_per_min": 6}]}' % ("0" * 64),
            "keys.0.turn_per_min: there is no such key; did you mean turns_per_min",
        ),
        ('{"keys": [{"name": "a", "sha256": "%s", "turns_per_min": 1e-323}]}' % ("0" * 64), "keys.0.turns_per_min"),
        ('{"keys": [{"name": "a", "sha256": "%s", "tokens_per_min": Infinity}]}' % ("0" * 64), "keys.0.tokens_per_min"),
        ('{"keys": [{"name": "a", "sha256": "%s", "expires": "2027-01-01T00:00:00"}]}' % ("0" * 64), "timezone"),
        (
            '{"keys": [{"name": "a", "sha256": "%s", "expires": "9999-12-31T23:59:59-12:00"}]}' % ("0" * 64),
            "outside of the years",
        ),
        (json.dumps({"keys": [{"name": "a", "sha256": "0" * 64}] * 2}), "two keys have the same name"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str, why: str, tmp_path: Path) -> None:
    """The error has the place, but not the text there: it may be a key, by mistake."""
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="keys_file: ") as refused:
        read_keys(path)
    assert why in refused.value.message


@pytest.mark.parametrize(
    ("limit", "most"),
    [("programs_count", 10**9), ("held_turns_count", 10**9), ("turns_per_min", 10**12), ("tokens_per_min", 10**12)],
)
def test_a_limit_has_a_bound(limit: str, most: int) -> None:
    """One beyond it is a mistake, and no number that arithmetic takes."""
    assert KeyLimitsEntry(**{limit: most})
    for absurd in (most + 1, 10**400, 0, -1):
        with pytest.raises(ValidationError):
            KeyLimitsEntry(**{limit: absurd})


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00Z"])
def test_a_key_may_expire_in_any_year(text: str, tmp_path: Path) -> None:
    """The end of the last one, for one, means never. Its seconds are a time again."""
    path, expires = tmp_path / "keys.json", datetime.fromisoformat(text).replace(microsecond=0)
    path.write_text(json.dumps({"keys": [{"name": "a", "sha256": "0" * 64, "expires": text}]}))
    (entry,) = read_keys(path)
    assert entry.expires == expires_of(text) == datetime.fromtimestamp(entry.key().expires_s, UTC) == expires


async def test_changes_of_the_file_are_taken_over_and_reported(tmp_path: Path) -> None:
    """Keys are added, revoked, or get other limits; a wrong or missing file leaves all as it was."""
    path, keyring = tmp_path / "keys.json", Keyring([mint_key("lined")[1]], has_file=True)
    gone = add_key(path, "gone", admin=False, expires=None, limits=NONE)
    kept = add_key(path, "kept", admin=False, expires=None, limits=NONE)
    file = KeysFile(path, keyring)
    entries = json.loads(path.read_text())["keys"]
    path.write_text(json.dumps({"keys": [{**entries[1], "turns_per_min": 6}]}))
    added = add_key(path, "new", admin=True, expires=None, limits=NONE)
    with capture_logs() as logs:
        await file.reload()
    (line,) = logs
    told = line["event"], line["added"], line["revoked"], line["changed"]
    assert told == ("keys_reloaded", ["new"], ["gone"], ["kept"])
    found = keyring.find(kept)
    assert (keyring.find(gone), keyring.has_admin_keys) == (None, True)
    assert found is not None
    assert found.limits.turns_per_min == 6
    for spoil in (lambda: path.write_text("{"), path.unlink):
        spoil()
        with capture_logs() as logs:
            await file.reload()
        assert [each["event"] for each in logs] == ["keys_not_reloaded"]
        assert keyring.find(added) is not None


async def test_keys_are_added_and_removed_at_once(tmp_path: Path) -> None:
    """This is done in the file and in memory; a name of the configuration is taken, and cannot be removed."""
    path, keyring = tmp_path / "keys.json", Keyring([mint_key("lined")[1]], has_file=True)
    path.write_text('{"keys": []}')
    file = KeysFile(path, keyring)
    key = await file.add("ci", admin=False, expires=None, limits=NONE)
    assert keyring.find(key) is not None
    for name in ("ci", "lined"):
        with pytest.raises(KeyExistsError):
            await file.add(name, admin=False, expires=None, limits=NONE)
    await file.remove("ci")
    assert keyring.find(key) is None
    assert read_keys(path) == []
    for name in ("ci", "lined"):
        with pytest.raises(NotFoundError):
            await file.remove(name)
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def no_room() -> Iterator[None]:
    """Let nothing be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_key_is_revoked_on_a_full_disk(tmp_path: Path) -> None:
    """The answer says that it is not stored. It stays out whatever happens to the file, and goes when there is room."""
    path, keyring = tmp_path / "keys.json", Keyring(has_file=True)
    key, other = (add_key(path, name, admin=False, expires=None, limits=NONE) for name in ("ci", "other"))
    file = KeysFile(path, keyring)
    with no_room(), capture_logs() as logs:
        assert "cannot write" in await file.remove("ci")
        assert keyring.find(key) is None
        assert list(tmp_path.iterdir()) == [path], "half a file takes room"
        await file.reload()
        assert keyring.find(key) is None
    assert logs[0]["event"] == "keys_not_stored"
    assert [entry.name for entry in read_keys(path)] == ["ci", "other"]
    path.touch()
    await file.reload()
    assert (keyring.find(key), keyring.find(other) is not None) == (None, True)
    running = asyncio.create_task(file.run())
    async with asyncio.timeout(30):
        while [entry.name for entry in read_keys(path)] != ["other"]:
            await asyncio.sleep(0.05)
    running.cancel()
    again = await file.add("ci", admin=False, expires=None, limits=NONE)
    assert (keyring.find(key), keyring.find(again) is not None) == (None, True)


async def test_a_change_is_made_to_its_end_though_its_caller_leaves(tmp_path: Path) -> None:
    """The next one waits for it; otherwise what it wrote late would undo that."""
    path = tmp_path / "keys.json"
    add_key(path, "old", admin=False, expires=None, limits=NONE)
    content, keyring = path.read_bytes(), Keyring(has_file=True)
    file = KeysFile(path, keyring)
    path.unlink()
    os.mkfifo(path)
    adding = asyncio.create_task(file.add("new", admin=False, expires=None, limits=NONE))
    async with asyncio.timeout(5):
        while (pipe := _opened_for_writing(path)) is None:
            await asyncio.sleep(0.001)
    with os.fdopen(pipe, "wb") as writer:
        path.unlink()
        path.write_bytes(content)  # only the addition reads from the pipe, and still waits for that
        adding.cancel()
        removing = asyncio.create_task(file.remove("old"))
        await asyncio.wait([adding, removing], timeout=0.1)
        assert (adding.cancelled(), removing.done()) == (True, False)
        writer.write(content)
    await removing
    assert [entry.name for entry in read_keys(path)] == [key.name for key in keyring.filed] == ["new"]


async def test_key_revoked_while_another_is_written_stays_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    for name in ("a", "b"):
        add_key(path, name, admin=False, expires=None, limits=NONE)
    keyring = Keyring(has_file=True)
    file = KeysFile(path, keyring)
    writes, may_write = threading.Event(), threading.Event()

    def write(*given: Any) -> None:
        writes.set()
        may_write.wait(30)
        write_keys(*given)

    monkeypatch.setattr("thunderagent.proxy.gate.keys.file.write_keys", write)
    first = asyncio.create_task(file.remove("a"))
    while not writes.is_set():
        await asyncio.sleep(0)
    second = asyncio.create_task(file.remove("b"))
    await asyncio.sleep(0)
    may_write.set()
    assert (await first, await second) == ("", "")
    assert read_keys(path) == list(keyring.filed) == []


def _opened_for_writing(pipe: Path) -> int | None:
    """Open a pipe if somebody reads from it."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


@pytest.mark.parametrize(
    ("text", "expires"),
    [
        ("30d", "2026-01-31T00:00:00+00:00"),
        ("12h", "2026-01-01T12:00:00+00:00"),
        ("2027-01-01", "2027-01-01T00:00:00+00:00"),
        ("2027-01-01T08:00:00+02:00", "2027-01-01T06:00:00+00:00"),
    ],
)
def test_an_expiry_is_a_time_or_how_long_from_now(text: str, expires: str) -> None:
    assert expires_of(text, datetime(2026, 1, 1, tzinfo=UTC)).isoformat() == expires


@pytest.mark.parametrize(
    "text",
    [
        "",
        "d",
        "soon",
        "-3d",
        "1.5h",
        "2027-13-01",
        "9999999d",
        pytest.param("9" * 400 + "h", id="long"),
        "0001-01-01T00:00:00+12:00",
    ],
)
def test_invalid_expiry_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a time, such as"):
        expires_of(text)
