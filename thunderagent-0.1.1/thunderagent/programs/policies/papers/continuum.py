"""`continuum`: pin a program's memory through its tool for as long as that is expected to pay, then give it up.

Theory of operation
===================
Continuum (arXiv 2511.02230; later named CacheTTL) gives the memory of a program a time to live when a turn ends, by
what is known of the tool that it calls [4.2, Eq. 2]. With P(τ, f) the part of the recorded times of tool f that were at
most τ, it is the τ, out of 0 and the recorded times, that maximises

    P(τ, f) · (T·η + PrefillReload(r)) - τ

T is the recent mean wait of turns whose program had lost its memory, 0 at first: such a program queues again. η =
-Corr(k, N - k) over finished programs, k turns of N done, says how much of that holding saves: 1 if all take the same
number of turns, 0 if nothing tells which is nearly done. PrefillReload is the time to compute the context again. The
held memory is on both sides and cancels out. Until a tool was seen more than `cold_count` times, the times of all tools
are used. Until all of them together were, the time to live is `ttl_s`, the constant of the authors' code, or with
`cold_formula` that of the paper: the best one if tool times are exponential with mean 1 s, and η is 1, which is ln B
for a benefit of B > 1 s. A time under 0.01 s pins nothing.

With `dynamic` False it is the fixed time to live of the authors' code: `ttl_s`, or nothing for a tool whose mean time
is longer.

Programs are let in where their claims fit, in order of arrival [4.3]; a turn whose program is still pinned is granted
at once. If claims grow over the capacity the program that arrived last is paused first, a pinned one before one whose
turn runs. If nothing runs on a replica because its memory is pinned, while the head of the queue does not fit, pins are
taken, of the latest arrival first, until it does [5.2]. Program order in the engine is its priority, if the engine has
priorities; it puts its preempted requests before all others itself.

No proxy knows which turn is a program's last: it is pinned like others until the release. Offloading memory instead of
giving it up is up to the engine; PrefillReload is the learned time to prefill.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from typing import ClassVar

from thunderagent.programs.messages import GpuSubmit, ProgramEnd, Reason, Signal, ToolEnd, ToolStart
from thunderagent.programs.policies.fitting import Fitting
from thunderagent.programs.policies.helpers import (
    check_not_negative,
    restore_waiting,
    restore_waiting_for,
    worth_a_look,
)
from thunderagent.programs.policies.parts.simple import ProgramAge
from thunderagent.programs.policy import ClaimRules, Moment, Placement, Policy, ProgramView, ReplicaView, View
from thunderagent.programs.state.program import Status

FITTING = Fitting()

LEAST_TTL_S = 0.01
"""A shorter pin is not made, as in the authors' code."""

DELAYS_COUNT = 200
"""Number of turns whose delays make up T, as in the authors' code."""

DURATIONS_COUNT = 500
"""Number of remembered times per tool, five times as many as are needed to believe them; the paper keeps all."""

NAMES_COUNT = 256
"""Number of remembered tools; beyond, the one longest unseen is forgotten."""


def best_ttl_s(durations_s: Sequence[float], benefit_s: float) -> float:
    """Return the time to live of Eq. 2: `durations_s` in ascending order, `benefit_s` is T·η + PrefillReload."""
    best_s = best_reward_s = 0.0
    for count, duration_s in enumerate(durations_s, start=1):
        reward_s = count / len(durations_s) * benefit_s - duration_s
        if reward_s > best_reward_s:
            best_s, best_reward_s = duration_s, reward_s
    return best_s


def cold_ttl_s(benefit_s: float) -> float:
    """Return the time to live of the paper's cold start: it maximises (1 - exp(-τ))·B - τ."""
    return log(benefit_s) if benefit_s > 1 else 0.0


