"""Bodies of our own API: of requests, read into a model or refused with what is wrong, and of answers, from one."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from thunderagent.errors import RequestError
from thunderagent.faults import faults_of

Model = TypeVar("Model", bound=BaseModel)


class Report(BaseModel):
    """Base of all reports."""

    model_config = ConfigDict(frozen=True)


def read_model(model: type[Model], body: bytes) -> Model:
    """Return the body as a model. Raises `RequestError` with the first thing that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(faults_of(error)[0]) from error


def report_response(report: BaseModel, *, status: int = 200, without_unset: bool = False) -> web.Response:
    """Return the answer that a report is; `without_unset` leaves out what was not said and has a default."""
    body = report.model_dump_json(exclude_unset=without_unset).encode()
    return web.Response(status=status, body=body, content_type="application/json")
