"""When replicas are started and ended: the scheduler's decisions, within bounds.

Theory of operation
===================
The core decides that there should be one more replica, or that one should end (`Provision`, `EndReplica`); an
operator's request comes the same way, so the event log has it. `observe` only notes it; `run` carries it out, because
changes of replicas are reported back to the runtime.

There are never more than `max_count` started replicas, nor, if possible, fewer than `min_count`: that many are started
at first, and again when one is lost. A policy's request is carried out at most once per `cooldown_s`, an operator's at
once. A started replica is named to the proxy like one of any other source: it gets turns after its first good poll; if
there is none within `ready_limit_s` it is ended. One that ends is no longer named: it drains, and its driver ends it
only when the proxy has forgotten it, and again if that fails. Until then it runs, and no other one gets its place.

A scheduler that stands by starts and ends nothing, and its core's decisions are dropped: it sees no programs. It asks
its driver how many replicas there are only when it leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import structlog

from thunderagent.backends.discovery.base import shown_url
from thunderagent.errors import OperationRefusedError, ProvisionError, ProvisionLimitError, ProvisionOffError
from thunderagent.programs.messages import Decision, EndReplica, Event, Provision, Reason, ReplicaRemoved
from thunderagent.provision.base import Launched, Provisioner, ReplicaGoneError

log = structlog.get_logger("thunderagent.provision")

HEARS = (Provision, EndReplica, ReplicaRemoved)
"""Kinds of events and decisions for `Provisioning.observe`."""

LOOK_S = 0.1
"""How often to check replicas that start or drain."""


class Fleet(Protocol):
    """The proxy's view of replicas."""

    def wanted(self, urls: Sequence[str]) -> None:
        """Set all replicas that were started here."""

    def url_of(self, replica_id: str) -> str | None:
        """Return a replica's URL; None if it is unknown."""

    def knows(self, url: str) -> bool:
        """Return whether any replica at a URL is not forgotten yet."""

    def is_up(self, url: str) -> bool:
        """Return whether a replica at a URL answers."""

    def leave(self, url: str) -> None:
        """Let the replicas at a URL drain and go, whichever source names them."""


@dataclass(frozen=True, slots=True)
class ProvisionSettings:
    """Limits of number and speed."""

    min_count: int = 0
    max_count: int = 1
    cooldown_s: float = 30.0
    ready_limit_s: float = 900.0


@dataclass(slots=True)
class _Own:
    """A replica that was started here."""

    launched: Launched
    started_s: float
    was_known: bool = False
    was_up: bool = False
    is_ending: bool = False


