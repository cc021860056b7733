"""What the machines pass on and store: a call, its result, and its origin's record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rules:
    """The parts of an agent's declaration that its controllers need."""

    is_stateful: bool = False
    """A session's calls run in order, on one instance, which it never leaves."""
    is_managed: bool = False
    """A session's calls run on one instance, beside its state, and both may move."""
    batch_count: int = 1
    """The most calls of one method that run at once."""
    mixes_sessions: bool = False
    """A batch may hold calls of several sessions."""
    is_preemptable: bool = False
    """A call may be interrupted, for one of a session of higher priority or for a move."""

    @property
    def is_pinned(self) -> bool:
        """A session has a home among the agent's instances."""
        return self.is_stateful or self.is_managed


@dataclass(slots=True)
class Outcome:
    """The result of a call: a value, or an error."""

    value: Any = None
    error: BaseException | None = None
    began_s: float = 0.0
    ended_s: float = 0.0
    lead_s: float | None = None
    """Time to its first turn at the proxy, if wanted; None if it made none."""


@dataclass(frozen=True, slots=True)
class Maker:
    """The code that makes calls: one run of a driver, or of a call. All its calls share it."""

    session: str
    origin: str
    chain: tuple[str, ...] = ()
    """The locations of the calls around it, outermost first; a driver has none."""
    call_id: int = 0
    """The call whose method it is; 0 for a driver."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of an agent's method, as it travels between controllers."""

    call_id: int
    maker: Maker
    agent: str
    method: str
    args: tuple[Any, ...] = ()
    stage_count: int = 1
    """Its depth in the graph of calls."""
    returns_count: int = 0
    """How many stages it comes after its agent's first call in the session: it returns to earlier work."""
    created_s: float = 0.0
    missing: dict[int, str] | None = None
    """Calls whose values it still needs, and who makes each, as far as known."""
    values: dict[int, Any] | None = None
    """Values that it needs and has."""
    home_version: int = 0
    """Of its session's home, as its origin knew it; 0 if the agent is not pinned."""
    born_version: int = 0
    """The version at which that home began without state."""
    checkpoint: Any = None
    """The state that its interrupted run left."""
    moves_count: int = 0
    """How often it moved to another instance."""

    @property
    def session(self) -> str:
        """Whose call it is."""
        return self.maker.session

    @property
    def origin(self) -> str:
        """The node that made it."""
        return self.maker.origin

    @property
    def chain(self) -> tuple[str, ...]:
        """The locations of the calls around it."""
        return self.maker.chain


class Record:
    """An origin's record of its own call. Metadata changes, but never the outcome once it is there."""

    __slots__ = (
        "call",
        "consumers",
        "edges_count",
        "executor",
        "left",
        "moves_count",
        "needs",
        "outcome",
        "owed",
        "waiters",
    )

    def __init__(self, call: Call, needs: tuple[Record, ...] = ()) -> None:
        self.call = call
        self.needs = needs
        """The calls whose values it takes, until it is resolved."""
        self.executor = ""
        """The instance where it will run; "" until one is chosen."""
        self.left = ""
        """While it moves, the instance that it leaves."""
        self.moves_count = 0
        self.outcome: Outcome | None = None
        self.edges_count = 0
        """Unresolved calls that need its value."""
        self.owed: list[tuple[str, int]] | None = None
        """Who asked the origin for its value: a location, and the call there."""
        self.consumers: list[str] | None = None
        """Where its value is needed, for reports."""
        self.waiters: list[Any] | None = None
        """The shell's own: whom to notify when it is resolved."""

    @property
    def creator(self) -> str:
        """The location of the code that made the call."""
        return self.call.chain[-1] if self.call.chain else "driver"

    @property
    def path(self) -> tuple[str, ...]:
        """The path to the call, agent by agent; last where it is, if it is anywhere."""
        return (*self.call.chain, self.executor) if self.executor else self.call.chain

    @property
    def dependencies(self) -> list[tuple[int, str]]:
        """The calls whose values it still waits for, and where each will run."""
        return [(need.call.call_id, need.executor) for need in self.needs if need.outcome is None]

    def add_consumer(self, location: str) -> None:
        """Note where its value is needed."""
        if self.consumers is None:
            self.consumers = []
        if location not in self.consumers:
            self.consumers.append(location)