class Durations:
    """The last times of a tool, and the mean of all its times."""

    __slots__ = ("_in_order", "count", "sorted_s", "total_s")

    def __init__(self) -> None:
        """Create an empty record."""
        self._in_order: deque[float] = deque()
        self.sorted_s: list[float] = []
        self.count = 0
        self.total_s = 0.0

    def add(self, duration_s: float) -> None:
        """Add a time, and forget the oldest beyond the limit."""
        self.count += 1
        self.total_s += duration_s
        self._in_order.append(duration_s)
        insort(self.sorted_s, duration_s)
        if len(self._in_order) > DURATIONS_COUNT:
            del self.sorted_s[bisect_left(self.sorted_s, self._in_order.popleft())]

    @property
    def mean_s(self) -> float:
        """Return the mean of all; 0 if there are none."""
        return self.total_s / self.count if self.count else 0.0


class Memoryfulness:
    """η: how well the number of done turns predicts the number left, from sums over finished programs."""

    __slots__ = ("_done", "_done_left", "_done_squared", "_left", "_left_squared", "_pair_count")

    def __init__(self) -> None:
        """Start without programs."""
        self._pair_count = self._done = self._left = self._done_squared = self._left_squared = self._done_left = 0

    def add(self, turn_count: int) -> None:
        """Add the pairs (k, N - k), k from 1 to N, of a program of N turns."""
        count = turn_count
        done, squared = count * (count + 1) // 2, count * (count + 1) * (2 * count + 1) // 6
        self._pair_count += count
        self._done += done
        self._left += count * (count - 1) // 2
        self._done_squared += squared
        self._left_squared += (count - 1) * count * (2 * count - 1) // 6
        self._done_left += count * done - squared

    @property
    def eta(self) -> float:
        """Return -Corr(k, N - k); 1 while that is undefined."""
        count = self._pair_count
        done_spread = count * self._done_squared - self._done**2
        left_spread = count * self._left_squared - self._left**2
        if count < 2 or not done_spread or not left_spread:
            return 1.0
        together = count * self._done_left - self._done * self._left
        return -together / (sqrt(done_spread) * sqrt(left_spread))


