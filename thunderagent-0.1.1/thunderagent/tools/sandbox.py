"""The life of a sandbox as a table, how long preparations take, and what all may take together. Pure.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from thunderagent.errors import LifecycleError, SandboxRefusedError
from thunderagent.programs.learned.histogram import LogHistogram, geometric_edges
from thunderagent.tools.base import Place
from thunderagent.tools.template import Template

PREPARE_EDGES_S = geometric_edges(0.01, 1.15, 80)
"""From 10 ms to 12 minutes."""

PREPARE_QUANTILE = 0.9

WARM_LIFE_RATIO = 0.25
"""Part of its time to live after which a warm sandbox is replaced: its next user may need it for long."""

TEMPLATES_LEARNED_COUNT = 1024
"""How many templates have their preparation times remembered, the most recent ones."""


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
    """A step from one stage of a sandbox to the next."""

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
"""Stages in which something may exist at the engine."""

COMING = frozenset({Stage.REQUESTED, Stage.PREPARING})
"""Stages before it is usable."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits on all sandboxes together; None is unlimited."""

    sandbox_count: int = 64
    known_count: int = 100_000
    """Those that programs wait for included: each is looked at for every plan."""
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    hands_count: int = 4
    """Preparations at a time."""
    attempts_count: int = 3
    backoff_s: float = 1.0
    """Time to the second attempt; doubled for each further one."""
    backoff_limit_s: float = 30.0
    early_ratio: float = 0.75
    """Part of the caps, and of the hands, for preparations that are not due yet."""

    def check(self, template: Template) -> None:
        """Raise `SandboxRefusedError` if the caps could never hold such a sandbox."""
        for what, wanted_bytes, cap_bytes in (
            ("memory", template.memory_bytes, self.memory_bytes),
            ("disk", template.disk_bytes, self.disk_bytes),
        ):
            if cap_bytes is not None and (wanted_bytes or 0) > cap_bytes:
                raise SandboxRefusedError(f"the template wants {wanted_bytes} bytes of {what}; the cap is {cap_bytes}")


class Sandbox:
    """One sandbox. Only the table writes here."""

    __slots__ = (
        "attempt_count",
        "awaited_since_s",
        "begun_s",
        "digest",
        "disk_bytes",
        "given",
        "memory_bytes",
        "name",
        "place",
        "program_ids",
        "ready_s",
        "requested_s",
        "retry_at_s",
        "sandbox_id",
        "share_key",
        "stage",
        "stays_awake",
        "suspended",
        "template",
        "template_name",
        "told",
        "wants_suspension",
        "why",
    )

    def __init__(
        self, sandbox_id: str, template: Template, template_name: str, requested_s: float, *, name: str
    ) -> None:
        """Create a requested sandbox that belongs to nobody yet."""
        self.sandbox_id = sandbox_id
        """Its owners' name for it. Whoever takes it over brings a name of their own."""
        self.name = name
        """The engine's name of it, which stays: where others may get it, it is no program's id of a sandbox."""
        self.template = template
        self.digest = template.digest()
        self.template_name = template_name
        self.requested_s = requested_s
        self.program_ids: dict[str, None] = {}
        self.share_key = ""
        self.stage = Stage.REQUESTED
        self.told = False
        """Whether its program may use it: a client was told where it is, or a command was seen in it."""
        self.given = False
        """Made by somebody else, who gave it to us to reclaim."""
        self.wants_suspension = False
        self.suspended = False
        """Whether it stands still, as far as is known: the engine may be about to stop it, or to thaw it."""
        self.stays_awake = False
        """The engine could not suspend it."""
        self.attempt_count = 0
        self.retry_at_s = 0.0
        self.begun_s: float | None = None
        self.ready_s: float | None = None
        self.awaited_since_s: float | None = None
        """Since when a running program waits for it."""
        self.place: Place | None = None
        self.why = ""
        """Its last error."""
        self.disk_bytes: int | None = None
        self.memory_bytes: int | None = None

    def __repr__(self) -> str:
        owners = ",".join(self.program_ids) or "nobody"
        return f"<Sandbox {self.sandbox_id} from {self.template_name or 'a request'}: {self.stage}, of {owners}>"

    @property
    def prepare_s(self) -> float | None:
        """How long its last preparation took; None before it was ready, and for a given one."""
        return self.ready_s - self.begun_s if self.ready_s is not None and self.begun_s is not None else None

    def is_stale(self, now_s: float) -> bool:
        """Return whether too little of its life is left to give it to another program."""
        began_s = self.begun_s if self.stage in (Stage.READY, Stage.IN_USE) else None
        return began_s is not None and now_s - began_s > WARM_LIFE_RATIO * self.template.ttl_s

    def advance(self, step: Step) -> None:
        """Move along the table. Raises `LifecycleError` if it has no such arrow."""
        following = STEPS.get((self.stage, step))
        if following is None:
            raise LifecycleError(f"a sandbox that is {self.stage} knows no {step}: {self!r}")
        self.stage = following


