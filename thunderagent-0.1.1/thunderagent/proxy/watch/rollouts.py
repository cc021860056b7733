"""The rollouts of this process: their table, who settles, packs and writes them, and the end of programs.

A turn is in the table before its task ends, but not yet settled (`rollouts/table.py`). All that wait are sent to a
process of their own each `SEND_S` (`settling.py`), those of a program together, and at once if somebody reads its
rollout. If the process dies, another one gets them again. If more wait than the table allows, turns are recorded
without their tokens.

Packing and writing are done on one thread, one thing after the other; what it cannot do (a full disk) leaves the
records in memory, where they count, and is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import time
from typing import Literal, NamedTuple, Protocol

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import Decision, Event, ProgramReleased, Release
from thunderagent.proxy.watch.settling import SettlingProcess
from thunderagent.rollouts.records import Batch, SettledBatch, Turn, block_of, turns_in
from thunderagent.rollouts.segments import Segments, Stored
from thunderagent.rollouts.table import PACKED_FROM_BYTES, Entry, Table

log = structlog.get_logger("thunderagent.rollouts")

MAX_WARNINGS_COUNT = 1000
"""Replicas and APIs of which a warning is logged."""

SEND_S = 0.5
"""How often turns that have ended are sent to be settled: those of a program together cost less."""
HASTE_S = 0.05
"""The same while much waits."""
SEND_COUNT = 32
"""Of so many programs at once; then what else waits for the loop goes first."""
SMALL_BYTES = 32 * 1024
"""A rollout of fewer bytes is read at once."""
MAX_DEATHS_COUNT = 3
"""If so many processes in a row die of the same turns, these have no records."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What is recorded, and how much is kept. The defaults are in the configuration only."""

    logprobs: bool
    folder: Path | None
    memory_bytes: int
    disk_bytes: int
    keep_s: float
    turns_count: int
    prefix: Literal["supply", "asked"] | None = None
    """Whose turns are supplied with exact prompts."""


class _Parcel(NamedTuple):
    """Work for the thread: records to pack, and what is packed already, if it is to be written."""

    entry: Entry
    frames: list[bytes]
    blocks: list[bytes]
    writes: bool


class Programs(Protocol):
    """Reports the ends of programs."""

    def observe(self, observer: Callable[[Event, Sequence[Decision]], None], *about: type) -> Callable[[], None]:
        """Call `observer` with each event that it is `about`; return a function that ends that."""


