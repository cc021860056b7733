"""`mars` and `mars-few-long`, admissions: MARS's window of programs, which grows by one and shrinks by a factor.

Theory of operation
===================
MARS's external control plane (arXiv 2604.26963, section 4.2, Algorithm 1). A program holds a place from its admission
to its end, tools included. Two pressures are read, each with hysteresis:

- **tools**: programs at a tool for each of `tool_cpu_count` processors, and an exponential mean of how long tools wait.
  The pressure is on from `backlog_high_ratio` *or* `wait_high_s`, off from `backlog_low_ratio` *and* `wait_low_s`.
- **memory**: the part of all KV caches that is claimed or in use. On from `kv_high_ratio`, off from `kv_low_ratio`.

Once per control interval the window W is multiplied by `shrink_ratio` if either is on, and grows by `grow_count` if
both are under their *low* marks. Two clamps follow, never under `window_min_count`: W_cpu, the processors times the
middle of the backlog's marks; W_kv, from the largest window at memory's low mark to the smallest at the high one.

PackQueue orders the unadmitted programs. Under tool pressure the largest comes first, because it reaches its tools
later. If all are long (over `long_tokens`), the first that fits is taken; otherwise the smallest. A program larger than
what is left of memory under `kv_high_ratio` is passed over. If nobody is in and nobody may be admitted, the oldest is.

All of this is the paper's. Defaults, and what its text leaves open, are those of the authors' preview code
(Afterglow231/MARS_preview). `mars-few-long` packs differently: in order of arrival while both pressures are low and all
would get a place; the largest first under tool pressure; otherwise the smallest first, and a long program only when no
shorter one has waited for a moment, memory is not under pressure, and fewer than `long_count` are in.

A tool's wait is known if clients post its start; otherwise it is t·(1 - processors/running) of its time t. With unknown
processors (0), it is how much longer tools took recently than usual; the backlog and W_cpu then do not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, floor, inf

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import GpuSubmit, ProgramEnd, Signal, ToolEnd, ToolNum, ToolStart, WindowUpdate
from thunderagent.programs.policy import Admission, Moment, ProgramView, View

MARS, FEW_LONG = PACKINGS = ("mars", "few-long")
"""The paper's three orders, and ours."""

MEAN_RATIO = 0.2
"""Weight of the newest tool in the mean wait; from the authors' code."""

USUAL_RATIO = 0.01
"""The same for the usual time of tools."""

GUESSED_WINDOW_COUNT = 30
"""For each replica, until the size of programs is known: the pool in the authors' code."""

LONGEST_NEEDLE_WAIT_S = 5.0
"""The longest time without a waiting short program before a long one is admitted; both bounds are from the authors'
code."""

ROUNDING_S = 1e-6
"""A tick after an interval may seem to come this much too early."""

ARRIVALS_COUNT = 16
"""Number of arrivals whose mean distance is the other bound of that time."""

WAITING_COUNT = 32
"""How many admitted programs that wait for memory are checked for what they will take."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV caches of all replicas. `budget_tokens` is available to a program that is let in now."""

    capacity_tokens: float
    claimed_tokens: float
    used_ratio: float
    budget_tokens: float

    @classmethod
    def of(cls, view: View, target_ratio: float) -> Memory:
        """Look at all replicas; one of unknown capacity has room for everyone."""
        capacity_tokens = claimed_tokens = used_tokens = 0.0
        room_tokens = 0.0 if view.replicas else inf
        for replica in view.replicas:
            account = replica.account
            limit_tokens = account.limit_tokens
            if limit_tokens == inf:
                return cls(inf, account.demand_tokens, account.kv_used_ratio, inf)
            replica_tokens = max(account.demand_tokens, account.kv_used_ratio * limit_tokens)
            capacity_tokens += limit_tokens
            claimed_tokens += account.demand_tokens
            used_tokens += replica_tokens
            room_tokens = max(room_tokens, target_ratio * limit_tokens - replica_tokens)
        waiting = list(view.first_waiting_few(WAITING_COUNT))
        for replica in view.replicas:
            waiting += view.first_waiting_for(replica, WAITING_COUNT)
        room_tokens -= sum(program.claim_tokens for program in waiting) / max(1, len(view.replicas))
        used_ratio = used_tokens / capacity_tokens if capacity_tokens else 0.0
        return cls(capacity_tokens, claimed_tokens, used_ratio, max(0.0, room_tokens))


