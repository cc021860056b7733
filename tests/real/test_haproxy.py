"""Behind a real HAProxy that shares its connections to us, no client's request becomes another's body."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.debian import install
from tests.integration.support import CHAT, Wire, answers, fake_replica, head_bytes, running_proxy, turn, until
from thunderagent.provision.base import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import NoReturn

    from tests.integration.support import Call

CONFIGURATION = """
global
    maxconn 100
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    http-reuse always
frontend front
    bind 127.0.0.1:{port}
    default_backend proxy
backend proxy
    server proxy {address} pool-max-conn 1
"""


@contextmanager
def haproxy(require_real: Callable[[str], NoReturn], folder: Path, url: str) -> Iterator[str]:
    """Run HAProxy in front of `url` during the block; yield its URL."""
    if shutil.which("haproxy") is None and (why_not := install("haproxy")):
        require_real(why_not)
    port, path = free_port(), folder / "haproxy.cfg"
    path.write_text(CONFIGURATION.format(port=port, address=urlsplit(url).netloc))
    process = subprocess.Popen(["haproxy", "-db", "-q", "-f", str(path)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def listens(url: str) -> bool:
    try:
        async with Wire.open(url):
            return True
    except OSError:
        return False


@pytest.mark.timeout(600)  # HAProxy is installed within it
async def test_two_clients_share_a_connection_of_haproxy(
    require_real: Callable[[str], NoReturn], tmp_path: Path
) -> None:
    """One sends heads that are nearly the same; the other's request and answer are its own."""

    async def echo(call: Call) -> None:
        await answers({"choices": [], "client": call.header("X-Client")})(call)

    victim_body = json.dumps(turn(content="secret" * 50)).encode()
    async with fake_replica(echo) as replica, running_proxy(replica.url) as proxy:
        with haproxy(require_real, tmp_path, proxy.url) as url:
            while not await listens(url):
                await asyncio.sleep(0.05)
            smuggled = head_bytes(f"POST {CHAT} HTTP/1.1", [("Host", "h"), ("Content-Length", "300")])
            body = b"{}   " + smuggled
            async with Wire.open(url) as attacker, Wire.open(url) as victim:
                for value in ("", "", "5"):
                    own = [("X-Client", "attacker"), ("X-A-Length", value)]
                    head = [("Host", "h"), *own, ("Content-Length", str(len(body)))]
                    attacker.send_raw(head_bytes(f"POST {CHAT} HTTP/1.1", head) + body)
                    assert (await attacker.answer()).json()["client"] == "attacker"
                victim.send("POST", CHAT, [("X-Client", "victim"), ("Authorization", "Bearer mine")], victim_body)
                answer = await victim.answer()
                assert (answer.status, answer.json()["client"]) == (200, "victim")
            await until(lambda: len(replica.calls) == 4)
            assert [call.body for call in replica.calls] == [body, body, body, victim_body]
