"""The Docker driver without an engine: the process that ends a sandbox in time, errors, readiness, events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import docker
import pytest
import requests

from thunderagent.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxPullLimitError,
    SandboxRefusedError,
    SandboxSpaceError,
)
from thunderagent.tools.base import (
    EXPIRES_LABEL,
    OWNER_LABEL,
    PROGRAM_LABEL,
    SANDBOX_LABEL,
    Change,
    Command,
    Order,
    Owner,
)
from thunderagent.tools.docker import DockerDriver
from thunderagent.tools.docker.answers import Listed
from thunderagent.tools.docker.engine import Engine, mapped
from thunderagent.tools.docker.images import LEAST_LIMIT_S, Marks, PullLimits, registry_of, stated_limit_s
from thunderagent.tools.docker.networks import Networks
from thunderagent.tools.docker.prepare import STOP_GRACE_LABEL
from thunderagent.tools.docker.reap import reap
from thunderagent.tools.docker.scripts import FIRST_PROCESS, UNTIL_COMMAND, UNTIL_PORT
from thunderagent.tools.docker.setups import Setups
from thunderagent.tools.template import Template

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

SHELLS = [shell for shell in (["dash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(shell[0])]


def in_each_shell(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in all shells at once, since it only waits."""

    @functools.wraps(test)
    def in_all(**given: Any) -> None:
        with ThreadPoolExecutor(len(SHELLS)) as pool:
            running = [pool.submit(test, shell, **given) for shell in SHELLS]
        for each in running:
            each.result()

    signature = inspect.signature(test)
    without_shell = [each for each in signature.parameters.values() if each.name != "shell"]
    in_all.__signature__ = signature.replace(parameters=without_shell)  # type: ignore[attr-defined]
    return in_all


