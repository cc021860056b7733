"""A judge in a simulation: it takes time and tokens on the replicas, and is right as often as a curve says.

A question is an anonymous turn, as the proxy sends it: a prompt common to all questions, then the program's transcript
cut to what a judge reads, and a short answer. When the answer is generated, the scheduler gets a verdict. While a
transcript is read whole, it continues from what the last question read, which an engine may have cached; a transcript
that is cut in the middle is computed anew.

Whether failure is predicted is random, with a chance that grows with the program's turns: `recall` for a program that
will fail, `false_alarms` for one that will succeed. Each program has a fixed value between 0 and 1, and is predicted to
fail once its curve passes that value; a part of the verdicts (`noise_ratio`) draws anew. Both are seeded by the program
and its turn, so runs with one seed have the same verdicts at the same turns, in whatever order they are served.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from random import Random

from thunderagent.programs.messages import FAILURE
from thunderagent.simulator.engine.records import EngineRequest
from thunderagent.simulator.workloads.contexts import Context, TokenSpace
from thunderagent.simulator.workloads.plans import ProgramPlan

Curve = tuple[tuple[float, float], ...]
"""Points in ascending order: turns, and the part predicted to fail by then; straight lines between."""


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """How a judge is asked, what a question costs, and how often the judge is right."""

    recall: Curve
    false_alarms: Curve
    noise_ratio: float = 0.2
    every_turns_count: int = 5
    prompt_tokens: int = 300
    """The part that all questions have in common."""
    max_transcript_tokens: int = 7700
    output_tokens: int = 80
    confidence_ratio: float = 0.8

    def asks_after(self, turn_count: int) -> bool:
        """Say whether the judge is asked about a program after this number of turns."""
        return turn_count % self.every_turns_count == 0

    def predicts_failure(self, plan: ProgramPlan, seed: int, turn_count: int) -> bool:
        """Say whether the judge predicts failure for a program after this number of turns."""
        curve = self.recall if plan.outcome == FAILURE else self.false_alarms
        place = _random(seed, plan).random()
        noise = _random(seed, plan, turn_count)
        if noise.random() < self.noise_ratio:
            place = noise.random()
        return place < at(curve, turn_count)

    def begin(self, tokens: TokenSpace) -> Context:
        """Return what the judge has read of a program before its first question."""
        return tokens.open("judge", self.prompt_tokens)

    def question(self, turn_id: int, tokens: TokenSpace, read: Context, context_tokens: int) -> EngineRequest:
        """Return the question to an engine about a program with this context; `read` is what was read before."""
        if context_tokens > self.max_transcript_tokens:
            read = self.begin(tokens)
            context_tokens = self.max_transcript_tokens
        read.append(max(0, context_tokens + self.prompt_tokens - len(read)))
        answer = tokens.open().following(self.output_tokens)
        return EngineRequest(str(turn_id), read.tokens(), answer, keys=read.keys_with(answer))


def at(curve: Curve, turns: float) -> float:
    """Return the value of a curve, which begins at 0 and is flat after its last point."""
    points = ((0.0, 0.0), *curve)
    place = bisect_right(points, (turns, 2.0))
    before = points[place - 1]
    if place == len(points):
        return before[1]
    after = points[place]
    return before[1] + (after[1] - before[1]) * (turns - before[0]) / (after[0] - before[0])


def _random(seed: int, plan: ProgramPlan, turn_count: int = 0) -> Random:
    return Random(f"judge/{seed}/{plan.program_id}/{turn_count}")