@dataclass(slots=True)
class MarsAdmission(Admission):
    """Keep the window. Raises ConfigurationError for invalid settings."""

    tool_cpu_count: int = 0
    """Processors that all tools share; 0 is unknown."""
    window_min_count: int = 4
    """The smallest window."""
    window_max_count: int = 0
    """The largest window; 0: as many mean-sized programs as memory holds."""
    grow_count: int = 1
    """The window grows by this many."""
    shrink_ratio: float = 0.7
    """The window shrinks to this part of it."""
    control_interval_s: float = 0.2
    """Seconds between two looks."""
    backlog_low_ratio: float = 1.0
    """Tools per processor at which pressure by tools ends, together with `wait_low_s`."""
    backlog_high_ratio: float = 4.0
    """Tools per processor at which pressure by tools begins."""
    wait_low_s: float = 2.0
    """Mean wait of tools at which their pressure ends."""
    wait_high_s: float = 5.0
    """Mean wait of tools at which their pressure begins."""
    kv_low_ratio: float = 0.85
    """Memory in use at which pressure by memory ends."""
    kv_high_ratio: float = 0.90
    """Memory in use at which pressure by memory begins."""
    long_tokens: int = 50_000
    """Programs above this size are long."""
    long_count: int = 2
    """Long programs at a time, with `few-long` only."""
    packing: str = MARS
    """`mars`: by size; `few-long`: as they come, few long ones at a time."""
    window_count: float = field(default=0.0, init=False)
    """W_adm; 0 before the first look."""
    tools_overloaded: bool = field(default=False, init=False)
    kv_overloaded: bool = field(default=False, init=False)
    tool_count: int = field(default=0, init=False)
    mean_wait_s: float = field(default=0.0, init=False)
    _usual_s: float = field(default=0.0, init=False)
    _lately_s: float = field(default=0.0, init=False)
    _changed_s: float = field(default=-inf, init=False)
    _short_seen_s: float = field(default=-inf, init=False)
    _at_tools: dict[str, tuple[float, bool]] = field(default_factory=dict, init=False)
    _arrivals_s: deque[float] = field(default_factory=lambda: deque(maxlen=ARRIVALS_COUNT), init=False)
    _long_in: dict[str, None] = field(default_factory=dict, init=False)
    _packed: deque[str] = field(default_factory=deque, init=False)
    _packed_s: float = field(default=-inf, init=False)
    _packed_by: Callable[[ProgramView], float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        for what, is_right in (
            (f"packing is one of {', '.join(PACKINGS)}", self.packing in PACKINGS),
            ("tool_cpu_count, window_max_count and long_tokens must be whole numbers, 0 or more", self._are_counts()),
            ("window_min_count must be at least 1, and window_max_count 0 or no less", self._has_bounds()),
            ("grow_count must be over 0, and shrink_ratio from 0.1 to under 1", self._moves()),
            ("control_interval_s must be over 0", self.control_interval_s > 0),
            (
                "needs 0 <= backlog_low_ratio <= backlog_high_ratio",
                0 <= self.backlog_low_ratio <= self.backlog_high_ratio,
            ),
            ("needs 0 <= wait_low_s <= wait_high_s", 0 <= self.wait_low_s <= self.wait_high_s),
            ("needs 0 < kv_low_ratio < kv_high_ratio", 0 < self.kv_low_ratio < self.kv_high_ratio),
        ):
            if not is_right:
                raise ConfigurationError(f"admission mars: {what}")

    def _are_counts(self) -> bool:
        counts = (self.tool_cpu_count, self.window_max_count, self.long_tokens, self.long_count)
        return all(count >= 0 and count % 1 == 0 for count in counts)

    def _has_bounds(self) -> bool:
        return self.window_min_count >= 1 and (
            self.window_max_count == 0 or self.window_max_count >= self.window_min_count
        )

    def _moves(self) -> bool:
        return self.grow_count > 0 and 0.1 <= self.shrink_ratio < 1

    @property
    def name(self) -> str:
        """Return the name by which it is chosen."""
        return MARS if self.packing == MARS else f"{MARS}-{self.packing}"

    @property
    def tick_s(self) -> float:
        """Return the control interval."""
        return self.control_interval_s

    def rank(self, program: ProgramView) -> float:
        """Return the size: the smallest comes first."""
        return program.claim_tokens

    # --- what is heard ----------------------------------------------------------------------------------------------

    def observe(self, view: View, signal: Signal) -> None:
        """Record how many tools run, how long they took, and which programs begin."""
        if isinstance(signal, ToolNum):
            self.tool_count = signal.tool_count
        elif isinstance(signal, ToolStart):
            self._tool_started(signal)
        elif isinstance(signal, ToolEnd):
            _, told = self._at_tools.pop(signal.program_id, (0.0, False))
            if not told:
                self._tool_ended(signal.duration_s)
        elif isinstance(signal, ProgramEnd):
            self._at_tools.pop(signal.program_id, None)
            self._long_in.pop(signal.program_id, None)
        elif isinstance(signal, GpuSubmit):
            program = view.program(signal.program_id)
            if program is not None and program.turn_count == 0:
                self._arrivals_s.append(program.opened_s)

    def _tool_started(self, signal: ToolStart) -> None:
        """Learn how long a tool waited if its client posts its start: the first start is the end of the turn."""
        asked_s, told = self._at_tools.get(signal.program_id, (signal.now_s, True))
        if not told:
            self._waited(signal.now_s - asked_s)
        self._at_tools[signal.program_id] = asked_s, signal.program_id in self._at_tools

    def _tool_ended(self, duration_s: float) -> None:
        """Learn from a tool without a posted start; it still counts as running."""
        if self.tool_cpu_count:
            running = max(1, self.tool_count)
            self._waited(duration_s * max(0.0, 1 - self.tool_cpu_count / running))
            return
        self._usual_s += (USUAL_RATIO if self._usual_s else 1.0) * (duration_s - self._usual_s)
        self._lately_s += (MEAN_RATIO if self._lately_s else 1.0) * (duration_s - self._lately_s)
        self.mean_wait_s = max(0.0, self._lately_s - self._usual_s)

    def _waited(self, wait_s: float) -> None:
        self.mean_wait_s += MEAN_RATIO * (wait_s - self.mean_wait_s)

    # --- the window -------------------------------------------------------------------------------------------------

    def next(self, view: View, moment: Moment) -> ProgramView | None:
        """Return the program to admit now, if there is a place."""
        memory = Memory.of(view, self.kv_high_ratio)
        self._control(view, memory)
        if self._limit_count(view, memory) - view.admitted_count < 1:
            return None
        first = view.first_unadmitted()
        if first is None:
            return None
        chosen = self._choose(view, memory, first)
        if chosen is None and not view.admitted_count:
            chosen = min(view.unadmitted(), key=lambda program: program.opened_s)
        if chosen is not None and chosen.claim_tokens > self.long_tokens:
            self._long_in[chosen.program_id] = None
        return chosen

    def _control(self, view: View, memory: Memory) -> None:
        """Move the window, once per interval."""
        if view.now_s - self._changed_s < self.control_interval_s - ROUNDING_S:
            return
        self._changed_s = view.now_s
        self.tool_count = view.tools_running_count  # a program that ends at its tool sends no signal of that
        largest_count = self._largest_count(view, memory)
        before_count = self.window_count
        window_count = before_count or largest_count
        backlog = self._backlog
        if backlog >= self.backlog_high_ratio or self._wait_s >= self.wait_high_s:
            self.tools_overloaded = True
        elif backlog <= self.backlog_low_ratio and self._wait_s <= self.wait_low_s:
            self.tools_overloaded = False
        if memory.used_ratio >= self.kv_high_ratio:
            self.kv_overloaded = True
        elif memory.used_ratio <= self.kv_low_ratio:
            self.kv_overloaded = False
        why = "held"
        if self.tools_overloaded or self.kv_overloaded:
            window_count = floor(window_count * self.shrink_ratio)
            why = "tools" if self.tools_overloaded else "memory"
        elif self._is_healthy(memory):
            window_count += self.grow_count
            why = "grown"
        self.window_count = self._clamped(window_count, largest_count, memory)
        if self.window_count != before_count:
            view.signal(WindowUpdate(view.now_s, int(self.window_count), view.admitted_count, why))

    def _is_healthy(self, memory: Memory) -> bool:
        tools_healthy = self._backlog <= self.backlog_low_ratio and self._wait_s <= self.wait_low_s
        return tools_healthy and memory.used_ratio <= self.kv_low_ratio and memory.budget_tokens > 0

    @property
    def _wait_s(self) -> float:
        """Return how long tools wait; 0 if none runs, because then nothing would update it."""
        return self.mean_wait_s if self.tool_count else 0.0

    @property
    def _backlog(self) -> float:
        return self.tool_count / self.tool_cpu_count if self.tool_cpu_count else 0.0

    def _limit_count(self, view: View, memory: Memory) -> float:
        """Return how many programs may be in now."""
        return self._clamped(self.window_count, self._largest_count(view, memory), memory)

    def _clamped(self, window_count: float, largest_count: float, memory: Memory) -> float:
        """Return the window clamped to its largest, W_cpu and W_kv, but never below its smallest."""
        cpu_count = inf
        if self.tool_cpu_count:
            cpu_count = ceil(self.tool_cpu_count * max(0.1, (self.backlog_low_ratio + self.backlog_high_ratio) / 2))
        excess = (memory.used_ratio - self.kv_low_ratio) / (self.kv_high_ratio - self.kv_low_ratio)
        kv_count = largest_count - min(1.0, max(0.0, excess)) * (largest_count - self.window_min_count)
        return max(self.window_min_count, min(window_count, largest_count, cpu_count, round(kv_count)))

    def _largest_count(self, view: View, memory: Memory) -> float:
        """Return W_max: as set, or as many programs of the current mean size as memory holds."""
        if self.window_max_count:
            return self.window_max_count
        if not (view.active_count and memory.claimed_tokens) or memory.capacity_tokens == inf:
            return max(self.window_min_count, GUESSED_WINDOW_COUNT * max(1, len(view.replicas)))
        return max(self.window_min_count, ceil(memory.capacity_tokens * view.active_count / memory.claimed_tokens))

    # --- who is admitted --------------------------------------------------------------------------------------------

    def _choose(self, view: View, memory: Memory, first: ProgramView) -> ProgramView | None:
        """Return the first of PackQueue's order that fits; `first` is the smallest unadmitted."""
        if self.packing == FEW_LONG:
            return self._choose_few_long(view, memory, first)
        if self.tools_overloaded:
            return self._first_fitting(view, memory, _by_size)
        if first.claim_tokens > self.long_tokens:
            return self._first_fitting(view, memory, _by_age)
        return first if first.claim_tokens <= memory.budget_tokens else None  # otherwise nobody else fits either

    def _choose_few_long(self, view: View, memory: Memory, first: ProgramView) -> ProgramView | None:
        places_count = self._limit_count(view, memory) - view.admitted_count
        if first.claim_tokens <= self.long_tokens:
            self._short_seen_s = view.now_s
        if self.tools_overloaded:
            return self._first_fitting(view, memory, _by_size)
        if not self.kv_overloaded and self._is_healthy(memory) and view.unadmitted_count <= places_count:
            by_age = sorted(view.unadmitted(), key=_by_age)
            return next((program for program in by_age if program.claim_tokens <= memory.budget_tokens), None)
        if first.claim_tokens > memory.budget_tokens:
            return None
        if first.claim_tokens > self.long_tokens and not self._may_be_long(view):
            return None
        return first

    def _first_fitting(self, view: View, memory: Memory, rank: Callable[[ProgramView], float]) -> ProgramView | None:
        """Return the first that fits; the unadmitted are ranked at most once per control interval."""
        if rank is not self._packed_by or view.now_s - self._packed_s >= self.control_interval_s:
            self._packed_by, self._packed_s = rank, view.now_s
            self._packed = deque(program.program_id for program in sorted(view.unadmitted(), key=rank))
        while self._packed:
            program = view.program(self._packed.popleft())
            if program is not None and not program.admitted and program.claim_tokens <= memory.budget_tokens:
                return program
        return None

    def _may_be_long(self, view: View) -> bool:
        """Return whether a long program may be admitted, between the short ones."""
        gap_s = LONGEST_NEEDLE_WAIT_S
        if len(self._arrivals_s) > 1:
            gap_s = min(gap_s, (self._arrivals_s[-1] - self._arrivals_s[0]) / (len(self._arrivals_s) - 1))
        if self.kv_overloaded or view.now_s - self._short_seen_s < max(self.control_interval_s, gap_s):
            return False
        for program_id in list(self._long_in):  # no more than `long_count`
            program = view.program(program_id)
            if program is None or not program.admitted:
                del self._long_in[program_id]
        return len(self._long_in) < self.long_count


def _by_size(program: ProgramView) -> float:
    return -program.claim_tokens


def _by_age(program: ProgramView) -> float:
    return program.opened_s
