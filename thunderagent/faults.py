"""Pydantic's complaints about external input, in one format wherever it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from pydantic import ValidationError


def faults_of(
    error: ValidationError,
    whole: str = "body",
    place_of: Callable[[tuple[int | str, ...]], str] = lambda loc: ".".join(map(str, loc)),
    known: Callable[[tuple[int | str, ...]], Iterable[str]] = lambda _: (),
) -> list[str]:
    """Return a line for each fault, with its place but without the value; `whole` is the place of the whole input.

    Our own sentence about the whole is used alone. `place_of` says a place in words, `known` has the keys that may
    stand there: the one nearest to a wrong key is named.
    """
    lines = []
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        is_own = each["type"] == "value_error"
        place = place_of(each["loc"]) or ("" if is_own else whole)
        words = each["msg"].removeprefix("Value error, ") if is_own else each["msg"]
        if each["type"] == "extra_forbidden" and (keys := list(known(each["loc"]))):
            words = f"there is no such key{nearest_hint(str(each['loc'][-1]), keys)}"
        lines.append(f"{place}: {words}" if place else words)
    return lines


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known word that is nearest; empty if none is near."""
    nearest = get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
