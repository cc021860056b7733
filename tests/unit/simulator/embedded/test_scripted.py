"""What a simulated engine says when it is given tools or a schema."""

from __future__ import annotations

import importlib.util
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from thunderagent.simulator.embedded.messages_api import MessagesBody
from thunderagent.simulator.embedded.requests import ApiError, ChatBody, Message
from thunderagent.simulator.embedded.responses_api import ResponsesBody
from thunderagent.simulator.embedded.scripted import (
    INSTANCE_LIMIT,
    SUBMISSION,
    Tool,
    formed_text,
    instance_of,
    planned_calls,
    scripted_answer,
)
from thunderagent.simulator.embedded.tokens import Answer, WordTokenizer, cut_at_stop

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
        {"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]},
        {"type": "integer", "minimum": 3, "maximum": 2},
        False,
    ],
)
def test_schema_without_a_known_instance_is_refused(schema: Any) -> None:
    """No made-up arguments."""
    with pytest.raises(ApiError):
        instance_of(schema)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
DEFS = {"$defs": {"P": PERSON, "N": {"type": "integer", "minimum": 3}, "L": {"$ref": "#/$defs/N"}}}
SCHEMAS: list[Any] = [
    {},
    True,
    {"type": "object"},
    PERSON,
    {**PERSON, "required": ["name", "age"], "additionalProperties": False},
    {"required": ["a", "b"]},
    {"type": "object", "minProperties": 2},
    {**PERSON, "minProperties": 2, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["a"]},
    {"type": "array"},
    {"type": "array", "minItems": 3, "items": {"type": "integer", "minimum": 7}},
    {"items": {"type": "boolean"}, "minItems": 1},
    {"prefixItems": [{"type": "string"}, {"type": "null"}], "minItems": 3, "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "array", "minItems": 2, "items": PERSON}, "minItems": 2, "maxItems": 2},
    {"type": "string", "minLength": 40},
    {"type": "string", "maxLength": 1},
    {"type": "string", "format": "date-time"},
    {"type": ["string", "null"], "minLength": 5},
    {"type": ["null", "integer"]},
    {"type": "integer", "exclusiveMinimum": 0.5},
    {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 6},
    {"type": "integer", "minimum": -9, "maximum": -7, "multipleOf": 4},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 0.25, "maximum": 0.25},
    {"type": "number", "minimum": 10, "multipleOf": 2.5},
    {"minimum": 5},
    {"maximum": -5},
    {"enum": [3, "three"]},
    {"type": "string", "enum": [3, "three"]},
    {"const": {"a": [1, None]}},
    {"type": "string", "default": None},
    {"type": "string", "default": "given", "minLength": 2},
    {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "integer", "minimum": 2}]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"$ref": "#/$defs/P"}, {"type": "null"}], **DEFS},
    {"allOf": [{"minimum": 3}, {"type": "integer", "minimum": 1}, {"maximum": 8}]},
    {"allOf": [PERSON, {"properties": {"age": {"minimum": 18}}, "required": ["age"]}]},
    {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["c", "b"]}]},
    {"$ref": "#/$defs/L", "description": "a number", **DEFS},
    {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}, "n": {"$ref": "#/$defs/N", "maximum": 4}}, **DEFS}
    | {"required": ["p", "n"]},
    {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": {"$ref": "#/$defs/N"}}, **DEFS}
    | {"required": ["n"]},
    {"allOf": [{"items": {"type": "integer"}}, {"items": {"minimum": 4}, "minItems": 2, "type": "array"}]},
]
KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def is_of(value: Any, kind: str) -> bool:
    if kind in {"integer", "number"}:
        return (
            isinstance(value, int | float)
            and value is not True
            and value is not False
            and (kind == "number" or value == int(value))
        )
    return isinstance(value, KINDS[kind])


