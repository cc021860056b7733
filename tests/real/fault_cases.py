"""The faults that a cell must survive, and which of their effects its clients may see."""

from __future__ import annotations

import asyncio
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.debian import install
from tests.real.fault_rig import KEYS, LOCK_S, Rig
from thunderagent.programs.messages import ProgramRecord
from thunderagent.scale.leader.kept import At, Begins, Whole, encode_record, entry_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import NoReturn

    from tests.real.fault_load import Load
    from tests.real.silent_link import Way

KEPT_PROGRAMS_COUNT = 100_000
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


class Moment(NamedTuple):
    """The inputs of a fault."""

    rig: Rig
    load: Load
    seconds: float
    """Duration of the case."""


class Case(NamedTuple):
    """A fault case."""

    kind: str
    name: str
    make: Callable[[Moment], Awaitable[None]]
    before: Callable[[Rig, Callable[[str], NoReturn]], None] = lambda _rig, _give_up: None
    """Called when no process but the store has started."""
    may_fail: bool = False
    """Whether clients may see errors: a process that carries or answers their turns is killed."""
    may_lose: bool = False
    """Whether turns may be left uncounted: the store and the leader fail together."""


# --- crash


async def who(rig: Rig, name: str) -> str:
    """Return the process that is `leader` or `standby`, or a random one of a kind."""
    if name == "leader":
        return await rig.leader()
    if name == "standby":
        return await rig.standby()
    if name == "redis":
        return name
    return rig.random.choice(rig.gateways if name == "gateway" else sorted(rig.engines))


async def crash(moment: Moment, *names: str) -> None:
    """Kill several processes at once."""
    for name in [await who(moment.rig, each) for each in names]:
        moment.rig.kill(name)


async def crash_in_resync(moment: Moment) -> None:
    """Kill the leader, and the next one as soon as it leads: during the resync of gateways and leader."""
    rig = moment.rig
    first, second = await rig.leader(), await rig.standby()
    rig.kill(first, back_s=2.0)
    assert await rig.leader() == second
    rig.kill(second)


async def crash_in_snapshot(moment: Moment) -> None:
    """Kill the leader when it finds that the store lost its epoch, and writes everything again."""
    rig = moment.rig
    leader = await rig.leader()
    rig.store("DEL", f"{KEYS}epoch")
    while rig.store("EXISTS", f"{KEYS}epoch").strip() != "1":
        await asyncio.sleep(0.005)
    rig.kill(leader)


async def crash_twice(moment: Moment) -> None:
    """Kill the leader, and the next leader, within the lifetime of a lock."""
    rig = moment.rig
    for _ in range(2):
        rig.kill(await rig.leader(), back_s=0.1)
        await asyncio.sleep(LOCK_S / 4)


# --- pause


async def pause(moment: Moment, name: str, for_s: float) -> None:
    """Stop a process, and resume it."""
    await moment.rig.pause(await who(moment.rig, name), for_s)


# --- partition


async def partition(moment: Moment, between: str, ways: tuple[Way, ...], heal_s: float) -> None:
    """Make links drop data silently; then heal them."""
    rig = moment.rig
    leader = await rig.leader()
    links = {
        "leader-redis": [rig.to_store[leader]],
        "leader-gateways": [rig.leases[name, leader] for name in rig.gateways],
        "standby-leader": [rig.watches[leader]],
    }
    await rig.silence(links[between], ways, min(heal_s, moment.seconds))


# --- clock


def has_faketime(give_up: Callable[[str], NoReturn]) -> None:
    """Install libfaketime if it is missing; give up if that fails."""
    if not FAKETIME.exists() and (why_not := install("faketime")):
        give_up(why_not)


def steps(name: str, rig: Rig, give_up: Callable[[str], NoReturn]) -> None:
    """Give a process an adjustable wall clock."""
    has_faketime(give_up)
    file = rig.redis.folder / "wall_clock"
    file.write_text("+0\n")
    rig.settings[name] = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


async def step(moment: Moment, name: str) -> None:
    """Set that clock an hour ahead, then an hour back; kill the leader in between, so that clocks are compared."""
    rig = moment.rig
    file = rig.redis.folder / "wall_clock"
    for hours in (1, -1):
        file.write_text(f"{hours * 3600:+d}\n")
        await asyncio.sleep(moment.seconds / 5)
        if name.startswith("scheduler"):
            await rig.until_followed()
            rig.kill(await rig.leader())


