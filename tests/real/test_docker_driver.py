"""The Docker driver on a real engine: everything that it makes works, ends, and is removed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import random
import signal
import stat
import sys
import tarfile
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import docker
import pytest

from tests.real.docker_engine import (
    IMAGE,
    DockerEngine,
    import_busybox_image,
    reapers,
    registry,
)
from thunderagent.errors import (
    NotFoundError,
    SandboxConflictError,
    SandboxEngineError,
    SandboxImageError,
    SandboxRefusedError,
    SandboxSetupError,
    SandboxSpaceError,
)
from thunderagent.tools.base import (
    EXPIRES_LABEL,
    OWNER_LABEL,
    PROGRAM_LABEL,
    RUN_LABEL,
    SANDBOX_LABEL,
    Change,
    Command,
    Order,
    Owner,
)
from thunderagent.tools.docker import DockerDriver
from thunderagent.tools.docker.setups import kept_images
from thunderagent.tools.template import Mount, Template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

OWNER = Owner("proxy-1", "run-1")
ECHO = ("nc", "-ll", "-p", "8000", "-e", "cat")
STUBBORN = ("sh", "-c", "trap '' TERM; touch /ready; while :; do sleep 1; done")
READY_COMMAND = "test -f /ready"
UNTIL_GO = "until [ -e /go ]; do sleep 0.1; done"
DEADLINE_S = 20.0


@pytest.fixture
def client(docker_engine: DockerEngine) -> Iterator[Any]:
    """A client of the Docker library, independent of the driver. At the end nothing may be left at the engine."""
    with contextlib.closing(docker_engine.client()) as client:
        yield client
        try:
            assert remains(client) == ([], [], [])
            assert kept_images(client, {}) == []
        finally:
            for each in client.containers(all=True):
                with contextlib.suppress(docker.errors.APIError):
                    client.remove_container(each["Id"], force=True, v=True)
            client.prune_networks()
            client.prune_volumes()


@pytest.fixture
async def driver(docker_engine: DockerEngine, client: Any) -> AsyncIterator[DockerDriver]:
    """A driver for that engine."""
    driver = DockerDriver(OWNER, url=docker_engine.url, concurrency_count=16)
    yield driver
    await driver.close()


def remains(client: Any) -> tuple[list[str], list[str], list[str]]:
    """Return the names of containers, networks and volumes at the engine."""
    containers = [each["Names"][0] for each in client.containers(all=True)]
    networks = [each["Name"] for each in client.networks() if each["Name"] not in ("bridge", "host", "none")]
    return containers, networks, [each["Name"] for each in client.volumes()["Volumes"] or ()]


def order(sandbox_id: str = "s-1", program_id: str = "p-1", *, ttl_s: float = 60.0, **template: Any) -> Order:
    """Return an order for a sandbox of busybox."""
    made = Template(**{"image": IMAGE, **template})
    return Order(sandbox_id, made, "plain", program_id, time.time() + ttl_s)


async def preparing_s(driver: DockerDriver) -> float:
    """Return how long the machine, as busy as it is, needs to prepare and to reclaim a sandbox."""
    began_s = time.monotonic()
    await driver.reclaim((await driver.prepare(order("s-0"))).handle)
    return time.monotonic() - began_s


async def until(condition: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def watching(
    driver: DockerDriver, commands: list[Command] | None = None
) -> AsyncIterator[asyncio.Queue[Change | Exception]]:
    """Yield the driver's reports from now on, commands separately; an error that ends them comes last."""
    changes: asyncio.Queue[Change | Exception] = asyncio.Queue()

    told = driver.watch()

    async def watch() -> None:
        async with contextlib.aclosing(told):
            try:
                async for change in told:
                    if not isinstance(change, Command):
                        changes.put_nowait(change)
                    elif commands is not None:
                        commands.append(change)
            except SandboxEngineError as error:
                changes.put_nowait(error)

    task = asyncio.create_task(watch())
    try:
        yield changes
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def the_next(changes: asyncio.Queue[Change | Exception]) -> Change | Exception:
    async with asyncio.timeout(DEADLINE_S):
        return await changes.get()


# --- preparing --------------------------------------------------------------------------------------------------------


async def test_a_sandbox_is_usable_when_it_is_prepared(driver: DockerDriver, client: Any) -> None:
    """It is set up, limited, reachable at its port on loopback alone; reclaiming removes it with its volume."""
    wanted = order(
        command=("sh", "-c", "sleep 0.5; exec nc -ll -p 8000 -e cat"),
        environment={"COLOUR": "green"},
        working_dir="/work",
        mounts=(Mount(target="/data"),),
        ports=(8000,),
        ready_port=8000,
        setup=("echo $COLOUR >colour", "echo more >>colour"),
        ready_command="grep more /work/colour",
        memory_bytes=64 * 1024 * 1024,
        cpus_count=0.5,
        pids_count=64,
    )

    place = await driver.prepare(wanted)

    host, port = place.ports[8000]
    assert host == "127.0.0.1"
    assert await echoed(host, port) == b"hello\n"
    assert place.details == {"container": "thunderagent-s-1"}
    info = client.inspect_container(place.handle)
    limits = info["HostConfig"]
    assert (limits["Memory"], limits["NanoCpus"], limits["PidsLimit"]) == (64 * 1024 * 1024, 500_000_000, 64)
    assert inside(client, place.handle, "cat /work/colour") == "green\nmore\n"
    (found,) = await driver.find()
    assert found.running
    assert found.place == place
    assert found.is_of(OWNER)
    assert not found.is_orphan_of(OWNER)
    assert found.program_id == "p-1"

    await driver.reclaim(place.handle)
    assert remains(client) == ([], [], [])
    await driver.reclaim(place.handle)  # a second reclaim is harmless


