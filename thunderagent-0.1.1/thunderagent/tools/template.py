"""A sandbox's template, from the configuration file or from a request."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DriverKind = Literal["docker", "kubernetes", "agent-sandbox", "callback"]
Network = Literal["default", "own", "none"]
PodSecurity = Literal["restricted", "baseline"]


LONGEST_S = 31_536_000.0
"""A year, in seconds: anything longer is a mistake, and may overflow an engine's number."""

LARGEST_COUNT = 2**62
"""Engines' numbers have 64 bits."""

Port = Annotated[int, Field(gt=0, le=65535)]


# What a template must leave to the warm pool of agent-sandbox.
_SAID_BY_POOL = frozenset(
    {
        *("image", "command", "working_dir", "mounts", "network", "cpus_count", "pids_count", "setup"),
        *("ready_command", "ready_port", "stop_grace_s", "kubernetes_kind", "pod_security", "run_as_user"),
    }
)


class Mount(BaseModel):
    """Something that appears in the sandbox at `target`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(pattern="^/", description="absolute path inside")
    source: str | None = Field(
        None, description="path on the engine's machine; none makes an empty volume that goes with the sandbox"
    )
    read_only: bool = False


class Template(BaseModel):
    """How to make a sandbox, and when it is usable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    driver: DriverKind = Field("docker", description="what makes it: docker, kubernetes, agent-sandbox or callback")
    image: str = Field("", description="image to run; docker and kubernetes need one")
    command: tuple[str, ...] = Field(
        (), description="what runs in it, as docker run and a pod's command take it; none waits for commands"
    )
    environment: dict[str, str] = Field({}, description="environment variables")
    working_dir: str = Field("", description="folder that commands start in; none is the image's")
    mounts: tuple[Mount, ...] = ()
    ports: tuple[Port, ...] = Field((), description="TCP ports inside that must be reachable from outside")
    network: Network = Field(
        "default",
        description="default: the engine's; own: one for all sandboxes of a program, gone with them; none: no network",
    )
    memory_bytes: int | None = Field(
        None, gt=0, le=LARGEST_COUNT, description="most memory, in bytes; counted against the cap"
    )
    cpus_count: float | None = Field(None, gt=0, le=10_000, description="most processors")
    pids_count: int | None = Field(None, gt=0, le=LARGEST_COUNT, description="most processes")
    disk_bytes: int | None = Field(
        None,
        ge=0,
        le=LARGEST_COUNT,
        description="what it is expected to write, in bytes; counted against the cap until it is measured",
    )
    setup: tuple[str, ...] = Field((), description="shell commands, run inside in this order once it has started")
    reuse_setup: bool = Field(
        False,
        description="docker: keep the files that setup made, for ttl_s, and start later sandboxes of this template "
        "from them instead of running it again; for a setup that leaves nothing but files",
    )
    suspend: bool = Field(
        False,
        description="docker: freeze it while its program's next turn waits for memory, and wake it ahead of that turn; "
        "for agents that do nothing in it meanwhile",
    )
    ready_command: str = Field("", description="shell command that succeeds inside when the sandbox is usable")
    ready_port: int | None = Field(None, gt=0, le=65535, description="port of `ports` that accepts when it is usable")
    ready_interval_s: float = Field(
        0.2, gt=0, le=LONGEST_S, description="time between two readiness checks, in seconds"
    )
    prepare_timeout_s: float = Field(
        300.0,
        gt=0,
        le=LONGEST_S,
        description="a preparation that takes longer, pull and setup included, has failed, in seconds",
    )
    stop_grace_s: float = Field(
        0.0,
        ge=0,
        le=LONGEST_S,
        description="time between the request to stop and the kill when it is reclaimed, in seconds",
    )
    ttl_s: float = Field(
        14_400.0,
        gt=0,
        le=LONGEST_S,
        description="longest life, in seconds: it ends by itself after that, even if the proxy is gone",
    )
    program_classes: tuple[str, ...] = Field(
        (), description="programs of these classes (X-Program-Class) get such a sandbox with their first request"
    )
    warm_count: int = Field(0, ge=0, description="how many spare ones to keep ready")
    kubernetes_kind: Literal["job", "pod"] = Field("job", description="kubernetes: what to make")
    namespace: str = Field("", description="kubernetes, agent-sandbox: where; none is that of the configuration")
    warm_pool: str = Field(
        "", description="agent-sandbox: the SandboxWarmPool to claim it from, which says what is in it"
    )
    pod_security: PodSecurity = Field(
        "restricted",
        description="kubernetes: the Pod Security Standard that it follows. restricted: no root, no capabilities, "
        "the runtime's seccomp profile; baseline: as the image says, also root",
    )
    run_as_user: int | None = Field(
        None, ge=0, le=2**31 - 1, description="kubernetes: numeric user to run as; none is the image's"
    )
    prepare_url: str = Field(
        "", description="callback: gets a POST for each preparation, and answers where the sandbox is"
    )
    reclaim_url: str = Field("", description="callback: gets a POST for each reclaiming")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.driver == "callback":
            if not self.prepare_url or not self.reclaim_url:
                raise ValueError("a callback template needs prepare_url and reclaim_url")
        elif self.driver == "agent-sandbox":
            self._check_claim()
        elif not self.image:
            raise ValueError(f"a {self.driver} template needs an image")
        if self.warm_count and self.network == "own":
            raise ValueError("a spare sandbox cannot have a program's own network: its program is not known yet")
        if self.reuse_setup and (self.driver != "docker" or self.mounts):
            raise ValueError("reuse_setup is for docker templates without mounts: what setup writes there is not kept")
        if self.suspend and self.driver != "docker":
            raise ValueError("suspend is for docker templates")
        if self.ready_port is not None and self.ready_port not in self.ports:
            raise ValueError(f"ready_port {self.ready_port} is not among ports")
        if self.run_as_user == 0 and self.pod_security == "restricted":
            raise ValueError('run_as_user 0 is root: it needs pod_security = "baseline"')
        return self

    def _check_claim(self) -> None:
        if not self.warm_pool:
            raise ValueError("an agent-sandbox template needs a warm_pool")
        if said := sorted(_SAID_BY_POOL & self.model_fields_set):
            raise ValueError(f"the warm pool of an agent-sandbox template says {', '.join(said)}")

    @property
    def is_of_its_program(self) -> bool:
        """Return whether something of it is its program's: a network, or what a service was told."""
        return self.network == "own" or self.driver == "callback"

    def digest(self) -> str:
        """Return a digest that is equal for templates that make the same sandbox."""
        same = self.model_dump_json(exclude={"program_classes", "warm_count"})
        return hashlib.sha256(same.encode()).hexdigest()[:16]
