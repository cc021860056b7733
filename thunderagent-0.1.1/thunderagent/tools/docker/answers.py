"""The needed parts of a Docker engine's answers: containers in a list, their places, their resource use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from docker import APIClient  # type: ignore[import-untyped]

from thunderagent.tools.base import EXPIRES_LABEL, Found, Place
from thunderagent.tools.docker.connection import encoded, get_bytes, none_if_missing

Json = dict[str, Any]

_ENDED_STATES = frozenset({"removing", "exited", "dead"})


class _Port(msgspec.Struct, rename="pascal"):
    private_port: int
    type: str
    ip: str = msgspec.field(name="IP", default="")
    public_port: int | None = None


class _Network(msgspec.Struct, rename="pascal"):
    ip_address: str = msgspec.field(name="IPAddress", default="")


class _Networks(msgspec.Struct, rename="pascal"):
    networks: dict[str, _Network] | None = None


class _Volume(msgspec.Struct, rename="pascal"):
    type: str = ""
    name: str = ""


class Listed(msgspec.Struct, rename="pascal"):
    """A container in a list: only the needed part of some 3 KB, because a list of a thousand blocks the interpreter."""

    id: str
    state: str = ""
    names: list[str] = []
    labels: dict[str, str] | None = None
    ports: list[_Port] | None = None
    network_settings: _Networks | None = None
    size_rw: int = 0
    mounts: list[_Volume] | None = None

    @property
    def volume_names(self) -> list[str]:
        """Return its volumes."""
        return [each.name for each in self.mounts or () if each.type == "volume"]

    def found(self) -> Found:
        """Return it as a sandbox."""
        networks = (self.network_settings.networks if self.network_settings else None) or {}
        ports = [(each.private_port, each.ip, each.public_port) for each in self.ports or () if each.type == "tcp"]
        place = _place(self.id, self.names[0] if self.names else "", (n.ip_address for n in networks.values()), ports)
        return Found(self.id, self.labels or {}, self.state == "running", place, ended=self.state in _ENDED_STATES)


class _Actor(msgspec.Struct, rename="pascal"):
    id: str = msgspec.field(name="ID")
    attributes: dict[str, str] = {}


class Event(msgspec.Struct, rename="pascal"):
    """An event of a container."""

    action: str
    actor: _Actor
    time: int = msgspec.field(name="time", default=0)


class _VolumeUsage(msgspec.Struct, rename="pascal"):
    size: int = -1


class _UsedVolume(msgspec.Struct, rename="pascal"):
    name: str
    usage_data: _VolumeUsage | None = None


class _DiskUsage(msgspec.Struct, rename="pascal"):
    volumes: list[_UsedVolume] | None = None


_LISTED = msgspec.json.Decoder(list[Listed])
EVENT = msgspec.json.Decoder(Event)
_DISK_USAGE = msgspec.json.Decoder(_DiskUsage)


def _place(handle: str, name: str, addresses: Iterable[str], published: Iterable[tuple[int, str, int | None]]) -> Place:
    ports: dict[int, tuple[str, int]] = {}
    for inside, host, outside in published:
        if outside:
            ports.setdefault(inside, (host if host not in ("", "0.0.0.0", "::") else "127.0.0.1", outside))  # noqa: S104 - read, not bound
    address = next((each for each in addresses if each), "")
    return Place(handle, address, ports, {"container": name.removeprefix("/")})


def place_of(info: Json) -> Place:
    """Return where a container is, from the engine's information on it alone."""
    settings = info["NetworkSettings"]
    published = [
        (int(inside.partition("/")[0]), bound["HostIp"], int(bound["HostPort"]))
        for inside, bindings in (settings["Ports"] or {}).items()
        if inside.endswith("/tcp")
        for bound in bindings or ()
    ]
    addresses = (each.get("IPAddress", "") for each in (settings["Networks"] or {}).values())
    return _place(info["Id"], info["Name"], addresses, published)


def list_all(client: APIClient, filters: Mapping[str, Sequence[str]], *, with_sizes: bool = False) -> list[Listed]:
    """Return containers, running or not; `with_sizes`, also what each has written, which takes the engine a while."""
    return _LISTED.decode(
        get_bytes(client, f"/containers/json?all=1&size={int(with_sizes)}&filters={encoded(filters)}")
    )


def labels_of(listed: Listed) -> Mapping[str, str]:
    """Return a container's labels."""
    return listed.labels or {}


def volume_bytes_of(client: APIClient) -> dict[str, int]:
    """Return the size of each volume of the engine."""
    volumes = _DISK_USAGE.decode(get_bytes(client, "/system/df?type=volume")).volumes or []
    return {each.name: max(0, each.usage_data.size) for each in volumes if each.usage_data is not None}


def memory_bytes_of(client: APIClient, handle: str) -> int | None:
    """Return a container's memory as `docker stats` counts it: without reclaimable page cache."""
    stats = none_if_missing(lambda: client.stats(handle, stream=False, one_shot=True))
    memory = (stats or {}).get("memory_stats") or {}
    if "usage" not in memory:
        return None
    details = memory.get("stats") or {}
    cache_bytes = details.get("total_inactive_file", details.get("inactive_file", 0))  # cgroup 1, cgroup 2
    return max(0, int(memory["usage"]) - int(cache_bytes))


def expires_s(labels: Mapping[str, str]) -> float:
    """Return when the owner of these labels expires, in Unix time; 0 if they do not say."""
    expires = labels.get(EXPIRES_LABEL, "")
    return float(expires) if expires.isdecimal() else 0.0
