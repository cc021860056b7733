"""The networks of sandboxes in a Kubernetes cluster: policies that are removed when nobody uses them."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator

from thunderagent.errors import SandboxConflictError
from thunderagent.tools.base import Owner, logging_failures
from thunderagent.tools.kubernetes.api import Api
from thunderagent.tools.kubernetes.objects import (
    POLICIES,
    RESOURCES,
    Json,
    controller_of,
    is_going,
    network_in,
    owned_selector,
    uid_of,
)

_LOCKS_COUNT = 64


class Networks:
    """The networks of one owner. All methods block and raise `SandboxError`."""

    def __init__(self, api: Api, owner: Owner) -> None:
        self._api = api
        self._owner = owner
        self._locks = tuple(threading.Lock() for _ in range(_LOCKS_COUNT))

    @contextlib.contextmanager
    def made(self, namespace: str, network: str, policy: Json) -> Iterator[None]:
        """Make a policy, and keep it until the sandbox in its network exists: the last one's end would remove it."""
        with self._lock(namespace, network):
            with contextlib.suppress(SandboxConflictError):
                self._api.create(POLICIES, namespace, policy)
            yield

    def leave(self, namespace: str, network: str) -> None:
        """Remove a network's policies if nobody is left in it; do nothing for the cluster's own."""
        if not network:
            return
        selector = owned_selector(self._owner, network)
        with self._lock(namespace, network):
            for resource in RESOURCES.values():
                items, _ = self._api.list_all(resource, namespace, selector)
                # A Job is gone before its pod is: that pod is on its way.
                if any(not is_going(each) and controller_of(each) is None for each in items):
                    return
            for policy in self._api.list_all(POLICIES, namespace, selector)[0]:
                self._api.delete(POLICIES, namespace, policy["metadata"]["name"], uid_of(policy))

    def sweep(self, namespace: str) -> None:
        """Remove policies without a sandbox."""
        policies, _ = self._api.list_all(POLICIES, namespace, owned_selector(self._owner))
        for network in {network_in(policy) for policy in policies}:
            with logging_failures(f"network policies of {network} in {namespace}"):
                self.leave(namespace, network)

    def _lock(self, namespace: str, network: str) -> threading.Lock:
        return self._locks[zlib.crc32(f"{namespace}/{network}".encode()) % _LOCKS_COUNT]