class Provisioning:
    """Carries out decisions on replicas. All methods belong to one event loop."""

    def __init__(
        self,
        driver: Provisioner | None,
        fleet: Fleet,
        settings: ProvisionSettings,
        clock: Callable[[], float],
        stands_by: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start and end by `driver`; without one, replicas that an operator ends only drain and are forgotten.

        Nothing is started or ended while `stands_by()`; a scheduler stands by only before it leads.
        """
        self._driver = driver
        self._fleet = fleet
        self._settings = settings
        self._now_s = clock
        self._stands_by = stands_by
        self._todo: list[Provision | EndReplica] = []
        self._something = asyncio.Event()
        self._own: dict[str, _Own] = {}
        """By handle."""
        self._ending_urls: set[str] = set()
        """Of those that drain or end: they still run."""
        self._elsewhere_count = 0
        """Number of replicas of a driver that does not report their URLs."""
        self._starting_count = 0
        self._cooled_s = -inf
        self._tries_again_s = -inf
        self._retry_s = max(1.0, min(settings.cooldown_s, 10.0))
        self.failure = ""
        """The last failure; empty if the last attempt succeeded."""

    def __repr__(self) -> str:
        return f"<Provisioning by {self._driver!r}: {self.count} of {self._settings.max_count}>"

    @property
    def driver_name(self) -> str:
        """The driver's name; empty if there is none."""
        return self._driver.name if self._driver is not None else ""

    @property
    def settings(self) -> ProvisionSettings:
        """Return the bounds."""
        return self._settings

    @property
    def count(self) -> int:
        """Number of started replicas that do not end, including those being started."""
        own_count = sum(not own.is_ending for own in self._own.values())
        return own_count + self._elsewhere_count + self._starting_count

    @property
    def starting_count(self) -> int:
        """Those that have not answered yet, as far as their URLs are known."""
        return self._starting_count + sum(not own.was_up for own in self._own.values() if not own.is_ending)

    def owns(self, replica_id: str) -> bool:
        """Return whether a replica can be ended here; with a driver that does not report URLs, any might be."""
        url = self._fleet.url_of(replica_id)
        if self._driver is None or url is None:
            return False
        return not self._driver.names_urls or self._own_at(url) is not None

    def check_start(self) -> None:
        """Raise `OperationRefusedError`, `ProvisionOffError` or `ProvisionLimitError` if no replica can be started."""
        self._check_leads()
        if self._driver is None:
            raise ProvisionOffError("starting replicas is not configured: see --provision")
        running_count = self.count + len(self._ending_urls)
        if running_count >= self._settings.max_count:
            raise ProvisionLimitError(
                f"there are {running_count} started replicas, which is the largest number allowed"
            )

    def check_end(self, replica_id: str) -> None:
        """Raise `ProvisionLimitError` or `OperationRefusedError` if a replica must not be ended."""
        self._check_leads()
        if self._fleet.url_of(replica_id) in self._ending_urls:
            raise OperationRefusedError(f"replica {replica_id} ends already")
        if self.owns(replica_id) and self.count <= self._settings.min_count:
            raise ProvisionLimitError(f"there are {self.count} started replicas, which is the smallest number allowed")

    def _check_leads(self) -> None:
        if self._stands_by():
            raise OperationRefusedError("this scheduler stands by; ask the one that leads")

    def observe(self, event: Event, decisions: Sequence[Decision]) -> None:
        """Note the scheduler's decisions on replicas, and check whether a removed one was started here."""
        if type(event) is ReplicaRemoved and self._own:
            self._something.set()
        wanted = [decision for decision in decisions if isinstance(decision, Provision | EndReplica)]
        if wanted and not self._stands_by():
            self._todo += wanted
            self._something.set()

    # --- carrying out

    async def run(self) -> None:
        """Carry out decisions until cancelled; then end what must not outlive the proxy."""
        try:
            while self._stands_by():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(LOOK_S)
            async with asyncio.TaskGroup() as group:
                if self._driver is not None:
                    await self._open(self._driver)
                    group.create_task(self._driver.run(self._lost), name="replicas that were started")
                while True:
                    self._look_after(group)
                    for decision in self._take_todo():
                        self._carry_out(decision, group)
                    await self._wait()
        finally:
            if self._driver is not None:
                await self._driver.close()

    async def _open(self, driver: Provisioner) -> None:
        while True:
            try:
                self._elsewhere_count = await driver.open()
            except ProvisionError as error:
                self._failed("replicas_not_managed", error)
                await asyncio.sleep(self._retry_s)
            else:
                return

    async def _wait(self) -> None:
        """Wait for a decision; no longer than a check's period if something is in progress."""
        on_its_way = self.starting_count or self.count < self._settings.min_count
        if self._driver is not None and on_its_way:
            await asyncio.sleep(LOOK_S)
        else:
            await self._something.wait()
        self._something.clear()

    def _take_todo(self) -> list[Provision | EndReplica]:
        todo, self._todo = self._todo, []
        return todo

    def _look_after(self, group: asyncio.TaskGroup) -> None:
        """Start missing replicas, and end those that do not come up."""
        if self._driver is None:
            return
        now_s = self._now_s()
        wanted_count = min(self._settings.min_count, self._settings.max_count - len(self._ending_urls))
        while self.count < wanted_count and now_s >= self._tries_again_s:
            self._begin_start(self._driver, group, "there should be more")
        for own in self._own.values():
            own.was_up = own.was_up or self._fleet.is_up(own.launched.url)
            if own.is_ending:
                continue
            if own.was_known and not self._fleet.knows(own.launched.url):  # an operator removed it
                self._begin_end(self._driver, group, own.launched)
            elif not own.was_up and now_s - own.started_s > self._settings.ready_limit_s:
                log.error(
                    "replica_not_ready", url=shown_url(own.launched.url), ready_limit_s=self._settings.ready_limit_s
                )
                self.failure = f"{shown_url(own.launched.url)} did not answer within {self._settings.ready_limit_s:g} s"
                self._tries_again_s = now_s + self._settings.cooldown_s
                self._begin_end(self._driver, group, own.launched)

    def _carry_out(self, decision: Provision | EndReplica, group: asyncio.TaskGroup) -> None:
        """Carry out a decision, if the bounds still allow it: several may have been made at once."""
        try:
            if decision.reason is not Reason.OPERATOR and self._now_s() < self._cooled_s:
                return
            if isinstance(decision, Provision):
                self.check_start()
                assert self._driver is not None
                self._begin_start(self._driver, group, decision.reason.value)
            else:
                self._end_replica(decision, group)
            self._cooled_s = self._now_s() + self._settings.cooldown_s
        except OperationRefusedError as error:
            log.info("provision_refused", reason=decision.reason.value, why=error.message)

    def _end_replica(self, decision: EndReplica, group: asyncio.TaskGroup) -> None:
        replica_id = decision.replica_id
        url = self._fleet.url_of(replica_id)
        if url is None:
            return
        self.check_end(replica_id)
        if self._driver is not None and self.owns(replica_id):
            own = self._own_at(url)
            self._begin_end(self._driver, group, own.launched if own is not None else Launched("", url))
        elif decision.reason is Reason.OPERATOR:
            self._fleet.leave(url)
        else:
            raise OperationRefusedError(f"replica {replica_id} was not started here, so only an operator ends it")

    # --- starting

    def _begin_start(self, driver: Provisioner, group: asyncio.TaskGroup, why: str) -> None:
        self._starting_count += 1
        log.info("replica_starting", by=driver.name, why=why)
        group.create_task(self._start(driver), name="a replica that starts")

    async def _start(self, driver: Provisioner) -> None:
        try:
            launched = await driver.start()
        except ProvisionError as error:
            self._tries_again_s = self._now_s() + self._settings.cooldown_s
            self._failed("replica_not_started", error)
        else:
            self.failure = ""
            log.info("replica_started", by=driver.name, url=shown_url(launched.url))
            if driver.names_urls:
                own = self._own[launched.handle] = _Own(launched, self._now_s())
                self._tell()
                own.was_known = self._fleet.knows(launched.url)
            else:
                self._elsewhere_count += 1
        finally:
            self._starting_count -= 1
            self._something.set()

    def _lost(self, handle: str, why: str) -> None:
        own = self._own.get(handle)
        if own is None or own.is_ending:
            return
        del self._own[handle]
        log.error("replica_lost", url=shown_url(own.launched.url), why=why)
        self.failure = f"{shown_url(own.launched.url)}: {why}"
        self._tries_again_s = self._now_s() + self._settings.cooldown_s
        self._tell()
        self._something.set()

    # --- ending

    def _begin_end(self, driver: Provisioner, group: asyncio.TaskGroup, launched: Launched) -> None:
        own = self._own.get(launched.handle)
        if own is not None:
            own.is_ending = True
        else:
            self._elsewhere_count -= 1
        self._ending_urls.add(launched.url)
        log.info("replica_ending", by=driver.name, url=shown_url(launched.url))
        group.create_task(self._end(driver, launched), name="a replica that ends")

    async def _end(self, driver: Provisioner, launched: Launched) -> None:
        """Drain a replica, then end it."""
        try:
            await driver.check_end(launched.handle, launched.url)
            if driver.names_urls:
                self._tell()
            else:
                self._fleet.leave(launched.url)
            while self._fleet.knows(launched.url):  # noqa: ASYNC110 - until the proxy has drained and forgotten it
                await asyncio.sleep(LOOK_S)
            await self._end_drained(driver, launched)
        except ProvisionError as error:
            self._failed("replica_not_ended", error)
            self._stays(launched)
        else:
            log.info("replica_ended", by=driver.name, url=shown_url(launched.url))
            self._own.pop(launched.handle, None)
        self._ending_urls.discard(launched.url)
        self._something.set()

    async def _end_drained(self, driver: Provisioner, launched: Launched) -> None:
        """End a replica, and try again for as long as that fails.

        Raises `ProvisionError` if it is gone, or an operator added it again: it has turns then.
        """
        url, has_failed = launched.url, False
        while True:
            try:
                await driver.end(launched.handle, url)
            except ReplicaGoneError:
                raise
            except ProvisionError as error:
                if not has_failed or error.message != self.failure:
                    self._failed("replica_not_ended", error)
            else:
                break
            has_failed = True
            await asyncio.sleep(self._retry_s)
            if self._fleet.knows(url):
                raise ProvisionError(f"{shown_url(url)} was added again before it ended")
        if has_failed:
            self.failure = ""

    def _stays(self, launched: Launched) -> None:
        """Count a replica again that does not end."""
        own = self._own.get(launched.handle)
        if own is None:
            self._elsewhere_count += 1
        else:
            own.is_ending = False
            self._tell()

    def _failed(self, what: str, error: ProvisionError) -> None:
        self.failure = error.message
        log.error(what, by=self.driver_name, why=error.message)

    def _tell(self) -> None:
        self._fleet.wanted([own.launched.url for own in self._own.values() if not own.is_ending])

    def _own_at(self, url: str) -> _Own | None:
        return next((own for own in self._own.values() if own.launched.url == url), None)