async def test_a_port_is_ready_when_somebody_listens_inside(driver: DockerDriver) -> None:
    """The engine's own proxy accepts at once; the sandbox a second later, and not only on loopback."""
    late = "nc -l -s 127.0.0.1 -p 8000 & sleep 1; kill $!; exec nc -ll -p 8000 -e cat"
    started_s = time.monotonic()
    place = await driver.prepare(order(command=("sh", "-c", late), ports=(8000,), ready_port=8000))
    assert time.monotonic() - started_s > 1.0
    assert await echoed(*place.ports[8000]) == b"hello\n"
    await driver.reclaim(place.handle)


async def test_orphans_inside_are_reaped(driver: DockerDriver, client: Any) -> None:
    """An orphan that ends leaves nothing in the process table."""
    place = await driver.prepare(order())
    inside(client, place.handle, "for n in 1 2 3; do (sleep 0.2 &) ; done")
    await until(lambda: inside(client, place.handle, "ps -o comm,stat").count("sleep") == 2)  # its own two
    assert " Z" not in inside(client, place.handle, "ps -o comm,stat")
    await driver.reclaim(place.handle)


async def test_an_image_without_a_shell_is_refused(driver: DockerDriver, client: Any) -> None:
    """Nothing in it could end it in time."""
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
    client.import_image_from_data(empty.getvalue(), repository="without-shell", tag="1")
    with pytest.raises(SandboxRefusedError, match="/bin/sh"):
        await driver.prepare(order(image="without-shell:1", network="own"))


