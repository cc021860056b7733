"""Sandboxes in a user's setup: the proxy as a process, a real Docker engine, and its possible faults.

Measured values of promised figures are printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import time
from typing import TYPE_CHECKING, Any, NoReturn

import httpx2
import pytest
import pytest_asyncio
from docker.errors import NotFound

from benchmarks.processes import Server, thunderagent
from tests.real.docker_engine import (
    IMAGE,
    DockerEngine,
    DockerEngineError,
    ensure_docker,
    import_busybox_image,
    registry,
)
from tests.real.support import until
from thunderagent.tools.docker.setups import kept_images

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

MB = 1024 * 1024
WRITTEN_BYTES = 20 * MB
LEFT_COUNT = 10
OWNER = "test-proxy"
PLAIN: dict[str, Any] = {"image": IMAGE}

# Docker's client leaves its socket open if it cannot connect, for example while the engine is stopped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600, func_only=True),
]


@pytest.fixture(scope="module")
def engine(require_real: Callable[[str], NoReturn]) -> Iterator[DockerEngine]:
    """Run a Docker engine with enough disk for these tests."""
    try:
        ensure_docker()
        with DockerEngine(disk_bytes=3 * 1024 * MB) as engine:
            import_busybox_image(engine)
            yield engine
    except DockerEngineError as error:
        require_real(f"no Docker: {error}")


class Rollout:
    """A proxy that makes sandboxes, and its programs."""

    def __init__(self, engine: DockerEngine, proxy: Server, client: httpx2.AsyncClient) -> None:
        self.engine = engine
        self.proxy = proxy
        self.client = client

    async def asks(self, program_id: str, **spec: Any) -> str:
        """Ask for a sandbox; return its id."""
        answer = await self.client.post(f"/programs/{program_id}/sandboxes", json={"spec": {**PLAIN, **spec}})
        assert answer.status_code == 202, answer.text
        sandbox_id: str = answer.json()["sandboxes"][0]["sandbox_id"]
        return sandbox_id

    async def sandbox(self, program_id: str) -> dict[str, Any]:
        """Return a program's only sandbox."""
        (report,) = (await self.client.get(f"/programs/{program_id}/sandboxes")).json()["sandboxes"]
        return dict(report)

    async def is_usable(self, program_id: str) -> dict[str, Any]:
        """Wait for a program's sandbox."""
        async with asyncio.timeout(60):
            while (report := await self.sandbox(program_id))["stage"] not in ("ready", "in_use"):
                assert report["stage"] != "failed", report["why"]
                await asyncio.sleep(0.05)
        return report

    async def preparing_s(self) -> float:
        """Return how long the machine, as busy as it is, needs to prepare and to reclaim a sandbox."""
        began_s = time.monotonic()
        await self.asks("first")
        await self.is_usable("first")
        await self.releases("first")
        await self.gone()
        return time.monotonic() - began_s

    async def takes_turn(self, program_id: str, **fields: Any) -> httpx2.Response:
        """Make one turn; `fields` are further ones of its body."""
        body = {"model": "simulated", "max_tokens": 4, "messages": [{"role": "user", "content": "w1 w2 w3"}], **fields}
        return await self.client.post(f"/p/{program_id}/v1/chat/completions", json=body)

    async def releases(self, *program_ids: str) -> None:
        """Say that programs ended."""
        await self.client.post("/programs/release", json={"program_ids": list(program_ids)})

    async def story(self, program_id: str) -> list[str]:
        """Return a program's history as text."""
        entries = (await self.client.get(f"/programs/{program_id}")).json()["story"]
        return [f"{entry['what']}: {entry['why']}" for entry in entries]

    def containers(self, *labels: str) -> list[dict[str, Any]]:
        """Return the containers with labels, running or not."""
        with contextlib.closing(self.engine.client()) as docker:
            found: list[dict[str, Any]] = docker.containers(all=True, filters={"label": list(labels)})
            return found

    def ours(self) -> list[dict[str, Any]]:
        """Return the containers that the proxy made in any run."""
        return self.containers(f"thunderagent.owner={OWNER}")

    def volumes(self) -> list[str]:
        """Return the volumes at the engine."""
        with contextlib.closing(self.engine.client()) as docker:
            return [each["Name"] for each in docker.volumes()["Volumes"] or ()]

    def output(self, handle: str, command: str) -> bytes:
        """Run a command in a container; return what it said."""
        with contextlib.closing(self.engine.client()) as docker:
            said: bytes = docker.exec_start(docker.exec_create(handle, ["sh", "-c", command]))
            return said

    def files(self, handle: str, path: str) -> list[str]:
        """Return the name of a file in a container, in a list; empty if there is none."""
        with contextlib.closing(self.engine.client()) as docker:
            try:
                return [docker.get_archive(handle, path)[1]["name"]]
            except NotFound:
                return []

    def disk_bytes(self) -> int:
        """Return the used bytes of the engine's file system."""
        return shutil.disk_usage(self.engine.data_root).used

    async def program(self, program_id: str, *, release: bool = True) -> str:
        """Run a program from begin to end: a sandbox that writes, and turns; return the id of its container."""
        await self.asks(program_id)
        assert (await self.takes_turn(program_id)).status_code == 200
        report = await self.is_usable(program_id)
        write = f"dd if=/dev/zero of=/written bs=1M count={WRITTEN_BYTES // MB}"
        await asyncio.to_thread(self.output, report["handle"], write)
        assert (await self.takes_turn(program_id)).status_code == 200
        if release:
            await self.releases(program_id)
        handle: str = report["handle"]
        return handle

    async def programs(
        self,
        count: int,
        *,
        at_once: int = 5,
        release: bool = True,
        in_turn: bool = False,
        name: str = "p",
        after: Callable[[int], None],
    ) -> None:
        """Run programs, some at a time; call `after` with the number of ended ones each time one ends.

        `in_turn`: the next one begins when the container of one that ended is gone.
        """
        hands, ended_count = asyncio.Semaphore(at_once), 0

        async def one(number: int) -> None:
            nonlocal ended_count
            async with hands:
                handle = await self.program(f"{name}{number}", release=release)
                ended_count += 1
                after(ended_count)
                if in_turn:
                    await until(_async(lambda: all(each["Id"] != handle for each in self.ours())), within_s=90)

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))

    async def gone(self) -> None:
        """Wait until none of the proxy's containers is left."""
        await until(_async(lambda: not self.ours()), within_s=90)


