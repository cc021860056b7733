"""Who uses which sandbox, and the plan: what to prepare and what to reclaim now. Pure.

Theory of operation
===================
A sandbox belongs to programs, mostly to one; with a share key to several. It is removed when the last of them has
ended. One that belongs to nobody is kept warm: the first program that asks for the same thing gets it.

`SandboxTable` is told what happened and says what to do. It has no clock and awaits nothing; the executor of its plan
reports the results. `plan` goes through the wanted ones in the order in which they are needed. The time at which a
program will be admitted is only an estimate. So a preparation is due at that time, less what nine of ten preparations
of this template took. Idle hands begin sooner, but preparations that are not due yet leave a part of the caps and of
the hands to those that may come and are (`early_ratio`). A due one without room takes that of a warm sandbox.

A program that was let in never waits for a sandbox that stands unused for one that was not, also if it was paused
meanwhile, since its agent waits for nothing else. It gets that sandbox if both are made alike, and its owner gets
another later. If they are made differently, it gets its room, as soon as nothing but its sandbox keeps it. Nobody loses
one that may be in use: of which a client was told where it is (`Sandbox.told`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import cast

from thunderagent.errors import SandboxEngineError, SandboxError, SandboxPullLimitError, SandboxRefusedError
from thunderagent.tools.base import Place
from thunderagent.tools.sandbox import ALIVE, COMING, Caps, PrepareTimes, Room, Sandbox, Stage, Step
from thunderagent.tools.template import DriverKind, Template

FAILED_KEPT_COUNT = 256
"""How many failed sandboxes are remembered for their programs; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make this sandbox."""

    sandbox: Sandbox


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Remove this sandbox; if it is still being prepared, stop that. `instead` is what its owner gets for it."""

    sandbox: Sandbox
    why: str
    instead: Sandbox | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Note that this sandbox has new owners; `instead` is what its former ones have for it."""

    sandbox: Sandbox
    instead: Sandbox


Action = Prepare | Reclaim | HandOver

_UNUSED = frozenset({Stage.PREPARING, Stage.READY})

LOOKED_AHEAD_COUNT = 256
"""For how many waiting programs the admission is predicted; the rest come after them."""


def needed_in_s(runs: Callable[[str], bool], expected_holds_s: Mapping[str, float]) -> Callable[[str], float]:
    """Return a function from programs to the seconds until they need their sandboxes: 0 for one that `runs`.

    Programs without a turn yet, or behind those that were looked at, come after those.
    """
    last_s = max(expected_holds_s.values(), default=0.0)
    return lambda program_id: 0.0 if runs(program_id) else expected_holds_s.get(program_id, last_s)


class SandboxTable:
    """Every known sandbox, by id, by program and by handle."""

    def __init__(self, caps: Caps, new_id: Callable[[], str], new_name: Callable[[], str]) -> None:
        """Start empty; `new_id` returns unused ids, and `new_name` unused names for the engine."""
        self.caps = caps
        self.sandboxes: dict[str, Sandbox] = {}
        self._new_id = new_id
        self._new_name = new_name
        self._of_program: dict[str, dict[str, Sandbox]] = {}
        self._by_handle: dict[tuple[str, str], Sandbox] = {}
        self._by_share_key: dict[str, Sandbox] = {}
        self._failed: dict[str, Sandbox] = {}
        self.prepare_times = PrepareTimes()
        self._warm: dict[str, tuple[str, Template, int]] = {}
        """By digest: a template's name and how many to keep ready of it."""
        self._warm_again_at_s: dict[str, float] = {}
        self._unowned: dict[str, Sandbox] = {}
        """The warm ones."""
        self._to_reclaim: list[Reclaim] = []

    def __repr__(self) -> str:
        return f"<SandboxTable: {len(self.sandboxes)} sandboxes of {len(self._of_program)} programs>"

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self.sandboxes.values())

    def of_program(self, program_id: str) -> list[Sandbox]:
        """Return a program's sandboxes, oldest first."""
        return list(self._of_program.get(program_id, {}).values())

    def with_handle(self, kind: str, handle: str) -> Sandbox | None:
        """Return the sandbox with a driver's handle."""
        return self._by_handle.get((kind, handle))

    # --- asking -----------------------------------------------------------------------------------------------------

    def keep_warm(self, templates: Mapping[str, tuple[Template, int]]) -> None:
        """Set how many of each template are kept ready; the same one under two names is added up."""
        self._warm = {}
        for name, (template, count) in templates.items():
            digest = template.digest()
            first_name, _, others_count = self._warm.get(digest, (name, template, 0))
            self._warm[digest] = (first_name, template, others_count + count)

    def request(
        self,
        now_s: float,
        template: Template,
        template_name: str,
        program_id: str,
        share_key: str = "",
        *,
        at_once: bool = True,
    ) -> Sandbox:
        """Request a sandbox for a program: the one of that key, otherwise a warm one, otherwise a new one.

        A program that does not need it `at_once` gets a warm one by the plan.

        Raises `SandboxRefusedError` if the key belongs to another template, and as `check` and `check_count` do.
        """
        self.check(template, share_key)
        sandbox = self._by_share_key.get(share_key) if share_key else None
        if sandbox is None and at_once and template.network != "own":  # its own network cannot change its program
            sandbox = self._best_warm(now_s, template.digest())
        if sandbox is None:
            self.check_count(1)
            sandbox = self._new(template, template_name, now_s)
            self.sandboxes[sandbox.sandbox_id] = sandbox
        if share_key:
            sandbox.share_key = share_key
            self._by_share_key[share_key] = sandbox
        self._join(sandbox, program_id)
        return sandbox

    def check(self, template: Template, share_key: str = "") -> None:
        """Raise `SandboxRefusedError` if the caps could never hold such a sandbox, or the key is another's."""
        shared = self._by_share_key.get(share_key) if share_key else None
        if shared is not None and shared.digest != template.digest():
            raise SandboxRefusedError(f"the sandbox that is shared as {share_key!r} is made from another template")
        self.caps.check(template)

    def check_count(self, count: int) -> None:
        """Raise `SandboxRefusedError` if all programs together cannot have so many more."""
        if len(self.sandboxes) + count > self.caps.known_count:
            raise SandboxRefusedError(f"all programs together may have {self.caps.known_count} sandboxes at most")

    def register(self, now_s: float, kind: str, program_id: str, place: Place) -> Sandbox:
        """Take over a program's own sandbox; idempotent."""
        sandbox = self._by_handle.get((kind, place.handle))
        if sandbox is None:
            template = Template.model_construct(driver=cast("DriverKind", kind))  # its template is unknown
            sandbox = self._new(template, "", now_s)
            self.sandboxes[sandbox.sandbox_id] = sandbox
            sandbox.given = True
            sandbox.stage = Stage.IN_USE
            sandbox.ready_s = now_s
            self._set_place(sandbox, place)
        if sandbox.stage in (Stage.READY, Stage.IN_USE):
            self._join(sandbox, program_id)
        return sandbox

    def _new(self, template: Template, template_name: str, now_s: float) -> Sandbox:
        sandbox_id, name = self._new_id(), self._new_name()
        return Sandbox(
            sandbox_id, template, template_name, now_s, name=sandbox_id if template.is_of_its_program else name
        )

    def _best_warm(self, now_s: float, digest: str) -> Sandbox | None:
        """Return a warm one that is ready, otherwise one in preparation; one that has not begun is no help."""
        warm = [each for each in self._unowned.values() if each.digest == digest and not each.is_stale(now_s)]
        return next((each for stage in (Stage.READY, Stage.PREPARING) for each in warm if each.stage is stage), None)

    def _join(self, sandbox: Sandbox, program_id: str) -> None:
        self._unowned.pop(sandbox.sandbox_id, None)
        sandbox.program_ids[program_id] = None
        self._of_program.setdefault(program_id, {})[sandbox.sandbox_id] = sandbox

    def used(self, now_s: float, program_id: str) -> None:
        """Note that a program runs: its ready sandboxes are in use from now on, it waits for the others."""
        for sandbox in self._of_program.get(program_id, {}).values():
            if sandbox.stage is Stage.READY:
                sandbox.advance(Step.USE)
            elif sandbox.stage in COMING and sandbox.awaited_since_s is None:
                sandbox.awaited_since_s = now_s

    # --- ending -----------------------------------------------------------------------------------------------------

    def program_ended(self, program_id: str, why: str) -> None:
        """Take a program off its sandboxes; those without users are removed by the next plan."""
        for sandbox in self.of_program(program_id):
            self.leave(sandbox, program_id, why)

    def leave(self, sandbox: Sandbox, program_id: str, why: str) -> None:
        """Take one program off a sandbox; with the last it is removed, but keeps its programs' names to its end."""
        self._unlist(sandbox, program_id)
        if len(sandbox.program_ids) > 1:
            del sandbox.program_ids[program_id]
        else:
            self.reclaim(sandbox, why)

    def reclaim(self, sandbox: Sandbox, why: str, instead: Sandbox | None = None) -> None:
        """Reclaim a sandbox, whoever uses it; one that was not begun is dropped at once. `instead`: see `Reclaim`."""
        if sandbox.stage in (Stage.RECLAIMING, Stage.GONE):
            return
        if sandbox.stage in (Stage.REQUESTED, Stage.FAILED):
            self._forget(sandbox, Step.DROP)
            return
        self._unshare(sandbox)
        self._unowned.pop(sandbox.sandbox_id, None)
        sandbox.advance(Step.RECLAIM)
        self._to_reclaim.append(Reclaim(sandbox, why, instead))

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
        self._unowned.pop(sandbox.sandbox_id, None)
        for program_id in sandbox.program_ids:
            self._unlist(sandbox, program_id)
        del self.sandboxes[sandbox.sandbox_id]

    # --- what became of it --------------------------------------------------------------------------------------------

    def prepared(self, now_s: float, sandbox: Sandbox, place: Place) -> None:
        """Record that a preparation succeeded."""
        sandbox.advance(Step.PREPARED)
        sandbox.ready_s = now_s
        sandbox.why = ""
        self._set_place(sandbox, place)
        assert sandbox.prepare_s is not None
        self.prepare_times.learn(sandbox.digest, sandbox.prepare_s)

    def failed(self, now_s: float, sandbox: Sandbox, error: SandboxError) -> bool:
        """Record that a preparation failed; return whether it will be retried.

        An engine that does not answer, or a registry that lets nothing be pulled, costs no attempt: it is waited for.
        """
        sandbox.why = error.message
        if not isinstance(error, SandboxEngineError):
            sandbox.attempt_count += 1
        if error.may_recover and sandbox.attempt_count < self.caps.attempts_count:
            sandbox.advance(Step.RETRY)
            doublings = max(0, sandbox.attempt_count - 1)
            sandbox.retry_at_s = now_s + min(self.caps.backoff_s * 2**doublings, self.caps.backoff_limit_s)
            if isinstance(error, SandboxPullLimitError) and error.retry_after_s is not None:
                sandbox.retry_at_s = max(sandbox.retry_at_s, now_s + error.retry_after_s)
            return True
        self._fail(now_s, sandbox)
        return False

    def died(self, now_s: float, sandbox: Sandbox, why: str) -> bool:
        """Record that a sandbox ended by itself; return whether another is made, because nobody had used it yet."""
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
        self._fail(now_s, sandbox)
        return False

    def reclaimed(self, sandbox: Sandbox) -> None:
        """Record that a sandbox is gone."""
        self._forget(sandbox, Step.RECLAIMED)

    def _fail(self, now_s: float, sandbox: Sandbox) -> None:
        sandbox.advance(Step.FAIL)
        self._unshare(sandbox)
        if not sandbox.program_ids:
            self._warm_again_at_s[sandbox.digest] = now_s + self.caps.backoff_limit_s
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
            key = (sandbox.template.driver, sandbox.place.handle)
            if self._by_handle.get(key) is sandbox:
                del self._by_handle[key]
            sandbox.place = None
            sandbox.told = sandbox.suspended = sandbox.wants_suspension = False

    # --- the plan ---------------------------------------------------------------------------------------------------

    def plan(
        self,
        now_s: float,
        needed_in_s: Callable[[str], float],
        runs: Callable[[str], bool] = lambda _: False,
        waits: Callable[[str], bool] = lambda _: False,
    ) -> list[Action]:
        """Return what to do now, and consider it begun.

        `needed_in_s` maps programs to the seconds until they are expected to be admitted: 0 if running. `runs` says
        which run or use tools, `waits` which of these have no turn, so that they may wait for a sandbox. Cost:
        O(sandboxes log sandboxes).
        """
        self._adjust_warm(now_s)
        actions: list[Action] = list(self._hand_over(now_s, needed_in_s, runs))
        requested = Stage.REQUESTED  # looked up once: this is done for thousands, at each change
        wanted = [each for each in self.sandboxes.values() if each.stage is requested and each.retry_at_s <= now_s]
        if wanted:
            alive = [each for each in self.sandboxes.values() if each.stage in ALIVE and not each.given]
            preparing_count = [each.stage for each in alive].count(Stage.PREPARING)
        if wanted and preparing_count < self.caps.hands_count:
            room, idle = Room(self.caps, alive), None
            retried = [each for each in self.sandboxes.values() if each.stage is requested and each.retry_at_s > now_s]
            kept = [each for each in retried if any(map(waits, each.program_ids))]
            for due, sandbox in self._by_need(wanted, needed_in_s, runs):
                if preparing_count >= self.caps.hands_count * (1.0 if due else self.caps.early_ratio):
                    break
                is_waited_for = any(map(waits, sandbox.program_ids))
                while kept and not is_waited_for:
                    room.add(kept.pop())  # its place is not for those that nobody waits for
                if not room.holds(sandbox.template, 1.0 if due else self.caps.early_ratio):
                    if not sandbox.program_ids:
                        continue  # nobody waits for it
                    if not due:
                        break  # later ones are needed later: they do not overtake
                    if idle is None:
                        idle = deque(self._idle(needed_in_s, runs) if is_waited_for else self._unowned.values())
                    if not self._make_room(now_s, sandbox.template, room, idle) or not is_waited_for:
                        break
                    room.add(sandbox)  # it is kept for it
                    continue
                room.add(sandbox)
                preparing_count += 1
                sandbox.advance(Step.BEGIN)
                sandbox.begun_s, sandbox.ready_s = now_s, None
                actions.append(Prepare(sandbox))
        self._to_reclaim, reclaims = [], self._to_reclaim
        return [*reclaims, *actions]

    def _hand_over(
        self, now_s: float, needed_in_s: Callable[[str], float], runs: Callable[[str], bool]
    ) -> Iterator[HandOver]:
        """Give idle sandboxes to programs that run and wait for one alike, and warm ones to all that wait."""
        coming = [each for each in self.sandboxes.values() if each.stage in COMING and each.program_ids]
        awaited = {each for each in coming if any(map(runs, each.program_ids))}
        if not awaited and not (coming and self._unowned):
            return
        idle: defaultdict[str, deque[Sandbox]] = defaultdict(deque)
        for each in sorted(self._idle(needed_in_s, runs), key=lambda each: each.stage is Stage.PREPARING):
            if self._may_change_hands(now_s, each):
                idle[each.digest].append(each)
        needed_s = {each: min(map(needed_in_s, each.program_ids)) for each in coming}
        for sandbox in sorted(coming, key=lambda each: (each not in awaited, needed_s[each], each.requested_s)):
            if sandbox.stage is Stage.PREPARING and sandbox not in awaited:
                continue
            alike = idle[sandbox.digest]
            while alike and alike[0].program_ids and sandbox not in awaited:
                alike.popleft()  # those that may take it have all had their turn
            if not alike or sandbox.stage is alike[0].stage:
                continue
            found = alike.popleft()
            self._exchange(found, sandbox)
            yield HandOver(found, sandbox)

    def _idle(self, needed_in_s: Callable[[str], float], runs: Callable[[str], bool]) -> list[Sandbox]:
        """Return those that no running program has and none may use: warm ones, then those needed last."""
        idle = [
            each
            for each in self.sandboxes.values()
            if each.program_ids
            and not each.given
            and not each.told
            # Where commands are not seen, who was let in may use it.
            and (each.stage in _UNUSED or (each.stage is Stage.IN_USE and each.template.driver == "docker"))
            and not any(map(runs, each.program_ids))
        ]
        idle.sort(key=lambda each: -min(map(needed_in_s, each.program_ids)))
        return [*(each for each in self._unowned.values() if each.stage is not Stage.REQUESTED), *idle]

    def _may_change_hands(self, now_s: float, sandbox: Sandbox) -> bool:
        """Return whether nothing about it is its owner's: a network, what a service was told, half a pause."""
        is_own = sandbox.template.is_of_its_program and bool(sandbox.program_ids)
        return not (is_own or sandbox.suspended or sandbox.wants_suspension or sandbox.is_stale(now_s))

    def _exchange(self, given: Sandbox, instead: Sandbox) -> None:
        """Let two sandboxes of one template change owners; `instead` is for those who need none now."""
        given.sandbox_id, instead.sandbox_id = instead.sandbox_id, given.sandbox_id
        given.template_name, instead.template_name = instead.template_name, given.template_name
        given.program_ids, instead.program_ids = instead.program_ids, given.program_ids
        given.share_key, instead.share_key = instead.share_key, given.share_key
        given.requested_s, instead.requested_s = instead.requested_s, given.requested_s
        given.awaited_since_s, instead.awaited_since_s = instead.awaited_since_s, None
        if instead.stage is Stage.REQUESTED:  # its failures were not its new owner's
            instead.retry_at_s, instead.why = 0.0, ""
        for each in (given, instead):
            self.sandboxes[each.sandbox_id] = each
            if each.share_key:
                self._by_share_key[each.share_key] = each
            for program_id in each.program_ids:
                self._of_program[program_id][each.sandbox_id] = each
            if not each.program_ids:
                self._unowned[each.sandbox_id] = each

    def _by_need(
        self, wanted: list[Sandbox], needed_in_s: Callable[[str], float], runs: Callable[[str], bool]
    ) -> Iterator[tuple[bool, Sandbox]]:
        """Yield the wanted ones with whether each is due: of running programs, by time of need, those due soon."""
        prepare_s = {digest: self.prepare_times.expected_s(digest) for digest in {each.digest for each in wanted}}
        ranked: list[tuple[float, bool, float, float, int, Sandbox]] = []
        for place, sandbox in enumerate(wanted):
            needed_s = min(map(needed_in_s, sandbox.program_ids), default=inf)
            begin_in_s = max(0.0, needed_s - prepare_s[sandbox.digest])
            is_later = not any(map(runs, sandbox.program_ids))
            ranked.append((begin_in_s, is_later, needed_s, sandbox.requested_s, place, sandbox))
        ranked.sort()
        for begin_in_s, _, _, _, _, sandbox in ranked:
            yield begin_in_s <= 0.0, sandbox

    def _make_room(self, now_s: float, template: Template, room: Room, idle: deque[Sandbox]) -> bool:
        """Reclaim some of these, if one of this template fits then; return whether it will, once they are gone.

        They are taken from `idle`, and those that stay put back.
        """
        taken: list[Sandbox] = []
        while idle and not room.will_hold(template):
            sandbox = idle.popleft()
            if sandbox.stage is not Stage.REQUESTED:
                room.leaving(sandbox)
                taken.append(sandbox)
        if not room.will_hold(template):
            return False
        giving_way = taken[-1:]
        for sandbox in reversed(taken[:-1]):  # who frees nothing of what is short stays
            room.leaving(sandbox, -1)
            if room.will_hold(template):
                idle.appendleft(sandbox)
            else:
                room.leaving(sandbox)
                giving_way.append(sandbox)
        for sandbox in reversed(giving_way):
            instead = None
            if sandbox.program_ids:
                instead = self._new(sandbox.template, sandbox.template_name, now_s)
                self._exchange(sandbox, instead)
            self.reclaim(sandbox, "others need its room", instead)
        return True

    def _adjust_warm(self, now_s: float) -> None:
        """Request missing warm sandboxes of each template; reclaim surplus ones."""
        has_wanted: bool | None = None
        warm: dict[str, list[Sandbox]] = {digest: [] for digest in self._warm}
        for sandbox in list(self._unowned.values()):
            if sandbox.is_stale(now_s):
                self.reclaim(sandbox, "it was warm for so long that too little of its life is left")
            else:
                warm.setdefault(sandbox.digest, []).append(sandbox)
        for digest, there in warm.items():
            name, template, count = self._warm.get(digest, ("", None, 0))
            for surplus in there[count:]:
                self.reclaim(surplus, "more are warm than are to be kept")
            if template is None or len(there) >= count or now_s < self._warm_again_at_s.get(digest, -inf):
                continue
            if has_wanted is None:
                has_wanted = any(
                    each.stage is Stage.REQUESTED and each.program_ids and each.retry_at_s <= now_s for each in self
                )
            if has_wanted:
                return  # they come first
            for _ in range(count - len(there)):
                sandbox = self._new(template, name, now_s)
                self.sandboxes[sandbox.sandbox_id] = self._unowned[sandbox.sandbox_id] = sandbox
