"""The program table: incarnations of an id, and whose tool has run longest."""

from __future__ import annotations

from thunderagent.programs.table import ProgramTable


def test_an_id_that_comes_back_has_a_new_generation() -> None:
    """Generations never repeat, though nothing is remembered of an id that is gone."""
    table = ProgramTable()
    generations = []
    for program_id in ("a", "b", "a", "a"):
        program = table.open(program_id, 1.0)
        generations.append(program.generation)
        table.remove(program)
    assert len(set(generations)) == 4
    assert generations == sorted(generations)
    assert len(table) == 0
    assert table.get("a") is None


def test_the_longest_acting_program_is_the_one_whose_tool_began_first() -> None:
    """The order is that of the beginnings; who has a turn with us, or ended, is not in it."""
    table = ProgramTable()
    first, second, third = (table.open(name, 0.0) for name in "abc")
    assert table.acting_longer(9.0) == []
    for since_s, program in enumerate((first, second, third)):
        program.limits_since_s = since_s
        table.acting_begins(program)
    assert table.acting_longer(0.0) == []
    assert table.acting_longer(2.0) == [first, second]
    table.acting_ends(first)
    table.remove(second)
    assert table.acting_longer(9.0) == [third]
    first.limits_since_s = 4.0
    table.acting_begins(first)
    assert table.acting_longer(9.0) == [third, first]


def test_programs_are_listed_in_the_order_of_their_opening() -> None:
    """A page of programs has the oldest first."""
    table = ProgramTable()
    for name in "cab":
        table.open(name, 0.0)
    assert [program.program_id for program in table] == ["c", "a", "b"]
