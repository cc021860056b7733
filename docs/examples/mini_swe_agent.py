"""Run mini-swe-agent on one task as one program of thunderagent.

Three things make it one: its turns go to the proxy and name the program, its container bears the program's label, and
the program is released at the end. The proxy then takes back the memory and, served with `--sandboxes docker`, removes
the container, also if this script was killed and somebody else sends the release.

    pip install mini-swe-agent==2.4.6 litellm==1.100.0 httpx2
    python mini_swe_agent.py --model Qwen/Qwen3-Coder-30B-A3B --image python:3.12 --task "Write a haiku to /haiku.txt"
"""

from __future__ import annotations

import argparse
import uuid

import httpx2
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.models.litellm_model import LitellmModel


def run(task: str, *, proxy: str, model: str, image: str, program_id: str) -> dict[str, str]:
    """Return how the agent ended, and what it submitted."""
    config = get_config_from_spec("mini.yaml")
    config["model"] |= {
        "model_name": f"hosted_vllm/{model}",
        "model_kwargs": {
            "api_base": f"{proxy}/v1",
            "extra_headers": {"X-Program-ID": program_id},
            "timeout": 3600,  # seconds: a turn that is held sends no byte until it runs
        },
        "cost_tracking": "ignore_errors",  # there is no price list for a model of one's own
    }
    config["environment"] |= {
        "image": image,
        "run_args": ["--rm", "--label", f"thunderagent.program-id={program_id}"],
    }
    try:
        agent = DefaultAgent(
            LitellmModel(**config["model"]), DockerEnvironment(**config["environment"]), **config["agent"]
        )
        return agent.run(task)
    finally:
        httpx2.post(f"{proxy}/programs/release", json={"program_id": program_id})


def main() -> None:
    """Run one task from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--proxy", default="http://127.0.0.1:8300")
    parser.add_argument("--program-id", default=f"mini-{uuid.uuid4().hex}")
    print(run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
