"""Builds the sandbox manager from the configuration, and connects it with the scheduler."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from thunderagent.config import ServeConfig
from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import SandboxesMeasured, SandboxFailed, SandboxReady
from thunderagent.programs.state.program import Phase, Status
from thunderagent.proxy.reading.dialects.tool_calls import MAX_KEY_CHARS, first_word
from thunderagent.proxy.reading.header_words import check_program_id
from thunderagent.runtime import Runtime
from thunderagent.tools.base import Driver, Owner
from thunderagent.tools.manager import HEARS, Manager, ManagerSettings
from thunderagent.tools.sandbox import Caps
from thunderagent.tools.table import LOOKED_AHEAD_COUNT
from thunderagent.tools.template import DriverKind, Template

if TYPE_CHECKING:
    from thunderagent.tools.callback_urls import CallbackUrls


@dataclass(frozen=True, slots=True)
class RuntimePrograms:
    """The scheduler's programs as `thunderagent.tools.manager.Programs`."""

    runtime: Runtime

    def open(self, program_id: str, tenant: str = "") -> None:
        """See `Programs`."""
        self.runtime.open_program(check_program_id(program_id), tenant=tenant)

    def runs(self, program_id: str) -> bool:
        """See `Programs`."""
        return any(program.status is Status.ACTIVE for program in self.runtime.pools.incarnations(program_id))

    def uses_tools(self, program_id: str) -> bool:
        """See `Programs`."""
        programs = self.runtime.pools.incarnations(program_id)
        return any(each.turn_count for each in programs) and all(each.phase is Phase.ACTING for each in programs)

    def acting_for_s(self, program_id: str) -> float:
        """See `Programs`."""
        programs = self.runtime.pools.incarnations(program_id)
        if any(program.phase is not Phase.ACTING for program in programs):
            return 0.0
        now_s = self.runtime.now_s()
        return min((now_s - program.acting_since_s for program in programs), default=0.0)

    def expected_holds_s(self) -> Mapping[str, float]:
        """See `Programs`."""
        expected_s: dict[str, float] = {}
        for scheduler in self.runtime.pools.schedulers:
            for program_id, hold_s in scheduler.expected_holds_s(LOOKED_AHEAD_COUNT).items():
                expected_s[program_id] = min(hold_s, expected_s.get(program_id, hold_s))
        return expected_s

    def tool_began(self, program_id: str, command: str) -> None:
        """See `Programs`. The name that its answer called is better, because later calls are predicted by it."""
        word = first_word(command)
        self.runtime.tool_started(program_id, f"bash:{word}"[:MAX_KEY_CHARS] if word else "", inferred=True)

    def tool_ended(self, program_id: str) -> None:
        """See `Programs`."""
        self.runtime.tool_ended(program_id, inferred=True)

    def sandbox_ready(self, program_id: str, sandbox_id: str, prepare_s: float) -> None:
        """See `Programs`."""
        self.runtime.dispatch(SandboxReady(self.runtime.now_s(), program_id, sandbox_id, prepare_s))

    def sandbox_failed(self, program_id: str, sandbox_id: str, why: str) -> None:
        """See `Programs`."""
        self.runtime.dispatch(SandboxFailed(self.runtime.now_s(), program_id, sandbox_id, why))

    def measured(self, sandbox_count: int, disk_bytes: int | None, memory_bytes: int | None) -> None:
        """See `Programs`."""
        self.runtime.dispatch(SandboxesMeasured(self.runtime.now_s(), sandbox_count, disk_bytes, memory_bytes))


