"""A program's claim, its branches and its estimates."""

from __future__ import annotations

import pytest

from tests.builders import Driver
from thunderagent.programs.state.program import (
    IDLE_BRANCHES_COUNT,
    MAIN_BRANCH,
    PARENT_TURNS_COUNT,
    STORY_ENTRIES,
    Branch,
    Program,
    Turn,
)


def a_program(**context_tokens: int) -> Program:
    """A program whose branches (`main` is the main one) have these sizes."""
    program = Program("a", 1, 0.0)
    for name, tokens in context_tokens.items():
        branch_id = MAIN_BRANCH if name == "main" else name
        branch = program.branches.setdefault(branch_id, Branch())
        branch.context_tokens = tokens
    return program


def in_flight(program: Program, turn_id: int, prompt: int, *, branch: str = MAIN_BRANCH, output: int = 0) -> Turn:
    turn = Turn(turn_id, program, branch, prompt * 4, 0.0)
    turn.prompt_tokens = prompt
    turn.output_tokens = output
    program.in_flight[turn_id] = turn
    return turn


# --- Claims


def test_an_acting_program_claims_its_context() -> None:
    """Without a turn, the claim is the last usage, over all branches."""
    assert a_program(main=500).measure_claim() == 500
    assert a_program(main=500, search=200).measure_claim() == 700


def test_a_turn_in_flight_claims_its_prompt_and_what_it_has_generated() -> None:
    """A prompt longer than the branch replaces it in the claim; it is not added to it."""
    program = a_program(main=500)
    in_flight(program, 1, 650, output=40)
    assert program.measure_claim() == 690


def test_a_prompt_that_is_estimated_too_small_never_shrinks_the_claim() -> None:
    """The known context counts until a usage replaces it."""
    program = a_program(main=500)
    in_flight(program, 1, 100)
    assert program.measure_claim() == 500


def test_turns_of_one_branch_share_their_prefix() -> None:
    """Eight samples of one prompt claim it once, and an output each."""
    program = a_program(main=500)
    for turn_id in range(8):
        in_flight(program, turn_id, 600, output=10)
    assert program.measure_claim() == 600 + 80


def test_turns_of_several_branches_are_added() -> None:
    """Sub-agents have their own contexts."""
    program = a_program(main=500, one=0, two=300)
    in_flight(program, 1, 100, branch="one", output=5)
    in_flight(program, 2, 350, branch="two")
    assert program.measure_claim() == 500 + 105 + 350


def test_a_held_turn_counts_as_if_it_ran() -> None:
    """A paused program's claim would include the turns that wait."""
    program = a_program(main=500)
    turn = in_flight(program, 1, 800)
    program.held, program.in_flight = {1: turn}, {}
    assert program.measure_claim() == 800


# --- Branches


def test_a_side_turn_leaves_the_branch_as_it_was_and_a_second_one_is_believed() -> None:
    """A title of 50 tokens does not shrink 1000; after a compaction the second short turn does."""
    branch = Branch()
    assert branch.turn_finished(900, 100)
    assert branch.context_tokens == 1000
    assert not branch.turn_finished(50, 10)
    assert branch.context_tokens == 1000
    assert branch.turn_finished(300, 20)
    assert branch.context_tokens == 320


def test_a_side_turn_between_two_turns_is_forgotten() -> None:
    """Only short turns in a row are a compaction."""
    branch = Branch()
    for prompt in (1000, 50, 1100, 60):
        branch.turn_finished(prompt, 0)
    assert branch.context_tokens == 1100


def test_a_mild_compaction_is_believed_at_once() -> None:
    """A prompt of half the branch or more is no side turn."""
    branch = Branch()
    branch.turn_finished(1000, 0)
    branch.turn_finished(500, 0)
    assert branch.context_tokens == 500


def test_branches_that_ended_before_a_main_turn_are_forgotten() -> None:
    """When the parent continues, its sub-agents are done; those that are busy, or began later, stay."""
    program = a_program(main=100, done=200, busy=300, later=400)
    for turn_id, name in ((1, "done"), (2, "busy"), (9, "later")):
        program.branches[name].last_turn_id = turn_id
    in_flight(program, 2, 300, branch="busy")
    program.forget_ended_branches(Turn(5, program, MAIN_BRANCH, 0, 0.0))
    assert set(program.branches) == {MAIN_BRANCH, "busy", "later"}
    assert program.measure_claim() == 100 + 300 + 400


def test_branches_that_ended_before_the_branch_that_waits_for_them_are_forgotten() -> None:
    """A sub-agent continues when its own sub-agents, and theirs, ended; branches that it does not wait for stay."""
    program = a_program(main=100, agent=200, below=300, further=400, beside=500, later=600, orphan=700)
    waits_for = {"below": "agent", "further": "below", "beside": "other", "later": "agent", "orphan": "gone"}
    for turn_id, name in enumerate(("agent", "below", "further", "beside", "orphan"), start=1):
        program.branches[name].last_turn_id = turn_id
    for name, parent in waits_for.items():
        program.branches[name].parent_id = parent
    program.branches["agent"].last_turn_id = program.branches["later"].last_turn_id = 9
    program.forget_ended_branches(Turn(9, program, "agent", 0, 0.0), finished=False)
    assert len(program.branches) == 7
    program.forget_ended_branches(Turn(9, program, "agent", 0, 0.0))
    assert set(program.branches) == {MAIN_BRANCH, "agent", "beside", "later", "orphan"}
    program.forget_ended_branches(Turn(8, program, MAIN_BRANCH, 0, 0.0))
    assert set(program.branches) == {MAIN_BRANCH, "agent", "later"}