def is_satisfied(value: Any, schema: Any, root: Any) -> bool:
    """Return whether a value satisfies a schema, by the words that the table above has."""
    if isinstance(schema, bool):
        return schema
    kinds = schema.get("type", [])
    number = value if is_of(value, "number") else None
    text = value if isinstance(value, str) else None
    items = value if isinstance(value, list) else None
    fields = value if isinstance(value, dict) else None
    checks = [
        not kinds or any(is_of(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)),
        "const" not in schema or value == schema["const"],
        "enum" not in schema or value in schema["enum"],
        "$ref" not in schema or is_satisfied(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root),
        all(is_satisfied(value, part, root) for part in schema.get("allOf", [])),
        not schema.get("anyOf") or any(is_satisfied(value, part, root) for part in schema["anyOf"]),
        not schema.get("oneOf") or sum(is_satisfied(value, part, root) for part in schema["oneOf"]) == 1,
    ]
    if number is not None:
        checks += [
            number >= schema.get("minimum", number),
            number <= schema.get("maximum", number),
            number > schema.get("exclusiveMinimum", number - 1),
            number < schema.get("exclusiveMaximum", number + 1),
            number % schema.get("multipleOf", number or 1) == 0,
        ]
    if text is not None:
        checks += [schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", len(text))]
        checks += ["pattern" not in schema]
    if items is not None:
        first = schema.get("prefixItems", [])
        checks += [schema.get("minItems", 0) <= len(items) <= schema.get("maxItems", len(items))]
        checks += [is_satisfied(item, part, root) for item, part in zip(items, first, strict=False)]
        checks += [is_satisfied(item, schema.get("items", True), root) for item in items[len(first) :]]
    if fields is not None:
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        checks += [schema.get("minProperties", 0) <= len(fields), {*schema.get("required", [])} <= {*fields}]
        checks += [is_satisfied(field, known.get(name, others), root) for name, field in fields.items()]
    return all(checks)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_every_instance_satisfies_its_schema(schema: Any) -> None:
    """By a checker of its own, and by jsonschema where it is installed."""
    made = instance_of(schema)
    assert is_satisfied(made, schema, schema), made
    if importlib.util.find_spec("jsonschema"):
        importlib.import_module("jsonschema").validate(made, schema)


def nested(depth: int, inner: Any) -> Any:
    """Return a schema of arrays in arrays, of a thousand items each."""
    for _ in range(depth):
        inner = {"type": "array", "minItems": 1000, "items": inner}
    return inner


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10**12},
        {"type": "string", "minLength": 1e300},
        {"type": "array", "minItems": 10**12},
        {"type": "object", "minProperties": 10**12},
        {"type": "object", "required": [f"name-{number}" for number in range(INSTANCE_LIMIT)]},
        {"type": "array", "minItems": 30, "items": {"type": "string", "minLength": 30_000}},
        {"type": "array", "minItems": 30, "items": {"const": "x" * 30_000}},
        {"enum": ["x" * (INSTANCE_LIMIT + 1)]},
        nested(20, {"type": "string"}),
        nested(20, {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "integer"}]}),
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_schema_that_asks_for_much_is_refused_within_bounded_memory(schema: Any) -> None:
    """However it asks: by length, by count, by depth, or by branching."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            instance_of(schema)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


WORDS = [
    *("type", "enum", "$ref", "anyOf", "oneOf", "allOf"),
    *("properties", "required", "additionalProperties", "minProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    *("minLength", "maxLength", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
]
WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**400,
    1e308,
    1e-300,
    "",
    "word",
    "#/type/x",
    [],
    [None],
    [[]],
    {},
    {"type": []},
]
BESIDE: list[Any] = [
    {},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
    {"type": "array", "minItems": 2},
    {"type": "string"},
    {"type": "integer"},
    {"allOf": [{"type": "number", "minimum": 1}], "anyOf": [{"items": {}}]},
]


@pytest.mark.parametrize("word", WORDS)
def test_a_malformed_schema_is_refused_and_never_an_error_of_the_engine(word: str) -> None:
    """Each word with each kind of value, beside other words: an instance, or a refusal."""
    for wrong in WRONG:
        for beside in BESIDE:
            for schema in ({**beside, word: wrong}, {"allOf": [beside, {word: wrong}]}):
                try:
                    json.dumps(instance_of(schema), allow_nan=False)
                except ApiError as error:
                    assert error.status == 400  # noqa: PT017 - either is right


def test_the_plan_calls_two_tools_one_after_the_other_and_ends() -> None:
    """With parallel calls it is one answer."""
    names = [
        [call.name for call in planned_calls(TOOLS, "auto", done_count=count, parallel=False)] for count in range(3)
    ]
    assert names == [["look"], ["count"], []]
    both = planned_calls(TOOLS, "auto", done_count=0, parallel=True)
    assert [call.name for call in both] == ["look", "count"]


@pytest.mark.parametrize(
    ("said", "tool"),
    [
        ("look again", "look"),
        ("<b>look</b> again", "look"),
        ("<system-reminder>not closed", "look"),
        ("<system-reminder>a sub-agent ended</system-reminder>", None),
        (" <used>Edit</used>\n<system-reminder>[not the user]\n<task>done</task></system-reminder>\n", None),
    ],
)
def test_a_notice_of_the_client_is_no_new_task(said: str, tool: str | None) -> None:
    """Claude Code tells so of each sub-agent that ends: an agent that began anew would start another one, for ever."""
    words = [{"type": "text", "text": said}]
    one, other = ({"type": "tool_use", "id": name, "name": name, "input": {}} for name in ("look", "count"))
    read = [{"type": "tool_result", "tool_use_id": "look", "content": "seen"}]
    history: list[Any] = [
        {"role": "user", "content": "look"},
        *(
            {"role": role, "content": each}
            for call in (one, other)
            for role, each in (("assistant", [call]), ("user", read))
        ),
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": words},
    ]
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "count")]
    body = msgspec.convert({"model": "m", "max_tokens": 99, "messages": history, "tools": tools}, MessagesBody)
    chat = body.as_chat()
    assert chat is not None
    answer = scripted_answer(chat, WordTokenizer(), 99)
    assert (None if answer is None else answer.calls[0].name) == tool


@pytest.mark.parametrize(("prompt", "ends_with"), [(f"do it, then `{SUBMISSION}`", SUBMISSION), ("do it", None)])
def test_an_agent_that_ends_by_a_command_gets_it(prompt: str, ends_with: str | None) -> None:
    """mini-SWE-agent: first the tool with made-up words, then the command that its prompt names."""
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    tools = [{"type": "function", "function": {"name": "bash", "parameters": schema}}]
    asked = [Message("user", prompt)]
    first = scripted_answer(ChatBody(messages=asked, tools=tools), WordTokenizer(), 99)
    assert first is not None
    assert first.calls[0].arguments == {"command": "text"}
    asked += [Message("assistant", None, [{}]), Message("tool", "not found")]
    last = scripted_answer(ChatBody(messages=asked, tools=tools), WordTokenizer(), 99)
    assert (None if last is None else last.calls[0].arguments["command"]) == ends_with
    assert scripted_answer(ChatBody(messages=asked, tools=tools, tool_choice="none"), WordTokenizer(), 99) is None


def test_a_choice_overrides_the_plan() -> None:
    """None, required and a name; a name that is no tool is refused."""
    assert not planned_calls(TOOLS, "none", done_count=0, parallel=False)
    assert planned_calls(TOOLS, "required", done_count=9, parallel=False)[0].name == "look"
    assert planned_calls(TOOLS, "=third", done_count=9, parallel=False)[0].name == "third"
    with pytest.raises(ApiError, match="among the tools"):
        planned_calls(TOOLS, "=fourth", done_count=0, parallel=False)


def test_the_arguments_of_a_call_are_an_object() -> None:
    """Also where the tool's schema says nothing; one that asks for something else is refused."""
    for schema in (None, {}, {"description": "nothing"}, {"title": "t", "anyOf": [{"properties": {}}]}):
        (call,) = planned_calls([Tool("look", schema)], "auto", done_count=0, parallel=False)
        assert call.arguments_text == "{}"
    refused: list[Any] = [True, {"type": "string"}, []]
    for wrong in refused:
        with pytest.raises(ApiError):
            planned_calls([Tool("look", wrong)], "auto", done_count=0, parallel=False)