class Rollouts:
    """Records turns, and says what was recorded."""

    def __init__(self, settings: RolloutSettings, programs: Programs, clock: Callable[[], float] = time) -> None:
        """Begin with what earlier processes left on disk. Raises `ConfigurationError` if the folder cannot be used."""
        self.settings = settings
        self.clock = clock
        self.table = Table(memory_bytes=settings.memory_bytes, keep_s=settings.keep_s, turns_count=settings.turns_count)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._wanted: dict[int, Entry] = {}
        """Rollouts to pack, once the thread has done what it does."""
        self._unstored: dict[int, Entry] = {}
        """Those that could not be written: again after the next one that can, or at the end."""
        self._works = False
        self._is_closed = False
        self._settling = SettlingProcess(self._settled, self._settling_ended)
        self._timer: asyncio.TimerHandle | None = None
        """For the next time that turns are sent."""
        self._sent: dict[int, Entry] = {}
        """Rollouts of which turns are being settled, by number, in that order."""
        self._numbers_count = 0
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        """Who waits for that, by number."""
        self._warned: set[tuple[str, str, str]] = set()
        self._swept_count = 0
        self._ended = asyncio.Event()
        self._segments: Segments | None = None
        if settings.folder is not None:
            try:
                self._segments = Segments(settings.folder, settings.disk_bytes)
                for rollout, stored in sorted(self._segments.found(), key=lambda each: each[0].seq):
                    self.table.found(rollout, stored)
            except OSError as error:
                raise ConfigurationError(f"rollout_dir: {error}") from error
        programs.observe(self._heard, Release)

    # --- turns that wait to be settled

    def attend(self, entry: Entry) -> None:
        """Look after a rollout of which a turn was taken: it ended, nothing waited before, or much waits now."""
        if entry.rollout.ended:
            self._looked_at(entry)
        if self.table.is_filling and self._timer is not None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(0, self._send_waiting)
        self._send_soon()

    def _send_soon(self) -> None:
        if self._timer is None:
            delay_s = HASTE_S if self.table.is_filling else SEND_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._send_waiting)

    def _send_waiting(self) -> None:
        """Send all turns that wait, and say which programs have ended."""
        self._timer = None
        if self._is_closed:
            return
        if self._settling.is_up:
            self._send_some([entry for entry in self.table.unsettled.values() if not entry.sent])
            return
        self._settling.start()
        self._send_again()

    def _send_some(self, waiting: list[Entry], start: int = 0) -> None:
        end, table, settling = start + SEND_COUNT, self.table, self._settling
        if self._is_closed:
            return
        if settling.is_up:
            settling.send(self._batches(entry for entry in waiting[start:end] if entry.taken and not entry.sent))
            if end < len(waiting):
                asyncio.get_running_loop().call_soon(self._send_some, waiting, end)
                return
            gone, table.gone = table.gone, []
            settling.send(
                Batch(entry.number, 0, 0, is_full=False, is_last=True, is_new=False, blocks=[], frames=[], turns=[])
                for entry in gone
                if entry.settled_by == settling.number and not entry.taken
            )
        self._send_again()

    def _send_again(self) -> None:
        """Send what waits then, too, if anything does."""
        self._settling.end_if_silent()
        if self.table.unsettled or self.table.gone:
            self._send_soon()

    def _batches(self, entries: Iterable[Entry]) -> list[Batch]:
        found = []
        for entry in entries:
            if not entry.number:
                self._numbers_count += 1
                entry.number = self._numbers_count
            self._sent[entry.number] = entry
            found.append(self.table.send(entry, self._settling.number))
        return found

    def _settled(self, batch: SettledBatch) -> None:
        """Note what became of turns that were sent."""
        entry = self._sent.pop(batch.number, None)
        if entry is not None and entry.sent:  # else it was dropped
            self._was_settled(entry, self.table.settled(entry, batch))
        self._end_waits(batch.number)

    def _settling_ended(self) -> None:
        """Have what was sent wait again. The first that has no answer is taken to be the cause."""
        sent, self._sent = self._sent, {}
        for number, entry in sent.items():
            self.table.died(entry)
            if entry is next(iter(sent.values())):
                entry.deaths_count += 1
                if entry.deaths_count >= MAX_DEATHS_COUNT:
                    count = self.table.give_up(entry)
                    why = f"{count} turns of which {MAX_DEATHS_COUNT} processes died"
                    log.error("rollout_turn_lost", program_id=entry.rollout.program_id, why=why)
            self._end_waits(number)
        self._send_soon()

    def _end_waits(self, number: int) -> None:
        for waiter in self._waiters.pop(number, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def settled(self, entry: Entry) -> None:
        """Have all turns of a rollout settled that have ended by now."""
        while entry.taken or entry.sent:
            if not self._settling.is_up:
                self.settle(entry)
                return
            if not entry.sent:
                self._settling.send(self._batches([entry]))
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(entry.number, []).append(waiter)
            await waiter

    async def settle_together(self, entries: Iterable[Entry]) -> None:
        """Have several rollouts settled in one round trip, if the process is up; otherwise they wait for who reads."""
        if self._settling.is_up:
            await asyncio.gather(*map(self.settled, entries))

    def settle(self, entry: Entry) -> None:
        """Settle the turns of a rollout here."""
        if entry.taken and not entry.sent:
            self._was_settled(entry, self.table.settle(entry))

    def _was_settled(self, entry: Entry, failed: list[str]) -> None:
        for why in failed:
            log.error("rollout_turn_lost", program_id=entry.rollout.program_id, why=why)
        if self.table.lacks:
            lacks, self.table.lacks = self.table.lacks, []
            for each in lacks:
                self._warn(each)
        if not entry.taken:
            self._packed_if_much(entry)

    def _warn(self, lack: tuple[str, str, str]) -> None:
        """Say once of each replica and API that what clients get there cannot be trained on."""
        if lack not in self._warned and len(self._warned) < MAX_WARNINGS_COUNT:
            self._warned.add(lack)
            replica_id, path, missing = lack
            log.warning("rollout_incomplete", replica_id=replica_id, path=path, missing=missing)

    def lost(self, entry: Entry) -> None:
        """Note that a turn which an engine got cannot be recorded."""
        self.table.lost(entry)
        self._looked_at(entry)

    def _looked_at(self, entry: Entry) -> None:
        """Have a rollout packed if there is enough of it, or if it has ended."""
        if entry.rollout.ended:
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()
            self._sweep()
            if self.table.gone:
                self._send_soon()
        if not entry.taken and not entry.sent:
            self._packed_if_much(entry)

    def _packed_if_much(self, entry: Entry) -> None:
        if entry.frames_bytes >= PACKED_FROM_BYTES or (entry.rollout.ended and self._segments is not None):
            self._pack(entry)

    def _heard(self, event: Event, decisions: Sequence[Decision]) -> None:
        outcome = event.outcome if isinstance(event, ProgramReleased) else ""
        for decision in decisions:
            if type(decision) is not Release:
                continue
            entry = self.table.ended(decision.program_id, decision.generation, outcome, self.clock())
            if entry is not None:
                self._looked_at(entry)

    # --- the thread

    def _sweep(self) -> None:
        """Delete files in which nothing is kept any more, once all that was written is known here."""
        if self._segments is None or self._works or self._is_closed:
            return
        if self.table.dropped_count != self._swept_count:
            self._swept_count = self.table.dropped_count
            self._thread.submit(self._segments.delete_except, self.table.segments)

    def _pack(self, entry: Entry) -> None:
        """Have records packed and written: at once, or after what the thread does now, together with others."""
        self._wanted[id(entry)] = entry
        if not self._works:
            self._work_on()

    def _work_on(self) -> None:
        """Give the thread all that is wanted."""
        wanted, self._wanted = self._wanted, {}
        parcels = [self._parcel(entry) for entry in wanted.values()]
        parcels = [each for each in parcels if each.frames or (each.writes and each.blocks)]
        self._works = bool(parcels)
        if parcels:
            self._thread.submit(self._work, asyncio.get_running_loop(), parcels)
        else:
            self._sweep()

    def _parcel(self, entry: Entry) -> _Parcel:
        # What is not settled yet would be missing in the file: settling packs anew.
        writes = entry.rollout.ended and self._segments is not None and entry.stored is None
        writes = writes and not entry.taken and not entry.sent
        return _Parcel(entry, self.table.to_pack(entry, writes=writes), list(entry.blocks), writes)

    def _work(self, loop: asyncio.AbstractEventLoop, parcels: list[_Parcel]) -> None:
        done = [self._packed(each) for each in parcels]
        loop.call_soon_threadsafe(self._was_done, done)

    def _packed(self, parcel: _Parcel) -> Callable[[], None]:
        """Pack records, and write them; return what the table is to be told then."""
        entry, frames, blocks = parcel.entry, parcel.frames, parcel.blocks
        try:
            block = block_of(frames) if frames else b""
            if not parcel.writes or self._segments is None:
                return partial(self.table.packed, entry, len(frames), block)
            stored, deleted = self._segments.append(entry.rollout, [*blocks, block] if block else blocks)
        except OSError as error:
            return partial(self._was_not_stored, entry, str(error))
        return partial(self._was_stored, entry, stored, deleted)

    def _was_done(self, done: list[Callable[[], None]]) -> None:
        for tell in done:
            tell()
        self._work_on()

    def _was_stored(self, entry: Entry, stored: Stored, deleted: list[int]) -> None:
        self.table.stored(entry, stored)
        for number in deleted:
            self.table.drop_segment(number)
        self._wanted |= self._to_store_again()

    def _was_not_stored(self, entry: Entry, why: str) -> None:
        effect = "it is lost" if self._is_closed else "it stays in memory until another one can be stored"
        log.error("rollout_not_stored", program_id=entry.rollout.program_id, why=why, effect=effect)
        self._unstored = {**self._to_store_again(), id(entry): entry}

    def _to_store_again(self) -> dict[int, Entry]:
        """Take out those that could not be written, and were not dropped since."""
        unstored, self._unstored = self._unstored, {}
        return {number: entry for number, entry in unstored.items() if self.table.keeps(entry)}

    def close(self) -> None:
        """Write what is under way, and what is wanted; end the thread."""
        self._is_closed = True
        self._settling.close()
        for entry in self._sent.values():
            self.table.died(entry)
        for entry in list(self.table.unsettled.values()):
            self.settle(entry)
        self._thread.shutdown(wait=True)
        wanted, self._wanted = self._wanted | self._to_store_again(), {}
        for entry in wanted.values():
            self._packed(self._parcel(entry))()
        if self._segments is not None:
            self._segments.close()

    # --- reading

    async def turns(self, entry: Entry) -> list[Turn]:
        """Return the turns of a rollout. Raises `ValueError` or `OSError` if its file is broken, or was deleted."""
        await self.settled(entry)
        frames, blocks, stored, segments = list(entry.frames), list(entry.blocks), entry.stored, self._segments

        def read() -> list[Turn]:
            found = segments.read(stored) if stored is not None and segments is not None else blocks
            return list(turns_in(found, frames))

        return read() if self.is_small(entry) else await asyncio.to_thread(read)

    def is_small(self, entry: Entry) -> bool:
        """Return whether a rollout is in memory, and read faster than by a thread."""
        return entry.stored is None and entry.size_bytes < SMALL_BYTES

    async def until_ended(self, program_id: str, within_s: float) -> Entry | None:
        """Return a program's rollout once it has ended, or as it is when the time is over."""
        try:
            async with asyncio.timeout(within_s):
                while (entry := self.table.find(program_id)) is None or not entry.rollout.ended:
                    await self._ended.wait()
        except TimeoutError:
            pass
        return self.table.find(program_id)


class RolloutCollector(Collector):
    """Reports what is recorded."""

    def __init__(self, rollouts: Rollouts) -> None:
        """Read `rollouts`."""
        self._rollouts = rollouts

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        table = self._rollouts.table
        links = CounterMetricFamily(
            "thunderagent_rollout_turns",
            "Recorded turns, by how their prompt relates to earlier tokens: extends, drift, rewritten, root, unknown.",
            labels=("link",),
        )
        for link, count in sorted({"root": 0, **table.links}.items()):
            links.add_metric((link,), count)
        yield links
        yield CounterMetricFamily(
            "thunderagent_rollout_incomplete_turns",
            "Recorded turns that lack tokens, or log probabilities that were asked for.",
            value=table.incomplete_count,
        )
        yield CounterMetricFamily(
            "thunderagent_rollouts_dropped",
            "Ended rollouts that were dropped, for any reason.",
            value=table.dropped_count,
        )
        kept = GaugeMetricFamily(
            "thunderagent_rollouts_kept",
            "Rollouts that can be read, by whether they are live or ended.",
            labels=("state",),
        )
        kept.add_metric(("live",), table.live_count)
        kept.add_metric(("ended",), table.ended_count)
        yield kept
        yield GaugeMetricFamily(
            "thunderagent_rollout_memory_bytes", "What rollouts take in memory.", value=table.size_bytes
        )
        yield GaugeMetricFamily(
            "thunderagent_rollout_unsettled_bytes",
            "The part of it that turns take which are recorded, but not yet decoded, compared and counted.",
            value=table.taken_bytes,
        )
