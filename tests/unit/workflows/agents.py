"""Agents for the tests: plain classes without knowledge of workflows, except where they use managed state."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

from thunderagent_workflows import Preempted, SessionEndedError, checkpoint, managed_dict, managed_list, stubs


class Echo:
    """Returns its argument."""

    async def say(self, text: Any) -> Any:
        return text

    async def fail(self, text: str) -> None:
        raise ValueError(text)

    async def through(self, text: str) -> Any:
        """Ask another agent, and return its future."""
        return [stubs.call("blocking", "fail", (text,))]


class SlowStart:
    """Takes a while to construct."""

    def __init__(self) -> None:
        time.sleep(0.1)

    def say(self) -> None:
        pass


class Blocking:
    """Plain methods; `gate` keeps a call until a test opens it."""

    gates: dict[str, threading.Event] = {}  # noqa: RUF012 - the test's, across instances

    def say(self, text: Any) -> Any:
        return (text, threading.current_thread().name)

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def gate(self, name: str) -> str:
        self.gates.setdefault(name, threading.Event()).wait(30)
        return name

    def ask_myself(self, text: str) -> Any:
        return stubs.call("blocking", "say", (text,)).value()

    def measure(self, values: list[int]) -> int:
        return len(values)


class Patient:
    """Coroutines that wait until a test releases them."""

    gates: dict[str, asyncio.Event] = {}  # noqa: RUF012

    async def wait(self, name: str) -> str:
        await self.gates.setdefault(name, asyncio.Event()).wait()
        return name

    async def count(self, name: str) -> tuple[str, Any]:
        before = checkpoint()
        if before is None:
            await self.gates.setdefault(name, asyncio.Event()).wait()
        return name, before

    def checkpoint(self) -> str:
        return "half"


class Stoppable:
    """A plain method that checks now and then whether it must stop."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def work(self, name: str) -> tuple[str, Any]:
        before = checkpoint()
        if name == "long" and before is None:
            self.stop.wait(30)
            raise Preempted(7)
        return name, before

    def checkpoint(self) -> None:
        self.stop.set()


class Rememberer:
    """Keeps a session's messages."""

    said = managed_list("said")
    counts = managed_dict("counts")

    async def hear(self, text: str) -> list[str]:
        self.said.append(text)
        self.counts[text] = self.counts.get(text, 0) + 1
        return list(self.said)


class Counter:
    """State that belongs to one instance."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    async def add(self, session: str, number: int) -> list[int]:
        await asyncio.sleep(0)
        self.seen.setdefault(session, []).append(number)
        return list(self.seen[session])


class Batcher:
    """Takes lists."""

    async def double(self, number: list[int]) -> list[tuple[int, int]]:
        return [(each * 2, len(number)) for each in number]

    async def short(self, number: list[int]) -> list[int]:
        return []


class Mixer(Patient):
    """Runs a batch of two sessions, for which another agent makes a turn."""

    async def mix(self, name: list[str]) -> list[str]:
        await self.wait(name[0])
        if len(name) == 2:
            with suppress(SessionEndedError):
                await stubs.call("outliver", "turn", ("before",))
        return name


class Holder:
    """Holds a resource that it releases in the acquiring thread, when nothing runs any more."""

    gates: dict[str, threading.Event] = {}  # noqa: RUF012 - the test's, across instances
    closed: list[str] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.taken_in, self.runs = threading.current_thread().name, False

    def hold(self, name: str) -> str:
        self.runs = True
        self.gates.setdefault(name, threading.Event()).wait(30)
        self.runs = False
        return name

    def close(self) -> None:
        assert (self.runs, self.taken_in) == (False, threading.current_thread().name)
        self.closed.append("plain")


class AsyncHolder(Holder):
    """The same on the event loop."""

    async def hold(self, name: str) -> str:  # type: ignore[override]
        return name

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.closed.append("async")


class Faulty(Holder):
    """Fails to release it."""

    def close(self) -> None:
        self.closed.append("faulty")
        raise OSError("it is stuck")


class Door(Holder):
    """Has a method of that name that others call."""

    def close(self) -> None:
        self.closed.append("called")


class Broken:
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def say(self) -> None: ...


HERE = "tests.unit.workflows.agents"
AGENTS: dict[str, Any] = {
    "echo": {
        "class": f"{HERE}:Echo",
        "methods": {"say": {"text": "Any"}, "fail": {"text": "str"}, "through": {"text": "str"}},
    },
    "blocking": {
        "class": f"{HERE}:Blocking",
        "methods": {
            "say": {"text": "Any"},
            "fail": {"text": "str"},
            "gate": {"name": "str"},
            "ask_myself": {"text": "str"},
            "measure": {"values": "list[int]"},
        },
    },
    "patient": {
        "class": f"{HERE}:Patient",
        "methods": {"wait": {"name": "str"}, "count": {"name": "str"}},
        "preemptable": True,
    },
    "stoppable": {"class": f"{HERE}:Stoppable", "methods": {"work": {"name": "str"}}, "preemptable": "checkpoint"},
    "rememberer": {"class": f"{HERE}:Rememberer", "methods": {"hear": {"text": "str"}}, "min_instances": 2},
    "counter": {
        "class": f"{HERE}:Counter",
        "methods": {"add": {"session": "str", "number": "int"}},
        "stateful": True,
        "min_instances": 3,
    },
    "batcher": {
        "class": f"{HERE}:Batcher",
        "methods": {"double": {"number": "int"}, "short": {"number": "int"}},
        "batchable": True,
        "max_batch": 4,
    },
    "mixer": {
        "class": f"{HERE}:Mixer",
        "methods": {"mix": {"name": "str"}},
        "batchable": True,
        "mix_sessions": True,
    },
    "holder": {"class": f"{HERE}:Holder", "methods": {"hold": {"name": "str"}}},
    "async_holder": {"class": f"{HERE}:AsyncHolder", "methods": {"hold": {"name": "str"}}},
    "faulty": {"class": f"{HERE}:Faulty", "methods": {"hold": {"name": "str"}}},
    "door": {"class": f"{HERE}:Door", "methods": {"hold": {"name": "str"}, "close": {}}},
}


def only(*names: str, **directives: Any) -> dict[str, Any]:
    return {name: {**AGENTS[name], **directives} for name in names}
