"""Whether a parameter of a class accepts the type in its declaration."""

from __future__ import annotations

import ast
import collections.abc
import inspect
import types
import typing
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, get_args, get_origin

UNIONS = (typing.Union, types.UnionType)
NAMES = (ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.expr_context)
NODES = (*NAMES, ast.Tuple, ast.List, ast.Constant, ast.BinOp, ast.BitOr)
"""Syntax allowed in a type. Nothing else of a declaration is ever evaluated."""


def takes(wanted: Any, declared: str, names: Mapping[str, Any]) -> bool:
    """Return whether a parameter annotated `wanted` accepts a value of a declared type.

    `names` are those of the class's module. A type that cannot be looked up, because only type checkers import it, is
    compared by its text.
    """
    if wanted is inspect.Parameter.empty or declared == "Any":
        return True
    text = wanted if isinstance(wanted, str) else inspect.formatannotation(wanted)
    if text == declared:
        return True
    try:
        given = look_up(declared, names)
        return _takes(look_up(wanted, names) if isinstance(wanted, str) else wanted, given)
    except (LookupError, SyntaxError, TypeError, AttributeError):
        return _tidy(text) == _tidy(declared)


def look_up(text: str, names: Mapping[str, Any]) -> Any:
    """Return the type of a text. Raises `LookupError`, `SyntaxError`, `TypeError`, `AttributeError`."""
    tree = ast.parse(text, mode="eval")
    if not all(isinstance(node, NODES) for node in ast.walk(tree)):
        raise SyntaxError(f"{text!r} is not a type")
    try:
        known = {**vars(collections.abc), **vars(typing), **names}
        return eval(compile(tree, "declaration", "eval"), known)  # noqa: S307 - names and subscripts alone
    except NameError as error:
        raise LookupError(str(error)) from error


def _takes(wanted: Any, given: Any) -> bool:
    if wanted in (Any, object) or given is Any or wanted == given:
        return True
    if get_origin(given) in UNIONS:
        return all(_takes(wanted, each) for each in get_args(given))
    if get_origin(wanted) in UNIONS:
        return any(_takes(each, given) for each in get_args(wanted))
    wanted_kind, given_kind = get_origin(wanted) or wanted, get_origin(given) or given
    if not isinstance(wanted_kind, type) or not isinstance(given_kind, type):
        return True  # a literal, a type variable, a new type: whoever checks types may say
    try:
        is_right = issubclass(given_kind, wanted_kind) or (given_kind, wanted_kind) == (int, float)
    except TypeError:  # a protocol, a typed dictionary
        return True
    if not is_right:
        return False
    pairs = zip_longest(get_args(wanted), get_args(given), fillvalue=Any)
    return all(_takes(one, other) for one, other in pairs)


def _tidy(text: str) -> str:
    return text.replace(" ", "").replace("typing.", "")
