"""`@as_program`: each call of a function is a program of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

from thunderagent.client.program import program

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def as_program(function: Function, /) -> Function: ...


@overload
def as_program(
    *,
    program_id: Callable[..., str] | None = None,
    proxy: str | None = None,
    group: str = "",
    program_class: str = "",
    sandboxes: Sequence[str | Mapping[str, Any]] = (),
    release_limit_s: float = ...,
) -> Callable[[Function], Function]: ...


def as_program(
    function: Callable[..., Any] | None = None,
    /,
    *,
    program_id: Callable[..., str] | None = None,
    **options: Any,
) -> Any:
    """Make each call of a function, `async` or not, a program; inside, `current_program()` is that one.

    `program_id` is called with the arguments of the call and returns its id; None makes one up. The other options are
    those of `program`. Raises `TypeError` for a generator, which would be released before it ran.
    """
    if function is None:
        return functools.partial(_wrap, program_id=program_id, options=options)
    return _wrap(function, program_id=program_id, options=options)


def _wrap(function: Function, *, program_id: Callable[..., str] | None, options: dict[str, Any]) -> Function:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator: use `with program(...)` inside it")

    def program_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return program(None if program_id is None else program_id(*args, **kwargs), **options)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with program_of(args, kwargs):
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        async with program_of(args, kwargs):
            return await function(*args, **kwargs)

    return cast("Function", run_async if inspect.iscoroutinefunction(function) else run)
