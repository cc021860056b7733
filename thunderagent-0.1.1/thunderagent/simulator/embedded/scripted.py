"""What an embedded engine says when words alone would not do: calls of the tools it is given, and JSON.

The plan of an answer needs no model: it calls the first two tools, one after the other, reads their results, and ends
with words, or with the command by which mini-SWE-agent ends. With `parallel_tool_calls` it calls both at once.
`tool_choice` overrides the plan. Arguments are the smallest that satisfy the tool's schema.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Final

from thunderagent.simulator.embedded.requests import ApiError, ChatBody, Json, json_text
from thunderagent.simulator.embedded.tokens import END_TOKEN, Answer, Call, WordTokenizer, cut_at_stop

PLANNED_CALLS_COUNT: Final = 2
SUBMISSION: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
INSTANCE_LIMIT: Final = 32_768
"""The characters of an instance, and the words of schemas read for it, together."""
_DEPTH_LIMIT: Final = 32
_FORMATS: Final = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@example.org",
    "uri": "http://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_TYPES: Final[dict[str, Any]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_WORDS_OF: Final = {
    "object": {"properties", "required", "additionalProperties", "minProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "number": {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"},
}
_UNKNOWN: Final = ("not", "if", "contains", "dependencies", "dependentRequired", "dependentSchemas")
_LARGER: Final = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_SMALLER: Final = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
_TAG: Final = re.compile(r"\s*<([\w-]+)>")
_COMPARED_COUNT: Final = 256
_INTEGER_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called; `schema` is that of its arguments."""

    name: str
    schema: Any


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
    schema = {} if tool.schema is None else tool.schema
    arguments = instance_of({"type": "object", **schema} if isinstance(schema, dict) else schema)
    if not isinstance(arguments, dict):
        raise ApiError(f"The arguments of the tool {tool.name!r} must be an object.", param="tools")
    return Call(tool.name, arguments)


def instance_of(schema: Any) -> Any:
    """Return a small instance of a JSON schema.

    Raises ApiError for a malformed one, for one of which this generator knows no instance, and for one whose instances
    are too large.
    """
    return _Instances(schema).of(schema, 0)


class _TooLargeError(ApiError):
    """No other way to satisfy the schema is tried."""


