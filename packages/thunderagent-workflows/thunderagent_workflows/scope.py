"""Where code runs: in a driver, or in a call of an agent. A context variable, so tasks and threads have their own."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from thunderagent_workflows.core.call import Call, Maker, Record
from thunderagent_workflows.errors import SessionEndedError, WorkflowError

if TYPE_CHECKING:
    from thunderagent_workflows.node import Node

DRIVER = "driver"
"""The location of code outside of agents."""
NODE_BITS = 40
"""Call ids of a node are below this power of two, beside its number."""
KEPT_ENTRIES_COUNT = 10_000
"""The most calls of one session that its log keeps."""


class LogEntry(NamedTuple):
    """One finished call in a session's log. Times are the node's clock."""

    call_id: int
    parent_id: int
    agent: str
    method: str
    location: str
    created_s: float
    began_s: float
    ended_s: float
    stage_count: int
    moves_count: int
    is_failed: bool


@dataclass(slots=True, eq=False)
class SessionInfo:
    """A node's data on a session: what the user sees as one conversation, and the proxy as one program."""

    name: str
    parent: str = ""
    """The session whose call opened it."""
    group: str = ""
    first_stages: dict[str, int] = field(default_factory=dict)
    """By agent, the stage of its first call."""
    log: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=KEPT_ENTRIES_COUNT))
    """Calls that are over, each with the fields of a `LogEntry`."""
    state: Any = None
    """The managed state of its drivers."""
    runs_count: int = 0
    """Drivers that run in it."""
    uses_proxy: bool = False
    """A turn was sent for it, so the proxy must hear of its end."""
    has_ended: bool = False
    """Another session may have its name now."""


@dataclass(slots=True, eq=False)
class Scope:
    """One run of a driver, or of a call."""

    node: Node
    session: SessionInfo
    location: str = DRIVER
    chain: tuple[str, ...] = ()
    call: Call | None = None
    stage_count: int = 0
    """The furthest stage whose value this code has seen."""
    batch_count: int = 1
    """The calls that run as one."""
    is_mixed: bool = False
    """They are of several sessions."""
    maker: Maker = field(init=False)

    def __post_init__(self) -> None:
        call_id = self.call.call_id if self.call is not None else 0
        self.maker = Maker(self.session.name, self.node.name, self.chain, call_id)

    @property
    def call_id(self) -> int:
        """The running call; 0 in a driver."""
        return self.maker.call_id

    def ended_error(self, what: str) -> SessionEndedError:
        """Return the error of `what` this code wants after the end of its session."""
        return SessionEndedError(f"{what} comes after the end of session {self.session.name!r}", path=self.chain)

    def saw(self, record: Record) -> None:
        """Note that what comes next may depend on a call's value."""
        self.stage_count = max(self.stage_count, record.call.stage_count)
        record.add_consumer(self.location)


current: ContextVar[Scope | None] = ContextVar("thunderagent_workflow", default=None)


def current_scope(what: str) -> Scope:
    """Return where this code runs. Raises `WorkflowError` outside of any session: `what` needs one."""
    scope = current.get()
    if scope is None:
        raise WorkflowError(f"{what} needs a session: call it from what `app.run` runs, or from an agent")
    return scope


def current_session() -> str:
    """Return the name of the session that this code runs in; "" outside of any."""
    scope = current.get()
    return scope.session.name if scope is not None else ""


def checkpoint() -> Any:
    """Return what the interrupted run of this call left behind; None on its first run."""
    scope = current.get()
    return scope.call.checkpoint if scope is not None and scope.call is not None else None
