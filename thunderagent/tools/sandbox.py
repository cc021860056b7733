"""The life of a sandbox as a table, who uses it, and the plan: what to prepare and what to reclaim now. Pure.

Theory of operation
===================
                      begin              prepared             use
        REQUESTED ───────────▶ PREPARING ─────────▶ READY ─────────▶ IN_USE
          │  ▲  ╲               │ │  │                │ │               │ │
          │  ╰── ╲ ── retry ────╯ │  │      ╭─ retry ─╯ │               │ │ died
          │       ╲ fail          │  │ fail             │               │ ╰──────▶ FAILED ──drop──▶ GONE
          │        ╰──────────────┼──┴──▶ FAILED        │ reclaim       │ reclaim
          ╰─drop─▶ GONE           ╰───── reclaim ──▶ RECLAIMING ◀───────╯
                                                        ╰── reclaimed ──▶ GONE

A sandbox belongs to programs, mostly one; with a share key to several. It goes when the last of them has ended. One
that belongs to nobody is kept warm: the first program that asks for the same thing gets it.

`SandboxTable` is told what happened and says what to do. It has no clock and awaits nothing; whoever carries out its
plan tells it how that ended. `plan` goes through those that are wanted in the order in which they are needed. When a
program will be admitted is known only about; so a preparation is due when that time, less what nine of ten
preparations of this template took, is over. Idle hands begin sooner, but those that are not due yet leave a part of
the caps to those that may come and are (`early_ratio`). Who is due and finds no room takes that of a warm sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import cast

from thunderagent.errors import LifecycleError, SandboxEngineError, SandboxError, SandboxRefusedError
from thunderagent.programs.histogram import LogHistogram, geometric_edges
from thunderagent.tools.base import Place
from thunderagent.tools.template import DriverKind, Template

PREPARE_EDGES_S = geometric_edges(0.01, 1.15, 80)
"""From 10 ms to 12 minutes."""

PREPARE_QUANTILE = 0.9
FAILED_KEPT_COUNT = 256
"""Failed sandboxes that are remembered for their programs; the oldest are forgotten."""


class Stage(StrEnum):
    """Where a sandbox is in its life."""

    REQUESTED = "requested"
    PREPARING = "preparing"
    READY = "ready"
    IN_USE = "in_use"
    RECLAIMING = "reclaiming"
    FAILED = "failed"
    GONE = "gone"


class Step(StrEnum):
    """What moves a sandbox from one stage to the next."""

    BEGIN = "begin"
    PREPARED = "prepared"
    USE = "use"
    RETRY = "retry"
    FAIL = "fail"
    RECLAIM = "reclaim"
    RECLAIMED = "reclaimed"
    DROP = "drop"


STEPS: dict[tuple[Stage, Step], Stage] = {
    (Stage.REQUESTED, Step.BEGIN): Stage.PREPARING,
    (Stage.REQUESTED, Step.FAIL): Stage.FAILED,
    (Stage.REQUESTED, Step.DROP): Stage.GONE,
    (Stage.PREPARING, Step.PREPARED): Stage.READY,
    (Stage.PREPARING, Step.RETRY): Stage.REQUESTED,
    (Stage.PREPARING, Step.FAIL): Stage.FAILED,
    (Stage.PREPARING, Step.RECLAIM): Stage.RECLAIMING,
    (Stage.READY, Step.USE): Stage.IN_USE,
    (Stage.READY, Step.RETRY): Stage.REQUESTED,
    (Stage.READY, Step.FAIL): Stage.FAILED,
    (Stage.READY, Step.RECLAIM): Stage.RECLAIMING,
    (Stage.IN_USE, Step.FAIL): Stage.FAILED,
    (Stage.IN_USE, Step.RECLAIM): Stage.RECLAIMING,
    (Stage.RECLAIMING, Step.RECLAIMED): Stage.GONE,
    (Stage.FAILED, Step.DROP): Stage.GONE,
}

ALIVE = frozenset({Stage.PREPARING, Stage.READY, Stage.IN_USE, Stage.RECLAIMING})
"""Stages in which there may be something at the engine."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What sandboxes may take, all together; None is no cap."""

    sandbox_count: int = 64
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    hands_count: int = 4
    """Preparations at a time."""
    attempts_count: int = 3
    backoff_s: float = 1.0
    """Time to the second attempt; doubled for each further one."""
    backoff_limit_s: float = 30.0
    early_ratio: float = 0.75
    """Part of the caps that preparations may take that are not due yet."""


