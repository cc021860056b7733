"""Gateways and schedulers on a Ray cluster, such as a trainer's: `ray_cell.start(...)`.

Copy this file beside your script. Other nodes need thunderagent, and not this file.

Theory of operation
===================
Ray places processes and restarts them; they are `thunderagent gateway` and `thunderagent scheduler`. Each is the child
of a detached actor, which outlives the driver that created it. It ends with its actor, because its standard input does,
and takes its actor with it, so that Ray restarts both. An actor has no state to lose: its first arguments hold for each
restart, including its port. So base URLs stay.

There is one gateway on each node. A scheduler has a few nodes that it may be on, and gateways look for it on all of
them: when its node is lost, Ray starts it on the next. With a store there are two, on different nodes if there are
several; without, the gateways tell the next scheduler what the last one knew.

A cluster is one domain of trust: anybody who can send to it runs code. Its network is not, so listeners there have
keys.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import ray
from pydantic import SecretStr
from pydantic_core import to_json
from pydantic_settings import NoDecode
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from thunderagent.config import ENVIRONMENT_PREFIX, ServeConfig
from thunderagent.config.slices import split_list, split_pairs
from thunderagent.errors import ConfigurationError
from thunderagent.proxy.gate.keys import mint_key
from thunderagent.serving.security import is_loopback

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that an actor brings its code with it

NAMESPACE = "thunderagent"
START_S = 60.0
"""How long a process may take to listen: its port may still belong to an earlier one."""

RETRY_S = 0.5
CLOSE_S = 5.0
SCHEDULER_NODES_COUNT = 2
"""How many nodes each scheduler may be on; gateways dial all of them all the time."""

GATEWAY, SCHEDULER = "gateway", "scheduler"


@dataclass(frozen=True)
class Cell:
    """What was started."""

    name: str
    urls: Mapping[str, str]
    """Base URLs of the gateways, by Ray's ids of their nodes."""
    key: str = field(default="", repr=False)
    """What clients must send as an API key; empty if nothing is needed, or keys were given."""
    admin_key: str = field(default="", repr=False)
    """The same for everything else."""

    @property
    def url(self) -> str:
        """The base URL of this node's gateway, or of another one if it has none."""
        return self.urls.get(_own_node_id()) or next(iter(self.urls.values()))

    def stop(self, *, grace_s: float = 30.0) -> None:
        """End the whole cell; see `stop`."""
        stop(self.name, grace_s=grace_s)