def test_a_plain_response_is_not_read_as_a_chat() -> None:
    """Only tools, a choice or a format make it worth that."""
    assert ResponsesBody(input="hello").as_chat([("user", "hello")]) is None
    assert ResponsesBody(input="hello", tool_choice="none").as_chat([("user", "hello")]) is not None


def test_json_is_made_for_a_response_format() -> None:
    """Plain text asks for none."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = formed_text({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert text is not None
    assert json.loads(text) == {"a": 0}
    assert formed_text({"type": "json_object"}) == "{}"
    assert formed_text({"type": "text"}) is None
    assert formed_text(None) is None


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"json": {"type": "integer", "minimum": 3}}, "3"),
        ({"json": '{"type": "boolean"}'}, "false"),
        ({"json_object": True}, "{}"),
        ({"choice": ["not yet", "no"]}, "not yet"),
        ({"json": None, "choice": None, "regex": None, "json_object": False}, None),
        ({"disable_any_whitespace": True}, None),
    ],
)
def test_structured_outputs_have_a_form(wanted: dict[str, Any], text: str | None) -> None:
    """The engine's own field; a `response_format` goes first."""
    assert formed_text(None, wanted) == text
    assert formed_text({"type": "json_object"}, wanted) == "{}"


@pytest.mark.parametrize("wanted", [{"regex": "a+"}, {"grammar": "root"}, {"choice": []}, {"choice": 7}, {"json": "{"}])
def test_structured_outputs_without_a_known_text_are_refused(wanted: dict[str, Any]) -> None:
    """They are not ignored."""
    with pytest.raises(ApiError):
        formed_text(None, wanted)


def test_an_answer_ends_before_its_first_stop() -> None:
    """The text that stopped it was generated, and is not shown."""
    answer = Answer([1, 2, 3, 4], "length")
    cut = cut_at_stop(answer, ["one", "two", "three", "four"], ["four", "hre"])
    assert (cut.token_ids, cut.words, cut.finish_reason) == ([1, 2, 3], ["one", "two", "t"], "stop")
    assert cut_at_stop(answer, ["one"], ["none"]) is answer
