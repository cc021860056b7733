"""Pydantic's complaints about external input, in one format wherever it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def faults_of(
    error: ValidationError,
    whole: str = "body",
    place_of: Callable[[tuple[int | str, ...]], str] = lambda loc: ".".join(map(str, loc)),
    known: Callable[[tuple[int | str, ...]], Iterable[str]] = lambda _: (),
) -> list[str]:
    """Return a line for each fault, with its place but without the value; `whole` is the place of the whole input.

    Our own sentence about the whole is used alone. `place_of` says a place in words, `known` has the keys that may
    stand there: the one nearest to a wrong key is named, and the nearest of several words to a wrong word.
    """
    lines = []
    for each in error.errors(include_url=False):
        is_own = each["type"] == "value_error"
        place = place_of(each["loc"]) or ("" if is_own else whole)
        words = each["msg"].removeprefix("Value error, ") if is_own else each["msg"]
        if each["type"] == "extra_forbidden" and (keys := list(known(each["loc"]))):
            words = f"there is no such key{nearest_hint(str(each['loc'][-1]), keys)}"
        elif each["type"] == "literal_error":
            words += nearest_hint(str(each["input"]), re.findall(r"'([^']*)'", each["ctx"]["expected"]))
        lines.append(f"{place}: {words}" if place else words)
    return lines


def fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> Iterable[str]:
    """Return the keys that a model knows where `loc` ends; empty if no model stands there."""
    for key in loc[:-1]:
        if isinstance(key, str):
            field = model.model_fields.get(key)
            inner = next(_models_in(field.annotation), None) if field is not None else None
            if inner is None:
                return ()
            model = inner
    return model.model_fields


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)


def nearest_hint(word: str, known: Iterable[str], *, least_ratio: float = 0.6) -> str:
    """Return "; did you mean X?" for the known word that is nearest; empty if none is as near as `least_ratio`."""
    nearest = get_close_matches(word, list(known), n=1, cutoff=least_ratio)
    return f"; did you mean {nearest[0]}?" if nearest else ""
