"""Run scripts of clients in an environment of theirs, each in a process of its own that has imported them already.

To import them takes a script seconds of a processor: half of all time of those that then make a few requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from benchmarks.environments import ensure_environment

PAGES = Path(__file__).parents[2] / "docs" / "integrations"
PYTHON_PAGES = {"openai": 2, "anthropic": 2, "litellm": 1, "langchain": 2, "openai-agents": 2}
"""Pages whose code runs unchanged, and its number of turns."""

DEADLINE_S = 180.0
FORKING = """
import json, os, sys

import agents, anthropic, langchain.agents, langchain_openai, langgraph.prebuilt, litellm, openai

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for descriptor, path in enumerate((os.devnull, job["output"], job["errors"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), descriptor)
exec(compile(job["script"], "script", "exec"), {"__name__": "__main__"})
"""


def ensure_clients() -> Path:
    """Return the Python of an environment with the packages that all pages name; make it at the first call.

    Raises RealEngineError.
    """
    wanted = set()
    for name in PYTHON_PAGES:
        found = re.search(r"^pip install (.+)$", (PAGES / f"{name}.md").read_text(), re.MULTILINE)
        assert found is not None, name
        wanted |= set(found[1].split())
    return ensure_environment("clients", sorted(wanted), "about 0.5 GB, a minute")


class ClientRunner:
    """A process that has imported the clients, and forks one for each script; it ends with the block."""

    def __init__(self, python: Path, folder: Path) -> None:
        """Start nothing yet. `python` is of the environment; outputs are files of `folder`."""
        self._python = python
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    async def run(self, script: str) -> str:
        """Run a script and return its output; its failure is an AssertionError with its errors."""
        self._count += 1
        output, errors = (self._folder / f"{self._count}.{name}" for name in ("output", "errors"))
        try:
            async with asyncio.timeout(DEADLINE_S):
                status = await asyncio.to_thread(
                    self._ask, {"script": script, "output": f"{output}", "errors": f"{errors}"}
                )
        except BaseException:
            self._end()
            raise
        assert status == "0\n", errors.read_text() if errors.exists() else "the clients were not imported"
        return output.read_text()

    def _ask(self, job: dict[str, str]) -> str:
        if self._process is None:
            environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
            self._process = subprocess.Popen(
                [str(self._python), "-c", FORKING],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
