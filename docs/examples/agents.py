"""Run a crowd of agents against the proxy of THUNDERAGENT_PROXY, or at http://127.0.0.1:8300.

python docs/examples/agents.py            # 24 agents
python docs/examples/agents.py 8          # another number
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from thunderagent.client import program

PROXY = os.environ.get("THUNDERAGENT_PROXY", "http://127.0.0.1:8300")
TASKS = ["Find out why it fails.", "Mend it.", "Test it."]


async def read_file(path: str) -> str:
    """Return a file of 400 words after a second."""
    await asyncio.sleep(1.0)
    return f"{path}: {'code ' * 400}"


async def run_command(command: str) -> str:
    """Return an output of 300 words after two seconds."""
    await asyncio.sleep(2.0)
    return f"{command}: {'output ' * 300}"


TOOLS: dict[str, Callable[..., Awaitable[str]]] = {"read_file": read_file, "run_command": run_command}


def described(name: str, argument: str) -> dict[str, Any]:
    """Return what a model must know of a tool."""
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


DESCRIBED = [described("read_file", "path"), described("run_command", "command")]


async def run_agent(number: int, client: httpx2.AsyncClient, turns_s: list[float]) -> None:
    """Work on three tasks, as one program. Add to `turns_s` how long each turn took, held or running."""
    async with program(f"agent-{number}", proxy=PROXY) as p:  # the end of this block releases it
        messages = [{"role": "system", "content": f"You are agent {number}. {'rule ' * 800}"}]
        for task in TASKS:
            messages.append({"role": "user", "content": task})
            is_done = False
            while not is_done:
                began_s = time.monotonic()
                body = {"model": "simulated", "messages": messages, "tools": DESCRIBED}
                answer = await client.post(f"{p.base_url}/chat/completions", json=body)
                turns_s.append(time.monotonic() - began_s)
                message = answer.raise_for_status().json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                for call in calls:
                    asked = call["function"]
                    result = await TOOLS[asked["name"]](**json.loads(asked["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                is_done = not calls


async def main(agents_count: int) -> None:
    """Run so many agents at once, and say how long they took."""
    turns_s: list[float] = []
    began_s = time.monotonic()
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
        await asyncio.gather(*(run_agent(number, client, turns_s) for number in range(agents_count)))
    took_s = time.monotonic() - began_s
    print(f"{agents_count} agents ended after {took_s:.0f} s: {len(turns_s) * 60 / took_s:.0f} turns/min")
    print(f"a turn took {statistics.median(turns_s):.1f} s (median)")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 24))
