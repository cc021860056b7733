"""The start and the end of `thunderagent serve` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.support import (
    CHAT,
    DEADLINE_S,
    DONE,
    LAST_CHUNK,
    Gate,
    Wire,
    answers,
    ask,
    chunk,
    fake_replica,
    get,
    serve,
    stream_head,
    turn,
    until,
    word,
)
from tests.loopback import free_ports

if TYPE_CHECKING:
    from tests.integration.support import Call, CommandProcess


def a_stream() -> Gate:
    """Behave: stream one word, wait, stream another."""
    return Gate([stream_head(), chunk(word("one"))], [chunk(word("two")), chunk(DONE), LAST_CHUNK])


async def begin_stream(wire: Wire, program_id: str) -> None:
    wire.send("POST", CHAT, (), json.dumps(turn(program_id, stream=True)).encode())
    assert (await wire.head()).status == 200
    assert await wire.chunk() == word("one")


async def rest_of_stream(wire: Wire) -> bytes:
    rest = b""
    while data := await wire.chunk():
        rest += data
    return rest


async def until_draining(process: CommandProcess) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await get(process.url, "/ready")).status != 503:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number: signal.Signals) -> None:
    """The proxy is not ready, takes no turn, refuses held turns, finishes streams, and ends with status 0."""
    gate = a_stream()
    policy = ("--policy", "cap", "--policy-arg", "n=1", "--grace-s", "20")
    async with fake_replica(gate) as replica, serve("--backends", replica.url, *policy) as process:
        await process.ready()
        async with Wire.open(process.url) as wire:
            await begin_stream(wire, "first")
            held = asyncio.create_task(ask(process.url, "second"))
            await until_held(process, 1)
            process.process.send_signal(number)
            refused = await held
            assert refused.status == 503
            assert refused.error["code"] == "shutting_down"
            assert "not forwarded" in refused.error["message"]
            await until_draining(process)
            assert (await get(process.url, "/ready")).json()["why"] == "shutting down"
            assert (await get(process.url, "/health")).status == 200
            new = await ask(process.url, "third")
            assert (new.status, new.error["code"]) == (503, "shutting_down")
            assert 0 < int(new.header("Retry-After") or 0) <= 120
            gate.open()
            assert await rest_of_stream(wire) == word("two") + DONE
        assert await process.exit_status() == 0
        assert len(replica.calls) == 1
        assert "Traceback" not in process.log


async def test_before_it_refuses_it_serves_and_its_clients_turn_elsewhere() -> None:
    """During the delay it is not ready, answers on old and new connections, and each answer is the last there."""
    gate, plain = a_stream(), answers()

    async def behave(call: Call) -> None:
        await (gate if call.json().get("stream") else plain)(call)

    async with fake_replica(behave) as replica:
        options = ("--backends", replica.url, "--shutdown-delay-s", "5", "--grace-s", "20")
        async with serve(*options) as process:
            await process.ready()
            async with Wire.open(process.url) as long, Wire.open(process.url) as kept, Wire.open(process.url) as idle:
                await begin_stream(long, "first")
                for wire in (kept, idle):
                    wire.send("GET", "/health")
                    assert (await wire.answer()).header("Connection") is None
                process.process.terminate()
                await until_draining(process)
                kept.send("POST", CHAT, (), json.dumps(turn("second")).encode())
                answer = await kept.answer()
                assert (answer.status, answer.header("Connection")) == (200, "close")
                assert await kept.rest() == b""
                ready = await get(process.url, "/ready")
                assert (ready.status, ready.header("Connection")) == (503, "close")
                assert (await ask(process.url, "third")).status == 200
                assert await idle.rest() == b""  # at the delay's end
                assert (await ask(process.url, "fourth")).status == 503
                gate.open()
                assert await rest_of_stream(long) == word("two") + DONE
                assert await long.rest() == b""
            assert await process.exit_status() == 0


async def until_held(process: CommandProcess, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await get(process.url, "/queue")).json()["turns_held_count"] != count:
            await asyncio.sleep(0.01)


async def test_the_end_of_the_grace_period_cuts() -> None:
    """A longer stream is visibly cut; the replica is told; the exit status is still 0."""
    async with fake_replica(a_stream()) as replica, serve("--backends", replica.url, "--grace-s", "0.3") as process:
        await process.ready()
        async with Wire.open(process.url) as wire:
            await begin_stream(wire, "first")
            process.process.terminate()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await rest_of_stream(wire)
            await asyncio.wait_for(replica.calls[0].left.wait(), DEADLINE_S)
        assert await process.exit_status() == 0
        assert "grace_period_over" in process.log
        assert "Traceback" not in process.log


async def test_without_turns_the_end_is_quick() -> None:
    """It waits for no grace period when nothing is in flight, with or without idle connections."""
    async with fake_replica() as replica, serve("--backends", replica.url) as process:
        await process.ready()
        async with Wire.open(process.url) as wire:
            wire.send("POST", CHAT, (), b"{}")
            assert (await wire.answer()).status == 200
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            process.process.terminate()
            assert await process.exit_status() == 0
            assert loop.time() - begin_s < 20


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started and that still run."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                children.append(int(path.parent.name))
    return children


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_embedded_engines_end_with_the_proxy(number: signal.Signals) -> None:
    """They end even after kill -9 of the proxy, which cannot end them; it says loudly that they are simulated."""
    async with serve("--embedded-engines", "2") as process:
        await process.ready()
        engines = children_of(process.process.pid)
        assert len(engines) == 2
        answer = await ask(process.url, "a", max_tokens=4)
        assert (answer.status, answer.header("X-ThunderAgent-Engines")) == (200, "simulated")
        assert (await get(process.url, "/summary")).json()["engines_are_simulated"] is True
        assert "engines_are_simulated" in process.log
        assert "warning" in process.log
        process.process.send_signal(number)
        assert await process.exit_status() == (0 if number == signal.SIGTERM else -9)
        await until(lambda: not any(map(is_running, engines)))


@needs_proc
async def test_ctrl_c_does_not_reach_the_embedded_engines() -> None:
    """A terminal sends SIGINT to a whole process group; engines must outlast the grace period, so none is in it."""
    async with serve("--embedded-engines", "2") as process:
        engines = children_of(process.process.pid)
        assert len(engines) == 2
        assert os.getpgid(process.process.pid) not in set(map(os.getpgid, engines))
        process.process.send_signal(signal.SIGINT)
        assert await process.exit_status() == 0


async def test_an_address_in_use_is_said_so() -> None:
    """The exit status is 1, with one sentence and no trace."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "thunderagent", "serve", "--backends", "http://127.0.0.1:9", "--port", str(port)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert (process.returncode, output) == (1, b"")
        assert f"cannot serve on 127.0.0.1:{port}" in errors.decode()
        assert "--port gives another one" in errors.decode()
        assert "Traceback" not in errors.decode()


