"""Environments with agents' released packages, as the documentation installs them, and OpenHands' agent server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from benchmarks.environments import RealEngineError, ensure_environment

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "agent-sandboxes.md"
IMPORTED = {"OpenHands": "openhands.agent_server.api, openhands.sdk.workspace"}
"""Modules that are imported, and so compiled, when an environment is made.

A sandbox has them to read only, and would compile thousands at each start: half of the time that it takes.
"""
OPENHANDS_SERVER = ("openhands-agent-server==1.58.2",)
"""What the image of OpenHands' agent server has besides."""
SERVER_PORT = 8000


class NewerPythonError(RealEngineError):
    """This machine has no Python that a package needs."""


def section(heading: str) -> str:
    """Return what the page says below a heading."""
    return PAGE.read_text().split(f"\n## {heading}")[1].split("\n## ")[0]


def environment_of(heading: str, *further: str) -> Path:
    """Return the Python of an environment with what a section of the page installs.

    Raises NewerPythonError, RealEngineError.
    """
    found = re.search(r"pip install (.+?) thunderagent-client +#? *(.*)", section(heading) + " ")
    assert found is not None
    base = None
    if found[2] == "Python 3.12":
        base = _newer_python()
        if base is None:
            raise NewerPythonError(f"{heading} needs Python 3.12")
    commands = [["-c", f"import {IMPORTED[heading]}"]] if heading in IMPORTED else []
    name = heading.split(",", maxsplit=1)[0].lower()
    return ensure_environment(name, [*found[1].split(), *further], "minutes", *commands, base=base)


def _newer_python() -> str | None:
    """Return an interpreter of Python 3.12 or newer that can make an environment; None if this machine has none."""
    names = filter(None, map(shutil.which, ("python3.12", "python3.13")))
    for each in (*names, *map(str, sorted(Path.home().glob(".pyenv/versions/3.1[23].*/bin/python3")))):
        check = "import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))"
        if subprocess.run([each, "-c", check], check=False, capture_output=True).returncode == 0:
            return each
    return None


def ensure_openhands() -> Path:
    """Return the Python of an environment with OpenHands and its agent server. Raises RealEngineError."""
    return environment_of("OpenHands", *OPENHANDS_SERVER)


def agent_server(environment: Path, *further: str) -> list[str]:
    """Return the lines of a template that runs OpenHands' agent server from an environment of this machine.

    The sandbox has that environment, its interpreter and `further` folders to read only.
    """
    command = [str(environment), "-m", "openhands.agent_server", "--host", "0.0.0.0", "--port", str(SERVER_PORT)]
    base = Path(os.path.realpath(environment)).parents[1]
    return [
        f"ports = [{SERVER_PORT}]",
        f"ready_port = {SERVER_PORT}",
        # Without that, LiteLLM asks the network for prices as it is imported, three times, and there is none.
        'environment = { HOME = "/tmp", LITELLM_LOCAL_MODEL_COST_MAP = "True" }',
        f"command = {json.dumps(command)}",
        mounts(str(base), str(environment.parent.parent), *further),
    ]


def mounts(*folders: str) -> str:
    """Return the line of a template that puts folders of this machine into the sandbox, as far as they exist."""
    shared = [each for each in folders if Path(each).exists()]
    parts = [f'{{ source = "{os.path.realpath(each)}", target = "{each}", read_only = true }}' for each in shared]
    return f"mounts = [{', '.join(parts)}]"
