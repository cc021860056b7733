"""`concur`: a window of programs that may be active, widened and cut like TCP's by how full the engines' memory is.

Theory of operation
===================
CONCUR (arXiv 2601.22705, section 3.2) treats the KV cache as TCP treats the network: a shared resource that is
congested when it is full *and* a returning agent does not find its context any more. By U, the used part of the KV
pool, and H, the prefix hit rate, the window W of active agents is

    W + alpha     if U < U_low                        nobody is in the way: try more
    beta · W      if U > U_high and H < H_threshold   full and missing: it thrashes
    W             else

with alpha (`add_count`) = 2, beta (`cut_ratio`) = 0.5, U_low (`low_ratio`) = 0.2, U_high (`high_ratio`) = 0.5 and
H_threshold (`hit_threshold_ratio`) = 0.2 for all models and workloads of the paper. An agent is paused only between two
steps, with what it has: here a program over the window is dismissed when its turn has ended, and waits unadmitted from
its next turn on. Programs that were paused come back before new ones begin.

Chosen here, not in the paper: W is updated every `interval_s`, long enough for hits to show the effect of the last
change, and starts at `first_count`. It is a whole number, at least 1, and widened only if it is full, because an
unfilled window says nothing of the memory. The youngest is paused first, and the oldest comes back first. Over several
replicas U and H are means. H is the mean of the polls in an interval. Engines that do not report their use count as
empty: then the window only grows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from thunderagent.errors import ConfigurationError
from thunderagent.programs.messages import ProgramEnd, Reason, Signal, ToolEnd, ToolStart, WindowUpdate
from thunderagent.programs.policies.helpers import check_whole_from_one
from thunderagent.programs.policy import Admission, Moment, ProgramView, View
from thunderagent.programs.state.ranked_set import RankedSet

BEFORE_NEW_S = 1e9
"""Programs that were in before rank before all others, whatever their age."""


@dataclass(slots=True)
class Readings:
    """Poll readings since the last look at the window."""

    count: int = 0
    summed_used_ratio: float = 0.0
    summed_hit_ratio: float = 0.0

    def add(self, view: View) -> None:
        """Add the current mean reading of all replicas."""
        accounts = [replica.account for replica in view.replicas]
        if accounts:
            self.count += 1
            self.summed_used_ratio += sum(account.kv_used_ratio for account in accounts) / len(accounts)
            self.summed_hit_ratio += sum(account.hit_ratio for account in accounts) / len(accounts)


@dataclass(slots=True)
class Concur(Admission):
    """Admit while there are fewer programs than places in the window; the paper's constants are the defaults."""

    add_count: int = 2
    """The window grows by this many."""
    cut_ratio: float = 0.5
    """The window shrinks to this part of it."""
    low_ratio: float = 0.2
    """It grows while running turns use less than this part of the capacity."""
    high_ratio: float = 0.5
    """It may shrink while they use more than this."""
    hit_threshold_ratio: float = 0.2
    """It shrinks if prefix cache hits are below this."""
    interval_s: float = 5.0
    """Seconds between two looks; 20 to 60 where turns take long."""
    first_count: int = 8
    """The window at first."""
    window_count: int = field(init=False)
    _readings: Readings = field(init=False, repr=False, default_factory=Readings)
    _updated_s: float = field(init=False, repr=False, default=-inf)
    _acting: RankedSet[str] = field(init=False, repr=False, default_factory=RankedSet)
    """Admitted programs between two turns, the youngest first."""
    name: ClassVar[str] = "concur"
    tick_s: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        check_whole_from_one("concur", self, "add_count", "first_count")
        if not 0 < self.cut_ratio < 1:
            raise ConfigurationError(f"concur: cut_ratio is between 0 and 1, not {self.cut_ratio}")
        if not 0 <= self.low_ratio <= self.high_ratio:
            raise ConfigurationError(
                f"concur: needs 0 <= low_ratio <= high_ratio, not {self.low_ratio} and {self.high_ratio}"
            )
        if not self.interval_s > 0:
            raise ConfigurationError(f"concur: interval_s must be over 0, not {self.interval_s}")
        self.window_count = int(self.first_count)

    def rank(self, program: ProgramView) -> float:
        """Return the opening time; programs that were in before come first."""
        return program.opened_s - BEFORE_NEW_S if program.turn_count else program.opened_s

    def observe(self, view: View, signal: Signal) -> None:
        """Track which programs are between two turns."""
        if isinstance(signal, ToolStart):
            program = view.program(signal.program_id)
            if program is not None:
                self._acting.add(signal.program_id, -program.opened_s)
        elif isinstance(signal, ToolEnd | ProgramEnd):
            self._acting.discard(signal.program_id)

    def next(self, view: View, moment: Moment) -> ProgramView | None:
        """Return a program that comes back or begins, while there is a place; check the window when due."""
        if moment is Moment.TICK:
            self._look(view)
        self._dismiss(view)
        return view.first_unadmitted() if view.admitted_count < self.window_count else None

    def next_window(self, used_ratio: float, hit_ratio: float) -> tuple[int, str]:
        """Return the window after U and H, and the reason [section 3.2]."""
        if used_ratio < self.low_ratio:
            return self.window_count + int(self.add_count), "under-used"
        if used_ratio > self.high_ratio and hit_ratio < self.hit_threshold_ratio:
            return max(1, int(self.window_count * self.cut_ratio)), "thrashing"
        return self.window_count, "held"

    def _look(self, view: View) -> None:
        """Take a reading, and move the window after each interval."""
        if self._updated_s == -inf:
            self._updated_s = view.now_s
        self._readings.add(view)
        if view.now_s < self._updated_s + self.interval_s or not self._readings.count:
            return
        readings, self._readings, self._updated_s = self._readings, Readings(), view.now_s
        window_count, why = self.next_window(
            readings.summed_used_ratio / readings.count, readings.summed_hit_ratio / readings.count
        )
        is_full = view.unadmitted_count > 0 or view.admitted_count >= self.window_count
        if window_count != self.window_count and (is_full or window_count < self.window_count):
            self.window_count = window_count
            view.signal(WindowUpdate(view.now_s, window_count, view.admitted_count, why))

    def _dismiss(self, view: View) -> None:
        """Pause programs that are over the window and between two turns."""
        while view.admitted_count > self.window_count and (program_id := self._acting.first()) is not None:
            self._acting.discard(program_id)
            program = view.program(program_id)
            if program is not None:
                view.propose_dismiss(program, Reason.ADMISSION)
