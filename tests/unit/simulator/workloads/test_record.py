"""A proxy's events become programs that can be replayed."""

from __future__ import annotations

import json
from pathlib import Path

from thunderagent.programs.messages import (
    Event,
    ProgramReleased,
    ProgramsReleased,
    ReplicaUp,
    Tick,
    TurnAsk,
    TurnEnd,
    TurnStarted,
)
from thunderagent.simulator.workloads.formats import load_recorded
from thunderagent.simulator.workloads.plans import TurnPlan
from thunderagent.simulator.workloads.record import record


class Log:
    """Writes events of turns, each with its begin and end."""

    def __init__(self) -> None:
        self.events: list[Event] = [ReplicaUp(0.0, "r0"), Tick(1.0)]

    def turn(
        self,
        program_id: str | None,
        begin_s: float,
        end_s: float,
        prompt_tokens: int | None,
        output_tokens: int | None,
        cached_tokens: int | None = 0,
        branch_id: str = "",
    ) -> None:
        number = len(self.events)
        self.events += [
            TurnAsk(now_s=begin_s, turn_id=number, program_id=program_id, branch_id=branch_id),
            TurnStarted(begin_s, number),
            TurnEnd(
                now_s=end_s,
                turn_id=number,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                cached_tokens=cached_tokens,
            ),
        ]


def rows_of(log: Log) -> list[dict[str, object]]:
    return [json.loads(line) for line in record(log.events).lines()]


def test_turns_become_rows_of_a_program() -> None:
    """Time in the proxy and the engine is `api_s`, time outside is `gap_s`; hits are whole blocks of 64."""
    log = Log()
    log.turn("a", 10.0, 14.0, 1000, 100)
    log.turn("b", 11.5, 12.0, 500, 10)
    log.turn("a", 16.5, 20.0, 1300, 50, cached_tokens=1088)
    assert rows_of(log) == [
        {
            "id": "a",
            "start_s": 0.0,
            "turns": [[0.0, 1000, 100, 0, 4.0, 2.5, "unknown"], [6.5, 1300, 50, 1088, 3.5, None, "unknown"]],
        },
        {"id": "b", "start_s": 1.5, "turns": [[0.0, 500, 10, 0, 0.5, None, "unknown"]]},
    ]


def test_a_prompt_that_shrank_hits_what_the_engine_found() -> None:
    """The part that it shares with the one before is unknown; it may begin a new context."""
    log = Log()
    log.turn("a", 0.0, 1.0, 1000, 10)
    log.turn("a", 2.0, 3.0, 300, 10, cached_tokens=100)
    assert [turn[3] for turn in rows_of(log)[0]["turns"]] == [0, 64]  # type: ignore[attr-defined]


def test_tokens_found_cached_by_most_first_prompts_are_shared() -> None:
    """Four agents have one system prompt of 640 tokens: the first found nothing, the others did."""
    log = Log()
    for number, cached_tokens in enumerate((0, 640, 640, 640)):
        log.turn(f"p{number}", number, number + 0.5, 1000, 10, cached_tokens)
    groups = [(row.get("prefix_group"), row.get("shared_prefix_tokens")) for row in rows_of(log)]
    assert groups == [(None, None), (0, 640), (0, 640), (0, 640)]


def test_branches_and_ids_used_again_are_programs_of_their_own() -> None:
    """A released id may return as `#2`. A branch has its own context."""
    log = Log()
    log.turn("a", 0.0, 1.0, 100, 10)
    log.turn("a", 0.5, 1.5, 50, 10, branch_id="sub")
    log.events.append(ProgramReleased(2.0, "a"))
    log.turn("a", 3.0, 4.0, 100, 10)
    log.events.append(ProgramsReleased(5.0, ("a", "b")))
    log.turn("a", 6.0, 7.0, 100, 10)
    assert [row["id"] for row in rows_of(log)] == ["a", "a/sub", "a#2", "a#3"]


def test_unrecordable_turns_are_counted() -> None:
    """Cases are turns without a program, without usage, failed, abandoned, and still running at the end."""
    log = Log()
    log.turn(None, 0.0, 1.0, 100, 10)
    log.turn("a", 0.0, 1.0, None, None, None)
    log.events += [TurnAsk(now_s=2.0, turn_id=100, program_id="a"), TurnEnd(now_s=3.0, turn_id=100, outcome="failed")]
    log.events += [
        TurnAsk(now_s=2.0, turn_id=101, program_id="a"),
        TurnEnd(now_s=3.0, turn_id=101, outcome="abandoned"),
        TurnEnd(now_s=4.0, turn_id=999, outcome="failed"),
    ]
    log.turn("a", 5.0, 6.0, 100, 10)
    log.events.append(TurnAsk(now_s=7.0, turn_id=102, program_id="a"))
    assert str(record(log.events)) == (
        "1 programs, 1 turns; left out: 1 without a program, 1 without usage, 2 failed, 1 not ended"
    )
    assert list(record([]).lines()) == []


def test_a_recording_can_be_loaded(tmp_path: Path) -> None:
    """The loaded programs do what the recorded ones did."""
    log = Log()
    log.turn("a", 10.0, 14.0, 1000, 100)
    log.turn("a", 16.5, 20.0, 1300, 50)
    path = tmp_path / "day.jsonl"
    path.write_bytes(b"".join(record(log.events).lines()))
    (program,) = load_recorded(path).programs
    assert program.turns == (TurnPlan(1000, 100, 2.5, "unknown"), TurnPlan(200, 50, 0.0, "unknown"))
    assert program.arrival_s == 0.0