def _async(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return await asyncio.to_thread(condition)

    return ask


@contextlib.asynccontextmanager
async def serving(engine: DockerEngine, log_path: Path, *options: str, backends: str = "") -> AsyncIterator[Rollout]:
    """Run a proxy, by default with a simulated engine of its own."""
    replicas = ("--backends", backends) if backends else ("--embedded-engines", "1")
    command = ("serve", "--port", "0", *replicas, "--sandboxes", "docker", "--docker-url", engine.url)
    more = ("--sandbox-owner", OWNER, "--sandbox-specs", "true", "--sandbox-hands-count", "8", "--log-format", "json")
    async with (
        thunderagent(*command, *more, *options, log_path=log_path) as proxy,
        httpx2.AsyncClient(base_url=proxy.url, timeout=60.0, trust_env=False) as client,
    ):
        rollout = Rollout(engine, proxy, client)

        async def ready() -> bool:
            return (await client.get("/ready")).status_code == 200

        await until(ready)
        yield rollout


@pytest_asyncio.fixture(loop_scope="module")
async def rollout(engine: DockerEngine, tmp_path: Path) -> AsyncIterator[Rollout]:
    """Run a proxy, which must leave nothing behind."""
    async with serving(engine, tmp_path / "proxy.log") as rollout:
        yield rollout
    assert rollout.ours() == []


@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.nightly)])  # the same for longer
async def test_disk_does_not_grow_with_the_programs(rollout: Rollout, count: int) -> None:
    """Many programs, 5 at a time, 20 MB each: at the end no more than at the beginning.

    A single moment says little: between one and all five programs may have written when another ends.
    """
    before_bytes, used_bytes = rollout.disk_bytes(), []

    def after(_ended_count: int) -> None:
        used_bytes.append(rollout.disk_bytes() - before_bytes)

    await rollout.programs(count, after=after)
    part = count // 3 if count < 60 else 20
    first_bytes, last_bytes = max(used_bytes[:part]), statistics.median(used_bytes[-part:])
    print(f"\ndisk, most of the first {part} / at the last {part}: {first_bytes / MB:.0f} / {last_bytes / MB:.0f} MB")
    assert first_bytes > WRITTEN_BYTES, "the programs wrote nothing"
    assert last_bytes <= 1.1 * first_bytes
    await rollout.gone()
    assert rollout.disk_bytes() - before_bytes < WRITTEN_BYTES


