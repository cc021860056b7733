"""What an embedded engine says when words alone would not do: calls of the tools it is given, and JSON.

The plan of an answer needs no model: it calls the first two tools, one after the other, reads their results, and ends
with words. With `parallel_tool_calls` it calls both at once. `tool_choice` overrides the plan. Arguments are the
smallest that satisfy the tool's schema.
"""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent.simulator.embedded.requests import ApiError, ChatBody, json_text
from thunderagent.simulator.embedded.tokens import END_TOKEN, Answer, WordTokenizer, cut_at_stop

PLANNED_CALLS_COUNT: Final = 2
_DEPTH_LIMIT: Final = 32
_FORMATS: Final = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@example.org",
    "uri": "http://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called; `schema` is that of its arguments."""

    name: str
    schema: Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: Any
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def arguments_text(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


def planned_calls(tools: list[Tool], choice: str, *, done_count: int, parallel: bool) -> list[Call]:
    """Return the calls of the next answer; none if it is words.

    `choice` is `none`, `auto`, `required`, or `=NAME`; `done_count` calls came since the user spoke. Raises ApiError
    for a tool that is not given, or a schema of which no instance is known.
    """
    if choice.startswith("="):
        chosen = [tool for tool in tools if tool.name == choice[1:]]
        if not chosen:
            raise ApiError(f"The tool {choice[1:]!r} of tool_choice is not among the tools.", param="tool_choice")
        return [_call(chosen[0])]
    if choice not in {"none", "auto", "required"}:
        raise ApiError(f"tool_choice must be none, auto, required or a tool, got {choice!r}.", param="tool_choice")
    if choice == "required" and not tools:
        raise ApiError("tool_choice is required, and there are no tools.", param="tool_choice")
    if choice == "none":
        return []
    left = tools[:PLANNED_CALLS_COUNT][done_count:]
    if not left and choice == "required":
        left = tools[:1]
    return [_call(tool) for tool in (left if parallel else left[:1])]


def _call(tool: Tool) -> Call:
    return Call(tool.name, instance_of(tool.schema or {"type": "object"}))


def instance_of(schema: Any) -> Any:
    """Return a small instance of a JSON schema. Raises ApiError for one that needs more than this generator knows."""
    return _instance(schema, schema, 0)


def _instance(schema: Any, root: Any, depth: int) -> Any:
    if depth > _DEPTH_LIMIT:
        raise ApiError("The schema refers to itself without end.")
    if schema is True:
        return "text"
    if not isinstance(schema, dict):
        raise ApiError(f"Nothing satisfies the schema {schema!r}.")
    for word in ("const", "default"):
        if word in schema:
            return schema[word]
    if schema.get("enum"):
        return schema["enum"][0]
    if "$ref" in schema:
        return _instance(_referred(schema["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if schema.get(word):
            return _instance(schema[word][0], root, depth + 1)
    if schema.get("allOf"):
        merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            resolved = _referred(part["$ref"], root) if "$ref" in part else part
            properties = {**merged.get("properties", {}), **resolved.get("properties", {})}
            required = [*merged.get("required", []), *resolved.get("required", [])]
            merged |= {**resolved, "properties": properties, "required": required}
        return _instance(merged, root, depth + 1)
    return _of_type(schema, root, depth)


def _of_type(schema: dict[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema or "required" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    match kind:
        case "object":
            properties = schema.get("properties", {})
            return {name: _instance(properties.get(name, True), root, depth + 1) for name in schema.get("required", [])}
        case "array":
            return [_instance(schema.get("items", True), root, depth + 1) for _ in range(schema.get("minItems", 0))]
        case "string":
            return _text(schema)
        case "integer" | "number":
            return _number(schema, is_whole=kind == "integer")
        case "boolean":
            return False
        case "null":
            return None
    raise ApiError(f"This engine knows no instance of the type {kind!r}.")


def _text(schema: dict[str, Any]) -> str:
    if "pattern" in schema:
        raise ApiError("This engine makes no text that matches a `pattern`: give a default, an enum or a const.")
    text = _FORMATS.get(schema.get("format", ""), "text")
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]


def _number(schema: dict[str, Any], *, is_whole: bool) -> float:
    low, high = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None:
        low = max(above + 1, above + 1 if low is None else low)
    if (below := schema.get("exclusiveMaximum")) is not None:
        high = min(below - 1, below - 1 if high is None else high)
    step = schema.get("multipleOf", 1 if is_whole else 0)
    number = 0 if low is None or low <= 0 else low
    if high is not None and number > high:
        number = high
    if step:
        number = math.ceil(number / step) * step
    if (low is not None and number < low) or (high is not None and number > high):
        raise ApiError(f"This engine found no number between {low} and {high}.")
    return number


def _referred(reference: str, root: Any) -> Any:
    """Return what a local reference names."""
    value: Any = root if reference.startswith("#") else None
    try:
        for name in reference[1:].split("/")[1:]:
            value = value[name.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        value = None
    if value is None:
        raise ApiError(f"The schema has no {reference!r}; this engine follows local references only.")
    return value


def json_instance(response_format: Any) -> str | None:
    """Return the answer that a `response_format` asks for as JSON with single spaces; None if it asks for text."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return "{}"
    if kind != "json_schema":
        return None
    described = response_format.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise ApiError("response_format json_schema needs a schema.", param="response_format")
    return json.dumps(instance_of(described["schema"]), ensure_ascii=False)


def scripted_answer(body: ChatBody, tokenizer: WordTokenizer, limit_tokens: int) -> Answer | None:
    """Return the calls or the JSON that a chat asks for; None if words will do. Raises ApiError."""
    calls = planned_calls(
        [_tool(tool) for tool in body.tools or []],
        _choice(body.tool_choice),
        done_count=_done_count(body),
        parallel=bool(body.parallel_tool_calls),
    )
    if calls:  # the tokens are those of the message in the next turn, which finds them cached
        said = [{"name": call.name, "arguments": call.arguments_text} for call in calls]
        token_ids = [*tokenizer.encode(json_text(said)), END_TOKEN]
        if len(token_ids) <= limit_tokens:
            return Answer(token_ids, "tool_calls", [], calls)
        return Answer(token_ids[:limit_tokens], "length", [])
    text = json_instance(body.response_format)
    if text is None:
        return None
    words = text.split(" ")
    token_ids = [*tokenizer.encode_words(words), END_TOKEN]
    if len(token_ids) <= limit_tokens:
        return cut_at_stop(Answer(token_ids, "stop", words), words, body.stops())
    return Answer(token_ids[:limit_tokens], "length", words[:limit_tokens])


def _tool(tool: Any) -> Tool:
    function = tool.get("function") if tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError("A tool must be a function with a name.", param="tools")
    return Tool(function["name"], function.get("parameters"))


def _choice(choice: Any) -> str:
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError("tool_choice must name a function.", param="tool_choice")
        return f"={function['name']}"
    return choice or "auto"


def _done_count(body: ChatBody) -> int:
    """Return how many calls came since the user last spoke."""
    count = 0
    for message in reversed(body.messages):
        if message.role == "user":
            break
        count += len(message.tool_calls or [])
    return count
