"""The configuration: one frozen model, built once in `cli`, handed down in slices.

Each value comes from the first of: the command line, the environment (`THUNDERAGENT_` and the name in capitals), the
TOML file that `--config` names, the default here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from math import inf
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from thunderagent.backends.discovery import wanted_of
from thunderagent.backends.discovery.base import PodSelection, ranks_count_of, refuse_twins
from thunderagent.backends.discovery.dns import DnsSource
from thunderagent.errors import ConfigurationError, DiscoveryError
from thunderagent.faults import faults_of
from thunderagent.tools.template import DriverKind, Template

ENVIRONMENT_PREFIX = "THUNDERAGENT_"
_OTHERS_VARIABLES = {"KEY", "PROXY", "PROGRAM_ID"}
"""Names with the prefix that are not settings: of the client, and of other commands."""
_SERVICE_LINK = re.compile(r"(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_\w+)?)?)")
"""What Kubernetes puts into every pod beside a service whose name begins so."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")

JUDGE_ON_REPLICAS = "replicas"
"""As judge_url: the judge is the replicas themselves."""

ORBIT_JUDGE = "orbit-judge"
"""The part that goes by what a judge says."""

HOST_FIELD = "{host}"
"""In an address of KV events it stands for a replica's host, so that one address is for all replicas."""


@contextmanager
def _refused() -> Iterator[None]:
    """Tell pydantic of what a source of replicas would refuse."""
    try:
        yield
    except DiscoveryError as error:
        raise ValueError(error.message) from error


