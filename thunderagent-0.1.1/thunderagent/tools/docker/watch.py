"""Events of the containers of a Docker engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from thunderagent.tools.base import Change, Command, Found, Place
from thunderagent.tools.docker.answers import EVENT, Event, expires_s
from thunderagent.tools.docker.connection import encoded
from thunderagent.tools.docker.engine import Engine, mapped

EXEC_START = "exec_start"
"""Prefix of the action of a command that is run inside; after a colon comes the command."""


async def changes(engine: Engine, since_s: float) -> AsyncGenerator[Change | tuple[Command, Mapping[str, str]], None]:
    """Yield each container that starts or ends, whoever made it, from that Unix time on.

    Also yield each command that is run inside one, with the container's labels.

    Raises `SandboxError` when the engine is lost. Closing it ends its thread and its connection.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event | None] = asyncio.Queue()

    def hand_over(event: Event | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(events.put_nowait, event)

    def read(response: Any) -> None:
        for line in response.iter_lines():
            if line:
                hand_over(EVENT.decode(line))

    filters = {"type": ["container"], "event": ["start", "die", "destroy", "oom", EXEC_START, "exec_die"]}
    stream = engine.stream("events", "GET", f"/events?since={since_s:.3f}&filters={encoded(filters)}", read)
    stream.ended.add_done_callback(lambda _: hand_over(None))
    seen = _Seen()
    try:
        await engine.open(stream)
        while (event := await events.get()) is not None:
            if (command := _command(event)) is not None:
                yield command, event.actor.attributes
            elif (change := seen.change(event)) is not None:
                yield change
        raise mapped(stream.ended.result(0) or ConnectionError("it closed its stream of events"))
    finally:
        stream.close()


def _command(event: Event) -> Command | None:
    run_id = event.actor.attributes.get("execID", "")
    if event.action.startswith(EXEC_START):
        return Command(event.actor.id, run_id, ended=False, words=event.action.removeprefix(EXEC_START).lstrip(": "))
    return Command(event.actor.id, run_id, ended=True) if event.action == "exec_die" else None


class _Seen:
    """Merges all of the engine's reports on a container's end into one change."""

    def __init__(self) -> None:
        self._ended: set[str] = set()
        self._out_of_memory: set[str] = set()

    def change(self, event: Event) -> Change | None:
        """Return an event's change if it is new."""
        handle, attributes = event.actor.id, event.actor.attributes
        found = Found(handle, attributes, event.action == "start", Place(handle))
        if event.action == "oom":
            self._out_of_memory.add(handle)
            return None
        if event.action == "start":
            self._ended.discard(handle)
            self._out_of_memory.discard(handle)
            return Change(found, ended=False)
        if event.action == "destroy":
            was_told = handle in self._ended
            self._ended.discard(handle)
            self._out_of_memory.discard(handle)
            return None if was_told else Change(found, ended=True, why="it was removed")
        self._ended.add(handle)
        code = attributes.get("exitCode", "?")
        why = f"it ended with exit code {code}"
        if code == "124" and event.time + 1 >= expires_s(attributes):
            why = "its time to live is over"
        elif code != "0" and handle in self._out_of_memory:
            why += ": out of memory"
        return Change(found, ended=True, why=why)
