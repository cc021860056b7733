"""Asks a judge about running programs, beside their turns.

Theory of operation
===================
When a turn has ended, the hot path hands over a reference to its body (`turn_seen`): a few lookups and assignments. The
newest body of each agent of a program is kept, so a sub-agent's turn hides neither the user's task nor what the others
did. Every `every_turns_count` turns of a program, in all its pools together, that makes a *case*. Only the newest case
of a program waits, and the cases of all programs have a limit of count and bytes: beyond it the oldest is dropped, and
counted. Nothing ever waits for a case.

`run` takes cases one after the other, at most `rate_per_s`, and asks a few at a time, each with a deadline. Body and
answer are read on a thread, so neither blocks the loop. Any failure - no answer, an error, no JSON, a wrong type, a
flood - is only counted (`answer.Failure`).

A verdict goes to the scheduler as an event (`Runtime.program_judged`), unless its program ended meanwhile. Its words
are only logged: they may quote the program's prompts.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

import msgspec
import structlog

from thunderagent.programs.messages import Decision, Event, Release
from thunderagent.proxy.judge.answer import Answered, Failure, Opinion, read_answer
from thunderagent.proxy.judge.asking import Asker
from thunderagent.proxy.judge.prompt import DEFAULT_PROMPT, filled
from thunderagent.proxy.judge.transcript import transcript_of_all
from thunderagent.runtime import Runtime

log = structlog.get_logger("thunderagent.judge")

MAX_WAITING_COUNT = 256
MAX_WAITING_BYTES = 64 * 2**20
"""Limit of what waits for the judge; of one program only the newest waits."""

MAX_KEPT_BYTES = 64 * 2**20
"""Limit of the bodies that are kept of all programs; beyond it those of the program heard longest ago go."""

MAX_AGENTS_COUNT = 8
"""Of one program: its first agent, which has the user's task, and the last others."""

MAX_BODY_BYTES = 2 * 2**20
"""A larger body is not read: scanning it would hold the interpreter for longer than turns should wait."""

CHARS_PER_TOKEN = 4
"""English text in a common tokenizer."""


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """When a judge is asked, and what it may read."""

    model: str = ""
    """Empty means the model of the program's own turns."""
    prompt: str = DEFAULT_PROMPT
    """With the placeholders of `prompt.py`."""
    round_limit_count: int = 0
    """Rounds that agents have at most, which the judge is told; 0 if that is not known."""
    every_turns_count: int = 5
    """Turns of a program between two questions."""
    rate_per_s: float = 1.0
    """Limit of questions about all programs together; `inf` is unlimited."""
    asked_count: int = 16
    """Limit of open questions."""
    max_prompt_tokens: int = 8000
    """Of a question, at four characters a token; a longer text is cut in the middle."""
    max_output_tokens: int = 512
    """Of an answer."""
    timeout_s: float = 30.0
    """For an answer, from the question on."""


class _Case(NamedTuple):
    program_id: str
    generation: int
    turn_count: int
    bodies: tuple[tuple[str, bytes], ...]
    """Each agent's branch and the body of its last turn, the program's first agent first."""

    @property
    def size_bytes(self) -> int:
        return sum(len(body) for _, body in self.bodies)