class _Instances:
    """Makes instances of one schema, within a bound of work and of characters for all of them together."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = INSTANCE_LIMIT

    def of(self, schema: Any, depth: int) -> Any:
        """Return an instance of a part of the schema. Raises ApiError."""
        self._spend(_size(schema))
        if depth > _DEPTH_LIMIT:
            raise ApiError(f"The schema is deeper than {_DEPTH_LIMIT} levels, or refers to itself without end.")
        if schema is True:
            return "text"
        if not isinstance(schema, dict):
            raise ApiError(f"Nothing satisfies the schema {reprlib.repr(schema)}.")
        if "$ref" in schema:
            return self.of(self._resolved(schema), depth + 1)
        if parts := _word(schema, "allOf", list, []):
            return self.of(_merged([_without(schema, "allOf"), *map(self._resolved, parts)]), depth + 1)
        if "const" in schema:
            return self._given(schema["const"])
        if "default" in schema and _is_of(schema["default"], schema.get("type")):
            return self._given(schema["default"])
        if "enum" in schema:
            return self._given(_first(schema, "enum"))
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._of_any(_without(schema, word), _word(schema, word, list, []), depth)
        return self._of_type(schema, depth)

    def _of_any(self, rest: Json, options: list[Any], depth: int) -> Any:
        """Return an instance of the first option that has a known one, with the words beside the options."""
        refusal = ApiError("Nothing satisfies a choice between no schemas.")
        for option in options:
            try:
                return self.of(_merged([rest, self._resolved(option)]), depth + 1)
            except _TooLargeError:
                raise
            except ApiError as error:
                refusal = error
        raise refusal

    def _of_type(self, schema: Json, depth: int) -> Any:
        for word in _UNKNOWN:
            if word in schema:
                raise ApiError(f"This engine makes no instance of a schema with {word!r}: give a default or an enum.")
        kind = schema.get("type", _implied_type(schema))
        if isinstance(kind, list):
            kind = _first(schema, "type")
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return _number(schema, is_whole=kind == "integer")
            case "boolean":
                return False
            case "null":
                return None
        raise ApiError(f"This engine knows no instance of the type {reprlib.repr(kind)}.")

    def _object(self, schema: Json, depth: int) -> Json:
        properties, others = _word(schema, "properties", dict, {}), schema.get("additionalProperties", True)
        made: Json = {}
        for name in _word(schema, "required", list, []):
            if not isinstance(name, str):
                raise ApiError("The schema is malformed: required must be names.")
            self._spend(len(name))
            made[name] = self.of(properties.get(name, others), depth + 1)
        wanted_count = _word(schema, "minProperties", int, 0)
        for name in chain(properties, map(str, count())):
            if len(made) >= wanted_count:
                return made
            if name not in made:
                self._spend(len(name))
                made[name] = self.of(properties.get(name, others), depth + 1)
        return made

    def _array(self, schema: Json, depth: int) -> list[Any]:
        wanted_count, first = _word(schema, "minItems", int, 0), _word(schema, "prefixItems", list, [])
        if wanted_count > _word(schema, "maxItems", int, wanted_count):
            raise ApiError("Nothing satisfies a schema whose minItems is above its maxItems.")
        if wanted_count > 1 and _word(schema, "uniqueItems", bool, False):
            raise ApiError("This engine makes no two unique items: give a default or an enum.")
        items = schema.get("items", True)
        self._spend(wanted_count)
        return [self.of(first[at] if at < len(first) else items, depth + 1) for at in range(wanted_count)]

    def _string(self, schema: Json) -> str:
        if "pattern" in schema:
            raise ApiError("This engine makes no text that matches a `pattern`: give a default, an enum or a const.")
        short, long = _word(schema, "minLength", int, 0), _word(schema, "maxLength", int, None)
        if long is not None and max(0, short) > long:
            raise ApiError("Nothing satisfies a schema whose minLength is above its maxLength.")
        self._spend(short)
        return str(_FORMATS.get(_word(schema, "format", str, ""), "text")).ljust(short, "x")[:long]

    def _given(self, value: Any) -> Any:
        self._spend(len(json_text(value)))
        return value

    def _spend(self, count: int) -> None:
        self._left -= max(0, count)
        if self._left < 0:
            raise _TooLargeError(f"The schema asks for more than this engine makes: {INSTANCE_LIMIT} characters.")

    def _resolved(self, part: Any) -> Any:
        """Return a part with what it refers to in place of the reference."""
        for _ in range(_DEPTH_LIMIT):
            self._spend(_size(part))
            if not isinstance(part, dict) or "$ref" not in part:
                return part
            part = _merged([self._referred(_word(part, "$ref", str, "")), _without(part, "$ref")])
        raise ApiError("The schema refers to itself without end.")

    def _referred(self, reference: str) -> Any:
        """Return what a local reference names."""
        self._spend(len(reference))
        value: Any = self._root if reference.startswith("#") else None
        for escaped in reference[1:].split("/")[1:]:
            name = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = dict(enumerate(value[:_COMPARED_COUNT])).get(
                    int(name) if name.isdecimal() and len(name) < 4 else -1
                )
            else:
                value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            raise ApiError(f"The schema has no {reprlib.repr(reference)}; this engine follows local references only.")
        self._spend(_size(value))
        return value


def _word(schema: Json, word: str, kind: type, default: Any) -> Any:
    """Return the value of a word of a schema, or the default. Raises ApiError for a value of another kind."""
    if word not in schema:
        return default
    value = schema[word]
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    accepted = (int, float) if kind is float else (kind,)
    is_huge = isinstance(value, int) and value.bit_length() > _INTEGER_BITS
    if is_huge or not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ApiError(f"The schema is malformed: {word} must not be {reprlib.repr(value)}.")
    return value


def _first(schema: Json, word: str) -> Any:
    """Return the first value of a list that is of the schema's type."""
    values = _word(schema, word, list, [])
    for value in values:
        if word == "type" or _is_of(value, schema.get("type")):
            return value
    raise ApiError(f"Nothing satisfies a schema with this {word}: {reprlib.repr(values)}.")


