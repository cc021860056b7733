"""Processes: gateways, schedulers and the store of a cell; and what each of them logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from thunderagent.config.slices import Listed, Slice


class Processes(Slice):
    """Several processes."""

    gateways: int = Field(
        0,
        ge=0,
        le=256,
        description="gateway processes that carry the bytes of turns, all on the same port, beside one process that "
        "schedules; 0: one process does both",
    )
    schedulers: Listed = Field((), description="for a gateway: base URLs of its schedulers, separated by commas")
    scheduler_key: SecretStr | None = Field(
        None, description="for a gateway: the admin key that it sends to its scheduler"
    )
    scheduler_patience_s: float = Field(
        30.0,
        ge=0,
        description="for a gateway: how long turns wait for a scheduler before they run without one, in seconds",
    )
    fail_open_turns_count: int = Field(
        64, ge=0, description="for a gateway: most turns on each replica without a scheduler"
    )
    gateway_lost_s: float = Field(
        5.0,
        gt=0,
        description="for a scheduler: turns of a gateway that lost its link are given up after this time, in seconds",
    )
    store: SecretStr | None = Field(
        None,
        description="for a scheduler: redis://HOST:PORT/DATABASE that it shares with others of its cell, so that one "
        "leads while the others stand by; needs the extra scale",
    )
    elector: Literal["redis", "kubernetes"] = Field(
        "redis",
        description="for a scheduler with a store: what decides who leads: the store's lock, or a Kubernetes Lease, "
        "which needs the extra kubernetes",
    )
    lease: str = Field(
        "",
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$",
        description="for elector kubernetes: NAMESPACE/NAME of the Lease; by default thunderagent-CELL in the pod's "
        "namespace",
    )
    cell: str = Field(
        "default", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="for a scheduler: the name of its cell in the store"
    )
    lock_s: float = Field(
        3.0,
        ge=0.3,
        le=600.0,
        description="for a scheduler with a store: another one takes over when the leader was silent for so long, in "
        "seconds; a Lease lasts 1 s longer",
    )
    reached_at: str = Field(
        "",
        description="for a scheduler with a store: http://HOST:PORT of this process itself, which others watch; by "
        "default where it listens",
    )

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
        if url is not None and not _is_store(url.get_secret_value()):  # the error's text may contain a password
            raise ValueError(
                "is not a URL, as redis://:PASSWORD@HOST:PORT/DATABASE; in a password write / as %2F, ? as %3F, # as "
                "%23, @ as %40, [ as %5B, ] as %5D and % as %25"
            )
        return url


class Logs(Slice):
    """Logs and traces."""

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
    profiles: bool = Field(False, description="measure where the time of each program goes, for GET /profiles")
    access_log: bool = Field(False, description="log a line for each request, besides those of turns")
    otlp_endpoint: str = Field(
        "", description="base URL of an OpenTelemetry collector (OTLP over HTTP), as http://127.0.0.1:4318; none: off"
    )
    trace_sample_ratio: float | None = Field(
        None, ge=0, le=1, description="part of new traces that is sent; by default OTEL_TRACES_SAMPLER"
    )

    @property
    def logs_json(self) -> bool:
        """Whether log lines are JSON."""
        return self.log_format == "json" or (self.log_format == "auto" and not sys.stderr.isatty())


def _has_port(netloc: str) -> bool:
    """Return whether the text behind a host's last colon, if there is one, is a port."""
    port = netloc.rpartition("]")[2].rpartition(":")
    return not port[1] or port[2].isdigit()


def _is_store(url: str) -> bool:
    """Return whether this is the URL of a store. One that is cut within its password names another host."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("redis", "rediss", "unix") and parts.port != 0
    except ValueError:
        return False
    return is_url and (parts.scheme == "unix" or "@" not in parts.path + parts.query + parts.fragment)