async def test_an_image_keeps_its_entrypoint(driver: DockerDriver, docker_engine: DockerEngine, client: Any) -> None:
    """A command goes to the image's entrypoint, as with `docker run`; without one nothing of the image runs."""
    image = import_busybox_image(docker_engine, "with-entrypoint:1", ('ENTRYPOINT ["env", "A=1"]', "USER user"))
    place = await driver.prepare(order(image=image, command=("sh", "-c", "echo $A >/tmp/a; sleep 100")))
    await until(lambda: inside(client, place.handle, "cat /tmp/a") == "1\n")
    waiting = await driver.prepare(order("s-2", image=image))
    assert "env" not in inside(client, waiting.handle, "ps")
    assert inside(client, waiting.handle, "id -u") == "1000\n"
    await driver.reclaim(place.handle)
    await driver.reclaim(waiting.handle)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"setup": ("true", "echo one; echo two >&2; exit 3")}, ("exit code 3", "one", "two")),
        ({"command": ("nonesuch",), "ready_command": "false"}, ("ended by itself", "nonesuch", "127")),
        ({"command": ("sh", "-c", "sleep 0.3; echo so long; exit 5"), "setup": ("sleep 9",)}, ("so long", "code 5")),
        ({"command": ("sh", "-c", "sleep 0.3; exit 6"), "ports": (80,), "ready_port": 80}, ("code 6",)),
    ],
)
async def test_a_sandbox_that_cannot_be_set_up_is_told_of(
    driver: DockerDriver, template: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A failed command, a missing command, and an early end are each reported in the sandbox's own words."""
    with pytest.raises(SandboxSetupError) as raised:
        await driver.prepare(order(**template))
    for word in words:
        assert word in raised.value.message


async def test_process_left_by_a_setup_command_delays_little(driver: DockerDriver) -> None:
    """The process keeps the command's output open, although the command itself has ended."""
    async with asyncio.timeout(60):
        place = await driver.prepare(order(setup=("sleep 1000 & echo started",)))
    await driver.reclaim(place.handle)


@pytest.mark.parametrize(
    "template",
    [
        {"mounts": (Mount(target="/x", source="/nonesuch"),)},
        {"ports": (80,), "network": "none"},
        {"memory_bytes": 1000},
    ],
)
async def test_setup_that_the_engine_refuses_is_refused(driver: DockerDriver, template: dict[str, Any]) -> None:
    """A retry would not help, and the error says so."""
    with pytest.raises(SandboxRefusedError):
        await driver.prepare(order(**template))


async def test_a_name_that_is_taken_is_a_conflict(driver: DockerDriver, client: Any) -> None:
    """A container with our name that is not ours stays."""
    taken = client.create_container(IMAGE, ["sleep", "100"], name="thunderagent-s-1")
    with pytest.raises(SandboxConflictError):
        await driver.prepare(order())
    assert remains(client)[0] == ["/thunderagent-s-1"]
    client.remove_container(taken["Id"])


# --- images -----------------------------------------------------------------------------------------------------------


async def test_an_image_is_pulled_once_and_reclaimed(docker_engine: DockerEngine, client: Any) -> None:
    """Ten orders cause one pull; the image goes with the last sandbox unless kept. A missing image is reported."""
    async with registry() as (name, manifests_served):
        driver = DockerDriver(OWNER, url=docker_engine.url, concurrency_count=16, images_bytes=0)
        places = await asyncio.gather(*(driver.prepare(order(f"s-{n}", image=name)) for n in range(10)))
        assert len(manifests_served) == 1
        await asyncio.gather(*(driver.reclaim(place.handle) for place in places[1:]))
        assert client.images(name)
        await driver.reclaim(places[0].handle)
        assert not client.images(name)
        assert client.images(IMAGE)  # that one was not pulled
        missing = name.replace("tools", "nonesuch")
        with pytest.raises(SandboxImageError):
            await driver.prepare(order(image=missing))
        await driver.close()

        keeping = DockerDriver(OWNER, url=docker_engine.url, concurrency_count=4, images_bytes=0, keep_images=[name])
        place = await keeping.prepare(order(image=name))
        await keeping.reclaim(place.handle)
        assert client.images(name)
        await keeping.close()


async def test_images_stay_up_to_a_bound_also_after_a_crash(docker_engine: DockerEngine, client: Any) -> None:
    """Of two idle images that are too much, that which was used least recently goes; a later run knows the other."""
    async with registry("first") as (first, _), registry("second") as (second, _):
        size_bytes = client.inspect_image(IMAGE)["Size"]  # all three are the same files
        options: dict[str, Any] = {"url": docker_engine.url, "concurrency_count": 4}
        driver = DockerDriver(OWNER, images_bytes=int(1.5 * size_bytes), **options)
        for name in (first, second, first):
            place = await driver.prepare(order(image=name))
            await driver.reclaim(place.handle)
            assert client.images(name)
        assert not client.images(second)
        place = await driver.prepare(order(image=second))
        assert client.images(second), "what was removed is pulled again"
        client.remove_container(place.handle, force=True)  # as if it had crashed: nothing is told to the driver
        await driver.close()

        later = DockerDriver(Owner(OWNER.owner_id, "run-2"), images_bytes=0, **options)
        await later.sweep()
        assert not client.images(first)
        assert not client.images(second)
        assert not client.images("thunderagent-pulled/*/*")
        assert client.images(IMAGE)
        await later.close()


# --- a setup that is used again ---------------------------------------------------------------------------------------

SETUP = (
    "mkdir -p /repo/src && cd /repo && for n in $(seq 300); do echo line $n > src/file$n; done",
    "cd /repo; ln -s src/file1 link; ln src/file2 hard; chmod 4750 src/file3; chown 1000:7 src/file4",
    "mkdir -p /repo/a-long-name-$(printf '%0120d' 1)/x; echo more >> /etc/passwd; rm /bin/yes; chmod 700 /root",
    "sleep SETUP_S",  # what a real one waits for: downloads, compilers
)
CONTENT = (
    "cd / && find repo etc/passwd bin -xdev | sort | while read -r f; do stat -c '%n %A %u %g %N' \"$f\"; "
    '[ -f "$f" ] && [ ! -L "$f" ] && md5sum < "$f"; done; stat -c \'%A\' /root; ls /bin/yes 2>&1'
)
# All that a program could leave for the next: each file with its content, what is mounted, who listens, variables of
# the first process and of a new one, and who runs besides this. Three files differ by the engine's doing, and the times
# to live.
INVENTORY = (
    "find / -xdev ! -path '/proc/*' ! -path '/sys/*' ! -path /etc/hosts ! -path /etc/hostname "
    "! -path /etc/resolv.conf | sort | while read -r f; do stat -c '%n %A %u %g %N' \"$f\"; "
    '[ -f "$f" ] && [ ! -L "$f" ] && md5sum < "$f"; done; ls -A /dev/shm /dev/mqueue; '
    "cut -d' ' -f2,3 /proc/mounts; cat /proc/net/tcp* /proc/net/udp* /proc/net/unix | wc -l; "
    "tr '\\0' '\\n' < /proc/1/environ | grep -v HOSTNAME; env | grep -v HOSTNAME; "
    'ps -o pid,ppid,args | awk -v own=$$ \'NR > 1 && $1 != own && $2 != own { $1 = $2 = ""; '
    'gsub(/[0-9]/, ""); print }\' | sort'
)
MISCHIEF = (
    "echo SECRET > /secret; echo SECRET > /repo/src/file9; rm -rf /repo/src/file1; echo SECRET >> /etc/hosts;"
    "cp /bin/busybox /repo/planted; echo SECRET > /tmp/x; echo SECRET > /dev/shm/y; chmod 777 /root /etc;"
    "mkdir -p /repo/src/SECRET; echo SECRET > /etc/profile; echo export SECRET=1 > /root/.profile;"
    "mkdir -p /var/spool/cron/crontabs /root/.ssh; echo '* * * * * touch /SECRET' > /var/spool/cron/crontabs/root;"
    "echo SECRET > /root/.ssh/authorized_keys; echo SECRET=1 >> /etc/environment; echo SECRET >> /etc/hostname;"
    "mount -t tmpfs SECRET /mnt; ln -s /proc/1/root /tmp/SECRET; mkfifo /tmp/pipe; hostname SECRET; umask 0;"
    "export SECRET=1; (exec -a SECRET sleep 500) & (trap '' TERM HUP; exec -a SECRET sleep 501) & crond;"
    "nc -l -p 7777 & nc -u -l -p 7778 & echo nameserver 10.9.9.9 > /etc/resolv.conf; touch /mischief"
)


async def test_a_sandbox_from_a_kept_setup_is_like_new_and_starts_soon(
    driver: DockerDriver, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a program did in the last one is looked for in files, processes and network; nothing of it is there."""
    setup_s = max(4.0, 8 * await preparing_s(driver))
    template: dict[str, Any] = {
        "setup": [each.replace("SETUP_S", f"{setup_s:.1f}") for each in SETUP],
        "reuse_setup": True,
    }
    started_s = time.monotonic()
    first = await driver.prepare(order("s-1", ttl_s=600.0, **template))
    new_s = time.monotonic() - started_s
    wanted, inventory = inside(client, first.handle, CONTENT), inside(client, first.handle, INVENTORY)
    assert "repo/hard" in wanted
    assert "No such file" in wanted
    client.exec_start(client.exec_create(first.handle, ["sh", "-c", MISCHIEF])["Id"], detach=True)
    await until(lambda: ":1E61" in inside(client, first.handle, "cat /proc/net/tcp*"))
    await until(lambda: "mischief" in inside(client, first.handle, "ls /"))
    for each in (".ssh/authorized_keys", "crontabs/root", "/dev/shm/y"):
        assert each in inside(client, first.handle, "find / -xdev; find /dev/shm"), "the mischief is done"
    await driver.reclaim(first.handle)

    started_s = time.monotonic()
    second = await driver.prepare(order("s-2", "p-2", ttl_s=600.0, **template))
    reused_s = time.monotonic() - started_s
    with capsys.disabled():
        print(f"\na sandbox with setup {new_s:.2f} s, from its kept setup {reused_s:.2f} s: {reused_s / new_s:.2f}")
    assert inside(client, second.handle, CONTENT) == wanted
    assert inside(client, second.handle, INVENTORY) == inventory
    assert "SECRET" not in inside(client, second.handle, "cat /etc/hosts /etc/hostname /etc/resolv.conf; hostname")
    everywhere = "grep -rl SECRET / --exclude-dir=proc --exclude-dir=sys 2>/dev/null; find / -xdev -name '*SECRET*'"
    assert inside(client, second.handle, everywhere) == ""
    assert inside(client, second.handle, "find / -xdev -name planted; ls /dev/shm /tmp").split() == [
        "/dev/shm:",
        "/tmp:",
    ]
    assert "SECRET" not in inside(client, second.handle, "ps -o args | grep -v grep | grep SECRET")
    assert ":1E61" not in inside(client, second.handle, "cat /proc/net/tcp*")
    assert inside(client, second.handle, "stat -c %A /etc /root").split() == ["drwxr-xr-x", "drwx------"]
    assert reused_s <= 0.3 * new_s
    assert (first.recycled, second.recycled) == (False, True)
    await driver.reclaim(second.handle)


async def test_a_setup_that_failed_is_not_kept(driver: DockerDriver, client: Any) -> None:
    """The next sandbox runs it, and from then on it is kept; a template that does not ask for it runs it each time."""
    count = "echo once >> /count; cat /count"
    broken = {"setup": (count, "exit 1"), "reuse_setup": True}
    for name in ("s-1", "s-2"):
        with pytest.raises(SandboxSetupError, match="exit 1"):
            await driver.prepare(order(name, **broken))
    for reuse_setup in (True, False):
        template = {
            "setup": (count, "date +%s%N > /made 2>&1 || true; head -c8 /dev/urandom | md5sum > /made"),
            "reuse_setup": reuse_setup,
        }
        made = set()
        for name in ("s-3", "s-4"):
            place = await driver.prepare(order(name, **template))
            assert inside(client, place.handle, "cat /count") == "once\n"
            made.add(inside(client, place.handle, "cat /made"))
            await driver.reclaim(place.handle)
        assert len(made) == (1 if reuse_setup else 2)


async def test_links_rights_and_names_of_a_kept_setup_are_the_same(driver: DockerDriver, client: Any) -> None:
    """Links among its files and to one of the image, owners, long names, and what it removed."""
    made = (
        "cd /etc && i=0; while [ $i -lt 300 ]; do echo $i > a$i; i=$((i+1)); done; ln a7 hard; ln -s a8 soft;"
        "chmod 640 a9; chown 7:8 a10; echo long > $(printf '%0200d' 1); ln passwd linked; rm -r /bin/yes"
    )
    seen = (
        "cd /etc && ls | wc -l; cat a299 hard soft linked; stat -c '%a %u %g %h %Y' a5 a7 a9 a10 passwd; cat 000*1;"
        "ls /bin/yes 2>&1"
    )
    template: dict[str, Any] = {"setup": [made], "reuse_setup": True}
    contents = []
    for number in range(2):
        place = await driver.prepare(order(f"s-{number}", **template))
        contents.append(inside(client, place.handle, seen))
        await driver.reclaim(place.handle)
    assert contents[0] == contents[1]
    assert "long" in contents[0]
    assert "No such file" in contents[0]


async def test_a_kept_setup_goes_with_its_driver_or_at_the_next_sweep(
    driver: DockerDriver, docker_engine: DockerEngine, client: Any
) -> None:
    """One that somebody removed is made anew; one that a killed proxy left goes once no container uses it."""
    template: dict[str, Any] = {"setup": ["date > /made"], "reuse_setup": True}
    recycled = []
    for name in ("s-1", "s-2", "s-3"):
        place = await driver.prepare(order(name, **template))
        recycled.append(place.recycled)
        (kept,) = kept_images(client, {})
        if name == "s-2":
            labels = client.inspect_container(place.handle)["Config"]["Labels"]
            assert labels[SANDBOX_LABEL] == "s-2", "the image has that of the first"
        await driver.reclaim(place.handle)
        if name == "s-2":
            client.remove_image(kept)
    assert recycled == [False, True, False]
    left = await driver.prepare(order("s-4", **template))
    assert left.recycled
    await driver.sweep()
    assert kept_images(client, {}), "it is kept"
    later = DockerDriver(Owner(OWNER.owner_id, "run-2"), url=docker_engine.url, concurrency_count=2)
    await later.sweep()
    assert kept_images(client, {}), "a container uses it"
    await driver.reclaim(left.handle)
    await later.sweep()
    assert kept_images(client, {}) == []
    await later.close()


# --- suspending -------------------------------------------------------------------------------------------------------


async def test_a_suspended_sandbox_stands_still_and_goes_on(driver: DockerDriver, client: Any) -> None:
    """Its processes stop and keep their memory; it is woken however often, and removed as it is."""
    count = "i=0; while :; do i=$((i+1)); echo $i > /count; sleep 0.05; done"
    place = await driver.prepare(order(command=["sh", "-c", count], ready_command="test -s /count", stop_grace_s=5.0))

    def counted() -> int:
        head, _ = client.get_archive(place.handle, "/count")  # a frozen one runs no command
        with tarfile.open(fileobj=io.BytesIO(b"".join(head))) as archive:
            file = archive.extractfile("count")
            assert file is not None
            return int(file.read() or 0)

    await driver.suspend(place.handle)
    with pytest.raises(docker.errors.APIError, match="paused"):
        client.exec_start(client.exec_create(place.handle, ["true"])["Id"])
    (found,) = await driver.find()
    assert (found.running, found.ended) == (False, False)
    still = counted()
    await asyncio.sleep(1.0)
    assert counted() == still
    await driver.thaw(place.handle)
    await driver.thaw(place.handle)
    await until(lambda: counted() > still)
    await driver.suspend(place.handle)
    started_s = time.monotonic()
    await driver.reclaim(place.handle)
    print(f"removed in {time.monotonic() - started_s:.1f} s")
    assert await driver.find() == []
    await driver.thaw(place.handle)


# --- the end of a sandbox ---------------------------------------------------------------------------------------------


async def test_a_sandbox_ends_when_its_time_is_over(docker_engine: DockerEngine, client: Any) -> None:
    """It ends without help, also if it ignores the stop: the driver is closed. Its volume goes with it."""
    driver = DockerDriver(OWNER, url=docker_engine.url, concurrency_count=4)
    ttl_s = max(8.0, 10 * await preparing_s(driver))
    for number, command in enumerate(((), STUBBORN)):
        await driver.prepare(order(f"s-{number}", command=command, mounts=(Mount(target="/data"),), ttl_s=ttl_s))
    await driver.close()
    containers, _, volumes = remains(client)
    assert len(containers) == len(volumes) == 2
    await until(lambda: remains(client) == ([], [], []), ttl_s + 50)  # by itself it would last a minute longer


async def test_a_sandbox_has_time_to_end_by_itself(driver: DockerDriver) -> None:
    """It gets TERM; a sandbox that ignores it is killed after its stop time."""
    polite = ("sh", "-c", "trap 'exit 9' TERM; touch /ready; while :; do sleep 0.1; done")
    async with watching(driver) as changes:
        place = await driver.prepare(order(command=polite, ready_command=READY_COMMAND, stop_grace_s=50.0))
        started_s = time.monotonic()
        await driver.reclaim(place.handle)
        assert time.monotonic() - started_s < 25.0
        change = await the_next(changes)
        assert isinstance(change, Change)
        assert change.why == "it ended with exit code 9"

    place = await driver.prepare(order("s-2", command=STUBBORN, ready_command=READY_COMMAND, stop_grace_s=1.0))
    started_s = time.monotonic()
    await driver.reclaim(place.handle)
    assert time.monotonic() - started_s >= 1.0


async def test_commands_inside_are_told_of(driver: DockerDriver, client: Any) -> None:
    """Begin and end of each, in made and in given containers; no probes of the engine itself."""
    commands: list[Command] = []
    probed = {"test": ["CMD-SHELL", "true"], "interval": 200_000_000}
    made = client.create_container(IMAGE, ["sleep", "60"], labels={PROGRAM_LABEL: "p-2"}, healthcheck=probed)
    given = client.create_container(IMAGE, ["sleep", "60"], labels={PROGRAM_LABEL: "p-3"})
    for each in (made, given):
        client.start(each["Id"])
    async with watching(driver, commands):
        place = await driver.prepare(order())
        await asyncio.sleep(1.0)
        commands.clear()
        for handle, told_count in ((place.handle, 2), (given["Id"], 4), (made["Id"], 4)):
            run_id = client.exec_create(handle, ["sh", "-c", "sleep 0.5; echo through"])["Id"]
            await asyncio.to_thread(client.exec_start, run_id)
            await until(lambda told_count=told_count: len(commands) >= told_count)  # an end may be told of late
        await asyncio.sleep(0.5)
    told = [(each.handle, each.ended, each.words.strip()) for each in commands]
    words = "sh -c sleep 0.5; echo through"
    assert told == [
        (handle, ended, "" if ended else words) for handle in (place.handle, given["Id"]) for ended in (False, True)
    ]
    assert commands[0].run_id == commands[1].run_id != commands[2].run_id
    for handle in (place.handle, given["Id"], made["Id"]):
        await driver.reclaim(handle)


async def test_a_sandbox_that_ends_by_itself_is_told_of(driver: DockerDriver, client: Any) -> None:
    """The report has its exit code, or that it ran out of memory; the network of its program goes too."""
    async with watching(driver) as changes:
        place = await driver.prepare(order(command=("sh", "-c", f"{UNTIL_GO}; exit 7"), network="own"))
        inside(client, place.handle, "touch /go")
        change = await the_next(changes)
        assert isinstance(change, Change)
        assert change.ended
        assert change.found.sandbox_id == "s-1"
        assert change.why == "it ended with exit code 7"
        await until(lambda: remains(client) == ([], [], []))
        hungry = ("sh", "-c", f"{UNTIL_GO}; exec tail /dev/zero")
        place = await driver.prepare(order("s-2", command=hungry, memory_bytes=32 * 1024 * 1024))
        inside(client, place.handle, "touch /go")
        change = await the_next(changes)
        assert isinstance(change, Change)
        assert change.why == "it ended with exit code 137: out of memory"


# --- networks ---------------------------------------------------------------------------------------------------------


async def test_the_sandboxes_of_a_program_share_a_network(driver: DockerDriver, client: Any) -> None:
    """They reach each other by name, others do not; the network goes with the last; made concurrently, there is one."""
    mine = [order(f"s-{n}", command=ECHO, network="own") for n in range(4)]
    other = order("s-9", "p-2", network="own")
    *places, stranger = await asyncio.gather(*(driver.prepare(each) for each in (*mine, other)))
    assert len(remains(client)[1]) == 2
    for name in ("s-1", "thunderagent-s-1"):
        ask = f"echo hi | nc -w 2 {name} 8000"
        await until(lambda ask=ask: inside(client, places[0].handle, ask) == "hi\n")  # it may not listen yet
    assert "hi\n" not in inside(client, stranger.handle, "echo hi | nc -w 1 s-1 8000")
    await driver.reclaim(stranger.handle)
    await asyncio.gather(*(driver.reclaim(place.handle) for place in places[1:]))
    assert len(remains(client)[1]) == 1
    await driver.reclaim(places[0].handle)


async def test_a_warm_sandbox_has_a_network_of_its_own(driver: DockerDriver, client: Any) -> None:
    """It has no program yet."""
    places = [await driver.prepare(order(name, "", network="own")) for name in ("s-1", "s-2")]
    assert len(remains(client)[1]) == 2
    for place in places:
        await driver.reclaim(place.handle)


async def test_a_sandbox_may_have_no_network(driver: DockerDriver, client: Any) -> None:
    """It has only loopback."""
    place = await driver.prepare(order(network="none"))
    assert place.address == ""
    assert "eth0" not in inside(client, place.handle, "cat /proc/net/dev")
    await driver.reclaim(place.handle)


# --- what others made -------------------------------------------------------------------------------------------------


async def test_a_labelled_container_is_given_to_us(driver: DockerDriver, client: Any) -> None:
    """It is reported when it appears, found, and removed. One without label, or another proxy's, is not ours."""
    others = {PROGRAM_LABEL: "p-5", OWNER_LABEL: "proxy-2", SANDBOX_LABEL: "s-5", RUN_LABEL: "run-9"}
    async with watching(driver) as changes:
        strangers = [run(client, {}), run(client, {"some": "label"}), run(client, others)]
        given = run(client, {PROGRAM_LABEL: "p-1"})
        change = await the_next(changes)
        assert isinstance(change, Change)
        assert not change.ended
        assert change.found.is_given
        assert change.found.handle == given
        assert change.found.place.address
        (found,) = await driver.find()
        assert found.handle == given
        assert found.place == change.found.place
        for stranger in strangers:
            with pytest.raises(SandboxRefusedError):
                await driver.reclaim(stranger)
        await driver.reclaim(given)
        change = await the_next(changes)
        assert isinstance(change, Change)
        assert change.ended
        for stranger in strangers:
            client.remove_container(stranger, force=True)
        await asyncio.sleep(0.3)
        assert changes.empty()


async def test_a_container_is_adopted_by_name(driver: DockerDriver, client: Any) -> None:
    """It needs no label; it is found, reported and removed like others. Sandboxes cannot be adopted."""
    handle = run(client, {}, name="mine")
    with pytest.raises(NotFoundError):
        await driver.adopt("nonesuch", "")
    async with watching(driver) as changes:
        place = await driver.adopt("mine", "")
        assert place.handle == handle
        assert [found.handle for found in await driver.find()] == [handle]
        sandbox = await driver.prepare(order())
        with pytest.raises(SandboxRefusedError):
            await driver.adopt(sandbox.handle, "")
        await driver.reclaim(handle)
        change = await the_next(changes)
        assert isinstance(change, Change)
        assert change.found.handle == handle
        await driver.reclaim(sandbox.handle)
    theirs = (await driver.adopt(run(client, {}, name="theirs"), "")).handle
    client.remove_container(theirs, force=True)
    assert await driver.find() == []
    assert driver._adopted == set(), "what its owner removed is asked for no more"


# --- nothing leaks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, pytest.param(40, marks=pytest.mark.nightly)])  # the same at more moments
async def test_a_preparation_that_is_cancelled_leaves_nothing(driver: DockerDriver, client: Any, count: int) -> None:
    """Cancelled at many moments; each returns once everything that it began is gone."""
    rng = random.Random(7)
    wanted = {"network": "own", "mounts": (Mount(target="/data"),), "setup": ("sleep 0.2",), "ready_command": "false"}

    async def cancelled(number: int) -> None:
        task = asyncio.create_task(driver.prepare(order(f"s-{number}", f"p-{number % 7}", **wanted)))
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    await asyncio.gather(*(cancelled(number) for number in range(count)))
    assert remains(client) == ([], [], [])


async def test_a_cancellation_at_each_early_moment_leaves_nothing(driver: DockerDriver, client: Any) -> None:
    """One at a time, after 0, 20, 40 ... ms: the calls to create and to start are interrupted at each point."""
    for number in range(15):
        task = asyncio.create_task(driver.prepare(order("s-1", network="own")))
        await asyncio.sleep(number * 0.02)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():  # it completed first
            await driver.reclaim(task.result().handle)
        assert remains(client) == ([], [], [])
        if not task.cancelled():
            break


async def test_leftovers_of_an_earlier_run_are_removed(
    docker_engine: DockerEngine, driver: DockerDriver, client: Any
) -> None:
    """Its networks and stopped containers go; running ones are found as orphans, and networks in use stay."""
    earlier = DockerDriver(Owner("proxy-1", "run-0"), url=docker_engine.url, concurrency_count=4)
    place = await earlier.prepare(order("s-0", network="own"))
    await earlier.close()
    labels = {OWNER_LABEL: "proxy-1", RUN_LABEL: "run-0", SANDBOX_LABEL: "s-7", EXPIRES_LABEL: "1"}
    client.create_network("left", labels={key: labels[key] for key in (OWNER_LABEL, RUN_LABEL, EXPIRES_LABEL)})
    client.create_network("not-ours")
    client.create_container(IMAGE, ["true"], name="left", labels=labels)

    await driver.sweep()

    containers, networks, _ = remains(client)
    assert containers == ["/thunderagent-s-0"]
    assert len(networks) == 2
    (found,) = await driver.find()
    assert found.is_orphan_of(OWNER)
    await driver.reclaim(place.handle)
    assert remains(client)[1] == ["not-ours"]
    client.remove_network("not-ours")


async def test_usage_of_sandboxes_is_measured(driver: DockerDriver) -> None:
    """Disk: what it wrote, including its volume; memory: what its processes hold."""
    hold = "dd if=/dev/zero of=/big bs=1M count=3; dd if=/dev/zero of=/data/big bs=1M count=2; touch /ready; sleep 100"
    wanted = order(command=("sh", "-c", hold), ready_command="test -f /ready", mounts=(Mount(target="/data"),))
    place = await driver.prepare(wanted)
    usage = await driver.measure([place.handle, "0" * 64])
    assert list(usage.disk_bytes) == [place.handle]
    assert 5 * 1024 * 1024 <= usage.disk_bytes[place.handle] < 6 * 1024 * 1024
    assert 0 < usage.memory_bytes[place.handle] < 20 * 1024 * 1024
    await driver.reclaim(place.handle)


# --- an engine in trouble ---------------------------------------------------------------------------------------------


async def test_a_full_disk_is_told_of(driver: DockerDriver, docker_engine: DockerEngine) -> None:
    """The error suggests a later retry, which works."""
    with docker_engine.full_disk(), pytest.raises(SandboxSpaceError):
        await driver.prepare(order(network="own"))
    place = await driver.prepare(order(network="own"))
    await driver.reclaim(place.handle)


async def test_an_engine_that_is_not_there_is_told_of() -> None:
    """Making a driver for it is no error; using the driver is."""
    driver = DockerDriver(OWNER, url="unix:///nonesuch/docker.sock", concurrency_count=2)
    for what in (driver.prepare(order()), driver.find(), driver.sweep(), driver.reclaim("x"), driver.measure(["x"])):
        with pytest.raises(SandboxEngineError):
            await what
    with pytest.raises(SandboxEngineError):
        await anext(driver.watch())
    await driver.close()


async def test_an_engine_that_is_restarted_is_used_again(driver: DockerDriver, docker_engine: DockerEngine) -> None:
    """While it is gone all calls report that, a waiting one is cut off, and the watch ends; afterwards all works."""
    async with watching(driver) as changes:
        preparing = asyncio.create_task(driver.prepare(order("s-8", setup=("sleep 50",))))
        place = await driver.prepare(order())
        await asyncio.sleep(0.3)
        await asyncio.to_thread(docker_engine.end)
        with pytest.raises((SandboxEngineError, SandboxSetupError)):
            await preparing
        while isinstance(change := await the_next(changes), Change):
            assert change.ended
        assert isinstance(change, SandboxEngineError)
    with pytest.raises(SandboxEngineError):
        await driver.find()
    with pytest.raises(SandboxEngineError):
        await driver.reclaim(place.handle)
    await asyncio.to_thread(docker_engine.start)
    place = await driver.prepare(order("s-2"))
    assert place.handle in {found.handle for found in await driver.find()}
    for found in await driver.find():
        await driver.reclaim(found.handle)


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.nightly)])  # the same with more sandboxes
async def test_the_reaper_removes_what_a_killed_proxy_leaves(
    driver: DockerDriver, docker_engine: DockerEngine, client: Any, count: int
) -> None:
    """After a kill with live sandboxes and an engine restart, containers, networks and the reaper itself go."""
    run_id = f"killed-{os.getpid()}"
    ttl_s = max(1.0 * count, 2 * count * await preparing_s(driver))
    script = textwrap.dedent(f"""
        import asyncio, time
        from thunderagent.tools.base import Order, Owner
        from thunderagent.tools.docker import DockerDriver
        from thunderagent.tools.template import Template

        async def main():
            driver = DockerDriver(Owner("proxy-1", {run_id!r}), url={docker_engine.url!r}, concurrency_count=16)
            await driver.open()
            template = Template(image={IMAGE!r}, network="own", command={STUBBORN!r})
            orders = [Order(f"s-{{n}}", template, "t", f"p-{{n % 5}}", time.time() + {ttl_s}) for n in range({count})]
            await asyncio.gather(*map(driver.prepare, orders))
            print("ready", flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main())
    """)
    proxy = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert proxy.stdout is not None
    assert await proxy.stdout.readline() == b"ready\n"
    (reaper,) = reapers(run_id)
    # Those that did not end by themselves, and those of another run.
    late = {OWNER_LABEL: "proxy-1", RUN_LABEL: run_id, SANDBOX_LABEL: "s-99", EXPIRES_LABEL: str(int(time.time()))}
    run(client, late)
    stranger = run(client, {**late, RUN_LABEL: "another"})
    proxy.send_signal(signal.SIGKILL)
    await proxy.wait()
    assert len(remains(client)[1]) == 5
    await asyncio.to_thread(docker_engine.restart)
    client.start(stranger)
    await until(lambda: not is_alive(reaper), ttl_s + 120)
    assert len(remains(client)[0]) == 1
    assert remains(client)[1] == []
    client.remove_container(stranger, force=True)