async def test_the_log_of_an_undisturbed_run_has_no_error() -> None:
    """It has one line for the turn, and nothing worse than a warning."""
    async with fake_replica(answers()) as replica, serve("--backends", replica.url, "--log-format", "json") as process:
        await process.ready()
        await ask(process.url, "a")
        process.process.terminate()
        assert await process.exit_status() == 0
        lines = [json.loads(line) for line in process.log.splitlines()]
        (line,) = [line for line in lines if line["event"] == "turn"]
        assert (line["program_id"], line["outcome"], line["status"]) == ("a", "finished", 200)
        assert {line["level"] for line in lines} <= {"info", "warning"}


async def test_full_disks_cost_a_line_each_and_no_turn(tmp_path: Path) -> None:
    """Its logs of events and signals and its standard output take nothing; it serves, and ends with status 0."""
    for name in ("events", "signals"):
        (tmp_path / name).symlink_to("/dev/full")
    (port,) = free_ports(1)
    options = ["--event-log", str(tmp_path / "events"), "--signal-log", str(tmp_path / "signals"), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    async with fake_replica() as replica:
        with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "thunderagent", "serve", "--backends", replica.url, *options),
                stdout=full,
                stderr=asyncio.subprocess.PIPE,
            )
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    with contextlib.suppress(OSError):
                        if (await get(url, "/ready")).status == 200:
                            break
                    await asyncio.sleep(0.05)
            assert (await ask(url, "a")).status == 200
            assert (await ask(url, "b")).status == 200
            process.terminate()
            _, log = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    assert process.returncode == 0, log.decode()
    lines = [json.loads(line) for line in log.decode().splitlines()]
    for event in ("event_log_given_up", "signal_log_given_up", "stdout_not_written"):
        assert [each.get("why") for each in lines if each["event"] == event] == ["No space left on device"], event
    assert not [each for each in lines if "exception" in each]