@pytest.mark.parametrize("count", [20, pytest.param(40, marks=pytest.mark.nightly)])  # the same with more programs
async def test_reclaiming_saves_disk(rollout: Rollout, count: int) -> None:
    """Programs with it use at most as much as those without it, divided by 4.2 (the paper's figure)."""
    before_bytes, peaks_bytes = rollout.disk_bytes(), []
    for release, name in ((True, "with"), (False, "without")):
        seen_bytes = [0]
        await rollout.programs(
            count,
            at_once=3,
            release=release,
            in_turn=release,  # one that is removed slowly still takes its disk
            name=name,
            after=lambda _, seen_bytes=seen_bytes: seen_bytes.append(rollout.disk_bytes() - before_bytes),
        )
        peaks_bytes.append(max(seen_bytes))
        if release:
            await rollout.gone()
    print(f"\npeak disk without / with reclaiming: {peaks_bytes[1] / peaks_bytes[0]:.1f}")
    assert peaks_bytes[0] * 4.2 <= peaks_bytes[1]
    await rollout.releases(*(f"without{number}" for number in range(count)))
    await rollout.gone()


async def test_preparation_hides_behind_the_wait(engine: DockerEngine, tmp_path: Path) -> None:
    """Two seconds of setup, and longer in the queue: at the grant the sandbox is usable."""
    async with serving(engine, tmp_path / "log", "--policy", "cap", "--policy-arg", "n=1") as rollout:
        await rollout.takes_turn("first")
        turns = {}
        for number in range(4):
            await rollout.asks(f"p{number}", setup=["sleep 2"])
            turns[asyncio.create_task(rollout.takes_turn(f"p{number}"))] = f"p{number}"
        for name in turns.values():
            assert (await rollout.is_usable(name))["prepare_s"] >= 2.0
        assert not any(turn.done() for turn in turns)
        previous = "first"
        while turns:
            await rollout.releases(previous)
            (granted,), _ = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
            assert granted.result().status_code == 200
            previous = turns.pop(granted)
            assert (await rollout.sandbox(previous))["stage"] in ("ready", "in_use")
        await rollout.releases(previous)
        await rollout.gone()


async def test_a_container_that_turns_name_goes_with_its_program(engine: DockerEngine, rollout: Rollout) -> None:
    """As `docker_ids` of the body, by name or by id; another program's stays."""
    with contextlib.closing(engine.client()) as docker:
        made = [docker.create_container(IMAGE, ["sleep", "600"], name=f"named-{n}")["Id"] for n in range(3)]
        for each in made:
            docker.start(each)
        for _ in range(2):
            assert (await rollout.takes_turn("p0", docker_ids=["named-0", made[1]])).status_code == 200
        assert (await rollout.takes_turn("p1", extra_body={"docker_ids": ["named-2"]})).status_code == 200

        async def taken() -> bool:
            found = [
                each["handle"]
                for name in ("p0", "p1")
                for each in (await rollout.client.get(f"/programs/{name}/sandboxes")).json()["sandboxes"]
            ]
            return sorted(found) == sorted(made)

        await until(taken, within_s=60)
        await rollout.releases("p0")
        await until(_async(lambda: [each["Id"] for each in docker.containers(all=True)] == [made[2]]), within_s=60)
        await rollout.releases("p1")
        await until(_async(lambda: docker.containers(all=True) == []), within_s=60)


