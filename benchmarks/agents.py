"""Real mini-SWE-agents, or OpenHands', in real Docker sandboxes, prepared by the proxy or made by themselves.

    python -m benchmarks.agents                                     # 24 agents, 6 tasks, a simulated engine
    python -m benchmarks.agents --agent-kind openhands --agents 6 --at-once 6 --sandboxes 3
    python -m benchmarks.agents --engine vllm --arms reused --policies passthrough,continuum,default --admitted 0
    python -m benchmarks.agents --engine-url http://127.0.0.1:8101  # a running vLLM

The agents are the released package, their tasks small repositories with a failing test. The model is scripted, so that
every run ends: each turn is computed by the engine, with its prompt and as many tokens as the script says, and then the
answer is replaced by the script's next command. `--engine vllm` starts a real vLLM on core 1, whose random model takes
any text; all else then runs on core 0. Each run begins with an empty prefix cache. Arms: `own`: each agent makes and
sets up a container of its own and removes it; `own-left`: nothing removes it; `prepared`: the proxy prepares it from a
template with the same setup and removes it; `reused`: the same with `reuse_setup`; `killed`: that proxy gets `kill -9`,
and the agents, too, once a third of them has ended, and what is left is counted when nothing goes any more; `starts`:
no agents, but sandboxes of all tasks one at a time, a new one, which runs its setup, and a recycled one in turn. In
each arm there are `--sandboxes` at a time at most. An agent waits for a place and for the setup itself, which are told
apart: for one of its own before its first turn, for a prepared one at its first command. An agent of OpenHands runs
inside its sandbox: it waits before its first turn, and the proxy listens on the engine's bridge; of arms it has only
`prepared` and `killed`, without kept setups. Disk is what the engine's file system takes beyond its beginning, kept
setups included. A program's time has parts: turns that the proxy holds, the engine's queue, its prefill and decoding as
vLLM counts them, tools, the wait for a sandbox, and all else. It needs root, as the tests' own Docker engine does.
SIGTERM ends it as Ctrl-C does: nothing of it is left; killed, it leaves no engine either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import aiohttp
import docker  # type: ignore[import-untyped]
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.agents_tasks import AGENTS, TASKS
from benchmarks.engine_kinds import Vllm
from benchmarks.machine import ROOT, save_results
from benchmarks.processes import die_with_parent, thunderagent
from benchmarks.real_engine import RealEngine, RealEngineConfig
from tests.loopback import on_loopback
from tests.real.agent_packages import agent_server, ensure_openhands
from tests.real.base_image import AGENT_IMAGE, BASE_IMAGE, PACKAGES, make_agent_image, make_python_image
from tests.real.docker_engine import DockerEngine, ensure_docker
from tests.real.mini_swe_agent import agent_environment, ensure_mini_swe_agent
from thunderagent.provision.base import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Json = dict[str, Any]

ARMS = ("own", "own-left", "prepared", "reused", "killed", "starts")
PREPARED = ("prepared", "reused", "killed")
ARMS_OF = {"mini-swe-agent": ARMS, "openhands": ("prepared", "killed")}
"""The arms of a kind of agents. OpenHands' sandboxes have mounts, with which no setup is kept."""
OUTPUT_TOKENS = 48
STARTS_COUNT = 4
"""New and recycled sandboxes of each task in the arm `starts`."""
NEW = "-new"
"""Ends the name of a task's template without a kept setup, in the arm `starts`."""
KV_TOKENS = {
    ("mini-swe-agent", "simulated"): 4_000,
    ("mini-swe-agent", "vllm"): 16_000,
    ("openhands", "simulated"): 60_000,
    ("openhands", "vllm"): 60_000,
}
"""The KV pool of an engine that is started, by the kind of agents and of engine: a few programs fill it."""
WATCH_S = 0.25
KILLED_TTL_S = 90.0
"""How long sandboxes may live in the arm whose proxy is killed."""
GONE_S = 300.0
"""How long what it left may take to go."""
ENGINE_PARTS = ("queue", "prefill", "decode")
"""Of a turn's time there, as vLLM counts them: `vllm:request_PART_time_seconds`."""
REPLACED = ("messages", "max_completion_tokens", "stop", "tools", "tool_choice", "parallel_tool_calls")
"""Fields of a turn that the engine is asked otherwise."""


