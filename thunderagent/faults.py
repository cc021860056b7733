"""Pydantic's complaints about external input, in one format wherever it came from."""

from __future__ import annotations

from pydantic import ValidationError


def faults_of(error: ValidationError, whole: str = "body") -> list[str]:
    """Return a line for each fault, with its place but without the value; `whole` is the place of the whole input.

    Our own sentence about the whole is used alone.
    """
    lines = []
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        is_own = each["type"] == "value_error"
        place = ".".join(map(str, each["loc"])) or ("" if is_own else whole)
        words = each["msg"].removeprefix("Value error, ") if is_own else each["msg"]
        lines.append(f"{place}: {words}" if place else words)
    return lines