@pytest.mark.parametrize("is_alike", [True, False])
async def test_admitted_program_gets_the_unused_sandbox_of_a_waiting_one(
    engine: DockerEngine, tmp_path: Path, *, is_alike: bool
) -> None:
    """One program at a time, one sandbox, made for another: otherwise both wait for ever."""
    window = ("--policy", "passthrough", "--admission", "window", "--policy-arg", "admission.n=1")
    async with serving(engine, tmp_path / "log", *window, "--sandbox-max-count", "1") as rollout:
        await rollout.asks("held")

        async def prepared() -> bool:
            (report,) = (await rollout.client.get("/sandboxes")).json()["sandboxes"]  # asking for its own would use it
            return bool(report["stage"] == "ready")

        await until(prepared, within_s=60)
        (made,) = rollout.ours()
        assert (await rollout.takes_turn("first")).status_code == 200
        held = asyncio.create_task(rollout.takes_turn("held"))
        await rollout.asks("first", **({} if is_alike else {"environment": {"OTHER": "1"}}))
        report = await rollout.is_usable("first")
        assert (report["handle"] == made["Id"]) == is_alike
        await asyncio.to_thread(rollout.output, report["handle"], "echo first > /of")
        assert [each["Id"] for each in rollout.ours()] == [report["handle"]]
        assert (await rollout.sandbox("held"))["stage"] == "requested"
        await rollout.releases("first")
        assert (await held).status_code == 200
        again = (await rollout.is_usable("held"))["handle"]
        assert again not in (made["Id"], report["handle"])
        assert rollout.files(again, "/of") == [], "it sees nothing of the first"
        await rollout.releases("held")
        await rollout.gone()


async def test_sandboxes_stand_still_while_their_programs_wait_and_wake_ahead(
    engine: DockerEngine, tmp_path: Path
) -> None:
    """One program at a time: while nobody ends, the wait of the others grows until all of theirs stand still."""
    names = [f"p{number}" for number in range(8)]
    async with serving(engine, tmp_path / "log", "--policy", "cap", "--policy-arg", "n=1") as rollout:
        for name in ("first", *names):
            await rollout.asks(name, suspend=True)
        handles = {name: (await rollout.is_usable(name))["handle"] for name in ("first", *names)}
        await rollout.takes_turn("first")
        turns = {name: asyncio.create_task(rollout.takes_turn(name)) for name in names}

        async def ends(ended: str) -> str:
            """End a program; return the one that is let in for it, which can use its sandbox at once."""
            await rollout.releases(ended)
            (answered,), _ = await asyncio.wait(turns.values(), return_when=asyncio.FIRST_COMPLETED)
            name = next(each for each in turns if turns[each] is answered)
            assert turns.pop(name).result().status_code == 200
            ran = await asyncio.to_thread(rollout.output, handles[name], "echo awake")
            assert ran == b"awake\n", "the engine refuses commands in what stands still"
            return name

        async def standing_still() -> set[str]:
            with contextlib.closing(engine.client()) as docker:
                paused = {each["Id"] for each in docker.containers(filters={"status": "paused"})}
            return {name for name, handle in handles.items() if handle in paused}

        async def all_stand_still() -> bool:
            return await standing_still() == set(turns)

        async def one_is_awake() -> bool:
            return len(await standing_still()) < len(turns)

        await until(all_stand_still, within_s=50)
        has_place, woken_ahead = "first", 0
        while len(turns) > 1 and not woken_ahead:
            has_place = await ends(has_place)
            with contextlib.suppress(TimeoutError):
                await until(one_is_awake, within_s=3)
                woken_ahead = len(turns) - len(await standing_still())
        print(f"\nof {len(turns)} that wait {woken_ahead} were woken ahead of their turn")
        assert woken_ahead
        while turns:
            has_place = await ends(has_place)
        await rollout.releases(has_place)
        await rollout.gone()