@dataclass
class ScriptedFront:
    """Stands before an engine as if it were one: turns cost what they cost there, and say what the script says."""

    engine_url: str
    written_mb: int
    agent_kind: str = AGENTS[0]
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    turn_count: int = 0
    engine_s: float = 0.0
    """How long the engine had turns, added up."""
    parts_s: dict[str, float] = field(default_factory=dict)
    _session: aiohttp.ClientSession = field(init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve during the block; yield the URL."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_route("*", "/{path:.*}", self._pass)
        # An engine closes idle connections after some seconds, as a turn may just be sent: each gets its own.
        connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=3600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            async with self._session.get(f"{self.engine_url}/v1/models") as response:
                self.model = (await response.json())["data"][0]["id"]
            await self._reset_prefix_cache()
            before_s = await self._engine_parts_s()
            async with on_loopback(app, shutdown_timeout=0) as url:
                yield url
            self.parts_s = {part: each_s - before_s[part] for part, each_s in (await self._engine_parts_s()).items()}

    async def _reset_prefix_cache(self) -> None:
        """Let the engine forget the run before, if it can: vLLM only in its development mode."""
        kind, deadline_s = Vllm(), time.monotonic() + 60
        while time.monotonic() < deadline_s:
            async with self._session.post(f"{self.engine_url}{kind.reset_path}") as response:
                if kind.did_reset(response.status, await response.read()):
                    return
                if response.status == 404:
                    break
            await asyncio.sleep(0.25)
        print("the engine kept the prefixes of the run before", file=sys.stderr)

    async def _engine_parts_s(self) -> dict[str, float]:
        """Return what all turns took there so far, by part; only the parts that it counts."""
        async with self._session.get(f"{self.engine_url}/metrics") as response:
            families = {each.name: each for each in text_string_to_metric_families(await response.text())}
        found = {part: families.get(f"vllm:request_{part}_time_seconds") for part in ENGINE_PARTS}
        return {
            part: sum(each.value for each in family.samples if each.name.endswith("_sum"))
            for part, family in found.items()
            if family is not None
        }

    async def _pass(self, request: web.Request) -> web.Response:
        url = f"{self.engine_url}{request.path_qs}"
        async with self._session.request(request.method, url, data=await request.read()) as response:
            kind = response.headers.get("Content-Type", "application/json")
            headers = {"Content-Type": kind}
            return web.Response(status=response.status, body=await response.read(), headers=headers)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = {name: value for name, value in body.items() if name not in REPLACED} | {
            "model": self.model,
            "messages": [_plain(each) for each in body["messages"]],
            "max_tokens": OUTPUT_TOKENS,
            "min_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        sent_s = time.monotonic()
        async with self._session.post(f"{self.engine_url}/v1/chat/completions", json=asked) as response:
            answer = await response.json()
            if response.status != 200:
                return web.json_response(answer, status=response.status)
        self.engine_s += time.monotonic() - sent_s
        usage = answer["usage"]
        self.turn_count += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if body.get("tools"):  # what else is asked, as for a title, may be any text
            answer["choices"][0] |= self._scripted(body["messages"])
        return web.json_response(answer)

    def _scripted(self, messages: list[Json]) -> Json:
        """Return the choice of a turn, by the script of its task."""
        step = sum(each["role"] == "assistant" for each in messages)
        name = _text(messages[1]).split("TASK ")[1].split(":")[0]
        task = next(each for each in TASKS if each.name == name)
        tool, arguments = task.calls(self.agent_kind, self.written_mb)[step]
        call = {"name": tool, "arguments": json.dumps(arguments)}
        message = {
            "role": "assistant",
            "content": f"Step {step + 1}.",
            "tool_calls": [{"id": f"call-{step}", "type": "function", "function": call}],
        }
        return {"message": message, "finish_reason": "tool_calls"}


def _plain(message: Json) -> Json:
    """Return a message as text alone, which every chat template takes."""
    calls = "".join(json.dumps(each["function"]) for each in message.get("tool_calls") or ())
    role = "assistant" if message["role"] == "assistant" else "user"
    return {"role": role, "content": f"{_text(message)} {calls}".strip()}


def _text(message: Json) -> str:
    """Return what a message says, as one text or in parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(each.get("text", "") for each in content)


def config_file(folder: Path, arm: str, *, sandboxes_count: int, agent_kind: str) -> Path:
    """Write the proxy's configuration: a template for each task, in the arm `starts` one without a kept setup, too."""
    lines = ['sandboxes = ["docker"]', f"sandbox_max_count = {sandboxes_count}", 'log_format = "json"']
    image, further = BASE_IMAGE, list[str]()
    if agent_kind == "openhands":
        image, further = AGENT_IMAGE, agent_server(ensure_openhands())
    for task, ending in itertools.product(TASKS, ("", NEW) if arm == "starts" else ("",)):
        lines += [f"[sandbox_templates.{task.name}{ending}]", f'image = "{image}"']
        reuses = arm in ("reused", "killed", "starts") and agent_kind == "mini-swe-agent" and ending != NEW
        lines += [f"setup = {json.dumps(task.setup)}", *further, f"reuse_setup = {str(reuses).lower()}"]
        lines += [f"ttl_s = {KILLED_TTL_S}"] if arm == "killed" else []
    path = folder / "proxy.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


async def run_arm(
    arm: str, policy: str, sandboxes_count: int, options: argparse.Namespace, engine: DockerEngine, engine_url: str
) -> Json:
    """Run all agents once; return what was measured."""
    before_bytes = shutil.disk_usage(engine.data_root).used
    log_path = options.logs / f"{arm}-{policy}-{sandboxes_count}.log"
    images_count = _left(engine)["images"]
    disk: list[tuple[float, int]] = []
    front = ScriptedFront(engine_url, options.written_mb, options.agent_kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_file(folder, arm, sandboxes_count=sandboxes_count, agent_kind=options.agent_kind)
        async with front.running() as url:
            command = ["serve", "--port", "0", "--backends", url, "--config", str(config), "--docker-url", engine.url]
            command += [] if policy == "default" else ["--policy", policy]
            if options.agent_kind == "openhands":  # its turns come from within the sandboxes
                command += ["--host", engine.address, "--allow-open", "true"]
            if options.admitted:
                command += ["--admission", "window", "--policy-arg", f"admission.n={options.admitted}"]
            async with thunderagent(*command, log_path=log_path) as proxy:
                plan = {
                    "name": f"{arm}-{policy}",
                    "prepared": arm in PREPARED,
                    "removes": arm == "own",
                    "agents_count": options.agents,
                    "at_once": options.at_once,
                    "sandboxes_count": sandboxes_count,
                    "proxy": proxy.url,
                    "model": front.model,
                    "image": BASE_IMAGE,
                    "tasks": [{"name": t.name, "says": t.says, "setup": t.setup} for t in TASKS],
                }
                started_s = time.monotonic()
                watching = asyncio.create_task(_watch(engine, before_bytes, started_s, disk))
                try:
                    until_count = options.agents // 3 if arm == "killed" else options.agents
                    runs = await _run_agents(options.agent_kind, plan, engine, folder, until_count)
                    if arm == "killed":
                        proxy.process.kill()
                        await proxy.process.wait()
                finally:
                    watching.cancel()
                took_s = time.monotonic() - started_s
    about = {"arm": arm, "policy": policy, "sandboxes_count": sandboxes_count}
    figures = _figures(runs, front, disk, took_s, log_path) | about
    if arm == "killed":
        at_once = _left(engine, images_count)
        figures |= {"left_at_once": at_once, "gone_after_s": await _gone(engine, images_count)}
    elif arm == "own":  # the agents told the engine to stop theirs, which takes ten seconds
        await _gone(engine, images_count, within_s=30.0)
    return figures | {"left": _left(engine, images_count, remove=True)}


async def run_starts(options: argparse.Namespace, engine: DockerEngine, engine_url: str) -> Json:
    """Start sandboxes through the proxy, one at a time: of each task new and recycled ones in turn."""
    log_path = options.logs / "starts.log"
    with tempfile.TemporaryDirectory() as name:
        config = config_file(Path(name), "starts", sandboxes_count=1, agent_kind=options.agent_kind)
        command = [
            "serve",
            "--port",
            "0",
            "--backends",
            engine_url,
            "--config",
            str(config),
            "--docker-url",
            engine.url,
        ]
        async with thunderagent(*command, log_path=log_path) as proxy, aiohttp.ClientSession(proxy.url) as session:
            for task in TASKS:  # the first of each keeps its setup
                for template in (task.name, *STARTS_COUNT * (f"{task.name}{NEW}", task.name)):
                    await _start_one(session, template)
    prepare_s: dict[str, list[float]] = {"new": [], "recycled": [], "kept": []}
    for each in _said(log_path, "sandbox_ready"):
        kind = "recycled" if each["recycled"] else "new" if each["template"].endswith(NEW) else "kept"
        prepare_s[kind].append(each["prepare_s"])
    medians = {kind: median(each_s) for kind, each_s in prepare_s.items()}
    return medians | {f"{kind}_all": each_s for kind, each_s in prepare_s.items()}


async def _start_one(session: aiohttp.ClientSession, template: str) -> None:
    """Have one sandbox made for a program, and release that. Raises RuntimeError if it is not usable."""
    opened = {"program_id": "starts", "sandboxes": [{"template": template}]}
    async with session.post("/programs", json=opened, raise_for_status=True):
        pass
    stage = ""
    while stage not in ("ready", "failed"):
        async with session.get("/programs/starts/sandboxes", raise_for_status=True) as response:
            (sandbox,) = (await response.json())["sandboxes"]
        stage = sandbox["stage"]
        await asyncio.sleep(WATCH_S)
    if stage == "failed":
        raise RuntimeError(f"{template}: {sandbox['why']}")
    async with session.post("/programs/release", json={"program_id": "starts"}, raise_for_status=True):
        pass
    left = True
    while left:
        await asyncio.sleep(WATCH_S)
        async with session.get("/sandboxes", raise_for_status=True) as response:
            left = bool((await response.json())["sandboxes"])


async def _gone(engine: DockerEngine, images_count: int, within_s: float = GONE_S) -> float:
    """Wait until nothing is left; return how long that took, in seconds."""
    started_s = time.monotonic()
    while any((await asyncio.to_thread(_left, engine, images_count)).values()):
        if time.monotonic() > started_s + within_s:
            break
        await asyncio.sleep(1.0)
    return time.monotonic() - started_s


async def _run_agents(agent_kind: str, plan: Json, engine: DockerEngine, folder: Path, until_count: int) -> list[Json]:
    """Run the agents until so many have ended, and end the others. Raises RuntimeError if one of the first failed."""
    python, module = ensure_mini_swe_agent, "agents_mini"
    if agent_kind == "openhands":
        python, module = ensure_openhands, "agents_openhands"
    environment = agent_environment(engine.url, folder) | {"PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        *die_with_parent(),
        *(str(python()), "-m", f"benchmarks.{module}"),
        cwd=ROOT,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=(folder / "agents.log").open("wb"),
        limit=2**24,
    )
    runs: list[Json] = []
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(plan).encode())
        process.stdin.close()
        while len(runs) < until_count and (line := await process.stdout.readline()):
            if line.startswith(b"{"):
                runs.append(json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if len(runs) != until_count or any("error" in run for run in runs):
        failed = [run["error"] for run in runs if "error" in run]
        raise RuntimeError(f"{failed[:3]}; {(folder / 'agents.log').read_text()[-2000:]}")
    return runs


async def _watch(engine: DockerEngine, before_bytes: int, started_s: float, disk: list[tuple[float, int]]) -> None:
    while True:
        used_bytes = shutil.disk_usage(engine.data_root).used - before_bytes
        disk.append((round(time.monotonic() - started_s, 2), used_bytes))
        await asyncio.sleep(WATCH_S)


def _left(engine: DockerEngine, images_count: int = 0, *, remove: bool = False) -> Json:
    """Count what is at the engine, by kind, beside so many images; `remove` the containers."""
    with contextlib.closing(engine.client()) as client:
        containers = client.containers(all=True)
        networks = [each for each in client.networks() if each["Name"] not in ("bridge", "host", "none")]
        left = {
            "containers": len(containers),
            "networks": len(networks),
            "volumes": len(client.volumes()["Volumes"] or ()),
            "images": len(client.images(quiet=True)) - images_count,
        }
        for each in containers if remove else ():
            with contextlib.suppress(docker.errors.APIError):  # it is going already
                client.remove_container(each["Id"], force=True, v=True)
    return left


def _preparations(log_path: Path) -> Json:
    """Return from the proxy's log what preparations took.

    `new` are those that ran their setup, with the keeping of it where it is kept; `recycled` those that a kept one was
    put into. Both are from the order to a usable sandbox, whose image is there.
    """
    prepare_s: dict[str, list[float]] = {"new": [], "recycled": []}
    for each in _said(log_path, "sandbox_ready"):
        prepare_s["recycled" if each["recycled"] else "new"].append(each["prepare_s"])
    medians = {kind: median(each_s) if each_s else None for kind, each_s in prepare_s.items()}
    return {
        "prepare_s": medians | {f"{kind}_all": each_s for kind, each_s in prepare_s.items()},
        "kept_bytes": sum(each["size_bytes"] for each in _said(log_path, "sandbox_setup_kept")),
    }


def _said(log_path: Path, event: str) -> list[Json]:
    """Return all events of a kind in the proxy's log."""
    lines = [json.loads(line) for line in log_path.read_text().splitlines() if line.startswith("{")]
    return [each for each in lines if each.get("event") == event]


def _figures(
    runs: list[Json], front: ScriptedFront, disk: list[tuple[float, int]], took_s: float, log_path: Path
) -> Json:
    tool_s = sorted(each for run in runs for each in run["tool_s"])
    turn_s = sorted(each for run in runs for each in run["turn_s"])
    return {
        "solved_count": sum(run["solved"] for run in runs),
        "programs_per_hour": 3600 * len(runs) / took_s,
        "steps_per_min": 60 * sum(run["turn_count"] for run in runs) / took_s,
        "hit_ratio": front.cached_tokens / max(1, front.prompt_tokens),
        **{what: _times(sorted(run[what] for run in runs)) for what in ("place_s", "setup_s")},
        **_preparations(log_path),
        "disk_peak_bytes": max(used for _, used in disk),
        "disk": disk[:: max(1, len(disk) // 200)],
        **{
            name: {"mean": fmean(each_s), "median": median(each_s), "p95": each_s[int(0.95 * len(each_s))]}
            for name, each_s in (("tool_s", tool_s), ("turn_s", turn_s))
        },
        "program_s": fmean(run["ended_s"] - run["begun_s"] for run in runs),
        "parts_s": _parts_s(runs, front) if front.turn_count == len(turn_s) else {},
        "took_s": took_s,
    }


def _parts_s(runs: list[Json], front: ScriptedFront) -> dict[str, float]:
    """Return what a program's time is made of, as means in seconds."""
    turns_s, tools_s = (fmean(sum(run[name]) for run in runs) for name in ("turn_s", "tool_s"))
    counted_s = {part: each_s / len(runs) for part, each_s in front.parts_s.items()}
    engine_s = front.engine_s / len(runs)
    parts_s = {
        "held": turns_s - engine_s,
        **counted_s,
        "engine's other": engine_s - sum(counted_s.values()),
        "tools": tools_s,
        "sandbox": fmean(run["place_s"] + run["setup_s"] for run in runs),
    }
    whole_s = fmean(run["ended_s"] - run["begun_s"] for run in runs)
    return parts_s | {"other": whole_s - sum(parts_s.values())}


def _times(sorted_s: list[float]) -> Json:
    return {"mean": fmean(sorted_s), "median": median(sorted_s), "most": sorted_s[-1], "all": sorted_s}


def show(results: list[Json]) -> None:
    """Print the table."""
    table = Table(title="Agents in sandboxes")
    for name in (
        *("arm", "policy", "sandboxes", "solved", "programs/h", "steps/min", "hits"),
        *("waits for a place, mean s (most)", "for its setup, mean s (most)", "to prepare: new, recycled, s"),
        *("disk at peak, MB", "disk over time", "tool, mean s (p95)", "turn, mean s (p95)", "left"),
    ):
        table.add_column(name, justify="left" if name in ("arm", "policy") else "right")
    for each in results:
        table.add_row(
            *(each["arm"], each["policy"], str(each["sandboxes_count"]), str(each["solved_count"])),
            f"{each['programs_per_hour']:.0f}",
            *(f"{each['steps_per_min']:.1f}", f"{each['hit_ratio']:.2f}"),
            *(f"{each[what]['mean']:.2f} ({each[what]['most']:.1f})" for what in ("place_s", "setup_s")),
            ", ".join("" if (it := each["prepare_s"][kind]) is None else f"{it:.1f}" for kind in ("new", "recycled")),
            f"{each['disk_peak_bytes'] / 1e6:.0f}",
            _curve([used for _, used in each["disk"]]),
            *(f"{each[what]['mean']:.2f} ({each[what]['p95']:.2f})" for what in ("tool_s", "turn_s")),
            " ".join(f"{count} {kind}" for kind, count in each["left"].items()),
        )
    Console(width=220).print(table)
    parts = Table(title="Parts of a program's time, mean s")
    whole = [each for each in results if each["parts_s"]]  # without a proxy that was killed
    for name in ("arm", "policy", "all", *(whole[0]["parts_s"] if whole else ())):
        parts.add_column(name, justify="left" if name in ("arm", "policy") else "right")
    for each in whole:
        figures_s = (each["program_s"], *each["parts_s"].values())
        parts.add_row(each["arm"], each["policy"], *(f"{figure_s:.1f}" for figure_s in figures_s))
    Console(width=220).print(parts)
    by_arm = {(each["sandboxes_count"], each["policy"], each["arm"]): each for each in results}
    for (count, policy, arm), each in by_arm.items():
        for other in ("own", "own-left"):
            if arm in ("prepared", "reused") and (its := by_arm.get((count, policy, other))):
                waited_s = [sum(one[what]["mean"] for what in ("place_s", "setup_s")) for one in (each, its)]
                print(
                    f"{arm}, {policy}, {count} sandboxes: on the critical path for sandboxes {waited_s[0]:.2f} s a "
                    f"program, {other} {waited_s[1]:.2f} s: {_times_as_long(*waited_s)}; disk at peak "
                    f"{its['disk_peak_bytes'] / max(each['disk_peak_bytes'], 1):.1f} times as much"
                )
        new = by_arm.get((count, policy, "prepared"))
        if arm == "reused" and new and each["prepare_s"]["recycled_all"]:
            print(f"{policy}, {count} sandboxes, with agents: {_recycling(each['prepare_s'], new['prepare_s'])}")


def _times_as_long(waited_s: float, other_s: float) -> str:
    """Compare two waits; one below 10 ms is none, and nothing is a multiple of it."""
    return f"{other_s / waited_s:.1f} times as long" if waited_s >= 0.01 else "no wait against one"


def _recycling(reused_s: Json, prepared_s: Json) -> str:
    """Compare the start of a recycled sandbox with that of a new one, as the arm `prepared` makes them all."""
    recycled_s, new_s = reused_s["recycled"], prepared_s["new"]
    return (
        f"a recycled sandbox starts in {recycled_s:.2f} s (median of {len(reused_s['recycled_all'])}), "
        f"a new one, which runs its setup, in {new_s:.2f} s (of {len(prepared_s['new_all'])}): "
        f"{recycled_s / new_s:.2f} of it"
    )


def _curve(used_bytes: list[int]) -> str:
    """Return the disk in use over the run, in twelve bars of its most."""
    bars, most = " ▁▂▃▄▅▆▇█", max(used_bytes, default=0) or 1
    steps = [used_bytes[len(used_bytes) * n // 12 : len(used_bytes) * (n + 1) // 12] for n in range(12)]
    return "".join(bars[round(8 * max(each) / most)] for each in steps if each)


@asynccontextmanager
async def engine_at(options: argparse.Namespace) -> AsyncIterator[str]:
    """Yield the URL of the engine: the given one, or one that runs during the block, simulated or a real vLLM."""
    if options.engine_url:
        yield options.engine_url.rstrip("/")
        return
    if options.engine == "vllm":
        blocks = options.kv_tokens // RealEngineConfig.block_size
        longest = min(RealEngineConfig.max_model_len, (blocks - 1) * RealEngineConfig.block_size)  # one is its own
        config = RealEngineConfig(
            hidden_size=options.hidden,
            layers=options.layers,
            pool_blocks=blocks,
            max_model_len=longest,
            is_text=True,
            port=free_port(),
            ready_timeout_s=600.0,
        )
        async with RealEngine(config) as real:
            yield real.url
        return
    command = ("engine", "--port", "0", "--kv-tokens", str(options.kv_tokens), "--speed", str(options.speed))
    async with thunderagent(*command, log_path=options.logs / "engine.log") as engine:
        yield engine.url


async def main() -> None:
    """Run the arms one after the other; SIGTERM stops them as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agent-kind", choices=AGENTS, default=AGENTS[0], help="whose released package runs")
    parser.add_argument("--agents", type=int, default=24, help="agents in all")
    parser.add_argument("--at-once", type=int, default=24, help="agents that are open at a time")
    parser.add_argument("--sandboxes", default="8", help="sandboxes at a time, in each arm; several by commas")
    parser.add_argument(
        "--admitted", type=int, default=4, help="programs that may run at a time, the others wait; 0: as many as fit"
    )
    parser.add_argument("--arms", help=f"of {', '.join(ARMS)}; by default all that the kind has")
    parser.add_argument("--policies", default="default", help="policies of the proxy; default is its own")
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated", help="which one is started")
    parser.add_argument("--engine-url", default="", help="a running engine; none is started")
    parser.add_argument(
        "--kv-tokens", type=int, help="KV pool of the started engine; 4,000, of a vLLM 16,000, and for openhands 60,000"
    )
    parser.add_argument("--hidden", type=int, default=RealEngineConfig.hidden_size, help="of vLLM's random model")
    parser.add_argument("--layers", type=int, default=RealEngineConfig.layers, help="of vLLM's random model")
    parser.add_argument("--speed", type=float, default=1.0, help="of the simulated engine")
    parser.add_argument("--written-mb", type=int, default=30, help="what each agent writes into its sandbox")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir(), "thunderagent-agents"))
    parser.add_argument("--name", default="agents", help="of the file of results")
    options = parser.parse_args()
    arms = ARMS_OF[options.agent_kind]
    options.arms = options.arms or ",".join(arms)
    if unknown := set(options.arms.split(",")) - set(arms):
        parser.error(f"no arms of {options.agent_kind}: {', '.join(sorted(unknown))}")
    options.kv_tokens = options.kv_tokens or KV_TOKENS[options.agent_kind, options.engine]
    if options.engine == "vllm":
        os.sched_setaffinity(0, {0})
    ensure_docker(PACKAGES)
    settings = {k: v for k, v in vars(options).items() if k not in ("logs", "name")}
    report: Json = {"settings": settings, "results": []}
    wanted = options.arms.split(",")
    with DockerEngine(disk_bytes=6 * 1024**3) as docker:
        (make_agent_image if options.agent_kind == "openhands" else make_python_image)(docker)
        async with engine_at(options) as engine_url:
            lists = (
                options.sandboxes.split(","),
                options.policies.split(","),
                [each for each in wanted if each != "starts"],
            )
            for count, policy, arm in itertools.product(*lists):
                result = await run_arm(arm, policy, int(count), options, docker, engine_url)
                report["results"].append(result)
                print(json.dumps({k: v for k, v in result.items() if k != "disk"}), file=sys.stderr, flush=True)
                saved = save_results(options.name, report)
            if "starts" in wanted:
                report["starts"] = await run_starts(options, docker, engine_url)
                saved = save_results(options.name, report)
    if report["results"]:
        show(report["results"])
    if "starts" in wanted:
        print(f"one at a time, nothing else: {_recycling(report['starts'], report['starts'])}")
    print(saved)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("agents: ended by a signal; what it had started is gone")
