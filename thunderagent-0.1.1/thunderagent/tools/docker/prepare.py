"""One preparation of a Docker sandbox, from the order to a usable container, and its undoing.

A call in a thread runs to its end even if its caller is cancelled. So a preparation records what it began, and its
undoing waits for the running call before it removes.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import structlog
from docker import APIClient, errors, types  # type: ignore[import-untyped]

from thunderagent.errors import (
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxRefusedError,
    SandboxSetupError,
)
from thunderagent.tools.base import LABEL_PREFIX, OWNER_LABEL, RUN_LABEL, SANDBOX_LABEL, Order, Owner, Place
from thunderagent.tools.docker.answers import Json, place_of
from thunderagent.tools.docker.connection import none_if_missing
from thunderagent.tools.docker.engine import Engine
from thunderagent.tools.docker.images import Images
from thunderagent.tools.docker.networks import Networks
from thunderagent.tools.docker.scripts import FIRST_PROCESS, UNTIL_COMMAND, UNTIL_PORT
from thunderagent.tools.docker.setups import Setups
from thunderagent.tools.docker.streams import Output, Stream
from thunderagent.tools.template import Template

_log = structlog.get_logger(__name__)

STOP_GRACE_LABEL = f"{LABEL_PREFIX}stop-grace-s"
NETWORK_LABEL = f"{LABEL_PREFIX}network"
"""Of a container: the network of its program, which goes with the last container on it."""

# A command inside is over when its process is, even if a leftover of it holds its output.
_LOOK_S = 1.0
_LONGEST_LOOK_S = 8.0
# The engine reports an end within moments after the end of the output.
_POLL_S = 0.05
_POLLS_COUNT = 20


class Preparation:
    """What one preparation has begun so far: all that must go if it does not finish."""

    def __init__(
        self, order: Order, owner: Owner, engine: Engine, images: Images, networks: Networks, setups: Setups
    ) -> None:
        self.name = f"thunderagent-{order.sandbox_id}"
        self.image = ""
        self.network = ""
        self._order = order
        self._owner = owner
        self._engine = engine
        self._images = images
        self._networks = networks
        self._setups = setups
        self._launching: asyncio.Task[Place] | None = None
        self._handle = ""
        # The engine did not say whether it made the container.
        self._is_uncertain = False
        self._output = Output()
        self._stream: Stream | None = None

    async def run(self) -> Place:
        """Make the container, and return once it is usable. Raises `SandboxError`."""
        template = self._order.template
        if template.ports and template.network == "none":
            raise SandboxRefusedError("a sandbox without a network can have no ports")
        self.image = template.image
        self._images.claim(self.image)
        image = await self._images.get(self.image)
        if template.network == "own":
            self.network = self._networks.claim(self._order)
            await self._networks.make(self.network, self._order)
        place = await self._with_setup(image)
        interval = f"{template.ready_interval_s:g}"
        if (port := template.ready_port) is not None:
            await self._run("readiness", f"port {port}", [UNTIL_PORT, "sh", f"{port:04X}", interval])
        if command := template.ready_command:
            await self._run("readiness", command, [UNTIL_COMMAND, "sh", command, interval])
        assert self._stream is not None
        if self._stream.ended.done():
            await self.check()
        return place

    async def _with_setup(self, image: Json) -> Place:
        """Start it from what an earlier setup made on the same image, or run the setup."""
        template = self._order.template
        key = f"{template.digest()}@{image['Id']}" if template.setup and template.reuse_setup else ""
        if key and (kept := self._setups.image_of(key)):
            try:
                return replace(await self._launch(image, kept), recycled=True)
            except SandboxImageError:
                self._setups.forget(key)
        try:
            place = await self._launch(image, template.image)
        except SandboxImageError:  # it was removed since the check
            place = await self._launch(await self._images.get(self.image), template.image)
        await self._set_up(key)
        return place

    async def _set_up(self, key: str) -> None:
        """Run the setup, and keep it under this key if that is not empty and nobody else does."""
        template = self._order.template
        is_to_be_kept = bool(key) and self._setups.begin(key)
        worked = False
        try:
            for command in template.setup:
                await self._run("setup", command, [command])
            worked = True
        finally:
            if is_to_be_kept:
                await self._setups.keep(key, self._handle, template.ttl_s, worked=worked)

    def unclaim(self) -> None:
        """Stop listening, and release network and image: the engine knows of them, or nobody does."""
        if self._stream is not None:
            self._stream.close()
        if self.network:
            self._networks.unclaim(self.network)
        if self.image:
            self._images.unclaim(self.image)

    async def undo(self) -> None:
        """Remove the container, as far as the engine can be reached, and release what it claimed."""
        if self._launching is not None:
            await asyncio.wait([self._launching])
        try:
            handle = self._handle or (await self._ours_by_name() if self._is_uncertain else "")
            if handle:
                await self._engine.remove(handle)
        except SandboxError as error:
            _log.warning("sandbox_not_undone", container=self.name, why=error.message)
        finally:
            self.unclaim()

    async def _ours_by_name(self) -> str:
        info = await self._engine.inspect(self.name)
        labels = (info["Config"]["Labels"] or {}) if info else {}
        wanted = {OWNER_LABEL: self._owner.owner_id, SANDBOX_LABEL: self._order.sandbox_id}
        return str(info["Id"]) if info and wanted.items() <= labels.items() else ""

    # --- the container ------------------------------------------------------------------------------------------------

    async def _launch(self, image: Json, name: str) -> Place:
        self._launching = self._engine.whole(
            self._engine.ask(lambda client: self._launch_in_thread(client, image, name))
        )
        return await asyncio.shield(self._launching)

    def _launch_in_thread(self, client: APIClient, image: Json, name: str) -> Place:
        """Create and start it; read its output from the first line on: it is deleted with the container."""
        self._is_uncertain = True
        try:
            self._handle = self._create(client, image, name)["Id"]
        except errors.APIError:  # it refused
            self._is_uncertain = False
            raise
        path = f"/containers/{self._handle}/attach?stream=1&stdout=1&stderr=1"
        self._stream = self._engine.stream("output", "POST", path, self._output.read)
        self._stream.open(self._engine.request_timeout_s)
        client.start(self._handle)
        info = none_if_missing(client.inspect_container, self._handle)
        if info is None:
            self._stream.ended.result(self._engine.request_timeout_s)
            raise SandboxSetupError(_told("it ended at once", self._output))
        return place_of(info)

    def _create(self, client: APIClient, image: Json, name: str) -> Json:
        """Create it from an image of that name; `image` says what the template's own would start."""
        order, template, config = self._order, self._order.template, image["Config"] or {}
        # Our first process starts what the image would.
        command = [*(config.get("Entrypoint") or ()), *template.command] if template.command else []
        ttl_s = max(1, math.ceil(order.expires_at_s - time.time()))
        signal = str(config.get("StopSignal") or "TERM").removeprefix("SIG")
        labels = {
            **order.labels,
            OWNER_LABEL: self._owner.owner_id,
            RUN_LABEL: self._owner.run_id,
            STOP_GRACE_LABEL: f"{template.stop_grace_s:g}",
        }
        networking = None
        if self.network:
            labels[NETWORK_LABEL] = self.network
            endpoint = client.create_endpoint_config(aliases=[order.sandbox_id, *filter(None, [order.template_name])])
            networking = client.create_networking_config({self.network: endpoint})
        created: Json = client.create_container(
            name,
            name=self.name,
            entrypoint=["/bin/sh", "-c", FIRST_PROCESS, "thunderagent"],
            command=[str(ttl_s), signal, *command],
            environment=template.environment,
            working_dir=template.working_dir or None,
            labels=labels,
            ports=list(template.ports) or None,
            stop_signal="SIGTERM",
            healthcheck={"test": ["NONE"]},  # nobody reads it, and each probe would look like a tool
            host_config=_host_config(client, template, self.network),
            networking_config=networking,
        )
        return created

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _run(self, what: str, told: str, script: list[str]) -> None:
        """Run a shell script inside. Raises `SandboxSetupError` if it fails, or if the sandbox ends meanwhile."""
        try:
            code, output = await self._run_inside(["sh", "-c", *script])
        except SandboxEngineError:
            raise
        except SandboxError:
            await self.check()
            raise
        if code != 0:
            # A container that ends kills what runs inside, and nothing can be run inside any more.
            if code in (None, 126, 137):
                await self.check()
            raise SandboxSetupError(_told(f"{what} `{told}` failed with exit code {code}", output))

    async def _run_inside(self, command: list[str]) -> tuple[int | None, Output]:
        """Return a command's exit code and its output."""
        exec_id = (await self._engine.ask(lambda client: client.exec_create(self._handle, command)))["Id"]
        output = Output()
        path, body = f"/exec/{exec_id}/start", {"Detach": False, "Tty": False}
        stream = self._engine.stream("command", "POST", path, output.read, body)
        try:
            await self._engine.open(stream)
            ended = asyncio.wrap_future(stream.ended)
            look_s = _LOOK_S
            polls_count = 0
            while polls_count < _POLLS_COUNT:
                await asyncio.wait([ended], timeout=look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
                info = await self._engine.ask(lambda client: client.exec_inspect(exec_id))
                if not info["Running"]:
                    break
                if ended.done():
                    polls_count += 1
                    await asyncio.sleep(_POLL_S)
            return info["ExitCode"], output
        finally:
            stream.close()

    async def check(self) -> None:
        """Raise `SandboxSetupError` if the container has ended."""
        assert self._stream is not None
        ended = asyncio.wrap_future(self._stream.ended)
        await asyncio.wait([ended], timeout=0.5)
        for _ in range(_POLLS_COUNT if ended.done() else 1):
            info = await self._engine.inspect(self._handle)
            if info is None or not info["State"]["Running"]:
                raise SandboxSetupError(_told("it ended by itself", self._output))
            await asyncio.sleep(_POLL_S)


def _host_config(client: APIClient, template: Template, network: str) -> Json:
    config: Json = client.create_host_config(
        auto_remove=True,
        init=False,
        mounts=[
            types.Mount(
                each.target, each.source, type="volume" if each.source is None else "bind", read_only=each.read_only
            )
            for each in template.mounts
        ],
        mem_limit=template.memory_bytes,
        memswap_limit=template.memory_bytes,  # memory and swap together
        nano_cpus=None if template.cpus_count is None else int(template.cpus_count * 1e9),
        pids_limit=template.pids_count,
        port_bindings=dict.fromkeys(template.ports, ("127.0.0.1",)) or None,
        network_mode="none" if template.network == "none" else network or None,
    )
    return config


def _told(what: str, output: Output) -> str:
    return f"{what}:\n{said}" if (said := str(output)) else what