async def test_the_reaper_ends_with_a_proxy_that_leaves_nothing(docker_engine: DockerEngine, client: Any) -> None:
    """It has nothing to do, and ends at once."""
    run_id = f"orderly-{os.getpid()}"
    driver = DockerDriver(Owner("proxy-1", run_id), url=docker_engine.url, concurrency_count=2)
    try:
        await driver.open()
        await until(lambda: reapers(run_id))
        (reaper,) = reapers(run_id)
        place = await driver.prepare(order())
        await driver.reclaim(place.handle)
        assert is_alive(reaper)
    finally:
        await driver.close()
    await until(lambda: not is_alive(reaper), 30.0)


async def test_a_driver_that_is_closed_leaves_no_thread_and_no_socket(docker_engine: DockerEngine, client: Any) -> None:
    """This holds after every kind of call: watch, prepare, give up, measure."""
    client.ping()
    gc.collect()
    before = (threading.active_count(), sockets_count())
    driver = DockerDriver(OWNER, url=docker_engine.url, concurrency_count=8)
    async with watching(driver):
        places = await asyncio.gather(*(driver.prepare(order(f"s-{n}", setup=("true",))) for n in range(6)))
        await driver.measure([place.handle for place in places])
        with pytest.raises(SandboxSetupError):
            await driver.prepare(order("s-9", setup=("false",)))
        await asyncio.gather(*(driver.reclaim(place.handle) for place in places))
    await driver.close()
    # The current thread, and what `to_thread` and the library's pool may hold.
    await until(lambda: threading.active_count() <= before[0] + 1 and sockets_count() <= before[1] + 2)