def build_manager(config: ServeConfig, runtime: Runtime) -> Manager | None:
    """Create the manager with its drivers, and let it follow the programs; None if no driver is enabled.

    Raises `ConfigurationError` if a driver's library is not installed, or a template names a disabled driver.
    """
    if not config.sandboxes:
        return None
    for name, template in config.sandbox_templates.items():
        if template.driver not in config.sandboxes:
            raise ConfigurationError(f"the template {name!r} is for {template.driver}, which --sandboxes does not name")
    urls = _callback_urls(config)
    owner = Owner(config.sandbox_owner or f"{socket.gethostname()}:{config.port}", secrets.token_hex(6))
    manager = Manager(
        owner,
        {kind: _driver(kind, owner, config, urls) for kind in config.sandboxes},
        RuntimePrograms(runtime),
        caps=Caps(
            sandbox_count=config.sandbox_max_count,
            memory_bytes=config.sandbox_max_memory_bytes,
            disk_bytes=config.sandbox_max_disk_bytes,
            hands_count=config.sandbox_hands_count,
            attempts_count=config.sandbox_attempts_count,
        ),
        templates={name: _with_warm(template, config.warm) for name, template in config.sandbox_templates.items()},
        new_id=lambda: secrets.token_hex(6),
        new_name=lambda: secrets.token_hex(6),
        settings=ManagerSettings(
            idle_limit_s=config.sandbox_idle_limit_s or inf,
            reclaim_on_shutdown=config.sandbox_reclaim_on_shutdown,
            takes_specs=config.sandbox_specs,
            check_callback=urls.check_template,
        ),
        clock=runtime.now_s,
    )
    runtime.observe(manager.observe, *HEARS)
    return manager


def _with_warm(template: Template, warm_count: int) -> Template:
    """Return a template that keeps this many warm, if it is for classes of programs and does not say itself."""
    if template.program_classes and not template.warm_count and template.network != "own":
        return template.model_copy(update={"warm_count": warm_count})
    return template


def _callback_urls(config: ServeConfig) -> CallbackUrls:
    """Return where callbacks may go. Raises `ConfigurationError`."""
    from thunderagent.tools.callback_urls import CallbackUrls  # noqa: PLC0415 - needs an HTTP client

    templates = config.sandbox_templates.values()
    return CallbackUrls(
        [(each.prepare_url, each.reclaim_url) for each in templates if each.driver == "callback"],
        config.sandbox_callback_urls,
        config.sandbox_callback_networks,
    )


def _driver(kind: DriverKind, owner: Owner, config: ServeConfig, urls: CallbackUrls) -> Driver:
    try:
        if kind == "docker":
            from thunderagent.tools.docker import DockerDriver  # noqa: PLC0415 - needs an extra

            return DockerDriver(
                owner,
                url=config.docker_url,
                concurrency_count=2 * config.sandbox_hands_count,
                max_pulls_count=config.sandbox_pulls_count,
                keep_images=config.sandbox_keep_images,
                images_bytes=config.sandbox_images_bytes if config.sandbox_reclaim_images else None,
            )
        if kind == "agent-sandbox":
            from thunderagent.tools.kubernetes.claims import ClaimDriver  # noqa: PLC0415 - needs an extra

            return ClaimDriver(
                owner,
                namespace=config.kubernetes_namespace,
                namespaces={each.namespace for each in config.sandbox_templates.values() if each.namespace},
                kubeconfig=config.kubernetes_config,
                api_url=config.kubernetes_url,
                concurrency_count=2 * config.sandbox_hands_count,
            )
        if kind == "kubernetes":
            from thunderagent.tools.kubernetes import KubernetesDriver  # noqa: PLC0415 - needs an extra

            name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
            return KubernetesDriver(
                owner,
                namespace=config.kubernetes_namespace,
                namespaces={each.namespace for each in config.sandbox_templates.values() if each.namespace},
                kubeconfig=config.kubernetes_config,
                api_url=config.kubernetes_url,
                concurrency_count=2 * config.sandbox_hands_count,
                owner_pod=(name, uid) if name and uid else None,
            )
    except ImportError as error:
        raise ConfigurationError(
            f"sandboxes by {kind}: install thunderagent with the extra "
            f"`{'docker' if kind == 'docker' else 'kubernetes'}` ({error.name} is missing)"
        ) from error
    from thunderagent.tools.callback import CallbackDriver  # noqa: PLC0415 - beside the others

    return CallbackDriver(
        owner,
        token=config.sandbox_callback_token,
        urls=urls,
        request_timeout_s=config.sandbox_callback_timeout_s,
        concurrency_count=2 * config.sandbox_hands_count,
    )
