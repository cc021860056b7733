"""A scheduler with a store: it stands by and follows the log, takes the lock when that is free, leads, and steps down.

Theory of operation
===================
A standby runs all of a scheduler except its grants: replicas are polled, and gateways wait to connect. It reads the
store many times a second, follows the log into `Kept`, and watches an idle connection to the leader's port. When that
ends, and nobody listens there any more, the leader's process is gone, and its lock is not waited for. Who has just
given up the lock lets another standby take it first. Who has the lock reads the log to its end (nobody else can write
there any more), lets the core adopt the programs, and lets gateways in.

The leader writes its `Journal` in batches, and renews the lock. **A store that does not answer is no reason to stop**:
nobody else can lead without it either. When it is back everything is written again, because it may have lost data. But
a store that says that the lock is another's is a reason, and so is a gateway that knows a higher epoch. A scheduler
that steps down is over: it writes nothing more, and its owner starts again as a standby.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

import msgspec
import structlog
from aiohttp import web

from thunderagent.errors import BadFrameError, FencedError, OperationRefusedError, StoreError
from thunderagent.proxy.admin.cell import CellReport
from thunderagent.runtime import Runtime
from thunderagent.runtime.learned_state import LearnedState
from thunderagent.scale import messages
from thunderagent.scale.leader.candidacy import Candidacy
from thunderagent.scale.leader.inheritance import go_on_from, let_go
from thunderagent.scale.leader.kept import Kept, decode
from thunderagent.scale.leader.store import Seen, Store, believed
from thunderagent.scale.leader.watch import LeaderWatch
from thunderagent.scale.leader.writing import Writing
from thunderagent.scale.scheduler.links import Links

log = structlog.get_logger("thunderagent.scale")

LOOK_S = 0.02
"""How often a standby reads the store."""

READ_COUNT = 8
"""Log entries that are read without yielding to others: 10 ms."""

RETRY_S = 0.1

FINISH_LIMIT_S = 1.0
"""Limit for the last write when giving up the lock."""

LEAVE_LIMIT_S = 2.0
"""Limit for serving gateways after giving up the lock, until they have left for another scheduler."""


class Leading:
    """The role of a scheduler in its cell. All methods belong to one event loop."""

    def __init__(
        self, store: Store, runtime: Runtime, links: Links, learned: LearnedState, candidacy: Candidacy, *, url: str
    ) -> None:
        """Start as standby. Others find this scheduler's process at `url`; empty: they cannot check it."""
        self.role = "standby"
        """`standby`, `leader`, or `over`."""
        self.over = asyncio.Event()
        """Set once this scheduler has to start over."""
        self.epoch = 0
        self.owner = f"{links.gateways.leader_id:x}-{secrets.token_hex(4)} {url}"
        self.store_answers = True
        self.kept = Kept()
        self.writing = Writing(store, self.owner, runtime, links, learned, self._write_failed)
        self.took_over_s: float | None = None
        """Time from getting the lock until gateways were let in."""
        self._store = store
        self._runtime = runtime
        self._links = links
        self._learned = learned
        self._lock_s = candidacy.lock_s
        self._candidacy = candidacy
        self._at = "0"
        self._epoch_seen = 0
        self._damage = ""
        """As last logged."""
        self._watch = LeaderWatch(self._candidacy.died, lambda: self._at)
        self._asking: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._since_s: float | None = None
        self._has_standby = False
        self._taking = asyncio.Lock()
        """Held while the lock is requested or given up."""
        runtime.stands_by = True

    def __repr__(self) -> str:
        return f"<Leading: {self.role}, epoch {self.epoch}, {self.kept!r}>"

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for operators and for gateways."""
        return [
            *(route for route in self._links.routes() if route.path == messages.PATH),
            web.get("/internal/leader", self._tell),
            web.post("/internal/handover", self._hand_over),
        ]

    async def run(self) -> None:
        """Stand by, then lead, until it is over or cancelled."""
        async with asyncio.TaskGroup() as group:
            links = group.create_task(self._links.run())
            try:
                await self._stand_by()
                if self.role == "standby":
                    await self._lead()
            finally:
                self._watch.stop()
                links.cancel()

    # --- standing by

    async def _stand_by(self) -> None:
        now_s = self._runtime.now_s
        said_s, told, followed = -self._lock_s, "", ""
        for warning in await self._warnings():
            log.warning("store_settings", warning=warning)
        while not self.epoch and self.role == "standby":
            seen = await self._look()
            if seen is None:
                await asyncio.sleep(RETRY_S)
                continue
            if seen.has_more:
                continue
            if seen.owner and seen.owner not in (followed, self.owner):
                followed = seen.owner
                log.info("stands_by", leader=followed.partition(" ")[2], epoch=seen.epoch)
            self._watch.follow(seen.owner)
            expected = self._candidacy.may_take(seen.owner, seen.epoch, now_s())
            if seen.owner == self.owner:  # it was taken, and the answer was lost
                expected = self.owner
            try:
                if expected is not None:
                    await self._take(expected, seen)
                elif now_s() - said_s >= self._lock_s / 3:
                    said_s = now_s()
                    await self._store.stand_by(self.owner)
            except StoreError as error:  # for example if it may be read but not written
                if error.message != told:
                    told = error.message
                    log.warning("lock_not_taken", why=told)
            if not self.epoch:
                await asyncio.sleep(LOOK_S)

    async def _take(self, expected: str, seen: Seen) -> None:
        """Take the lock, unless this scheduler leaves, or another one comes first."""
        if self._candidacy.yields(seen.owner, seen.epoch) and await self._store.has_standby(self.owner):
            return
        async with self._taking:
            if self.role == "standby":
                self.epoch = await self._store.take(self.owner, expected, self.kept.epoch)

    async def _warnings(self) -> list[str]:
        try:
            return await self._store.warnings()
        except StoreError as error:
            log.warning("store_unreachable", why=error.message)
            return []

    async def _look(self) -> Seen | None:
        """Read what is new in the store; None if it does not answer."""
        try:
            seen = await self._store.look(self._at)
        except StoreError as error:
            self._candidacy.failed()
            self._answers(False, error)
            return None
        self._answers(True)
        epoch = believed(seen.epoch, self.kept.epoch)
        if epoch < seen.epoch:
            seen = seen._replace(epoch=epoch, damage=f"the epoch is {seen.epoch} after {self.kept.epoch}: not counted")
        if seen.damage and seen.damage != self._damage:
            log.error("store_damaged", what=seen.damage)
        self._damage = seen.damage
        if epoch < self._epoch_seen and not seen.damage:
            self.kept.is_torn = True
        self._epoch_seen = epoch
        for number, (where, data) in enumerate(seen.entries, 1):
            if number % READ_COUNT == 0:
                await asyncio.sleep(0)
            self._at = where
            try:
                self.kept.take(decode(data), self._runtime.now_s())
            except (BadFrameError, msgspec.ValidationError) as error:
                log.warning("entry_not_read", where=where, why=str(error))
        return seen

    def _answers(self, answers: bool, error: StoreError | None = None) -> None:
        if answers is not self.store_answers:
            self.store_answers = answers
            if answers:
                log.warning("store_is_back", role=self.role)
                self.writing.tell_all()  # it may have come back with older data
            else:
                log.error("store_is_away", role=self.role, why=error.message if error is not None else "")

    # --- leading

    async def _lead(self) -> None:
        self.role, self._since_s = "leader", self._runtime.now_s()
        self._watch.stop()
        async with asyncio.TaskGroup() as group:
            self._renewing = group.create_task(self._renew())
            await self._take_over()
            if self.role == "over":  # it had to step down before it granted anything
                self._renewing.cancel()
                return
            self.took_over_s = self._runtime.now_s() - self._since_s
            log.warning(
                "leads", epoch=self.epoch, programs_count=self.kept.programs_count, took_s=round(self.took_over_s, 3)
            )
            beside = let_go(self.kept), self.writing.run(), self.writing.note_learned()
            tasks = [self._renewing, *(group.create_task(each) for each in beside)]
            self.kept = Kept()
            await self.over.wait()
            for task in tasks:
                task.cancel()

    async def _take_over(self) -> None:
        """Continue from what was kept; then let gateways in."""
        while (seen := await self._look()) is None or seen.entries:
            if seen is None:
                await asyncio.sleep(RETRY_S)
        await self._links.until_polled()
        kept, gateways = self.kept, self._links.gateways
        with suppress(StoreError):
            if self._at not in ("0", await self._store.position()):
                kept.is_torn = True  # it came back with older data, and nobody has written since
        self._may_miss(kept.is_torn or kept.sums.may_miss)
        await go_on_from(kept, self._runtime, self._learned, gateways)
        if self.role == "over":
            return
        gateways.on_higher = self._heard_higher
        self.writing.begin(self.epoch, kept.learned)
        self._links.lead(self.epoch, [each for each, gateway in kept.gateways.items() if gateway.is_there])

    def _may_miss(self, may_miss: bool) -> None:
        """Say that turns may be missing in the counts: an earlier leader counted them in what the store has lost."""
        if may_miss and not self.writing.counts_may_miss:
            self.writing.counts_may_miss = True
            log.warning("counts_may_miss_turns", epoch=self.epoch, why="the store had lost data")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lock_s / 3)
            await self._check_lock()

    async def _check_lock(self) -> None:
        """Renew the lock, or step down; go on if the store does not answer."""
        try:
            kept = await self._store.renew(self.owner, self.epoch)
            self._answers(True)
            self._renewed(kept)
            self._has_standby = await self._store.has_standby(self.owner)
        except StoreError as error:
            self._answers(False, error)

    def _renewed(self, kept: int) -> None:
        """Handle the store's answer to a renewal."""
        if not kept:
            self._step_down("the lock is another's")
        elif kept == 2:
            log.error("store_lost_its_data", epoch=self.epoch)
            self.writing.tell_all()

    def _write_failed(self, error: StoreError | None) -> None:
        """Handle the result of a write: None is success."""
        if isinstance(error, FencedError):
            self._step_down("its epoch is over")
        else:
            self._answers(error is None, error)

    def _step_down(self, why: str) -> None:
        if self.role != "over":
            log.error("steps_down", epoch=self.epoch, why=why)
        self._end()

    def _end(self) -> None:
        self.role = "over"
        self.writing.end()
        self.over.set()

    def _heard_higher(self, epoch: int) -> None:
        """Ask the store who is right, if a gateway knows a higher epoch."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(epoch))

    async def _ask(self, epoch: int) -> None:
        try:
            kept = await self._store.renew(self.owner, self.epoch)
            if kept:  # the store has lost an epoch: catch up
                self._may_miss(True)
                self._renewed(kept)
                kept = await self.writing.go_on_in(epoch + 1)
        except StoreError:
            kept = 0
        if not kept:
            self._step_down(f"another scheduler leads in epoch {epoch}")
        elif self.role == "leader":
            self.epoch = epoch + 1
            self._links.gateways.leads_in(self.epoch)

    # --- handing over

    async def give_up(self) -> None:
        """Write the rest, give up the lock, and serve gateways until they have left for the next leader."""
        if self.role == "standby":
            await self._stand_by_no_more()
        if self.role != "leader":
            return
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(FINISH_LIMIT_S):
                await self.writing.finish()
        if self._renewing is not None:  # it would find the lock empty, and step down, or take a Lease again
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        with suppress(StoreError, TimeoutError):
            await self._store.give_up(self.owner)  # even if not all was written: gateways repeat the rest
            log.warning("gives_up", epoch=self.epoch)
            if self._has_standby:
                async with asyncio.timeout(LEAVE_LIMIT_S):
                    await self._links.until_left()
        self._end()

    async def _stand_by_no_more(self) -> None:
        """Stop taking the lock; it may already be ours, whatever was answered, so it is given up."""
        self.role = "over"
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(FINISH_LIMIT_S), self._taking:
                await self._store.give_up(self.owner)
        self.over.set()

    async def _hand_over(self, request: web.Request) -> web.Response:
        """Give up the lock, if a standby can take it. Raises `OperationRefusedError`."""
        if self.role != "leader":
            raise OperationRefusedError("this scheduler does not lead")
        try:
            self._has_standby = await self._store.has_standby(self.owner)
        except StoreError as error:
            raise OperationRefusedError(f"no scheduler can take over: {error.message}") from error
        if not self._has_standby and "force" not in request.query:
            raise OperationRefusedError("no scheduler stands by; ?force=1 hands over anyway")
        epoch = self.epoch
        self._asking = asyncio.create_task(self.give_up())
        return web.json_response({"gave_up_epoch": epoch})

    async def _tell(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler's signature
        """Report this scheduler's role, and how far its log lags."""
        return web.json_response(
            {
                **self.report().model_dump(),
                "kept_programs_count": self.kept.programs_count,
                "took_over_s": self.took_over_s,
                "unwritten_turns_count": self.writing.forgone_count,
            }
        )

    def report(self) -> CellReport:
        """Return this scheduler's role."""
        lags_s = sorted(self.writing.lags_s)
        return self._links.report().model_copy(
            update={
                "role": self.role,
                "epoch": self.epoch or self.kept.epoch,
                "has_store": True,
                "store_answers": self.store_answers,
                "has_standby": self._has_standby,
                "counts_may_miss": self.writing.counts_may_miss,
                "log_lag_p50_s": lags_s[len(lags_s) // 2] if lags_s else None,
                "log_lag_p99_s": lags_s[len(lags_s) * 99 // 100] if lags_s else None,
            }
        )