class Sandbox:
    """One sandbox. Only the table writes here."""

    __slots__ = (
        "attempt_count",
        "begun_s",
        "disk_bytes",
        "given",
        "memory_bytes",
        "place",
        "program_ids",
        "ready_s",
        "requested_s",
        "retry_at_s",
        "sandbox_id",
        "share_key",
        "stage",
        "template",
        "template_name",
        "used_s",
        "why",
    )

    def __init__(self, sandbox_id: str, template: Template, template_name: str, requested_s: float) -> None:
        """Ask for one that belongs to nobody yet."""
        self.sandbox_id = sandbox_id
        self.template = template
        self.template_name = template_name
        self.requested_s = requested_s
        self.program_ids: dict[str, None] = {}
        self.share_key = ""
        self.stage = Stage.REQUESTED
        self.given = False
        """Made by somebody else, who gave it to us to reclaim."""
        self.attempt_count = 0
        self.retry_at_s = 0.0
        self.begun_s: float | None = None
        self.ready_s: float | None = None
        self.used_s: float | None = None
        self.place: Place | None = None
        self.why = ""
        """The last thing that went wrong with it."""
        self.disk_bytes: int | None = None
        self.memory_bytes: int | None = None

    def __repr__(self) -> str:
        owners = ",".join(self.program_ids) or "nobody"
        return f"<Sandbox {self.sandbox_id} from {self.template_name or 'a request'}: {self.stage}, of {owners}>"

    @property
    def is_warm(self) -> bool:
        """Whether it belongs to nobody."""
        return not self.program_ids and self.stage is not Stage.RECLAIMING

    @property
    def prepare_s(self) -> float | None:
        """How long its last preparation took; None before it was ready, and of one that was given."""
        return self.ready_s - self.begun_s if self.ready_s is not None and self.begun_s is not None else None

    def advance(self, step: Step) -> None:
        """Move along the table. Raises `LifecycleError` where it has no such arrow."""
        following = STEPS.get((self.stage, step))
        if following is None:
            raise LifecycleError(f"a sandbox that is {self.stage} knows no {step}: {self!r}")
        self.stage = following


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make this sandbox."""

    sandbox: Sandbox


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Remove this sandbox; if it is still being prepared, stop that."""

    sandbox: Sandbox
    why: str


Action = Prepare | Reclaim


