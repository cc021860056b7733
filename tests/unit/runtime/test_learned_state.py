"""The file of learned state: whole or refused, replaced atomically, and given to the right pools."""

from __future__ import annotations

import asyncio
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from threading import Event
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.builders import Driver, grew, known_price
from thunderagent.errors import ConfigurationError, StateError
from thunderagent.leases import TurnAsk
from thunderagent.programs.learned.knowledge import Knowledge
from thunderagent.programs.learned.sizes import CLASSES_COUNT, MAX_ROLES_COUNT
from thunderagent.programs.learned.trust import MAX_TENANTS_COUNT
from thunderagent.programs.policies.baselines.passthrough import Passthrough
from thunderagent.programs.policies.breakeven import BreakEven
from thunderagent.programs.policies.composed import Composed
from thunderagent.programs.policies.parts.areas import ENDS_COUNT
from thunderagent.programs.policies.parts.least_area import LeastArea
from thunderagent.programs.policies.parts.simple import Fcfs
from thunderagent.programs.scheduler import Scheduler
from thunderagent.runtime import Runtime
from thunderagent.runtime.learned_state import (
    LearnedState,
    PoolRecord,
    decode_state,
    encode_state,
    read_state,
    write_state,
)

if TYPE_CHECKING:
    from pathlib import Path


PRICE = asdict(known_price("r0", 1e-4))


def learned_tool(name: str, *models: str) -> PoolRecord:
    knowledge = Knowledge()
    for _ in range(20):
        knowledge.tool_times.returned(name, 7.0)
        knowledge.growth.turn_ended(grew(100, 10, 1.0))
    return PoolRecord(models, knowledge.export())


def learned_lengths(*models: str) -> PoolRecord:
    """Return what an order learned from twenty programs of three turns."""
    order = LeastArea()
    driver = Driver(Composed(Passthrough(), order=order), replicas={"r0": 10**7})
    for number in range(20):
        for turn in range(3):
            driver.takes_turn(f"p{number}", 1000 + 100 * turn)
        driver.releases(f"p{number}")
    return PoolRecord(models, replace(learned_tool("bash").learned, lengths=order.export()))


def runtime_of(*, pools: bool = True) -> Runtime:
    return Runtime(Scheduler(BreakEven()), make_scheduler=(lambda: Scheduler(BreakEven())) if pools else None)


def up(runtime: Runtime, replica_id: str, *models: str) -> None:
    runtime.replica_at(replica_id, f"http://{replica_id}")
    runtime.served.listed(replica_id, models)
    runtime.replica_up(replica_id, 100_000)


def knows(runtime: Runtime, model: str, tool: str) -> bool:
    pool = runtime.pools.of_model(model) or runtime.pools.all[0]
    return pool.scheduler.knowledge.tool_times.returned_within_s(tool, 0.5) > 0


async def take_turn(runtime: Runtime, model: str) -> None:
    ask = TurnAsk(turn_id=runtime.new_turn_id(), program_id=f"p-{model}", prompt_bytes=100, model=model)
    with await runtime.lease(ask) as lease:
        lease.finished(prompt_tokens=30, output_tokens=5)


# --- the file


def test_every_torn_file_is_refused() -> None:
    """It may be torn anywhere."""
    content = encode_state([learned_tool("bash", "m")])
    assert decode_state(content) == [learned_tool("bash", "m")]
    for length in [*range(200), *range(200, len(content), 97), len(content) - 1]:
        with pytest.raises(StateError):
            decode_state(content[:length])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content.replace(b'"version":1', b'"version":2'), "version 2, not 1"),
        (lambda content: content.replace(b"thunderagent-learned", b"something"), "not a file of learned state"),
        (lambda content: content.replace(b"bash", b"bush"), "checksum"),
        (lambda content: content + b" ", "incomplete"),
        (lambda _: b"\xff\xfe\x00", "not a file of learned state"),
        (lambda _: b"[]\n[]", "not a file of learned state"),
        (lambda _: encode_state([{"models": "m"}]), "content is invalid"),  # type: ignore[list-item]
    ],
)
def test_foreign_or_changed_state_is_refused(change: object, why: str) -> None:
    assert callable(change)
    with pytest.raises(StateError, match=why):
        decode_state(change(encode_state([learned_tool("bash", "m")])))


