"""Turns: their programs, and time limits of their parts; and trainers' calls beside them."""

from __future__ import annotations

from pydantic import Field, field_validator

from thunderagent.config.slices import Listed, Slice


class Names(Slice):
    """Names of programs."""

    program_headers: Listed = Field((), description="further headers that name a turn's program, separated by commas")
    user_names_program: bool = Field(
        False, description="take the body's user field as the program's id; in most clients it names a person"
    )
    bucket_names_program: bool = Field(
        False,
        description="take the body's prompt_cache_key or metadata.session_id as the program's id, whatever the prompt; "
        "otherwise each such bucket may have many programs, which are told apart by their prompts",
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

    @field_validator("program_headers")
    @classmethod
    def _name_programs(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        """Heads that differ in the length alone are of one program: that is remembered of them."""
        if any(name.lower() == "content-length" for name in names):
            raise ValueError("Content-Length names no program: it is the length of the body")
        return names


class Timeouts(Slice):
    """Timeouts, retries and failover."""

    grace_s: float = Field(30.0, ge=0, description="how long a shutdown waits for turns in flight, in seconds")
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        description="how long a shutdown still serves turns while /ready answers 503, so that load balancers switch "
        "to another proxy, in seconds",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="time limit for a connection to a replica, in seconds")
    first_byte_timeout_s: float | None = Field(
        None,
        gt=0,
        description="a turn without a first byte of its answer after this time goes to another replica, in seconds; "
        "an answer that is not streamed begins when it is complete; by default silence_timeout_s",
    )
    silence_timeout_s: float = Field(
        3600.0, gt=0, description="a replica that sends no byte of an answer for longer has failed, in seconds"
    )
    total_timeout_s: float | None = Field(
        None,
        gt=0,
        description="longest time for a whole answer, and for a lease of the API, in seconds; by default no limit",
    )
    retries_count: int = Field(
        2, ge=0, description="tries on another replica after a connection failed before the first byte"
    )
    retry_budget_ratio: float = Field(
        0.2, ge=0, le=1, description="retries of all turns together, as a part of the last minute's turns"
    )
    breaker_failure_count: int = Field(
        5,
        ge=0,
        description="turns in a row that a replica fails before it gets none for a while; so do 40 % of four times as"
        " many; 0: never",
    )
    breaker_backoff_s: float = Field(
        5.0,
        gt=0,
        description="how long the breaker stays open at first, in seconds; twice as long each time it opens again",
    )
    client_stall_limit_s: float = Field(
        120.0,
        gt=0,
        description="a client that reads nothing of its answer for longer is disconnected, in seconds; so is either "
        "side of a websocket",
    )
    websocket_limit_s: float = Field(
        3600.0, gt=0, description="a websocket that is open for longer is closed with code 1001, in seconds"
    )
    body_timeout_s: float = Field(300.0, gt=0, description="time for a request body to arrive, in seconds; then 408")
    idle_timeout_s: float = Field(
        75.0, gt=0, description="a connection without a whole request head for this time is closed, in seconds"
    )


class Control(Slice):
    """Weight updates and leases."""

    engine_control_timeout_s: float = Field(
        7200.0,
        gt=0,
        description="time limit for an engine's whole answer to a control call, such as new weights, in seconds",
    )
    weight_sync_limit_s: float = Field(
        1800.0,
        gt=0,
        description="a weight sync that the trainer does not end ends by itself after this time, in seconds",
    )
    observe_interval_s: float | None = Field(
        None,
        gt=0,
        description="how often to ask replicas whether they are paused and which weights they have, in seconds; never "
        "by default",
    )
    lease_limit_s: float = Field(
        60.0, gt=0, description="a lease of the API that reports no progress for longer is ended, in seconds"
    )
