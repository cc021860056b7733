"""Keep an engine to real time: when each iteration is over, and who is told of its tokens.

Theory of operation
-------------------
When an iteration is said to last 15 ms, its tokens are handed out 15 ms after the end of the iteration before: the
schedule is kept on a clock of the model's, so an inaccurate wait makes one iteration longer and the next shorter, and
never adds up. A process that cannot keep up says so (`late_iteration_count`, `lag_s`) instead of being silently slow.

Nothing waits here and there is no clock: `now_s` is real seconds, the caller's; model seconds are real seconds times
speed. The caller's loop is: `begin_iteration`, wait for `time_left_s`, `deliver`; and `catch_up` after a rest.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thunderagent.simulator.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thunderagent.simulator.engine.records import EngineConfig, EngineRequest, FinishedRequest, StepResult


@dataclass(slots=True, eq=False)
class Generation:
    """The progress of one request. `on_news` is called at each step; if `whole`, only at its end."""

    request: EngineRequest
    finish_reason: str
    on_news: Callable[[], None]
    whole: bool
    generated_count: int = 0
    finished: FinishedRequest | None = None
    aborted: bool = False

    def add_token(self) -> None:
        """Count one more token."""
        self.generated_count += 1
        if not self.whole:
            self.on_news()

    @property
    def is_over(self) -> bool:
        """Return whether there will be no more."""
        return self.finished is not None or self.aborted

    def finish(self, finished: FinishedRequest) -> None:
        """Note that there will be no more."""
        self.finished = finished
        self.on_news()


class RealtimeEngine:
    """Steps an engine in real time, from `now_s` on.

    `late_iteration_count` counts iterations that were over before they could be waited for, `lag_s` is how far the
    model's clock is behind now. `ended_count` counts requests by reason: stop, length, abort.
    """

    def __init__(self, config: EngineConfig, *, speed: float, now_s: float) -> None:
        self.engine = Engine(config)
        self.ended_count: Counter[str] = Counter()
        self.late_iteration_count = 0
        self.lag_s = 0.0
        self._speed = speed
        self._origin_s = now_s
        self._model_s = 0.0
        self._generations: dict[str, Generation] = {}

    @contextmanager
    def generation(
        self, request: EngineRequest, finish_reason: str, now_s: float, *, whole: bool, on_news: Callable[[], None]
    ) -> Iterator[Generation]:
        """Run a request for as long as the context is open; leaving it early aborts the request at once."""
        generation = Generation(request, finish_reason, on_news, whole)
        self.engine.submit(request, self._to_model_s(now_s))
        self._generations[request.request_id] = generation
        try:
            yield generation
        finally:
            del self._generations[request.request_id]
            if self.engine.abort(request.request_id):
                self.ended_count["abort"] += 1

    def abort(self, generation: Generation) -> None:
        """End a request early, with what it has; does nothing for a finished one."""
        if not generation.is_over and self.engine.abort(generation.request.request_id):
            self.ended_count["abort"] += 1
            generation.aborted = True
            generation.on_news()

    def catch_up(self, now_s: float) -> None:
        """Let the next iteration begin now at the earliest: idle time does not count as lag."""
        self._model_s = max(self._model_s, self._to_model_s(now_s))

    def begin_iteration(self) -> StepResult:
        """Run the iteration that begins at the end of the one before; its tokens are not delivered yet."""
        result = self.engine.step(self._model_s)
        self._model_s += result.duration_s
        return result

    def time_left_s(self, result: StepResult, now_s: float) -> float:
        """Return how many real seconds the iteration lasts from now on; record its lateness."""
        if result.duration_s == 0:
            self.catch_up(now_s)
            return 0.0
        left_s = (self._model_s - self._to_model_s(now_s)) / self._speed
        self.lag_s = max(0.0, -left_s)
        self.late_iteration_count += left_s < 0
        return max(0.0, left_s)

    def deliver(self, result: StepResult) -> None:
        """End the iteration: deliver its tokens."""
        for request_id in result.generated:
            generation = self._generations.get(request_id)
            if generation is not None:  # otherwise its client left during the iteration
                generation.add_token()
        for finished in result.finished:
            generation = self._generations.get(finished.request_id)
            if generation is not None:
                self.ended_count[generation.finish_reason] += 1
                generation.finish(finished)
            else:
                self.ended_count["abort"] += 1
        if not self.engine.has_work:
            self.lag_s = 0.0

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Return the requests that run or wait."""
        return tuple(self._generations.values())

    def _to_model_s(self, now_s: float) -> float:
        return (now_s - self._origin_s) * self._speed
