"""The base of a configuration slice, and values with several items in one text."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_settings import NoDecode


class Slice(BaseModel):
    """Related options. The first line of the docstring is their heading."""

    model_config = ConfigDict(defer_build=True)  # nobody makes one alone

    @classmethod
    def heading(cls) -> str:
        """Return the heading."""
        return (cls.__doc__ or "").rstrip(".")


def split_list(value: object) -> object:
    """Return the parts of a text with commas, or of a list. Raises `ValueError` for anything else."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError("give a list, or a text with commas between its parts")  # noqa: TRY004 - pydantic's kind
    return tuple(str(part).strip() for part in parts if str(part).strip())


def split_pairs(value: object) -> object:
    """Return the pairs of a text such as `a=1,b=2`. Raises `ValueError` for an invalid part."""
    if isinstance(value, dict):
        return {str(name): str(setting) for name, setting in value.items()}
    parts = split_list(value)
    assert isinstance(parts, tuple)
    pairs = [str(part).partition("=") for part in parts]
    for name, equals, setting in pairs:
        if not (name.strip() and equals and setting.strip()):
            raise ValueError(f"{name + equals + setting!r} is not name=value")
    return {name.strip(): setting.strip() for name, _, setting in pairs}


Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(split_pairs)]
