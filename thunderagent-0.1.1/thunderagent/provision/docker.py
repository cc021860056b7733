"""Replicas that are Docker containers: one image, a free port of this machine each.

What an earlier run of the same proxy left is removed when it begins: containers carry the proxy's name as a label. The
proxy's own containers end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from thunderagent.backends.discovery.base import replica_id_of
from thunderagent.errors import ConfigurationError, ProvisionError, SandboxError
from thunderagent.provision.base import Launched, OnLost, free_port, url_on
from thunderagent.tools.docker.engine import Engine

log = structlog.get_logger("thunderagent.provision")

OWNER_LABEL = "thunderagent.replica-of"
LOOK_S = 1.0
"""How often to check whether containers still run."""


@dataclass(frozen=True, slots=True)
class ReplicaImage:
    """The image to run: `command` is added to the image's own, and may contain {port} and {replica_id}.

    With the network `host` the engine listens on {port} itself; otherwise on `port_id` inside, which is published.
    `gpus` is all, or a number; empty: none. `volumes` are HOST:INSIDE, each with :ro if read-only.
    """

    image: str
    command: str = ""
    url: str = "http://127.0.0.1:{port}"
    inside_port_id: int = 8000
    network: str = ""
    gpus: str = ""
    volumes: Sequence[str] = ()


class DockerProvisioner:
    """Start and end containers."""

    name = "docker"
    names_urls = True

    def __init__(
        self,
        image: ReplicaImage,
        *,
        owner: str,
        docker_url: str = "",
        end_limit_s: float = 30.0,
    ) -> None:
        """Run `image` at a Docker engine. Raises `ConfigurationError` if invalid."""
        if not image.image:
            raise ConfigurationError("provision_image: needs an image")
        url_on(1, image.url)
        if image.gpus not in ("", "all") and not image.gpus.isdigit():
            raise ConfigurationError(f"provision_gpus: all or a number, not {image.gpus!r}")
        try:
            self._words = shlex.split(image.command)
        except ValueError as error:
            raise ConfigurationError(f"provision_command: {error}") from error
        self._image = image
        self._owner = owner
        self._end_limit_s = end_limit_s
        self._engine = Engine(docker_url, concurrency_count=4, request_timeout_s=max(60.0, end_limit_s + 10))
        self._handles: set[str] = set()

    def __repr__(self) -> str:
        return f"<DockerProvisioner {self._image.image}: {len(self._handles)}>"

    async def open(self) -> int:
        """See `Provisioner`."""
        filters = {"label": f"{OWNER_LABEL}={self._owner}"}
        with _mapped():
            for left in await self._engine.ask(lambda client: client.containers(all=True, filters=filters)):
                await self._engine.remove(left["Id"])
                log.info("replica_of_earlier_run_removed", handle=left["Id"][:12])
        return 0

    async def run(self, on_lost: OnLost) -> None:
        """See `Provisioner`. An engine that does not answer says nothing about its containers."""
        while True:
            await asyncio.sleep(LOOK_S)
            for handle in list(self._handles):
                with contextlib.suppress(SandboxError):
                    info = await self._engine.inspect(handle)
                    state = {} if info is None else info["State"]
                    if handle in self._handles and not state.get("Running"):
                        on_lost(handle, f"it ended by itself, with status {state.get('ExitCode', 'unknown')}")
                        await self._engine.remove(handle)
                        self._handles.discard(handle)

    async def start(self) -> Launched:
        """See `Provisioner`."""
        port = free_port()
        url = url_on(port, self._image.url)
        replica_id = replica_id_of(url)
        words = [word.replace("{port}", str(port)).replace("{replica_id}", replica_id) for word in self._words]
        with _mapped():
            created = await self._engine.ask(lambda client: self._create(client, words, port))
            handle: str = created["Id"]
            try:
                await self._engine.ask(lambda client: client.start(handle))
            except BaseException:
                await asyncio.shield(self._engine.whole(self._engine.remove(handle)))
                raise
        self._handles.add(handle)  # `run` removes what does not run
        return Launched(handle, url)

    def _create(self, client: Any, words: list[str], port: int) -> Any:
        image = self._image
        inside = f"{image.inside_port_id}/tcp"
        on_host = image.network == "host"
        gpus = [{"Count": -1 if image.gpus == "all" else int(image.gpus or 0), "Capabilities": [["gpu"]]}]
        return client.create_container(
            image.image,
            words or None,
            labels={OWNER_LABEL: self._owner},
            ports=None if on_host else [(image.inside_port_id, "tcp")],
            host_config=client.create_host_config(
                network_mode=image.network or None,
                port_bindings=None if on_host else {inside: ("127.0.0.1", port)},
                binds=list(image.volumes) or None,
                device_requests=gpus if image.gpus else None,
                init=True,
                ipc_mode="host" if image.gpus else None,
            ),
        )

    async def check_end(self, handle: str, url: str) -> None:
        """See `Provisioner`."""

    async def end(self, handle: str, url: str) -> None:  # noqa: ARG002 - see `Provisioner`
        """See `Provisioner`."""
        self._handles.discard(handle)
        try:
            with _mapped():
                with contextlib.suppress(SandboxError):  # stopped by itself, or not in time: it is removed all the same
                    await self._engine.ask(lambda client: client.stop(handle, timeout=int(self._end_limit_s)))
                await self._engine.remove(handle)
        except BaseException:
            self._handles.add(handle)  # it may still run: it is ended again, at the latest by `close`
            raise

    async def close(self) -> None:
        """See `Provisioner`."""
        async with asyncio.TaskGroup() as group:
            for handle in list(self._handles):
                group.create_task(self._end_quietly(handle))
        await self._engine.close()

    async def _end_quietly(self, handle: str) -> None:
        try:
            await self.end(handle, "")
        except ProvisionError:
            log.exception("replica_not_ended", handle=handle[:12])


@contextlib.contextmanager
def _mapped():  # type: ignore[no-untyped-def]
    try:
        yield
    except SandboxError as error:
        raise ProvisionError(error.message) from error
