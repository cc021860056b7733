"""Agents for the tests on Ray: each reports its node, and one waits until a test releases it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray

from thunderagent_workflows import managed_list, stubs


class Worker:
    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def gate(self, fifo: str) -> str:
        return Path(fifo).read_text()  # until a writer opens it

    def fail(self, text: str) -> None:
        raise KeyError(text)


class Asker:
    async def ask(self, text: str) -> Any:
        """Call another agent, and return its result or raise its error."""
        return await stubs.call("worker", "fail", (text,))


class Keeper:
    said = managed_list("said")

    async def hear(self, text: str) -> list[str]:
        self.said.append(text)
        return list(self.said)