@contextlib.contextmanager
def first_process(
    shell: list[str], *command: str, ttl_s: float = 30, ask: str = "TERM"
) -> Iterator[subprocess.Popen[str]]:
    """Run the first process of a sandbox, here as an ordinary one."""
    with subprocess.Popen(
        [*shell, "-c", FIRST_PROCESS, "thunderagent", str(int(ttl_s)), ask, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            # A kernel does this when the first process of a container ends.
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)


def fill(process: subprocess.Popen[str]) -> None:
    """Fill the pipe of its errors, so that whoever writes there waits for a reader."""
    assert process.stderr is not None
    there = os.open(f"/proc/self/fd/{process.stderr.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(there, b"x" * size)
    finally:
        os.close(there)


# --- the first process ------------------------------------------------------------------------------------------------


@in_each_shell
def test_the_first_process_ends_with_its_command(shell: list[str]) -> None:
    """It has the command's exit code and passes all arguments; after the command's output it says why it ended."""
    with first_process(shell, "sh", "-c", 'echo "$1"; exit 7', "sh", "a  b'$c") as process:
        assert process.wait(5) == 7
        assert process.stdout is not None
        assert process.stdout.readline() == "a  b'$c\n"


@in_each_shell
def test_the_first_process_ends_when_its_time_is_over(shell: list[str]) -> None:
    """It ends whatever the command does, and without a command."""
    stubborn = ("sh", "-c", "trap '' TERM ALRM; while :; do sleep 1; done")
    started_s = time.monotonic()
    with first_process(shell, ttl_s=1) as idle, first_process(shell, *stubborn, ttl_s=1) as busy:
        assert idle.wait(20) == busy.wait(20) == 124
        assert time.monotonic() - started_s > 0.9


@in_each_shell
def test_the_watchdog_cannot_be_asked_to_end(shell: list[str]) -> None:
    """A program that sends TERM to every sleep and every shell delays nothing."""
    started_s = time.monotonic()
    with first_process(shell, "sh", "-c", "trap '' TERM; while :; do :; done", ttl_s=1) as process:
        time.sleep(0.3)
        for name in ("INT", "HUP", "TERM"):
            subprocess.run(["pkill", f"-{name}", "-s", str(process.pid), "-x", "sleep"], check=False)
        assert process.wait(20) == 124
    assert time.monotonic() - started_s > 0.9


@in_each_shell
def test_output_that_nobody_reads_keeps_nothing_alive(shell: list[str], tmp_path: Path) -> None:
    """Neither the end of the time nor the command's end waits for a reader."""
    full = tmp_path / f"{shell[0]}-full"
    flood = "while :; do echo much >&2; done"
    after_its_end = f"until [ -e {full} ]; do sleep 0.05; done; exit 3"
    with (
        first_process(shell, "sh", "-c", flood, ttl_s=2) as during,
        first_process(shell, "sh", "-c", after_its_end, ttl_s=2) as after,
    ):
        fill(during)
        fill(after)
        full.touch()
        assert during.wait(20) == after.wait(20) == 124


@in_each_shell
def test_the_command_is_asked_to_end(shell: list[str]) -> None:
    """It gets TERM, and may take its time; the exit code is its own."""
    polite = "trap 'sleep 0.1; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    with first_process(shell, "sh", "-c", polite) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(5) == 9


@in_each_shell
def test_an_image_may_choose_the_signal(shell: list[str]) -> None:
    """TERM for the first process becomes the signal of the image's own command."""
    with first_process(
        shell, "sh", "-c", "trap 'exit 8' USR1; echo ready; while :; do sleep 0.05; done", ask="USR1"
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(5) == 8


@in_each_shell
def test_a_command_that_ignores_term_goes_on(shell: list[str]) -> None:
    """A second TERM neither ends it nor is an error; KILL ends all."""
    with first_process(shell, "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        process.kill()
        assert process.wait(5) == -9


@in_each_shell
def test_a_waiting_sandbox_ends_at_once_when_asked(shell: list[str]) -> None:
    """Without a command there is nothing to wait for."""
    with first_process(shell) as process:
        status = Path(f"/proc/{process.pid}/status")
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
            time.sleep(0.01)
        time.sleep(0.2)  # until it waits
        process.terminate()
        assert process.wait(5) == 143


# --- readiness --------------------------------------------------------------------------------------------------------


@in_each_shell
def test_probe_waits_until_a_command_succeeds(shell: list[str], tmp_path: Path) -> None:
    """It runs the command at the given interval, without the command's output."""
    there = tmp_path / shell[0]
    arguments = ["sh", f"echo looking; test -f {there}", "0.05"]
    with subprocess.Popen([*shell, "-c", UNTIL_COMMAND, *arguments], stdout=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        there.touch()
        assert process.wait(10) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b""


@in_each_shell
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_probe_waits_until_a_port_is_open(shell: list[str], host: str) -> None:
    """A listener on loopback alone cannot be reached from outside; a bound socket does not listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket() as local, socket.socket(family) as outside:
        local.bind(("127.0.0.1", 0))
        local.listen()
        outside.bind((host, 0))
        for each, is_reachable in ((local, False), (outside, True)):
            port = f"{each.getsockname()[1]:04X}"
            with subprocess.Popen([*shell, "-c", UNTIL_PORT, "sh", port, "0.05"]) as process:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.2)
                if is_reachable:
                    each.listen()
                    assert process.wait(20) == 0
                process.kill()


# --- errors -----------------------------------------------------------------------------------------------------------


def answer(status: int, message: str) -> docker.errors.APIError:
    """Return the library's error for an answer of the engine."""
    response = requests.Response()
    response.status_code = status
    kind = docker.errors.ImageNotFound if "No such image" in message else docker.errors.APIError
    return kind("error", response=response, explanation=message)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(404, "No such image: nonesuch:latest"), SandboxImageError),
        (
            answer(404, "pull access denied for x, repository does not exist or may require docker login"),
            SandboxImageError,
        ),
        (answer(404, "manifest for x:y not found: manifest unknown"), SandboxImageError),
        (answer(500, 'Get "http://localhost:1/v2/": dial tcp: connect: connection refused'), SandboxError),
        (answer(500, "mkdir /var/lib/docker/overlay2/1: no space left on device"), SandboxSpaceError),
        (
            answer(500, "could not find an available, non-overlapping IPv4 address pool among the defaults"),
            SandboxSpaceError,
        ),
        (answer(409, 'Conflict. The container name "/x" is already in use'), SandboxConflictError),
        (answer(500, "Bind for 127.0.0.1:80 failed: port is already allocated"), SandboxConflictError),
        (answer(400, "Minimum memory limit allowed is 6MB"), SandboxRefusedError),
        (answer(503, "upstream"), SandboxEngineError),
        (answer(500, "something else"), SandboxError),
        (answer(500, "toomanyrequests: You have reached your unauthenticated pull rate limit."), SandboxPullLimitError),
        (answer(500, "toomanyrequests: Rate exceeded"), SandboxPullLimitError),
        (answer(404, "pull access denied for x: denied: Request exceeded pull rate limit"), SandboxPullLimitError),
        (
            answer(500, "unexpected status from GET request to https://q/v2/: 429 Too Many Requests"),
            SandboxPullLimitError,
        ),
        (answer(500, "write /x: disk quota exceeded"), SandboxSpaceError),
        (docker.errors.APIError("x", explanation="write /x: no space left on device"), SandboxSpaceError),
        (docker.errors.InvalidArgument("x"), SandboxError),
        (requests.ConnectionError("refused"), SandboxEngineError),
        (requests.ReadTimeout("slow"), SandboxEngineError),
        (ConnectionResetError(), SandboxEngineError),
        (TimeoutError(), SandboxEngineError),
    ],
)
def test_errors_are_mapped(error: Exception, kind: type[SandboxError]) -> None:
    """Each has its place in the tree, with the engine's own words."""
    ours = mapped(error)
    assert type(ours) is kind
    if isinstance(error, docker.errors.APIError):
        assert str(error.explanation) in ours.message


# --- A fake engine ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(tmp_path: Path, *answers: bytes, asked: list[str] | None = None) -> Iterator[str]:
    """Answer each connection's first request with the next answer, and close it; yield the URL.

    `asked` gets each request's method and path, without the version.
    """
    path = str(tmp_path / "docker.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve() -> None:
            for each in (http(b'{"ApiVersion": "1.43"}'), *answers):
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        method, path, _ = connection.recv(65536).decode().split(" ", 2)
                        if asked is not None:
                            asked.append(f"{method} /{path.partition('?')[0].split('/', 2)[-1]}")
                        connection.sendall(each)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"unix://{path}"
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def http(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def event(action: str, handle: str, **attributes: str) -> bytes:
    text = ", ".join(f'"{key}": "{value}"' for key, value in attributes.items())
    return b'{"Type": "container", "Action": "%s", "Actor": {"ID": "%s", "Attributes": {%s}}, "time": 1}\n' % (
        action.encode(),
        handle.encode(),
        text.encode(),
    )


async def test_an_end_is_told_once(tmp_path: Path) -> None:
    """OOM, die and destroy are one change; containers of others are ignored; the stream's end is an error."""
    ours = {SANDBOX_LABEL: "s-1", OWNER_LABEL: "me"}
    stream = http(
        event("start", "a", **ours)
        + event("die", "b", exitCode="1")
        + event("die", "b", exitCode="1", **{**ours, OWNER_LABEL: "another"})
        + event("oom", "a", **ours)
        + event("die", "a", exitCode="137", **ours)
        + event("destroy", "a", **ours)
        + event("destroy", "c", **{PROGRAM_LABEL: "p-1"})
        + event("oom", "d", **ours)  # of a command inside
        + event("die", "d", exitCode="124", **{**ours, EXPIRES_LABEL: "1"})
        + event("oom", "e", **ours)
        + event("die", "e", exitCode="0", **ours)
    )
    with engine(tmp_path, stream) as url:
        driver = DockerDriver(Owner("me", "run"), url=url, concurrency_count=2)
        changes = driver.watch()
        told = [await anext(changes) for _ in range(4)]
        with pytest.raises(SandboxEngineError):
            await anext(changes)
        await driver.close()
    assert sorted((change.found.handle, change.ended, change.why) for change in told) == [
        ("a", True, "it ended with exit code 137: out of memory"),
        ("c", True, "it was removed"),
        ("d", True, "its time to live is over"),
        ("e", True, "it ended with exit code 0"),
    ]


async def test_commands_inside_are_told_of(tmp_path: Path) -> None:
    """Begin and end of each are reported, by the engine's name for it; those in others' containers are not."""
    ours = {SANDBOX_LABEL: "s-1", OWNER_LABEL: "me"}
    stream = http(
        event("exec_start: bash -c pytest -q: all", "a", execID="e-1", **ours)
        + event("exec_start: ls", "b", execID="e-2", **{**ours, OWNER_LABEL: "another"})
        + event("exec_die", "b", execID="e-2", **{**ours, OWNER_LABEL: "another"})
        + event("exec_die", "a", execID="e-1", exitCode="1", **ours)
        + event("die", "a", exitCode="0", **ours)
    )
    with engine(tmp_path, stream) as url:
        driver = DockerDriver(Owner("me", "run"), url=url, concurrency_count=2)
        changes = driver.watch()
        told = [await anext(changes) for _ in range(3)]
        await changes.aclose()
        await driver.close()
    assert told[:2] == [
        Command("a", "e-1", ended=False, words="bash -c pytest -q: all"),
        Command("a", "e-1", ended=True),
    ]
    assert isinstance(told[2], Change)
    assert told[2].ended


@pytest.mark.parametrize(
    ("config", "run_ids"),
    [
        ("{}", ["e-1", "e-2", "e-3"]),
        ('{"Healthcheck": {"Test": ["NONE"]}}', ["e-1", "e-2", "e-3"]),
        ('{"Healthcheck": {"Test": ["CMD-SHELL", "true"]}}', ["e-3"]),
    ],
)
async def test_probes_of_the_engine_are_not_taken_for_commands(tmp_path: Path, config: str, run_ids: list[str]) -> None:
    """A given container is asked once whether it has some; our own have no health check."""
    given, ours = {PROGRAM_LABEL: "p-1"}, {SANDBOX_LABEL: "s-1", OWNER_LABEL: "me"}
    stream = http(
        event("exec_start: sh -c true", "a", execID="e-1", **given)
        + event("exec_start: sh -c true", "a", execID="e-2", **given)
        + event("exec_start: sh -c true", "b", execID="e-3", **ours)
    )
    with engine(tmp_path, stream, http(b'{"Id": "a", "Config": %s}' % config.encode())) as url:
        driver = DockerDriver(Owner("me", "run"), url=url, concurrency_count=2)
        changes = driver.watch()
        told = [await anext(changes) for _ in run_ids]
        with pytest.raises(SandboxEngineError):
            await anext(changes)
        await driver.close()
    assert [change.run_id for change in told if isinstance(change, Command)] == run_ids


async def test_containers_whose_end_was_missed_are_not_remembered(tmp_path: Path) -> None:
    """When contact is lost, the knowledge of given containers is dropped: each is asked about again."""
    streams = [http(event("exec_start: sh -c true", name, execID="e-1", **{PROGRAM_LABEL: "p-1"})) for name in "ab"]
    answers = [http(b'{"Id": "%s", "Config": {}}' % name) for name in (b"a", b"b")]
    with engine(tmp_path, streams[0], answers[0], streams[1], answers[1]) as url:
        driver = DockerDriver(Owner("me", "run"), url=url, concurrency_count=2)
        for name in "ab":
            changes = driver.watch()
            assert isinstance(await anext(changes), Command)
            await changes.aclose()
            assert set(driver._probed) == {name}
        await driver.close()


async def test_an_answer_that_is_none_is_an_error_of_the_engine(tmp_path: Path) -> None:
    """It is cut off or of another kind: no error of the library leaves the driver."""
    with engine(tmp_path, http(b'{"not": "a list"}'), b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[") as url:
        driver = DockerDriver(Owner("me", "run"), url=url, concurrency_count=2)
        for _ in range(2):
            with pytest.raises(SandboxError):
                await driver.find()
        await driver.close()


@pytest.mark.parametrize("labels", [{PROGRAM_LABEL: "p-1"}, {SANDBOX_LABEL: "s-1", OWNER_LABEL: "me"}])
@pytest.mark.parametrize("grace", ["abc", "inf", "nan", ""])
async def test_a_label_that_anybody_may_set_stops_no_removal(
    tmp_path: Path, labels: dict[str, str], grace: str
) -> None:
    """A given container has no time to end by itself; that of ours is a number, and a year at most."""
    labels = {**labels, STOP_GRACE_LABEL: grace}
    running = {"Id": "a", "Name": "/a", "State": {"Running": True}, "Config": {"Labels": labels, "Image": "i"}}
    ended = {**running, "State": {"Running": False}}
    asks_to_stop = SANDBOX_LABEL in labels and grace in ("inf", "nan")
    stopping = [http(b"", 204), *([http(json.dumps(ended).encode())] if grace == "inf" else [])] if asks_to_stop else []
    asked: list[str] = []
    with engine(tmp_path, http(json.dumps(running).encode()), *stopping, http(b"", 204), asked=asked) as url:
        driver = DockerDriver(Owner("me", "run"), url=url, concurrency_count=2)
        async with asyncio.timeout(5):
            await driver.reclaim("a")
        await driver.close()
    assert asked[-1] == "DELETE /containers/a"
    assert ("POST /containers/a/kill" in asked) == asks_to_stop


LEFTOVERS = b'[{"Id": "a", "State": "dead", "Labels": %s}, {"Id": "b", "State": "dead", "Labels": %s}]'
NETWORKS = b'[{"Name": "n", "Labels": %s}, {"Name": "m", "Labels": %s}]'
STUCK = http(b'{"message": "driver failed to remove the root filesystem"}', 500)
IMAGES = http(b'[{"RepoTags": ["thunderagent-kept:x", "mine:1"]}, {"RepoTags": ["thunderagent-kept:y"]}]')
KEPT = [IMAGES, STUCK, http(b"[]")]
REMOVALS = [
    *("DELETE /containers/a", "DELETE /containers/b", "DELETE /networks/n", "DELETE /networks/m"),
    *("DELETE /images/thunderagent-kept:x", "DELETE /images/thunderagent-kept:y"),
]


async def test_a_leftover_that_cannot_be_removed_keeps_no_other(tmp_path: Path) -> None:
    asked: list[str] = []
    containers = [http(LEFTOVERS % (b"{}", b"{}")), STUCK, http(b"", 204)]
    networks = [http(NETWORKS % (b"{}", b"{}")), http(b"[]"), STUCK, http(b"[]"), http(b"", 204)]
    with engine(tmp_path, *containers, *networks, *KEPT, asked=asked) as url:
        driver = DockerDriver(Owner("me", "run"), url=url, concurrency_count=2)
        await driver.sweep()
        await driver.close()
    assert [each for each in asked if each.startswith("DELETE")] == REMOVALS


def test_the_reaper_goes_on_without_one_that_cannot_be_removed(tmp_path: Path) -> None:
    """It is tried again for an hour after it expired."""
    labels = b'{"thunderagent.expires": "100"}'
    for now_s, left_s in ((101.0, 100.0), (5000.0, None)):
        asked: list[str] = []
        containers = [http(LEFTOVERS % (labels, labels)), STUCK, http(b"", 204)]
        networks = [http(NETWORKS % (labels, labels)), http(b"[]"), STUCK, http(b"[]"), http(b"", 204)]
        folder = tmp_path / f"{now_s:g}"
        folder.mkdir()
        kept = KEPT if left_s is None else []  # sandboxes that are left may be of them
        with engine(folder, *containers, *networks, *kept, asked=asked) as url:
            assert reap(url, Owner("me", "run"), now_s) == left_s
        assert [each for each in asked if each.startswith("DELETE")] == REMOVALS[: 4 + 2 * bool(kept)]


async def test_an_engine_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    """Making a driver for it is no error; using the driver is."""
    driver = DockerDriver(Owner("me", "run"), url=f"unix://{tmp_path}/nonesuch", concurrency_count=2)
    order = Order("s-1", Template(image="x"), "", "p-1", time.time() + 10)
    asks: list[Any] = [driver.prepare(order), driver.find(), driver.reclaim("x"), anext(driver.watch())]
    for ask in asks:
        with pytest.raises(SandboxEngineError):
            await ask
    await driver.close()


@pytest.mark.parametrize(
    ("state", "running", "ended"),
    [
        ("created", False, False),
        ("running", True, False),
        ("paused", False, False),
        ("restarting", False, False),
        ("exited", False, True),
        ("dead", False, True),
    ],
)
def test_only_a_container_that_will_not_run_again_has_ended(state: str, *, running: bool, ended: bool) -> None:
    found = Listed(id="c", state=state, names=["/box"]).found()
    assert (found.running, found.ended) == (running, ended)


class SlowEngine:
    """Makes nothing, and is slow; counts concurrent requests."""

    def __init__(self) -> None:
        self.asking_count = self.most_count = 0

    async def ask(self, what: Callable[..., Any]) -> None:
        self.asking_count += 1
        self.most_count = max(self.most_count, self.asking_count)
        await asyncio.sleep(0.02)
        self.asking_count -= 1

    def whole(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(what)


async def test_a_network_is_never_made_twice_at_once() -> None:
    """A cancelled caller leaves a running call: the next one waits for its end. An engine would make two."""
    slow = SlowEngine()
    networks = Networks(slow, Owner("me", "run"))  # type: ignore[arg-type]
    made = Order("s-1", Template(image="x", network="own"), "", "p-1", time.time() + 10)
    name = networks.claim(made)
    first = asyncio.create_task(networks.make(name, made))
    while not slow.asking_count:
        await asyncio.sleep(0)
    first.cancel()
    await networks.make(name, made)
    assert (first.cancelled(), slow.most_count) == (True, 1)


def test_a_registry_that_limits_pulls_is_left_alone_for_longer_each_time() -> None:
    """Of two pulls at a time the second doubles nothing; another registry is asked meanwhile."""
    now_s = 0.0
    limits = PullLimits(lambda: now_s)
    assert limits.hit("docker.io", "toomanyrequests").retry_after_s == LEAST_LIMIT_S
    assert limits.hit("docker.io", "toomanyrequests").retry_after_s == LEAST_LIMIT_S
    with pytest.raises(SandboxPullLimitError, match=r"docker\.io"):
        limits.check("docker.io")
    limits.check("quay.io")
    now_s = LEAST_LIMIT_S
    limits.check("docker.io")
    assert limits.hit("docker.io", "toomanyrequests").retry_after_s == 2 * LEAST_LIMIT_S
    now_s += 2 * LEAST_LIMIT_S
    limits.passed("docker.io")
    assert limits.hit("docker.io", "retry-after: 2m").retry_after_s == 120


@pytest.mark.parametrize(
    ("said", "limit_s"),
    [
        ("retry-after: 880.092µs", 880.092e-6),
        ("Retry after 45 seconds", 45.0),
        ("try again in 2 min", 120.0),
        ("no", 0.0),
    ],
)
def test_a_registry_says_when_to_come_again(said: str, limit_s: float) -> None:
    assert stated_limit_s(said) == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("python:3.12", "docker.io"),
        ("me/x", "docker.io"),
        ("index.docker.io/me/x", "docker.io"),
        ("ghcr.io/a/b@sha256:1", "ghcr.io"),
        ("localhost/a", "localhost"),
        ("host:5000/a", "host:5000"),
    ],
)
def test_an_image_is_of_its_registry(name: str, registry: str) -> None:
    assert registry_of(name) == registry


# --- kept setups, marked images ---------------------------------------------------------------------------------------


class KeepingEngine:
    """An engine whose containers have volumes, and which has a kept setup of an earlier run; it is its own client."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    async def ask(self, what: Callable[[Any], Any]) -> Any:
        return what(self)

    def whole(self, what: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.create_task(what)

    def inspect_container(self, _handle: str) -> dict[str, Any]:
        return {"Image": "sha256:base", "Mounts": [{"Type": "volume"}]}

    def images(self, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
        assert filters == {"label": [f"{OWNER_LABEL}=me"], "reference": ["thunderagent-kept"]}
        return [{"RepoTags": ["thunderagent-kept:earlier"]}]

    def remove_image(self, name: str) -> None:
        self.removed.append(name)


async def test_a_setup_that_cannot_be_kept_is_not_tried_again_and_keeps_no_sweep() -> None:
    """Nothing is swept only while one is being kept, which may just have been made."""
    engine = KeepingEngine()
    setups = Setups(cast("Engine", engine), Owner("me", "run"))
    assert setups.begin("key")
    assert not setups.begin("key"), "it is being kept"
    await setups.sweep()
    assert engine.removed == []
    await setups.keep("key", "a", 60.0, worked=True)
    assert (setups.begin("key"), setups.image_of("key")) == (False, "")
    await setups.sweep()
    assert engine.removed == ["thunderagent-kept:earlier"]


class ImageStore:
    """The images of an engine: by name, size and when each was tagged last."""

    def __init__(self, **sizes_bytes: int) -> None:
        self.tags = {name: name for name in sizes_bytes}
        self.sizes_bytes = sizes_bytes
        self.tagged: dict[str, int] = {}

    def tag(self, name: str, repository: str, tag: str, *, force: bool) -> None:
        assert force
        self.tags[f"{repository}:{tag}"] = name
        self.tagged[name] = len(self.tagged) + sum(self.tagged.values())

    def images(self, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
        (reference,) = filters["reference"]
        marks = [tag for tag in self.tags if tag.startswith(reference.rstrip("*"))]
        return [{"RepoTags": [tag], "Size": self.sizes_bytes[self.tags[tag]]} for tag in marks]

    def inspect_image(self, tag: str) -> dict[str, Any]:
        name = self.tags[tag]
        return {"Id": name, "Metadata": {"LastTagTime": f"{self.tagged[name]:09}"}}

    def remove_image(self, tag: str) -> None:
        del self.tags[tag]


def test_least_recently_used_idle_images_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a container uses, or a preparation needs, stays and does not count."""
    monkeypatch.setattr("thunderagent.tools.docker.images.list_all", lambda _, by: by["ancestor"] == ["used"] and ["c"])
    store = ImageStore(old=10, used=100, needed=100, young=10, own=10)
    marks = Marks("owner")
    for name in ("young", "old", "used", "needed", "young"):
        marks.set(store, name)
    assert set(marks.all(store)) == {"young", "old", "used", "needed"}
    assert Marks("another").all(store) == []
    assert marks.prune(store, 1000, lambda _: False) == []
    assert marks.prune(store, 10, lambda name: name == "needed") == ["old"]
    assert set(marks.all(store)) == {"young", "used", "needed"}
    assert "old" not in store.tags
    assert "own" in store.tags
