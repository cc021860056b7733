"""Answers and bodies that handlers write by hand, as models: they are there for the OpenAPI document alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from thunderagent.proxy.admin.reports import ReplicaReport
from thunderagent.proxy.gate.bodies import Report


class ErrorDetails(Report):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: None
    code: str = Field(description="for programs to read")


class ErrorReport(Report):
    """An error of the proxy's."""

    error: ErrorDetails


class HealthReport(Report):
    """The process answers."""

    status: Literal["ok"]


class ReadyReport(Report):
    """A turn would be served."""

    ready: Literal[True]
    replicas_up_count: int


class NotReadyReport(Report):
    """A turn would not be served."""

    ready: Literal[False]
    why: str


class ReleasedReport(Report):
    """Whether a program of that id lived until now."""

    program_id: str
    released: bool


class ReleasedTogetherReport(Report):
    """Which of several programs lived until now."""

    released: bool
    released_ids: list[str]


class ReplicasReport(Report):
    """The replicas, and the policy that places programs on them."""

    policy: str
    replicas: list[ReplicaReport]


class ReplicasChangedReport(Report):
    """Replicas that were added or changed, as they are now."""

    replicas: list[ReplicaReport]


class ReplicaRemovedReport(Report):
    """Whether a replica is gone, or is removed when nothing is in flight there any more."""

    replica_id: str
    removed: bool


class SandboxReport(Report):
    """A sandbox now."""

    sandbox_id: str
    template: str | None
    driver: str
    stage: Literal["requested", "preparing", "ready", "in_use", "reclaiming", "failed", "gone"]
    program_ids: list[str]
    given: bool = Field(description="somebody else made it")
    handle: str | None = Field(description="the engine's name or id of it")
    address: str | None
    ports: dict[str, list[str | int]] = Field(description="by the port inside: host and port to connect to")
    details: dict[str, Any]
    age_s: float
    prepare_s: float | None
    attempt_count: int
    why: str | None
    disk_bytes: int | None
    memory_bytes: int | None


class ProgramSandboxesReport(Report):
    """A program's sandboxes."""

    program_id: str
    sandboxes: list[SandboxReport]


class SandboxesReport(Report):
    """All sandboxes."""

    sandboxes: list[SandboxReport]
    engine_errors: dict[str, str] = Field(description="drivers whose engine does not answer, and why")


class ReclaimedReport(Report):
    """Whether a program had that sandbox."""

    sandbox_id: str
    reclaimed: bool


class ToolReport(Report):
    """A program whose tool began or ended."""

    program_id: str
    known: bool = Field(description="false if no program of that id lives")


class OpenedReport(Report):
    """A program that lives now."""

    program_id: str
    opened: bool = Field(description="false if it lived already")
    sandboxes: list[SandboxReport]
    token: str | None = Field(
        None, description="names the program until it ends; only where bearer tokens name programs"
    )


class SandboxBody(Report):
    """What is asked for; give one of template, spec and handle."""

    template: str | None = Field(None, description="name of a template in the configuration")
    spec: dict[str, Any] | None = Field(
        None, description="a template of its own; docs/how-to/sandboxes.md has its fields"
    )
    handle: str | None = Field(None, description="a sandbox that is there already: the engine's name or id of it")
    driver: Literal["docker", "kubernetes", "callback"] = Field("docker", description="with handle: whose name it is")
    reclaim_url: str = Field("", description="with handle, for one that runs elsewhere: gets a POST at the end")
    share: str = Field("", max_length=256, description="programs that ask with the same word share one sandbox")


class LeaseReport(Report):
    """A lease: leave for one turn to run on that replica."""

    lease_id: str
    program_id: str | None
    replica_id: str
    url: str
    held_s: float
    reason: str
    limit_s: float = Field(description="it is ended when nothing was heard of it for so long")


class LeaseHeldReport(Report):
    """Whether a lease is still held."""

    lease_id: str
    held: bool


class LeaseEndedReport(Report):
    """Whether a lease was still held."""

    lease_id: str
    ended: bool


class WeightSyncBegunReport(Report):
    """Grants are stopped."""

    suspended: Literal[True]
    began: bool
    limit_s: float


class WeightSyncEndedReport(Report):
    """Grants go on."""

    suspended: Literal[False]
    ended: bool


class LoginReport(Report):
    """The answer bears the cookie."""

    logged_in: Literal[True]
