"""Workflows on a real Redis: state outlives a deployment, decisions go through it, and outages are survived."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.real.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import NoReturn

SCRIPT = """
import asyncio, logging, sys
from tests.unit.workflows.agents import only
from redis import Redis
from thunderagent_workflows import StoreError, deploy, managed_dict, redis_store, stubs
from thunderagent_workflows.store import Decisions
from thunderagent_workflows.view import Summary

URL, SERVER_PID = sys.argv[1], int(sys.argv[2])
counts = managed_dict("counts")

def say(*texts):
    counts["runs"] = counts.get("runs", 0) + 1
    for text in texts:
        found = stubs.call("rememberer", "hear", (text,)).value(10)
    return found, dict(counts)

def opened():
    return deploy(only("rememberer"), store=URL, period_s=0.02)

async def beside_each_other():
    one, other = redis_store.RedisStore(URL), redis_store.RedisStore(URL)
    summary = Summary("echo/0", "node-0", 0, (), 0.0, 0, 0.0, False, {})
    await one.publish("node-0", [summary])
    await one.push("node-0", Decisions(kills=["echo/0"]))
    assert (await other.collect(), await other.take("node-0")) == ([], [])
    assert (await one.collect(), await one.take("node-0")) == ([summary], [Decisions(kills=["echo/0"])])
    await one.save_state("echo", "shared", {"x": 1})
    assert await other.load_states("shared") == {"echo": {"x": 1}}
    await other.drop_session("shared")
    assert await one.load_states("shared") == {}
    await one.close()
    await other.close()

asyncio.run(beside_each_other())
with opened() as app:
    assert app.run(say, "x") == (["x"], {"runs": 1})
    assert app.run(say, "a", "b", session="s") == (["a", "b"], {"runs": 1})
    home = app.session_log("s").log[-1][4]
    other = ({"rememberer/0", "rememberer/1"} - {home}).pop()
    assert app.act(lambda act: act.migrate("s", home, other)) == []
    assert app.run(say, "c", session="s") == (["a", "b", "c"], {"runs": 2})
    assert app.session_log("s").log[-1][4] == other
with Redis.from_url(URL) as client:
    assert client.keys("*:state:*") == [b"thunderagent:workflows:state:s"]
with opened() as app:
    assert app.run(say, "d", session="s") == (["a", "b", "c", "d"], {"runs": 3})
    app.end_session("s")
    assert app.run(say, "e", session="s") == (["e"], {"runs": 1})
    import os, signal, time
    os.kill(SERVER_PID, signal.SIGSTOP)
    try:
        app.act(lambda act: None)
        raise AssertionError("a silent server is no failure")
    except StoreError as error:
        assert "Timeout" in str(error)
    finally:
        os.kill(SERVER_PID, signal.SIGCONT)
    os.kill(SERVER_PID, signal.SIGTERM)
    time.sleep(0.2)
    assert stubs is not None
    assert app.run(lambda: stubs.call("rememberer", "hear", ("f",)).value(10), session="s") == ["e", "f"]
print("all of it")
"""


@pytest.mark.real
@pytest.mark.usefixtures("redis_installed")
def test_state_lives_on_a_real_redis(require_real: Callable[[str], NoReturn], tmp_path: Path) -> None:
    """A session continues in another deployment; calls continue without the server."""
    with redis_server(require_real, tmp_path) as server:
        assert server.process is not None
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, server.url, str(server.process.pid)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([server.packages, "."])},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.stdout.strip() == "all of it", done.stderr