class Judge:
    """Collects cases, and asks about them while `run` runs."""

    def __init__(
        self,
        runtime: Runtime,
        open_asker: Callable[[], AbstractAsyncContextManager[Asker]],
        settings: JudgeSettings | None = None,
    ) -> None:
        """Ask with what `open_asker` opens."""
        self._runtime = runtime
        self._open_asker = open_asker
        self._settings = settings or JudgeSettings()
        self._waiting: OrderedDict[str, _Case] = OrderedDict()
        self._waiting_bytes = 0
        self._bodies: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        """Of each program by branch, the program heard longest ago first."""
        self._bodies_bytes = 0
        self._seen_turn_counts: dict[str, int] = {}
        """Turn number of each program's last case."""
        self._news = asyncio.Event()
        self.asking_count = 0
        self.verdict_counts: Counter[str] = Counter()
        self.failure_counts: Counter[Failure] = Counter()
        self.dropped_counts: Counter[str] = Counter()
        """Cases that were never asked: `full`, `newer`, `ended`."""
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0
        self.asked_s_total = 0.0
        runtime.observe(self._heard, Release)

    def __repr__(self) -> str:
        return f"<Judge: {len(self._waiting)} cases wait, {self.asking_count} are asked about>"

    @property
    def waiting_count(self) -> int:
        """Number of waiting cases."""
        return len(self._waiting)

    def turn_seen(self, program_id: str, body: bytes, branch_id: str = "") -> None:
        """Note that a branch's turn with this body has ended. Never blocks, and reads nothing. Cost: O(1)."""
        programs = self._runtime.pools.incarnations(program_id)
        if not programs:
            return
        bodies = self._keep(program_id, branch_id, body)
        turn_count = sum(program.turn_count for program in programs)
        seen = min(self._seen_turn_counts.get(program_id, 0), turn_count)  # less if an incarnation is gone
        self._seen_turn_counts[program_id] = seen
        if turn_count - seen < self._settings.every_turns_count:
            return
        self._seen_turn_counts[program_id] = turn_count
        if len(body) > MAX_BODY_BYTES:
            self.failure_counts[Failure.TOO_LARGE] += 1
            return
        if (older := self._waiting.get(program_id)) is not None:
            self._waiting_bytes -= older.size_bytes
            self.dropped_counts["newer"] += 1
        case = self._waiting[program_id] = _Case(program_id, programs[0].generation, turn_count, tuple(bodies.items()))
        self._waiting_bytes += case.size_bytes
        while len(self._waiting) > MAX_WAITING_COUNT or self._waiting_bytes > MAX_WAITING_BYTES:
            self._take()
            self.dropped_counts["full"] += 1
        self._news.set()

    def _keep(self, program_id: str, branch_id: str, body: bytes) -> dict[str, bytes]:
        """Keep a branch's last body, and return those of its program; one that is too large is not kept."""
        bodies = self._bodies.setdefault(program_id, {})
        self._bodies.move_to_end(program_id)
        if len(body) > MAX_BODY_BYTES:
            self._bodies_bytes -= len(bodies.pop(branch_id, b""))
            return bodies
        self._bodies_bytes += len(body) - len(bodies.get(branch_id, b""))
        bodies[branch_id] = body
        if len(bodies) > MAX_AGENTS_COUNT:
            _, second, *_ = bodies
            self._bodies_bytes -= len(bodies.pop(second))
        while self._bodies_bytes > MAX_KEPT_BYTES:
            self._forget(next(iter(self._bodies)))
        return bodies

    def _forget(self, program_id: str) -> None:
        self._bodies_bytes -= sum(map(len, self._bodies.pop(program_id, {}).values()))

    async def run(self) -> None:
        """Ask about waiting cases until cancelled."""
        places, next_at_s = asyncio.Semaphore(self._settings.asked_count), 0.0
        async with self._open_asker() as asker, asyncio.TaskGroup() as group:
            while True:
                await self._news.wait()
                await places.acquire()
                if (pause_s := next_at_s - monotonic()) > 0:
                    await asyncio.sleep(pause_s)
                if not self._waiting:  # its program ended meanwhile
                    places.release()
                    self._news.clear()
                    continue
                next_at_s = monotonic() + 1 / self._settings.rate_per_s
                group.create_task(self._judge(asker, self._take())).add_done_callback(lambda _: places.release())
                if not self._waiting:
                    self._news.clear()

    def _take(self) -> _Case:
        _, case = self._waiting.popitem(last=False)
        self._waiting_bytes -= case.size_bytes
        return case

    def _heard(self, event: Event, decisions: Sequence[Decision]) -> None:  # noqa: ARG002 - an observer's signature
        """Forget ended programs."""
        for decision in decisions:
            if type(decision) is Release:
                self._seen_turn_counts.pop(decision.program_id, None)
                self._forget(decision.program_id)
                if (case := self._waiting.pop(decision.program_id, None)) is not None:
                    self._waiting_bytes -= case.size_bytes
                    self.dropped_counts["ended"] += 1

    async def _judge(self, asker: Asker, case: _Case) -> None:
        """Ask about one program, and pass the verdict on."""
        self.asking_count += 1
        began_s = monotonic()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answered = await self._ask(asker, case)
        except TimeoutError:
            answered = Answered(Failure.TIMEOUT)
        finally:
            self.asking_count -= 1
            self.asked_s_total += monotonic() - began_s
        self.prompt_tokens_total += answered.prompt_tokens
        self.output_tokens_total += answered.output_tokens
        opinion = answered.opinion
        if isinstance(opinion, Failure):
            self.failure_counts[opinion] += 1
            log.debug("judge_failed", program_id=case.program_id, why=opinion.value)
            return
        self._pass_on(case, opinion)

    async def _ask(self, asker: Asker, case: _Case) -> Answered:
        question = await asyncio.to_thread(self._question, case)
        if isinstance(question, Failure):
            return Answered(question)
        answer = await asker.ask(question)
        if isinstance(answer, Failure):
            return Answered(answer)
        return await asyncio.to_thread(read_answer, answer)

    def _question(self, case: _Case) -> bytes | Failure:
        """Return the body of a chat completion with the question about a program."""
        settings = self._settings
        room_chars = settings.max_prompt_tokens * CHARS_PER_TOKEN - len(settings.prompt)
        transcript = transcript_of_all(case.bodies, max(CHARS_PER_TOKEN, room_chars))
        if transcript is None:
            return Failure.NO_TASK
        question = filled(
            settings.prompt,
            transcript.task,
            transcript.steps,
            case.turn_count,
            transcript.round_count,
            settings.round_limit_count,
        )
        return msgspec.json.encode(
            {
                "model": settings.model or transcript.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": settings.max_output_tokens,
                "temperature": 0,
                "stream": False,
            }
        )

    def _pass_on(self, case: _Case, opinion: Opinion) -> None:
        prediction = "success" if opinion.will_succeed else "failure"
        self.verdict_counts[prediction] += 1
        log.debug(
            "judged",
            program_id=case.program_id,
            turn_count=case.turn_count,
            prediction=prediction,
            confidence_ratio=opinion.confidence_ratio,
            reasoning=opinion.reasoning,
        )
        self._runtime.program_judged(
            case.program_id, case.generation, case.turn_count, opinion.will_succeed, opinion.confidence_ratio
        )
