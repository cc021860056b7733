"""The seam between the manager and a driver: what a driver is asked, what it answers, which errors it raises.

A driver is one object. It is asked from the event loop and must never block it: a library that waits runs in threads of
the driver's own (`threads.py`). It maps its library's errors to `SandboxError`s once; nothing else leaves it. All of
its methods may be called at once, and each may be cancelled at any await.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from thunderagent.tools.template import Template

LABEL_PREFIX = "thunderagent."
PROGRAM_LABEL = "thunderagent.program-id"
"""Of a program; who labels a sandbox of its own so gives it to us: it is reclaimed when that program ends."""
SANDBOX_LABEL = "thunderagent.sandbox-id"
OWNER_LABEL = "thunderagent.owner"
"""Which proxy made it: the same name before and after a restart."""
RUN_LABEL = "thunderagent.run"
"""Which run of that proxy made it: what bears our owner and another run is an orphan."""
EXPIRES_LABEL = "thunderagent.expires"
"""When it ends by itself, in whole seconds of Unix time."""
TEMPLATE_LABEL = "thunderagent.template"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who we are: the labels of everything that we make."""

    owner_id: str
    run_id: str


@dataclass(frozen=True, slots=True)
class Order:
    """One sandbox to be made. `program_id` is empty for one that is kept warm; `expires_at_s` is Unix time."""

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
    """Where a sandbox is. `handle` is the driver's name for it; `ports` says where each port inside is reached."""

    handle: str
    address: str = ""
    ports: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    """What else a client may want to know: the container's name, the namespace."""


@dataclass(frozen=True, slots=True)
class Found:
    """A sandbox that is there, by its labels: ours, or given, which bears the label of a program alone."""

    handle: str
    labels: Mapping[str, str]
    running: bool
    place: Place

    @property
    def sandbox_id(self) -> str:
        """Return our name for it; empty if we did not make it."""
        return self.labels.get(SANDBOX_LABEL, "")

    @property
    def program_id(self) -> str:
        """Return whose it is; empty if it is kept warm."""
        return self.labels.get(PROGRAM_LABEL, "")

    @property
    def is_given(self) -> bool:
        """Whether somebody else made it and gave it to us."""
        return not self.sandbox_id and bool(self.program_id)

    def is_of(self, owner: Owner) -> bool:
        """Say whether that proxy made it, in this run or an earlier one."""
        return bool(self.sandbox_id) and self.labels.get(OWNER_LABEL) == owner.owner_id

    def is_orphan_of(self, owner: Owner) -> bool:
        """Say whether an earlier run of that proxy made it."""
        return self.is_of(owner) and self.labels.get(RUN_LABEL) != owner.run_id


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened at the engine: a labelled sandbox appeared, or ended. `why` tells how it ended."""

    found: Found
    ended: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that somebody runs inside a labelled sandbox began, or ended. `run_id` is the engine's name for it."""

    handle: str
    run_id: str
    ended: bool
    words: str = ""
    """The command, as far as the engine tells; empty at its end."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What sandboxes take: for each handle that was asked for and is there, bytes on disk and in memory."""

    disk_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)


class Driver(Protocol):
    """Makes and removes sandboxes of one kind."""

    @property
    def kind(self) -> str:
        """The word for it in templates, logs and metrics."""

    async def open(self) -> None:
        """Begin, once, before anything else is asked. Raises nothing: an engine may be down."""

    async def prepare(self, order: Order) -> Place:
        """Make a sandbox and return once it is usable: pulled, started, set up, ready.

        If it fails or is cancelled, what was begun is removed, as far as the engine can be reached. Raises
        `SandboxError`. The caller keeps to the template's timeout.
        """

    async def adopt(self, name: str, reclaim_url: str) -> Place:
        """Return where a sandbox is that a client made itself and calls so; `reclaim_url` is for drivers of callbacks.

        Raises `NotFoundError` if there is none, `SandboxError`.
        """

    async def reclaim(self, handle: str) -> None:
        """Remove a sandbox with all that was made for it; one that is gone is no error. Raises `SandboxError`."""

    async def find(self) -> Sequence[Found]:
        """Return everything that bears one of our labels, whoever made it. Raises `SandboxError`."""

    async def sweep(self) -> None:
        """Remove what no sandbox is left for, if earlier runs of this owner made it: networks, volumes, images."""

    def watch(self) -> AsyncGenerator[Change | Command, None]:
        """Yield what happens to labelled sandboxes from now on; raise `SandboxError` when the engine is lost.

        Commands only where the engine tells of them.
        """

    async def measure(self, handles: Sequence[str]) -> Usage:
        """Return what these take, as far as the engine tells. Raises `SandboxError`."""

    async def close(self) -> None:
        """Let go of connections and threads; sandboxes stay."""
