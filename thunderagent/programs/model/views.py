"""What a policy may read of programs, replicas and routes: see `policy.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from thunderagent.programs.model.advice.verdicts import Level
    from thunderagent.programs.model.places import Phase, Status


class ProgramView(Protocol):
    """What a policy may read of a program."""

    @property
    def program_id(self) -> str:
        """The client's name for it."""

    @property
    def opened_s(self) -> float:
        """When its first turn arrived."""

    @property
    def tenant(self) -> str:
        """Who pays for it; empty if not given."""

    @property
    def program_class(self) -> str:
        """Its client's word for its kind; empty if not given."""

    @property
    def group_id(self) -> str:
        """The group it is in; empty if in none."""

    @property
    def priority(self) -> int:
        """Its set priority: lower comes first; 0 if none was set."""

    @property
    def routed_to(self) -> str | None:
        """The replica of its route, if it has an open one."""

    @property
    def parent_id(self) -> str:
        """The program that started it; empty if there is none."""

    @property
    def admitted(self) -> bool:
        """Whether it may be in the paused queue: always, if there is no admission."""

    @property
    def status(self) -> Status:
        """Whether it holds a claim."""

    @property
    def phase(self) -> Phase:
        """Whether a turn is here or its tool runs."""

    @property
    def acting_since_s(self) -> float:
        """When its tool began; only while it is acting."""

    @property
    def tool(self) -> str:
        """Name of the tool that its last turn called; empty if unknown."""

    @property
    def hold_until_s(self) -> float:
        """Until when it is worth holding; only while it is acting."""

    @property
    def waiting_since_s(self) -> float:
        """When the first of its held turns arrived; only while it waits."""

    @property
    def turn_count(self) -> int:
        """Turns that were granted so far."""

    @property
    def expected_output_tokens(self) -> int:
        """Expected output, at arrival, of its first waiting turn, or else of the turn granted last."""

    @property
    def level(self) -> Level | None:
        """A judge's level for its prospects; None before the first verdict."""

    @property
    def is_last_of_group(self) -> bool:
        """Whether it is in a group whose other programs have all ended."""

    @property
    def replica_id(self) -> str | None:
        """Where it is active, or was last."""

    @property
    def claim_tokens(self) -> int:
        """What it claims, or would claim."""

    @property
    def context_tokens(self) -> int:
        """Its context after its last finished turns: 0 before the first."""

    @property
    def prompt_tokens_total(self) -> int:
        """Of its finished turns; so are the next two."""

    @property
    def output_tokens_total(self) -> int:
        """What was generated."""

    @property
    def cached_tokens_total(self) -> int:
        """The part of the prompts that was cached."""

    @property
    def growth_tokens(self) -> int:
        """Expected growth beyond that, until it is as large as programs are on average."""


class AccountView(Protocol):
    """What a policy may read of a replica's sums, all in tokens."""

    @property
    def capacity_tokens(self) -> int | None:
        """Size of its KV pool; None is not known."""

    @property
    def assumed_tokens(self) -> float | None:
        """The same; if it is unknown, the median of the others' sizes; None if none is known."""

    @property
    def limit_tokens(self) -> float:
        """Return what may be claimed: the assumed size, corrected if the policy wants that; infinite without one."""

    @property
    def reasoning_tokens(self) -> int:
        """Claims of programs with a turn in flight, including marked ones."""

    @property
    def marked_tokens(self) -> int:
        """The part of these that is given back when the turns in flight end."""

    @property
    def growth_tokens(self) -> int:
        """Expected growth of its programs beyond their claims."""

    @property
    def turn_count(self) -> int:
        """Number of turns in flight."""

    @property
    def active_count(self) -> int:
        """Number of programs that are active there."""

    @property
    def hit_ratio(self) -> float:
        """The engine's prefix-cache hit rate by tokens, between the last two polls with lookups."""

    @property
    def kv_used_ratio(self) -> float:
        """Part of the KV pool that running requests referenced at the last poll; cached blocks count as free."""

    @property
    def engine_waiting_count(self) -> int:
        """Requests that waited in the engine at the last poll."""

    @property
    def pending_encode_count(self) -> int | None:
        """Turns there with unencoded images, as far as known; None if encoding is no stage of its own."""

    @property
    def demand_tokens(self) -> int:
        """All claims in full; if the policy wants that, shared tokens count once."""

    def weighed_tokens(self, now_s: float) -> float:
        """All claims, acting ones weighed by f(t)."""


class ReplicaView(Protocol):
    """What a policy may read of a replica."""

    @property
    def replica_id(self) -> str:
        """Its name."""

    @property
    def account(self) -> AccountView:
        """Its sums."""


class RouteView(NamedTuple):
    """The replicas to which the programs of a scope go."""

    scope: str
    name: str
    targets: Mapping[str, float]
    """Replica ids with weights; they need not be open, but none was removed."""


class SandboxSums(NamedTuple):
    """The resource use of all sandboxes, as last measured; None is *not known*."""

    sandbox_count: int = 0
    disk_bytes: int | None = None
    memory_bytes: int | None = None
