"""What the body of a request may hold: one rule for the proxy, the simulated engines and Nova.

Engines read bodies with pydantic, which takes more than the type that a field names: `"stream": 1` and `"stream":
"yes"` are flags, `"max_tokens": "16"` is a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

_FLAGS: Final[dict[object, bool]] = {
    **dict.fromkeys((1, "1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys((0, "0", "false", "f", "no", "n", "off"), False),
}
_Body = TypeVar("_Body", bound=msgspec.Struct)


def flag_of(value: object) -> bool | None:
    """Return a field as engines read it: pydantic takes numbers and words for booleans; None for anything else."""
    if isinstance(value, str):
        return _FLAGS.get(value.lower())
    return _FLAGS.get(value) if isinstance(value, bool | int | float) else None


def decode_body(data: bytes, kind: type[_Body]) -> _Body:
    """Decode a body, whose flags and numbers may be written as pydantic takes them.

    Cost: of one that is written as its types are, one pass. Raises `msgspec.DecodeError`, `RecursionError`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        return msgspec.convert(_with_flags(msgspec.json.decode(data), kind), kind, strict=False)


def _with_flags(value: Any, kind: type[msgspec.Struct]) -> Any:
    """Return a struct's JSON with all that is a flag made one."""
    if not isinstance(value, dict):
        return value
    types = get_type_hints(kind)
    found = dict(value)
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if name not in found:
            continue
        for each in _kinds_of(types[field.name]):
            if each is bool and (flag := flag_of(found[name])) is not None:
                found[name] = flag
            elif isinstance(each, type) and issubclass(each, msgspec.Struct):
                found[name] = _with_flags(found[name], each)
    return found


def _kinds_of(said: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type."""
    yield from get_args(said) or (said,)