class ServeConfig(BaseSettings):
    """Everything that `thunderagent serve` can be told."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True
    )
    toml_file: ClassVar[Path | None] = None

    backends: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="base URLs of the replicas, separated by commas: http://HOST:PORT, also with #dp=N data-parallel "
        "ranks, or dns+http://NAME:PORT for every address of a name; no source of replicas starts simulated engines",
    )
    backends_file: Path | None = Field(
        None, description="file that names replicas: TOML, JSON, or one URL a line; read again when it changes"
    )
    kubernetes_replicas: str = Field(
        "",
        description="pods that are replicas, as NAMESPACE/SELECTOR:PORT with a label selector and a port or its name",
    )
    discovery_interval_s: float = Field(
        5.0, gt=0, description="how often the file and the names of replicas are looked at, in seconds"
    )
    drain_limit_s: float = Field(
        300.0, ge=0, description="how long a removed replica may take to finish what is in flight there, in seconds"
    )
    data_parallel_ranks: int | Literal["auto"] = Field(
        1, description="data-parallel ranks behind each URL, each a replica of its own; auto counts them in the metrics"
    )
    backend_type: Literal["auto", "vllm", "sglang", "nova"] = Field(
        "auto", description="engine kind of the replicas; auto detects it for each"
    )
    model_aliases: Annotated[dict[str, str], NoDecode] = Field(
        {}, description="further names of models that clients may use, as name=served; engines get the served one"
    )
    model_pools: bool = Field(
        True,
        description="replicas that list other models at /v1/models are a pool of their own; else all are one, and "
        "every replica must serve every model",
    )
    capacity_tokens: int | None = Field(
        None, gt=0, description="size of each replica's KV pool in tokens; overrides what engines say"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8300, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="second port for the admin API and engine control; the first port then refuses them",
    )
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
    provision_volumes: Annotated[tuple[str, ...], NoDecode] = Field(
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
    gateways: int = Field(
        0,
        ge=0,
        le=256,
        description="gateway processes that carry the bytes of turns, all on the same port, beside one that schedules; "
        "0 does both in one process",
    )
    schedulers: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="of a gateway: base URLs of its scheduler, separated by commas"
    )
    scheduler_key: SecretStr | None = Field(
        None, description="of a gateway: the admin key that it sends to its scheduler"
    )
    scheduler_patience_s: float = Field(
        30.0,
        ge=0,
        description="of a gateway: how long turns wait for a scheduler before they run without one, in seconds",
    )
    fail_open_turns_count: int = Field(
        64, ge=0, description="of a gateway: most turns on each replica without a scheduler"
    )
    gateway_lost_s: float = Field(
        5.0,
        gt=0,
        description="of a scheduler: turns of a gateway without a link are over after this time, in seconds",
    )
    store: SecretStr | None = Field(
        None,
        description="of a scheduler: redis://HOST:PORT/DATABASE that it shares with others of its cell, one of which "
        "leads while the others stand by; it needs the extra scale",
    )
    elector: Literal["redis", "kubernetes"] = Field(
        "redis",
        description="of a scheduler with a store: what says who leads: the store's own lock, or a Lease of Kubernetes, "
        "which needs the extra kubernetes",
    )
    lease: str = Field(
        "",
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
        description="of elector kubernetes: NAMESPACE/NAME of the Lease; by default thunderagent-CELL in the namespace "
        "of the pod this runs in",
    )
    cell: str = Field(
        "default", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="of a scheduler: the name of its cell in the store"
    )
    lock_s: float = Field(
        3.0,
        ge=0.3,
        description="of a scheduler with a store: another one leads when it was not heard of for so long, in seconds; "
        "a Lease lasts 1 s longer",
    )
    reached_at: str = Field(
        "",
        description="of a scheduler with a store: http://HOST:PORT of the process itself, where others can see whether "
        "it runs; by default where it listens",
    )
    policy: str = Field(
        "breakeven",
        description="breakeven (this project's own), thunderagent (the paper's), cap, ttl, mars, continuum, infercept, "
        "autellix, sticky, passthrough, a preset (thunderagent-ports, continuum-fixed, concur, "
        "fcfs), or package.module:Class",
    )
    policy_args: Annotated[dict[str, str], NoDecode] = Field({}, description="settings of the policy, as name=value")
    admission: str = Field(
        "",
        description="part that says which programs may begin, before the policy places them",
    )
    order: str = Field("", description="part that says which program is restored first, instead of the policy")
    victims: str = Field("", description="part that says which program is paused first, instead of the policy")
    priority: str = Field(
        "", description="part that gives engines with priority scheduling the order in which they serve turns"
    )
    fair_tenants: bool = Field(
        False,
        description="serve waiting programs by what their tenant has had so far, and by the policy within a tenant",
    )
    tenant_weights: Annotated[dict[str, float], NoDecode] = Field(
        {}, description="share of a tenant against others, as name=weight; 1 if not named"
    )
    global_policy: str = Field(
        "",
        description="global policy, which routes, prioritises, moves, starts and ends once in a period: balance, "
        "migrate, reassign, package.module:Class, or several with + between",
    )
    judge_url: str = Field(
        "",
        description="base URL of a judge model with OpenAI's chat API, as http://HOST:PORT/v1, or replicas for turns "
        "on the replicas; asked whether programs will succeed; none: off",
    )
    judge_model: str = Field(
        "",
        description="model of the judge; on replicas by default that of the program's turns",
    )
    judge_api_key: SecretStr | None = Field(None, description="key that the judge is sent, as a bearer token")
    judge_api_key_file: Path | None = Field(None, description="file that holds that key")
    judge_prompt: Path | None = Field(
        None,
        description="file with the prompt, which holds {task} and {transcript} once each, and may hold {step} "
        "and {round}; by default our own",
    )
    judge_every_turns: int = Field(5, ge=1, description="turns of a program between two questions about it")
    judge_rate_per_s: float = Field(
        1.0,
        gt=0,
        description="questions per second about all programs together, at most; more wait, or are dropped; inf: all",
    )
    judge_asked_count: int = Field(16, ge=1, description="questions to the judge that are open at a time, at most")
    judge_max_prompt_tokens: int = Field(
        8000, ge=256, description="largest question, at 4 characters a token; what a program did is cut in the middle"
    )
    judge_max_tokens: int = Field(512, ge=16, description="largest answer, in tokens")
    judge_timeout_s: float = Field(30.0, gt=0, description="time for the judge to answer, in seconds")
    judge_fail_count: int = Field(
        10, ge=0, description="a program's level is the lowest after more verdicts of failure than this: ORBIT's K_fail"
    )
    judge_confidence_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="least confidence of a failure that counts; 0: each counts",
    )
    judge_ends_hopeless: bool = Field(
        False, description="end a program at the lowest level: its turns get 410 until it is released"
    )
    tick_s: float = Field(1.0, gt=0, description="longest time between two ticks of the scheduler, in seconds")
    idle_limit_s: float | None = Field(
        None,
        gt=0,
        description="a program whose tool runs longer gives its claim on memory back, in seconds; "
        "none learns it from the tool's times, 300 s at least",
    )
    forget_limit_s: float = Field(
        1800.0,
        gt=0,
        description="a program whose tool runs longer is forgotten, in seconds; its next turn opens it again",
    )
    no_replica_limit_s: float = Field(
        60.0, ge=0, description="how long turns wait while no replica is usable, before they get 503, in seconds"
    )
    grace_s: float = Field(30.0, ge=0, description="how long a shutdown waits for turns in flight, in seconds")
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        description="how long a shutdown first serves new turns, not ready, each answer its connection's last, so that "
        "clients and load balancers turn to another one, in seconds",
    )
    poll_interval_s: float = Field(1.0, gt=0, description="time between two polls of a replica, in seconds")
    poll_deadline_s: float = Field(2.0, gt=0, description="a poll that takes longer has failed, in seconds")
    down_after_failures: int = Field(2, ge=1, description="failed polls in a row that take a replica down")
    poll_silence_limit_s: float = Field(
        30.0, gt=0, description="a replica whose polls only time out is down after this time, in seconds"
    )
    kv_events: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="ZeroMQ addresses (tcp://HOST:PORT) where the replicas publish their KV events, one for each "
        "backend in the same order, separated by commas, or tcp://{host}:PORT for all; says what lies in their memory",
    )
    kv_events_replay: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="addresses where they replay KV events that were missed, in the same order"
    )
    engine_tags: bool = Field(
        False,
        description="put the program's id into turns for engines that can free its memory: as `session_id` for SGLang",
    )
    notice_timeout_s: float = Field(
        5.0, gt=0, description="time limit for telling an engine that a client left or a program ended, in seconds"
    )
    program_headers: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="further headers that name a turn's program, separated by commas"
    )
    user_names_program: bool = Field(
        False, description="take the body's user field as the program's id; in most clients it names a person"
    )
    bearer_programs: bool = Field(
        False,
        description="whether bearer tokens name programs: ta-ID, or one that POST /programs returns; "
        "Authorization is not forwarded then",
    )
    infer_programs: bool = Field(
        False,
        description="whether a turn that names no program joins the one whose last prompt and answer it begins with",
    )
    patience_s: float | None = Field(
        None, gt=0, description="patience of clients that do not state theirs, in seconds; none: for ever"
    )
    client_patience: bool = Field(True, description="let turns in, room or not, before their clients give up")
    patience_margin_s: float = Field(
        1.0, ge=0, description="least part of a client's patience that is left for the answer, in seconds"
    )
    patience_ratio: float = Field(
        0.25,
        ge=0,
        le=1,
        description="part of a client's patience that is left for the answer; the larger of both counts, at most half",
    )
    patience_overdraft_ratio: float = Field(
        0.5,
        ge=0,
        description="how far over its limit a replica may go for such turns, and for children of its programs, as a "
        "part of that limit; one program may exceed it; the others get 503",
    )
    heartbeat_s: float | None = Field(
        None,
        gt=0,
        description="time between two comments on a held stream, in seconds; the first commits status 200; none: off",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="time limit for a connection to a replica, in seconds")
    first_byte_timeout_s: float | None = Field(
        None,
        gt=0,
        description="a replica that does not begin to answer in this time is skipped, in seconds; an answer that is "
        "not streamed begins when it is whole; by default as silence_timeout_s",
    )
    silence_timeout_s: float = Field(
        3600.0, gt=0, description="a replica that sends no byte of an answer for longer has failed, in seconds"
    )
    total_timeout_s: float | None = Field(
        None, gt=0, description="an answer that takes longer in all has failed, in seconds; none: no limit"
    )
    retries_count: int = Field(
        2, ge=0, description="tries on another replica after a connection failed before the first byte"
    )
    engine_control_timeout_s: float = Field(
        7200.0,
        gt=0,
        description="time limit for an engine's whole answer to a control call, such as new weights, in seconds",
    )
    weight_sync_limit_s: float = Field(
        1800.0, gt=0, description="a weight sync that its trainer does not end is over after this time, in seconds"
    )
    observe_interval_s: float | None = Field(
        None,
        gt=0,
        description="how often to ask replicas whether they are paused and which weights they have, in seconds; never "
        "by default",
    )
    lease_limit_s: float = Field(
        60.0, gt=0, description="a lease of the API without a sign of life for longer is ended, in seconds"
    )
    retry_budget_ratio: float = Field(
        0.2, ge=0, le=1, description="retries of all turns together, as a part of the last minute's turns"
    )
    breaker_failure_count: int = Field(
        5, ge=0, description="turns in a row that a replica fails before it gets none for a while; 0 is never"
    )
    breaker_backoff_s: float = Field(
        5.0,
        gt=0,
        description="how long the breaker stays open at first, in seconds; twice as long each time it opens again",
    )
    max_body_bytes: int = Field(64 * 2**20, gt=0, description="largest request body, in bytes; more gets 413")
    max_held_turns_count: int = Field(
        20_000, ge=1, description="most turns that wait for a lease at a time; more get 503"
    )
    max_held_bytes: int = Field(2**30, gt=0, description="most bytes of held turns' bodies in memory; more get 503")
    key_max_held_turns_count: int | None = Field(
        None,
        ge=1,
        description="most turns of one key that wait; more get 429; by default half of max_held_turns_count",
    )
    key_max_held_bytes: int | None = Field(
        None, gt=0, description="most bytes of one key's held bodies; more get 429; by default half of max_held_bytes"
    )
    tenant_max_held_turns_count: int | None = Field(
        None,
        ge=1,
        description="most turns of all keys of a tenant that wait; more get 429; by default max_held_turns_count",
    )
    tenant_max_held_bytes: int | None = Field(
        None, gt=0, description="most bytes of a tenant's held bodies; more get 429; by default max_held_bytes"
    )
    max_running_bytes: int = Field(
        2**32,
        gt=0,
        description="most bytes of bodies of turns, held or running, until they end, half of it for one key; more get "
        "503",
    )
    client_stall_limit_s: float = Field(
        120.0,
        gt=0,
        description="a client that takes nothing of its answer for longer is cut off, in seconds; so is either side of "
        "a websocket",
    )
    max_websockets_count: int = Field(1000, ge=1, description="most websockets that are open at a time; more get 503")
    key_max_websockets_count: int | None = Field(
        None, ge=1, description="most websockets of one key; more get 429; by default half of max_websockets_count"
    )
    websocket_limit_s: float = Field(
        3600.0, gt=0, description="a websocket that is open for longer is closed with code 1001, in seconds"
    )
    max_programs_count: int = Field(
        100_000,
        ge=1,
        description="most programs that live at a time; past that the oldest without a turn are forgotten, then 503",
    )
    tenant_max_programs_count: int = Field(50_000, ge=1, description="most programs of one tenant that live at a time")
    body_timeout_s: float = Field(300.0, gt=0, description="time for a request body to arrive, in seconds; then 408")
    idle_timeout_s: float = Field(
        75.0, gt=0, description="a connection without a whole request head for this time is closed, in seconds"
    )
    api_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="keys for data, as NAME:sha256:HEX, separated by commas; `thunderagent key NAME` makes one"
    )
    admin_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="keys for everything, in the same form; `thunderagent key NAME --admin` makes one"
    )
    keys_file: Path | None = Field(
        None,
        description="file of keys with names, expiry and limits, JSON; read again when it changes, and changed by "
        "POST /keys and DELETE /keys/NAME; `thunderagent key NAME --keys-file FILE` makes one",
    )
    tenant_from_key: bool | None = Field(
        None,
        description="whether a data key names the tenant of its programs and sees only these; X-Program-Tenant "
        "counts only if not; by default where there are api_keys or a keys_file",
    )
    client_priority: Literal["keep", "drop"] | None = Field(
        None,
        description="what to do with a client's priority for engines, unless it has an admin key: keep or drop; "
        "by default drop where there are api_keys or a keys_file",
    )
    allow_open: bool = Field(False, description="listen without api_keys on an address that other machines reach")
    forward_unknown: Literal["admin", "data", "off"] | None = Field(
        None,
        description="which keys may call paths that neither the proxy nor a known engine has: admin, data, or nobody; "
        "by default admin where there are keys, data where there are none",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="names by which browsers and operators may call the proxy where there are no keys, separated by "
        "commas, besides localhost, host, that of reached_at and all addresses; * is any",
    )
    metrics_need_key: bool = Field(False, description="ask for an admin key on /metrics")
    tls_cert: Path | None = Field(
        None, description="certificate chain to serve https with, PEM; read again on SIGHUP; none: plain http"
    )
    tls_key: Path | None = Field(None, description="private key of tls_cert, PEM; by default in the same file")
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="origins whose web pages may call the proxy, separated by commas; * is any"
    )
    rate_limit_per_s: float | None = Field(
        None, gt=0, description="requests per second of each key, or address without keys; data waits, admin gets 429"
    )
    rate_limit_burst_count: int = Field(
        100, ge=1, description="requests that a caller may send at once before rate_limit_per_s applies"
    )
    backend_api_key: SecretStr | None = Field(None, description="key that the replicas are sent, as a bearer token")
    backend_api_key_file: Path | None = Field(None, description="file that holds that key")
    backend_ca_file: Path | None = Field(
        None, description="certificates to trust for replicas with https, PEM, besides the system's"
    )
    sandboxes: Annotated[tuple[DriverKind, ...], NoDecode] = Field(
        (), description="what makes programs' sandboxes: docker, kubernetes, callback, separated by commas; none: off"
    )
    sandbox_templates: dict[str, Template] = Field(
        {}, description="what sandboxes are made from, by name; in the file only, as [sandbox_templates.NAME]"
    )
    warm: int = Field(
        0, ge=0, description="how many sandboxes to keep ready of each template that is for a class of programs"
    )
    sandbox_specs: bool = Field(
        True,
        description="whether clients may bring templates of their own, which may mount any folder of the engine's "
        "machine and name any URL, and register any sandbox by name",
    )
    sandbox_owner: str = Field(
        "",
        max_length=128,
        description="name in the labels of all that is made; the same after a restart, and of no other proxy; "
        "by default host and port",
    )
    sandbox_max_count: int = Field(64, ge=1, description="most sandboxes at a time")
    sandbox_max_memory_bytes: int | None = Field(
        None, gt=0, description="most memory that sandboxes may take together, in bytes"
    )
    sandbox_max_disk_bytes: int | None = Field(
        None, gt=0, description="most that sandboxes may write together, in bytes"
    )
    sandbox_hands_count: int = Field(4, ge=1, le=64, description="preparations of sandboxes at a time")
    sandbox_pulls_count: int = Field(2, ge=1, description="pulls of images at a time")
    sandbox_attempts_count: int = Field(3, ge=1, description="tries to prepare a sandbox before it has failed")
    sandbox_idle_limit_s: float | None = Field(
        None, gt=0, description="sandboxes of a program without a turn for this time are reclaimed, in seconds"
    )
    sandbox_reclaim_on_shutdown: bool = Field(
        True,
        description="whether a shutdown reclaims sandboxes; else they stay until their time to live is over or "
        "this proxy starts again",
    )
    sandbox_reclaim_images: bool = Field(
        False, description="whether images that were pulled for sandboxes are removed with the last that uses them"
    )
    sandbox_keep_images: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="images that are never removed, separated by commas"
    )
    sandbox_callback_token: str = Field(
        "", description="bearer token that callbacks are sent with, to the URLs of templates in the file only"
    )
    sandbox_callback_timeout_s: float = Field(30.0, gt=0, description="time for a callback to answer, in seconds")
    docker_url: str = Field(
        "", description="address of the Docker engine, as unix:///var/run/docker.sock; by default as the docker command"
    )
    kubernetes_namespace: str = Field("default", description="namespace of sandboxes on Kubernetes")
    kubernetes_config: Path | None = Field(
        None, description="kubeconfig file; by default that of the pod this runs in, else that of kubectl"
    )
    kubernetes_url: str = Field("", description="address of a Kubernetes API that needs no login, as kubectl proxy's")
    state: Path | None = Field(
        None,
        description="file that keeps what is learned (tool times, growth, prices, capacities), each half minute and at "
        "the end, for the next start",
    )
    signal_log: Path | None = Field(
        None, description="file to which the information stream is appended, one JSON object a line"
    )
    event_log: Path | None = Field(
        None,
        description="file for every event and decision, for `thunderagent replay`; an old one is kept as FILE.1",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="console for people, json for one object a line; auto is console on a terminal"
    )
    access_log: bool = Field(False, description="log a line for each request, besides those of turns")
    otlp_endpoint: str = Field(
        "", description="base URL of an OpenTelemetry collector (OTLP over HTTP), as http://127.0.0.1:4318; none: off"
    )
    trace_sample_ratio: float | None = Field(
        None, ge=0, le=1, description="part of new traces that is sent; by default OTEL_TRACES_SAMPLER"
    )
    embedded_engines: int = Field(
        2, ge=0, le=16, description="simulated engines to start when there is no source of replicas; 0 starts without"
    )
    demo: bool = Field(
        default=False,
        description="start the simulated engines on any address; without it they start on loopback only",
    )
    embedded_kv_tokens: int = Field(16_000, ge=1024, description="KV pool of each simulated engine, in tokens")

    @property
    def logs_json(self) -> bool:
        """Whether log lines are JSON."""
        return self.log_format == "json" or (self.log_format == "auto" and not sys.stderr.isatty())

    @property
    def keys_name_tenants(self) -> bool:
        """Whether the tenant of a program comes from the key that opens it."""
        return self.has_keys if self.tenant_from_key is None else self.tenant_from_key

    @property
    def has_keys(self) -> bool:
        """Whether data needs a key."""
        return bool(self.api_keys or self.keys_file)

    @property
    def has_replica_source(self) -> bool:
        """Whether replicas come from somewhere; else simulated engines are started."""
        return bool(self.backends or self.backends_file or self.kubernetes_replicas or self.provision)

    @property
    def simulates_engines(self) -> bool:
        """Whether simulated engines are started: nothing else names a replica."""
        return not self.has_replica_source and self.embedded_engines > 0

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

    @field_validator("backends", mode="before")
    @classmethod
    def _split_backends(cls, value: object) -> object:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            return value
        urls = tuple(str(part).strip().rstrip("/") for part in parts if str(part).strip())
        with _refused():
            for url in urls:
                if url.startswith("dns+"):
                    DnsSource(url, interval_s=1.0)
            refuse_twins([wanted_of(url.removeprefix("dns+")) for url in urls])
        return urls

    @field_validator(
        "kv_events",
        "kv_events_replay",
        "program_headers",
        "sandboxes",
        "sandbox_keep_images",
        "provision_volumes",
        "api_keys",
        "admin_keys",
        "cors_origins",
        "allowed_hosts",
        "schedulers",
        mode="before",
    )
    @classmethod
    def _split_list(cls, value: object) -> object:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            return value
        return tuple(str(part).strip() for part in parts if str(part).strip())

    @field_validator("schedulers")
    @classmethod
    def _check_schedulers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts.netloc):
                raise ValueError(f"{url!r} is not a URL with http or https, as http://HOST:PORT")
        return urls

    @field_validator("reached_at")
    @classmethod
    def _check_reached_at(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
        except ValueError:
            is_url = False
        if url and not is_url:
            raise ValueError(f"{url!r} is not a URL with http or https and a port, as http://HOST:PORT")
        return url

    @field_validator("store")
    @classmethod
    def _check_store(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not _is_store(url.get_secret_value()):  # its words may be those of a password
            raise ValueError(
                "is not a URL, as redis://:PASSWORD@HOST:PORT/DATABASE; in a password write / as %2F, ? as %3F, # as "
                "%23, @ as %40, [ as %5B, ] as %5D and % as %25"
            )
        return url

    @model_validator(mode="after")
    def _addresses_have_backends(self) -> Self:
        for_all = len(self.kv_events) == 1 and HOST_FIELD in self.kv_events[0]
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
    def _security_is_of_one_piece(self) -> Self:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key goes with tls_cert")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):  # it would match no page
                raise ValueError(f"cors_origins: {origin!r} is not an origin, such as https://page.example:8443")
        if self.backend_api_key_file is not None and self.backend_api_key is not None:
            raise ValueError("backend_api_key and backend_api_key_file are two ways to say the same")
        if self.judge_api_key_file is not None and self.judge_api_key is not None:
            raise ValueError("judge_api_key and judge_api_key_file are two ways to say the same")
        return self

    @model_validator(mode="after")
    def _judge_can_be_asked(self) -> Self:
        if self.judge_url and self.judge_url != JUDGE_ON_REPLICAS:
            url = urlsplit(self.judge_url)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(
                    f"judge_url: {self.judge_url!r} is not a URL with http or https, nor {JUDGE_ON_REPLICAS}"
                )
            if not self.judge_model:
                raise ValueError("judge_url: name the judge_model to ask there")
        elif not self.judge_url and ORBIT_JUDGE in (self.order, self.priority, *self.policy_args.values()):
            raise ValueError(f"{ORBIT_JUDGE} goes with judge_url; nobody judges without, and it is orbit-step")
        return self

    @model_validator(mode="after")
    def _every_body_can_be_held(self) -> Self:
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError(f"max_held_bytes: {self.max_held_bytes} is less than one body of max_body_bytes")
        if self.tenant_from_key and not self.has_keys:
            raise ValueError("tenant_from_key goes with api_keys or keys_file: without, no key names a tenant")
        return self

    @model_validator(mode="after")
    def _nothing_is_without_effect(self) -> Self:
        for prefix, switch in (("judge_", "judge_url"), ("provision_", "provision")):
            given = [
                name
                for name, field in type(self).model_fields.items()
                if name.startswith(prefix) and name != switch and getattr(self, name) != field.default
            ]
            if given and not getattr(self, switch):
                raise ValueError(f"{', '.join(given)} {'goes' if len(given) == 1 else 'go'} with {switch}")
        return self

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight_ratio in weights.items():
            if not 0 < weight_ratio < inf:
                raise ValueError(f"the weight of tenant {name!r} must be a number over 0, not {weight_ratio}")
        return weights

    @field_validator("policy_args", "tenant_weights", "model_aliases", mode="before")
    @classmethod
    def _split_pairs(cls, value: object) -> object:
        if isinstance(value, dict):
            return {str(name): str(setting) for name, setting in value.items()}
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            return value
        pairs = [str(part).partition("=") for part in parts if str(part).strip()]
        for name, equals, setting in pairs:
            if not (name.strip() and equals and setting.strip()):
                raise ValueError(f"{name + equals + setting!r} is not name=value")
        return {name.strip(): setting.strip() for name, _, setting in pairs}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class's
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: command line, environment, file."""
        sources: list[PydanticBaseSettingsSource] = [init_settings]
        if any(name.upper().startswith(ENVIRONMENT_PREFIX) for name in os.environ):  # else it takes the most time
            sources.append(env_settings)
        if cls.toml_file is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=cls.toml_file))
        return tuple(sources)

    @classmethod
    def load(cls, toml_file: Path | None = None, **given: Any) -> Self:
        """Build the configuration; `given` is what the command line said.

        Raises `ConfigurationError` with a line for each value that is wrong.
        """
        if toml_file is not None and not toml_file.is_file():
            raise ConfigurationError(f"there is no configuration file {toml_file}")
        source: type[Self] = cls  # one of its own takes longer to make than all the rest
        if toml_file is not None:
            source = type(cls.__name__, (cls,), {"toml_file": toml_file, "__module__": cls.__module__})
        try:
            loaded: Self = source(**given)
        except ValidationError as error:
            raise ConfigurationError("; ".join(faults_of(error, whole="value"))) from error
        except TOMLDecodeError as error:
            raise ConfigurationError(f"{toml_file}: {error}") from error
        except (SettingsError, ValueError) as error:
            raise ConfigurationError(str(error)) from error
        return loaded