@dataclass(slots=True)
class Continuum(Policy):
    """Pin by tool; `dynamic`, `ttl_s`, `cold_count` and `cold_formula` are explained above.

    `prefill_token_s` 0 is the learned value; the paper measures it beforehand. `reserve_tokens` are added to each
    program's context, as room for what its next turn adds.
    """

    dynamic: bool = True
    """Learn how long to pin for each tool; `false` (`continuum-fixed`): always `ttl_s`."""
    ttl_s: float = 2.0
    """The fixed time, and that of a cold start."""
    cold_count: int = 100
    """A tool's own times count from this many on; before that the times of all tools, if they are as many, else
    `ttl_s`.
    """
    cold_formula: bool = False
    """Use the paper's ln B instead of `ttl_s` in a cold start."""
    prefill_token_s: float = 0.0
    """Seconds to prefill a token; 0: as learned."""
    reserve_tokens: int = 256
    """Tokens added to each context: room for what the next turn adds."""
    priority: ProgramAge = field(init=False, repr=False, default_factory=ProgramAge)
    _of_all: Durations = field(init=False, repr=False, default_factory=Durations)
    _by_tool: OrderedDict[str, Durations] = field(init=False, repr=False, default_factory=OrderedDict)
    _memoryfulness: Memoryfulness = field(init=False, repr=False, default_factory=Memoryfulness)
    _delays_s: deque[float] = field(init=False, repr=False, default_factory=lambda: deque(maxlen=DELAYS_COUNT))
    _lost_memory: set[str] = field(init=False, repr=False, default_factory=set)
    """Programs without memory when their tool ended, until their next turn is granted."""
    tick_s: ClassVar[float] = 0.1
    stays_home: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        check_not_negative("continuum", self, "ttl_s", "cold_count", "prefill_token_s", "reserve_tokens")

    @property
    def name(self) -> str:
        """Return its name; with a fixed time, the preset's."""
        return "continuum" if self.dynamic else "continuum-fixed"

    @property
    def claim_rules(self) -> ClaimRules:
        """Return the constant reserve."""
        return ClaimRules(reserve_tokens=self.reserve_tokens)

    # --- the time to live -------------------------------------------------------------------------------------------

    def observe(self, view: View, signal: Signal) -> None:
        """Record times of tools, delays of turns whose programs had lost their memory, and lengths of programs."""
        if isinstance(signal, ToolEnd):
            self._tool_ended(signal.tool, signal.duration_s)
            program = view.program(signal.program_id)
            if program is not None and program.status is Status.PAUSED:
                self._lost_memory.add(signal.program_id)
        elif isinstance(signal, ToolStart):
            self._lost_memory.discard(signal.program_id)
        elif isinstance(signal, GpuSubmit):
            if signal.program_id in self._lost_memory:
                self._lost_memory.remove(signal.program_id)
                self._delays_s.append(signal.held_s)
        elif isinstance(signal, ProgramEnd):
            self._lost_memory.discard(signal.program_id)
            self._memoryfulness.add(signal.turn_count)

    def hold_s(self, view: View, program: ProgramView) -> float:
        """Return the time to live. Cost: O(remembered times of the tool)."""
        own = self._by_tool.get(program.tool)
        if not self.dynamic:
            return 0.0 if own is not None and own.mean_s > self.ttl_s else self.ttl_s
        ttl_s = self._dynamic_s(own, self.benefit_s(view, program))
        return ttl_s if ttl_s >= LEAST_TTL_S else 0.0

    def benefit_s(self, view: View, program: ProgramView) -> float:
        """Return T·η + PrefillReload."""
        delay_s = sum(self._delays_s) / len(self._delays_s) if self._delays_s else 0.0
        reload_s = (self.prefill_token_s or view.prefill_token_s) * program.context_tokens
        return delay_s * self._memoryfulness.eta + reload_s

    def _dynamic_s(self, own: Durations | None, benefit_s: float) -> float:
        if self._of_all.count <= self.cold_count:
            return cold_ttl_s(benefit_s) if self.cold_formula else self.ttl_s
        known = own if own is not None and own.count > self.cold_count else self._of_all
        return best_ttl_s(known.sorted_s, benefit_s)

    def _tool_ended(self, tool: str, duration_s: float) -> None:
        self._of_all.add(duration_s)
        own = self._by_tool.get(tool)
        if own is None:
            own = self._by_tool[tool] = Durations()
            if len(self._by_tool) > NAMES_COUNT:
                self._by_tool.popitem(last=False)
        else:
            self._by_tool.move_to_end(tool)
        own.add(duration_s)

    # --- order ------------------------------------------------------------------------------------------------------

    def pause_rank(self, program: ProgramView) -> float:
        """Return the age: the last program to arrive is paused first."""
        return -program.opened_s

    def restore_rank(self, program: ProgramView) -> float:
        """Return the opening time: programs are served in order of arrival."""
        return program.opened_s

    def place(self, view: View, program: ProgramView, candidates: Sequence[ReplicaView]) -> Placement:
        """Return the program's own replica, or one where its claim fits, if nobody older waits."""
        return FITTING.place(view, program, candidates)

    def balance(self, view: View, moment: Moment) -> None:
        """Take expired pins and what does not fit, fill free room, and let nothing stall because of pins."""
        replicas = worth_a_look(view, moment)
        for replica in replicas:
            while (program := view.first_expired(replica)) is not None:
                if not view.propose_pause(program, Reason.EXPIRED):
                    break
            FITTING.relieve(view, replica)
        restore_waiting(view, self, replicas)
        for replica in replicas:
            self._unpin_standing(view, replica)

    def _unpin_standing(self, view: View, replica: ReplicaView) -> None:
        """Take pins where nothing runs, until the queue's head, or that of the replica's own queue, fits there."""
        while replica.account.turn_count == 0 and (view.first_waiting() or view.waiting_count_for(replica)):
            program = view.first_to_pause(replica)
            if program is None or not view.propose_pause(program, Reason.THRASHING):
                return
            restore_waiting_for(view, self, replica)
            restore_waiting(view, self, [replica])