def test_records_with_other_intervals_are_refused() -> None:
    """Such a build counts otherwise, and forgot to change its version."""
    (record,) = json.loads(encode_state([learned_tool("bash", "m")]).partition(b"\n")[2])
    for where in ("all_tools", "growth", "prices"):
        part = dict(record["learned"][where])
        for name, value in part.items():
            if isinstance(value, list):
                part[name] = value[1:]
            elif isinstance(value, dict):
                part[name] = {**value, "counts": value["counts"][1:]}
        changed = {**record, "learned": {**record["learned"], where: part}}
        with pytest.raises(StateError, match="content is invalid"):
            decode_state(encode_state([changed]))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("mean_tool_s",), -1.0),
        (("all_tools", "refresh_at_count"), 1e9),
        (("all_tools", "count"), -1.0),
        (("growth", "whole_tokens"), -1.0),
        (("growth", "whole_tokens"), 1e300),
        (("growth", "cycle_s"), -1.0),
        (("growth", "program_count"), -1),
        (("growth", "outputs", "total"), 1e6),
        (("replica_prices",), [PRICE | {"token_s": -0.1}]),
        (("replica_prices",), [PRICE | {"token_s": 1e-3}]),
        (("replica_prices",), [PRICE | {"low_token_s": -1.0}]),
        (("replica_prices",), [PRICE | {"source": "hearsay"}]),
        (("prices", "decode_token_s"), -0.1),
        (("prices", "decode_refreshed_count"), -(2**40)),
        (("prices", "tokens_per_byte_ratio"), -1.0),
        (("all_roles",), [1.0, -5.0]),
        (("roles",), [["role", 1e-300, 1e300]]),
        (("media_factors",), [["image", -1.0]]),
        (("hints",), [["tenant", 5.0, 1.0]]),
        (("hints",), [["tenant", 1e9, 1e9]]),
        (("restores",), [-1.0, 1.0]),
        (("lengths", "ended"), [1.0]),
        (("lengths", "passed"), [-1.0] * len(ENDS_COUNT)),
        (("lengths", "grown_tokens"), -1.0),
        (("lengths", "grown_count"), 0.0),
    ],
)
def test_records_with_values_that_cannot_be_are_refused(place: tuple[str, ...], value: object) -> None:
    """A negative size or time, or one beyond all measure, would mislead the scheduler for hours."""
    (record,) = json.loads(encode_state([learned_lengths("m")]).partition(b"\n")[2])
    part = record["learned"]
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    with pytest.raises(StateError, match="content is invalid"):
        decode_state(encode_state([record]))


def test_newest_names_are_taken_in_where_too_many_are_kept() -> None:
    """They count as if they had been learned here."""
    many = [(f"name-{number}", 1.0, 1.0) for number in range(3000)]
    learned = replace(
        learned_tool("bash", "m").learned,
        roles=tuple(many),
        hints=tuple(many),
        media_factors=tuple((name, 1.0) for name, _, _ in many),
    )
    knowledge = Knowledge()
    knowledge.adopt(learned)
    kept = knowledge.export()
    assert kept.roles == tuple(many[-MAX_ROLES_COUNT:])
    assert kept.hints == tuple(many[-MAX_TENANTS_COUNT:])
    assert kept.media_factors == learned.media_factors[-CLASSES_COUNT:]


