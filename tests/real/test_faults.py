"""Every fault that a cell of several processes must survive, made in real processes while programs take turns.

A case runs for FAULT_SECONDS (60) with FAULT_PROGRAMS (2,000) programs that take FAULT_TURNS_PER_S (60); its seed is
printed, and FAULT_SEED repeats its random draws. `scripts/nightly faults` runs all of them, `scripts/test --real` one
each of three kinds for some seconds; FAULT_CASES names others for that, separated by commas.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import openai
import pytest

from tests.real import fault_load
from tests.real.counting_engine import prompt_of
from tests.real.fault_cases import NAMED, SHORT, Case, Moment
from tests.real.fault_load import WHOLE, Load
from tests.real.fault_rig import Rig
from tests.real.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path
    from typing import NoReturn

SECONDS = float(os.environ.get("FAULT_SECONDS", "60"))
PROGRAMS_COUNT = int(os.environ.get("FAULT_PROGRAMS", "2000"))
TURNS_PER_S = float(os.environ.get("FAULT_TURNS_PER_S", "60"))
SHORT_S = 6.0
SHORT_PROGRAMS_COUNT = 150
SHORT_TURNS_PER_S = 30.0
CLIENTS_COUNT = 6
WORDS_COUNT = 15

pytestmark = [pytest.mark.timeout(SECONDS + 300, func_only=True), pytest.mark.usefixtures("redis_installed")]


async def run(case: Case, rig: Rig, load: Load, seconds: float) -> str:
    """Make a fault while programs take turns; check the invariants; return the observations."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load.run())
        began_s = time.monotonic()
        try:
            await asyncio.sleep(rig.random.uniform(0.15, 0.3) * seconds)
            await case.make(Moment(rig, load, seconds))
            await asyncio.sleep(max(0.0, began_s + seconds - time.monotonic()))
            await rig.until_back()
        finally:
            load.stop.set()
        await running
    quiet_s = await fault_load.until_quiet(load)
    await rig.until_followed()
    leader = await rig.leader()
    seen = fault_load.check_answers(load, may_fail=case.may_fail)
    fault_load.check_generations(load, may_fail=case.may_fail)
    epoch = await fault_load.check_epochs(rig, leader)
    programs = await fault_load.check_counts(load, leader, may_lose=case.may_lose)
    open_counts = [(await rig.metrics(name))["thunderagent_fail_open_turns_total"][()] for name in rig.gateways]
    await fault_load.check_what_is_kept(load, leader, programs)
    whole_s = sorted(each.ended_s for each in load.tries if each.outcome == WHOLE)
    gap_s = max((after - before for before, after in pairwise(whole_s)), default=0.0)
    return (
        f"{len(load.turns)} turns of {len(programs)} programs, tries {dict(seen)}, longest time without an answer "
        f"{gap_s:.2f} s, epoch {epoch}, without leave {sum(open_counts):g}, quiet after {quiet_s:.1f} s"
    )


@asynccontextmanager
async def a_rig(
    cases: Sequence[Case], require_real: Callable[[str], NoReturn], folder: Path, turns_per_s: float = SHORT_TURNS_PER_S
) -> AsyncIterator[Rig]:
    seed = int(os.environ.get("FAULT_SEED", random.randrange(10**6)))
    print(f"\nFAULT_SEED={seed}")
    with redis_server(require_real, folder, keeps=True) as redis:
        rig = Rig(redis, folder, seed, turns_per_s=turns_per_s)
        for case in cases:
            case.before(rig, require_real)
        async with rig:
            try:
                yield rig
            except BaseException:
                tell(rig)
                raise


def tell(rig: Rig) -> None:
    """Print recent logs of the processes, to explain a failure."""
    for name, process in rig.logs:
        often = ('"event":"turn"', '"event":"pause"', '"event":"restore"', '"event":"release"')
        lines = [line for line in process.log.splitlines() if not any(each in line for each in often)]
        print(f"--- {name}", *lines[-14:], sep="\n")


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMED)
async def test_fault_costs_no_turn(name: str, require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """Every turn has one answer, is generated once at a time and counted once; nothing is leaked or forgotten."""
    async with a_rig([NAMED[name]], require_real, tmp_path, TURNS_PER_S) as rig:
        load = Load(rig, "p", programs_count=PROGRAMS_COUNT, turns_per_s=TURNS_PER_S)
        print(f"{name}: {await run(NAMED[name], rig, load, SECONDS)}")


async def test_a_crash_a_partition_and_a_loss_of_data(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """The same, for some seconds each, one after another in one cell."""
    names = os.environ.get("FAULT_CASES", ",".join(SHORT)).split(",")
    async with a_rig([NAMED[name] for name in names], require_real, tmp_path) as rig:
        for number, name in enumerate(names):
            await rig.until_followed()
            load = Load(rig, f"p{number}", programs_count=SHORT_PROGRAMS_COUNT, turns_per_s=SHORT_TURNS_PER_S)
            print(f"{name}: {await run(NAMED[name], rig, load, SHORT_S)}")
            await rig.until_back()


async def test_a_client_goes_on_whoever_is_killed(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """The openai client streams through one gateway, without retries, while leader, standby, Redis, a gateway die."""
    answered = 0
    stop = asyncio.Event()

    async def talk(client: openai.AsyncOpenAI, program_id: str) -> None:
        nonlocal answered
        for number in range(10**6):
            if stop.is_set():
                return
            stream = await client.chat.completions.create(
                model="counting",
                messages=[{"role": "user", "content": prompt_of(f"{program_id}.{number}", WORDS_COUNT)}],
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"program_id": program_id},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == "word " * WORDS_COUNT
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == WORDS_COUNT
            answered += 1

    async with (
        a_rig([], require_real, tmp_path) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url('gateway0')}/v1", api_key="none", max_retries=0) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CLIENTS_COUNT):
            group.create_task(talk(client, f"c-{number}"))
        for each in (rig.leader, rig.standby, "redis", "gateway1"):
            name = each if isinstance(each, str) else await each()
            wanted_count = answered + 2 * CLIENTS_COUNT
            rig.kill(name)
            async with asyncio.timeout(60):
                while answered < wanted_count:
                    await asyncio.sleep(0.02)
            await rig.until_back()
            await rig.until_followed()
        stop.set()
    print(f"{answered} streams, not one error")