async def _many(rollout: Rollout, count: int, ttl_s: float) -> None:
    for number in range(count):
        await rollout.asks(f"p{number}", ttl_s=ttl_s, network="own" if number < 3 else "default")
    for number in range(count):
        await rollout.is_usable(f"p{number}")
    assert len(rollout.ours()) == count


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.nightly)])  # the same with more sandboxes
async def test_nothing_outlives_a_killed_proxy_by_more_than_its_time(
    engine: DockerEngine, tmp_path: Path, count: int
) -> None:
    """After `kill -9` with live sandboxes none is left past its time to live, and no network."""
    async with serving(engine, tmp_path / "log") as rollout:
        ttl_s = max(1.0 * count, 2 * count * await rollout.preparing_s())
        await _many(rollout, count, ttl_s=ttl_s)
        rollout.proxy.process.kill()
        await rollout.proxy.process.wait()
        began_s = time.monotonic()
        await until(_async(lambda: not rollout.ours()), within_s=ttl_s + 50)  # by themselves they last a minute longer
        print(f"\nthe last was gone {time.monotonic() - began_s:.1f} s after the kill")

        def no_network() -> bool:
            with contextlib.closing(engine.client()) as docker:
                return not docker.networks(filters={"label": f"thunderagent.owner={OWNER}"})

        await until(_async(no_network), within_s=60)


async def test_nothing_is_left_of_a_run_that_was_killed(engine: DockerEngine, tmp_path: Path) -> None:
    """In mid-run: some sandboxes are used, others still prepared.

    Volumes, networks, kept setups and pulled images go as well.
    """
    with contextlib.closing(engine.client()) as docker:
        images = {each["Id"] for each in docker.images()}
    async with (
        registry() as (image, _),
        serving(engine, tmp_path / "log", "--sandbox-images-bytes", "0") as rollout,
    ):
        ttl_s = max(10.0, 20 * await rollout.preparing_s())
        wanted = {"image": image, "ttl_s": ttl_s, "mounts": [{"target": "/data"}]}
        for number in range(8):
            late = {"setup": ["sleep 1000"]} if number >= 5 else {}
            await rollout.asks(f"p{number}", network="own" if number % 2 else "default", **wanted, **late)
        for number in range(5):
            report = await rollout.is_usable(f"p{number}")
            await asyncio.to_thread(rollout.output, report["handle"], "echo written > /data/written")
        assert len(rollout.volumes()) >= 5
        await rollout.asks("kept", image=image, ttl_s=ttl_s, setup=["echo kept > /kept"], reuse_setup=True)
        await rollout.is_usable("kept")
        with contextlib.closing(engine.client()) as docker:
            assert kept_images(docker, {})
        rollout.proxy.process.kill()
        await rollout.proxy.process.wait()

        def is_clean() -> bool:
            with contextlib.closing(engine.client()) as docker:
                networks = docker.networks(filters={"label": f"thunderagent.owner={OWNER}"})
                return not (
                    rollout.ours() or networks or rollout.volumes() or {each["Id"] for each in docker.images()} - images
                )

        await until(_async(is_clean), within_s=ttl_s + 120)


async def test_the_next_start_sweeps_what_a_killed_proxy_left(engine: DockerEngine, tmp_path: Path) -> None:
    """It does not touch others: neither a plain container nor another proxy's."""
    with contextlib.closing(engine.client()) as docker:
        others = []
        for labels in ({}, {"thunderagent.owner": "another", "thunderagent.sandbox-id": "x", "thunderagent.run": "y"}):
            made = docker.create_container(IMAGE, ["sleep", "600"], labels=labels)
            docker.start(made["Id"])
            others.append(made["Id"])
        async with serving(engine, tmp_path / "log") as rollout:
            await _many(rollout, LEFT_COUNT, ttl_s=600.0)
            rollout.proxy.process.kill()
            await rollout.proxy.process.wait()
            assert len(rollout.ours()) == LEFT_COUNT
        async with serving(engine, tmp_path / "log-2") as rollout:
            await rollout.gone()

            async def counted() -> bool:
                return (
                    f"thunderagent_sandbox_orphans_total {LEFT_COUNT}.0" in (await rollout.client.get("/metrics")).text
                )

            await until(counted)
            assert {each["Id"] for each in docker.containers()} == set(others)
        for other in others:
            docker.remove_container(other, force=True)


