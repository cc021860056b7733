"""Turn the events of a running proxy into recorded programs, so that its day can be replayed under another policy.

Theory of operation
-------------------
A replay needs what belongs to the programs, not what the scheduler and the engines made of it: how much each turn
appended, how much it generated, how long the tool ran. So the gap between two turns counts from the end of the answer
to the next arrival, and the time in between, queue and engine, is written down (`api_s`) but not replayed. What a
prompt had in common with the one before is not in the events: a prompt that did not shrink is taken to continue it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import msgspec

from thunderagent.programs.messages import Event, ProgramReleased, ProgramsReleased, TurnAsk, TurnEnd

BLOCK_TOKENS = 64
"""Block size of prefix hits, as in other recordings."""


@dataclass(slots=True)
class Recording:
    """Recorded programs, in the order of their first turn, and how many turns could not be recorded.

    `anonymous_count` turns named no program, `unknown_count` answers carried no usage, `failed_count` turns failed or
    were abandoned; `open_count` had not ended when the log did.
    """

    programs: list[RecordedProgram] = field(default_factory=list)
    anonymous_count: int = 0
    unknown_count: int = 0
    failed_count: int = 0
    open_count: int = 0

    def lines(self) -> Iterator[bytes]:
        """Yield one JSON object per program, one per line: the format of `traces.load_recorded`."""
        shared_tokens = self.shared_prefix_tokens()
        begin_s = self.programs[0].first_arrival_s if self.programs else 0.0
        for program in self.programs:
            row: dict[str, Any] = {"id": program.recorded_id, "start_s": round(program.first_arrival_s - begin_s, 3)}
            if shared_tokens and program.first_cached_tokens >= shared_tokens:
                row |= {"prefix_group": 0, "shared_prefix_tokens": shared_tokens, "prefix_basis": "cached"}
            yield msgspec.json.encode(row | {"turns": list(program.rows())}) + b"\n"

    def shared_prefix_tokens(self) -> int:
        """Return what at least half of the first prompts found in the cache: the programs' shared prefix.

        The first program found it empty, so it counts as not sharing it although it does.
        """
        found = [program.first_cached_tokens for program in self.programs]
        return median_low(found) if found else 0

    def __str__(self) -> str:
        """Return in one line what was recorded and what was not."""
        turns_count = sum(len(program.turns) for program in self.programs)
        return (
            f"{len(self.programs)} programs, {turns_count} turns; left out: {self.anonymous_count} without a program, "
            f"{self.unknown_count} without usage, {self.failed_count} failed, {self.open_count} not ended"
        )


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn that ended well; times in seconds of the log."""

    arrived_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class RecordedProgram:
    """One program, or one branch of it, in the order in which its turns ended."""

    recorded_id: str
    turns: list[RecordedTurn] = field(default_factory=list)

    @property
    def first_arrival_s(self) -> float:
        """Return when its first turn arrived."""
        return self.turns[0].arrived_s

    @property
    def first_cached_tokens(self) -> int:
        """Return what its first prompt found in the cache, left there by others."""
        return self.turns[0].cached_tokens

    def rows(self) -> Iterator[list[Any]]:
        """Give [t_s, input_tokens, output_tokens, prefix_hit_tokens, api_s, gap_s, stop] for each turn."""
        previous_tokens = 0
        for turn, after in zip(self.turns, [*self.turns[1:], None], strict=True):
            continued_tokens = previous_tokens if turn.prompt_tokens >= previous_tokens else 0
            hit_tokens = max(continued_tokens, turn.cached_tokens) if previous_tokens else 0
            gap_s = None if after is None else round(max(0.0, after.arrived_s - turn.finished_s), 3)
            yield [
                round(turn.arrived_s - self.first_arrival_s, 3),
                turn.prompt_tokens,
                turn.output_tokens,
                hit_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
                round(turn.finished_s - turn.arrived_s, 3),
                gap_s,
                "unknown",
            ]
            previous_tokens = turn.prompt_tokens


def record(events: Iterable[Event]) -> Recording:
    """Collect the programs of a proxy's events, which come in the order of the log.

    A branch is recorded as a program `ID/BRANCH`. An id that is used again after its release is another program,
    `ID#2`.
    """
    recorder = _Recorder()
    for event in events:
        recorder.handle(event)
    return recorder.recording()


class _Recorder:
    def __init__(self) -> None:
        self._done = Recording()
        self._arrivals: dict[int, TurnAsk] = {}
        self._programs: dict[tuple[str, str, int], RecordedProgram] = {}
        self._releases: Counter[str] = Counter()

    def recording(self) -> Recording:
        self._done.open_count = len(self._arrivals)
        self._done.programs.sort(key=lambda program: program.first_arrival_s)
        return self._done

    def handle(self, event: Event) -> None:
        match event:
            case TurnAsk(program_id=None):
                self._done.anonymous_count += event.pinned_replica_id is None
            case TurnAsk():
                self._arrivals[event.turn_id] = event
            case TurnEnd() if arrived := self._arrivals.pop(event.turn_id, None):
                if event.outcome == "finished":
                    self._finish(arrived, event)
                else:
                    self._done.failed_count += 1
            case ProgramReleased():
                self._releases[event.program_id] += 1
            case ProgramsReleased():
                self._releases.update(event.program_ids)

    def _finish(self, arrived: TurnAsk, finished: TurnEnd) -> None:
        if not finished.prompt_tokens or finished.output_tokens is None:
            self._done.unknown_count += 1
            return
        program_id = arrived.program_id or ""
        key = (program_id, arrived.branch_id, self._releases[program_id])
        if key not in self._programs:
            branch = f"/{arrived.branch_id}" if arrived.branch_id else ""
            again = f"#{key[2] + 1}" if key[2] else ""
            self._programs[key] = RecordedProgram(f"{program_id}{branch}{again}")
            self._done.programs.append(self._programs[key])
        self._programs[key].turns.append(
            RecordedTurn(
                arrived.now_s,
                finished.now_s,
                finished.prompt_tokens,
                finished.output_tokens,
                finished.cached_tokens or 0,
            )
        )