class SandboxTable:
    """Every sandbox that is known, by its id, by its programs and by its handle."""

    def __init__(self, caps: Caps, new_id: Callable[[], str]) -> None:
        """Begin empty; `new_id` gives names that were never used."""
        self.caps = caps
        self.sandboxes: dict[str, Sandbox] = {}
        self._new_id = new_id
        self._of_program: dict[str, dict[str, Sandbox]] = {}
        self._by_handle: dict[tuple[str, str], Sandbox] = {}
        self._by_share_key: dict[str, Sandbox] = {}
        self._failed: dict[str, Sandbox] = {}
        self._prepare_times_s: dict[str, LogHistogram] = {}
        self._prepare_guess_s = LogHistogram(PREPARE_EDGES_S)
        self._warm: dict[str, tuple[Template, int]] = {}
        self._to_reclaim: list[Reclaim] = []

    def __repr__(self) -> str:
        return f"<SandboxTable: {len(self.sandboxes)} sandboxes of {len(self._of_program)} programs>"

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self.sandboxes.values())

    def of_program(self, program_id: str) -> list[Sandbox]:
        """Return a program's sandboxes, the oldest first."""
        return list(self._of_program.get(program_id, {}).values())

    def with_handle(self, kind: str, handle: str) -> Sandbox | None:
        """Return the sandbox that a driver calls so."""
        return self._by_handle.get((kind, handle))

    # --- asking -----------------------------------------------------------------------------------------------------

    def keep_warm(self, templates: Mapping[str, tuple[Template, int]]) -> None:
        """Say how many of which template are to be kept ready for whoever asks."""
        self._warm = dict(templates)

    def request(
        self, now_s: float, template: Template, template_name: str, program_id: str, share_key: str = ""
    ) -> Sandbox:
        """Ask for a sandbox for a program: the one of that key, else a warm one, else a new one.

        Raises `SandboxRefusedError` where the key is that of another template, and as `check` does.
        """
        self.check(template)
        digest = template.digest()
        sandbox = self._by_share_key.get(share_key) if share_key else None
        if sandbox is not None and sandbox.template.digest() != digest:
            raise SandboxRefusedError(f"the sandbox that is shared as {share_key!r} is made from another template")
        if sandbox is None and template.network != "own":  # a network of its own cannot change its program
            sandbox = self._best_warm(digest)
        if sandbox is None:
            sandbox = Sandbox(self._new_id(), template, template_name, now_s)
            self.sandboxes[sandbox.sandbox_id] = sandbox
        if share_key:
            sandbox.share_key = share_key
            self._by_share_key[share_key] = sandbox
        self._join(sandbox, program_id)
        return sandbox

    def check(self, template: Template) -> None:
        """Raise `SandboxRefusedError` where the caps could never hold a sandbox of this template."""
        for what, wanted_bytes, cap_bytes in (
            ("memory", template.memory_bytes, self.caps.memory_bytes),
            ("disk", template.disk_bytes, self.caps.disk_bytes),
        ):
            if cap_bytes is not None and (wanted_bytes or 0) > cap_bytes:
                raise SandboxRefusedError(f"the template wants {wanted_bytes} bytes of {what}; the cap is {cap_bytes}")

    def register(self, now_s: float, kind: str, program_id: str, place: Place) -> Sandbox:
        """Take one that somebody else made for a program; asking twice is asking once."""
        sandbox = self._by_handle.get((kind, place.handle))
        if sandbox is None:
            template = Template.model_construct(driver=cast("DriverKind", kind))  # of what it was made is not known
            sandbox = Sandbox(self._new_id(), template, "", now_s)
            self.sandboxes[sandbox.sandbox_id] = sandbox
            sandbox.given = True
            sandbox.stage = Stage.IN_USE
            sandbox.ready_s = sandbox.used_s = now_s
            self._set_place(sandbox, place)
        if sandbox.stage in (Stage.READY, Stage.IN_USE):
            self._join(sandbox, program_id)
        return sandbox

    def _best_warm(self, digest: str) -> Sandbox | None:
        warm = [each for each in self if each.is_warm and each.template.digest() == digest]
        warm.sort(key=lambda each: (Stage.READY, Stage.PREPARING, Stage.REQUESTED).index(each.stage))
        return next(iter(warm), None)

    def _join(self, sandbox: Sandbox, program_id: str) -> None:
        sandbox.program_ids[program_id] = None
        self._of_program.setdefault(program_id, {})[sandbox.sandbox_id] = sandbox

    def used(self, now_s: float, program_id: str) -> None:
        """Note that a program runs: its sandboxes that are ready are in use from now on."""
        for sandbox in self._of_program.get(program_id, {}).values():
            if sandbox.stage is Stage.READY:
                sandbox.advance(Step.USE)
                sandbox.used_s = now_s

    # --- ending -----------------------------------------------------------------------------------------------------

    def program_ended(self, program_id: str, why: str) -> None:
        """Take a program's word back from its sandboxes; those that nobody uses any more go with the next plan."""
        for sandbox in self.of_program(program_id):
            self.leave(sandbox, program_id, why)

    def leave(self, sandbox: Sandbox, program_id: str, why: str) -> None:
        """Take one program off a sandbox; with the last it goes, and says to its end whose it was."""
        self._unlist(sandbox, program_id)
        if len(sandbox.program_ids) > 1:
            del sandbox.program_ids[program_id]
        else:
            self.let_go(sandbox, why)

    def let_go(self, sandbox: Sandbox, why: str) -> None:
        """Have a sandbox reclaimed, whoever uses it; one of which nothing was made is dropped at once."""
        if sandbox.stage in (Stage.RECLAIMING, Stage.GONE):
            return
        if sandbox.stage in (Stage.REQUESTED, Stage.FAILED):
            self._forget(sandbox, Step.DROP)
            return
        self._unshare(sandbox)
        sandbox.advance(Step.RECLAIM)
        self._to_reclaim.append(Reclaim(sandbox, why))

    def _unlist(self, sandbox: Sandbox, program_id: str) -> None:
        own = self._of_program.get(program_id, {})
        own.pop(sandbox.sandbox_id, None)
        if not own:
            self._of_program.pop(program_id, None)

    def _unshare(self, sandbox: Sandbox) -> None:
        if self._by_share_key.get(sandbox.share_key) is sandbox:
            del self._by_share_key[sandbox.share_key]

    def _forget(self, sandbox: Sandbox, step: Step) -> None:
        sandbox.advance(step)
        self._unshare(sandbox)
        self._unplace(sandbox)
        self._failed.pop(sandbox.sandbox_id, None)
        for program_id in sandbox.program_ids:
            self._unlist(sandbox, program_id)
        del self.sandboxes[sandbox.sandbox_id]

    # --- what became of it --------------------------------------------------------------------------------------------

    def prepared(self, now_s: float, sandbox: Sandbox, place: Place) -> None:
        """Take in that a preparation is through."""
        sandbox.advance(Step.PREPARED)
        sandbox.ready_s = now_s
        sandbox.why = ""
        self._set_place(sandbox, place)
        assert sandbox.prepare_s is not None
        for times_s in (self._times_s(sandbox.template), self._prepare_guess_s):
            times_s.add(sandbox.prepare_s)

    def failed(self, now_s: float, sandbox: Sandbox, error: SandboxError) -> bool:
        """Take in that a preparation failed; return whether it will be tried again.

        An engine that does not answer costs no attempt: it is waited for.
        """
        sandbox.why = error.message
        if not isinstance(error, SandboxEngineError):
            sandbox.attempt_count += 1
        if error.may_recover and sandbox.attempt_count < self.caps.attempts_count:
            sandbox.advance(Step.RETRY)
            doublings = max(0, sandbox.attempt_count - 1)
            sandbox.retry_at_s = now_s + min(self.caps.backoff_s * 2**doublings, self.caps.backoff_limit_s)
            return True
        self._fail(sandbox)
        return False

    def died(self, now_s: float, sandbox: Sandbox, why: str) -> bool:
        """Take in that a sandbox ended by itself; return whether another is made, as nobody had used it yet."""
        if sandbox.stage not in (Stage.READY, Stage.IN_USE):
            return False
        sandbox.why = why
        self._unplace(sandbox)
        if sandbox.given:
            sandbox.advance(Step.FAIL)
            self._forget(sandbox, Step.DROP)
            return False
        sandbox.attempt_count += 1
        if sandbox.stage is Stage.READY and sandbox.attempt_count < self.caps.attempts_count:
            sandbox.advance(Step.RETRY)
            sandbox.retry_at_s = now_s + self.caps.backoff_s
            return True
        self._fail(sandbox)
        return False

    def reclaimed(self, sandbox: Sandbox) -> None:
        """Take in that a sandbox is gone."""
        self._forget(sandbox, Step.RECLAIMED)

    def _fail(self, sandbox: Sandbox) -> None:
        sandbox.advance(Step.FAIL)
        self._unshare(sandbox)
        if not sandbox.program_ids:
            self._forget(sandbox, Step.DROP)
            return
        self._failed[sandbox.sandbox_id] = sandbox
        if len(self._failed) > FAILED_KEPT_COUNT:
            self._forget(next(iter(self._failed.values())), Step.DROP)

    def _set_place(self, sandbox: Sandbox, place: Place) -> None:
        sandbox.place = place
        self._by_handle[sandbox.template.driver, place.handle] = sandbox

    def _unplace(self, sandbox: Sandbox) -> None:
        if sandbox.place is not None:
            self._by_handle.pop((sandbox.template.driver, sandbox.place.handle), None)
            sandbox.place = None

    # --- the plan ---------------------------------------------------------------------------------------------------

    def expected_prepare_s(self, template: Template) -> float:
        """Return what nine of ten preparations of a template took; of a new one those of all; 0 before the first."""
        return self._times_s(template).quantile(PREPARE_QUANTILE, self._prepare_guess_s.quantile(PREPARE_QUANTILE, 0.0))

    def _times_s(self, template: Template) -> LogHistogram:
        return self._prepare_times_s.setdefault(template.digest(), LogHistogram(PREPARE_EDGES_S))

    def plan(self, now_s: float, needed_in_s: Callable[[str], float]) -> list[Action]:
        """Return what is to be done now, and take it as begun.

        `needed_in_s` tells of a program in how many seconds it is expected to be admitted: 0 if it runs.
        Cost: O(n log n) of n sandboxes that are wanted.
        """
        self._adjust_warm(now_s)
        actions: list[Action] = []
        wanted = [
            (self._needed_in_s(sandbox, needed_in_s), sandbox)
            for sandbox in self
            if sandbox.stage is Stage.REQUESTED and sandbox.retry_at_s <= now_s
        ]
        wanted.sort(key=lambda pair: (pair[0], pair[1].requested_s))
        hands_count = self.caps.hands_count - sum(each.stage is Stage.PREPARING for each in self)
        room = _Room(self.caps, [each for each in self if each.stage in ALIVE and not each.given])
        for needed_s, sandbox in wanted:
            if hands_count <= 0:
                break
            due = needed_s <= self.expected_prepare_s(sandbox.template)
            if not room.holds(sandbox.template, 1.0 if due else self.caps.early_ratio):
                if due and sandbox.program_ids:
                    self._make_room(sandbox.template, room)
                break  # whoever comes after is needed later: it does not overtake
            room.add(sandbox)
            hands_count -= 1
            sandbox.advance(Step.BEGIN)
            sandbox.begun_s = now_s
            actions.append(Prepare(sandbox))
        self._to_reclaim, reclaims = [], self._to_reclaim
        return [*reclaims, *actions]

    def _needed_in_s(self, sandbox: Sandbox, needed_in_s: Callable[[str], float]) -> float:
        return min((needed_in_s(program_id) for program_id in sandbox.program_ids), default=inf)

    def _make_room(self, template: Template, room: _Room) -> None:
        """Have warm sandboxes reclaimed until one of this template would fit; their room is free once they are gone."""
        for sandbox in [each for each in self if each.is_warm and each.stage in (Stage.READY, Stage.PREPARING)]:
            if room.will_hold(template):
                return
            room.leaving(sandbox)
            self.let_go(sandbox, "others need its room")

    def _adjust_warm(self, now_s: float) -> None:
        """Ask for as many warm sandboxes as are missing of each template; let go of those that are too many."""
        if not self._warm:
            return
        for name, (template, count) in self._warm.items():
            digest = template.digest()
            warm = [each for each in self if each.is_warm and each.template.digest() == digest]
            for surplus in warm[count:]:
                self.let_go(surplus, "more are warm than are to be kept")
            waits = any(each.stage is Stage.REQUESTED and each.program_ids for each in self)
            for _ in range(0 if waits else count - len(warm)):
                sandbox = Sandbox(self._new_id(), template, name, now_s)
                self.sandboxes[sandbox.sandbox_id] = sandbox


