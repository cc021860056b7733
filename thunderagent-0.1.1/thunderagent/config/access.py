"""Access: where the proxy listens, who may call it, and each caller's limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from thunderagent.config.slices import Listed, Slice

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


class Listening(Slice):
    """Listening."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8300, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="second port for the admin API and engine control; the first port then refuses them",
    )


class Security(Slice):
    """Security."""

    api_keys: Listed = Field(
        (), description="keys for data, as NAME:sha256:HEX, separated by commas; `thunderagent key NAME` makes one"
    )
    admin_keys: Listed = Field(
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
        "counts only if not; by default true if there are api_keys or a keys_file",
    )
    client_priority: Literal["keep", "drop"] | None = Field(
        None,
        description="whether to keep or drop a client's priority for engines, unless the client has an admin key; by "
        "default drop if there are api_keys or a keys_file",
    )
    allow_open: bool = Field(False, description="listen without api_keys on an address that other machines reach")
    forward_unknown: Literal["admin", "data", "off"] | None = Field(
        None,
        description="which keys may call paths that neither the proxy nor a known engine has: admin, data, or nobody; "
        "by default admin if there are keys, otherwise data",
    )
    allowed_hosts: Listed = Field(
        (),
        description="host names by which browsers and operators may call the proxy if there are no keys, separated "
        "by commas, besides localhost, host, that of reached_at and IP addresses; * is any",
    )
    metrics_need_key: bool = Field(False, description="ask for an admin key on /metrics")
    tls_cert: Path | None = Field(
        None, description="certificate chain to serve https with, PEM; read again on SIGHUP; none: plain http"
    )
    tls_key: Path | None = Field(None, description="private key of tls_cert, PEM; by default in the same file")
    cors_origins: Listed = Field(
        (), description="origins whose web pages may call the proxy, separated by commas; * is any"
    )

    @property
    def keys_name_tenants(self) -> bool:
        """Whether the tenant of a program comes from the key that opens it."""
        return self.has_keys if self.tenant_from_key is None else self.tenant_from_key

    @property
    def has_keys(self) -> bool:
        """Whether data needs a key."""
        return bool(self.api_keys or self.keys_file)

    @model_validator(mode="after")
    def _security_is_of_one_piece(self) -> Self:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):  # it would match no page
                raise ValueError(f"cors_origins: {origin!r} is not an origin, such as https://page.example:8443")
        if self.tenant_from_key and not self.has_keys:
            raise ValueError("tenant_from_key needs api_keys or keys_file: without them no key names a tenant")
        return self


class Limits(Slice):
    """Limits."""

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
    max_websockets_count: int = Field(1000, ge=1, description="most websockets that are open at a time; more get 503")
    key_max_websockets_count: int | None = Field(
        None, ge=1, description="most websockets of one key; more get 429; by default half of max_websockets_count"
    )
    max_leases_count: int = Field(
        20_000, ge=1, description="most leases over the API that are held or waited for at a time; more get 503"
    )
    key_max_leases_count: int | None = Field(
        None, ge=1, description="most leases of one key; more get 429; by default half of max_leases_count"
    )
    key_max_leased_ratio: float = Field(
        0.5,
        gt=0,
        description="part of all replicas' memory that leases of one of several data keys may claim: beyond it those "
        "for a program wait, those without one get 429, and reports of progress count no further",
    )
    max_programs_count: int = Field(
        100_000,
        ge=1,
        description="most programs at a time; beyond that the oldest without a turn are forgotten, then 503",
    )
    tenant_max_programs_count: int = Field(50_000, ge=1, description="most programs of one tenant at a time")
    program_max_turns: int | None = Field(
        None, ge=1, le=10**9, description="turns that a program may take, beside its own limits; further ones get 410"
    )
    program_max_tokens: int | None = Field(
        None, ge=1, le=10**15, description="tokens of prompts and answers that a program may use; then 410"
    )
    program_max_age_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="age in seconds, from its first turn, from which a program's turns get 410",
    )
    program_deadline_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="deadline of a program in seconds after its first turn: those that would miss it come first",
    )
    program_limit_end: Literal["refuse", "finish"] = Field(
        "refuse",
        description="at a limit of a program refuse its next turn, or finish the turn that reaches it and end the "
        "program",
    )
    rate_limit_per_s: float | None = Field(
        None,
        gt=0,
        description="rate limit: requests per second of each key, or of each address if there are no "
        "keys; turns wait, the admin API gets 429",
    )
    rate_limit_burst_count: int = Field(
        100, ge=1, description="requests that a caller may send at once before rate_limit_per_s applies"
    )

    @model_validator(mode="after")
    def _every_body_can_be_held(self) -> Self:
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError(f"max_held_bytes: {self.max_held_bytes} is less than one body of max_body_bytes")
        return self
