"""The engines: their URLs and kinds; those that we start, and those that we simulate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from thunderagent.backends.discovery import wanted_of
from thunderagent.backends.discovery.base import PodSelection, ranks_count_of, refuse_twins
from thunderagent.backends.discovery.dns import DnsSource
from thunderagent.config.slices import Listed, Pairs, Slice
from thunderagent.errors import DiscoveryError

HOST_FIELD = "{host}"
KV_EVENTS_FOUND = "auto"
"""Instead of addresses of KV events: engines say them."""
"""Placeholder for a replica's host in an address of KV events, so that one address is for all replicas."""


@contextmanager
def _refused() -> Iterator[None]:
    """Convert a source's refusals for pydantic."""
    try:
        yield
    except DiscoveryError as error:
        raise ValueError(error.message) from error


class Engines(Slice):
    """Replicas and engines."""

    backends: Listed = Field(
        (),
        description="base URLs of the replicas, separated by commas: http://HOST:PORT, also with #dp=N data-parallel "
        "ranks, or dns+http://NAME:PORT for every address of a name; without any source of replicas simulated "
        "engines start",
    )
    backends_file: Path | None = Field(
        None, description="file that names replicas: TOML, JSON, or one URL a line; read again when it changes"
    )
    kubernetes_replicas: str = Field(
        "",
        description="pods that are replicas, as NAMESPACE/SELECTOR:PORT with a label selector and a port or its name",
    )
    discovery_interval_s: float = Field(
        5.0, gt=0, description="how often the file is read and names are looked up, in seconds"
    )
    drain_limit_s: float = Field(
        300.0, ge=0, description="how long a removed replica may take to finish its turns in flight, in seconds"
    )
    data_parallel_ranks: int | Literal["auto"] = Field(
        1,
        description="data-parallel ranks behind each URL, each of which is a replica; auto counts them in the metrics",
    )
    backend_type: Literal["auto", "vllm", "sglang", "nova"] = Field(
        "auto", description="engine kind of the replicas; auto detects it for each"
    )
    backend_api_key: SecretStr | None = Field(None, description="key to send to the replicas, as a bearer token")
    backend_api_key_file: Path | None = Field(None, description="file with that key")
    backend_ca_file: Path | None = Field(
        None, description="certificates to trust for replicas with https, PEM, besides the system's"
    )
    model_aliases: Pairs = Field(
        {}, description="another name for a model that clients may use, as name=served; engines get the served name"
    )
    model_pools: bool = Field(
        True,
        description="replicas that list different models at /v1/models form separate pools; if false all are one "
        "pool, and every replica must serve every model",
    )
    capacity_tokens: int | None = Field(
        None,
        gt=0,
        description="size of each replica's KV pool in tokens; overrides what engines report, up to what the plugin "
        "in vLLM has",
    )
    poll_interval_s: float = Field(1.0, gt=0, description="time between two polls of a replica, in seconds")
    poll_deadline_s: float = Field(2.0, gt=0, description="a poll that takes longer has failed, in seconds")
    down_after_failures: int = Field(2, ge=1, description="failed polls in a row that take a replica down")
    poll_silence_limit_s: float = Field(
        30.0,
        gt=0,
        description="what is in flight on a replica that answers no poll, and has no byte of a turn, is lost after "
        "this time, in seconds; it gets nothing new after three such polls",
    )
    frozen_limit_s: float = Field(
        15.0,
        ge=0,
        description="a replica that answers polls while its counters and turns stand still, and a check turn has no "
        "answer, is frozen after this time, in seconds; 0: never",
    )
    max_poll_bytes: int = Field(
        8 * 2**20,
        ge=64 * 1024,
        description="largest answer to a poll, in bytes, unpacked; a replica that sends more is down",
    )
    kv_events: Listed = Field(
        (),
        description="ZeroMQ addresses (tcp://HOST:PORT) where the replicas publish their KV events, one for each "
        "backend in the same order, separated by commas, or tcp://{host}:PORT for all, or `auto`: vLLM engines say it "
        "themselves; with these the proxy knows what is in their memory",
    )
    kv_events_replay: Listed = Field(
        (), description="addresses where they replay KV events that were missed, in the same order"
    )
    engine_tags: bool = Field(
        False,
        description="put the program's id into turns for engines that can free its memory: as `session_id` for SGLang",
    )
    engine_plugin: bool = Field(
        True,
        description="tell vLLM engines that have the scheduler thunderagent-vllm whose turn it is, how long to hold "
        "its memory, and what becomes of its program between turns; without effect on others",
    )
    engine_hold_s: float = Field(
        30.0,
        ge=0,
        le=600,
        description="how long these engines hold a program's memory after a turn whose client gives no hint, in "
        "seconds; 0, and a policy that holds nobody: as long as they do by themselves",
    )
    notice_timeout_s: float = Field(
        5.0,
        gt=0,
        description="time limit for telling an engine that a client disconnected or a program ended, in seconds",
    )

    @field_validator("data_parallel_ranks", mode="before")
    @classmethod
    def _check_ranks(cls, value: object) -> object:
        with _refused():
            return ranks_count_of(str(value))

    @field_validator("kubernetes_replicas")
    @classmethod
    def _check_selection(cls, value: str) -> str:
        with _refused():
            if value:
                PodSelection.read(value)
        return value

    @field_validator("backends")
    @classmethod
    def _check_backends(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(url.rstrip("/") for url in value)
        with _refused():
            for url in urls:
                if url.startswith("dns+"):
                    DnsSource(url, interval_s=1.0)
            refuse_twins([wanted_of(url.removeprefix("dns+")) for url in urls])
        return urls

    @model_validator(mode="after")
    def _addresses_have_backends(self) -> Self:
        for_all = len(self.kv_events) == 1 and HOST_FIELD in self.kv_events[0]
        if self.kv_events == (KV_EVENTS_FOUND,):
            for_all = True
            if self.kv_events_replay:
                raise ValueError("kv_events_replay needs addresses in kv_events; with auto engines say both")
        if self.kv_events and not for_all and len(self.kv_events) != len(self.backends):
            raise ValueError(
                f"kv_events needs an address for each of backends, so {len(self.backends)}, not {len(self.kv_events)}; "
                f"or one for all replicas, tcp://{HOST_FIELD}:PORT"
            )
        if self.kv_events_replay and len(self.kv_events_replay) != len(self.kv_events):
            raise ValueError(
                f"kv_events_replay needs an address for each of kv_events, so {len(self.kv_events)}, "
                f"not {len(self.kv_events_replay)}"
            )
        return self

    @model_validator(mode="after")
    def _key_is_said_once(self) -> Self:
        if self.backend_api_key_file is not None and self.backend_api_key is not None:
            raise ValueError("set either backend_api_key or backend_api_key_file, not both")
        return self


class Provisioning(Slice):
    """Starting and ending replicas."""

    provision: Literal["", "command", "docker", "kubernetes"] = Field(
        "", description="what starts and ends replicas for a policy or an operator; none: off"
    )
    provision_command: str = Field(
        "",
        description="command that serves a replica, with {port} and, if wanted, {replica_id}; with docker, what is "
        "given to the image",
    )
    provision_url: str = Field("http://127.0.0.1:{port}", description="URL of a started replica")
    provision_log_folder: Path | None = Field(
        None, description="folder for the output of started commands, one file each; none: it is discarded"
    )
    provision_image: str = Field("", description="image that a replica is run from, with docker")
    provision_port: int = Field(
        8000,
        ge=1,
        le=65535,
        description="port that the engine listens on inside its container, published as {port} on this machine",
    )
    provision_network: str = Field(
        "", description="Docker network of replicas; host: the engine listens on {port} itself"
    )
    provision_gpus: str = Field("", description="GPUs of a replica with docker: all, or how many")
    provision_volumes: Listed = Field(
        (), description="volumes of a replica started with docker, as HOST:INSIDE, separated by commas"
    )
    provision_workload: str = Field(
        "", description="what is scaled on Kubernetes, as NAMESPACE/deployment/NAME or NAMESPACE/statefulset/NAME"
    )
    provision_min: int = Field(0, ge=0, description="replicas that are started at the beginning and kept")
    provision_max: int = Field(1, ge=0, description="most replicas that are started")
    provision_cooldown_s: float = Field(
        30.0,
        ge=0,
        description="least time between two starts or ends that a policy asks for, and after a failure, in seconds",
    )
    provision_ready_limit_s: float = Field(
        900.0, gt=0, description="a started replica that does not answer within this time is ended, in seconds"
    )
    provision_end_limit_s: float = Field(
        30.0, gt=0, description="a replica that does not end within this time is killed, in seconds"
    )


class Simulated(Slice):
    """Simulated engines."""

    embedded_engines: int = Field(
        2, ge=0, le=16, description="simulated engines to start when there is no source of replicas; 0 starts without"
    )
    demo: bool = Field(
        default=False,
        description="start the simulated engines on any address; without it they start on loopback only",
    )
    embedded_kv_tokens: int = Field(16_000, ge=1024, description="KV pool of each simulated engine, in tokens")