class PrepareTimes:
    """How long preparations took, by template."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_digest_s: dict[str, LogHistogram] = {}
        """The most recently learned last."""
        self._of_all_s = LogHistogram(PREPARE_EDGES_S)

    def learn(self, digest: str, prepare_s: float) -> None:
        """Learn how long a preparation of that template took."""
        times_s = self._by_digest_s.pop(digest, None) or LogHistogram(PREPARE_EDGES_S)
        self._by_digest_s[digest] = times_s
        if len(self._by_digest_s) > TEMPLATES_LEARNED_COUNT:
            del self._by_digest_s[next(iter(self._by_digest_s))]
        times_s.add(prepare_s)
        self._of_all_s.add(prepare_s)

    def expected_s(self, digest: str) -> float:
        """Return what nine of ten preparations of a template took; for a new one those of all; 0 before the first."""
        return self._by_digest_s.get(digest, self._of_all_s).quantile(PREPARE_QUANTILE, 0.0)


class Room:
    """The room left under the caps."""

    def __init__(self, caps: Caps, alive: list[Sandbox]) -> None:
        """Count the existing ones."""
        self._caps = caps
        self._count = len(alive)
        self._memory_bytes = sum(map(_memory_bytes, alive))
        self._disk_bytes = sum(map(_disk_bytes, alive))
        self._leaving_count = self._leaving_memory_bytes = self._leaving_disk_bytes = 0
        reclaiming = Stage.RECLAIMING
        for sandbox in alive:
            if sandbox.stage is reclaiming:
                self.leaving(sandbox)

    def add(self, sandbox: Sandbox) -> None:
        """Count one more."""
        self._count += 1
        self._memory_bytes += _memory_bytes(sandbox)
        self._disk_bytes += _disk_bytes(sandbox)

    def leaving(self, sandbox: Sandbox, sign: int = 1) -> None:
        """Note that one of them will be gone; with the sign -1, that it stays after all."""
        self._leaving_count += sign
        self._leaving_memory_bytes += sign * _memory_bytes(sandbox)
        self._leaving_disk_bytes += sign * _disk_bytes(sandbox)

    def holds(self, template: Template, ratio: float) -> bool:
        """Return whether one more of a template fits into that part of the caps; the first one always does."""
        if not self._count:
            return True
        return self._fits(self._count, self._memory_bytes, self._disk_bytes, template, ratio)

    def will_hold(self, template: Template) -> bool:
        """Return whether it fits once all leaving ones are gone."""
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
    """Return a sandbox's memory: its limit, or the measured use without one."""
    return sandbox.template.memory_bytes or sandbox.memory_bytes or 0


def _disk_bytes(sandbox: Sandbox) -> int:
    """Return a sandbox's expected or actual writes, whichever is more."""
    return max(sandbox.template.disk_bytes or 0, sandbox.disk_bytes or 0)
