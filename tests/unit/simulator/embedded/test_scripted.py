"""What a simulated engine says when it is given tools or a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thunderagent.simulator.embedded.requests import ApiError
from thunderagent.simulator.embedded.scripted import Tool, instance_of, json_instance, planned_calls
from thunderagent.simulator.embedded.tokens import Answer, cut_at_stop

TOOLS = [Tool("look", {}), Tool("count", {}), Tool("third", {})]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "minLength": 6}, "textxx"),
        ({"type": "string", "maxLength": 2}, "te"),
        ({"type": "integer", "minimum": 3, "multipleOf": 2}, 4),
        ({"type": "number", "exclusiveMinimum": 3}, 4),
        ({"type": "integer", "maximum": -2}, -2),
        ({"enum": ["b", "a"]}, "b"),
        ({"const": 7}, 7),
        ({"type": "string", "default": "d"}, "d"),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
        ({"type": "array", "minItems": 2, "items": {"type": "boolean"}}, [False, False]),
        ({"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}, {"a": "text"}),
        (
            {"$defs": {"P": {"type": "integer"}}, "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]},
            {"p": 0},
        ),
    ],
)
def test_an_instance_is_small_and_satisfies_its_schema(schema: Any, expected: object) -> None:
    """Each word of the usual subset is kept."""
    assert instance_of(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a+$"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"type": "integer", "minimum": 3, "maximum": 2},
        False,
    ],
)
def test_what_has_no_known_instance_is_refused(schema: Any) -> None:
    """No made-up arguments."""
    with pytest.raises(ApiError):
        instance_of(schema)


def test_the_plan_calls_two_tools_one_after_the_other_and_ends() -> None:
    """With parallel calls it is one answer."""
    names = [
        [call.name for call in planned_calls(TOOLS, "auto", done_count=count, parallel=False)] for count in range(3)
    ]
    assert names == [["look"], ["count"], []]
    both = planned_calls(TOOLS, "auto", done_count=0, parallel=True)
    assert [call.name for call in both] == ["look", "count"]


def test_a_choice_overrides_the_plan() -> None:
    """None, required and a name; a name that is no tool is refused."""
    assert not planned_calls(TOOLS, "none", done_count=0, parallel=False)
    assert planned_calls(TOOLS, "required", done_count=9, parallel=False)[0].name == "look"
    assert planned_calls(TOOLS, "=third", done_count=9, parallel=False)[0].name == "third"
    with pytest.raises(ApiError, match="among the tools"):
        planned_calls(TOOLS, "=fourth", done_count=0, parallel=False)


def test_json_is_made_for_a_response_format() -> None:
    """Plain text asks for none."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = json_instance({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert text is not None
    assert json.loads(text) == {"a": 0}
    assert json_instance({"type": "json_object"}) == "{}"
    assert json_instance({"type": "text"}) is None
    assert json_instance(None) is None


def test_an_answer_ends_before_its_first_stop() -> None:
    """The text that stopped it was generated, and is not shown."""
    answer = Answer([1, 2, 3, 4], "length")
    cut = cut_at_stop(answer, ["one", "two", "three", "four"], ["four", "hre"])
    assert (cut.token_ids, cut.words, cut.finish_reason) == ([1, 2, 3], ["one", "two", "t"], "stop")
    assert cut_at_stop(answer, ["one"], ["none"]) is answer