def _has_port(netloc: str) -> bool:
    """Say whether what stands behind the last colon of a host, if there is one, is a port."""
    port = netloc.rpartition("]")[2].rpartition(":")
    return not port[1] or port[2].isdigit()


def _is_store(url: str) -> bool:
    """Say whether this is the URL of a store. One that is cut within its password names another host."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("redis", "rediss", "unix") and parts.port != 0
    except ValueError:
        return False
    return is_url and (parts.scheme == "unix" or "@" not in parts.path + parts.query + parts.fragment)


def unknown_variables(names: Iterable[str]) -> dict[str, str]:
    """Return those of an environment's names that look like settings and are none, each with the nearest that is one.

    It is empty if none is near. They may be of another version, so they are worth a warning, and no error.
    """
    known = [name.upper() for name in ServeConfig.model_fields]
    unknown = {}
    for name in sorted(names):
        if not name.upper().startswith(ENVIRONMENT_PREFIX):
            continue
        setting = name.upper().removeprefix(ENVIRONMENT_PREFIX)
        if setting not in known and setting not in _OTHERS_VARIABLES and not _SERVICE_LINK.fullmatch(setting):
            nearest = get_close_matches(setting, known, n=1)
            unknown[name] = ENVIRONMENT_PREFIX + nearest[0] if nearest else ""
    return unknown
