"""Managed state: lists and dictionaries that belong to a session, and go where it goes.

What a session's code sees under a name is its own: each agent has its own, and so have the session's drivers. An agent
that uses any is to be declared `managed`, so that all calls of a session reach it at one instance; the state lies in
that instance's controller, and moves with the session. A batch belongs to no single session, so batchable agents have
none.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, Generic, SupportsIndex, TypeVar, overload

from thunderagent_workflows.errors import StateError
from thunderagent_workflows.scope import DRIVER, current_scope

log = logging.getLogger("thunderagent_workflows")

Key = TypeVar("Key")
Value = TypeVar("Value")


class SessionState:
    """All managed state of one session at one agent. `touched` names what was used since it was last stored."""

    __slots__ = ("broken", "touched", "values")

    def __init__(self, values: dict[str, Any] | None = None, broken: str = "") -> None:
        self.values: dict[str, Any] = values if values is not None else {}
        self.touched: set[str] = set()
        self.broken = broken
        """Why it could not be brought here; whoever uses it is told so."""

    def take_touched(self, session: str, copied: Callable[[Any], Any] = copy.deepcopy) -> dict[str, Any]:
        """Return what was used since this was last asked, each value `copied`."""
        used = {name: self.values[name] for name in self.touched if name in self.values}
        self.touched.clear()
        return kept_values(used, copied, session)


def kept_values(values: Mapping[str, Any], change: Callable[[Any], Any], session: str) -> dict[str, Any]:
    """Return what `change` makes of each value of a session; what it refuses is logged, and None, as None is."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        try:
            kept[name] = change(value) if value is not None else None
        except Exception as error:  # whatever a stranger's class raises
            kept[name] = None
            log.warning("state %s of session %r is not kept: %s: %s", name, session, type(error).__name__, error)
    return kept


def _state(name: str, kind: type) -> Any:
    scope = current_scope(f"managed state {name!r}")
    if scope.location == DRIVER:
        if scope.session.has_ended:  # what it wrote would be in no session
            raise scope.ended_error(f"managed state {name!r}")
        if scope.session.state is None:
            scope.session.state = SessionState()
        state = scope.session.state
    else:
        state = scope.node.state_of(scope, name)
    if state.broken:
        raise StateError(f"managed state {name!r} of session {scope.session.name!r}: {state.broken}")
    state.touched.add(name)
    found = state.values.get(name)
    if found is None:
        found = state.values[name] = kind()
    elif type(found) is not kind:
        raise StateError(f"managed state {name!r} of session {scope.session.name!r} is a {type(found).__name__}")
    return found


class ManagedDict(MutableMapping[Key, Value]):
    """A dictionary of the current session. It has no content of its own: make it once, anywhere."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _data(self) -> dict[Key, Value]:
        found: dict[Key, Value] = _state(self.name, dict)
        return found

    def __getitem__(self, key: Key) -> Value:
        return self._data()[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._data()[key] = value

    def __delitem__(self, key: Key) -> None:
        del self._data()[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._data())

    def __len__(self) -> int:
        return len(self._data())

    def __repr__(self) -> str:
        return f"managed_dict({self.name!r})"


class ManagedList(MutableSequence[Value], Generic[Value]):
    """A list of the current session. It has no content of its own: make it once, anywhere."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _data(self) -> list[Value]:
        found: list[Value] = _state(self.name, list)
        return found

    @overload
    def __getitem__(self, index: SupportsIndex) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> list[Value]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._data()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._data()[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._data()[index]

    def __len__(self) -> int:
        return len(self._data())

    def __eq__(self, other: object) -> bool:
        return self._data() == (other._data() if isinstance(other, ManagedList) else other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"managed_list({self.name!r})"

    def insert(self, index: SupportsIndex, value: Value) -> None:
        """Put a value before the one at `index`."""
        self._data().insert(index, value)

    def extend(self, values: Iterable[Value]) -> None:
        """Put values behind the last one."""
        self._data().extend(values)


def managed_dict(name: str) -> ManagedDict[Any, Any]:
    """Return a dictionary that belongs to the current session, wherever it runs."""
    return ManagedDict(name)


def managed_list(name: str) -> ManagedList[Any]:
    """Return a list that belongs to the current session, wherever it runs."""
    return ManagedList(name)
