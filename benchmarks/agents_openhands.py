"""Real OpenHands agents for the benchmark of agents: each runs in the agent server of its prepared sandbox.

It runs in OpenHands' own environment, with a plan on standard input: see `benchmarks.agents_run`. The agent and its
tools run where the sandbox is, so it waits for that before its first turn. Turns are the ones that OpenHands counts; a
tool's time is from its call to what it observed.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from openhands.sdk import LLM, Conversation
from openhands.sdk.event import ActionEvent, Event, ObservationEvent
from openhands.tools.preset.default import get_default_agent

from benchmarks.agents_run import main, wait_for_sandbox
from thunderagent.client import program
from thunderagent.client.openhands import SandboxWorkspace

if TYPE_CHECKING:
    import threading

TERMINAL = "terminal"


def run_one(plan: dict[str, Any], number: int, started_s: float, _places: threading.Semaphore) -> dict[str, Any]:
    """Run one agent from its begin to its release; it makes no container of its own."""
    task = plan["tasks"][number % len(plan["tasks"])]
    own = program(f"{plan['name']}-{number}", proxy=plan["proxy"])
    begun_s = time.monotonic()
    workspace = SandboxWorkspace(
        program_id=own.program_id,
        proxy=own.proxy,
        template=task["name"],
        sandbox_timeout_s=900,
        working_dir="/repo",
    )
    llm = LLM(
        model=f"hosted_vllm/{plan['model']}",
        base_url=own.base_url,
        api_key="none",
        timeout=3600,
        num_retries=0,  # a failed turn is to be seen
    )
    try:
        place_s, setup_s = wait_for_sandbox(own)
        agent = get_default_agent(llm, cli_mode=True)  # without a browser
        conversation = Conversation(agent=agent, workspace=workspace, visualizer=None)
        try:
            conversation.send_message(f"TASK {task['name']}: {task['says']} The repository is /repo.")
            conversation.run()
            events = list(conversation.state.events)
            latencies = conversation.conversation_stats.get_combined_metrics().response_latencies
        finally:
            conversation.close()
    finally:
        ended_s = time.monotonic()
        own.release()
    tool_s, last_output = _tools(events)
    return {
        "number": number,
        "task": task["name"],
        "solved": last_output.split()[:1] == ["OK"],
        "turn_count": len(latencies),
        "place_s": place_s,
        "setup_s": setup_s,
        "turn_s": [each.latency for each in latencies],
        "tool_s": tool_s,
        "begun_s": begun_s - started_s,
        "ended_s": ended_s - started_s,
    }


def _tools(events: list[Event]) -> tuple[list[float], str]:
    """Return how long each command ran, and what the last one wrote."""
    called = {each.id: each for each in events if isinstance(each, ActionEvent)}
    tool_s: list[float] = []
    last_output = ""
    for each in events:
        if isinstance(each, ObservationEvent) and each.tool_name == TERMINAL:
            begun, ended = (datetime.fromisoformat(one.timestamp) for one in (called[each.action_id], each))
            tool_s.append((ended - begun).total_seconds())
            last_output = each.observation.text
    return tool_s, last_output


if __name__ == "__main__":
    main(run_one)
