"""Agents' released packages in a pod that the proxy prepared: mini-SWE-agent, SWE-ReX, and OpenHands' agent server."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.environments import RealEngineError
from tests.kubernetes.conftest import until_it_says
from tests.kubernetes.parts import AGENTS
from tests.kubernetes.test_sandboxes import serving, until_told
from tests.real.agent_packages import NewerPythonError, agent_server, mounts
from tests.real.test_agent_environments import OPENHANDS, SWE_REX, output_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from tests.kubernetes.conftest import Namespace

ROOT = Path(__file__).parents[2]
PROGRAM = "task-7"
MINI_SWE_AGENT = """
from minisweagent.exceptions import Submitted
from thunderagent.client.mini_swe_agent import SandboxEnvironment

its = SandboxEnvironment(cwd="/tmp", env={"A": "b c"})
done = its.execute({"command": "cat /prepared; pwd; echo $A; exit 3"})
assert done == {"output": "prepared\\n/tmp\\nb c\\n", "returncode": 3, "exception_info": ""}, done
done = its.execute({"command": "echo begun; sleep 60"}, timeout=5)
assert (done["output"], done["returncode"]) == ("begun\\n", -1), done
try:
    its.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo poem"})
    raise AssertionError
except Submitted as submitted:
    assert "poem" in str(submitted.messages), submitted.messages
"""
SCRIPTS = {"mini-swe-agent": MINI_SWE_AGENT, "swe-rex": SWE_REX, "openhands": OPENHANDS}
SYSTEM = ("/usr", "/lib", "/lib64")


def spec(image: str, agent: str, python: Path) -> dict[str, Any]:
    """Return a template whose image needs nothing: bash and what it needs are this machine's, as is OpenHands."""
    further: dict[str, Any] = tomllib.loads(
        "\n".join(agent_server(python, *SYSTEM, "/etc/ssl")) if agent == "openhands" else mounts(*SYSTEM)
    )
    return {
        "driver": "kubernetes",
        "image": image,
        "pod_security": "baseline",
        "setup": ["echo prepared > /prepared; echo rc=yes > /rc"],
        "prepare_timeout_s": 300.0,  # OpenHands' server imports for half a minute, alone on a core
        **further,
    }


@pytest.mark.parametrize("agent", SCRIPTS)
async def test_an_agent_lives_in_a_pod_of_its_program(
    namespace: Namespace, tmp_path: Path, agent: str, require_real: Callable[[str], NoReturn]
) -> None:
    """It runs commands there, with its variables, and moves files; the pod goes with the program."""
    if namespace.access.lab is None:
        pytest.skip("the sandbox has the programs of this machine, so it must be its node")
    try:
        python = AGENTS[agent]()
    except NewerPythonError as error:
        pytest.skip(str(error))
    except RealEngineError as error:
        require_real(f"no {agent}: {error}")
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "file").write_text("moved")
    async with serving(namespace, tmp_path / "log") as (proxy, client):
        image = namespace.access.sandbox_image
        asked = await client.post(f"/programs/{PROGRAM}/sandboxes", json={"spec": spec(image, agent, python)})
        assert asked.status_code == 202, asked.text
        variables = {
            "KUBECONFIG": str(namespace.access.kubeconfig),
            "PYTHONPATH": str(ROOT),
            "THUNDERAGENT_PROXY": proxy.url,
            "THUNDERAGENT_PROGRAM_ID": PROGRAM,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        status, output = await output_of((str(python), "-c", SCRIPTS[agent], str(tmp_path / "moved")), variables)
        assert status == 0, output
        assert namespace.names("pods"), "the agent removes nothing"
        await client.post("/programs/release", json={"program_id": PROGRAM})

        async def is_gone() -> bool:
            return not (await client.get("/sandboxes")).json()["sandboxes"]

        await until_told(is_gone)
        await until_it_says(lambda: not namespace.names("pods"), within_s=120.0)
