"""The sessions of a deployment: their begin and end, and their stored state."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any
from weakref import WeakValueDictionary

from thunderagent.client import Program
from thunderagent_workflows.core.call import Call
from thunderagent_workflows.errors import StoreError
from thunderagent_workflows.hub import Hub
from thunderagent_workflows.llm import check_session_name
from thunderagent_workflows.node import Node
from thunderagent_workflows.scope import Scope, SessionInfo
from thunderagent_workflows.state import SessionState
from thunderagent_workflows.store import Store
from thunderagent_workflows.view import View

log = logging.getLogger("thunderagent_workflows")

KEPT_LOGS_COUNT = 256
"""How many ended sessions' logs are kept."""


class Sessions:
    """What lives longer than a driver. All of it runs on the deployment's loop."""

    def __init__(self, node: Node, view: View, store: Store, proxy: str, hub: Hub | None, *, keeps_state: bool) -> None:
        """With `keeps_state` the store outlives the deployment, so it is given managed state."""
        self.ended: dict[str, SessionInfo] = {}
        self._node = node
        self._view = view
        self._store = store
        self._proxy = proxy
        self._hub = hub
        self._keeps_state = keeps_state
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By name, who begins or ends that session now."""
        self._unsaved: dict[str, dict[str, dict[str, Any]]] = {}
        """By session and agent, managed state that is to be stored."""
        self._saving: dict[str, asyncio.Task[None]] = {}
        """By session, who stores it: one at a time, so that the newest comes last."""
        self._releasing: set[asyncio.Task[None]] = set()
        if hub is not None and proxy:
            hub.on_late_turn = self._release
        if keeps_state:
            node.on_answered = self._save_touched
            if hub is not None:
                hub.on_kept = self._save

    async def begin(self, name: str, around: Scope | None) -> SessionInfo:
        """Begin or continue a session; `around` is where a nested workflow was begun. Raises `StoreError`."""
        info = self._node.sessions.get(name) if name else None
        if info is None:
            check_session_name(name)
            name = name or f"session-{uuid.uuid4().hex}"
            async with self._turn(name):
                info = self._node.sessions.get(name) or await self._begin(name, around)
        info.runs_count += 1
        return info

    async def _begin(self, name: str, around: Scope | None) -> SessionInfo:
        states = await self._store.load_states(name)
        info = self._node.session(name)
        if around is not None and around.session.name != name:
            info.parent = around.session.name
            info.group = f"{around.session.name}/{around.call_id}"
        if "" in states:
            info.state = SessionState(states.pop(""))
        if self._hub is not None:
            self._hub.begin_session(info, states)
        else:
            self._node.kept_states.update({(agent, name): values for agent, values in states.items()})
        return info

    async def leave(self, info: SessionInfo, *, is_named: bool) -> None:
        """End a driver's part in a session, and with the last driver the session, unless the user has named it."""
        info.runs_count -= 1
        if self._node.sessions.get(info.name) is not info:
            return  # it has ended already
        if is_named or info.runs_count:
            self._save_drivers(info)
        else:
            await self.end(info.name)

    async def end(self, name: str, *, keep_state: bool = False) -> None:
        """End a session: remaining calls fail, and its stored state is dropped, unless the deployment ends.

        Raises `StoreError` if the state could not be dropped; all else is done then.
        """
        async with self._turn(name):
            info = self._node.end_session(name)
            if self._hub is not None:
                self._hub.end_session(name)
            self._view.end_session(name)
            if info is not None:
                self.ended[name] = info
                while len(self.ended) > KEPT_LOGS_COUNT:
                    del self.ended[next(iter(self.ended))]
            try:
                if not keep_state:
                    await self._drop(name)
            finally:
                if info is not None and info.uses_proxy and self._proxy:
                    await Program(self._proxy, name).async_release()

    async def close(self) -> None:
        """End all sessions; their stored state stays."""
        for info in list(self._node.sessions.values()):
            self._save_drivers(info)
            await self.end(info.name, keep_state=True)
        if left := {*self._saving.values(), *self._releasing}:
            await asyncio.wait(left)

    def _release(self, name: str) -> None:
        """End a program at the proxy that a turn has begun anew after its session's end."""

        async def release() -> None:
            async with self._turn(name):
                info = self._node.sessions.get(name)
                if info is None:
                    await Program(self._proxy, name).async_release()
                else:  # a new one, whose end does it
                    info.uses_proxy = True

        task = self._node.loop.create_task(release())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    # --- stored state

    def _save_drivers(self, info: SessionInfo) -> None:
        if self._keeps_state and info.state is not None:
            self._save("", info.name, info.state.take_touched(info.name))

    def _save_touched(self, location: str, calls: list[Call]) -> None:
        for session, values in self._node.touched_states(location, calls):
            self._save(calls[0].agent, session, values)

    def _save(self, agent: str, session: str, values: dict[str, Any]) -> None:
        if not values or session not in self._node.sessions:  # a call may outlive its session
            return
        self._unsaved.setdefault(session, {}).setdefault(agent, {}).update(values)
        if session not in self._saving:
            self._saving[session] = self._node.loop.create_task(self._save_all(session))

    async def _save_all(self, session: str) -> None:
        try:
            while by_agent := self._unsaved.pop(session, None):
                for agent, values in by_agent.items():
                    try:
                        await self._store.save_state(agent, session, values)
                    except StoreError as error:
                        log.warning("%s", error)
        finally:
            del self._saving[session]

    async def _drop(self, session: str) -> None:
        """Delete a session's stored state, after what is being stored of it."""
        self._unsaved.pop(session, None)
        if session in self._saving:
            await asyncio.wait([self._saving[session]])
        await self._store.drop_session(session)
