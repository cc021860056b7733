"""The sessions of a deployment: their begin and end, and their stored state."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from thunderagent.client import Program
from thunderagent.workflows.core.call import Call
from thunderagent.workflows.errors import StoreError
from thunderagent.workflows.hub import Hub
from thunderagent.workflows.llm import check_session_name
from thunderagent.workflows.node import Node
from thunderagent.workflows.scope import Scope, SessionInfo
from thunderagent.workflows.state import SessionState
from thunderagent.workflows.store import Store
from thunderagent.workflows.view import View

log = logging.getLogger("thunderagent.workflows")

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
        self._saving: set[asyncio.Task[None]] = set()
        if keeps_state:
            node.on_answered = self._save_touched
            if hub is not None:
                hub.on_kept = self._save

    async def begin(self, name: str, around: Scope | None) -> SessionInfo:
        """Begin or continue a session; `around` is where a nested workflow was begun."""
        info = self._node.sessions.get(name) if name else None
        if info is None:
            check_session_name(name)
            name = name or f"session-{uuid.uuid4().hex}"
            info = self._node.session(name)
            if around is not None and around.session.name != name:
                info.parent = around.session.name
                info.group = f"{around.session.name}/{around.call_id}"
            states = await self._store.load_states(name)
            if "" in states:
                info.state = SessionState(states.pop(""))
            if self._hub is not None:
                self._hub.begin_session(info, states)
            else:
                self._node.kept_states.update({(agent, name): values for agent, values in states.items()})
        info.runs_count += 1
        return info

    async def leave(self, info: SessionInfo, *, is_named: bool) -> None:
        """End a driver's part in a session, and with the last driver the session, unless the user has named it."""
        info.runs_count -= 1
        if self._keeps_state and info.state is not None and info.state.touched:
            self._save("", info.name, info.state.take_touched())
        if not is_named and not info.runs_count:
            await self.end(info.name)

    async def end(self, name: str, *, keep_state: bool = False) -> None:
        """End a session: remaining calls fail, and its state is dropped, unless the deployment ends."""
        info = self._node.end_session(name)
        if self._hub is not None:
            self._hub.end_session(name)
        self._view.priorities.pop(name, None)
        if info is None:
            return
        self.ended[name] = info
        while len(self.ended) > KEPT_LOGS_COUNT:
            del self.ended[next(iter(self.ended))]
        if not keep_state:
            await self._store.drop_session(name)
        if info.uses_proxy and self._proxy:
            await Program(self._proxy, name).async_release()

    async def close(self) -> None:
        """End all sessions; their stored state stays."""
        for name in list(self._node.sessions):
            await self.end(name, keep_state=True)
        if self._saving:
            await asyncio.wait(self._saving)

    def _save_touched(self, location: str, calls: list[Call]) -> None:
        for session, values in self._node.touched_states(location, calls):
            self._save(calls[0].agent, session, values)

    def _save(self, agent: str, session: str, values: dict[str, Any]) -> None:
        task = self._node.loop.create_task(self._store_state(agent, session, values))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _store_state(self, agent: str, session: str, values: dict[str, Any]) -> None:
        try:
            await self._store.save_state(agent, session, values)
        except StoreError as error:
            log.warning("%s", error)
