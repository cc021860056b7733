"""Carries out the sandbox table's plan: prepares and reclaims through the drivers, and hears the engines' events.

Theory of operation
===================
The table (`table.py`) decides, this carries out. Everything here runs on one event loop; a driver's work runs in
threads of its own. `_plan` is called soon after something changed and at least every `plan_interval_s`; each of its
actions becomes a task of one group, so that nothing outlives `run`.

A preparation that fails goes back to the table, which tries again or gives up. A preparation that is no longer wanted
is cancelled; the driver then removes what it had begun. A reclaiming that fails is repeated until it succeeds, because
its object is ours; it is given up when the object has ended by itself, or was never ours to end. A sandbox whose
template says so is suspended while its program waits for long, nothing runs in it and nobody else uses it, and thawed
ahead of the turn: when that is expected soon, or is the next one, at the latest as it is let in. One that its agent
does not know of may still go to another program, and is not suspended. After each loss of contact and now and then, the
engines' state is compared with the table. Objects with our name and an earlier run's are orphans and are
removed at the start. Objects of this run that are not in the table are left from a failed preparation or sandbox, and
are removed whenever they are seen. A look takes time: it says nothing of what came or went since it began.

Programs come from the scheduler: `observe` sees every event with its decisions. Each program with a sandbox is in the
scheduler's table, opened if needed, so that one that never comes is forgotten, and its sandboxes with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import structlog

from thunderagent.errors import (
    NotFoundError,
    RequestError,
    SandboxEngineError,
    SandboxError,
    SandboxRefusedError,
    SandboxSetupError,
    ShuttingDownError,
    ThunderAgentError,
)
from thunderagent.programs.messages import Decision, Event, Grant, Release, Restore
from thunderagent.tools.base import Command, Driver, Found, Order, Owner, Place, Suspending, Usage
from thunderagent.tools.contact import Contact, ContactSettings
from thunderagent.tools.feed import Feed, Report, report_of
from thunderagent.tools.requests import MOST_SANDBOXES_COUNT, SandboxRequest, read_requests
from thunderagent.tools.sandbox import COMING, Caps, Sandbox, Stage
from thunderagent.tools.table import Prepare, Reclaim, SandboxTable, needed_in_s
from thunderagent.tools.template import Template

log = structlog.get_logger("thunderagent.sandboxes")

SUSPEND_OVER_S = 5.0
"""Programs that are expected to wait for longer have their sandboxes suspended."""
THAW_AHEAD_S = 2.0
"""How long before their turn these are thawed, if it is foreseen; the next one is thawed as soon as it is that."""

HEARS = (Grant, Restore, Release)
"""Kinds of events for `Manager.observe`."""


Run = tuple[str, str, str]
"""A running command: the driver, the handle of the sandbox, and the engine's id for the command."""


class Programs(Protocol):
    """What the manager asks and tells the scheduler."""

    def open(self, program_id: str, tenant: str = "") -> None:
        """Open a program, of a tenant, before its first turn; a live one stays. Raises `RequestError`."""

    def runs(self, program_id: str) -> bool:
        """Return whether it was admitted: it holds a claim on a replica."""

    def uses_tools(self, program_id: str) -> bool:
        """Return whether a turn of it has ended and none is here: it may wait for its sandbox, paused or not."""

    def acting_for_s(self, program_id: str) -> float:
        """Return how long no turn of it is here; 0 while one is."""

    def expected_holds_s(self) -> Mapping[str, float]:
        """Return for waiting programs in how many seconds each is expected to be admitted."""

    def tool_began(self, program_id: str, command: str) -> None:
        """Record that a tool of it begins: a command in a sandbox."""

    def tool_ended(self, program_id: str) -> None:
        """Record that its tool ended."""

    def sandbox_ready(self, program_id: str, sandbox_id: str, prepare_s: float) -> None:
        """Add it to the program's story."""

    def sandbox_failed(self, program_id: str, sandbox_id: str, why: str) -> None:
        """Add it to the program's story."""

    def measured(self, sandbox_count: int, disk_bytes: int | None, memory_bytes: int | None) -> None:
        """Report the resource use of all sandboxes."""


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """Settings of the manager; times in seconds."""

    plan_interval_s: float = 1.0
    plan_pause_s: float = 0.02
    """Least time between two plans: each checks all sandboxes, which takes 2 ms for five thousand."""
    idle_limit_s: float = inf
    """Sandboxes of a program without a turn for this long are removed, though the program stays."""
    adopt_timeout_s: float = 10.0
    reclaim_timeout_s: float = 60.0
    reclaims_count: int = 8
    """Reclaimings at a time, at each engine: of the operator's templates, and as many of all else."""
    reclaim_tries_count: int = 20
    """After this many a given or overdue sandbox that cannot be removed is forgotten: at least 4 minutes."""
    contact: ContactSettings = field(default_factory=ContactSettings)
    shutdown_s: float = 20.0
    """How long a shutdown waits for its reclaimings."""
    reclaim_on_shutdown: bool = True
    takes_specs: bool = False
    """Whether clients may bring templates, callbacks and sandboxes of their own."""
    check_callback: Callable[[Template], None] = lambda _: None
    """Checks the URLs of a client's template, or raises `SandboxError`. What is called is checked again."""