def _without(schema: Json, word: str) -> Json:
    return {name: value for name, value in schema.items() if name != word}


def _size(schema: Any) -> int:
    """Return what it costs to read a schema: its words, and the lists in it that are walked through."""
    if not isinstance(schema, dict):
        return 1
    parts = [schema[word] for word in ("properties", "required", "allOf", "$defs", "definitions") if word in schema]
    enum = len(json_text(schema["enum"])) if "enum" in schema else 0
    return 1 + len(schema) + sum(len(part) for part in parts if isinstance(part, dict | list)) + enum


def _merged(schemas: list[Any]) -> Any:
    """Return one schema for what satisfies all of these."""
    merged: Json = {}
    for schema in schemas:
        if schema is True:
            continue
        if not isinstance(schema, dict):
            return False
        for word, value in schema.items():
            merged[word] = _both(word, merged[word], value) if word in merged else value
    return merged


def _both(word: str, one: Any, other: Any) -> Any:
    """Return the value of a word for what satisfies both of its values; of a word that bounds nothing, the later."""
    if isinstance(one, dict) and isinstance(other, dict) and word in {"properties", "$defs", "definitions"}:
        shared = {name: {"allOf": [one[name], other[name]]} for name in other if name in one}
        return {**one, **other, **(shared if word == "properties" else {})}
    if isinstance(one, list) and isinstance(other, list):
        if word in {"required", "allOf"}:
            return [*one, *other]
        if word in {"enum", "type"}:
            return [value for value in one[:_COMPARED_COUNT] if value in other[:_COMPARED_COUNT]]
    if word in {"anyOf", "oneOf"} and one != other:
        raise ApiError(f"This engine makes no instance of a schema with two different {word} at once.")
    if word in {"items", "additionalProperties"}:
        return {"allOf": [one, other]}
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    if numbers and word in _LARGER:
        return max(one, other)
    return min(one, other) if numbers and word in _SMALLER else other


def _implied_type(schema: Json) -> str:
    """Return the type that the words of a schema without one are about."""
    for kind, words in _WORDS_OF.items():
        if not words.isdisjoint(schema):
            return kind
    return "string"


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a default is of its schema's type: nothing else makes sure that it is."""
    kinds = kind if isinstance(kind, list) else [kind]
    known = [_TYPES[kind] for kind in kinds if isinstance(kind, str) and kind in _TYPES]
    return not known or any(isinstance(value, one) and (one is bool or type(value) is not bool) for one in known)


def _number(schema: Json, *, is_whole: bool) -> float:
    """Return zero or a number near to it that the words of a schema allow."""
    low, above, high, below, step = (
        _word(schema, word, float, None)
        for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
    )
    if step is None and is_whole:
        step = 1
    edges = [edge for edge in (low, above, high, below) if edge is not None]
    tried = [0, *edges, *(edge + 1 for edge in edges), *(edge - 1 for edge in edges)]
    tried += [(one + other) / 2 for one in edges[:2] for other in edges[-2:]]
    for number in tried if step is None else [multiple for one in tried for multiple in _multiples(one, step)]:
        if (
            number < math.inf
            and (low is None or number >= low)
            and (above is None or number > above)
            and (high is None or number <= high)
            and (below is None or number < below)
            and (not is_whole or number == int(number))
        ):
            return int(number) if is_whole else number
    raise ApiError("This engine found no number that satisfies the schema.")


