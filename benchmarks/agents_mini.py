"""Real mini-SWE-agents for the benchmark of agents, in prepared sandboxes or in containers of their own.

python -m benchmarks.agents_mini < PLAN     # in mini-SWE-agent's own environment; see `benchmarks.agents_run`
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.models.litellm_model import LitellmModel

from benchmarks.agents_run import main, wait_for_sandbox
from thunderagent.client import Program, program
from thunderagent.client.mini_swe_agent import SandboxEnvironment

if TYPE_CHECKING:
    import threading


class PreparedEnvironment(SandboxEnvironment):
    """The proxy's sandbox; tells apart what the first command waits for: a place, or its preparation."""

    place_s = setup_s = 0.0

    def execute(self, action: dict[str, Any], cwd: str = "", **options: Any) -> dict[str, Any]:
        """Wait for the sandbox at the first command, and count it."""
        if not self.place_s + self.setup_s:
            own = program(self.config.program_id, proxy=self.config.proxy)
            self.place_s, self.setup_s = wait_for_sandbox(own)
        return super().execute(action, cwd, **options)


class OwnEnvironment(DockerEnvironment):
    """The package's own container, set up before the first turn; `removes`: it goes at the end.

    There are no more than `places` at a time.
    """

    def __init__(self, *, setup: list[str], removes: bool, places: threading.Semaphore, **settings: Any) -> None:
        """Wait for a place, start it and wait for its setup."""
        self._removes, self._places = removes, places
        asked_s = time.monotonic()
        places.acquire()
        started_s = time.monotonic()
        self.place_s = started_s - asked_s
        super().__init__(**settings)
        for command in setup:
            output = self.execute({"command": command}, timeout=600)
            if output["returncode"] != 0:
                raise RuntimeError(f"setup failed: {output}")
        self.setup_s = time.monotonic() - started_s

    def cleanup(self) -> None:
        """Remove it, or leave it."""
        if self._removes:
            super().cleanup()

    def leave(self) -> None:
        """Let another agent have one."""
        self._places.release()


def run_one(plan: dict[str, Any], number: int, started_s: float, places: threading.Semaphore) -> dict[str, Any]:
    """Run one agent from its begin to its release."""
    task = plan["tasks"][number % len(plan["tasks"])]
    own = program(f"{plan['name']}-{number}", proxy=plan["proxy"])
    begun_s = time.monotonic()
    config = get_config_from_spec("mini.yaml")
    settings = config["environment"] | {"cwd": "/", "interpreter": ["sh", "-c"], "timeout": 300}
    tool_s: list[float] = []
    if plan["prepared"]:
        settings |= {"program_id": own.program_id, "proxy": own.proxy, "template": task["name"]}
        environment = PreparedEnvironment(**settings, sandbox_timeout_s=900)
    else:
        settings |= {"image": plan["image"], "run_args": ["--rm"] if plan["removes"] else [], "pull_timeout": 600}
        environment = OwnEnvironment(**settings, setup=task["setup"], removes=plan["removes"], places=places)
    execute = environment.execute

    def timed(action: dict[str, Any], cwd: str = "", **options: Any) -> dict[str, Any]:
        waited_s, tool_started_s = environment.place_s + environment.setup_s, time.monotonic()
        try:
            return execute(action, cwd, **options)
        finally:
            waited_s = environment.place_s + environment.setup_s - waited_s
            tool_s.append(time.monotonic() - tool_started_s - waited_s)

    environment.execute = timed
    turn_s: list[float] = []
    model = _model(plan, config, own)
    query = model.query

    def timed_query(*given: Any, **named: Any) -> dict[str, Any]:
        asked_s = time.monotonic()
        try:
            return query(*given, **named)
        finally:
            turn_s.append(time.monotonic() - asked_s)

    model.query = timed_query
    try:
        agent = DefaultAgent(model, environment, **_agent(config))
        result = agent.run(f"TASK {task['name']}: {task['says']} The repository is /repo.")
        turn_count = agent.n_calls
        if not environment.place_s + environment.setup_s:
            raise RuntimeError("nobody counted the wait for the sandbox")
    finally:
        ended_s = time.monotonic()
        own.release()
        environment.cleanup()
        if not plan["prepared"]:
            environment.leave()
    return {
        "number": number,
        "task": task["name"],
        "solved": result["exit_status"] == "Submitted" and result["submission"].strip() == "OK",
        "turn_count": turn_count,
        "place_s": environment.place_s,
        "setup_s": environment.setup_s,
        "turn_s": turn_s,
        "tool_s": tool_s,
        "begun_s": begun_s - started_s,
        "ended_s": ended_s - started_s,
    }


def _model(plan: dict[str, Any], config: dict[str, Any], own: Program) -> LitellmModel:
    settings = config["model"] | {
        "model_name": f"hosted_vllm/{plan['model']}",
        "model_kwargs": {"api_base": own.base_url, "timeout": 3600},
        "cost_tracking": "ignore_errors",
    }
    return LitellmModel(**settings)


def _agent(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config["agent"].items() if name != "mode"}


if __name__ == "__main__":
    main(run_one)