async def test_an_engine_that_stops_and_starts_stops_no_turn(engine: DockerEngine, rollout: Rollout) -> None:
    """Ended sandboxes are reported, requests meanwhile are served after the restart, and turns continue throughout."""
    await rollout.asks("used")
    await rollout.is_usable("used")
    assert (await rollout.takes_turn("used")).status_code == 200
    await asyncio.to_thread(engine.end)
    try:
        await rollout.asks("later")
        for _ in range(5):
            assert (await rollout.takes_turn("used")).status_code == 200
            await asyncio.sleep(0.2)

        async def told() -> bool:
            return "docker" in (await rollout.client.get("/sandboxes")).json()["engine_errors"]

        await until(told)
    finally:
        await asyncio.to_thread(engine.start)
    await rollout.is_usable("later")

    async def died() -> bool:
        return (await rollout.sandbox("used"))["stage"] == "failed"

    await until(died, within_s=30)
    assert any(entry.startswith("sandbox failed") for entry in await rollout.story("used"))
    await rollout.asks("after")
    await rollout.is_usable("after")
    await rollout.releases("used", "later", "after")
    await rollout.gone()


async def test_a_missing_image_says_so(rollout: Rollout) -> None:
    await rollout.asks("p", image="no-such-image:1")

    async def failed() -> bool:
        return (await rollout.sandbox("p"))["stage"] == "failed"

    await until(failed, within_s=30)
    assert "no-such-image:1" in (await rollout.sandbox("p"))["why"]
    assert "no-such-image:1" in (await rollout.story("p"))[-1]
    assert (await rollout.takes_turn("p")).status_code == 200


async def test_a_full_disk_says_so_and_passes(engine: DockerEngine, rollout: Rollout) -> None:
    """While it is full no sandbox is made, and the reason is given; afterwards one is made."""
    with engine.full_disk():
        await rollout.asks("p", setup=["dd if=/dev/zero of=/big bs=1M count=5"])

        async def told() -> bool:
            return "space" in ((await rollout.sandbox("p"))["why"] or "")

        await until(told, within_s=30)
        assert (await rollout.takes_turn("p")).status_code == 200
    if (await rollout.sandbox("p"))["stage"] == "failed":
        await rollout.releases("p")
        await rollout.asks("p")
    await rollout.is_usable("p")
    await rollout.releases("p")


async def test_sandbox_that_ignores_the_stop_is_killed(rollout: Rollout) -> None:
    stubborn = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    await rollout.asks("p", command=stubborn, stop_grace_s=1.0)
    await rollout.is_usable("p")
    await rollout.releases("p")
    await rollout.gone()


async def test_death_of_a_sandbox_is_in_the_story(rollout: Rollout) -> None:
    await rollout.takes_turn("p")
    await rollout.asks("p", command=["sh", "-c", "until [ -e /go ]; do sleep 0.1; done; exit 3"])
    report = await rollout.is_usable("p")
    await asyncio.to_thread(rollout.output, report["handle"], "touch /go")

    async def told() -> bool:
        return (await rollout.sandbox("p"))["stage"] == "failed"

    await until(told)
    assert "3" in (await rollout.sandbox("p"))["why"]
    assert (await rollout.story("p"))[-1].startswith("sandbox failed")
    await rollout.gone()


@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.nightly)])  # the same with more at once
async def test_simultaneous_releases_reclaim_everything(rollout: Rollout, count: int) -> None:
    names = [f"p{number}" for number in range(count)]
    for name in names:
        await rollout.asks(name)
    for name in names:
        await rollout.is_usable(name)
    began_s = time.monotonic()
    await asyncio.gather(*(rollout.releases(name) for name in names))
    assert (await rollout.takes_turn("other")).status_code == 200
    await rollout.gone()
    print(f"\n{count} sandboxes were gone {time.monotonic() - began_s:.1f} s after their releases")
