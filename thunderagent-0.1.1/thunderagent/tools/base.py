"""The interface between the manager and a driver: its methods, their results and errors.

A driver is one object. It is called from the event loop and must never block it: a blocking library runs in threads of
the driver's own (`threads.py`). It converts its library's errors to `SandboxError`s once; it raises nothing else. All
of its methods may be called at once, and each may be cancelled at any await.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import structlog

from thunderagent.errors import SandboxError
from thunderagent.tools.template import Template

_log = structlog.get_logger(__name__)

LABEL_PREFIX = "thunderagent."
PROGRAM_LABEL = "thunderagent.program-id"
"""Of a program; labelling one's own sandbox with it gives it to us: it is reclaimed when that program ends."""
SANDBOX_LABEL = "thunderagent.sandbox-id"
OWNER_LABEL = "thunderagent.owner"
"""The proxy that made it: the same name before and after a restart."""
RUN_LABEL = "thunderagent.run"
"""The run of that proxy that made it: our owner with another run means an orphan."""
EXPIRES_LABEL = "thunderagent.expires"
"""When it ends by itself, in whole seconds of Unix time."""
TEMPLATE_LABEL = "thunderagent.template"


@dataclass(frozen=True, slots=True)
class Owner:
    """Our identity: the labels of everything that we make."""

    owner_id: str
    run_id: str


@dataclass(frozen=True, slots=True)
class Order:
    """One sandbox to make. `expires_at_s` is Unix time.

    `program_id` is empty for one that may go to another program: its labels would name the wrong one.
    """

    sandbox_id: str
    template: Template
    template_name: str
    program_id: str
    expires_at_s: float

    @property
    def labels(self) -> dict[str, str]:
        """Return its labels, besides those of the owner."""
        labels = {
            SANDBOX_LABEL: self.sandbox_id,
            TEMPLATE_LABEL: self.template_name,
            EXPIRES_LABEL: str(int(self.expires_at_s)),
        }
        return {**labels, PROGRAM_LABEL: self.program_id} if self.program_id else labels


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sandbox is. `handle` is the driver's name for it; `ports` says where each inner port is reached."""

    handle: str
    address: str = ""
    ports: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    """Further details for clients: the container's name, the namespace."""
    recycled: bool = False
    """Whether it began with a kept setup, instead of running its own."""


@dataclass(frozen=True, slots=True)
class Found:
    """An existing sandbox, by its labels: ours, or a given one, which has only a program's label."""

    handle: str
    labels: Mapping[str, str]
    running: bool
    place: Place
    ended: bool = False
    """Whether it will not run again by itself: one that is paused, or waits for a node, has not ended."""

    @property
    def sandbox_id(self) -> str:
        """Return our id for it; empty if we did not make it."""
        return self.labels.get(SANDBOX_LABEL, "")

    @property
    def program_id(self) -> str:
        """Return its program; empty if it may go to another."""
        return self.labels.get(PROGRAM_LABEL, "")

    @property
    def is_given(self) -> bool:
        """Return whether somebody else made it and gave it to us."""
        return not self.sandbox_id and bool(self.program_id)

    def is_of(self, owner: Owner) -> bool:
        """Return whether that proxy made it, in this run or an earlier one."""
        return bool(self.sandbox_id) and self.labels.get(OWNER_LABEL) == owner.owner_id

    def is_orphan_of(self, owner: Owner) -> bool:
        """Return whether an earlier run of that proxy made it."""
        return self.is_of(owner) and self.labels.get(RUN_LABEL) != owner.run_id


@dataclass(frozen=True, slots=True)
class Change:
    """An event at the engine: a labelled sandbox appeared, or ended. `why` says how it ended."""

    found: Found
    ended: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that somebody runs inside a labelled sandbox began, or ended. `run_id` is the engine's id for it."""

    handle: str
    run_id: str
    ended: bool
    words: str = ""
    """The command, as far as the engine reports it; empty at its end."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource use of sandboxes: for each requested handle that exists, bytes on disk and in memory."""

    disk_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)


class Driver(Protocol):
    """Makes and removes sandboxes of one kind."""

    @property
    def kind(self) -> str:
        """Its name in templates, logs and metrics."""

    async def open(self) -> None:
        """Start, once, before any other call. Raises nothing: an engine may be down."""

    async def prepare(self, order: Order) -> Place:
        """Make a sandbox and return once it is usable: pulled, started, set up, ready.

        If it fails or is cancelled, what was begun is removed, as far as the engine can be reached. Raises
        `SandboxError`. The caller enforces the template's timeout.
        """

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        """Return where a client's own sandbox of this name is; `reclaim_url` is for drivers of callbacks.

        Raises `NotFoundError` if there is none, `SandboxError`.
        """

    async def reclaim(self, handle: str) -> None:
        """Remove a sandbox with all that was made for it; a missing one is no error. Raises `SandboxError`."""

    async def find(self) -> Sequence[Found]:
        """Return everything with one of our labels, whoever made it. Raises `SandboxError`."""

    async def sweep(self) -> None:
        """Remove leftovers without a sandbox that earlier runs of this owner made: networks, volumes, images.

        One that cannot be removed is logged. Raises `SandboxError` if they cannot be listed.
        """

    def watch(self) -> AsyncGenerator[Change | Command, None]:
        """Yield events of labelled sandboxes from now on; raise `SandboxError` when the engine is lost.

        Commands only if the engine reports them.
        """

    async def measure(self, handles: Sequence[str]) -> Usage:
        """Return the resource use of these, as far as the engine reports it. Raises `SandboxError`."""

    async def close(self) -> None:
        """Close connections and threads; sandboxes stay."""


@runtime_checkable
class Suspending(Protocol):
    """A driver whose sandboxes can stand still: their processes stop, and keep their memory."""

    async def suspend(self, handle: str) -> None:
        """Stop all processes of a sandbox. Raises `SandboxError`."""

    async def thaw(self, handle: str) -> None:
        """Let them go on; one that runs, or is gone, is no error. Raises `SandboxError`."""


@contextmanager
def logging_failures(leftover: str) -> Iterator[None]:
    """Log that a leftover cannot be removed instead of raising `SandboxError`: others can be."""
    try:
        yield
    except SandboxError as error:
        _log.warning("sandbox_leftover_not_removed", leftover=leftover, why=error.message)