def test_a_file_is_replaced_at_once_and_its_owners_alone(tmp_path: Path) -> None:
    """The leftovers of a killed writer do not matter."""
    path = tmp_path / "state"
    (tmp_path / "state.new").write_bytes(b"half of some")
    for name in ("bash", "search"):
        write_state(path, [learned_tool(name, "m")])
        assert read_state(path) == [learned_tool(name, "m")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


async def test_no_file_is_no_error_and_a_folder_is_one(tmp_path: Path) -> None:
    """A folder stays where it is."""
    assert read_state(tmp_path / "none") == []
    with pytest.raises(ConfigurationError, match="is a folder"):
        LearnedState(tmp_path, runtime_of())
    assert tmp_path.is_dir()


# --- its pools


async def test_each_pool_gets_what_its_models_learned(tmp_path: Path) -> None:
    """It does so once its models are known; the state of an absent model is kept."""
    path = tmp_path / "state"
    write_state(path, [learned_tool("of-a", "a", "lora"), learned_tool("of-b", "b"), learned_tool("of-c", "c")])
    runtime = runtime_of()
    state = LearnedState(path, runtime)
    up(runtime, "r0", "other-name-of-a", "lora")
    up(runtime, "r1", "b")
    runtime.served.replica_heard("r0")
    runtime.served.replica_heard("r1")
    assert knows(runtime, "lora", "of-a")
    assert knows(runtime, "b", "of-b")
    assert not knows(runtime, "b", "of-a")
    await take_turn(runtime, "b")
    await state.save()
    assert [each.models for each in read_state(path)] == [("c",), ("other-name-of-a", "lora"), ("b",)]


async def test_lengths_of_programs_are_kept_too(tmp_path: Path) -> None:
    """The default policy's own order learns it; another order omits it, and ignores it in the file."""
    path = tmp_path / "state"
    write_state(path, [learned_lengths("m")])
    runtime = runtime_of(pools=False)
    state = LearnedState(path, runtime)
    up(runtime, "r0", "m")
    assert runtime.scheduler.learned().lengths == learned_lengths().learned.lengths != LeastArea().export()
    await take_turn(runtime, "m")
    await state.save()
    (kept,) = read_state(path)
    assert kept.learned.lengths == runtime.scheduler.learned().lengths
    other = Runtime(Scheduler(Composed(BreakEven(), order=Fcfs())))
    LearnedState(path, other)
    up(other, "r0", "m")
    assert knows(other, "m", "bash")
    assert other.scheduler.learned().lengths is None


@pytest.mark.parametrize("pools", [True, False])
async def test_engines_that_list_nothing_get_what_such_ones_learned(tmp_path: Path, *, pools: bool) -> None:
    path = tmp_path / "state"
    write_state(path, [learned_tool("named", "a"), learned_tool("nameless")])
    runtime = runtime_of(pools=pools)
    LearnedState(path, runtime)
    up(runtime, "r0")
    assert knows(runtime, "", "nameless")


async def test_scheduler_that_has_learned_keeps_its_own(tmp_path: Path) -> None:
    """A replica that names its model late does that."""
    path = tmp_path / "state"
    write_state(path, [learned_tool("of-a", "a")])
    runtime = runtime_of(pools=False)
    LearnedState(path, runtime)
    up(runtime, "r0")
    await take_turn(runtime, "")
    runtime.served.listed("r0", ("a",))
    assert not knows(runtime, "a", "of-a")


async def test_replica_state_is_passed_on_as_learned(tmp_path: Path) -> None:
    """The replica may be known by then, or come later."""
    runtime = runtime_of(pools=False)
    up(runtime, "r0", "m")
    up(runtime, "r1", "m")
    await take_turn(runtime, "m")
    for replica_id in ("r0", "r1"):
        runtime.scheduler.knowledge.corrections[replica_id].ratio = 0.5
    path = tmp_path / "state"
    await LearnedState(path, runtime).save()
    after = runtime_of(pools=False)
    up(after, "r0")
    LearnedState(path, after)
    after.served.listed("r0", ("m",))
    up(after, "r1", "m")
    for replica_id in ("r0", "r1"):
        assert after.pools.replicas[replica_id].account.limit_tokens == 50_000


# --- its writing


async def test_state_is_written_again_while_turns_end(tmp_path: Path) -> None:
    path = tmp_path / "state"
    runtime = runtime_of(pools=False)
    up(runtime, "r0", "m")
    state = LearnedState(path, runtime, every_s=0.01)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        running = group.create_task(state.run())
        for count in (1, 2):
            await take_turn(runtime, "m")
            while not path.exists() or read_state(path)[0].learned.growth.outputs.total != count:
                await asyncio.sleep(0.01)
        running.cancel()


async def test_nothing_is_written_while_nothing_is_learned_or_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "state"
    runtime = runtime_of(pools=False)
    up(runtime, "r0", "m")
    state = LearnedState(path, runtime)
    await take_turn(runtime, "m")
    await state.save()
    path.unlink()
    await state.save()
    assert not path.exists()
    with pytest.raises(AttributeError):
        runtime.dispatch(object())  # type: ignore[arg-type]
    await take_turn(runtime, "m")
    await state.save()
    assert not path.exists()


async def test_a_refused_file_is_said_and_moved_out_of_the_way(tmp_path: Path) -> None:
    """The proxy continues without it."""
    path = tmp_path / "state"
    path.write_bytes(encode_state([learned_tool("bash", "m")])[:-1])
    runtime = runtime_of(pools=False)
    with capture_logs() as logs:
        LearnedState(path, runtime)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["state_refused"]
    assert (tmp_path / "state.refused").exists()
    assert not path.exists()
    up(runtime, "r0", "m")
    assert not knows(runtime, "m", "bash")


async def test_a_file_that_cannot_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    """It may be valid, so it is not replaced either. (The file is a link to itself: the tests may run as root.)"""
    path = tmp_path / "state"
    path.symlink_to(path)
    runtime = runtime_of(pools=False)
    up(runtime, "r0", "m")
    with capture_logs() as logs:
        state = LearnedState(path, runtime)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["state_not_read"]
    await take_turn(runtime, "m")
    await state.save()
    assert path.is_symlink()
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


async def test_a_write_that_began_comes_to_its_end_though_its_writer_is_cancelled(tmp_path: Path) -> None:
    """At a shutdown the last one waits for it, instead of writing beside it."""
    path = tmp_path / "state"
    runtime = runtime_of(pools=False)
    up(runtime, "r0", "m")
    state = LearnedState(path, runtime)
    await take_turn(runtime, "m")
    loop, goes_on = asyncio.get_running_loop(), Event()
    with ThreadPoolExecutor(1) as threads:
        loop.set_default_executor(threads)
        threads.submit(goes_on.wait)
        try:
            saving = asyncio.create_task(state.save())
            for _ in range(10):
                await asyncio.sleep(0)
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
        finally:
            goes_on.set()
        async with asyncio.timeout(10):
            await asyncio.to_thread(bool)  # there is one thread: this runs after that write
            assert read_state(path)
            path.unlink()
            await state.save()
    assert not path.exists()


async def test_a_disk_that_fails_is_said_once(tmp_path: Path) -> None:
    """Each later write tries again."""
    path = tmp_path / "folder" / "state"
    runtime = runtime_of(pools=False)
    up(runtime, "r0", "m")
    state = LearnedState(path, runtime)
    await take_turn(runtime, "m")
    with capture_logs() as logs:
        await state.save()
        await state.save()
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["state_not_written"]
    path.parent.mkdir()
    await state.save()
    assert read_state(path)