@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.nightly)])  # the same for longer
async def test_the_event_loop_is_never_kept(
    driver: DockerDriver, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Many sandboxes are prepared and reclaimed while the loop reads the clock each millisecond.

    Only the processor time of the loop's own thread between two reads counts: it may wait for a processor or for its
    turn among threads as long as the machine has other work.
    """
    late_ms: list[float] = []
    kept_ms: list[float] = []

    async def beat() -> None:
        while True:
            started_s, computed_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            late_ms.append((time.perf_counter() - started_s) * 1000 - 1)
            kept_ms.append((time.thread_time() - computed_s) * 1000)

    hands = asyncio.Semaphore(16)

    async def live(number: int) -> None:
        async with hands:
            wanted = order(f"s-{number}", f"p-{number}", setup=("true",), command=ECHO, ports=(8000,))
            place = await driver.prepare(wanted)
            await driver.find()
            await driver.reclaim(place.handle)

    heart = asyncio.create_task(beat())
    started_s = time.monotonic()
    await asyncio.gather(*(live(number) for number in range(count)))
    took_s = time.monotonic() - started_s
    heart.cancel()
    with capsys.disabled():
        print(f"\n{count} sandboxes in {took_s:.1f} s; the loop was")
        for what, times_ms in (("late by", late_ms), ("kept for", kept_ms)):
            times_ms.sort()
            over_count = sum(each > 5 for each in times_ms)
            print(
                f"  {what} {times_ms[int(len(times_ms) * 0.99)]:.1f} ms (p99), {times_ms[-1]:.1f} ms (longest),"
                f" by more than 5 ms {over_count} times of {len(times_ms)}"
            )
    assert kept_ms[int(len(kept_ms) * 0.99)] < 5.0


# --- helpers ----------------------------------------------------------------------------------------------------------


async def echoed(host: str, port: int) -> bytes:
    """Return an echo server's answer to a line."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"hello\n")
        async with asyncio.timeout(5):
            return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


def inside(client: Any, handle: str, command: str) -> str:
    """Run a shell command in a container; return its output."""
    made = client.exec_create(handle, ["sh", "-c", command])
    return cast("bytes", client.exec_start(made["Id"])).decode()


def run(client: Any, labels: dict[str, str], name: str | None = None) -> str:
    """Run a container unknown to the driver; return its id."""
    made = client.create_container(IMAGE, ["sleep", "1000"], labels=labels, name=name)
    client.start(made["Id"])
    return str(made["Id"])


def sockets_count() -> int:
    """Return the number of open sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):
            count += stat.S_ISSOCK(os.fstat(int(name)).st_mode)
    return count


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False