class _Room:
    """What is left under the caps."""

    def __init__(self, caps: Caps, alive: list[Sandbox]) -> None:
        self._caps = caps
        self._count = self._memory_bytes = self._disk_bytes = 0
        self._leaving_count = self._leaving_memory_bytes = self._leaving_disk_bytes = 0
        for sandbox in alive:
            self.add(sandbox)
            if sandbox.stage is Stage.RECLAIMING:
                self.leaving(sandbox)

    def add(self, sandbox: Sandbox) -> None:
        self._count += 1
        self._memory_bytes += _memory_bytes(sandbox)
        self._disk_bytes += _disk_bytes(sandbox)

    def leaving(self, sandbox: Sandbox) -> None:
        self._leaving_count += 1
        self._leaving_memory_bytes += _memory_bytes(sandbox)
        self._leaving_disk_bytes += _disk_bytes(sandbox)

    def holds(self, template: Template, ratio: float) -> bool:
        """Say whether one more of a template fits into that part of the caps; the first one always does."""
        if not self._count:
            return True
        return self._fits(self._count, self._memory_bytes, self._disk_bytes, template, ratio)

    def will_hold(self, template: Template) -> bool:
        """Say whether it fits once all are gone that are leaving."""
        return self._fits(
            self._count - self._leaving_count,
            self._memory_bytes - self._leaving_memory_bytes,
            self._disk_bytes - self._leaving_disk_bytes,
            template,
            1.0,
        )

    def _fits(self, count: int, memory_bytes: int, disk_bytes: int, template: Template, ratio: float) -> bool:
        caps = self._caps
        return (
            count + 1 <= max(1.0, ratio * caps.sandbox_count)
            and memory_bytes + (template.memory_bytes or 0) <= ratio * (caps.memory_bytes or inf)
            and disk_bytes + (template.disk_bytes or 0) <= ratio * (caps.disk_bytes or inf)
        )


def _memory_bytes(sandbox: Sandbox) -> int:
    """Return what a sandbox may take: its limit, or what was measured where it has none."""
    return sandbox.template.memory_bytes or sandbox.memory_bytes or 0


def _disk_bytes(sandbox: Sandbox) -> int:
    """Return what a sandbox is expected to write, or wrote, whichever is more."""
    return max(sandbox.template.disk_bytes or 0, sandbox.disk_bytes or 0)
