"""A store whose lock is a Lease of Kubernetes. The log, and a copy of the lock, are in another store.

Theory of operation
===================
A Lease is an object that names its holder and is only written by clients that name the version they saw. It does not
expire by itself, and other clocks are not used: a Lease that stayed the same for its duration, by our own clock and
without a gap in the answers, has expired. Its `leaseTransitions` are the epoch.

A scheduler that takes the Lease then takes the copy of the lock in the log's store, with the same epoch. **So nobody
leads without having raised the epoch there**, and the log rejects any earlier leader. Two things follow:

- a leader that the API server does not answer goes on for as long as the log's store says that the epoch is its own:
  nobody else can have led. If that does not answer either, it steps down before its Lease can have expired for others;
- a standby reads the log's store many times a second, and the Lease once a second, or when the copy changes.

With a lock of 3 s a Lease lasts 4 s, is renewed each second, and a leader gives up after 3 s.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import structlog

from thunderagent.backends.discovery.kubernetes import ClusterAccess, ConflictError, NotThereError, connected
from thunderagent.errors import DiscoveryError, StoreError
from thunderagent.scale.leader.candidacy import GIVEN_UP
from thunderagent.scale.leader.store import believed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from thunderagent.backends.discovery.kubernetes import Cluster, Json
    from thunderagent.scale.leader.store import Seen, Store

log = structlog.get_logger("thunderagent.scale")

LOOK_S = 1.0
"""How often a standby reads the Lease, if nothing shows that it changed."""

SPARE_S = 1.0
"""How much longer a Lease lasts than its holder trusts it without an answer."""

MAX_LEASE_S = 60.0
"""Limit on any Lease's duration: the log fences an earlier leader that is still there."""

MAX_TRANSITIONS = 2**31 - 1


class Lease(NamedTuple):
    """What an API server says of a Lease."""

    version: str
    holder: str
    """Empty if the Lease was given up."""
    epoch: int
    lasts_s: float


