"""Bodies: counted as they arrive; those of our own API parsed into a model, or refused with the cause; and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Final, Protocol, TypeVar

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from thunderagent.errors import BodyTimeoutError, BodyTooLargeError, ExpectationError, RequestError
from thunderagent.faults import faults_of, fields_at
from thunderagent.proxy.gate.held import KeptBody
from thunderagent.proxy.reading.header_words import check_model, check_name

Model = TypeVar("Model", bound=BaseModel)


def _whole_as_text(value: object) -> object:
    return str(value) if type(value) is int else value


Text = Annotated[str, BeforeValidator(_whole_as_text)]
"""Text in a body; a whole number is taken for it, as in the body of a turn, but no other number."""

Name = Annotated[Text, AfterValidator(check_name)]
"""A name in a body, or none: what a header may not say, a body may not, either."""

ModelName = Annotated[str, Field(max_length=512), AfterValidator(check_model)]
"""A model's name in a body, or none."""


class Report(BaseModel):
    """Base of all reports."""

    model_config = ConfigDict(frozen=True)


MISSPELT_COUNT: Final = 16
MISSPELT_CHARS: Final = 64
"""How many further keys are compared with ours, and how long ones: comparing takes time."""


NOTHING_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType({})
LIMITS_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        ("limits", "program_limits", "max_turns", "max_age_s", "deadline_s"),
        "no body sets limits of a program; send the header X-Program-Limits with its turns, "
        "such as X-Program-Limits: max_turns=50, deadline_s=600",
    )
)
"""Keys of bodies that a header says, and what to tell who sends them."""


def read_model(model: type[Model], body: bytes, elsewhere: Mapping[str, str] = NOTHING_ELSEWHERE) -> Model:
    """Return the body as a model. Raises `RequestError` with the first error.

    A model may ignore keys that it does not know, as other programs send them. One that is nearly a key that is left
    out is an error even then: what it should say would be lost in silence. So is one that is said `elsewhere`, which
    maps it to where.
    """
    try:
        read = model.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(faults_of(error, known=partial(fields_at, model))[0]) from error
    if model.model_config.get("extra") == "ignore":
        _check_spelling(read, body, elsewhere)
    return read


def _check_spelling(read: BaseModel, body: bytes, elsewhere: Mapping[str, str]) -> None:
    try:
        said = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):  # what is no value of JSON, such as NaN: the model accepted the others
        return
    keys = said.keys()
    fields, known = _known_keys.get(type(read)) or _keys_of(type(read))
    if keys <= known:
        return
    for key in keys & elsewhere.keys():
        if bytes(said[key]) != b"null":
            raise RequestError(f"{key}: {elsewhere[key]}")
    left_out = [name for names in fields if not any(name in keys for name in names) for name in names]
    further = [key for key in keys if key not in known and len(key) <= MISSPELT_CHARS]
    for key in further[:MISSPELT_COUNT]:
        for name in left_out:
            if _is_slip(key, name):
                raise RequestError(f"{key}: there is no such key; did you mean {name}?")


def _is_slip(key: str, name: str) -> bool:
    """Return whether a key is a name with one character more, less, or other, or two swapped; no singular or plural."""
    start = _alike_count(key, name)
    key, name = key[start:], name[start:]
    end = _alike_count(key[::-1], name[::-1])
    key, name = key[: len(key) - end], name[: len(name) - end]
    if {key, name} == {"", "s"} and not end:
        return False
    return max(len(key), len(name)) <= 1 or (len(key) == 2 and key == name[::-1])


def _alike_count(one: str, other: str) -> int:
    """Return how many characters both begin with."""
    differs = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


_known_keys: dict[type[BaseModel], tuple[list[list[str]], frozenset[str]]] = {}


def _keys_of(model: type[BaseModel]) -> tuple[list[list[str]], frozenset[str]]:
    """Return all names of each field, and those of all fields together; call it once for each model."""
    aliases = {name: field.validation_alias for name, field in model.model_fields.items()}
    fields = [
        [str(each) for each in alias.choices] if isinstance(alias, AliasChoices) else [name]
        for name, alias in aliases.items()
    ]
    _known_keys[model] = fields, frozenset(chain.from_iterable(fields))
    return _known_keys[model]


def report_response(report: BaseModel, *, status: int = 200, without_unset: bool = False) -> web.Response:
    """Return a report as an answer; `without_unset` leaves out unset fields with a default."""
    body = report.model_dump_json(exclude_unset=without_unset).encode()
    return web.Response(status=status, body=body, content_type="application/json")


class Visitor(Protocol):
    """The parts of a request that are checked, whichever server read it."""

    @property
    def method(self) -> str:
        """The method."""

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The headers."""

    @property
    def host(self) -> str:
        """The host name in the request."""

    @property
    def remote(self) -> str | None:
        """The address that it came from."""


def too_large(size_bytes: int, max_bytes: int) -> str:
    """Return why a body is refused."""
    return f"the body has {size_bytes} bytes, the limit of this path is {max_bytes}"


async def come(
    next_piece: Callable[[], Awaitable[bytes]],
    headers: CIMultiDictProxy[str],
    length_bytes: int,
    kept: KeptBody,
    limit_s: float,
    max_bytes: int,
    invite: Callable[[], None] | None,
) -> bytes:
    """Receive a body, after an invitation if its client waits for one.

    It is counted as it arrives: merely announcing a large one takes nothing from others.
    """
    if length_bytes > max_bytes:
        raise BodyTooLargeError(too_large(length_bytes, max_bytes))
    pieces, size_bytes = [], 0
    kept.check(length_bytes)
    if "Expect" in headers and invite is not None:
        if headers["Expect"].lower() != "100-continue":
            raise ExpectationError("this server knows no Expect but 100-continue")
        invite()
    try:
        async with asyncio.timeout(limit_s):
            while piece := await next_piece():
                pieces.append(piece)
                size_bytes += len(piece)
                if size_bytes > max_bytes:
                    raise BodyTooLargeError(f"the body is larger than the limit of this path, {max_bytes} bytes")
                kept.grow(len(piece))
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {limit_s:g} s") from error
    return b"".join(pieces)