def _multiples(number: float, step: float) -> list[float]:
    """Return the multiples of a step on both sides of a number; none that floats do not hold."""
    steps = number / step if step > 0 else math.inf
    return [math.floor(steps) * step, math.ceil(steps) * step] if math.isfinite(steps) else []


def formed_text(response_format: Any, structured_outputs: Any = None) -> str | None:
    """Return the text that a format asks for, JSON with single spaces; None if any words will do. Raises ApiError.

    `structured_outputs` is vLLM's own field; `response_format` goes first.
    """
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return "{}"
    if kind == "json_schema":
        described = response_format.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise ApiError("response_format json_schema needs a schema.", param="response_format")
        return _json_of(described["schema"])
    for form, wanted in (structured_outputs or {}).items():
        match form:
            case "json" if wanted is not None:
                return _json_of(_decoded(wanted) if isinstance(wanted, str) else wanted)
            case "json_object" if wanted:
                return "{}"
            case "choice" if wanted is not None:
                if isinstance(wanted, list) and wanted and isinstance(wanted[0], str):
                    return wanted[0]
                raise ApiError("structured_outputs.choice must be texts.", param="structured_outputs")
            case "regex" | "grammar" | "structural_tag" if wanted is not None:
                raise ApiError(
                    f"This engine makes no text by a {form}: give structured_outputs json or choice.",
                    param="structured_outputs",
                )
    return None


def _json_of(schema: Any) -> str:
    return json.dumps(instance_of(schema), ensure_ascii=False)


def _decoded(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"structured_outputs.json is no JSON: {error}", param="structured_outputs") from None


def has_form(body: ChatBody) -> bool:
    """Return whether a chat asks for a form of its text. Raises ApiError."""
    return formed_text(body.response_format, body.structured_outputs) is not None


def scripted_answer(body: ChatBody, tokenizer: WordTokenizer, limit_tokens: int) -> Answer | None:
    """Return the calls or the form that a chat asks for; None if any words will do. Raises ApiError."""
    if not (body.tools or body.tool_choice or body.response_format or body.structured_outputs):
        return None
    tools, choice = [_tool(tool) for tool in body.tools or []], _choice(body.tool_choice)
    calls = planned_calls(tools, choice, done_count=_done_count(body), parallel=bool(body.parallel_tool_calls))
    if not calls and choice != "none":
        calls = _submission(tools, body)
    if calls:  # the tokens are those of the message in the next turn, which finds them cached
        said = [{"name": call.name, "arguments": call.arguments_text} for call in calls]
        token_ids = [*tokenizer.encode(json_text(said)), END_TOKEN]
        if len(token_ids) <= limit_tokens:
            return Answer(token_ids, "tool_calls", [], calls)
        return Answer(token_ids[:limit_tokens], "length", [])
    text = formed_text(body.response_format, body.structured_outputs)
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
        if message.role == "user" and not _is_notice(message.text()):
            break
        count += len(message.tool_calls or [])
    return count


def _submission(tools: list[Tool], body: ChatBody) -> list[Call]:
    """Return the command by which mini-SWE-agent ends, where a prompt names it: words without a call it refuses."""
    for tool in tools:
        properties = tool.schema.get("properties") if isinstance(tool.schema, dict) else None
        if isinstance(properties, dict) and "command" in properties:
            said = (message.text() for message in body.messages if message.role in ("system", "user"))
            return [Call(tool.name, {"command": SUBMISSION})] if any(SUBMISSION in text for text in said) else []
    return []


def _is_notice(text: str) -> bool:
    """Return whether all of a message is in tags: so clients tell what happened beside, as the end of a sub-agent.

    The user gave no new task; an agent that began the plan anew for it would never end.
    """
    at, is_tagged = 0, False
    while tag := _TAG.match(text, at):
        end = f"</{tag[1]}>"
        found = text.find(end, tag.end())
        if found < 0:
            return False
        at, is_tagged = found + len(end), True
    return is_tagged and not text[at:].strip()