def apart(rig: Rig, give_up: Callable[[str], NoReturn]) -> None:
    """Set one scheduler's monotonic clock a day ahead of the other's."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        give_up("a time namespace needs root and unshare")
    day = ("--monotonic", "86400", "--boottime", "86400")
    rig.scheduler_within["scheduler1"] = ("unshare", "--time", *day, "--fork", "--kill-child")


async def hand_to_and_fro(moment: Moment) -> None:
    """Make each of the two schedulers take over from the other."""
    for _ in range(2):
        await moment.rig.until_followed()
        moment.rig.kill(await moment.rig.leader())
        await asyncio.sleep(moment.seconds / 5)


# --- data


async def flush(moment: Moment) -> None:
    """Make the store lose all data."""
    moment.rig.store("FLUSHALL")


async def flush_and_crash(moment: Moment) -> None:
    """Make the store lose all data, and kill both schedulers: only the gateways have state left."""
    moment.rig.store("FLUSHALL")
    for name in moment.rig.watches:
        moment.rig.kill(name)


async def truncate(moment: Moment) -> None:
    """Kill the store, cut off half of its data, and start it."""
    rig = moment.rig
    rig.kill("redis", back_s=None)
    (kept,) = rig.redis.folder.glob("appendonlydir/*.incr.aof")
    os.truncate(kept, kept.stat().st_size // 2)
    await rig.start("redis")


async def lose_epoch(moment: Moment) -> None:
    """Delete the epoch in the store."""
    moment.rig.store("DEL", f"{KEYS}epoch")


async def trim(moment: Moment) -> None:
    """Stop the standby; make the leader write everything again and trim the log before that; kill the leader."""
    rig = moment.rig
    standby = await rig.standby()
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.pause(standby, 2 * LOCK_S))
        await asyncio.sleep(0.2)
        first = rig.store("XRANGE", f"{KEYS}log", "-", "+", "COUNT", "1").split()[0]
        rig.store("DEL", f"{KEYS}epoch")
        async with asyncio.timeout(30):
            while rig.store("XRANGE", f"{KEYS}log", "-", "+", "COUNT", "1").split()[0] == first:
                await asyncio.sleep(0.02)
    rig.kill(await rig.leader())


# --- load


async def burst(moment: Moment) -> None:
    """Send ten times as many turns at once as run."""
    moment.load.burst(10 * moment.rig.active_count)


async def slow_reader(moment: Moment) -> None:
    """Make one gateway read the schedulers' messages slowly."""
    rig = moment.rig
    links = [link for (name, _), link in rig.leases.items() if name == "gateway0"]
    for link in links:
        link.bytes_per_s = 4_000
    await asyncio.sleep(moment.seconds / 2)
    for link in links:
        link.bytes_per_s = None


def keep_many(rig: Rig, _give_up: Callable[[str], NoReturn]) -> None:
    """Fill the store with very many programs."""
    records = [encode_record(At("", ProgramRecord(f"kept.{n}", turn_count=1))) for n in range(KEPT_PROGRAMS_COUNT)]
    for first in range(0, KEPT_PROGRAMS_COUNT, 2000):
        parts = records[first : first + 2000]
        parts = [encode_record(Begins())] * (first == 0) + parts
        parts += [encode_record(Whole())] * (first + 2000 >= KEPT_PROGRAMS_COUNT)
        rig.store("XADD", f"{KEYS}log", "*", "e", given=entry_of(1, 0.0, parts))
    rig.store("SET", f"{KEYS}epoch", "1")


async def crash_with_many(moment: Moment) -> None:
    """Kill the leader; the other scheduler takes over all programs."""
    rig = moment.rig
    await rig.until_followed()
    rig.kill(await rig.leader())
    leader = await rig.leader()
    programs = await rig.metrics(leader)
    known = sum(programs["thunderagent_programs"].values())
    assert known >= KEPT_PROGRAMS_COUNT, f"{known} programs are known"


BOTH: tuple[Way, ...] = ("up", "down")
WAYS: dict[str, tuple[Way, ...]] = {"down": BOTH, "deaf": ("down",), "dumb": ("up",)}

CASES = [
    Case("crash", "leader", lambda it: crash(it, "leader")),
    Case("crash", "standby", lambda it: crash(it, "standby")),
    Case("crash", "gateway", lambda it: crash(it, "gateway"), may_fail=True),
    Case("crash", "redis", lambda it: crash(it, "redis")),
    Case("crash", "engine", lambda it: crash(it, "engine"), may_fail=True),
    Case("crash", "both schedulers", lambda it: crash(it, "leader", "standby")),
    Case("crash", "leader and redis", lambda it: crash(it, "leader", "redis")),
    Case("crash", "leader and gateway", lambda it: crash(it, "leader", "gateway"), may_fail=True),
    Case("crash", "in resync", crash_in_resync),
    Case("crash", "in snapshot", crash_in_snapshot),
    Case("crash", "twice within a lock", crash_twice),
    *(
        Case("pause", f"{name} {for_s:g} s", partial(pause, name=name, for_s=for_s))
        for name in ("leader", "standby", "gateway", "redis", "engine")
        for for_s in (0.5, 2.0, 10.0)
    ),
    *(
        Case(
            "partition", f"{between} {how} {heal_s:g} s", partial(partition, between=between, ways=ways, heal_s=heal_s)
        )
        for between in ("leader-redis", "leader-gateways", "standby-leader")
        for how, ways in WAYS.items()
        for heal_s in (1.0, 5.0, 60.0)
    ),
    Case("clock", "wall clock of a scheduler", partial(step, name="scheduler0"), partial(steps, "scheduler0")),
    Case("clock", "wall clock of a gateway", partial(step, name="gateway0"), partial(steps, "gateway0")),
    Case("clock", "monotonic clocks apart", hand_to_and_fro, apart),
    Case("data", "flushall", flush),
    Case("data", "flushall and both schedulers", flush_and_crash, may_lose=True),
    Case("data", "aof truncated", truncate),
    Case("data", "epoch deleted", lose_epoch),
    Case("data", "log trimmed past the standby", trim),
    Case("load", "burst", burst),
    Case("load", "slow reader", slow_reader),
    Case("load", "100k programs", crash_with_many, keep_many),
]
SHORT = ("crash leader", "partition leader-gateways down 1 s", "data flushall")
"""What each run has: `tests/property/test_scale_faults.py` has all of them in virtual time, the other kinds, too."""

NAMED = {f"{case.kind} {case.name}": case for case in CASES}
