"""The interface of every source of replicas, and how sources are written in the configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol
from urllib.parse import parse_qsl, urlsplit

from thunderagent.errors import DiscoveryError

AUTO: Final = "auto"
RanksCount = int | Literal["auto"]
"""Number of data-parallel ranks at a URL; 1: it is one replica as a whole; auto: what its metrics say."""

MOST_RANKS_COUNT = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """One engine that a source names. `ranks_count` None means the general configuration."""

    url: str = field(repr=False)
    """It may contain a password: `shown_url` does not."""
    ranks_count: RanksCount | None = None
    is_draining: bool = False
    """It is about to go and should get nothing new."""


@dataclass(frozen=True, slots=True)
class PodSelection:
    """Which pods, and on which of their ports the engine listens: a number, or a port's name."""

    namespace: str
    selector: str
    port: str

    @classmethod
    def read(cls, text: str) -> PodSelection:
        """Parse `NAMESPACE/SELECTOR:PORT`, as `default/app=vllm:8000`. Raises `DiscoveryError`."""
        namespace, slash, rest = text.strip().partition("/")
        selector, colon, port = rest.rpartition(":")
        is_port = port.isascii() and (1 <= int(port) <= 65535 if port.isdigit() else port.replace("-", "").isalnum())
        if not (namespace and slash and selector.strip() and colon and is_port):
            raise DiscoveryError(f"{text!r} is not NAMESPACE/SELECTOR:PORT, as default/app=vllm:8000")
        return cls(namespace, selector.strip(), port)


class DiscoveryListener(Protocol):
    """Receives what sources find. Called on the event loop only; must not block."""

    def replicas_wanted(self, source: str, wanted: Sequence[Wanted]) -> None:
        """Replace the last set of a source by this one."""

    def source_failed(self, source: str, why: str) -> None:
        """Note that a source cannot report its replicas: its last set stays."""


class Source(Protocol):
    """Follows one source of replicas."""

    @property
    def name(self) -> str:
        """Return what reports and logs call it."""

    async def run(self, listener: DiscoveryListener) -> None:
        """Report the whole set at first and whenever it may have changed, until cancelled.

        A source that fails reports that and tries again; it never reports an empty set because it failed.
        """


def wanted_of(text: str, ranks_count: RanksCount | None = None) -> Wanted:
    """Return the engine at a URL, such as `http://host:8000` or `http://host:8000#dp=4`. Raises `DiscoveryError`."""
    shown = text.rpartition("@")[2]  # without a password
    url, _, fragment = text.strip().partition("#")
    url = url.rstrip("/")
    try:
        parts = urlsplit(url)
        has_address = bool(parts.hostname) and parts.port != 0  # an invalid port raises
    except ValueError as error:
        raise DiscoveryError(f"{shown!r} is not a URL") from error  # its text may contain a part of the password
    if parts.scheme not in {"http", "https"} or not has_address or not _is_clean(url):
        hint = f"; is it http://{shown}?" if re.fullmatch(r"[\w.-]+:\d+", shown) else ""
        raise DiscoveryError(f"{shown!r} is not an http or https URL{hint}")
    if parts.query:
        raise DiscoveryError(f"{shown!r}: a replica's URL must have no query")
    if parts.path.endswith("/v1"):
        raise DiscoveryError(f"{shown!r}: name the engine's root, without /v1")
    if fragment:
        ranks_count = _ranks_count_of(shown, fragment)
    return Wanted(url, ranks_count)


def _is_clean(url: str) -> bool:
    """Return whether a URL has nothing that a damaged file has: controls, spaces, what is no text."""
    return url.isprintable() and not any(sign.isspace() for sign in url)


def ranks_count_of(text: str) -> RanksCount:
    """Parse a number of ranks, or auto. Raises `DiscoveryError`."""
    if text == AUTO:
        return AUTO
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MOST_RANKS_COUNT):
        raise DiscoveryError(f"{text!r} is not a number of data-parallel ranks from 1 to {MOST_RANKS_COUNT}, nor auto")
    return int(text)


def _ranks_count_of(text: str, fragment: str) -> RanksCount:
    settings = parse_qsl(fragment, keep_blank_values=True)
    if [name for name, _ in settings] != ["dp"]:
        raise DiscoveryError(f"{text!r}: after # comes dp=N, the number of its data-parallel ranks")
    return ranks_count_of(settings[0][1])


def replica_id_of(url: str, rank_id: int | None = None) -> str:
    """Return the id of a replica: its URL without scheme and password; then its rank."""
    whole = url.partition("://")[2].rpartition("@")[2]
    return whole if rank_id is None else f"{whole}/{rank_id}"


def shown_url(url: str) -> str:
    """Return a URL as reports show it: without a user and a password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def refuse_twins(wanted: Sequence[Wanted]) -> None:
    """Raise `DiscoveryError` if a set names a replica twice."""
    seen: set[str] = set()
    for each in wanted:
        replica_id = replica_id_of(each.url)
        if replica_id in seen:
            raise DiscoveryError(f"{shown_url(each.url)} is named twice")
        seen.add(replica_id)
