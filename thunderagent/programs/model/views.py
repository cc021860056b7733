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
        """Who pays for it; empty if that was not said."""

    @property
    def program_class(self) -> str:
        """What its client calls its kind; empty if that was not said."""

    @property
    def group_id(self) -> str:
        """The group it is in; empty if in none."""

    @property
    def priority(self) -> int:
        """As it was told: lower comes first; 0 if nothing was said."""

    @property
    def routed_to(self) -> str | None:
        """The replica that its route sends it to, if it has one that is open."""

    @property
    def parent_id(self) -> str:
        """The program that made it; empty if there is none."""

    @property
    def admitted(self) -> bool:
        """Whether it may be in the paused queue: always, where there is no admission."""

    @property
    def status(self) -> Status:
        """Whether it holds a claim."""

    @property
    def phase(self) -> Phase:
        """Whether a turn is with us or its tool runs."""

    @property
    def acting_since_s(self) -> float:
        """When its tool began; only while it is acting."""

    @property
    def tool(self) -> str:
        """Name of the tool that its last turn called; empty if it is not known."""

    @property
    def hold_until_s(self) -> float:
        """When it is worth holding no longer; only while it is acting."""

    @property
    def waiting_since_s(self) -> float:
        """When the first of its held turns arrived; only while it waits."""

    @property
    def turn_count(self) -> int:
        """Turns that were granted so far."""

    @property
    def expected_output_tokens(self) -> int:
        """What its turn that waits first, or else was granted last, was expected to generate when it arrived."""

    @property
    def level(self) -> Level | None:
        """How good a judge thinks its prospects are; None as long as there is no verdict."""

    @property
    def is_last_of_group(self) -> bool:
        """Whether it is in a group, all others of which ended."""

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
        """Of the prompts, what was found in the cache."""

    @property
    def growth_tokens(self) -> int:
        """What it is expected to grow by beyond that, until it is as large as programs are in the mean."""


class AccountView(Protocol):
    """What a policy may read of a replica's sums, all in tokens."""

    @property
    def capacity_tokens(self) -> int | None:
        """Size of its KV pool; None is not known."""

    @property
    def limit_tokens(self) -> float:
        """Return what may be claimed: the capacity, corrected if the policy wants that; infinite if not known."""

    @property
    def reasoning_tokens(self) -> int:
        """Claims of programs with a turn in flight, marked ones among them."""

    @property
    def marked_tokens(self) -> int:
        """Part of these that is given back when the turns in flight end."""

    @property
    def growth_tokens(self) -> int:
        """What its programs are expected to grow by beyond their claims."""

    @property
    def turn_count(self) -> int:
        """Turns in flight."""

    @property
    def active_count(self) -> int:
        """Programs that are active there."""

    @property
    def hit_ratio(self) -> float:
        """Prefix-cache hits of the engine by tokens, between the last two polls in which it looked any up."""

    @property
    def kv_used_ratio(self) -> float:
        """Part of the KV pool that running requests referenced at the last poll; cached blocks count as free."""

    @property
    def engine_waiting_count(self) -> int:
        """Requests that waited in the engine at the last poll."""

    @property
    def pending_encode_count(self) -> int | None:
        """Turns there whose images are yet to be encoded, as far as known; None where encoding is no stage."""

    @property
    def demand_tokens(self) -> int:
        """All claims, each in full, besides what they share if the policy wants that counted once."""

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
    """Where the programs of a scope go."""

    scope: str
    name: str
    targets: Mapping[str, float]
    """Replicas by their ids, with weights; they need not be open, but none was removed."""


class SandboxSums(NamedTuple):
    """What all sandboxes take, as last measured; None is *not known*."""

    sandbox_count: int = 0
    disk_bytes: int | None = None
    memory_bytes: int | None = None