class Manager:
    """Owner of the sandbox table. All methods belong to one event loop."""

    def __init__(
        self,
        owner: Owner,
        drivers: Mapping[str, Driver],
        programs: Programs,
        *,
        caps: Caps,
        templates: Mapping[str, Template],
        new_id: Callable[[], str],
        new_name: Callable[[], str],
        settings: ManagerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Start empty; `clock` is that of the scheduler, `wall_clock` returns Unix time."""
        self.table = SandboxTable(caps, new_id, new_name)
        self.templates = templates
        self.settings = settings or ManagerSettings()
        self.failure_counts: Counter[str] = Counter()
        """Failed preparations and sandboxes that died, by error code."""
        self.reclaimed_count = 0
        self.orphan_count = 0
        """Leftovers of earlier runs that were removed."""
        self._on_prepared: Callable[[float], None] = lambda _: None
        self._on_waited: Callable[[float], None] = lambda _: None
        self._owner = owner
        self._drivers = drivers
        self._programs = programs
        self._clock = clock
        self._wall_clock = wall_clock
        self._classes = {name: template_name for template_name, t in templates.items() for name in t.program_classes}
        self._seen: set[str] = set()
        """Programs that were given their class's sandboxes; they may have let them go since."""
        self._named: dict[str, set[str]] = {}
        """Containers that turns of live programs named, which are taken over, or will be."""
        self._refused_names = False
        self._given_up: set[tuple[str, str]] = set()
        """By driver and handle, given sandboxes that could not be removed and are still there."""
        self._reclaimed: set[tuple[str, str]] = set()
        """Drivers and handles reclaimed since the last look, which may still have seen them."""
        self._removing: set[tuple[str, str]] = set()
        """Those of unknown objects that are being removed."""
        self._commands: dict[str, set[Run]] = {}
        """Commands that began in sandboxes of a program since its last turn. None is empty."""
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._settling: set[str] = set()
        """Sandboxes that are being suspended, or thawed."""
        self._may_suspend = self.settings.takes_specs or any(each.suspend for each in templates.values())
        self._changed = asyncio.Event()
        self._contacts = {kind: Contact(d, self, self.settings.contact) for kind, d in drivers.items()}
        self._group: asyncio.TaskGroup | None = None
        self._feed = Feed()
        self._reclaim_hands = {
            (kind, is_operators): asyncio.Semaphore(self.settings.reclaims_count)
            for kind in drivers
            for is_operators in (False, True)
        }
        """What clients brought may hang for long: it must not keep the operator's own from going."""
        self._closing = False
        self.table.keep_warm({name: (t, t.warm_count) for name, t in templates.items() if t.warm_count})

    def __repr__(self) -> str:
        return f"<Manager of {self.table!r}>"

    # --- what clients ask for ---------------------------------------------------------------------------------------

    async def request(
        self, program_id: str, body: bytes, tenant: str = "", check: Callable[[], None] = lambda: None
    ) -> list[Report]:
        """Do what a request's body asks for, one thing or a list of them; return the current report of each.

        `check` is called once all handles are found, which takes time, and may refuse by an error of its own. Raises
        `RequestError`, `NotFoundError` for an unknown template or handle, `SandboxError`.
        """
        wanted = read_requests(body)
        for each in wanted:  # all or none
            self._check(each)
        places = [await self._adopt(each) for each in wanted]
        if self._closing:
            raise ShuttingDownError("the proxy is shutting down; no sandbox was asked for")
        check()
        self._check_shares(wanted)
        if len(self.table.of_program(program_id)) + len(wanted) > MOST_SANDBOXES_COUNT:
            raise SandboxRefusedError(f"a program may have {MOST_SANDBOXES_COUNT} sandboxes at most")
        self.table.check_count(len(wanted))
        self._programs.open(program_id, tenant)
        made = [
            self._ask(program_id, each) if place is None else self._register(each.driver, program_id, place)
            for each, place in zip(wanted, places, strict=True)
        ]
        self._changed.set()
        return [self._report_to_client(sandbox) for sandbox in made]

    def _check(self, wanted: SandboxRequest) -> None:
        if wanted.template is not None and wanted.template not in self.templates:
            raise NotFoundError(f"there is no template {wanted.template!r}; there are: {', '.join(self.templates)}")
        if not self.settings.takes_specs and wanted.template is None:
            raise SandboxRefusedError(
                "clients may not send templates, callbacks or sandboxes here (sandbox_specs is off)"
            )
        kind = self._template_of(wanted).driver if wanted.handle is None else wanted.driver
        if kind not in self._drivers:
            raise RequestError(f"sandboxes by {kind!r} are not enabled; --sandboxes has: {', '.join(self._drivers)}")
        if bool(wanted.reclaim_url) != (kind == "callback" and wanted.handle is not None):
            raise RequestError("reclaim_url, handle and the driver callback must be given together")
        if wanted.spec is not None and kind == "callback":
            self.settings.check_callback(wanted.spec)
        if wanted.handle is None:
            self.table.check(self._template_of(wanted))

    def _check_shares(self, wanted: Sequence[SandboxRequest]) -> None:
        """Raise `SandboxRefusedError` if a share key belongs to another template, also within one body."""
        digests: dict[str, str] = {}
        for each in wanted:
            if each.handle is None and each.share:
                template = self._template_of(each)
                self.table.check(template, each.share)
                if digests.setdefault(each.share, template.digest()) != template.digest():
                    raise SandboxRefusedError(
                        f"{each.share!r} is asked for from one template and from another template"
                    )

    def _template_of(self, wanted: SandboxRequest) -> Template:
        if wanted.spec is not None:
            return wanted.spec
        assert wanted.template is not None
        return self.templates[wanted.template]

    async def _adopt(self, wanted: SandboxRequest) -> Place | None:
        if wanted.handle is None:
            return None
        try:
            async with asyncio.timeout(self.settings.adopt_timeout_s):
                return await self._drivers[wanted.driver].adopt(wanted.handle, wanted.reclaim_url)
        except TimeoutError:
            raise SandboxEngineError(f"{wanted.driver} gave no answer in time") from None

    def _ask(self, program_id: str, wanted: SandboxRequest) -> Sandbox:
        template = self._template_of(wanted)
        return self._request(program_id, template, wanted.template or "", wanted.share)

    def _request(self, program_id: str, template: Template, template_name: str, share_key: str = "") -> Sandbox:
        now_s, at_once = self._clock(), self._needs_it_now(program_id)
        sandbox = self.table.request(now_s, template, template_name, program_id, share_key, at_once=at_once)
        if sandbox.stage not in COMING:  # it was kept warm, or is shared
            self._programs.sandbox_ready(program_id, sandbox.sandbox_id, sandbox.prepare_s or 0.0)
        if at_once:
            self._admitted(program_id)
        self._tell(sandbox)
        self._changed.set()
        return sandbox

    def _register(self, kind: str, program_id: str, place: Place) -> Sandbox:
        sandbox = self.table.register(self._clock(), kind, program_id, place)
        self._tell(sandbox)
        return sandbox

    def program_seen(self, program_id: str, program_class: str, tenant: str = "") -> None:
        """Prepare a class's sandboxes when a program of it is first seen; an unknown class gets none."""
        name = self._classes.get(program_class)
        if name is None or program_id in self._seen or self._closing:
            return
        self._programs.open(program_id, tenant)
        self._seen.add(program_id)
        if self.table.of_program(program_id):
            return
        try:
            self._request(program_id, self.templates[name], name)
        except SandboxError as error:  # the turn goes on: a sandbox is help, not a precondition
            log.warning("sandbox_failed", program_ids=[program_id], template=name, code=error.code, why=error.message)

    def sandboxes_named(self, program_id: str, names: Sequence[str], tenant: str = "") -> None:
        """Take over containers that a turn names; each turn may name them again. Does not wait for the engine.

        Raises `RequestError`.
        """
        if not self.settings.takes_specs or "docker" not in self._drivers:
            if not self._refused_names:
                self._refused_names = True  # each turn would say it
                log.warning("docker_ids_ignored", program_id=program_id, why="they need sandbox_specs, and docker")
            return
        known = self._named.setdefault(program_id, set())
        news = [name for name in dict.fromkeys(names) if name not in known][: MOST_SANDBOXES_COUNT - len(known)]
        if news and self._group is not None and not self._closing:
            self._programs.open(program_id, tenant)
            known.update(news)
            for name in news:
                self._group.create_task(self._take_over(program_id, name, known))

    async def _take_over(self, program_id: str, name: str, known: set[str]) -> None:
        """Register a container that a turn named; one whose program has ended meanwhile is removed."""
        try:
            place = await self._adopt(SandboxRequest(handle=name, driver="docker"))
        except SandboxRefusedError:  # a sandbox of ours, which goes with its program anyway
            return
        except ThunderAgentError as error:
            log.warning("sandbox_not_taken", driver="docker", handle=name, why=error.message)
            known.discard(name)  # the next turn may name it again
            return
        except Exception:  # one container must not end the proxy
            log.exception("sandbox_driver_failed", driver="docker")
            return
        assert place is not None
        sandbox = self._register("docker", program_id, place)
        if self._named.get(program_id) is not known:
            self._leave(sandbox, program_id, "its program ended")
        self._changed.set()

    def of_program(self, program_id: str) -> list[Report]:
        """Report on a program's sandboxes, oldest first, to its client: it may use them from now on."""
        return [self._report_to_client(sandbox) for sandbox in self.table.of_program(program_id)]

    def all(self) -> list[Report]:
        """Report on every sandbox, to an operator."""
        return [self._report(sandbox) for sandbox in self.table]

    def reclaim(self, program_id: str, sandbox_id: str) -> bool:
        """Take a program off one of its sandboxes, and remove it after its last user; return False if there is none."""
        sandbox = self.table.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox not in self.table.of_program(program_id):
            return False
        self._leave(sandbox, program_id, "its program asked")
        return True

    def _leave(self, sandbox: Sandbox, program_id: str, why: str) -> None:
        self._all_ran(sandbox, program_id)
        self.table.leave(sandbox, program_id, why)
        if sandbox.stage is Stage.GONE:  # nothing was made of it: no plan will report it
            self._tell(sandbox)
        self._changed.set()

    def feed(self, program_id: str | None = None) -> AbstractAsyncContextManager[asyncio.Queue[Report | None]]:
        """Provide a queue of reports, one for each change from now on, of one program; None ends it."""
        return self._feed.read(program_id)

    def _report(self, sandbox: Sandbox) -> Report:
        return report_of(sandbox, self._clock())

    def _report_to_client(self, sandbox: Sandbox) -> Report:
        sandbox.told = sandbox.told or sandbox.place is not None
        return self._report(sandbox)

    def _tell(self, sandbox: Sandbox) -> None:
        if self._feed.tell(sandbox, self._clock()):
            sandbox.told = sandbox.told or sandbox.place is not None

    # --- what the scheduler decides -----------------------------------------------------------------------------------

    def observe(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - a listener's signature
        """Follow programs as they are admitted and end."""
        for decision in decisions:
            if type(decision) is Release:
                self._seen.discard(decision.program_id)
                self._named.pop(decision.program_id, None)
                self._program_ended(decision.program_id, f"its program ended: {decision.reason.value}")
            elif isinstance(decision, Grant | Restore) and decision.program_id is not None:
                if isinstance(decision, Grant):  # what still runs beside a turn is no tool to wait for
                    self._commands.pop(decision.program_id, None)
                self._admitted(decision.program_id)

    def _program_ended(self, program_id: str, why: str) -> None:
        self._commands.pop(program_id, None)
        for sandbox in self.table.of_program(program_id):
            self._leave(sandbox, program_id, why)

    def _admitted(self, program_id: str) -> None:
        sandboxes = self.table.of_program(program_id)
        if not sandboxes:
            return
        for sandbox in sandboxes:
            if sandbox.stage is Stage.READY:
                self._on_waited(0.0)
            elif sandbox.stage in COMING:
                self._changed.set()
            if sandbox.wants_suspension:
                self._suspend(sandbox, wanted=False)
        self.table.used(self._clock(), program_id)

    # --- suspending ---------------------------------------------------------------------------------------------------

    def _suspend_idle(self, holds_s: Mapping[str, float]) -> None:
        """Suspend what is not needed for long, and thaw what is needed soon; `holds_s` is for programs that wait."""
        concerned = [each for each in self.table if each.template.suspend and _is_agents(each)]
        if not concerned:
            return
        thaw_s = min(SUSPEND_OVER_S, max(THAW_AHEAD_S, min(holds_s.values(), default=0.0)))
        for sandbox in concerned:
            is_idle = len(sandbox.program_ids) == 1 and self._commands.keys().isdisjoint(sandbox.program_ids)
            hold_s = min((holds_s.get(each, 0.0) for each in sandbox.program_ids), default=0.0) if is_idle else 0.0
            if sandbox.wants_suspension:
                if hold_s <= thaw_s:
                    self._suspend(sandbox, wanted=False)
            elif hold_s > SUSPEND_OVER_S and not sandbox.stays_awake:
                self._suspend(sandbox, wanted=True)

    def _suspend(self, sandbox: Sandbox, *, wanted: bool) -> None:
        """Suspend a sandbox soon, or thaw it."""
        sandbox.wants_suspension = wanted
        if self._group is not None and sandbox.name not in self._settling:
            self._settling.add(sandbox.name)
            self._group.create_task(self._settle(sandbox))

    async def _settle(self, sandbox: Sandbox) -> None:
        """Suspend and thaw a sandbox until it is as it is wanted. What may be suspended is thawed, however often."""
        driver, kind = self._drivers[sandbox.template.driver], sandbox.template.driver
        assert isinstance(driver, Suspending)
        delay_s = self.settings.contact.retry_s
        try:
            while sandbox.place is not None and sandbox.wants_suspension != sandbox.suspended:
                handle, wanted, sandbox.suspended = sandbox.place.handle, sandbox.wants_suspension, True
                try:
                    async with _only_sandbox_errors(kind):
                        await (driver.suspend(handle) if wanted else driver.thaw(handle))
                except SandboxError as error:
                    log.warning("sandbox_not_suspended", driver=kind, handle=handle, wanted=wanted, why=error.for_log)
                    if wanted:
                        sandbox.wants_suspension, sandbox.stays_awake = False, True
                        continue
                    if not _is_agents(sandbox):
                        return
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, self.settings.contact.retry_limit_s)
                else:
                    sandbox.suspended = wanted and sandbox.place is not None
                    self._tell(sandbox)
        finally:
            self._settling.discard(sandbox.name)

    # --- carrying out -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry out plans until cancelled; then, if the settings say so, reclaim everything, and close the engines."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for driver in self._drivers.values():
                    await driver.open()
                for contact in self._contacts.values():
                    group.create_task(contact.run())
                while True:
                    self._plan(group)
                    await asyncio.sleep(self.settings.plan_pause_s)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self.settings.plan_interval_s):
                            await self._changed.wait()
        finally:
            self._closing = True
            await self._reclaim_at_shutdown()
            self._feed.close()
            for driver in self._drivers.values():
                await driver.close()

    def _plan(self, group: asyncio.TaskGroup) -> None:
        self._let_idle_go()
        self._changed.clear()
        holds_s = self._programs.expected_holds_s()
        if self._may_suspend:
            self._suspend_idle(holds_s)
        needs, uses = self._needs_it_now, self._programs.uses_tools
        for action in self.table.plan(self._clock(), needed_in_s(needs, holds_s), needs, uses):
            sandbox = action.sandbox
            if isinstance(action, Prepare):
                self._preparing[sandbox.name] = group.create_task(self._prepare(sandbox))
            elif isinstance(action, Reclaim):
                group.create_task(self._reclaim(action))
            elif sandbox.stage not in COMING:
                self._is_ready(sandbox)
            if not isinstance(action, Prepare) and action.instead is not None:
                self._lost(action.instead, sandbox)
            self._tell(sandbox)

    def _needs_it_now(self, program_id: str) -> bool:
        """Return whether a program was let in, or was and uses tools; one whose turn waits again does not."""
        return self._programs.runs(program_id) or self._programs.uses_tools(program_id)

    def _lost(self, instead: Sandbox, sandbox: Sandbox) -> None:
        """Tell that a sandbox went to others; its owners get another one later."""
        if instead.program_ids:  # it was no warm one
            ids = {"program_ids": list(instead.program_ids), "to_program_ids": list(sandbox.program_ids)}
            log.info("sandbox_given_up_for", sandbox_id=instead.sandbox_id, template=instead.template_name, **ids)
            self._tell(instead)

    def _let_idle_go(self) -> None:
        limit_s = self.settings.idle_limit_s
        if limit_s == inf:
            return
        for sandbox in list(self.table):
            for program_id in list(sandbox.program_ids):
                if self._programs.acting_for_s(program_id) > limit_s:
                    self._leave(sandbox, program_id, "its program has had no turn for too long")
                    self._seen.discard(program_id)

    async def _prepare(self, sandbox: Sandbox) -> None:
        template = sandbox.template
        driver = self._drivers[template.driver]
        order = Order(
            sandbox_id=_order_id(sandbox),
            template=template,
            template_name=sandbox.template_name,
            program_id=next(iter(sandbox.program_ids), "") if template.is_of_its_program else "",
            expires_at_s=self._wall_clock() + template.ttl_s,
        )
        try:
            try:
                async with asyncio.timeout(template.prepare_timeout_s), _only_sandbox_errors(template.driver):
                    place = await driver.prepare(order)
            except TimeoutError:
                raise SandboxSetupError(f"it was not ready after {template.prepare_timeout_s:g} s") from None
        except SandboxError as error:
            self._prepare_failed(sandbox, error)
            return
        finally:
            self._preparing.pop(sandbox.name, None)
        self._prepared(sandbox, place)

    def _prepared(self, sandbox: Sandbox, place: Place) -> None:
        now_s = self._clock()
        if sandbox.stage is not Stage.PREPARING:  # it was reclaimed at the same moment: `_reclaim` removes it
            sandbox.place = place
            return
        self.table.prepared(now_s, sandbox, place)
        assert sandbox.prepare_s is not None
        self._on_prepared(sandbox.prepare_s)
        log.info(
            "sandbox_ready",
            sandbox_id=sandbox.sandbox_id,
            template=sandbox.template_name,
            program_ids=list(sandbox.program_ids),
            prepare_s=round(sandbox.prepare_s, 3),
            recycled=place.recycled,
        )
        self._is_ready(sandbox)
        self._tell(sandbox)
        self._changed.set()

    def _is_ready(self, sandbox: Sandbox) -> None:
        """Note that a sandbox is there for its programs: it was prepared, or was others'."""
        now_s = self._clock()
        if sandbox.awaited_since_s is not None:
            self._on_waited(now_s - sandbox.awaited_since_s)
            sandbox.awaited_since_s = None
        for program_id in sandbox.program_ids:
            self._programs.sandbox_ready(program_id, sandbox.sandbox_id, sandbox.prepare_s or 0.0)
            if self._needs_it_now(program_id):
                self.table.used(now_s, program_id)

    def _prepare_failed(self, sandbox: Sandbox, error: SandboxError) -> None:
        if sandbox.stage is not Stage.PREPARING:
            return
        self.failure_counts[error.code] += 1
        is_news = error.message != sandbox.why
        again = self.table.failed(self._clock(), sandbox, error)
        log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "sandbox_failed",
            sandbox_id=sandbox.sandbox_id,
            template=sandbox.template_name,
            program_ids=list(sandbox.program_ids),
            code=error.code,
            why=error.for_log,
            again=again,
        )
        if is_news or not again:  # an engine that is down must not fill the story
            self._tell_programs(sandbox, error.message, again=again)
        self._tell(sandbox)
        self._changed.set()

    def _tell_programs(self, sandbox: Sandbox, why: str, *, again: bool) -> None:
        for program_id in sandbox.program_ids:
            self._programs.sandbox_failed(program_id, sandbox.sandbox_id, f"{why}{' (tried again)' if again else ''}")

    async def _reclaim(self, action: Reclaim) -> None:
        """Remove a sandbox; a running preparation is stopped first."""
        sandbox = action.sandbox
        preparing = self._preparing.get(sandbox.name)
        if preparing is not None:
            preparing.cancel()
            await asyncio.wait([preparing])
        is_removed = sandbox.place is None or await self._reclaim_repeatedly(
            sandbox.template.driver, sandbox.place.handle, sandbox
        )
        self._is_gone(sandbox, action.why, is_removed=is_removed)

    def _is_gone(self, sandbox: Sandbox, why: str, *, is_removed: bool = True) -> None:
        if sandbox.place is not None:
            self._reclaimed.add((sandbox.template.driver, sandbox.place.handle))
        if is_removed:
            self.reclaimed_count += 1
            log.info("sandbox_reclaimed", sandbox_id=sandbox.sandbox_id, why=why)
        self.table.reclaimed(sandbox)
        self._tell(sandbox)
        self._changed.set()

    async def _reclaim_repeatedly(self, kind: str, handle: str, sandbox: Sandbox | None) -> bool:
        """Retry until it is gone, or given up: return which. `sandbox` is None for what is in no table.

        What is ours must not stay before it ends by itself. An engine that is away is waited for.
        """
        contact = self.settings.contact
        delay_s, tries_count = contact.retry_s, 0
        while not await self._try_to_reclaim(kind, handle, sandbox):
            tries_count += not self._contacts[kind].why_lost
            may_stay = sandbox is not None and (sandbox.given or self._is_overdue(sandbox))
            if may_stay and tries_count >= self.settings.reclaim_tries_count:
                log.error("sandbox_given_up", driver=kind, handle=handle, tries_count=tries_count)
                self._given_up.add((kind, handle))
                return False
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, contact.retry_limit_s)
        return True

    def _is_overdue(self, sandbox: Sandbox) -> bool:
        """Return whether its time to live is over, and it should have ended by itself."""
        latest_s = self._clock() - self.settings.contact.resync_interval_s
        return sandbox.begun_s is not None and sandbox.begun_s + sandbox.template.ttl_s < latest_s

    async def _try_to_reclaim(self, kind: str, handle: str, sandbox: Sandbox | None) -> bool:
        why = f"not reclaimed after {self.settings.reclaim_timeout_s:g} s"
        hands = self._reclaim_hands[kind, sandbox is not None and bool(sandbox.template_name)]
        try:
            async with hands, asyncio.timeout(self.settings.reclaim_timeout_s), _only_sandbox_errors(kind):
                await self._drivers[kind].reclaim(handle)
                return True
        except SandboxError as error:
            why, for_log = error.message, error.for_log
        except TimeoutError:
            for_log = why
        if sandbox is not None:
            sandbox.why = why
        log.warning("sandbox_not_reclaimed", driver=kind, handle=handle, why=for_log)
        return False

    async def _reclaim_at_shutdown(self) -> None:
        """Remove what is being reclaimed and, by choice, all else that we made, within the time limit.

        The rest ends with its time to live.
        """
        if self.settings.reclaim_on_shutdown:
            for sandbox in list(self.table):
                if not sandbox.given:
                    self.table.reclaim(sandbox, "shutdown")
        left = [each for each in self.table if each.stage is Stage.RECLAIMING]
        if not left:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.shutdown_s):
                await asyncio.gather(*(self._reclaim_once(each) for each in left))
        left_count = sum(each.stage is not Stage.GONE for each in left)
        log.info("sandboxes_reclaimed_at_shutdown", left_count=left_count)

    async def _reclaim_once(self, sandbox: Sandbox) -> None:
        place = sandbox.place
        if place is None or await self._try_to_reclaim(sandbox.template.driver, place.handle, sandbox):
            self._is_gone(sandbox, "shutdown")

    # --- what the engines say: `thunderagent.tools.contact.Listener` --------------------------------------------------

    def found(self, kind: str, found: Sequence[Found], known: Sequence[str], *, first: bool) -> None:
        """Take over given sandboxes, record those that died unseen, and remove leftovers."""
        names = {_order_id(each) for each in self.table if each.stage is not Stage.FAILED}
        for each in found:
            if each.running and (kind, each.handle) not in self._reclaimed:
                self.appeared(kind, each)
            is_orphan = each.is_orphan_of(self._owner)
            if is_orphan if first else each.is_of(self._owner) and not is_orphan and each.sandbox_id not in names:
                self._remove_soon(kind, each.handle, is_orphan=is_orphan)
        self._reclaimed = {key for key in self._reclaimed if key[0] != kind}
        there = {(kind, each.handle) for each in found}
        self._given_up = {key for key in self._given_up if key[0] != kind or key in there}
        alive = {each.handle for each in found if not each.ended}
        for handle in known:
            if handle not in alive:
                self.ended(kind, handle, "it is no longer there")
        self._end_expired(kind)

    def _end_expired(self, kind: str) -> None:
        """Treat overdue sandboxes as ended, and remove them, even without a report."""
        for sandbox in list(self.table):
            if sandbox.template.driver != kind or sandbox.stage not in (Stage.READY, Stage.IN_USE):
                continue
            if self._is_overdue(sandbox):
                assert sandbox.place is not None
                handle = sandbox.place.handle
                self.ended(kind, handle, "its time to live is over")
                self._remove_soon(kind, handle, is_orphan=False)

    def _remove_soon(self, kind: str, handle: str, *, is_orphan: bool) -> None:
        """Remove what is in no table."""
        if (kind, handle) not in self._removing:
            assert self._group is not None
            self._removing.add((kind, handle))
            self._group.create_task(self._remove(kind, handle, is_orphan=is_orphan))

    async def _remove(self, kind: str, handle: str, *, is_orphan: bool) -> None:
        try:
            await self._reclaim_repeatedly(kind, handle, None)
        finally:
            self._removing.discard((kind, handle))
        self.orphan_count += is_orphan
        log.info("orphan_reclaimed" if is_orphan else "leftover_reclaimed", driver=kind, handle=handle)

    def appeared(self, kind: str, found: Found) -> None:
        """Take over a sandbox that an agent made and labelled."""
        key = kind, found.handle
        if not found.is_given or key in self._given_up or self.table.with_handle(*key) is not None:
            return
        try:
            self._programs.open(found.program_id)
        except ThunderAgentError as error:
            log.warning("sandbox_not_taken", driver=kind, handle=found.handle, why=error.message)
            return
        self._register(kind, found.program_id, found.place)
        log.info("sandbox_given", driver=kind, handle=found.handle, program_id=found.program_id)

    def ended(self, kind: str, handle: str, why: str) -> None:
        """Record that a sandbox ended by itself; the end of a removed one is no news."""
        sandbox = self.table.with_handle(kind, handle)
        if sandbox is None or sandbox.stage not in (Stage.READY, Stage.IN_USE):
            return
        program_ids = list(sandbox.program_ids)
        for program_id in program_ids:
            self._all_ran(sandbox, program_id)
        again = self.table.died(self._clock(), sandbox, why)
        log.warning("sandbox_died", sandbox_id=sandbox.sandbox_id, program_ids=program_ids, why=why, again=again)
        if not sandbox.given:
            self.failure_counts["sandbox_died"] += 1
            self._tell_programs(sandbox, why, again=again)
        self._tell(sandbox)
        self._changed.set()

    def watching(self, kind: str) -> None:
        """Forget running commands: their ends may have been missed."""
        for program_id in list(self._commands):
            self._commands[program_id] = {run for run in self._commands[program_id] if run[0] != kind}
            if not self._commands[program_id]:
                del self._commands[program_id]

    def command(self, kind: str, command: Command) -> None:
        """Treat a command in a sandbox that one program uses as a tool of that program.

        The tool begins with the first of several, and ends with the last.
        """
        sandbox = self.table.with_handle(kind, command.handle)
        if sandbox is None:
            return
        run = (kind, command.handle, command.run_id)
        if command.ended:
            for program_id in list(sandbox.program_ids):
                self._ran(program_id, {run})
            return
        sandbox.told = sandbox.told or sandbox.place is not None
        if sandbox.stage is Stage.IN_USE and len(sandbox.program_ids) == 1:
            (program_id,) = sandbox.program_ids
            if program_id not in self._commands:
                self._programs.tool_began(program_id, command.words)
            self._commands.setdefault(program_id, set()).add(run)

    def _all_ran(self, sandbox: Sandbox, program_id: str) -> None:
        """Treat a program's commands in a removed sandbox as ended: nobody will report their end."""
        if sandbox.place is not None:
            place = (sandbox.template.driver, sandbox.place.handle)
            self._ran(program_id, {run for run in self._commands.get(program_id, ()) if run[:2] == place})

    def _ran(self, program_id: str, ended: set[Run]) -> None:
        runs = self._commands.get(program_id, set())
        if runs and runs <= ended:
            del self._commands[program_id]
            self._programs.tool_ended(program_id)
        else:
            runs -= ended

    def handles(self, kind: str) -> list[str]:
        """Return the handles of existing sandboxes; not of those elsewhere, which nobody can inspect."""
        placed = [each for each in self.table if each.template.driver == kind and each.place is not None]
        return [] if kind == "callback" else [each.place.handle for each in placed if each.place is not None]

    def measured(self, kind: str, usage: Usage) -> None:
        """Record the sandboxes' resource use, and tell the scheduler."""
        for handle in {*usage.disk_bytes, *usage.memory_bytes}:
            sandbox = self.table.with_handle(kind, handle)
            if sandbox is not None:
                sandbox.disk_bytes = usage.disk_bytes.get(handle, sandbox.disk_bytes)
                sandbox.memory_bytes = usage.memory_bytes.get(handle, sandbox.memory_bytes)
        self._programs.measured(*self.sums())

    @property
    def engine_errors(self) -> dict[str, str]:
        """Drivers whose engine does not answer, with its last error."""
        return {kind: contact.why_lost for kind, contact in self._contacts.items() if contact.why_lost}

    def stage_counts(self) -> Mapping[tuple[str, str], int]:
        """Return the number of sandboxes, by driver and stage."""
        return Counter((sandbox.template.driver, sandbox.stage.value) for sandbox in self.table)

    def hear_times(self, on_prepared: Callable[[float], None], on_waited: Callable[[float], None]) -> None:
        """Call these with the time of each preparation, and with the time that an admitted program waited for one."""
        self._on_prepared, self._on_waited = on_prepared, on_waited

    def sums(self) -> tuple[int, int | None, int | None]:
        """Return the number of sandboxes, and their disk and memory use as far as measured."""
        alive = [sandbox for sandbox in self.table if sandbox.place is not None]
        disk = [sandbox.disk_bytes for sandbox in alive if sandbox.disk_bytes is not None]
        memory = [sandbox.memory_bytes for sandbox in alive if sandbox.memory_bytes is not None]
        return len(alive), sum(disk) if disk or not alive else None, sum(memory) if memory or not alive else None


def _is_agents(sandbox: Sandbox) -> bool:
    """Return whether an agent has this sandbox, or knows it and waits for its first turn."""
    return sandbox.stage is Stage.IN_USE or (sandbox.stage is Stage.READY and sandbox.told)


def _order_id(sandbox: Sandbox) -> str:
    """Return the engine's name of a sandbox: each failed attempt has a name of its own."""
    return f"{sandbox.name}-{sandbox.attempt_count}" if sandbox.attempt_count else sandbox.name


@asynccontextmanager
async def _only_sandbox_errors(kind: str) -> AsyncIterator[None]:
    """Log a driver's unexpected error and raise `SandboxError` instead: one sandbox must not end the proxy."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:
        log.exception("sandbox_driver_failed", driver=kind)
        raise SandboxError(f"{kind} failed unexpectedly") from error