class KubernetesStore:
    """A store `kept_in` another one, except for the lock. All methods belong to one event loop."""

    def __init__(
        self,
        kept_in: Store,
        access: ClusterAccess,
        namespace: str,
        name: str,
        lock_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect at the first use. The lock of `kept_in` lasts `lock_s`, too."""
        self._log = kept_in
        self._access = access
        self._name = name
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._lock_s = lock_s
        self._now_s = now_s
        self._stack = AsyncExitStack()
        self._cluster: Cluster | None = None
        self._lease: Lease | None = None
        """As last read or written; None if there is none, or it is unknown."""
        self._since_s = 0.0
        """Since when it has not changed."""
        self._read_s = -math.inf
        self._copy: str | None = None
        """Owner of the lock in the other store."""
        self._epoch = 0
        """Epoch there."""
        self._renewed_s: float | None = None
        """When our own Lease was last renewed; None if it is another's."""
        self._answers = True

    def __repr__(self) -> str:
        return f"<KubernetesStore {self._all}/{self._name}: {self._lease}>"

    async def look(self, after: str) -> Seen:
        """Return the current state; see `Store`, also for the other methods. An expired Lease counts as none."""
        seen = await self._log.look(after)
        is_due = seen.owner != self._copy or self._now_s() - self._read_s >= LOOK_S
        self._copy, self._epoch = seen.owner, seen.epoch
        if self._renewed_s is not None:
            return seen
        if is_due:
            await self._read()
        return seen._replace(owner=self._owner(), epoch=max(seen.epoch, self._lease_epoch))

    @property
    def _lease_epoch(self) -> int:
        return 0 if self._lease is None else self._lease.epoch

    def _owner(self) -> str | None:
        """Return the owner of the Lease, as far as known; empty if it was given up, None if it has expired."""
        lease = self._lease
        if lease is None or not lease.holder:
            return None if lease is None else GIVEN_UP
        return lease.holder if self._now_s() - self._since_s < lease.lasts_s else None

    async def take(self, owner: str, expected: str, least_epoch: int) -> int:
        """Take the Lease, then the copy of the lock."""
        await self._read()
        if self._owner() not in (None, GIVEN_UP, expected, owner):
            return 0
        epoch = max(self._lease_epoch, believed(self._epoch, least_epoch), least_epoch) + 1
        if epoch > MAX_TRANSITIONS:
            raise StoreError(f"a Lease cannot hold epoch {epoch}: delete it, and the store's keys")
        asked_s = self._now_s()
        if not await self._write(owner, epoch, acquireTime=_now()):
            return 0
        taken = await self._log.take(owner, self._copy or GIVEN_UP, epoch - 1)
        if taken:
            self._renewed_s = asked_s
        return taken

    async def renew(self, owner: str, epoch: int) -> int:
        """Renew the Lease and the copy; without an answer of the API server only the copy, as long as it is kept."""
        asked_s = self._now_s()
        try:
            async with self._in_time("the API server"):
                is_kept = await self._write(owner, epoch) or await self._write_anew(owner, epoch)
        except StoreError as error:
            self._heard(error)
            return await self._renew_copy(owner, epoch)
        self._heard(None)
        if not is_kept:
            return 0
        self._renewed_s = asked_s
        return await self._log.renew(owner, epoch)

    async def _write_anew(self, owner: str, epoch: int) -> bool:
        """Write a Lease again that somebody changed; return False if it is another's by now."""
        await self._read()
        return (self._lease is None or self._lease.holder in ("", owner)) and await self._write(owner, epoch)

    async def _renew_copy(self, owner: str, epoch: int) -> int:
        try:
            async with self._in_time("the store"):
                kept = await self._log.renew(owner, epoch)
        except StoreError:
            if self._is_late:
                return 0
            raise
        return 0 if kept == 2 and self._is_late else kept  # a store that lost its data proves nothing

    @property
    def _is_late(self) -> bool:
        """Whether our own Lease may soon expire for others."""
        return self._renewed_s is None or self._now_s() - self._renewed_s >= self._lock_s

    @asynccontextmanager
    async def _in_time(self, whom: str) -> AsyncIterator[None]:
        """Wait at most a third of a lock: even if one renewal, API server and store hang, the Lease has not expired."""
        try:
            async with asyncio.timeout(self._lock_s / 3):
                yield
        except TimeoutError as error:
            raise StoreError(f"{whom} does not answer within {self._lock_s / 3:.1f} s") from error

    def _heard(self, error: StoreError | None) -> None:
        if self._answers is not (error is None):
            self._answers = error is None
            if error is None:
                log.warning("lease_is_renewed_again", lease=self._name)
            else:
                log.error("lease_not_renewed", lease=self._name, why=error.message)

    async def give_up(self, owner: str) -> None:
        """Give up the Lease, then the copy: others see the change of the Lease first."""
        try:
            await self._read()
            if self._lease is not None and self._lease.holder == owner:
                await self._write(None, self._lease.epoch)
        finally:
            await self._log.give_up(owner)

    # --- the Lease

    async def _read(self) -> None:
        async with self._asked() as cluster:
            try:
                self._take_in(await cluster.ask("GET", f"{self._all}/{self._name}"))
            except NotThereError:
                self._lease = None
        self._read_s = self._now_s()

    async def _write(self, holder: str | None, epoch: int, **more: str) -> bool:
        """Write the Lease, if it is as last seen. Nobody has to wait for one without a holder."""
        lasts_s = 1 if holder is None else math.ceil(self._lock_s + SPARE_S)
        times = {"renewTime": _now(), "leaseDurationSeconds": lasts_s, **more}
        spec = {"holderIdentity": holder, "leaseTransitions": epoch, **times}
        lease = self._lease
        async with self._asked() as cluster:
            try:
                if lease is None:
                    kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
                    answer = await cluster.ask(
                        "POST", self._all, {**kind, "metadata": {"name": self._name}, "spec": spec}
                    )
                else:
                    changed = {"metadata": {"resourceVersion": lease.version}, "spec": spec}
                    answer = await cluster.ask("PATCH", f"{self._all}/{self._name}", changed)
            except (ConflictError, NotThereError):
                return False
            self._take_in(answer)
        return True

    def _take_in(self, answer: Json) -> None:
        spec = answer.get("spec") or {}
        try:
            lease = Lease(
                str(answer["metadata"]["resourceVersion"]),
                str(spec.get("holderIdentity") or ""),
                max(0, int(spec.get("leaseTransitions") or 0)),
                max(self._lock_s + SPARE_S, min(MAX_LEASE_S, float(spec.get("leaseDurationSeconds") or 0))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self._name} is not a Lease that a scheduler wrote: {error!r}") from error
        if self._lease is None or lease.version != self._lease.version:
            self._since_s = self._now_s()
        self._lease = lease

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[Cluster]:
        """Ask the API server. Raises `StoreError`: then it is unknown whether the Lease stays the same."""
        try:
            if self._cluster is None:
                self._cluster = await self._stack.enter_async_context(connected(self._access))
            yield self._cluster
        except DiscoveryError as error:
            self._lease, self._read_s = None, -math.inf
            raise StoreError(f"the Lease {self._name}: {error.message}") from error

    # --- what is in the other store

    async def append(self, owner: str, epoch: int, data: bytes) -> str:
        """Write an entry."""
        return await self._log.append(owner, epoch, data)

    async def position(self) -> str:
        """Return the position of the last entry."""
        return await self._log.position()

    async def trim(self, where: str) -> None:
        """Cut off what is before an entry."""
        await self._log.trim(where)

    async def stand_by(self, owner: str) -> None:
        """Announce a standby."""
        await self._log.stand_by(owner)

    async def has_standby(self, owner: str) -> bool:
        """Return whether another standby was announced."""
        return await self._log.has_standby(owner)

    async def warnings(self) -> list[str]:
        """Return settings of the other store that may lose data."""
        return await self._log.warnings()

    async def close(self) -> None:
        """Close all connections."""
        await self._stack.aclose()
        await self._log.close()


def _now() -> str:
    """Return the time for people who read a Lease; no scheduler uses it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