class Process:
    """One process of a cell, as an actor: the command of its role."""

    def __init__(self, role: str, host: str | None, port: int, environment: dict[str, str]) -> None:
        """Start it, and wait until it listens; `host` None is this node's address. Raises `ConfigurationError`."""
        listens = ("--host", host or ray.util.get_node_ip_address(), "--port", str(port))
        self._command = (sys.executable, "-m", "thunderagent", role, *listens, "--end-with-stdin")
        self._environment = {**os.environ, **environment}
        self._is_stopping = False
        self._process, self._url = self._started()
        threading.Thread(target=self._watch, daemon=True).start()

    def _started(self) -> tuple[subprocess.Popen[str], str]:
        deadline_s = monotonic() + START_S
        while True:
            process = subprocess.Popen(  # noqa: S603 - our own command
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                text=True,
                start_new_session=True,
            )
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if words[:3] == ["thunderagent", "ready", "at"]:
                return process, words[3].rstrip(":")
            process.kill()
            if process.wait() == 2 or monotonic() > deadline_s:  # 2: its configuration is invalid
                raise ConfigurationError(f"{' '.join(self._command[3:])} does not start; Ray's logs say why")
            sleep(RETRY_S)

    def _watch(self) -> None:
        """End this actor with its process, so that Ray restarts both."""
        self._process.wait()
        if not self._is_stopping:
            os._exit(1)

    def url(self) -> str:
        """Return its base URL."""
        return self._url

    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    def shutdown_delay_s(self) -> float:
        """Return how long it continues to serve once it is told to end."""
        return float(self._environment.get(f"{ENVIRONMENT_PREFIX}SHUTDOWN_DELAY_S", 0))

    def stop(self, grace_s: float) -> None:
        """End it after its delay and its turns, at most `grace_s` after the delay."""
        self._is_stopping = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self.shutdown_delay_s() + grace_s + CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(
    *,
    store: str = "",
    name: str = "thunderagent",
    port: int = 8300,
    scheduler_port: int = 8400,
    nodes: Sequence[str] = (),
    num_cpus: float = 0,
    **settings: object,
) -> Cell:
    """Start a gateway on each node, and one scheduler, or two with a `store`; return the cell once they listen.

    Call `ray.init` first. `nodes` are Ray's ids; without them, all that are alive. Port 0 is a free one on the node.
    `settings` are those of `serve`, as in its configuration file: `backends`, `policy` and all others. Without a source
    of replicas there is none until one is added. Each process asks for `num_cpus`. On a network, clients need the
    returned key, unless `settings` have `api_keys` or `allow_open`. Raises `ConfigurationError`; then nothing is left
    running.
    """
    if not ray.is_initialized():
        raise ConfigurationError("ray: this process is in no cluster; call ray.init(...) first")
    alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    wanted = list(nodes or alive)
    if missing := [each for each in wanted if each not in alive]:
        raise ConfigurationError(f"nodes: {', '.join(missing)} are not alive")
    if _actors(name):
        raise ConfigurationError(f"name: {name} runs already; stop({name!r}) ends it")
    given: dict[str, Any] = {"embedded_engines": 0, **settings, **({"store": store, "cell": name} if store else {})}
    key, admin_key, of_gateways = _with_keys(given, [alive[each] for each in wanted])
    ServeConfig.load(**given)  # errors are raised here, not in the log of some node
    scheduler_ports = _ports(wanted[0], scheduler_port, 2 if store else 1)
    homes = [wanted[n :: len(scheduler_ports)][:SCHEDULER_NODES_COUNT] or wanted for n in range(len(scheduler_ports))]
    urls = dict.fromkeys(
        f"http://{_in_url(alive[node])}:{each}"
        for each, own in zip(scheduler_ports, homes, strict=True)
        for node in own
    )
    of_gateways |= {"schedulers": ",".join(urls)}
    common = {"lifetime": "detached", "namespace": NAMESPACE, "max_restarts": -1, "num_cpus": num_cpus}
    make = ray.remote(Process)
    try:
        schedulers = [
            make.options(
                **common, name=f"{name}/{SCHEDULER}/{n}", label_selector={"ray.io/node-id": f"in({','.join(own)})"}
            ).remote(SCHEDULER, None, each, environment_of(given))
            for n, (each, own) in enumerate(zip(scheduler_ports, homes, strict=True))
        ]
        of_gateways = {**{each: given[each] for each in given.keys() - {"store", "cell"}}, **of_gateways}
        gateways = {
            node: make.options(
                **common,
                name=f"{name}/{GATEWAY}/{node}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(GATEWAY, alive[node], _ports(node, port, 1)[0], environment_of(of_gateways))
            for node in wanted
        }
        ray.get([each.url.remote() for each in schedulers], timeout=2 * START_S)
        found = ray.get([each.url.remote() for each in gateways.values()], timeout=2 * START_S)
    except BaseException as error:
        stop(name, grace_s=0)
        if isinstance(error, RayError | GetTimeoutError | ValueError):
            raise ConfigurationError(f"the cell does not start: {str(error).splitlines()[-1]}") from error
        raise
    return Cell(name, dict(zip(gateways, found, strict=True)), key, admin_key)


def stop(name: str = "thunderagent", *, grace_s: float = 30.0) -> None:
    """End a cell, first its gateways; do nothing if none runs.

    They continue to serve for their `shutdown_delay_s`, then end after their turns, at most `grace_s` later.
    """
    actors, patience_s = _actors(name), grace_s + 2 * CLOSE_S
    for role in (GATEWAY, SCHEDULER):
        ending = [
            (each.shutdown_delay_s.remote(), each.stop.remote(grace_s))
            for known, each in actors.items()
            if known.split("/")[-2] == role
        ]
        for delay_s, end in ending:
            with suppress(RayError):  # one that is missing, or just restarting
                ray.get(end, timeout=ray.get(delay_s, timeout=patience_s) + patience_s)
    for each in actors.values():
        ray.kill(each, no_restart=True)


def url(name: str = "thunderagent") -> str:
    """Return the base URL of this node's gateway, or of another one if it has none, for code on the cluster.

    Raises `ConfigurationError`.
    """
    gateways = {known: each for known, each in _actors(name).items() if known.split("/")[-2] == GATEWAY}
    if not gateways:
        raise ConfigurationError(f"no cell {name} runs in this cluster")
    own = gateways.get(f"{name}/{GATEWAY}/{_own_node_id()}") or next(iter(gateways.values()))
    found: str = ray.get(own.url.remote(), timeout=2 * START_S)
    return found


def environment_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Return settings as environment variables: a command line is visible to others. None is left out.

    Raises `ConfigurationError` if a part of a value cannot be written there.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    return {f"{ENVIRONMENT_PREFIX}{name.upper()}": _spelt(name, value) for name, value in given.items()}


def _spelt(name: str, value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if not isinstance(value, Mapping | list | tuple):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if NoDecode not in ServeConfig.model_fields[name].metadata:
        return to_json(value).decode()
    parts, split = value, split_list
    if isinstance(value, Mapping):
        parts, split, value = [f"{key}={each}" for key, each in value.items()], split_pairs, dict(value)
    text = ",".join(map(str, parts))
    with suppress(ValueError):
        if split(text) == split(value):
            return text
    raise ConfigurationError(f"{name}: a cell cannot be given a part that is empty, or has a comma")


def _with_keys(given: dict[str, Any], addresses: Sequence[str]) -> tuple[str, str, dict[str, str]]:
    """Add keys if others could connect; return those for clients and for everything, and what gateways need."""
    has_own = any(name in given for name in ("api_keys", "admin_keys"))
    if given.get("allow_open") or (not has_own and all(map(is_loopback, addresses))):
        return "", "", {}
    key = ""
    if "api_keys" not in given:
        key, line = mint_key("clients")
        given["api_keys"] = (line,)
    admin_key, line = mint_key("cell")
    own = given.get("admin_keys", ())
    given["admin_keys"] = (*(own.split(",") if isinstance(own, str) else own), line)
    given.setdefault("tenant_from_key", False)
    return key, admin_key, {"scheduler_key": admin_key}


def _ports(node: str, first: int, count: int) -> list[int]:
    """Return ports from `first` on; for 0, free ports on a node."""
    if first:
        return [first + n for n in range(count)]
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    found: list[int] = ray.get(
        ray.remote(free_ports).options(num_cpus=0, scheduling_strategy=there).remote(count), timeout=START_S
    )
    return found


def free_ports(count: int) -> list[int]:
    """Return free ports on this machine."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _actors(name: str) -> dict[str, Any]:
    """Return the actors of a cell, by name."""
    known = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    found = {}
    for each in known:
        if each.rsplit("/", 2)[0] == name:
            with suppress(ValueError):  # it just ended
                found[each] = ray.get_actor(each, namespace=NAMESPACE)
    return found


def _own_node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