def test_a_branch_whose_tool_runs_is_not_forgotten_when_the_branch_that_waits_for_it_goes_on() -> None:
    """A parent may work beside its sub-agents: only an answer without a tool call shows that one is done."""
    driver = Driver()
    driver.takes_turn("p", 50)
    driver.takes_turn("p", 600, branch="sub", tool="bash:make")
    driver.takes_turn("p", 60)
    assert driver.program("p").claim_tokens == 660
    driver.takes_turn("p", 650, branch="sub")
    driver.takes_turn("p", 70)
    assert driver.program("p").claim_tokens == 70


def test_a_branch_that_called_a_tool_and_did_not_come_back_is_forgotten_at_last() -> None:
    """Some return their result by a tool, and some stop in the middle: they do not claim memory for ever."""
    driver = Driver()
    driver.takes_turn("p", 50)
    driver.takes_turn("p", 600, branch="sub", tool="submit")
    for _ in range(PARENT_TURNS_COUNT):
        driver.takes_turn("p", 60)
        assert driver.program("p").claim_tokens == 660
    driver.takes_turn("p", 60)
    assert driver.program("p").claim_tokens == 60


def test_branches_that_wait_for_each_other_in_a_ring_end_with_the_main_branch() -> None:
    """A client may send nonsense: nothing loops, and nothing stays for ever."""
    program = a_program(main=100, one=200, two=300, itself=400)
    program.branches["one"].parent_id, program.branches["two"].parent_id = "two", "one"
    program.branches["itself"].parent_id = "itself"
    program.forget_ended_branches(Turn(5, program, "itself", 0, 0.0))
    assert set(program.branches) == {MAIN_BRANCH, "one", "two"}
    program.forget_ended_branches(Turn(6, program, MAIN_BRANCH, 0, 0.0))
    assert set(program.branches) == {MAIN_BRANCH}


# --- Estimates


@pytest.mark.parametrize(
    ("main_ratio", "side_ratio", "expected"),
    [(None, None, 100), (0.5, None, 200), (None, 0.75, 300), (0.5, 0.75, 300), (0.0, None, 100)],
)
def test_a_prompt_is_estimated_by_its_branch_then_the_main_branch_then_everybody(
    main_ratio: float | None, side_ratio: float | None, expected: int
) -> None:
    """400 bytes at the most specific ratio that is known; a ratio of zero says nothing.

    A side branch that is not known at all takes the main branch's.
    """
    program = a_program(main=0)
    program.branches[MAIN_BRANCH].tokens_per_byte_ratio = main_ratio
    if side_ratio is not None:
        program.branches["side"] = Branch()
        program.branches["side"].tokens_per_byte_ratio = side_ratio
    turn = Turn(1, program, "side", 400, 0.0)
    assert program.begin_turn(turn, "", 0.25) is program.branches["side"]
    assert turn.prompt_tokens == expected


# --- The story


def test_a_program_remembers_its_last_happenings_only() -> None:
    """The story is bounded, oldest first."""
    program = Program("a", 1, 0.0)
    for number in range(STORY_ENTRIES + 5):
        program.note(float(number), "hold", "no_room", None)
    story = program.story()
    assert len(story) == STORY_ENTRIES
    assert (story[0].now_s, story[-1].now_s) == (5.0, STORY_ENTRIES + 4.0)


def test_a_program_and_a_turn_say_what_they_are() -> None:
    """Logs and failures show `repr`."""
    program = a_program(main=500)
    turn = in_flight(program, 7, 600)
    assert repr(program) == "<Program 'a' generation 1: paused, away at None, 0 tokens, 1 in flight, 0 held>"
    assert repr(turn) == "<Turn 7 held, 600 prompt tokens>"
    turn.account_id = "r0"
    assert repr(turn) == "<Turn 7 on r0, 600 prompt tokens>"


def test_idle_branches_are_bounded_for_a_client_that_names_every_branch() -> None:
    """Without any turn on the main branch, only the last used side branches keep their claim."""
    names = {f"b{index:02}": 100 for index in range(IDLE_BRANCHES_COUNT + 5)}
    program = a_program(main=0, **names)
    for index, name in enumerate(names):
        program.branches[name].last_turn_id = index
    busy = in_flight(program, 0, 50, branch="b00")
    program.forget_ended_branches(Turn(99, program, "b20", 0, 0.0))
    assert busy.branch_id in program.branches
    assert len(program.branches) == 1 + 1 + IDLE_BRANCHES_COUNT
    assert "b01" not in program.branches
    assert "b20" in program.branches
